"""Known mistakes of exercises 07."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex07_1_m1_nan_times_zero",
        "7.1",
        old="keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)",
        new="keys = keys.masked_fill(hidden, 0)",
        diagnosis="hidden values are weighted with 0, and 0 · NaN is NaN: overwrite the values, too",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m2_padding_attended",
        "7.1",
        old="scores = scores.masked_fill(beyond[:, None, None, :], -torch.inf)",
        new="pass",
        diagnosis="keys beyond a request's length take part in its softmax",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m3_length_off_by_one",
        "7.1",
        old=">= lengths[:, None]",
        new="> lengths[:, None]",
        diagnosis="one token beyond the length is read: positions go from 0 to length − 1",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m4_last_token_missing",
        "7.1",
        old=">= lengths[:, None]",
        new=">= (lengths[:, None] - 1).clamp(min=1)",
        diagnosis="the last token of a context is not seen: the length counts the token that was "
        "written in this step",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m5_not_scaled",
        "7.1",
        old=" / C**0.5",
        new="",
        diagnosis="scores are not divided by √C",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m6_heads_interleaved",
        "7.1",
        old="grouped = query.reshape(B, K, H // K, C)",
        new="grouped = query.reshape(B, H // K, K, C).transpose(1, 2)",
        diagnosis="query heads are dealt out to KV heads in turn: neighbours share one, head h has "
        "KV head h · K // H",
        killed_by="test_ex07_1_each_request_as_if_alone",
    ),
    Mutant(
        "ex07_1_m7_no_maximum",
        "7.1",
        old="weights = torch.softmax(scores, dim=-1)",
        new="weights = scores.exp() / scores.exp().sum(-1, keepdim=True)",
        diagnosis="exp overflows: a softmax subtracts the largest score first",
        killed_by="test_ex07_1_large_scores_do_not_overflow",
    ),
    Mutant(
        "ex07_2_m1_no_rescale",
        "7.2",
        old="weights = torch.exp(lses - top)",
        new="weights = torch.exp(lses - lses).nan_to_num(0)",
        diagnosis="parts are averaged: each must weigh as much as its sum, exp(lse)",
        killed_by="test_ex07_2_parts_give_the_whole",
    ),
    Mutant(
        "ex07_2_m2_numerator_only",
        "7.2",
        old="total = weights.sum(dim=0)",
        new="total = (lses > -torch.inf).sum(dim=0).to(lses.dtype)",
        diagnosis="the outputs are rescaled and the denominator is not: divide by the sum of the weights",
        killed_by="test_ex07_2_parts_give_the_whole",
    ),
    Mutant(
        "ex07_2_m3_overflow",
        "7.2",
        old="weights = torch.exp(lses - top)",
        new="top = torch.zeros_like(top)\n    weights = torch.exp(lses)",
        diagnosis="exp(lse) overflows or underflows: subtract the largest lse first",
        killed_by="test_ex07_2_large_scores",
    ),
    Mutant(
        "ex07_2_m4_lse_is_the_largest",
        "7.2",
        old="return output, top + torch.log(total)",
        new="return output, torch.where(total > 0, top, torch.log(total))",
        diagnosis="the lse returned is the largest of the parts': the logarithm of the summed "
        "weights is missing, and merging again goes wrong",
        killed_by="test_ex07_2_merging_in_any_grouping_is_the_same",
    ),
    Mutant(
        "ex07_2_m5_empty_part_poisons",
        "7.2",
        old="safe = outputs.masked_fill((weights == 0)[:, :, None], 0)",
        new="safe = outputs",
        diagnosis="the output of a part without keys is used: 0 · NaN is NaN",
        killed_by="test_ex07_2_parts_without_keys",
    ),
    Mutant(
        "ex07_2_m6_nothing_minus_nothing",
        "7.2",
        old="top = torch.where(top == -torch.inf, torch.zeros_like(top), top)",
        new="pass",
        diagnosis="a head without any key gives −∞ − (−∞), which is NaN",
        killed_by="test_ex07_2_parts_without_keys",
    ),
    Mutant(
        "ex07_3_m1_padding_writes_slot_0",
        "7.3",
        old="slots + [-1] * extra",
        new="slots + [0] * extra",
        diagnosis="inactive rows write slot 0, the first token of whoever owns block 0: use −1",
        killed_by="test_ex07_3_active_rows_stay_and_inactive_rows_write_nothing",
    ),
    Mutant(
        "ex07_3_m2_length_0",
        "7.3",
        old="lengths + [1] * extra",
        new="lengths + [0] * extra",
        diagnosis="inactive rows have a context of 0 tokens, over which a softmax is NaN: use 1",
        killed_by="test_ex07_3_active_rows_stay_and_inactive_rows_write_nothing",
    ),
    Mutant(
        "ex07_3_m3_last_row_repeated",
        "7.3",
        old="slots + [-1] * extra",
        new="slots + [slots[-1]] * extra",
        diagnosis="inactive rows repeat the last request's slot and overwrite its newest token",
        killed_by="test_ex07_3_active_rows_stay_and_inactive_rows_write_nothing",
    ),
    Mutant(
        "ex07_3_m4_one_list_for_all",
        "7.3",
        old="tables += [[0] * width for _ in range(extra)]",
        new="tables += [[0] * width] * extra",
        diagnosis="all inactive rows are one and the same list",
        killed_by="test_ex07_3_nothing_is_shared",
    ),
    Mutant(
        "ex07_3_m5_tables_padded_in_place",
        "7.3",
        old="tables = [table + [0] * (width - len(table)) for table in block_tables]",
        new="tables = list(block_tables)\n    for table in tables:\n"
        "        table += [0] * (width - len(table))",
        diagnosis="the requests' own block tables are padded: make new lists",
        killed_by="test_ex07_3_active_rows_stay_and_inactive_rows_write_nothing",
    ),
    Mutant(
        "ex07_3_m6_cuts_a_large_batch",
        "7.3",
        old="    if not 1 <= B <= size:",
        new="    if not 1 <= B:",
        diagnosis="more rows than the size must be refused, not passed on",
        killed_by="test_ex07_3_refuses_what_cannot_be_padded",
    ),
    Mutant(
        "ex07_4_m1_always_accepted",
        "7.4",
        old="return bool(u < min(1.0, float(p[draft]) / float(q[draft])))",
        new="return True",
        diagnosis="every draft is kept: the tokens have the drafting model's law",
        killed_by="test_ex07_4_tokens_have_the_large_models_law",
    ),
    Mutant(
        "ex07_4_m2_replaced_from_p",
        "7.4",
        old="return gap / total if total > 0 else p.clone()",
        new="return p.clone()",
        diagnosis="a rejected draft is replaced from p: what q proposed too often is favoured twice; "
        "draw from the residual",
        killed_by="test_ex07_4_tokens_have_the_large_models_law",
    ),
    Mutant(
        "ex07_4_m3_ratio_upside_down",
        "7.4",
        old="float(p[draft]) / float(q[draft])",
        new="float(q[draft]) / max(float(p[draft]), 1e-300)",
        diagnosis="the ratio is upside down: p over q",
        killed_by="test_ex07_4_accepts_exactly_below_the_ratio",
    ),
    Mutant(
        "ex07_4_m4_not_normalised",
        "7.4",
        old="return gap / total if total > 0 else p.clone()",
        new="return gap if total > 0 else p.clone()",
        diagnosis="the residual does not sum to 1",
        killed_by="test_ex07_4_residual_of_equal_laws_and_of_its_own",
    ),
    Mutant(
        "ex07_4_m5_up_to_and_including",
        "7.4",
        old="return bool(u < min(",
        new="return bool(u <= min(",
        diagnosis="u equal to the probability must be a rejection, or a token of probability 0 comes "
        "through",
        killed_by="test_ex07_4_accepts_exactly_below_the_ratio",
    ),
    Mutant(
        "ex07_4_m6_absolute_difference",
        "7.4",
        old="gap = (p - q).clamp(min=0)",
        new="gap = (p - q).abs()",
        diagnosis="the residual holds tokens that q proposes too often: only what is missing counts, "
        "max(0, p − q)",
        killed_by="test_ex07_4_tokens_have_the_large_models_law",
    ),
]

_FILL = "decode_attention: `keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)` → "
_SAFE = "merge: `safe = outputs.masked_fill((weights == 0)[:, :, None], 0)` → "
_FINITE = "any finite number will do: its weight is exactly 0"
SURVIVORS = {
    _FILL
    + "`keys, values = keys.masked_fill(hidden, 1), values.masked_fill(hidden, 0)`": _FINITE,
    _FILL
    + "`keys, values = keys.masked_fill(hidden, (-1)), values.masked_fill(hidden, 0)`": _FINITE,
    _FILL
    + "`keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 1)`": _FINITE,
    _FILL
    + "`keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, (-1))`": _FINITE,
    _SAFE + "`safe = outputs.masked_fill((weights == 0)[:, :, None], 1)`": _FINITE,
    _SAFE + "`safe = outputs.masked_fill((weights == 0)[:, :, None], (-1))`": _FINITE,
    "pad_batch: `if not 1 <= B <= size:` → `if not 0 <= B <= size:`": (
        "without rows there is no widest table, and max raises ValueError, too"
    ),
    "accept: `return bool(u < min(1.0, float(p[draft]) / float(q[draft])))` → "
    "`return bool(u < min(2.0, float(p[draft]) / float(q[draft])))`": (
        "u is below 1, and so below every bound of 1 or more"
    ),
}
