# %% [markdown]
# # Exercises 05 · Prefix look-up and tiers
#
# Four exercises, 20 points, about 95 minutes. Write where it says `YOUR CODE HERE`, run
# the cell, then run the check below it. `minifer grade 5` gives the points. Python's
# standard library and torch are enough.
#
# The four functions are the four parts of a prefix cache: what a block is called, what a
# prompt finds, who has to go, and what comes back from disk.

# %%
import hashlib
import math
import zlib
from collections import Counter, OrderedDict

import torch

from minifer.course import check, example

# %% [markdown]
# ### Exercise 5.1 - The name of a block
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Keys and values are shared by name. If two different prefixes have one
# name, somebody reads another prompt's memory, and no test of speed will ever show it.
#
# *Specification.* `block_names(token_ids, block_size, salt=None, adapter=None)` returns a
# list of names, one for each *full* block of `token_ids`, in order. `token_ids` is a list
# of ints from 0 to 2⁶³ - 1 (it may be empty, and is not changed), `salt` and `adapter` are strings
# or `None`. A name is the SHA-256 digest (32 `bytes`) of a byte string, which is made of
# *parts*:
#
# 1. the name of the block before it; for the first block the empty string `b""`,
# 2. the block's tokens, each as 8 bytes, little-endian, one after the other,
# 3. only if `salt` is not `None`: two parts, `b"salt"` and the salt in UTF-8,
# 4. only if `adapter` is not `None`: two parts, `b"adapter"` and the adapter in UTF-8.
#
# In front of every part stands its length in bytes, as 8 bytes, little-endian. Salt and
# adapter are in the name of *every* block. The empty string is a salt like any other:
# it is not `None`. Tokens after the last full block have no name. A `block_size` below 1
# raises `ValueError`.
#
# *Example.* `block_names([5, 6, 7, 8, 9], 2)` has two names; token 9 is in neither. The
# first 16 bytes that are hashed for the first name are eight zeros (the length of `b""`)
# and `10 00 00 00 00 00 00 00` in hexadecimal (16, the length of two tokens). The two
# names of `[5, 6, 5, 6]` differ, although the tokens of the blocks are the same.


# %% tags=["exercise"]
def block_names(token_ids, block_size, salt=None, adapter=None):
    """Names of the full blocks of a prompt: 32 bytes each."""
    ### BEGIN SOLUTION
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    extra = []
    if salt is not None:
        extra += ["salt", salt]
    if adapter is not None:
        extra += ["adapter", adapter]
    names, before = [], b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        tokens = b"".join(token.to_bytes(8, "little") for token in block)
        parts = [before, tokens, *(text.encode() for text in extra)]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        before = hashlib.sha256(data).digest()
        names.append(before)
    return names
    ### END SOLUTION


