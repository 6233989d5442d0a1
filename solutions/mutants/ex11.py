"""Known mistakes of exercises 11."""

from minifer.course.grading.mutants import Mutant

_NORM, _GEMV, _ROPE = (
    "test_ex11_1_rows_of_any_width",
    "test_ex11_2_any_n_and_k",
    "test_ex11_3_turns_every_head",
)
_WHOLE, _CAUSAL = (
    "test_ex11_4_every_query_sees_every_key",
    "test_ex11_4_causal_queries_are_the_last",
)
_LENGTHS = "test_ex11_5_contexts_of_any_length"

MUTANTS = [
    # -- 11.1
    Mutant(
        "ex11_1_m1_no_load_mask",
        "11.1",
        old="x = tl.load(X + row * row_stride + column, mask=inside, other=0.0)",
        new="x = tl.load(X + row * row_stride + column)",
        diagnosis="lanes from D to WIDTH are read: of the next row, and behind the last one of "
        "whatever lies there. Mask the load",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m2_no_other",
        "11.1",
        old="x = tl.load(X + row * row_stride + column, mask=inside, other=0.0)",
        new="x = tl.load(X + row * row_stride + column, mask=inside)",
        diagnosis="masked lanes have no `other`, so they hold anything on a GPU, and the sum has it",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m3_no_store_mask",
        "11.1",
        old="tl.store(OUT + row * D + column, y, mask=inside)",
        new="tl.store(OUT + row * D + column, y)",
        diagnosis="the store is not masked: it writes into the next row, and behind the tensor",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m4_eps_outside",
        "11.1",
        old="tl.sqrt(mean + eps)",
        new="(tl.sqrt(mean) + eps)",
        diagnosis="eps is added to the root; it belongs under it, to the mean",
        killed_by="test_ex11_1_eps_stands_under_the_root",
    ),
    Mutant(
        "ex11_1_m5_mean_over_the_block",
        "11.1",
        old="mean = tl.sum(x * x, 0) / D",
        new="mean = tl.sum(x * x, 0) / WIDTH",
        diagnosis="the mean is over WIDTH lanes, of which only D are real",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m6_float16_squares",
        "11.1",
        old="mask=inside, other=0.0).to(tl.float32)\n    weight",
        new="mask=inside, other=0.0)\n    weight",
        diagnosis="squares are float16 and overflow from 256 on: .to(tl.float32) first",
        killed_by="test_ex11_1_squares_of_float16_do_not_overflow",
    ),
    Mutant(
        "ex11_1_m7_stride_ignored",
        "11.1",
        old="X + row * row_stride + column",
        new="X + row * D + column",
        diagnosis="rows of X begin row_stride apart, not D: what lies between is nobody's",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m8_out_with_the_stride_of_x",
        "11.1",
        old="OUT + row * D + column",
        new="OUT + row * row_stride + column",
        diagnosis="OUT is dense: its rows are D apart, whatever X's are",
        killed_by=_NORM,
    ),
    Mutant(
        "ex11_1_m9_sum_instead_of_mean",
        "11.1",
        old="mean = tl.sum(x * x, 0) / D",
        new="mean = tl.sum(x * x, 0)",
        diagnosis="the sum of squares is not divided by D",
        killed_by=_NORM,
    ),
    # -- 11.2
    Mutant(
        "ex11_2_m1_columns_not_masked",
        "11.2",
        old="inside = (n < N)[:, None] & (k < K)[None, :]",
        new="inside = (n < N)[:, None] & (k >= 0)[None, :]",
        diagnosis="a tile's columns beyond K are read: they are the next row's, and behind the last row nobody's",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m2_rows_not_masked",
        "11.2",
        old="inside = (n < N)[:, None] & (k < K)[None, :]",
        new="inside = (n >= 0)[:, None] & (k < K)[None, :]",
        diagnosis="a tile's rows beyond N are read",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m3_x_not_masked",
        "11.2",
        old="x = tl.load(X + k, mask=k < K, other=0.0)",
        new="x = tl.load(X + k)",
        diagnosis="x is read beyond K: a weight of 0 does not silence what is there, 0 · NaN is NaN",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m4_store_not_masked",
        "11.2",
        old="tl.store(OUT + n, acc, mask=n < N)",
        new="tl.store(OUT + n, acc)",
        diagnosis="rows beyond N are written: behind `out` lies somebody else's memory",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m5_float16_accumulator",
        "11.2",
        old="acc += tl.sum(w.to(tl.float32) * x[None, :], 1)",
        new="acc = (acc + tl.sum(w.to(tl.float32) * x[None, :], 1)).to(X.dtype.element_ty).to(tl.float32)",
        diagnosis="the accumulator is float16: from 2,048 on, adding 1 changes nothing",
        killed_by="test_ex11_2_sums_are_float32",
    ),
    Mutant(
        "ex11_2_m6_last_tile_dropped",
        "11.2",
        old="for start in range(0, K, BK):",
        new="for start in range(0, K // BK * BK, BK):",
        diagnosis="the ragged tile at the end of a row is left out",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m7_grid_rounded_down",
        "11.2",
        old="grid = (triton.cdiv(N, BN),)",
        new="grid = (max(N // BN, 1),)",
        diagnosis="the grid is rounded down: the last rows have no program",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m8_grid_has_spare_programs",
        "11.2",
        old="grid = (triton.cdiv(N, BN),)",
        new="grid = (N // BN + 1,)",
        diagnosis="where BN divides N, a program too many is launched",
        killed_by="test_ex11_2_every_weight_is_read_once",
    ),
    Mutant(
        "ex11_2_m9_rows_are_a_tile_apart",
        "11.2",
        old="W + n[:, None] * K + k[None, :]",
        new="W + n[:, None] * BK + k[None, :]",
        diagnosis="rows of the matrix are K elements apart, not BK",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m10_no_other",
        "11.2",
        old="mask=inside, other=0.0)\n        acc",
        new="mask=inside)\n        acc",
        diagnosis="masked weights have no `other`, so they hold anything on a GPU, and the sum has it",
        killed_by=_GEMV,
    ),
    Mutant(
        "ex11_2_m11_float16_products_and_sums",
        "11.2",
        old="x = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)\n"
        "        w = tl.load(W + n[:, None] * K + k[None, :], mask=inside, other=0.0)\n"
        "        acc += tl.sum(w.to(tl.float32) * x[None, :], 1)",
        new="x = tl.load(X + k, mask=k < K, other=0.0)\n"
        "        w = tl.load(W + n[:, None] * K + k[None, :], mask=inside, other=0.0)\n"
        "        acc += tl.sum(w * x[None, :], 1)",
        diagnosis="what is loaded stays float16, so products and the sum of a tile are float16: "
        ".to(tl.float32) right after both loads",
        killed_by="test_ex11_2_sums_are_float32",
    ),
    Mutant(
        "ex11_2_m12_float16_products",
        "11.2",
        old="acc += tl.sum(w.to(tl.float32) * x[None, :], 1)",
        new="acc += tl.sum((w * x.to(X.dtype.element_ty)[None, :]).to(tl.float32), 1)",
        diagnosis="products are float16, and float32 only afterwards: convert before you multiply",
        killed_by="test_ex11_2_sums_are_float32",
    ),
    Mutant(
        "ex11_2_m13_float16_tile_sums",
        "11.2",
        old="acc += tl.sum(w.to(tl.float32) * x[None, :], 1)",
        new="acc += tl.sum(w.to(tl.float32) * x[None, :], 1).to(X.dtype.element_ty)",
        diagnosis="the sum of each tile is rounded to float16: round once, at the store",
        killed_by="test_ex11_2_sums_are_float32",
    ),
    # -- 11.3
    Mutant(
        "ex11_3_m1_stored_before_loaded",
        "11.3",
        old="    tl.store(OUT + first, a * cos - b * sin, mask=inside)\n"
        "    tl.store(OUT + first + HALF, b * cos + a * sin, mask=inside)",
        new="    tl.store(OUT + first, a * cos - b * sin, mask=inside)\n"
        "    a = tl.load(X + first, mask=inside, other=0.0).to(tl.float32)\n"
        "    tl.store(OUT + first + HALF, b * cos + a * sin, mask=inside)",
        diagnosis="in place, the first half is overwritten before the second one is computed from it: "
        "load both, then store",
        killed_by="test_ex11_3_in_place",
    ),
    Mutant(
        "ex11_3_m2_sign",
        "11.3",
        old="b * cos + a * sin",
        new="b * cos - a * sin",
        diagnosis="a sign: (a, b) → (a · cos − b · sin, b · cos + a · sin)",
        killed_by=_ROPE,
    ),
    Mutant(
        "ex11_3_m3_neighbours_are_pairs",
        "11.3",
        old="    first = head * 2 * HALF + pair\n"
        "    a = tl.load(X + first, mask=inside, other=0.0).to(tl.float32)\n"
        "    b = tl.load(X + first + HALF, mask=inside, other=0.0).to(tl.float32)",
        new="    first = head * 2 * HALF + pair\n"
        "    a = tl.load(X + first + pair, mask=inside, other=0.0).to(tl.float32)\n"
        "    b = tl.load(X + first + pair + 1, mask=inside, other=0.0).to(tl.float32)",
        diagnosis="pairs are taken from neighbours, 2 i and 2 i + 1; here they are i and i + HALF",
        killed_by=_ROPE,
    ),
    Mutant(
        "ex11_3_m4_angle_of_the_head",
        "11.3",
        old="token = head // H",
        new="token = head % H",
        diagnosis="the angle is that of the head's number; it belongs to the token, program // H",
        killed_by=_ROPE,
    ),
    Mutant(
        "ex11_3_m5_no_mask",
        "11.3",
        old="inside = pair < HALF",
        new="inside = pair >= 0",
        diagnosis="lanes from HALF to PAIRS are not masked: they are the other half, or the next head",
        killed_by=_ROPE,
    ),
    Mutant(
        "ex11_3_m6_angles_rounded",
        "11.3",
        old="cos = tl.load(COS + token * HALF + pair, mask=inside, other=1.0)",
        new="cos = tl.load(COS + token * HALF + pair, mask=inside, other=1.0).to(X.dtype.element_ty)",
        diagnosis="the cosine is rounded to the dtype of X: products are float32, and so are angles",
        killed_by="test_ex11_3_float16_is_rounded_once",
    ),
    Mutant(
        "ex11_3_m7_half_is_not_turned",
        "11.3",
        old="    tl.store(OUT + first + HALF, b * cos + a * sin, mask=inside)",
        new="    tl.store(OUT + first + HALF, b, mask=inside)",
        diagnosis="the second half is copied, not turned",
        killed_by=_ROPE,
    ),
    Mutant(
        "ex11_3_m8_neighbours_are_pairs_in_and_out",
        "11.3",
        old="    first = head * 2 * HALF + pair\n"
        "    a = tl.load(X + first, mask=inside, other=0.0).to(tl.float32)\n"
        "    b = tl.load(X + first + HALF, mask=inside, other=0.0).to(tl.float32)\n"
        "    cos = tl.load(COS + token * HALF + pair, mask=inside, other=1.0)\n"
        "    sin = tl.load(SIN + token * HALF + pair, mask=inside, other=0.0)\n"
        "    tl.store(OUT + first, a * cos - b * sin, mask=inside)\n"
        "    tl.store(OUT + first + HALF, b * cos + a * sin, mask=inside)",
        new="    first = head * 2 * HALF + 2 * pair\n"
        "    a = tl.load(X + first, mask=inside, other=0.0).to(tl.float32)\n"
        "    b = tl.load(X + first + 1, mask=inside, other=0.0).to(tl.float32)\n"
        "    cos = tl.load(COS + token * HALF + pair, mask=inside, other=1.0)\n"
        "    sin = tl.load(SIN + token * HALF + pair, mask=inside, other=0.0)\n"
        "    tl.store(OUT + first, a * cos - b * sin, mask=inside)\n"
        "    tl.store(OUT + first + 1, b * cos + a * sin, mask=inside)",
        diagnosis="neighbours are turned, 2 i with 2 i + 1, as in the paper on RoPE; here pair i is "
        "(head[i], head[i + HALF])",
        killed_by=_ROPE,
    ),
    # -- 11.4: the twelve of the lecture's table, and what memory adds
    Mutant(
        "ex11_4_m1_scale",
        "11.4",
        old="q, k, v, out, lse, T, S, C, C**-0.5, BM=BM",
        new="q, k, v, out, lse, T, S, C, (C + 1) ** -0.5, BM=BM",
        diagnosis="the scale is not 1 / √C",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m2_inputs_rounded",
        "11.4",
        old="q = tl.load(Q + at, mask=rows, other=0.0).to(tl.float32)",
        new="q = tl.load(Q + at, mask=rows, other=0.0).to(tl.float16).to(tl.float32)",
        diagnosis="queries are rounded to 16 bits before the product",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m3_weights_rounded",
        "11.4",
        old="tl.dot(p, v, input_precision",
        new="tl.dot(p.to(tl.float16), v.to(tl.float16), input_precision",
        diagnosis="weights and values are rounded to 16 bits before their product",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m4_no_maximum",
        "11.4",
        old="new_top = tl.maximum(top, tl.max(scores, 1))\n        p = tl.exp(scores - new_top[:, None])",
        new="new_top = tl.zeros([BM], tl.float32)\n        top = new_top\n        p = tl.exp(scores)",
        diagnosis="exp overflows above 88, and all weights are 0 far below it: subtract the largest score",
        killed_by="test_ex11_4_large_scores",
    ),
    Mutant(
        "ex11_4_m5_last_tile_dropped",
        "11.4",
        old="for start in range(0, last, BN):",
        new="for start in range(0, tl.maximum(last // BN, 1) * BN, BN):",
        diagnosis="the ragged tile of keys at the end is left out",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m6_hidden_scores_are_minus_20",
        "11.4",
        old='scores = tl.where(seen, scores, -float("inf"))\n        new_top = tl.maximum(top, tl.max(scores, 1))',
        new="scores = tl.where(seen, scores, -20.0)\n        new_top = tl.maximum(top, tl.max(scores, 1))",
        diagnosis="hidden scores are a small number, and weigh something: −∞ weighs 0",
        killed_by="test_ex11_4_large_scores",
    ),
    Mutant(
        "ex11_4_m7_causal_ignored",
        "11.4",
        old="seen = seen & (s[None, :] <= position[:, None])",
        new="seen = seen & (s[None, :] <= position[:, None] + S)",
        diagnosis="queries see later keys: `causal` hides nothing",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m8_strictly_before",
        "11.4",
        old="(s[None, :] <= position[:, None])",
        new="((s[None, :] < position[:, None]) | (s[None, :] == 0))",
        diagnosis="a query does not see its own key: it is ≤, not <",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m9_mask_transposed",
        "11.4",
        old="(s[None, :] <= position[:, None])",
        new="((s[None, :] >= position[:, None]) | (s[None, :] == 0))",
        diagnosis="queries see the keys after them and not those before",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m10_no_rescale",
        "11.4",
        old="shrink = tl.exp(top - new_top)\n        total = total * shrink + tl.sum(p, 1)",
        new="shrink = tl.full([BM], 1.0, tl.float32)\n        total = total * shrink + tl.sum(p, 1)",
        diagnosis="when the largest score grows, both sums must shrink by exp(old − new)",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m11_only_the_denominator_shrinks",
        "11.4",
        old="acc = acc * shrink[:, None] + tl.dot",
        new="acc = acc + tl.dot",
        diagnosis="the sum of weights is scaled down when the largest score grows, the sum of values is not",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m12_softened_denominator",
        "11.4",
        old="acc / total[:, None]",
        new="acc / (total + 0.1)[:, None]",
        diagnosis="something is added to the denominator; it is never 0 here",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m13_queries_are_the_first",
        "11.4",
        old="position = S - T + t",
        new="position = t + S * 0",
        diagnosis="the queries are the last T positions: query t stands at S − T + t",
        killed_by=_CAUSAL,
    ),
    Mutant(
        "ex11_4_m14_reads_the_future",
        "11.4",
        old="last = tl.minimum(S, S - T + tile * BM + BM)",
        new="last = tl.minimum(S, S + tile)",
        diagnosis="tiles of keys that no query of the program sees are read",
        killed_by="test_ex11_4_reads_only_what_it_needs",
    ),
    Mutant(
        "ex11_4_m15_tensor_cores_round",
        "11.4",
        old='scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale',
        new="scores = tl.dot(q, tl.trans(k)) * scale",
        diagnosis='without input_precision="ieee" a GPU rounds float32 operands to 10 bits of mantissa (TF32); '
        "Triton's interpreter does not",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m16_lse_without_the_sum",
        "11.4",
        old="tl.store(LSE + head * T + t, top + tl.log(total), mask=t < T)",
        new="tl.store(LSE + head * T + t, top, mask=t < T)",
        diagnosis="the log-sum-exp is the largest score alone: the logarithm of the sum is missing",
        killed_by=_WHOLE,
    ),
    Mutant(
        "ex11_4_m17_values_not_masked",
        "11.4",
        old="v = tl.load(V + key, mask=there, other=0.0).to(tl.float32)",
        new="v = tl.load(V + key, mask=(c < C)[None, :], other=0.0).to(tl.float32)",
        diagnosis="values beyond S are read: a weight of 0 does not silence them, 0 · NaN is NaN",
        killed_by=_WHOLE,
    ),
    # -- 11.5
    Mutant(
        "ex11_5_m1_one_slot_too_many",
        "11.5",
        old="there = s < length",
        new="there = s <= length",
        diagnosis="one slot too many is read: tokens go from 0 to length − 1",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m2_table_not_masked",
        "11.5",
        old="block = tl.load(entry, mask=there, other=0)",
        new="block = tl.load(entry)",
        diagnosis="the look-up is not masked: table entries behind the last block are read, and there may be none",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m3_values_not_masked",
        "11.5",
        old="v = tl.load(VALUES + offset, mask=inside, other=0.0)",
        new="v = tl.load(VALUES + offset, mask=(c < C)[None, :] & (s >= 0)[:, None], other=0.0)",
        diagnosis="values that are no token's are read: their weight is 0, and 0 · NaN is NaN",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m4_heads_interleaved",
        "11.5",
        old="kv_head = head * K // H",
        new="kv_head = head % K",
        diagnosis="query heads are dealt out to KV heads in turn: neighbours share one, head h has KV head h · K // H",
        killed_by="test_ex11_5_heads_share_their_kv_head",
    ),
    Mutant(
        "ex11_5_m5_one_block_a_tile",
        "11.5",
        old="entry = TABLES + request * table_stride + s // P",
        new="entry = TABLES + request * table_stride + start // P + s * 0",
        diagnosis="a tile's tokens all take the block of its first one: a tile may span several blocks",
        killed_by="test_ex11_5_blocks_and_tiles_of_any_size",
    ),
    Mutant(
        "ex11_5_m6_table_of_request_0",
        "11.5",
        old="entry = TABLES + request * table_stride + s // P",
        new="entry = TABLES + s // P",
        diagnosis="every request reads the first one's blocks",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m7_slot_without_the_block_size",
        "11.5",
        old="slot = (block * P + s % P) * K + kv_head",
        new="slot = (block + s % P) * K + kv_head",
        diagnosis="a slot is block · P + offset: the block's number alone is not where it begins",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m8_no_maximum",
        "11.5",
        old="new_top = tl.maximum(top, tl.max(scores, 0))\n        p = tl.exp(scores - new_top)",
        new="new_top = tl.zeros([1], tl.float32)\n        top = new_top\n        p = tl.exp(scores)",
        diagnosis="exp overflows above 88: subtract the largest score so far",
        killed_by="test_ex11_5_large_scores",
    ),
    Mutant(
        "ex11_5_m9_no_rescale",
        "11.5",
        old="acc = acc * shrink + tl.sum(p[:, None] * v, 0)",
        new="acc = acc + tl.sum(p[:, None] * v, 0)",
        diagnosis="when the largest score grows, the sum of values must shrink, too",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m10_last_tile_dropped",
        "11.5",
        old="for start in range(0, length, BN):",
        new="for start in range(0, tl.maximum(length // BN, 1) * BN, BN):",
        diagnosis="the ragged tile at the end of a context is left out: it holds the newest tokens",
        killed_by=_LENGTHS,
    ),
    Mutant(
        "ex11_5_m11_masked_scores_are_zero",
        "11.5",
        old='scores = tl.where(there, scores, -float("inf"))',
        new="scores = tl.where(there, scores, 0.0)",
        diagnosis="tokens beyond the length get the score 0, and so a weight: it must be −∞",
        killed_by=_LENGTHS,
    ),
]

