"""Known mistakes of exercises 06."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex06_1_m1_positions_run_on",
        "6.1",
        old="positions += range(num_computed, end)",
        new="positions += range(len(positions), len(positions) + num_new)",
        diagnosis="positions run on from one request to the next: each request counts its own, "
        "from num_computed",
        killed_by="test_ex06_1_lays_out_what_the_engine_lays_out",
    ),
    Mutant(
        "ex06_1_m2_positions_from_zero",
        "6.1",
        old="positions += range(num_computed, end)",
        new="positions += range(num_new)",
        diagnosis="positions begin at 0 although tokens are computed already: a chunk continues "
        "at num_computed",
        killed_by="test_ex06_1_lays_out_what_the_engine_lays_out",
    ),
    Mutant(
        "ex06_1_m3_first_tokens_again",
        "6.1",
        old="tokens += token_ids[num_computed:end]",
        new="tokens += token_ids[:num_new]",
        diagnosis="the first tokens are taken again: a step computes those after num_computed",
        killed_by="test_ex06_1_rebuilds_every_token_from_its_position",
    ),
    Mutant(
        "ex06_1_m4_seq_len_without_cache",
        "6.1",
        old="seq_lens.append(end)",
        new="seq_lens.append(num_new)",
        diagnosis="seq_lens counts the new tokens only: the context holds the computed ones too",
        killed_by="test_ex06_1_lays_out_what_the_engine_lays_out",
    ),
    Mutant(
        "ex06_1_m5_lengths_not_cumulative",
        "6.1",
        old="cu_seqlens.append(cu_seqlens[-1] + num_new)",
        new="cu_seqlens.append(num_new)",
        diagnosis="cu_seqlens holds lengths: it must hold their running sum",
        killed_by="test_ex06_1_rebuilds_every_token_from_its_position",
    ),
    Mutant(
        "ex06_1_m6_slices_past_the_end",
        "6.1",
        old="num_new < 1 or num_computed < 0 or end > len(token_ids)",
        new="num_new < 1 or num_computed < 0",
        diagnosis="a request that reaches beyond its tokens is cut off in silence: refuse it",
        killed_by="test_ex06_1_refuses_what_does_not_fit",
    ),
    Mutant(
        "ex06_2_m1_leak_between_requests",
        "6.2",
        old="mask[top:bottom, left : left + length] = key <= query",
        new="mask[top:bottom, left : left + length] = key <= query\n"
        "        mask[top:bottom, :left] = True",
        diagnosis="queries see the contexts of the requests before theirs: text leaks between users",
        killed_by="test_ex06_2_no_request_sees_another",
    ),
    Mutant(
        "ex06_2_m2_offset_forgotten",
        "6.2",
        old="query = torch.arange(length - (bottom - top), length)[:, None]",
        new="query = torch.arange(bottom - top)[:, None]",
        diagnosis="the first query of a chunk sees one key: it stands after the computed tokens",
        killed_by="test_ex06_2_every_pair_is_right",
    ),
    Mutant(
        "ex06_2_m3_not_itself",
        "6.2",
        old="= key <= query",
        new="= key < query",
        diagnosis="a query does not see its own key: `at most` includes equal",
        killed_by="test_ex06_2_every_pair_is_right",
    ),
    Mutant(
        "ex06_2_m4_one_too_many",
        "6.2",
        old="= key <= query",
        new="= key <= query + 1",
        diagnosis="a query sees one key of the future",
        killed_by="test_ex06_2_every_pair_is_right",
    ),
    Mutant(
        "ex06_2_m5_columns_move_by_queries",
        "6.2",
        old="left += length",
        new="left += bottom - top",
        diagnosis="the columns of the next request begin after the queries of this one: they begin "
        "after its whole context",
        killed_by="test_ex06_2_every_pair_is_right",
    ),
    Mutant(
        "ex06_2_m6_not_causal",
        "6.2",
        old="= key <= query",
        new="= key <= length",
        diagnosis="every query sees its request's whole context, the future included",
        killed_by="test_ex06_2_attention_under_it_is_that_of_each_request_alone",
    ),
    Mutant(
        "ex06_3_m1_last_of_the_batch",
        "6.3",
        old="cu_seqlens[b + 1] - 1",
        new="cu_seqlens[-1] - 1",
        diagnosis="everybody gets the last row of the batch: a request's own last row is before the "
        "next one begins",
        killed_by="test_ex06_3_rows_are_those_the_engine_asks_for",
    ),
    Mutant(
        "ex06_3_m2_first_of_the_next",
        "6.3",
        old="cu_seqlens[b + 1] - 1",
        new="min(cu_seqlens[b + 1], len(hidden) - 1)",
        diagnosis="off by one: that row is the first of the next request",
        killed_by="test_ex06_3_reads_its_own_rows_only_and_returns_a_copy",
    ),
    Mutant(
        "ex06_3_m3_unfinished_prompts_too",
        "6.3",
        old="if seen == total",
        new="if seen <= total",
        diagnosis="rows of chunks that do not end their prompt are gathered: nobody reads them",
        killed_by="test_ex06_3_rows_are_those_the_engine_asks_for",
    ),
    Mutant(
        "ex06_3_m4_first_row",
        "6.3",
        old="cu_seqlens[b + 1] - 1",
        new="cu_seqlens[b]",
        diagnosis="the first row of each request is taken: the next token is scored by the last",
        killed_by="test_ex06_3_rows_are_those_the_engine_asks_for",
    ),
    Mutant(
        "ex06_4_m1_mean_keeps_the_target",
        "6.4",
        old="if max(times) <= target",
        new="if sum(times) / len(times) <= target",
        diagnosis="the mean step keeps the target: every single one must",
        killed_by="test_ex06_4_every_step_must_keep_the_target",
    ),
    Mutant(
        "ex06_4_m2_largest_allowed",
        "6.4",
        old="sum(times) < best[0]",
        new="True",
        diagnosis="the largest allowed chunk is taken: it need not be the fastest",
        killed_by="test_ex06_4_is_the_best_of_all_candidates",
    ),
    Mutant(
        "ex06_4_m3_ties_go_to_the_larger",
        "6.4",
        old="sum(times) < best[0]",
        new="sum(times) <= best[0]",
        diagnosis="of equally fast chunks the smaller is wanted",
        killed_by="test_ex06_4_the_example",
    ),
    Mutant(
        "ex06_4_m4_last_step_full",
        "6.4",
        old="end = min(start + chunk, num_tokens)",
        new="end = start + chunk",
        diagnosis="the last step computes tokens that are not there: it is shorter",
        killed_by="test_ex06_4_is_the_best_of_all_candidates",
    ),
    Mutant(
        "ex06_4_m5_context_is_the_start",
        "6.4",
        old="times.append(step_seconds(end - start, end))",
        new="times.append(step_seconds(end - start, start))",
        diagnosis="the context of a step counts its own tokens: it is the end, not the start",
        killed_by="test_ex06_4_every_step_must_keep_the_target",
    ),
    Mutant(
        "ex06_4_m6_target_not_included",
        "6.4",
        old="if max(times) <= target",
        new="if max(times) < target",
        diagnosis="a step of exactly the target is allowed",
        killed_by="test_ex06_4_the_example",
    ),
]

SURVIVORS = {
    "last_hidden: `for b, (seen, total) in enumerate(zip(seq_lens, num_tokens, strict=True))` → "
    "`for b, (seen, total) in enumerate(zip(num_tokens, seq_lens, strict=True))`": (
        "the two are only asked whether they are equal"
    ),
}