# %%
check("5.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `token.to_bytes(8, "little")` gives the 8 bytes of a token, `b"".join(…)` puts parts
# together.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Go from block to block with one variable that holds the name of the block before.
#
# </details>
#
# <details><summary>Help: I see "item 1" differ, but item 0 is right</summary>
#
# The first name has no parent. From the second on, part 1 is the *name* (32 bytes) of the
# block before, not its tokens.
#
# </details>

# %% [markdown]
# ### Exercise 5.2 - What does a prompt find?
#
# 5 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* This is the look-up that every request makes. One block too many and
# the model has nothing left to compute its first token from.
#
# *Specification.* `cached_blocks(token_ids, block_size, names, cache)` returns the list of
# block ids that hold the longest cached beginning of `token_ids`, in order.
#
# - `token_ids`: a list of ints, possibly empty. `block_size`: at least 1.
# - `names`: a list with the name of each full block of the prompt, as in 5.1 (given; you
#   need no solution of 5.1). So it has `len(token_ids) // block_size` entries.
# - `cache`: a dictionary, name → `(block_id, tokens, previous)`. `tokens` is the tuple of
#   the `block_size` token ids that lie in the block; `previous` is the id of the block
#   that stood before it when it was put there, `None` for a first block. Block ids are
#   ints from 0 on; the one of a block that is gone may have been given to another since.
#
# The look-up goes from the first block on and stops at the first that does not match; what
# comes after it does not count. A block matches if all of this holds:
#
# 1. its name is in `cache`,
# 2. the entry's `tokens` are the prompt's tokens in that place (two prefixes may have the
#    same name by accident: a name is a hint, the tokens decide),
# 3. the entry's `previous` is the id of the block that was found before it, `None` for the
#    first.
#
# At least one token is left to compute: a prompt of exactly n full blocks finds at most
# n - 1. An empty prompt finds nothing. No input is changed.
#
# *Example.* With `block_size` 2, the names `[b"x", b"y"]` and
# `cache = {b"x": (4, (1, 2), None), b"y": (0, (3, 4), 4)}`, the prompt `[1, 2, 3, 4, 5]`
# finds `[4, 0]`, but `[1, 2, 3, 4]` finds `[4]`: its last token has to be computed. And
# `[1, 9, 3, 4, 5]` with the same names finds `[]`.


# %% tags=["exercise"]
def cached_blocks(token_ids, block_size, names, cache):
    """Ids of the blocks that hold the longest cached beginning of a prompt."""
    ### BEGIN SOLUTION
    found = []
    most = (len(token_ids) - 1) // block_size
    for place in range(most):
        if names[place] not in cache:
            break
        block_id, tokens, previous = cache[names[place]]
        mine = tuple(token_ids[place * block_size : (place + 1) * block_size])
        before = found[-1] if found else None
        if tokens != mine or previous != before:
            break
        found.append(block_id)
    return found
    ### END SOLUTION


# %%
check("5.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First compute how many blocks may be found at most. For 4 tokens and blocks of 2 it is 1,
# for 5 tokens it is 2.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `break` at the first block that does not match; `continue` would find blocks after a gap.
#
# </details>
#
# <details><summary>Help: I see one block too few where block 0 comes first</summary>
#
# `if previous:` is false for block id 0 as well as for `None`. Compare with `None`.
#
# </details>

# %% [markdown]
# ### Exercise 5.3 - Who has to go?
#
# 6 points · difficulty 4/5 ●●●●○ · 40 minutes · CPU
#
# *Why it matters.* A tier is always full. What it throws out decides what it will find,
# and a block that somebody is reading must not be thrown out at all.
#
# *Specification.* Write the class `PrefixLRU`. It holds at most `capacity` names. A *path*
# is a list of different names (any hashable values), the blocks of one prefix from the
# first to the last. A name always has the same names in front of it, in every path: names
# form trees, and a name that has others behind it, which are held, is an *inner* one;
# the others are *leaves*.
#
# | call | what it does |
# |---|---|
# | `PrefixLRU(capacity)` | holds nothing yet; `ValueError` for a capacity below 1 |
# | `len(lru)`, `name in lru` | number of names held; is this one held? |
# | `lookup(path)` | returns how many names of the path, from the first on, are held, up to the first that is not; *touches* these and nothing else |
# | `insert(path)` | takes the names in that are not held, in the order of the path, then touches all names of the path that are held; returns the list of the names it evicted, in order |
# | `pin(name)` | one more pin on a held name; `KeyError` if it is not held |
# | `unpin(name)` | one pin fewer; `KeyError` if the name has none |
#
# To **touch** names makes them the most recently used of all. Among the names of one touch
# the first of the path is the most recent, the second comes next, and so on. `pin`,
# `unpin` and `in` touch nothing.
#
# To **evict**: when a name is to be taken in and `capacity` names are held, one name goes.
# It is the least recently used of those that are leaves at that moment, have no pin, and
# are not on the path that is being inserted. If there is no such name, `insert` takes
# nothing more in: what it took in before stays, and touching and returning go on as
# described. Nothing is evicted for another reason. A name may have several pins; each
# needs its own `unpin`. Arguments are not changed. An empty path is allowed.
#
# *Example.* Capacity 3. `insert(["a", "b"])` and `insert(["c"])` evict nothing; from least
# to most recently used the names are b, a, c. `insert(["a", "d"])` finds a held, takes d
# in and returns `["b"]`; now the order is c, d, a. After `pin("c")`, `insert(["e"])`
# returns `["d"]`: c is pinned. After `pin("e")`, `insert(["f", "g"])` returns `["a"]`,
# and g is not taken in: c and e are pinned, f is on the path.


# %% tags=["exercise"]
class PrefixLRU:
    """Names of blocks, at most `capacity`; the least recently used leaf goes first."""

    def __init__(self, capacity):
        ### BEGIN SOLUTION
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        # name → the one before it; least recently used first
        self._parents = OrderedDict()
        self._pins = Counter()
        ### END SOLUTION

    def __len__(self):
        ### BEGIN SOLUTION
        return len(self._parents)
        ### END SOLUTION

    def __contains__(self, name):
        ### BEGIN SOLUTION
        return name in self._parents
        ### END SOLUTION

    def lookup(self, path):
        """How many names of the path, from the first on, are held; touches these."""
        ### BEGIN SOLUTION
        found = 0
        while found < len(path) and path[found] in self:
            found += 1
        self._touch(path[:found])
        return found
        ### END SOLUTION

    def insert(self, path):
        """Take the path in, as far as there is room; returns the names evicted for it."""
        ### BEGIN SOLUTION
        evicted = []
        for place, name in enumerate(path):
            if name in self:
                continue
            if len(self) == self.capacity:
                victim = self._victim(path)
                if victim is None:
                    break
                del self._parents[victim]
                evicted.append(victim)
            self._parents[name] = path[place - 1] if place else None
        self._touch(path)
        return evicted
        ### END SOLUTION

    def pin(self, name):
        """One more pin on a held name."""
        ### BEGIN SOLUTION
        if name not in self:
            raise KeyError(name)
        self._pins[name] += 1
        ### END SOLUTION

    def unpin(self, name):
        """One pin fewer."""
        ### BEGIN SOLUTION
        if self._pins[name] == 0:
            raise KeyError(name)
        self._pins[name] -= 1

    def _victim(self, path):
        inner = self._parents.values()
        for name in self._parents:
            if name not in inner and name not in path and self._pins[name] == 0:
                return name
        return None

    def _touch(self, names):
        for name in reversed(names):
            if name in self:
                self._parents.move_to_end(name)
        ### END SOLUTION


# %%
check("5.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# An `OrderedDict` from name to the name before it keeps both things you need: its order is
# the order of use (`move_to_end`), and its values are the inner names.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Write one method that touches and one that finds a victim (the class may have methods of
# its own); `lookup` and `insert` are short then.
#
# </details>
#
# <details><summary>Help: I see a name evicted that others stand behind</summary>
#
# The least recently used name may be an inner one, when a leaf behind it is pinned. Skip
# it, and take the next in the order of use that is a leaf.
#
# </details>

# %% [markdown]
# ### Exercise 5.4 - Back from the disk, byte for byte
#
# 5 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* Disks lose power, and files are copied, cut and mixed up. A cache may
# answer "not here" at any time; what it may never do is answer with something else.
#
# *Specification.* Write two functions.
#
# `seal(name, kv)` returns the `bytes` of a file: the 32 bytes of `name`, then 4 bytes with
# the CRC-32 (`zlib.crc32`) of the payload, little-endian, then the payload: the bytes of
# the tensor's numbers in row-major order, as the machine holds them. `kv` is a CPU tensor
# of one or more dimensions, none of size 0, of dtype `float32`, `bfloat16` or `float16`; it
# need not be contiguous in memory, may hold any bits (NaN, infinities, -0.0), and is not
# changed. Every bit counts: two NaNs with different bits are different payloads.
#
# `unseal(name, content, shape, dtype)` returns the tensor that was sealed, of this shape
# (a tuple) and dtype, equal bit for bit, if `content` (any `bytes`, also none at all) is
# exactly the file of a tensor with that shape and dtype under that `name`. In all other
# cases it returns `None`: another name, a byte missing or left over, a bit flipped. It
# raises nothing. The tensor has memory of its own: writing into it changes neither
# `content` nor what another call returns.
#
# *Example.* `seal(b"n" * 32, torch.ones(2, 3))` has 32 + 4 + 24 = 60 bytes. The first 59
# of them are no file: `unseal` returns `None`. For the name `b"m" * 32` all 60 are none
# either.


# %% tags=["exercise"]
def seal(name, kv):
    """The bytes of a file: name, checksum, payload."""
    ### BEGIN SOLUTION
    payload = kv.contiguous().view(torch.uint8).numpy().tobytes()
    return name + zlib.crc32(payload).to_bytes(4, "little") + payload
    ### END SOLUTION


def unseal(name, content, shape, dtype):
    """The tensor in a file, or None if this is not that file, whole and unchanged."""
    ### BEGIN SOLUTION
    payload = bytearray(content[36:])
    if content[:32] != name:
        return None
    if len(payload) != math.prod(shape) * dtype.itemsize:
        return None
    if content[32:36] != zlib.crc32(payload).to_bytes(4, "little"):
        return None
    return torch.frombuffer(payload, dtype=dtype).reshape(shape)
    ### END SOLUTION


# %%
check("5.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# numpy has no bfloat16. `tensor.view(torch.uint8)` looks at the same memory as bytes; it
# needs a contiguous tensor.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.frombuffer` shares memory with what it is given. Give it a `bytearray` of your own.
#
# </details>
#
# <details><summary>Help: I see "The given buffer is not writable"</summary>
#
# `bytes` cannot be written to, so a tensor on top of them must not be either. Copy first.
#
# </details>

# %% [markdown]
# ### Together
#
# Your own parts on the book's requests (needs 5.1 and 5.2): what do A, B and C find, if A
# was there before? Compare with the first cell of the lecture.


# %%
def together():
    prompts = {name: list(text.encode()) for name, (text, _) in example.TRIO.items()}
    cache, before = {}, None
    for number, name in enumerate(block_names(prompts["A"], 8)):
        tokens = tuple(prompts["A"][number * 8 : number * 8 + 8])
        cache[name] = (number, tokens, before)
        before = number
    for name, ids in prompts.items():
        print(name, "finds", cached_blocks(ids, 8, block_names(ids, 8), cache))


try:
    together()
except NotImplementedError as missing:
    print("not yet:", missing)
