"""Known mistakes of exercises 02."""

from minifer.course.grading.mutants import Mutant

CUTS = "test_ex02_3_however_the_tokens_are_cut"
ROWS = "test_ex02_1_a_row_sees_its_own_position_and_all_before"
HALF = "test_ex02_2_half_split_as_computed_by_hand"
MANY = "test_ex02_2_many_tokens_heads_and_positions"
SCORE = "scores.masked_fill(later, -math.inf).softmax(dim=-1)"

MUTANTS = [
    Mutant(
        "ex02_1_m1_offset_ignored",
        "2.1",
        old="torch.arange(num_cached, num_cached + num_new)",
        new="torch.arange(num_new)",
        diagnosis="the mask ignores the cached tokens: row 0 of a chunk stands at position "
        "num_cached, not at 0, and sees num_cached + 1 keys",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_1_m2_off_by_one",
        "2.1",
        old="key[None, :] <= query[:, None]",
        new="key[None, :] < query[:, None]",
        diagnosis="a token does not see itself: the comparison is < where it must be <=. The very "
        "first token then sees nothing, and softmax over nothing is NaN",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_1_m3_sees_the_next",
        "2.1",
        old="key[None, :] <= query[:, None]",
        new="key[None, :] <= query[:, None] + 1",
        diagnosis="a token sees the one after it: at generation that one does not exist yet",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_1_m4_what_is_hidden",
        "2.1",
        old="key[None, :] <= query[:, None]",
        new="key[None, :] > query[:, None]",
        diagnosis="the mask says what is hidden; asked was what may be seen: True means yes",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_1_m5_cached_keys_hidden",
        "2.1",
        old="return key[None, :] <= query[:, None]",
        new="return (key[None, :] <= query[:, None]) & (key[None, :] >= num_cached)",
        diagnosis="the cached keys are hidden: a new token sees all of the past, too",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_1_m6_numbers",
        "2.1",
        old="return key[None, :] <= query[:, None]",
        new="return (key[None, :] <= query[:, None]).float()",
        diagnosis="the mask holds numbers; asked was a bool tensor. Torch adds a float mask to the "
        "scores, so 1 and 0 would hide nothing",
        killed_by=ROWS,
    ),
    Mutant(
        "ex02_2_m1_pairs_swapped",
        "2.2",
        old='    if layout == "half":\n',
        new='    if layout == "interleaved":\n',
        diagnosis="the two layouts are exchanged: half-split pairs dimension i with i + C/2, "
        "interleaved pairs 2i with 2i + 1",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m2_position_restarts_at_0",
        "2.2",
        old="positions.double()[:, None]",
        new="(positions - positions[:1]).double()[:, None]",
        diagnosis="the first token given counts as position 0: in decode that is every token. Use "
        "the positions as they are",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m3_positions_counted",
        "2.2",
        old="positions.double()[:, None]",
        new="torch.arange(T).double()[:, None]",
        diagnosis="the positions are not used: the tokens are counted from 0 instead",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m4_turned_backwards",
        "2.2",
        old="cos, sin = angles.cos(), angles.sin()",
        new="cos, sin = angles.cos(), -angles.sin()",
        diagnosis="the rotation goes backwards: (a, b) becomes (a·cos − b·sin, a·sin + b·cos). "
        "Scores would not notice, a checkpoint's other half or a cache written by others would",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m5_exponent_not_doubled",
        "2.2",
        old="theta ** (-even / C)",
        new="theta ** (-even / (2 * C))",
        diagnosis="the pairs turn too fast: the exponent is −2i/C, which runs from 0 to almost −1; "
        "yours ends at −1/2",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m6_angles_in_float32",
        "2.2",
        old="angles = (positions.double()[:, None] * speed)[:, None, :]",
        new="angles = (positions.float()[:, None] * speed.float())[:, None, :]",
        diagnosis="the angles are rounded to float32: at position 100,000 that is an error of "
        "thousandths of a radian. Compute them in float64",
        killed_by="test_ex02_2_far_positions_are_exact",
    ),
    Mutant(
        "ex02_2_m7_interleaved_put_in_halves",
        "2.2",
        old="    out = torch.empty_like(x)\n",
        new='    out = torch.empty_like(x)\n    if layout == "interleaved":\n'
        "        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)\n",
        diagnosis="the interleaved pairs are turned rightly, but put back as two halves: a pair "
        "goes where it came from",
        killed_by="test_ex02_2_interleaved_as_computed_by_hand",
    ),
    Mutant(
        "ex02_2_m8_input_changed",
        "2.2",
        old="out = torch.empty_like(x)",
        new="out = x",
        diagnosis="x is overwritten: the caller still needs it. Write into a new tensor",
        killed_by=HALF,
    ),
    Mutant(
        "ex02_2_m9_one_angle_for_all_tokens",
        "2.2",
        old="positions.double()[:, None]",
        new="positions.double().sum().expand(T)[:, None]",
        diagnosis="all tokens turn by the same angle: each has a position of its own",
        killed_by=MANY,
    ),
    Mutant(
        "ex02_3_m1_wrong_axis",
        "2.3",
        old="keys = torch.cat((past[0], key), dim=0)\n        values = torch.cat((past[1], value), dim=0)",
        new="keys = torch.cat((past[0], key), dim=1)\n        values = torch.cat((past[1], value), dim=1)",
        diagnosis="the cache is joined along the head axis: new tokens become further heads of the "
        "old ones. Tokens are axis 0",
        killed_by=CUTS,
    ),
    Mutant(
        "ex02_3_m2_mask_ignores_offset",
        "2.3",
        old=".triu(S - T + 1)",
        new=".triu(1)",
        diagnosis="the mask ignores the cached tokens: its diagonal begins in the upper left "
        "corner, so a decoded token sees the oldest key alone",
        killed_by=CUTS,
    ),
    Mutant(
        "ex02_3_m3_mask_off_by_one",
        "2.3",
        old=".triu(S - T + 1)",
        new=".triu(S - T + 2)",
        diagnosis="a new token sees the one after it: the mask's diagonal is one too far right",
        killed_by="test_ex02_3_prefill_without_a_past",
    ),
    Mutant(
        "ex02_3_m4_not_itself",
        "2.3",
        old=".triu(S - T + 1)",
        new=".triu(S - T)",
        diagnosis="a new token does not see itself: the mask's diagonal is one too far left",
        killed_by="test_ex02_3_prefill_without_a_past",
    ),
    Mutant(
        "ex02_3_m5_heads_repeated_in_blocks",
        "2.3",
        old="keys.repeat_interleave(H // K, dim=1)  # [S, H, C]\n"
        "    spread_values = values.repeat_interleave(H // K, dim=1)",
        new="keys.repeat(1, H // K, 1)\n    spread_values = values.repeat(1, H // K, 1)",
        diagnosis="query heads read the wrong key heads: neighbours share one (0, 0, 1, 1), which "
        "is repeat_interleave; repeat gives 0, 1, 0, 1",
        killed_by="test_ex02_3_prefill_without_a_past",
    ),
    Mutant(
        "ex02_3_m6_not_scaled",
        "2.3",
        old=" / math.sqrt(C)",
        new="",
        diagnosis="the scores are not divided by the square root of C",
        killed_by="test_ex02_3_prefill_without_a_past",
    ),
    Mutant(
        "ex02_3_m7_overflow",
        "2.3",
        old=f"weights = {SCORE}",
        new="powers = scores.masked_fill(later, -math.inf).exp()\n"
        "    weights = powers / powers.sum(dim=-1, keepdim=True)",
        diagnosis="large scores overflow: exp(1000) is infinite, and infinite over infinite is "
        "NaN. Subtract the largest score first",
        killed_by="test_ex02_3_large_scores_stay_finite",
    ),
    Mutant(
        "ex02_3_m8_new_before_old",
        "2.3",
        old="keys = torch.cat((past[0], key), dim=0)\n        values = torch.cat((past[1], value), dim=0)",
        new="keys = torch.cat((key, past[0]), dim=0)\n        values = torch.cat((value, past[1]), dim=0)",
        diagnosis="the new tokens stand before the old ones in the cache: oldest first",
        killed_by=CUTS,
    ),
    Mutant(
        "ex02_3_m9_only_the_new_are_kept",
        "2.3",
        old="return out, (keys, values)",
        new="return out, (key, value)",
        diagnosis="the cache returned holds the new tokens only: the next pass has lost the text "
        "before them",
        killed_by=CUTS,
    ),
    Mutant(
        "ex02_3_m10_soft_mask",
        "2.3",
        old=SCORE,
        new="scores.masked_fill(later, -20.0).softmax(dim=-1)",
        diagnosis="a hidden key gets a low score instead of none: where the others are lower, it "
        "is seen. Fill with minus infinity",
        killed_by="test_ex02_3_prefill_without_a_past",
    ),
    Mutant(
        "ex02_4_m1_tpot_over_all_tokens",
        "2.4",
        old="sum(itl) / len(itl) if itl else None",
        new="sum(itl) / len(token_times) if itl else None",
        diagnosis="TPOT divides by the number of tokens: n tokens have n − 1 gaps between them",
        killed_by="test_ex02_4_latencies_of_one_request",
    ),
    Mutant(
        "ex02_4_m2_ttft_is_a_gap",
        "2.4",
        old="itl = gaps[1:]",
        new="itl = gaps",
        diagnosis="the wait for the first token counts as an inter-token latency: it belongs to "
        "TTFT alone, prefill is not decode",
        killed_by="test_ex02_4_latencies_of_one_request",
    ),
    Mutant(
        "ex02_4_m3_e2e_from_the_first_token",
        "2.4",
        old='"e2e": times[-1] - arrival if gaps else None',
        new='"e2e": times[-1] - times[1] if gaps else None',
        diagnosis="the end-to-end time begins at the first token: it begins at the arrival",
        killed_by="test_ex02_4_latencies_of_one_request",
    ),
    Mutant(
        "ex02_4_m4_rates_of_users_added",
        "2.4",
        old="    first = min(arrival for arrival, _ in requests)\n",
        new="    return sum(len(t) / (t[-1] - a) for a, t in requests if t and t[-1] > a)\n"
        "    first = min(arrival for arrival, _ in requests)\n",
        diagnosis="the users' own rates are added: that counts hours twice in which they "
        "overlapped, and none in which nobody ran. All tokens, over the time of the whole run",
        killed_by="test_ex02_4_throughput_of_a_run",
    ),
    Mutant(
        "ex02_4_m5_run_begins_with_the_first_in_the_list",
        "2.4",
        old="first = min(arrival for arrival, _ in requests)",
        new="first = requests[0][0]",
        diagnosis="the run begins with the first request of the list: they come in any order",
        killed_by="test_ex02_4_throughput_of_a_run",
    ),
    Mutant(
        "ex02_4_m6_ends_with_the_last_in_the_list",
        "2.4",
        old="last = max(max(times) for _, times in requests if times)",
        new="last = [times[-1] for _, times in requests if times][-1]",
        diagnosis="the run ends with the last request of the list: another may have its last token "
        "later",
        killed_by="test_ex02_4_throughput_of_a_run",
    ),
    Mutant(
        "ex02_4_m7_time_going_back_accepted",
        "2.4",
        old="if any(gap < 0 for gap in gaps):",
        new="if any(gap < 0 for gap in gaps[:1]):",
        diagnosis="tokens out of order are accepted: a negative latency would be averaged away",
        killed_by="test_ex02_4_edges_and_refusals",
    ),
]
