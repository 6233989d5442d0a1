"""Known mistakes of exercises 00."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex00_1_m1_chunks_forgotten",
        "0.1",
        old="spans[who].append((event.step, event.token_range))",
        new="spans[who] = spans[who] or [(event.step, event.token_range)]",
        diagnosis="a request is scheduled in many steps: a prompt may come in chunks, and "
        "every decode is a step of its own; you seem to keep only one of its ranges",
        killed_by="test_ex00_1_one_request_in_chunks",
    ),
    Mutant(
        "ex00_1_m2_end_included",
        "0.1",
        old="in range(start, end):",
        new="in range(start, end + 1):",
        diagnosis="a token_range is half-open: position `end` is not computed in this step",
        killed_by="test_ex00_1_one_request_in_chunks",
    ),
    Mutant(
        "ex00_1_m3_waiting_counts_as_step_zero",
        "0.1",
        old="default=None)",
        new="default=0)",
        diagnosis="a request that no step has computed yet has no first step: None",
        killed_by="test_ex00_1_a_trace_that_ends_early",
    ),
    Mutant(
        "ex00_1_m4_preempted_span_counted",
        "0.1",
        old="if span[0] != event.step]",
        new="if span[0] != -1]",
        diagnosis="a request that is scheduled and then preempted in the same step is not "
        "computed in it: that range must not count",
        killed_by="test_ex00_1_preempted_requests",
    ),
    Mutant(
        "ex00_1_m5_computed_again_counted_as_new",
        "0.1",
        old="computed.add(position)",
        new="pass",
        diagnosis="after a preemption the same positions are computed once more: they count "
        "under again, not a second time under prefill or decode",
        killed_by="test_ex00_1_preempted_requests",
    ),
    Mutant(
        "ex00_1_m6_only_the_last_hit",
        "0.1",
        old='table[who]["cached"] +=',
        new='table[who]["cached"] =',
        diagnosis="a preempted request may find its prefix a second time: hits add up",
        killed_by="test_ex00_1_preempted_requests",
    ),
    Mutant(
        "ex00_1_m7_drawn_counted_by_text",
        "0.1",
        old='event.name == "token.sampled"',
        new='event.name == "text.released"',
        diagnosis="not every token releases text: count the tokens that were drawn",
        killed_by="test_ex00_1_one_request_in_chunks",
    ),
    Mutant(
        "ex00_1_m8_hits_of_anybody",
        "0.1",
        old='table[who]["cached"] += event.token_range[1] - event.token_range[0]',
        new='for row in table.values(): row["cached"] += event.token_range[1]',
        diagnosis="a hit belongs to the request that the event names, to no other",
        killed_by="test_ex00_1_three_requests_share_the_steps",
    ),
    Mutant(
        "ex00_1_m9_a_preemption_forgets_what_was_done",
        "0.1",
        old="spans[who] = [span for span in spans[who] if span[0] != event.step]",
        new="spans[who] = []",
        diagnosis="a preemption loses the KV, not the work: what earlier steps computed has "
        "been computed, and counts",
        killed_by="test_ex00_1_preempted_requests",
    ),
]
