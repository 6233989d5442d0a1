"""Known mistakes of exercises 04."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    # -- 4.1
    Mutant(
        "ex04_1_m1_positions_of_the_step",
        "4.1",
        old="in range(computed[b], computed[b] + new[b]):",
        new="in range(new[b]):",
        diagnosis="positions begin at 0 in every step: a block's place is position // P, where the "
        "position counts all of the request's earlier tokens",
        killed_by="test_ex04_1_tokens_that_follow_earlier_ones",
    ),
    Mutant(
        "ex04_1_m2_off_by_one_at_the_boundary",
        "4.1",
        old="index, offset = divmod(position, block_size)",
        new="index, offset = max(0, position - 1) // block_size, position % block_size",
        diagnosis="the first token of a block is still looked up in the block before it",
        killed_by="test_ex04_1_tokens_that_follow_earlier_ones",
    ),
    Mutant(
        "ex04_1_m3_offset_not_wrapped",
        "4.1",
        old="slots.append(table[index] * block_size + offset)",
        new="slots.append(table[index] * block_size + position)",
        diagnosis="the whole position is added to the block's first slot, not its offset in the block",
        killed_by="test_ex04_1_a_prompt_from_its_first_token",
    ),
    Mutant(
        "ex04_1_m4_block_id_is_taken_for_a_slot",
        "4.1",
        old="slots.append(table[index] * block_size + offset)",
        new="slots.append(table[index] + offset)",
        diagnosis="a block id counts blocks of P slots: multiply it by block_size",
        killed_by="test_ex04_1_a_prompt_from_its_first_token",
    ),
    Mutant(
        "ex04_1_m5_first_table_for_all",
        "4.1",
        old="index, offset = divmod(position, block_size)",
        new="table = block_tables[0]\n            index, offset = divmod(position, block_size)",
        diagnosis="every request is looked up in the first request's table",
        killed_by="test_ex04_1_a_step_of_many_requests",
    ),
    Mutant(
        "ex04_1_m6_short_table_not_refused",
        "4.1",
        old="if index >= len(table):",
        new="if index > len(table):",
        diagnosis="a table that is one block too short is not refused with ValueError",
        killed_by="test_ex04_1_refuses_a_table_that_is_too_short",
    ),
    Mutant(
        "ex04_1_m7_exact_fit_refused",
        "4.1",
        old="if index >= len(table):",
        new="if (computed[b] + new[b]) // block_size >= len(table):",
        diagnosis="a table that the tokens fill exactly is refused: the last position is "
        "computed + new - 1, and only the block of that one is needed",
        killed_by="test_ex04_1_a_prompt_from_its_first_token",
    ),
    # -- 4.2
    Mutant(
        "ex04_2_m1_new_block_when_just_full",
        "4.2",
        old="wanted = -(-(num_tokens + num_new) // block_size)",
        new="wanted = (num_tokens + num_new) // block_size + 1",
        diagnosis="tokens that fill their last block exactly get one more block, which stays empty",
        killed_by="test_ex04_2_as_many_blocks_as_the_tokens_need",
    ),
    Mutant(
        "ex04_2_m2_last_block_rounded_down",
        "4.2",
        old="wanted = -(-(num_tokens + num_new) // block_size)",
        new="wanted = (num_tokens + num_new) // block_size",
        diagnosis="tokens that fill a block in part get no block for it: round up",
        killed_by="test_ex04_2_as_many_blocks_as_the_tokens_need",
    ),
    Mutant(
        "ex04_2_m3_room_in_the_last_block_forgotten",
        "4.2",
        old="needed = max(0, wanted - len(table))",
        new="needed = -(-num_new // block_size)",
        diagnosis="only the new tokens are counted; the room left in the last block is not used",
        killed_by="test_ex04_2_as_many_blocks_as_the_tokens_need",
    ),
    Mutant(
        "ex04_2_m4_taken_from_the_back",
        "4.2",
        old="taken = free[:needed]\n    del free[:needed]",
        new="taken = [free.pop() for _ in range(needed)]",
        diagnosis="blocks are taken from the end of `free`, not from its front",
        killed_by="test_ex04_2_as_many_blocks_as_the_tokens_need",
    ),
    Mutant(
        "ex04_2_m5_taken_blocks_stay_free",
        "4.2",
        old="    del free[:needed]\n",
        new="",
        diagnosis="a block that was taken is still in `free`: it will be handed out twice",
        killed_by="test_ex04_2_no_block_is_handed_out_twice_or_taken_early",
    ),
    Mutant(
        "ex04_2_m6_half_an_allocation",
        "4.2",
        old='raise RuntimeError(f"{needed} blocks wanted, {len(free)} are free")',
        new='table += free\n        free.clear()\n        raise RuntimeError("too few")',
        diagnosis="blocks were taken before it was known that there are too few: a refused call must "
        "change nothing",
        killed_by="test_ex04_2_all_or_nothing",
    ),
    Mutant(
        "ex04_2_m7_spare_room_counts_below_zero",
        "4.2",
        old="needed = max(0, wanted - len(table))",
        new="needed = wanted - len(table)",
        diagnosis="a table with room to spare makes the number of blocks negative, and a slice with "
        "it takes nearly all",
        killed_by="test_ex04_2_no_block_is_handed_out_twice_or_taken_early",
    ),
    # -- 4.3
    Mutant(
        "ex04_3_m1_cow_forgotten",
        "4.3",
        old="shared = offset > 0 and self.ref_count[table[-1]] > 1",
        new="shared = False",
        diagnosis="a shared block is written in place: copy-on-write is missing, and one request reads "
        "what another wrote",
        killed_by="test_ex04_3_who_writes_into_a_shared_block_copies_it",
    ),
    Mutant(
        "ex04_3_m2_old_block_keeps_its_count",
        "4.3",
        old="                self.ref_count[table[-1]] -= 1\n",
        new="",
        diagnosis="after a copy the old block has one holder fewer; its count must go down, or it is "
        "never free again",
        killed_by="test_ex04_3_who_writes_into_a_shared_block_copies_it",
    ),
    Mutant(
        "ex04_3_m3_fork_does_not_count",
        "4.3",
        old="        for block in self.tables[child]:\n            self.ref_count[block] += 1\n",
        new="",
        diagnosis="a fork adds a holder to every block of the table: their counts go up by one",
        killed_by="test_ex04_3_a_fork_shares_all_blocks",
    ),
    Mutant(
        "ex04_3_m4_one_list_for_both",
        "4.3",
        old="self.tables[child] = list(self.tables[parent])",
        new="self.tables[child] = self.tables[parent]",
        diagnosis="parent and child hold one list: what one appends, the other has too",
        killed_by="test_ex04_3_a_fork_shares_all_blocks",
    ),
    Mutant(
        "ex04_3_m5_freed_while_still_mapped",
        "4.3",
        old="            if self.ref_count[block] == 0:\n                self.free_blocks.append(block)",
        new="            self.free_blocks.append(block)",
        diagnosis="a block goes back to `free_blocks` while another table still holds it",
        killed_by="test_ex04_3_a_block_is_free_when_nobody_holds_it",
    ),
    Mutant(
        "ex04_3_m6_double_free",
        "4.3",
        old="        del self.lengths[name]\n        for block in reversed(self.tables.pop(name)):",
        new="        for block in reversed(self.tables[name]):",
        diagnosis="the request is still there after `free`: freed again, its blocks are given back twice",
        killed_by="test_ex04_3_a_block_is_free_when_nobody_holds_it",
    ),
    Mutant(
        "ex04_3_m7_full_blocks_are_copied",
        "4.3",
        old="shared = offset > 0 and self.ref_count[table[-1]] > 1",
        new="shared = bool(table) and self.ref_count[table[-1]] > 1",
        diagnosis="the last block is full and shared: it is only read, so nothing is copied; the token "
        "goes into a new block",
        killed_by="test_ex04_3_who_writes_into_a_shared_block_copies_it",
    ),
    Mutant(
        "ex04_3_m8_copied_in_the_wrong_direction",
        "4.3",
        old="copy = (table[-1], block)",
        new="copy = (block, table[-1])",
        diagnosis="`copy` is (source, destination): from the shared block into the new one",
        killed_by="test_ex04_3_who_writes_into_a_shared_block_copies_it",
    ),
    Mutant(
        "ex04_3_m9_the_last_holder_copies_too",
        "4.3",
        old="shared = offset > 0 and self.ref_count[table[-1]] > 1",
        new="shared = offset > 0 and self.ref_count[table[-1]] > 0",
        diagnosis="a block with one holder is copied: its owner may write in place",
        killed_by="test_ex04_3_who_writes_into_a_shared_block_copies_it",
    ),
    Mutant(
        "ex04_3_m10_head_freed_first",
        "4.3",
        old="in reversed(self.tables.pop(name)):",
        new="in self.tables.pop(name):",
        diagnosis="blocks are given back from the front of the table; the last one comes first",
        killed_by="test_ex04_3_a_block_is_free_when_nobody_holds_it",
    ),
    Mutant(
        "ex04_3_m11_refused_append_leaves_a_trace",
        "4.3",
        old="        copy = None\n        if offset == 0 or shared:",
        new="        copy = None\n        self.lengths[name] += 0 if self.free_blocks else offset > 0\n"
        "        if offset == 0 or shared:",
        diagnosis="an append that is refused for want of blocks has already changed the pool",
        killed_by="test_ex04_3_a_block_is_free_when_nobody_holds_it",
    ),
    # -- 4.4
    Mutant(
        "ex04_4_m1_last_partial_block_dropped",
        "4.4",
        old="seen = position < seq_lens[:, None]  # [B, P]",
        new="seen = position < (seq_lens // P * P).clamp(min=1)[:, None]  # [B, P]",
        diagnosis="the tokens of a last block that is not full are left out: seq_lens // P counts "
        "whole blocks only",
        killed_by="test_ex04_4_one_request_one_head",
    ),
    Mutant(
        "ex04_4_m2_one_slot_too_many",
        "4.4",
        old="seen = position < seq_lens[:, None]  # [B, P]",
        new="seen = position <= seq_lens[:, None]  # [B, P]",
        diagnosis="the slot after the last token is read as well: positions are below seq_lens",
        killed_by="test_ex04_4_one_request_one_head",
    ),
    Mutant(
        "ex04_4_m3_masked_values_not_zeroed",
        "4.4",
        old="values = value_cache[blocks].masked_fill(hidden, 0)  # 0 · NaN is NaN",
        new="values = value_cache[blocks]",
        diagnosis="masked values are multiplied by a weight of 0, but 0 · NaN is NaN: fill them with 0 "
        "first",
        killed_by="test_ex04_4_what_nobody_wrote_never_matters",
    ),
    Mutant(
        "ex04_4_m10_masked_scores_count",
        "4.4",
        old="scores = scores.masked_fill(~seen[:, None], -math.inf)",
        new="pass",
        diagnosis="a masked key that is 0 has the score 0, and exp(0) is not 0: masked scores must be "
        "-inf, or they add to the sum",
        killed_by="test_ex04_4_one_request_one_head",
    ),
    Mutant(
        "ex04_4_m4_output_not_rescaled",
        "4.4",
        old="out = out * shrink[..., None] + here",
        new="out = out + here",
        diagnosis="when a later block has a larger score, what was summed before must shrink by "
        "exp(m - new); the output does not",
        killed_by="test_ex04_4_ragged_lengths_and_grouped_heads",
    ),
    Mutant(
        "ex04_4_m5_sum_not_rescaled",
        "4.4",
        old="total = total * shrink + weights.sum(-1)",
        new="total = total + weights.sum(-1)",
        diagnosis="when a later block has a larger score, what was summed before must shrink by "
        "exp(m - new); the sum of weights does not",
        killed_by="test_ex04_4_ragged_lengths_and_grouped_heads",
    ),
    Mutant(
        "ex04_4_m6_no_maximum_subtracted",
        "4.4",
        old="new = torch.maximum(largest, scores.amax(-1))",
        new="new = torch.zeros_like(largest)\n        largest = new",
        diagnosis="the exponential of a large score overflows: subtract the largest score first",
        killed_by="test_ex04_4_large_scores_do_not_overflow",
    ),
    Mutant(
        "ex04_4_m7_heads_dealt_in_turn",
        "4.4",
        old="values = values.repeat_interleave(H // K, dim=2)  # [B, P, H, C]",
        new="values = values.repeat(1, 1, H // K, 1)  # [B, P, H, C]",
        diagnosis="query head h reads KV head h // (H / K), neighbours share; here heads are dealt in "
        "turn, h mod K",
        killed_by="test_ex04_4_ragged_lengths_and_grouped_heads",
    ),
    Mutant(
        "ex04_4_m8_scale_forgotten",
        "4.4",
        old='torch.einsum("bhc,bphc->bhp", query, keys) * scale',
        new='torch.einsum("bhc,bphc->bhp", query, keys)',
        diagnosis="the scores are not multiplied by `scale`",
        killed_by="test_ex04_4_one_request_one_head",
    ),
    Mutant(
        "ex04_4_m9_whole_cache_cleaned",
        "4.4",
        old="values = value_cache[blocks].masked_fill(hidden, 0)  # 0 · NaN is NaN",
        new="values = value_cache.nan_to_num(0, 0, 0)[blocks].masked_fill(hidden, 0)",
        diagnosis="the whole cache is copied in order to read a block of it",
        killed_by="test_ex04_4_no_tensor_of_a_whole_context",
    ),
    Mutant(
        "ex04_4_m10_padding_names_the_last_block",
        "4.4",
        old="blocks = block_tables[:, i].clamp(min=0)",
        new="blocks = block_tables[:, i]",
        diagnosis="-1 names the last block in Python",
        status="equivalent",
        note="what the padding names is masked, whichever block that is; on a GPU kernel, whose "
        "addresses do not wrap around, the clamp is needed",
    ),
]

_MASKED = "what stands there is masked in the scores and weighed with 0, so any finite number will do"
_KEYS = "paged_attention: `keys = key_cache[blocks].masked_fill(hidden, 0)` → "
_VALUES = "paged_attention: `values = value_cache[blocks].masked_fill(hidden, 0)  # 0 · NaN is NaN` → "
SURVIVORS = {
    "paged_attention: `blocks = block_tables[:, i].clamp(min=0)` → "
    "`blocks = block_tables[:, i].clamp(min=(-1))`": "any block may stand in for the padding",
    _KEYS + "`keys = key_cache[blocks].masked_fill(hidden, 1)`": _MASKED,
    _KEYS + "`keys = key_cache[blocks].masked_fill(hidden, (-1))`": _MASKED,
    _VALUES
    + "`values = value_cache[blocks].masked_fill(hidden, 1)  # 0 · NaN is NaN`": _MASKED,
    _VALUES
    + "`values = value_cache[blocks].masked_fill(hidden, (-1))  # 0 · NaN is NaN`": _MASKED,
}
