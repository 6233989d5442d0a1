"""Known mistakes of exercises 14."""

from __future__ import annotations

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex14_1_m1_linear_space",
        "14.1",
        old="""    exponent, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(intercept)), float(exponent)""",
        new="""    grid = np.linspace(-1, 1.5, 2501)
    x, y = np.asarray(x), np.asarray(y)
    fits = [((x**p @ y) / (x**p @ x**p), p) for p in grid]
    best = min(fits, key=lambda fit: ((fit[0] * x ** fit[1] - y) ** 2).sum())
    return float(best[0]), float(best[1])""",
        diagnosis="the law is fitted without logarithms: the largest values decide alone",
        killed_by="test_ex14_1_a_power_law_is_a_line_in_logarithms",
    ),
    Mutant(
        "ex14_1_m2_intercept_is_a_logarithm",
        "14.1",
        old="return float(np.exp(intercept)), float(exponent)",
        new="return float(intercept), float(exponent)",
        diagnosis="the intercept is the logarithm of the coefficient: exp is missing",
        killed_by="test_ex14_1_a_power_law_is_a_line_in_logarithms",
    ),
    Mutant(
        "ex14_1_m3_axes_swapped",
        "14.1",
        old="np.polyfit(np.log(x), np.log(y), 1)",
        new="np.polyfit(np.log(y), np.log(x), 1)",
        diagnosis="x and y are swapped: the slope is 1 / exponent",
        killed_by="test_ex14_1_a_power_law_is_a_line_in_logarithms",
    ),
    Mutant(
        "ex14_1_m4_no_floor",
        "14.1",
        old="design = np.stack([np.ones_like(T), np.exp(-rate * T)], axis=1)",
        new="design = np.stack([np.zeros_like(T), np.exp(-rate * T)], axis=1)",
        diagnosis="the floor is left out: the loss is taken to fall to 0",
        killed_by="test_ex14_1_a_saturation_has_the_best_rate_of_the_list",
    ),
    Mutant(
        "ex14_1_m5_power_instead_of_exponential",
        "14.1",
        old="design = np.stack([np.ones_like(T), np.exp(-rate * T)], axis=1)",
        new="design = np.stack([np.ones_like(T), T**-rate], axis=1)",
        diagnosis="a power of the depth is fitted, not an exponential",
        killed_by="test_ex14_1_a_saturation_has_the_best_rate_of_the_list",
    ),
    Mutant(
        "ex14_1_m6_last_rate",
        "14.1",
        old="if best is None or error < best[0]:",
        new="if True:",
        diagnosis="the last rate of the list is taken, not the best one",
        killed_by="test_ex14_1_a_saturation_has_the_best_rate_of_the_list",
    ),
    Mutant(
        "ex14_1_m7_leaks_the_hidden_points",
        "14.1",
        old="inside = [(depth, loss) for depth, loss in points if depth <= seen]",
        new="inside = points",
        diagnosis="the fit sees the hidden points: it was fitted to all of them",
        killed_by="test_ex14_1_the_hidden_points_are_hidden_from_the_fit",
    ),
    Mutant(
        "ex14_1_m8_error_where_it_was_fitted",
        "14.1",
        old="abs(floor + scale * math.exp(-rate * depth) - loss) for depth, loss in hidden",
        new="abs(floor + scale * math.exp(-rate * depth) - loss) for depth, loss in inside",
        diagnosis="the error is taken at the points that were fitted: it says nothing of hidden ones",
        killed_by="test_ex14_1_the_hidden_points_are_hidden_from_the_fit",
    ),
    Mutant(
        "ex14_1_m9_first_of_the_list",
        "14.1",
        old="inside = [(depth, loss) for depth, loss in points if depth <= seen]",
        new="inside = points[: sum(depth <= seen for depth, _ in points)]",
        diagnosis="the points are taken as sorted by depth: they come in any order",
        killed_by="test_ex14_1_the_hidden_points_are_hidden_from_the_fit",
    ),
    Mutant(
        "ex14_2_m1_no_logarithm",
        "14.2",
        old="""    a, b, _ = np.polyfit(np.log(mus), losses, 2)
    if a <= 0:
        return None
    vertex = -b / (2 * a)
    if not math.log(min(mus)) < vertex < math.log(max(mus)):
        return None
    return math.exp(vertex)""",
        new="""    a, b, _ = np.polyfit(mus, losses, 2)
    if a <= 0:
        return None
    vertex = -b / (2 * a)
    if not min(mus) < vertex < max(mus):
        return None
    return float(vertex)""",
        diagnosis="the parabola is laid in μ, not in log μ",
        killed_by="test_ex14_2_a_best_depth_is_a_lowest_point_inside",
    ),
    Mutant(
        "ex14_2_m2_a_maximum_counts",
        "14.2",
        old="    if a <= 0:",
        new="    if a == 0:",
        diagnosis="a parabola that opens downwards has a highest point, not a lowest",
        killed_by="test_ex14_2_a_best_depth_is_a_lowest_point_inside",
    ),
    Mutant(
        "ex14_2_m3_outside_counts",
        "14.2",
        old="    if not math.log(min(mus)) < vertex < math.log(max(mus)):",
        new="    if not -700 < vertex < 700:",
        diagnosis="a lowest point outside the depths tried is an extrapolation: None",
        killed_by="test_ex14_2_a_best_depth_is_a_lowest_point_inside",
    ),
    Mutant(
        "ex14_2_m4_the_lowest_measured",
        "14.2",
        old="    return math.exp(vertex)",
        new="    return float(mus[int(np.argmin(losses))])",
        diagnosis="the measured depth with the lowest loss is returned, not the parabola's lowest point",
        killed_by="test_ex14_2_a_best_depth_is_a_lowest_point_inside",
    ),
    Mutant(
        "ex14_2_m5_sorted_order_assumed",
        "14.2",
        old="math.log(min(mus)) < vertex < math.log(max(mus))",
        new="math.log(mus[0]) < vertex < math.log(mus[-1])",
        diagnosis="the first and last μ are taken as the smallest and largest: they come in any order",
        killed_by="test_ex14_2_a_best_depth_is_a_lowest_point_inside",
    ),
    Mutant(
        "ex14_2_m6_repeats_dropped",
        "14.2",
        old="np.mean([runs[seed] for seed in draw], axis=0)",
        new="np.mean([runs[seed] for seed in sorted(set(draw))], axis=0)",
        diagnosis="a seed that was drawn twice must count twice: that is what a bootstrap is",
        killed_by="test_ex14_2_a_seed_drawn_twice_counts_twice",
    ),
    Mutant(
        "ex14_2_m7_all_seeds_always",
        "14.2",
        old="np.mean([runs[seed] for seed in draw], axis=0)",
        new="np.mean(runs, axis=0)",
        diagnosis="every draw takes all seeds once: the band has no width",
        killed_by="test_ex14_2_a_seed_drawn_twice_counts_twice",
    ),
    Mutant(
        "ex14_2_m8_one_sided",
        "14.2",
        old="np.quantile(found, [(1 - level) / 2, (1 + level) / 2])",
        new="np.quantile(found, [1 - level, level])",
        diagnosis="what is outside the band is shared by both sides: (1 − level) / 2 each",
        killed_by="test_ex14_2_the_band_holds_the_middle_of_the_draws",
    ),
    Mutant(
        "ex14_2_m9_band_from_a_minority",
        "14.2",
        old="    if without > 0.5:",
        new="    if without == 1:",
        diagnosis="more than half of the draws have no best depth, and a band is given all the same",
        killed_by="test_ex14_2_draws_without_a_best_depth_are_counted",
    ),
    Mutant(
        "ex14_3_m1_best_single_seed",
        "14.3",
        old="sorted((float(np.mean(values)), mu) for mu, values in own.items())",
        new="sorted((float(min(values)), mu) for mu, values in own.items())",
        diagnosis="the best seed of each μ is compared: luck counts; take the mean",
        killed_by="test_ex14_3_who_is_lowest_and_by_how_much",
    ),
    Mutant(
        "ex14_3_m2_smallest_budget",
        "14.3",
        old="    largest = max(losses)",
        new="    largest = min(losses)",
        diagnosis="the gap is taken at the smallest budget",
        killed_by="test_ex14_3_who_is_lowest_and_by_how_much",
    ),
    Mutant(
        "ex14_3_m3_gap_to_the_worst",
        "14.3",
        old="(best, first), (next_best, second) = means[largest][:2]",
        new="(best, first), (next_best, second) = means[largest][0], means[largest][-1]",
        diagnosis="the gap is taken to the worst μ: the second-lowest is the one that could have won",
        killed_by="test_ex14_3_who_is_lowest_and_by_how_much",
    ),
    Mutant(
        "ex14_3_m4_budgets_as_they_come",
        "14.3",
        old="[means[budget][0][1] for budget in sorted(losses)]",
        new="[means[budget][0][1] for budget in losses]",
        diagnosis="the budgets stand in the order of the log, not ascending",
        killed_by="test_ex14_3_who_is_lowest_and_by_how_much",
    ),
    Mutant(
        "ex14_3_m5_divides_by_n",
        "14.3",
        old="np.std(losses[largest][mu], ddof=1)",
        new="np.std(losses[largest][mu])",
        diagnosis="the standard deviation divides by n: of a sample it is n − 1",
        killed_by="test_ex14_3_the_gap_beside_the_spread_and_the_tokens",
    ),
    Mutant(
        "ex14_3_m6_smaller_spread",
        "14.3",
        old="spread = max(np.std(",
        new="spread = min(np.std(",
        diagnosis="the smaller of the two spreads is taken, which flatters the difference",
        killed_by="test_ex14_3_the_gap_beside_the_spread_and_the_tokens",
    ),
    Mutant(
        "ex14_3_m7_tokens_upside_down",
        "14.3",
        old="tokens[largest, min(mus)] / tokens[largest, max(mus)]",
        new="tokens[largest, max(mus)] / tokens[largest, min(mus)]",
        diagnosis="the ratio of tokens is upside down: those of the fewest loops over those of the most",
        killed_by="test_ex14_3_the_gap_beside_the_spread_and_the_tokens",
    ),
    Mutant(
        "ex14_3_m8_essay_without_the_spreads",
        "14.3",
        old="""by {n['gap']:.3f} nats, which is {n['spreads']:.1f} times the larger \"""",
        new="""by {n['gap']:.3f} nats, which is many times the larger \"""",
        diagnosis="the essay does not say how large the gap is beside the spread of the seeds",
        killed_by="test_ex14_3_the_essay_names_the_numbers_of_these_points",
    ),
    Mutant(
        "ex14_4_m1_iteration_forgotten",
        "14.4",
        old="return prelude + iteration * core + layer",
        new="return prelude + layer",
        diagnosis="all loops share one slot: the formula forgets the iteration",
        killed_by="test_ex14_4_every_layer_and_iteration_has_a_slot_of_its_own",
    ),
    Mutant(
        "ex14_4_m2_layer_by_layer",
        "14.4",
        old="return prelude + iteration * core + layer",
        new="return prelude + layer * loops + iteration",
        diagnosis="the iterations of one layer lie side by side: the layers of one iteration should",
        killed_by="test_ex14_4_every_layer_and_iteration_has_a_slot_of_its_own",
    ),
    Mutant(
        "ex14_4_m3_coda_behind_one_loop",
        "14.4",
        old="return prelude + loops * core + layer",
        new="return prelude + core + layer",
        diagnosis="the coda lies behind one iteration: it shares slots with the second",
        killed_by="test_ex14_4_every_layer_and_iteration_has_a_slot_of_its_own",
    ),
    Mutant(
        "ex14_4_m4_any_iteration",
        "14.4",
        old='    if not 0 <= iteration < (loops if stage == "core" else 1):',
        new="    if not 0 <= iteration:",
        diagnosis="an iteration beyond the loops is not refused: it lands in the coda's slots",
        killed_by="test_ex14_4_what_the_model_does_not_have_is_refused",
    ),
    Mutant(
        "ex14_4_m5_block_and_row_swapped",
        "14.4",
        old="return table[position // self.block_size], position % self.block_size",
        new="return table[position % len(table)], position // len(table) % self.block_size",
        diagnosis="positions are dealt to the blocks in turn: position p lies in block p // block_size",
        killed_by="test_ex14_4_what_is_read_is_what_was_written",
    ),
    Mutant(
        "ex14_4_m6_values_into_the_keys",
        "14.4",
        old="            self.values[slot, block, row] = values[i]",
        new="            self.values[slot, block, row] = keys[i]",
        diagnosis="the keys are stored twice: values are something else",
        killed_by="test_ex14_4_what_is_read_is_what_was_written",
    ),
    Mutant(
        "ex14_4_m7_table_ignored",
        "14.4",
        old="return table[position // self.block_size], position % self.block_size",
        new="return position // self.block_size, position % self.block_size",
        diagnosis="the block table is not used: all requests write into the same blocks",
        killed_by="test_ex14_4_what_is_read_is_what_was_written",
    ),
    Mutant(
        "ex14_4_m8_torn_write",
        "14.4",
        old="""        places = [self._place(table, position) for position in positions]
        for i, (block, row) in enumerate(places):
""",
        new="""        for i, position in enumerate(positions):
            block, row = self._place(table, position)
""",
        diagnosis="what stands before a bad position is written already when it is refused",
        killed_by="test_ex14_4_reads_stay_and_bad_positions_write_nothing",
    ),
    Mutant(
        "ex14_4_m9_slots_share",
        "14.4",
        old="            self.keys[slot, block, row] = keys[i]",
        new="            self.keys[:, block, row] = keys[i]",
        diagnosis="a write reaches every slot",
        killed_by="test_ex14_4_what_is_read_is_what_was_written",
    ),
    Mutant(
        "ex14_5_m1_depth_missing_in_the_name",
        "14.5",
        old="            name = (loops, tuple(tokens[: count * self.block_size]))",
        new="            name = next((n for n in self._by_name if n[1] == tuple(tokens[: count * self.block_size])), None)",
        diagnosis="the depth is missing from the name: keys made with other loops are found",
        killed_by="test_ex14_5_a_prefix_is_found_by_all_its_tokens_and_its_depth",
    ),
    Mutant(
        "ex14_5_m2_last_token_found_too",
        "14.5",
        old="        for count in range(1, (len(tokens) - 1) // self.block_size + 1):",
        new="        for count in range(1, len(tokens) // self.block_size + 1):",
        diagnosis="all tokens are found, and none is left to compute the first logits from",
        killed_by="test_ex14_5_a_prefix_is_found_by_all_its_tokens_and_its_depth",
    ),
    Mutant(
        "ex14_5_m3_finds_after_a_gap",
        "14.5",
        old="""            if name not in self._by_name:
                break
            found.append(self._by_name[name])""",
        new="""            if name in self._by_name:
                found.append(self._by_name[name])""",
        diagnosis="the look-up goes on behind a block that is missing: the table has a hole",
        killed_by="test_ex14_5_nothing_is_found_behind_a_gap",
    ),
    Mutant(
        "ex14_5_m4_found_not_held",
        "14.5",
        old="""            if block in self._kept:
                self._kept.remove(block)
            self._holders[block] += 1
        return found""",
        new="            pass\n        return found",
        diagnosis="a block that was found has no new holder: it can be taken while it is read",
        killed_by="test_ex14_5_holders_decide_what_is_free",
    ),
    Mutant(
        "ex14_5_m5_taken_keeps_its_name",
        "14.5",
        old="                del self._by_name[self._name_of.pop(block)]",
        new="                self._name_of.pop(block)",
        diagnosis="a block that was taken still has its old name: somebody finds what is overwritten",
        killed_by="test_ex14_5_who_goes_first",
    ),
    Mutant(
        "ex14_5_m6_named_blocks_first",
        "14.5",
        old="taken = (sorted(self._plain) + self._kept)[:count]",
        new="taken = (self._kept + sorted(self._plain))[:count]",
        diagnosis="named blocks are taken while there are blocks without a name",
        killed_by="test_ex14_5_who_goes_first",
    ),
    Mutant(
        "ex14_5_m7_newest_first",
        "14.5",
        old="taken = (sorted(self._plain) + self._kept)[:count]",
        new="taken = (sorted(self._plain) + self._kept[::-1])[:count]",
        diagnosis="the block that became free last goes first: it is the one most likely wanted again",
        killed_by="test_ex14_5_who_goes_first",
    ),
    Mutant(
        "ex14_5_m8_beginning_goes_first",
        "14.5",
        old="        for block in reversed(table):",
        new="        for block in table:",
        diagnosis="a table is dropped from its first block on: then the beginning of a prefix goes before "
        "its end, and the rest cannot be found",
        killed_by="test_ex14_5_who_goes_first",
    ),
    Mutant(
        "ex14_5_m9_newer_takes_the_name",
        "14.5",
        old="""            if name not in self._by_name:
                self._by_name[name] = table[place]
                self._name_of[table[place]] = name""",
        new="""            self._by_name[name] = table[place]
            self._name_of[table[place]] = name""",
        diagnosis="a second block takes the name of the first, which then can never be found again",
        killed_by="test_ex14_5_who_goes_first",
    ),
    Mutant(
        "ex14_5_m10_half_taken",
        "14.5",
        old="""        if count > self.free:
            return None
        taken""",
        new="        taken",
        diagnosis="fewer blocks than asked for are handed out: None is the answer, and nothing changes",
        killed_by="test_ex14_5_holders_decide_what_is_free",
    ),
    Mutant(
        "ex14_6_m1_prefill_before_decode",
        "14.6",
        old="    for i in decodes + others:",
        new="    for i in others + decodes:",
        diagnosis="prompts are computed before those who decode: every stream stalls",
        killed_by="test_ex14_6_decodes_first_and_no_more_than_the_budget",
    ),
    Mutant(
        "ex14_6_m2_in_order_only",
        "14.6",
        old="    for i in decodes + others:",
        new="    for i in range(len(running)):",
        diagnosis="the running ones are served in order: those who decode come first",
        killed_by="test_ex14_6_decodes_first_and_no_more_than_the_budget",
    ),
    Mutant(
        "ex14_6_m3_budget_exceeded",
        "14.6",
        old="        tokens[i] = min(running[i], budget)\n        budget -= tokens[i]",
        new="        tokens[i] = running[i] if budget > 0 else 0\n        budget = max(0, budget - tokens[i])",
        diagnosis="a prompt gets all its tokens although less of the budget is left",
        killed_by="test_ex14_6_decodes_first_and_no_more_than_the_budget",
    ),
    Mutant(
        "ex14_6_m4_overtakes",
        "14.6",
        old="            break\n        admitted.append(min(todo, budget))",
        new="            continue\n        admitted.append(min(todo, budget))",
        diagnosis="a request that does not fit is passed over, and one behind it is admitted",
        killed_by="test_ex14_6_nobody_overtakes",
    ),
    Mutant(
        "ex14_6_m5_seats_of_the_running_only",
        "14.6",
        old="        full = len(running) + len(admitted) >= seats",
        new="        full = len(running) >= seats",
        diagnosis="those who were admitted in this step take seats, too",
        killed_by="test_ex14_6_nobody_overtakes",
    ),
    Mutant(
        "ex14_6_m6_blocks_given_twice",
        "14.6",
        old="        free_blocks -= blocks\n",
        new="",
        diagnosis="every admitted request is promised the same free blocks",
        killed_by="test_ex14_6_nobody_overtakes",
    ),
    Mutant(
        "ex14_6_m7_admitted_with_nothing",
        "14.6",
        old="if full or budget == 0 or blocks > free_blocks:",
        new="if full or blocks > free_blocks:",
        diagnosis="requests are admitted with 0 tokens: they hold blocks and do nothing",
        killed_by="test_ex14_6_nobody_overtakes",
    ),
    Mutant(
        "ex14_7_m1_everybody_loops_alike",
        "14.7",
        old='return model.hidden(ids, positions, [r["loops"] for r, _ in owners], attend)',
        new="return model.hidden(ids, positions, [model.loops for _ in owners], attend)",
        diagnosis="all rows run the model's default depth, not the one their request asks for",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m2_iteration_ignored",
        "14.7",
        old="slot = parts.slot(place.stage, place.layer, place.iteration)",
        new="slot = parts.slot(place.stage, place.layer, 0)",
        diagnosis="all loops of a layer write to one slot: the iteration is ignored",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m3_draws_in_the_middle_of_a_prompt",
        "14.7",
        old='            if end == len(request["tokens"]):',
        new="            if True:",
        diagnosis="a token is drawn although part of the prompt is not computed",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m4_reads_the_whole_prompt",
        "14.7",
        old='past = parts.kv.read(slot, request["table"], end)',
        new='past = parts.kv.read(slot, request["table"], len(request["tokens"]))',
        diagnosis="a chunk reads positions that are not computed: its context ends at its own last position",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m5_rows_and_their_numbers_mixed_up",
        "14.7",
        old="mine = [i for i, row in enumerate(rows) if owners[row][0] is request]",
        new="mine = [i for i, row in enumerate(rows) if owners[i][0] is request]",
        diagnosis="when some rows have stopped looping, query i belongs to row rows[i], not to row i",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m6_first_row_drawn",
        "14.7",
        old="logits = model.logits(hidden[row - 1 : row])",
        new="logits = model.logits(hidden[row - (end - start) : row])",
        diagnosis="the largest logit of all rows of the chunk is looked for: only the last row counts",
        killed_by="test_ex14_7_each_reply_is_that_of_the_model_alone",
    ),
    Mutant(
        "ex14_7_m7_found_and_computed_again",
        "14.7",
        old='            request["done"] = len(found) * size',
        new='            request["done"] = 0',
        diagnosis="what was found in the cache is computed again",
        killed_by="test_ex14_7_sharing_changes_no_token_and_saves_the_found_ones",
    ),
    Mutant(
        "ex14_7_m8_looks_up_with_another_depth",
        "14.7",
        old='parts.cache.find(request["tokens"], request["loops"]) if share else []',
        new='parts.cache.find(request["tokens"], model.loops) if share else []',
        diagnosis="the look-up does not ask for the request's own depth",
        killed_by="test_ex14_7_sharing_changes_no_token_and_saves_the_found_ones",
    ),
    Mutant(
        "ex14_7_m9_named_before_computed",
        "14.7",
        old='request["tokens"][:end], request["loops"], request["table"]',
        new='request["tokens"], request["loops"], request["table"]',
        diagnosis="blocks are named before all their tokens are computed: a neighbour reads nothing",
        killed_by="test_ex14_7_sharing_changes_no_token_and_saves_the_found_ones",
    ),
    Mutant(
        "ex14_7_m10_always_shares",
        "14.7",
        old="""            if share:
                parts.cache.name(""",
        new="""            if True:
                parts.cache.name(""",
        diagnosis="prefixes are named although share is False",
        killed_by="test_ex14_7_each_token_once_and_one_pass_a_step",
    ),
    Mutant(
        "ex14_7_m11_blocks_never_come_back",
        "14.7",
        old='                parts.cache.drop(request["table"])\n',
        new="",
        diagnosis="a request that is done keeps its blocks: the next one waits for ever",
        killed_by="test_ex14_7_blocks_are_held_long_enough_and_given_back",
    ),
    Mutant(
        "ex14_7_m12_too_large_not_refused",
        "14.7",
        old="""        raise ValueError("a request needs more blocks than there are")""",
        new="        pass",
        diagnosis="a request that can never fit waits for ever: it must be refused before the first step",
        killed_by="test_ex14_7_blocks_are_held_long_enough_and_given_back",
    ),
]

