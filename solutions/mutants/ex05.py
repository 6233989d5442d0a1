"""Known mistakes of exercises 05."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex05_1_m1_hash_without_parent",
        "5.1",
        old="        before = hashlib.sha256(data).digest()\n        names.append(before)",
        new="        names.append(hashlib.sha256(data).digest())",
        diagnosis="the name of the block before is not part of the name: the same tokens after "
        "another beginning get the same name, and are taken for the same keys and values",
        killed_by="test_ex05_1_a_name_depends_on_all_before_it",
    ),
    Mutant(
        "ex05_1_m2_hash_without_salt",
        "5.1",
        old='    if salt is not None:\n        extra += ["salt", salt]\n',
        new="",
        diagnosis="the salt is not part of the name: two tenants share blocks, and one can "
        "measure what the other has asked",
        killed_by="test_ex05_1_salt_and_adapter_are_told_apart",
    ),
    Mutant(
        "ex05_1_m3_kinds_not_hashed",
        "5.1",
        old='extra += ["adapter", adapter]',
        new='extra += ["salt", adapter]',
        diagnosis='the kind is not part of the name: a salt "a" and an adapter "a" look the same',
        killed_by="test_ex05_1_salt_and_adapter_are_told_apart",
    ),
    Mutant(
        "ex05_1_m4_partial_block_named",
        "5.1",
        old="range(0, len(token_ids) - block_size + 1, block_size)",
        new="range(0, len(token_ids), block_size)",
        diagnosis="a block that is not full gets a name: its content will change",
        killed_by="test_ex05_1_names_the_full_blocks_only",
    ),
    Mutant(
        "ex05_2_m1_nothing_left_to_compute",
        "5.2",
        old="most = (len(token_ids) - 1) // block_size",
        new="most = len(token_ids) // block_size",
        diagnosis="a prompt of whole blocks is found in full: no token is left to compute, so "
        "there are no logits to draw the next one from",
        killed_by="test_ex05_2_leaves_a_token_to_compute",
    ),
    Mutant(
        "ex05_2_m2_goes_on_after_a_gap",
        "5.2",
        old="        if names[place] not in cache:\n            break",
        new="        if names[place] not in cache:\n            continue",
        diagnosis="the look-up goes on after a block that is missing: what is found is no longer "
        "a beginning of the prompt",
        killed_by="test_ex05_2_stops_at_a_gap",
    ),
    Mutant(
        "ex05_2_m3_trusts_the_name",
        "5.2",
        old="if tokens != mine or previous != before:",
        new="if previous != before:",
        diagnosis="the entry's tokens are not compared: when two prefixes have the same name, one "
        "reads the other's keys and values",
        killed_by="test_ex05_2_a_name_is_a_hint_tokens_decide",
    ),
    Mutant(
        "ex05_2_m4_forgets_the_block_before",
        "5.2",
        old="if tokens != mine or previous != before:",
        new="if tokens != mine:",
        diagnosis="`previous` is not compared: the right tokens after another beginning count as "
        "found",
        killed_by="test_ex05_2_a_name_is_a_hint_tokens_decide",
    ),
    Mutant(
        "ex05_3_m1_learns_from_a_miss",
        "5.3",
        old="        self._touch(path[:found])\n        return found",
        new="        for name in path[found : found + 1]:\n"
        "            self._parents[name] = path[found - 1] if found else None\n"
        "        self._touch(path[:found])\n        return found",
        diagnosis="`lookup` takes in a name that it did not find: a miss must change nothing",
        killed_by="test_ex05_3_a_miss_changes_nothing",
    ),
    Mutant(
        "ex05_3_m2_inner_before_leaf",
        "5.3",
        old="if name not in inner and name not in path",
        new="if name not in path",
        diagnosis="an inner name is evicted before the leaves behind it: these are still held, but "
        "no look-up can reach them any more",
        killed_by="test_ex05_3_leaves_go_before_inner_names",
    ),
    Mutant(
        "ex05_3_m3_touches_head_first",
        "5.3",
        old="for name in reversed(names):",
        new="for name in names:",
        diagnosis="a path is touched from its first name to its last: the first is then the oldest",
        status="equivalent",
        note="only leaves are evicted, and two names of one touch are never leaves together: their "
        "order among themselves cannot be seen. Where inner names may go, it can: see the lecture",
    ),
    Mutant(
        "ex05_3_m6_look_up_is_no_use",
        "5.3",
        old="        self._touch(path[:found])\n        return found",
        new="        return found",
        diagnosis="`lookup` does not touch what it finds: names go in the order in which they came "
        "(FIFO), however often they are used",
        killed_by="test_ex05_3_evicts_in_the_order_of_use",
    ),
    Mutant(
        "ex05_3_m4_pins_ignored",
        "5.3",
        old="and name not in path and self._pins[name] == 0",
        new="and name not in path",
        diagnosis="a pinned name is evicted: somebody is reading that block",
        killed_by="test_ex05_3_pins_are_counted",
    ),
    Mutant(
        "ex05_3_m5_pins_not_counted",
        "5.3",
        old="        self._pins[name] -= 1",
        new="        self._pins[name] = 0",
        diagnosis="one `unpin` takes all pins away: the second reader's block is evicted",
        killed_by="test_ex05_3_pins_are_counted",
    ),
    Mutant(
        "ex05_4_m1_checksum_not_checked",
        "5.4",
        old='    if content[32:36] != zlib.crc32(payload).to_bytes(4, "little"):\n'
        "        return None\n",
        new="",
        diagnosis="the checksum is written, but never compared: a flipped bit comes back as data",
        killed_by="test_ex05_4_no_bit_may_flip",
    ),
    Mutant(
        "ex05_4_m2_name_not_checked",
        "5.4",
        old="    if content[:32] != name:\n        return None\n",
        new="",
        diagnosis="the name in the file is not compared: a file in the wrong place is another "
        "prompt's memory, and its checksum is right",
        killed_by="test_ex05_4_no_bit_may_flip",
    ),
    Mutant(
        "ex05_4_m3_length_not_checked",
        "5.4",
        old="    if len(payload) != math.prod(shape) * dtype.itemsize:\n        return None\n",
        new="",
        diagnosis="the length is not compared with shape and dtype: a file of another shape is an "
        "exception instead of a miss",
        killed_by="test_ex05_4_no_byte_may_be_missing_or_left_over",
    ),
    Mutant(
        "ex05_4_m4_memory_order",
        "5.4",
        old="kv.contiguous().view(torch.uint8).numpy().tobytes()",
        new="bytes(kv.untyped_storage())",
        diagnosis="the bytes are taken as they lie in memory: of a transposed or sliced tensor that "
        "is another order, or more than the tensor",
        killed_by="test_ex05_4_every_bit_comes_back",
    ),
]

SURVIVORS = {
    "block_names: `if block_size < 1:` → `if block_size < 0:`": (
        "range refuses a step of 0 with a ValueError of its own"
    ),
    "PrefixLRU.lookup: `self._touch(path[:found])` → `self._touch(path[:found + 1])`": (
        "one name more is one that is not held, and only held names are touched"
    ),
    "PrefixLRU._touch: `for name in reversed(names):` → `for name in names:`": (
        "of one touch only the last held name is a leaf: the order of the others cannot be seen"
    ),
}
