"""Known mistakes of exercises 03."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    # -- 3.1
    Mutant(
        "ex03_1_m1_budget_checked_after_adding",
        "3.1",
        old="prompt <= tokens and need",
        new="tokens > 0 and need",
        diagnosis="the budget is checked too late: a prompt must fit into what is left of it, "
        "it is not enough that something is left",
        killed_by="test_ex03_1_counts_tokens_blocks_and_seats",
    ),
    Mutant(
        "ex03_1_m2_head_of_line_blocking",
        "3.1",
        old="elif passed >= patience:",
        new="else:",
        diagnosis="head-of-line blocking: a request that does not fit may be passed while it "
        "was passed less than `patience` times",
        killed_by="test_ex03_1_overtaking_is_bounded",
    ),
    Mutant(
        "ex03_1_m3_unbounded_overtaking",
        "3.1",
        old="            break\n    return admitted",
        new="            continue\n    return admitted",
        diagnosis="starvation: a request that was passed `patience` times must stop the queue",
        killed_by="test_ex03_1_overtaking_is_bounded",
    ),
    Mutant(
        "ex03_1_m4_passed_once_too_often",
        "3.1",
        old="passed >= patience",
        new="passed > patience",
        diagnosis="a request that was passed exactly `patience` times is not passed again",
        killed_by="test_ex03_1_overtaking_is_bounded",
    ),
    Mutant(
        "ex03_1_m5_blocks_rounded_down",
        "3.1",
        old="need = -(-prompt // block_size)",
        new="need = prompt // block_size",
        diagnosis="blocks are rounded down: the last tokens of a prompt need a block, too, even "
        "if they do not fill it",
        killed_by="test_ex03_1_counts_tokens_blocks_and_seats",
    ),
    Mutant(
        "ex03_1_m6_blocks_not_counted_down",
        "3.1",
        old="            blocks -= need\n",
        new="",
        diagnosis="every request is measured against all free blocks: those admitted before it "
        "have taken some",
        killed_by="test_ex03_1_counts_tokens_blocks_and_seats",
    ),
    Mutant(
        "ex03_1_m7_exact_fit_refused",
        "3.1",
        old="prompt <= tokens and need <= blocks",
        new="prompt < tokens and need < blocks",
        diagnosis="a request that needs exactly what is left fits",
        killed_by="test_ex03_1_counts_tokens_blocks_and_seats",
    ),
    Mutant(
        "ex03_1_m8_seats_not_counted_down",
        "3.1",
        old="blocks -= need\n            seats -= 1\n",
        new="blocks -= need\n",
        diagnosis="each admitted request takes a seat",
        killed_by="test_ex03_1_counts_tokens_blocks_and_seats",
    ),
    # -- 3.2
    Mutant(
        "ex03_2_m1_one_token_prompt_is_a_decode",
        "3.2",
        old="if computed >= prompt and behind == 1:",
        new="if behind == 1:",
        diagnosis="a request that is one token behind is taken for a decode, although its prompt "
        "is not computed: a new prompt of one token, or the last token of a long one",
        killed_by="test_ex03_2_one_token_is_not_always_a_decode",
    ),
    Mutant(
        "ex03_2_m2_budget_checked_after_adding",
        "3.2",
        old="new = min(behind, max_chunk, left)",
        new="new = min(behind, max_chunk) if left > 0 else 0",
        diagnosis="a chunk may not be longer than what is left of the budget: it is checked after "
        "the chunk was handed out",
        killed_by="test_ex03_2_decodes_come_first",
    ),
    Mutant(
        "ex03_2_m3_head_of_line_blocking",
        "3.2",
        old="            continue\n        plan.append((index, new",
        new="            break\n        plan.append((index, new",
        diagnosis="head-of-line blocking: when nothing is left of one request's chunk, the next "
        "request is looked at",
        killed_by="test_ex03_2_chunks",
    ),
    Mutant(
        "ex03_2_m4_length_rounded_not_end",
        "3.2",
        old="new -= (computed + new) % block_size",
        new="new -= new % block_size",
        diagnosis="the *end* of a chunk must lie on a block boundary, num_computed included, not "
        "its length",
        killed_by="test_ex03_2_chunks",
    ),
    Mutant(
        "ex03_2_m5_last_chunk_rounded",
        "3.2",
        old="        if new < behind:\n            new -=",
        new="        if new > 0:\n            new -=",
        diagnosis="a chunk that brings the request all the way is not shortened",
        killed_by="test_ex03_2_decodes_come_first",
    ),
    Mutant(
        "ex03_2_m6_output_forgotten",
        "3.2",
        old="behind = prompt + output - computed",
        new="behind = prompt + min(output, 1) - computed if computed < prompt else prompt + output - computed",
        diagnosis="a preempted request has its output to compute again, too",
        killed_by="test_ex03_2_one_token_is_not_always_a_decode",
    ),
    Mutant(
        "ex03_2_m7_resumed_is_a_decode",
        "3.2",
        old="computed >= prompt and behind == 1:",
        new="computed >= prompt:",
        diagnosis="a request whose prompt is computed but that is several tokens behind does not "
        "decode: it was preempted and computes its output again",
        killed_by="test_ex03_2_one_token_is_not_always_a_decode",
    ),
    Mutant(
        "ex03_2_m8_seats_ignored",
        "3.2",
        old="        if index >= len(running) and seats <= 0:\n            break\n",
        new="",
        diagnosis="a waiting request needs a seat",
        killed_by="test_ex03_2_chunks",
    ),
    Mutant(
        "ex03_2_m9_chunk_cap_ignored",
        "3.2",
        old="min(behind, max_chunk, left)",
        new="min(behind, left)",
        diagnosis="`max_chunk` caps every chunk",
        killed_by="test_ex03_2_chunks",
    ),
    Mutant(
        "ex03_2_m10_seat_without_entry",
        "3.2",
        old="        if new <= 0:\n",
        new="        if new <= 0:\n            seats -= index >= len(running)\n",
        diagnosis="a waiting request that gets no entry takes no seat: the seat is there for the next",
        killed_by="test_ex03_2_chunks",
    ),
    # -- 3.3
    Mutant(
        "ex03_3_m1_keeps_its_computed_count",
        "3.3",
        old="    victim.num_computed = 0\n",
        new="",
        diagnosis="a preempted sequence has lost its KV: it has computed nothing any more",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m2_finished_not_freed",
        "3.3",
        old="    free_blocks.extend(sequence.block_table)\n",
        new="",
        diagnosis="a finished sequence must give its blocks back, or they are lost for ever",
        killed_by="test_ex03_3_finish",
    ),
    Mutant(
        "ex03_3_m3_output_thrown_away",
        "3.3",
        old="    waiting.appendleft(victim)",
        new="    victim.output = []\n    waiting.appendleft(victim)",
        diagnosis="a preempted sequence loses its KV, not its tokens: the output has been shown "
        "to somebody",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m4_resumes_the_prompt_only",
        "3.3",
        old="tokens = head.prompt + head.output",
        new="tokens = list(head.prompt)",
        diagnosis="to resume is to compute the output again as well: its KV is gone, too",
        killed_by="test_ex03_3_resume",
    ),
    Mutant(
        "ex03_3_m5_to_the_back_of_the_queue",
        "3.3",
        old="waiting.appendleft(victim)",
        new="waiting.append(victim)",
        diagnosis="a preempted sequence goes to the front of the queue: it came before all who "
        "wait",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m6_most_important_first",
        "3.3",
        old="(running[i].priority, -running[i].num_computed, i)",
        new="(-running[i].priority, -running[i].num_computed, i)",
        diagnosis="a larger priority number is less important, and goes first",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m7_most_expensive_victim",
        "3.3",
        old="(running[i].priority, -running[i].num_computed, i)",
        new="(running[i].priority, running[i].num_computed, i)",
        diagnosis="among equals the victim is the one with the *least* to compute again",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m8_tie_to_the_front",
        "3.3",
        old="-running[i].num_computed, i)",
        new="-running[i].num_computed, -i)",
        diagnosis="among sequences equal in both the one furthest back goes",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m9_table_kept",
        "3.3",
        old="    victim.block_table = []\n",
        new="",
        diagnosis="the victim's block_table still lists blocks that others may have now",
        killed_by="test_ex03_3_preempt",
    ),
    Mutant(
        "ex03_3_m10_finished_twice",
        "3.3",
        old="    if sequence not in running:\n        return\n    running.remove(sequence)\n",
        new="    if sequence in running:\n        running.remove(sequence)\n",
        diagnosis="a sequence that is not in `running` is not touched, its blocks are not ours "
        "to give back",
        killed_by="test_ex03_3_finish",
    ),
    # -- 3.4
    Mutant(
        "ex03_4_m1_no_ageing",
        "3.4",
        old="return priority if ageing is None else priority * ageing - (now - arrival)",
        new="return priority",
        diagnosis="waiting must count: without ageing a request can starve",
        killed_by="test_ex03_4_pick",
    ),
    Mutant(
        "ex03_4_m2_floats",
        "3.4",
        old="priority * ageing - (now - arrival)",
        new="priority - (now - arrival) / ageing",
        diagnosis="floats see a difference between fractions that are equal: multiply by `ageing` "
        "instead of dividing",
        killed_by="test_ex03_4_pick",
    ),
    Mutant(
        "ex03_4_m3_waiting_makes_it_worse",
        "3.4",
        old="priority * ageing - (now - arrival)",
        new="priority * ageing + (now - arrival)",
        diagnosis="who has waited longer is served earlier, not later",
        killed_by="test_ex03_4_pick",
    ),
    Mutant(
        "ex03_4_m4_plain_priority_is_enough",
        "3.4",
        old="return better and mine < theirs",
        new="return better",
        diagnosis="a running request that has aged ahead of the waiting one keeps its seat, or "
        "the two take it from each other for ever",
        killed_by="test_ex03_4_takes_seat",
    ),
    Mutant(
        "ex03_4_m5_aged_priority_is_enough",
        "3.4",
        old="return better and mine < theirs",
        new="return mine < theirs",
        diagnosis="ageing moves a request forward in the queue; to take a seat its plain priority "
        "must be better, too",
        killed_by="test_ex03_4_takes_seat",
    ),
    Mutant(
        "ex03_4_m6_ties_to_the_youngest",
        "3.4",
        old="waiting[i][1], i)",
        new="-waiting[i][1], i)",
        diagnosis="among equals the oldest is next",
        killed_by="test_ex03_4_pick",
    ),
]

SURVIVORS = {
    'preempt: `raise ValueError("running must hold at least one sequence, got none")` → `pass`': (
        "max() of nothing raises a ValueError as well, two lines on"
    ),
}