_INSIDE = "best_depth: `if not math.log(min(mus)) < vertex < math.log(max(mus)):` → "
_EDGE = "the text leaves the edge open: no case lies on it"
_TOKENS = "plan_step: `tokens = [0] * len(running)` → "
_WRITTEN = "each running request's number is written before it is read"
SURVIVORS = {
    "fit_saturation: `if best is None or error < best[0]:` → "
    "`if best is None or (error <= best[0]):`": "no two rates are equally good, says the text",
    "best_depth: `if a <= 0:` → `if a < 0:`": _EDGE,
    _INSIDE + "`if not (math.log(min(mus)) <= vertex < math.log(max(mus))):`": _EDGE,
    _INSIDE + "`if not (math.log(min(mus)) < vertex <= math.log(max(mus))):`": _EDGE,
    'kv_slot: `raise ValueError(f"stage must be one of {stages}, got {stage!r}")` → `pass`': (
        "looking for the stage's place in the tuple raises ValueError, too"
    ),
    _TOKENS + "`tokens = [1] * len(running)`": _WRITTEN,
    _TOKENS + "`tokens = [(-1)] * len(running)`": _WRITTEN,
    "serve: `if end > request[\"done\"]:` → `if end >= request['done']:`": (
        "a chunk without tokens brings no row, and nothing is drawn for it"
    ),
}
