"""Known mistakes of exercises 10."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex10_1_m1_ignores_load",
        "10.1",
        old='cost = weight * prefill / block_size + replica["decoding"]',
        new="cost = weight * (num_tokens - held) / block_size",
        diagnosis="what waits and decodes at a replica does not count: the prefix builds a queue",
        killed_by="test_ex10_1_costs_of_random_replicas",
    ),
    Mutant(
        "ex10_1_m2_ignores_prefixes",
        "10.1",
        old='prefill = replica["waiting"] + num_tokens - held',
        new='prefill = replica["waiting"] + num_tokens',
        diagnosis="what a replica holds does not count: every prompt is computed anew somewhere",
        killed_by="test_ex10_1_the_documented_example",
    ),
    Mutant(
        "ex10_1_m3_waiting_prompts_forgotten",
        "10.1",
        old='prefill = replica["waiting"] + num_tokens - held',
        new="prefill = num_tokens - held",
        diagnosis="prompts that wait at a replica stand before this one: add their tokens",
        killed_by="test_ex10_1_costs_of_random_replicas",
    ),
    Mutant(
        "ex10_1_m4_whole_blocks",
        "10.1",
        old="cost = weight * prefill / block_size",
        new="cost = weight * (prefill // block_size)",
        diagnosis="blocks are rounded: a part of a block costs a part",
        killed_by="test_ex10_1_costs_of_random_replicas",
    ),
    Mutant(
        "ex10_1_m5_weight_of_everything",
        "10.1",
        old='cost = weight * prefill / block_size + replica["decoding"]',
        new='cost = weight * (prefill / block_size + replica["decoding"])',
        diagnosis="the weight is of prefill alone: decode blocks count once",
        killed_by="test_ex10_1_the_documented_example",
    ),
    Mutant(
        "ex10_1_m6_more_than_the_prompt",
        "10.1",
        old='held = min(matched.get(replica["name"], 0), num_tokens)',
        new='held = matched.get(replica["name"], 0)',
        diagnosis="a replica that holds more than the prompt gets a negative cost: cap the match",
        killed_by="test_ex10_1_a_match_is_at_most_the_prompt",
    ),
    Mutant(
        "ex10_1_m7_sick_replicas",
        "10.1",
        old='        if not replica["healthy"]:\n            continue\n',
        new="",
        diagnosis="a replica that is not healthy gets requests",
        killed_by="test_ex10_1_only_healthy_ones_and_of_equals_the_first",
    ),
    Mutant(
        "ex10_1_m8_last_of_equals",
        "10.1",
        old="if best is None or cost < best[1]:",
        new="if best is None or cost <= best[1]:",
        diagnosis="of equal costs the last replica is taken, not the first",
        killed_by="test_ex10_1_only_healthy_ones_and_of_equals_the_first",
    ),
    Mutant(
        "ex10_2_m1_ignores_load",
        "10.2",
        old="        if loads[name] < limit:\n            return name",
        new="        return name",
        diagnosis="the load is ignored: whoever is preferred gets everything",
        killed_by="test_ex10_2_the_bound_by_hand",
    ),
    Mutant(
        "ex10_2_m2_without_the_new_one",
        "10.2",
        old="total = sum(loads[name] for name in order) + 1",
        new="total = max(1, sum(loads[name] for name in order))",
        diagnosis="the request that is to be placed is not counted in: m + 1",
        killed_by="test_ex10_2_nobody_ever_has_more",
    ),
    Mutant(
        "ex10_2_m3_rounded_down",
        "10.2",
        old="limit = math.ceil(factor * total / len(order))",
        new="limit = max(1, math.floor(factor * total / len(order)))",
        diagnosis="the bound is rounded down: ⌈…⌉ rounds up",
        killed_by="test_ex10_2_the_bound_by_hand",
    ),
    Mutant(
        "ex10_2_m4_one_too_many",
        "10.2",
        old="if loads[name] < limit:",
        new="if loads[name] <= limit:",
        diagnosis="a replica that is at its bound gets one more: with the new request it would be above",
        killed_by="test_ex10_2_the_bound_by_hand",
    ),
    Mutant(
        "ex10_2_m5_bound_of_the_longest_queue",
        "10.2",
        old="limit = math.ceil(factor * total / len(order))",
        new="limit = max(1, math.ceil(factor * max(loads[name] for name in order)))",
        diagnosis="the bound is a multiple of the longest queue: it is one of the mean",
        killed_by="test_ex10_2_the_bound_by_hand",
    ),
    Mutant(
        "ex10_2_m6_homes_by_remainder",
        "10.2",
        old="    return sorted(names, key=rank, reverse=True)",
        new='    first = weight_of(prefix, "") % len(names)\n'
        "    around = [*names[first:], *names[:first]]\n"
        "    return sorted(around, key=lambda name: rank(name)[0], reverse=True)",
        diagnosis="homes come from a remainder: one replica more and nearly all prefixes move. "
        "Sort by weight_of",
        killed_by="test_ex10_2_a_new_replica_takes_its_share_and_moves_nobody_else",
    ),
    Mutant(
        "ex10_2_m7_little_is_enough",
        "10.2",
        old="return held if held >= enough else -1, weight_of(prefix, name)",
        new="return held, weight_of(prefix, name)",
        diagnosis="a few matched tokens decide: below `enough` only the hash does",
        killed_by="test_ex10_2_who_holds_most_comes_first",
    ),
    Mutant(
        "ex10_2_m8_enough_is_more_than_enough",
        "10.2",
        old="held >= enough",
        new="held > enough",
        diagnosis="who holds exactly `enough` tokens holds enough",
        killed_by="test_ex10_2_who_holds_most_comes_first",
    ),
    Mutant(
        "ex10_3_m1_transfer_is_free",
        "10.3",
        old='seconds = source["latency"] + 8 * sent / source["bandwidth"]',
        new='seconds = source["latency"]',
        diagnosis="the transfer takes no time: bytes over bandwidth are missing",
        killed_by="test_ex10_3_the_example_and_its_break_even",
    ),
    Mutant(
        "ex10_3_m2_bits_and_bytes",
        "10.3",
        old="8 * sent",
        new="sent",
        diagnosis="bytes are divided by bits a second: a byte has 8 bits",
        killed_by="test_ex10_3_the_example_and_its_break_even",
    ),
    Mutant(
        "ex10_3_m3_latency_forgotten",
        "10.3",
        old='seconds = source["latency"] + 8',
        new="seconds = 8",
        diagnosis="the latency is missing",
        killed_by="test_ex10_3_the_example_and_its_break_even",
    ),
    Mutant(
        "ex10_3_m4_queue_forgotten",
        "10.3",
        old='sent = source["backlog"] + (there - local) * kv_bytes',
        new="sent = (there - local) * kv_bytes",
        diagnosis="the link is taken for idle: its backlog goes first",
        killed_by="test_ex10_3_the_example_and_its_break_even",
    ),
    Mutant(
        "ex10_3_m5_sends_what_is_here",
        "10.3",
        old="(there - local) * kv_bytes",
        new="there * kv_bytes",
        diagnosis="what is here already is sent once more: only what lies beyond `local` moves",
        killed_by="test_ex10_3_random_sources",
    ),
    Mutant(
        "ex10_3_m6_nothing_left_to_compute",
        "10.3",
        old='there = min(source["held"], num_tokens - 1)',
        new='there = source["held"]',
        diagnosis="a whole prompt is fetched, and no token is left whose logits could be computed",
        killed_by="test_ex10_3_the_last_token_nothing_new_and_ties",
    ),
    Mutant(
        "ex10_3_m7_rest_is_free",
        "10.3",
        old="        seconds += prefill_seconds(num_tokens - there, there)\n",
        new="",
        diagnosis="what the source lacks must be computed after the transfer",
        killed_by="test_ex10_3_the_example_and_its_break_even",
    ),
    Mutant(
        "ex10_3_m8_rest_attends_to_nothing",
        "10.3",
        old="prefill_seconds(num_tokens - there, there)",
        new="prefill_seconds(num_tokens - there, 0)",
        diagnosis="the rest is computed as if nothing were cached: it attends to what was fetched",
        killed_by="test_ex10_3_random_sources",
    ),
    Mutant(
        "ex10_3_m9_takes_the_last_of_equals",
        "10.3",
        old="if seconds < best[1]:",
        new="if seconds <= best[1]:",
        diagnosis="of equal times computing wins, then the first source",
        killed_by="test_ex10_3_the_last_token_nothing_new_and_ties",
    ),
    Mutant(
        "ex10_4_m1_all_is_each",
        "10.4",
        old="    if not each:\n        return enough(requests)\n",
        new="",
        diagnosis="each kind is asked for even when all requests count together",
        killed_by="test_ex10_4_when_a_run_is_carried",
    ),
    Mutant(
        "ex10_4_m2_each_is_all",
        "10.4",
        old="    return all(\n        enough([row for row in requests if row[0] is kind]) for kind in (False, True)\n    )",
        new="    return enough(requests)",
        diagnosis="with each=True cold requests can hide among the warm ones: ask each kind",
        killed_by="test_ex10_4_when_a_run_is_carried",
    ),
    Mutant(
        "ex10_4_m3_one_limit",
        "10.4",
        old="seconds > (COLD_LIMIT if cold else WARM_LIMIT)",
        new="seconds > COLD_LIMIT",
        diagnosis="warm requests have a limit of 1 s, not that of cold ones",
        killed_by="test_ex10_4_when_a_run_is_carried",
    ),
    Mutant(
        "ex10_4_m4_limits_swapped",
        "10.4",
        old="(COLD_LIMIT if cold else WARM_LIMIT)",
        new="(WARM_LIMIT if cold else COLD_LIMIT)",
        diagnosis="the limits are the other way round: cold requests may take longer",
        killed_by="test_ex10_4_when_a_run_is_carried",
    ),
    Mutant(
        "ex10_4_m5_exactly_ninety",
        "10.4",
        old="return 10 * late <= len(rows)",
        new="return 10 * late < len(rows)",
        diagnosis="exactly 90 % in time is enough",
        killed_by="test_ex10_4_when_a_run_is_carried",
    ),
    Mutant(
        "ex10_4_m6_passes_over_a_failure",
        "10.4",
        old="            break\n",
        new="            continue\n",
        diagnosis="a higher rate that is carried by luck counts, though a lower one failed: stop at "
        "the first failure",
        killed_by="test_ex10_4_the_highest_rate_that_is_carried",
    ),
    Mutant(
        "ex10_4_m7_the_failing_rate",
        "10.4",
        old="        if not carried(run(kind, rate, cold_share, seed), each):\n            break\n"
        "        best = rate\n",
        new="        best = rate\n"
        "        if not carried(run(kind, rate, cold_share, seed), each):\n            break\n",
        diagnosis="the first rate that fails is returned: the one before it is the last that held",
        killed_by="test_ex10_4_the_highest_rate_that_is_carried",
    ),
    Mutant(
        "ex10_4_m8_another_run",
        "10.4",
        old="carried(run(kind, rate, cold_share, seed), each)",
        new="carried(run(kind, rate, cold_share, 1), each)",
        diagnosis="the seed that was asked for is not the one that runs",
        killed_by="test_ex10_4_the_highest_rate_that_is_carried",
    ),
]

_BELOW = "below `enough` any number that is smaller than every match will do"
SURVIVORS = {
    "preference.rank: `held = matched.get(name, 0)` → `held = matched.get(name, (-1))`": (
        "a name that holds nothing is below `enough`, which is at least 1"
    ),
    "preference.rank: `return held if held >= enough else -1, weight_of(prefix, name)` → "
    "`return held if held >= enough else -2, weight_of(prefix, name)`": _BELOW,
    "preference.rank: `return held if held >= enough else -1, weight_of(prefix, name)` → "
    "`return held if held >= enough else -0, weight_of(prefix, name)`": _BELOW,
    "fetch_or_compute: `if there <= local:` → `if there < local:`": (
        "a source that has what is here and no more sends nothing and is never faster"
    ),
    "carried: `enough([row for row in requests if row[0] is kind]) for kind in (False, True)` → "
    "`enough([row for row in requests if row[0] is not kind]) for kind in (False, True)`": (
        "both kinds are asked for either way"
    ),
}
