"""Known mistakes of exercises 01."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    # -- 1.1
    Mutant(
        "ex01_1_m1_dtype_bytes_wrong",
        "1.1",
        old='"bfloat16": 16,',
        new='"bfloat16": 32,',
        diagnosis="a bfloat16 takes 2 bytes, not 4",
        killed_by="test_ex01_1_flops_and_bytes_of_two_byte_numbers",
    ),
    Mutant(
        "ex01_1_m2_multiply_add_is_one",
        "1.1",
        old="return 2 * M * N * K, moved",
        new="return M * N * K, moved",
        diagnosis="a multiply-add is two FLOPs: every element of Y takes K multiplications and K "
        "additions",
        killed_by="test_ex01_1_flops_and_bytes_of_two_byte_numbers",
    ),
    Mutant(
        "ex01_1_m3_result_not_written",
        "1.1",
        old=" + size(M * N, dtype)\n",
        new="\n",
        diagnosis="Y is written too: its M · N numbers are missing from the bytes",
        killed_by="test_ex01_1_flops_and_bytes_of_two_byte_numbers",
    ),
    Mutant(
        "ex01_1_m4_weights_read_for_every_row",
        "1.1",
        old="size(K * N, weight_dtype)",
        new="size(M * K * N, weight_dtype)",
        diagnosis="W is counted once for every row of X: it is read once and used M times",
        killed_by="test_ex01_1_flops_and_bytes_of_two_byte_numbers",
    ),
    Mutant(
        "ex01_1_m5_weight_dtype_ignored",
        "1.1",
        old="size(K * N, weight_dtype)",
        new="size(K * N, dtype)",
        diagnosis="W is counted in the dtype of X: it has weight_dtype where one is given",
        killed_by="test_ex01_1_numbers_of_other_sizes",
    ),
    Mutant(
        "ex01_1_m6_half_a_byte_rounded_down",
        "1.1",
        old="return (numbers * bits[name] + 7) // 8",
        new="return numbers * bits[name] // 8",
        diagnosis="an odd number of int4 takes the byte that it begins: round up",
        killed_by="test_ex01_1_two_int4_share_a_byte",
    ),
    Mutant(
        "ex01_1_m7_int4_takes_a_byte",
        "1.1",
        old='"int4": 4',
        new='"int4": 8',
        diagnosis="two numbers of int4 share a byte",
        killed_by="test_ex01_1_two_int4_share_a_byte",
    ),
    Mutant(
        "ex01_1_m8_only_one_dtype_checked",
        "1.1",
        old="for name in (dtype, weight_dtype):",
        new="for name in (dtype,):",
        diagnosis="weight_dtype is not checked: a name that is not in the list raises ValueError",
        killed_by="test_ex01_1_refuses_what_is_no_product",
    ),
    # -- 1.2
    Mutant(
        "ex01_2_m1_kv_counted_once",
        "1.2",
        old="token = L * 2 * K * C * kv_bytes",
        new="token = L * K * C * kv_bytes",
        diagnosis="keys are counted, values are not: both are read and written",
        killed_by="test_ex01_2_kv_of_one_request",
    ),
    Mutant(
        "ex01_2_m2_heads_instead_of_kv_heads",
        "1.2",
        old="token = L * 2 * K * C * kv_bytes",
        new="token = L * 2 * H * C * kv_bytes",
        diagnosis="the KV of every query head is counted: query heads share KV heads, and only "
        "num_kv_heads of them are kept",
        killed_by="test_ex01_2_kv_of_one_request",
    ),
    Mutant(
        "ex01_2_m3_embedding_counted_twice_with_tied_weights",
        "1.2",
        old="+ config.vocab_size * D",
        new="+ config.vocab_size * D * (2 if config.tie_word_embeddings else 1)",
        diagnosis="with tied embeddings the matrix is counted twice: it is read whole once, as the "
        "head; as the embedding one row a request",
        killed_by="test_ex01_2_weights_are_shared_and_tied_ones_read_once",
    ),
    Mutant(
        "ex01_2_m4_head_left_out_with_tied_weights",
        "1.2",
        old="+ config.vocab_size * D",
        new="+ config.vocab_size * D * (0 if config.tie_word_embeddings else 1)",
        diagnosis="with tied embeddings there is no second matrix, but the head still reads the "
        "first one, whole",
        killed_by="test_ex01_2_weights_are_shared_and_tied_ones_read_once",
    ),
    Mutant(
        "ex01_2_m5_whole_embedding_read",
        "1.2",
        old="numbers = batch * D + L * layer",
        new="numbers = config.vocab_size * D + L * layer",
        diagnosis="the whole embedding is counted: a request needs one row of it",
        killed_by="test_ex01_2_weights_of_one_request",
    ),
    Mutant(
        "ex01_2_m6_weights_read_by_every_request",
        "1.2",
        old="numbers = batch * D + L * layer + D",
        new="numbers = batch * D + batch * L * layer + D",
        diagnosis="the layers are counted once for every request: a step reads them once for all",
        killed_by="test_ex01_2_weights_are_shared_and_tied_ones_read_once",
    ),
    Mutant(
        "ex01_2_m7_padded_to_the_longest",
        "1.2",
        old='"kv_read": sum(contexts) * token',
        new='"kv_read": batch * max(contexts) * token',
        diagnosis="every request is counted with the longest context: each reads its own",
        killed_by="test_ex01_2_many_requests_of_unequal_contexts",
    ),
    Mutant(
        "ex01_2_m8_newest_token_not_read",
        "1.2",
        old='"kv_read": sum(contexts) * token',
        new='"kv_read": (sum(contexts) - batch) * token',
        diagnosis="the token of this step attends to itself: its own key and value are read as well",
        killed_by="test_ex01_2_kv_of_one_request",
    ),
    Mutant(
        "ex01_2_m9_queries_have_kv_heads",
        "1.2",
        old="D * (H + 2 * K) * C",
        new="D * (3 * K) * C",
        diagnosis="the matrix for queries has H heads, only those for keys and values have K",
        killed_by="test_ex01_2_weights_of_one_request",
    ),
    Mutant(
        "ex01_2_m10_kv_in_the_size_of_weights",
        "1.2",
        old="token = L * 2 * K * C * kv_bytes",
        new="token = L * 2 * K * C * weight_bytes",
        diagnosis="KV is counted in weight_bytes: it has a size of its own, kv_bytes",
        killed_by="test_ex01_2_other_numbers_and_nobody",
    ),
    # -- 1.3
    Mutant(
        "ex01_3_m1_rounded_down",
        "1.3",
        old="return -(-needed // gained)",
        new="return needed // gained",
        diagnosis="the quotient is rounded down: at that batch the arithmetic is still the shorter",
        killed_by="test_ex01_3_weights_alone",
    ),
    Mutant(
        "ex01_3_m2_strictly_longer",
        "1.3",
        old="return -(-needed // gained)",
        new="return needed // gained + 1",
        diagnosis="off by one where the division leaves no rest: equal times count, 'at least as "
        "long'",
        killed_by="test_ex01_3_weights_alone",
    ),
    Mutant(
        "ex01_3_m3_bytes_of_requests_forgotten",
        "1.3",
        old="gained = request_flops * bandwidth - request_bytes * peak_flops",
        new="gained = request_flops * bandwidth",
        diagnosis="each request's own bytes are left out: they grow with the batch like its FLOPs",
        killed_by="test_ex01_3_requests_with_bytes_of_their_own",
    ),
    Mutant(
        "ex01_3_m4_none_forgotten",
        "1.3",
        old="if gained <= 0:\n        return None\n",
        new="if gained == 0:\n        return None\n",
        diagnosis="a batch is returned where there is none: when a request's bytes take longer than "
        "its FLOPs, no batch catches up",
        killed_by="test_ex01_3_there_may_be_none",
    ),
    Mutant(
        "ex01_3_m5_floats",
        "1.3",
        old="return -(-needed // gained)",
        new="return math.ceil(needed / gained)",
        diagnosis="large numbers are divided as floats, which hold 16 digits: stay with ints",
        killed_by="test_ex01_3_large_numbers_are_exact",
    ),
    Mutant(
        "ex01_3_m6_ridge_upside_down",
        "1.3",
        old="gained = request_flops * bandwidth - request_bytes * peak_flops\n",
        new="peak_flops, bandwidth = bandwidth, peak_flops\n"
        "    gained = request_flops * bandwidth - request_bytes * peak_flops\n",
        diagnosis="peak and bandwidth have changed places: FLOPs are divided by peak_flops, bytes by "
        "bandwidth",
        killed_by="test_ex01_3_weights_alone",
    ),
    # -- 1.4
    Mutant(
        "ex01_4_m1_idle_forgotten",
        "1.4",
        old="seconds * (idle_watts + busy * (max_watts - idle_watts))",
        new="seconds * busy * max_watts",
        diagnosis="an idle chip draws nothing here: idle_watts flow whatever it does",
        killed_by="test_ex01_4_one_step",
    ),
    Mutant(
        "ex01_4_m2_idle_added_on_top",
        "1.4",
        old="seconds * (idle_watts + busy * (max_watts - idle_watts))",
        new="seconds * (idle_watts + busy * max_watts)",
        diagnosis="a busy chip draws max_watts in all, not max_watts on top of idle_watts",
        killed_by="test_ex01_4_one_step",
    ),
    Mutant(
        "ex01_4_m3_steps_without_tokens_are_free",
        "1.4",
        old="joules.append(seconds",
        new="joules.append((tokens > 0) * seconds",
        diagnosis="steps that wrote no token are left out: their joules are spent all the same",
        killed_by="test_ex01_4_many_steps_some_without_tokens",
    ),
    Mutant(
        "ex01_4_m4_average_of_averages",
        "1.4",
        old="return math.fsum(joules) / written",
        new="each = [j / s[2] for j, s in zip(joules, steps) if s[2]]\n"
        "    return sum(each) / len(each)",
        diagnosis="the joules a token of each step are averaged: sum joules and tokens first, then "
        "divide once",
        killed_by="test_ex01_4_many_steps_some_without_tokens",
    ),
    Mutant(
        "ex01_4_m5_full_power_all_the_time",
        "1.4",
        old="seconds * (idle_watts + busy * (max_watts - idle_watts))",
        new="seconds * max_watts",
        diagnosis="full power is counted whatever the chip does: weigh it by busy",
        killed_by="test_ex01_4_one_step",
    ),
    Mutant(
        "ex01_4_m6_busy_not_checked",
        "1.4",
        old="if not 0 <= busy <= 1:",
        new="if busy > 1:",
        diagnosis="a negative busy is not refused",
        killed_by="test_ex01_4_refuses_what_has_no_answer",
    ),
]

SURVIVORS = {
    "matmul_cost.size: `return (numbers * bits[name] + 7) // 8` → "
    "`return (numbers * bits[name] + 6) // 8`": (
        "every dtype has a multiple of 4 bits: beyond whole bytes there are 0 or 4 bits, and adding 4 would do"
    ),
}
