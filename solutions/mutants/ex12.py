"""Known mistakes of exercises 12."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex12_1_m1_blocks_dealt_in_turn",
        "12.1",
        old="    for duration in durations:\n        free[free.index(min(free))] += duration",
        new="    for turn, duration in enumerate(durations):\n        free[turn % num_sms] += duration",
        diagnosis="blocks are dealt to the SMs in turn: a block goes to the SM that is free first",
        killed_by="test_ex12_1_the_free_sm_takes_the_next_block",
    ),
    Mutant(
        "ex12_1_m2_waves_of_equal_length",
        "12.1",
        old="    end = max(free)\n",
        new="    end = -(-len(durations) // num_sms) * max(durations, default=0)\n",
        diagnosis="every wave is taken to last as long as the longest block: blocks of different "
        "length do not start together",
        killed_by="test_ex12_1_the_free_sm_takes_the_next_block",
    ),
    Mutant(
        "ex12_1_m3_no_tail",
        "12.1",
        old="    end = max(free)\n",
        new="    end = sum(durations) / num_sms\n",
        diagnosis="work is divided by SMs as if it were sand: the last wave is not full, and the "
        "kernel ends with its last block",
        killed_by="test_ex12_1_equal_blocks_run_in_waves",
    ),
    Mutant(
        "ex12_1_m4_longest_first",
        "12.1",
        old="    for duration in durations:\n        free[",
        new="    for duration in sorted(durations, reverse=True):\n        free[",
        diagnosis="blocks are sorted first: they start in the order in which they come",
        killed_by="test_ex12_1_the_free_sm_takes_the_next_block",
    ),
    Mutant(
        "ex12_1_m5_busy_of_the_sms_that_worked",
        "12.1",
        old="sum(durations) / (num_sms * end)",
        new="sum(durations) / (min(num_sms, len(durations)) * end)",
        diagnosis="SMs that got no block do not count: they are idle, and that is the loss",
        killed_by="test_ex12_1_equal_blocks_run_in_waves",
    ),
    Mutant(
        "ex12_1_m6_nothing_is_not_caught",
        "12.1",
        old=" if durations else 1.0",
        new="",
        diagnosis="without any block the end is 0, and 0 is divided by: all of no time was used, 1.0",
        killed_by="test_ex12_1_nothing_to_do_and_no_sm",
    ),
    Mutant(
        "ex12_1_m7_rest_is_dropped",
        "12.1",
        old="            if tokens % part:\n",
        new="            if tokens < part:\n",
        diagnosis="the rest of a context, what is left behind its full parts, is a block too",
        killed_by="test_ex12_1_the_best_part_depends_on_the_batch",
    ),
    Mutant(
        "ex12_1_m8_overhead_forgotten",
        "12.1",
        old="[part + overhead]",
        new="[part]",
        diagnosis="every block pays the overhead: without it the smallest part always looks best",
        killed_by="test_ex12_1_the_best_part_depends_on_the_batch",
    ),
    Mutant(
        "ex12_1_m9_smallest_of_equals",
        "12.1",
        old="(end(part), -part)",
        new="(end(part), part)",
        diagnosis="among equally good sizes the largest is wanted: it has the fewest blocks",
        killed_by="test_ex12_1_the_best_part_depends_on_the_batch",
    ),
    Mutant(
        "ex12_1_m10_nothing_to_do_without_an_sm",
        "12.1",
        old="    if num_sms < 1:\n",
        new="    if not durations:\n        return 0, 1.0\n    if num_sms < 1:\n",
        diagnosis="without any block `num_sms` is not looked at: below 1 it is an error, whatever there is to do",
        killed_by="test_ex12_1_nothing_to_do_and_no_sm",
    ),
    Mutant(
        "ex12_1_m11_rest_first",
        "12.1",
        old="            durations += [part + overhead] * (tokens // part)\n"
        "            if tokens % part:\n"
        "                durations.append(tokens % part + overhead)\n",
        new="            if tokens % part:\n"
        "                durations.append(tokens % part + overhead)\n"
        "            durations += [part + overhead] * (tokens // part)\n",
        diagnosis="the rest of a context comes before its full parts: it stands behind them, and the order counts",
        killed_by="test_ex12_1_the_best_part_depends_on_the_batch",
    ),
    Mutant(
        "ex12_1_m12_cut_evenly",
        "12.1",
        old="            durations += [part + overhead] * (tokens // part)\n"
        "            if tokens % part:\n"
        "                durations.append(tokens % part + overhead)\n",
        new="            blocks = -(-tokens // part)\n"
        "            durations += [tokens / blocks + overhead] * blocks\n",
        diagnosis="a context is cut into equal blocks: as many of `part` tokens as fit are wanted, and one with the rest",
        killed_by="test_ex12_1_the_best_part_depends_on_the_batch",
    ),
    Mutant(
        "ex12_2_m1_barrier_between_operations",
        "12.2",
        old="        free = [sm for sm in range(num_sms) if sm not in running]\n",
        new="        free = list(range(num_sms)) if not running else []\n",
        diagnosis="nothing starts before everything that runs has ended: that is a barrier, and an SM "
        "idles while something is ready",
        killed_by="test_ex12_2_no_barrier_between_operations",
    ),
    Mutant(
        "ex12_2_m2_needs_ignored",
        "12.2",
        old="        ready = [i for i in waiting if ended.issuperset(needs[i])]\n"
        "        ready.sort(key=lambda i: (-way[i], i))\n",
        new="        ready = sorted(waiting)\n",
        diagnosis="instructions are queued by number, whatever they need: an SM then waits for "
        "something that stands behind it in its own queue",
        killed_by="test_ex12_2_everything_once_and_nothing_hangs",
    ),
    Mutant(
        "ex12_2_m3_one_need_is_enough",
        "12.2",
        old="if ended.issuperset(needs[i])]",
        new="if not needs[i] or ended.intersection(needs[i])]",
        diagnosis="an instruction is taken for ready when one of those it needs has ended: all must",
        killed_by="test_ex12_2_ends_when_the_rule_says",
    ),
    Mutant(
        "ex12_2_m4_shortest_way_first",
        "12.2",
        old="ready.sort(key=lambda i: (-way[i], i))",
        new="ready.sort(key=lambda i: (way[i], i))",
        diagnosis="the shortest way goes first: the long chain starts last, and everybody waits for it",
        killed_by="test_ex12_2_the_longest_way_goes_first",
    ),
    Mutant(
        "ex12_2_m5_by_number",
        "12.2",
        old="ready.sort(key=lambda i: (-way[i], i))",
        new="ready.sort()",
        diagnosis="what is ready goes by number, whatever is behind it: take the longest way",
        killed_by="test_ex12_2_the_longest_way_goes_first",
    ),
    Mutant(
        "ex12_2_m6_way_counts_instructions",
        "12.2",
        old="way[i] = costs[i] + max(",
        new="way[i] = 1 + max(",
        diagnosis="the way counts instructions: it is the sum of their costs",
        killed_by="test_ex12_2_ends_when_the_rule_says",
    ),
    Mutant(
        "ex12_2_m7_way_without_what_follows",
        "12.2",
        old="way[i] = costs[i] + max((way[user] for user in users[i]), default=0)",
        new="way[i] = costs[i]",
        diagnosis="the way is the instruction's own cost: what needs it, and what needs that, counts",
        killed_by="test_ex12_2_the_longest_way_goes_first",
    ),
    Mutant(
        "ex12_2_m8_circle_unnoticed",
        "12.2",
        old="    if len(order) < count:\n",
        new="    if False:\n",
        diagnosis="a circle is not noticed: what is in it, and what needs it, is in no queue",
        killed_by="test_ex12_2_a_circle_has_no_schedule",
    ),
    Mutant(
        "ex12_2_m9_one_sm_does_it_all",
        "12.2",
        old="        free = [sm for sm in range(num_sms) if sm not in running]\n",
        new="        free = [0]\n        running.clear()\n",
        diagnosis="one SM has everything: safe, and the others idle",
        killed_by="test_ex12_2_ends_when_the_rule_says",
    ),
    Mutant(
        "ex12_2_m10_next_before_all_have_ended",
        "12.2",
        old="            if end == now:\n                del running[sm]\n                ended.add(i)\n",
        new="            if end == now:\n                del running[sm]\n                ended.add(i)\n"
        "                break\n",
        diagnosis="several instructions end at one moment, and the first is followed up before the "
        "others have ended: something with a shorter way gets the SM",
        killed_by="test_ex12_2_ends_when_the_rule_says",
    ),
    Mutant(
        "ex12_2_m11_highest_number_of_equals",
        "12.2",
        old="ready.sort(key=lambda i: (-way[i], i))",
        new="ready.sort(key=lambda i: (-way[i], -i))",
        diagnosis="of instructions with equal ways the highest number goes first: the lowest one does, even where "
        "another choice would end earlier",
        killed_by="test_ex12_2_ends_when_the_rule_says",
    ),
    Mutant(
        "ex12_3_m1_off_by_one",
        "12.3",
        old='targets = {("written", b): written[b] for',
        new='targets = {("written", b): written[b] + 1 for',
        diagnosis="a target is one too high: nobody ever adds that one, and the SM waits for ever",
        killed_by="test_ex12_3_waits_for_earlier_writers",
    ),
    Mutant(
        "ex12_3_m2_one_writer_is_enough",
        "12.3",
        old='targets = {("written", b): written[b] for',
        new='targets = {("written", b): 1 for',
        diagnosis="the target is 1 whoever wrote before: with two earlier writers it is not known "
        "which of them has ended",
        killed_by="test_ex12_3_waits_for_earlier_writers",
    ),
    Mutant(
        "ex12_3_m3_reads_do_not_wait",
        "12.3",
        old="for b in [*reads, *writes] if b in written]",
        new="for b in writes if b in written]",
        diagnosis="a read does not wait for the write: it finds what lay there before",
        killed_by="test_ex12_3_waits_for_earlier_writers",
    ),
    Mutant(
        "ex12_3_m4_two_writers_race",
        "12.3",
        old="for b in [*reads, *writes] if b in written]",
        new="for b in reads if b in written]",
        diagnosis="of two writers the later does not wait for the earlier: which value stays depends "
        "on timing",
        killed_by="test_ex12_3_waits_for_earlier_writers",
    ),
    Mutant(
        "ex12_3_m5_overwrites_what_is_still_read",
        "12.3",
        old='        targets |= {("read", b): read[b] for b in writes if b in read}\n',
        new="",
        diagnosis="a writer does not wait for earlier readers: they may find its value instead of the "
        "old one",
        killed_by="test_ex12_3_a_writer_waits_for_earlier_readers",
    ),
    Mutant(
        "ex12_3_m6_waits_for_itself",
        "12.3",
        old="        found.append(targets)\n",
        new='        targets |= {("read", b): read.get(b, 0) + 1 for b in writes if b in reads}\n'
        "        found.append(targets)\n",
        diagnosis="an instruction that reads and writes a buffer waits for its own read: for ever",
        killed_by="test_ex12_3_a_writer_waits_for_earlier_readers",
    ),
    Mutant(
        "ex12_3_m7_barrier",
        "12.3",
        old="for b in [*reads, *writes] if b in written]",
        new="for b in written]",
        diagnosis="everybody waits for all that was written before: that is a barrier, and nothing is "
        "gained over launches",
        killed_by="test_ex12_3_waits_for_earlier_writers",
    ),
    Mutant(
        "ex12_3_m8_stuck_names_the_heads",
        "12.3",
        old="left = [queue[done:] for",
        new="left = [queue[done : done + 1] for",
        diagnosis="only the first of each stuck queue is named: what stands behind it never starts "
        "either",
        killed_by="test_ex12_3_finds_who_never_starts",
    ),
    Mutant(
        "ex12_3_m9_stuck_after_one_round",
        "12.3",
        old="                moved = True\n",
        new="                moved = False\n",
        diagnosis="every SM gets one turn: go round as long as somebody can go on",
        killed_by="test_ex12_3_finds_who_never_starts",
    ),
    Mutant(
        "ex12_3_m10_more_than_the_target",
        "12.3",
        old="if all(counters.get(c, 0) >= target for",
        new="if all(counters.get(c, 0) > target for",
        diagnosis="a counter that has reached its target is enough: at least, not more than",
        killed_by="test_ex12_3_finds_who_never_starts",
    ),
    Mutant(
        "ex12_3_m11_reads_are_not_signalled",
        "12.3",
        old='signals = [("read", b) for b in reads]',
        new="signals = []",
        diagnosis="an instruction that has ended adds to the counters of what it read, too",
        killed_by="test_ex12_3_finds_who_never_starts",
    ),
    Mutant(
        "ex12_3_m12_any_counter_will_do",
        "12.3",
        old="            if all(counters.get(c, 0)",
        new="            if not targets[i] or any(counters.get(c, 0)",
        diagnosis="one counter that has reached its target is not enough: all of them must",
        killed_by="test_ex12_3_finds_a_target_that_is_never_reached",
    ),
    Mutant(
        "ex12_4_m1_eps_outside_the_root",
        "12.4",
        old="torch.sqrt(squares / x.columns + eps)[:, None]",
        new="(torch.sqrt(squares / x.columns) + eps)[:, None]",
        diagnosis="eps is added to the root: it belongs under it, beside the mean of the squares",
        killed_by="test_ex12_4_small_rows_and_a_row_of_zeros",
    ),
    Mutant(
        "ex12_4_m2_sum_of_squares",
        "12.4",
        old="squares / x.columns + eps",
        new="squares + eps",
        diagnosis="the sum of the squares is taken for their mean: divide by D",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
    Mutant(
        "ex12_4_m3_mean_over_the_width",
        "12.4",
        old="squares / x.columns + eps",
        new="squares / width + eps",
        diagnosis="the mean is taken over the width of a piece: it is over all D columns",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
    Mutant(
        "ex12_4_m4_gain_forgotten",
        "12.4",
        old="scaled = part * gain[start:stop].float()",
        new="scaled = part",
        diagnosis="the gains are missing",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
    Mutant(
        "ex12_4_m5_gain_in_the_mean",
        "12.4",
        old="squares = squares + part.pow(2).sum(dim=1)",
        new="squares = squares + (part * gain[start:stop].float()).pow(2).sum(dim=1)",
        diagnosis="the mean is of x² before the gains",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
    Mutant(
        "ex12_4_m6_normed_piece_by_piece",
        "12.4",
        old="        products = products + scaled @ weight.load(start, stop).float().T\n"
        "    return products / torch.sqrt(squares / x.columns + eps)[:, None]",
        new="        root = torch.sqrt(squares / stop + eps)[:, None]\n"
        "        products = products + scaled / root @ weight.load(start, stop).float().T\n"
        "    return products",
        diagnosis="each piece is divided by the root as far as it is known then: divide at the end",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
    Mutant(
        "ex12_4_m7_last_piece_dropped",
        "12.4",
        old="range(0, x.columns, width)",
        new="range(0, max(x.columns - width, 0) + 1, width)",
        diagnosis="the last, narrower piece is left out",
        killed_by="test_ex12_4_columns_that_the_width_does_not_divide",
    ),
    Mutant(
        "ex12_4_m8_two_passes",
        "12.4",
        old="    squares, products = 0.0, 0.0\n",
        new="    squares, products = 0.0, 0.0\n    for start in range(0, x.columns, width):\n"
        "        x.load(start, min(start + width, x.columns))\n",
        diagnosis="x is loaded twice, once for the mean and once for the product: one pass is enough",
        killed_by="test_ex12_4_each_column_is_loaded_once",
    ),
    Mutant(
        "ex12_4_m9_all_at_once",
        "12.4",
        old="    squares, products = 0.0, 0.0\n",
        new="    squares, products, width = 0.0, 0.0, x.columns\n",
        diagnosis="the whole matrix is loaded at once: at most `width` columns may be",
        killed_by="test_ex12_4_each_column_is_loaded_once",
    ),
    Mutant(
        "ex12_4_m10_sums_in_bfloat16",
        "12.4",
        old="        part = x.load(start, stop).float()\n",
        new="        part = x.load(start, stop)\n        gain = gain.to(part.dtype)\n",
        diagnosis="squares are summed in the dtype of x: in bfloat16 a sum of hundreds of numbers has "
        "two digits",
        killed_by="test_ex12_4_bfloat16_is_summed_in_float32",
    ),
    Mutant(
        "ex12_4_m12_both_matrices_held",
        "12.4",
        old="    squares, products = 0.0, 0.0\n    for start in range(0, x.columns, width):\n"
        "        stop = min(start + width, x.columns)\n"
        "        part = x.load(start, stop).float()\n"
        "        squares = squares + part.pow(2).sum(dim=1)\n"
        "        scaled = part * gain[start:stop].float()\n"
        "        products = products + scaled @ weight.load(start, stop).float().T\n"
        "    return products / torch.sqrt(squares / x.columns + eps)[:, None]",
        new="    D = x.columns\n"
        "    pieces = [(a, min(a + width, D)) for a in range(0, D, width)]\n"
        "    xs = torch.cat([x.load(a, b) for a, b in pieces], 1).float()\n"
        "    ws = torch.cat([weight.load(a, b) for a, b in pieces], 1).float()\n"
        "    root = torch.sqrt(xs.pow(2).mean(1, keepdim=True) + eps)\n"
        "    return (gain.float() * xs / root) @ ws.T",
        diagnosis="all pieces are put together before anything is computed: of those loaded before only NaN is left",
        killed_by="test_ex12_4_each_column_is_loaded_once",
    ),
    Mutant(
        "ex12_4_m13_copies_held",
        "12.4",
        old="    squares, products = 0.0, 0.0\n    for start in range(0, x.columns, width):\n"
        "        stop = min(start + width, x.columns)\n"
        "        part = x.load(start, stop).float()\n"
        "        squares = squares + part.pow(2).sum(dim=1)\n"
        "        scaled = part * gain[start:stop].float()\n"
        "        products = products + scaled @ weight.load(start, stop).float().T\n"
        "    return products / torch.sqrt(squares / x.columns + eps)[:, None]",
        new="    D = x.columns\n"
        "    pieces = [(a, min(a + width, D)) for a in range(0, D, width)]\n"
        "    xs = torch.cat([x.load(a, b).clone() for a, b in pieces], 1).float()\n"
        "    root = torch.sqrt(xs.pow(2).mean(1, keepdim=True) + eps)\n"
        "    h = gain.float() * xs / root\n"
        "    return sum(h[:, a:b] @ weight.load(a, b).float().T for a, b in pieces)",
        diagnosis="x is copied whole before the first weight is loaded: that is two passes, and a matrix you cannot hold",
        killed_by="test_ex12_4_each_column_is_loaded_once",
    ),
    Mutant(
        "ex12_4_m11_gain_of_the_first_columns",
        "12.4",
        old="scaled = part * gain[start:stop].float()",
        new="scaled = part * gain[: stop - start].float()",
        diagnosis="every piece is multiplied by the first gains: take those of its own columns",
        killed_by="test_ex12_4_equals_norm_then_product",
    ),
]

_WAY = "schedule: `way[i] = costs[i] + max((way[user] for user in users[i]), default=0)` → "
_ORIGIN = "only differences of times count, wherever they begin"
_EVERY = "every chain ends once: all ways grow alike, and their order stays"
_NO_SM = "without an SM there is no largest time, and max raises ValueError, too"
SURVIVORS = {
    "tail: `if num_sms < 1:` → `if num_sms < 0:`": _NO_SM,
    'tail: `raise ValueError(f"num_sms must be at least 1, got {num_sms}")` → `pass`': _NO_SM,
    _WAY
    + "`way[i] = costs[i] + max((way[user] for user in users[i]), default=1)`": _EVERY,
    _WAY
    + "`way[i] = costs[i] + max((way[user] for user in users[i]), default=(-1))`": _EVERY,
    "schedule: `waiting, ended, running = set(order), set(), {}` → "
    "`waiting, ended, running = order, set(), {}`": "a list of what waits does as well as a set",
    "schedule: `now = 0` → `now = 1`": _ORIGIN,
    "schedule: `now = 0` → `now = (-1)`": _ORIGIN,
    "stuck: `if all(counters.get(c, 0) >= target for c, target in targets[i].items()):` → "
    "`if all(counters.get(c, (-1)) >= target for c, target in targets[i].items()):`": (
        "a target is at least 1, which neither 0 nor −1 reaches"
    ),
    "norm_product: `for start in range(0, x.columns, width):` → "
    "`for start in range(0, x.columns + 1, width):`": (
        "where the width divides D one more piece comes, without a column"
    ),
}