_UNUSED = "what a masked lane holds is neither added to anything nor stored here"
_OTHER_IS_0 = "the other factor is 0 in every masked lane, or its row is not stored"
_EMPTY = "a tile that begins where the row ends has no lane: nothing is read"
_LAST = "the last axis of a block that has one"


def _other(function: str, line: str, was: str, now: str) -> str:
    """Id of a change of `other`."""
    return f"{function}: `{line.format(was)}` → `{line.format(now)}`"


_LOADS = {
    "rms_norm_kernel": {
        "weight = tl.load(WEIGHT + column, mask=inside, other={}).to(tl.float32)": _UNUSED,
    },
    "gemv_kernel": {
        "x = tl.load(X + k, mask=k < K, other={}).to(tl.float32)": _OTHER_IS_0,
        "w = tl.load(W + n[:, None] * K + k[None, :], mask=inside, other={})": _OTHER_IS_0,
    },
    "rope_kernel": {
        "a = tl.load(X + first, mask=inside, other={}).to(tl.float32)": _UNUSED,
        "b = tl.load(X + first + HALF, mask=inside, other={}).to(tl.float32)": _UNUSED,
        "sin = tl.load(SIN + token * HALF + pair, mask=inside, other={})": _UNUSED,
    },
    "flash_kernel": {
        "q = tl.load(Q + at, mask=rows, other={}).to(tl.float32)": _OTHER_IS_0,
        "k = tl.load(K + key, mask=there, other={}).to(tl.float32)": _OTHER_IS_0,
        "v = tl.load(V + key, mask=there, other={}).to(tl.float32)": _OTHER_IS_0,
    },
    "paged_decode_kernel": {
        "q = tl.load(Q + at, mask=c < C, other={}).to(tl.float32)": _OTHER_IS_0,
        "k = tl.load(KEYS + offset, mask=inside, other={}).to(tl.float32)": _OTHER_IS_0,
        "v = tl.load(VALUES + offset, mask=inside, other={}).to(tl.float32)": _OTHER_IS_0,
    },
}
_BLOCK = "block = tl.load(entry, mask=there, other={})"
_COS = "cos = tl.load(COS + token * HALF + pair, mask=inside, other={})"
SURVIVORS = {
    _other(function, line, "0.0", "1.0"): reason
    for function, lines in _LOADS.items()
    for line, reason in lines.items()
} | {
    _other("rope_kernel", _COS, "1.0", "2.0"): _UNUSED,
    _other(
        "paged_decode_kernel", _BLOCK, "0", "1"
    ): "its slots are masked: any block will do",
    _other(
        "paged_decode_kernel", _BLOCK, "0", "(-1)"
    ): "its slots are masked: any block will do",
    "rms_norm_kernel: `mean = tl.sum(x * x, 0) / D` → `mean = tl.sum(x * x, (-1)) / D`": _LAST,
    "paged_decode_kernel: `total = total * shrink + tl.sum(p, 0)` → "
    "`total = total * shrink + tl.sum(p, (-1))`": _LAST,
    "paged_decode_kernel: `new_top = tl.maximum(top, tl.max(scores, 0))` → "
    "`new_top = tl.maximum(top, tl.max(scores, (-1)))`": _LAST,
    "gemv_kernel: `for start in range(0, K, BK):` → `for start in range(0, K + 1, BK):`": _EMPTY,
    "paged_decode_kernel: `for start in range(0, length, BN):` → "
    "`for start in range(0, length + 1, BN):`": _EMPTY,
}
