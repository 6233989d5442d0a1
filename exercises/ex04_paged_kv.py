# %% [markdown]
# # Exercises 04 · Paged KV cache
#
# Four exercises, 20 points, about 90 minutes, all on a CPU. They go with
# [lecture 04](../lectures/L04_paged_kv.ipynb). Write where it says `YOUR CODE HERE`, run the
# cell, then run the check below it. `minifer grade 4` gives the points.
#
# Plain Python and torch; no import of the engine. In all of them P, `block_size`, is the number of
# tokens in a block, and a **block table** is the list of a request's blocks in the order of its
# tokens. The token at position p of a request lies in the block that its table has in place p // P, at
# offset p mod P. The cache counts its places through: a **slot** is block · P + offset.

# %%
import math

import torch

from minifer.course import check, example

# %% [markdown]
# ### Exercise 4.1 - Slot mapping
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* A step computes tokens of many requests, one after the other in one flat list. The
# model must be told where each new key and value goes. One wrong number here, and a request reads
# another's past.
#
# *Specification.* `slot_mapping(block_tables, computed, new, block_size)` returns a list of ints: the
# slots of this step's tokens, request by request in the order given, within a request by position.
#
# - `block_tables[b]` is the block table of request b. It may have more blocks than are needed.
# - Request b has `computed[b]` tokens from earlier steps; this step computes `new[b]` more, at the
#   positions `computed[b]`, …, `computed[b] + new[b] - 1`. `new[b]` may be 0: no slot.
# - Raise `ValueError` when a table has too few blocks for a position that is wanted.
# - No input is changed. No requests: an empty list.
#
# *Example.* Blocks of 4 tokens, two requests.
# `slot_mapping([[7, 2], [5]], computed=[3, 0], new=[3, 2], block_size=4)` is
# `[31, 8, 9, 20, 21]`: position 3 is the last of block 7 (7 · 4 + 3), positions 4 and 5 are the first
# two of block 2, and the second request begins block 5.


# %% tags=["exercise"]
def slot_mapping(block_tables, computed, new, block_size):
    """The slots of this step's tokens, request after request."""
    # YOUR CODE HERE
    raise NotImplementedError("ex4.1")


# %%
check("4.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down positions first, then (place in the table, offset) of each, then slots.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `divmod(position, block_size)` gives both numbers. The position counts from the request's first token,
# not from the first token of the step.
#
# </details>
#
# <details><summary>Help: I see IndexError where ValueError is wanted</summary>
#
# Python's list index raises `IndexError` by itself. Compare the place with `len(table)` first and
# raise `ValueError`.
#
# </details>

# %% [markdown]
# ### Exercise 4.2 - Append across a block boundary
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* A request takes memory when its tokens need it, not before. Off by one in one
# direction wastes a block a request; in the other, a token has no place.
#
# *Specification.* `append(table, num_tokens, num_new, free, block_size)` makes room for `num_new` more
# tokens of a request that has `num_tokens`.
#
# - `table` is its block table; the first `num_tokens` tokens have their places already.
# - Take as few blocks as will do from the **front** of the list `free`, in order, and put them at the end
#   of `table`. Both lists are changed in place: a block that was taken is no longer in `free`.
# - Return the list of the blocks taken, `[]` for none. `num_new` may be 0. A table with room to spare
#   keeps it; then fewer blocks are taken, or none.
# - When `free` has too few blocks, raise `RuntimeError` and change **nothing**.
#
# *Example.* P = 4, `table = [7]`, `free = [2, 5, 0]`. Three tokens and one more: block 7 has room, `[]`.
# Four tokens and one more: block 7 is full, `[2]` is returned, `table` is `[7, 2]` and `free` is `[5, 0]`.
# Three tokens and five more make eight, two full blocks: one block is taken, not two.


# %% tags=["exercise"]
def append(table, num_tokens, num_new, free, block_size):
    """Grow a block table for `num_new` more tokens; returns the blocks taken."""
    # YOUR CODE HERE
    raise NotImplementedError("ex4.2")


# %%
check("4.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many blocks do n tokens fill, the last one perhaps in part? Try n = 0, 1, P, P + 1.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Division that rounds up: `-(-n // P)`. Subtract what the table has, and look whether `free` has enough
# before anything is changed.
#
# </details>
#
# <details><summary>Help: I see "free must be …" though the blocks returned are right</summary>
#
# `free = free[needed:]` makes a new list under an old name; the caller keeps the old list. Change the
# list itself: `del free[:needed]` or `free.pop(0)`.
#
# </details>

# %% [markdown]
# ### Exercise 4.3 - Fork and copy-on-write
#
# 6 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* Several answers to one prompt share the prompt's blocks. They may share as long as
# they only read. Who writes into a block that another holds must copy it first: **copy-on-write**.
#
# *Specification.* Complete three methods of `BlockPool`. Its data is all that the tests look at:
# `tables` (name → block table), `lengths` (name → number of tokens), `ref_count` (for each block, how many
# tables hold it) and `free_blocks` (a list; blocks are taken from its front and given back to its end).
# A block is in `free_blocks` exactly when its `ref_count` is 0. `start(name)` is given: a request
# without tokens.
#
# - `fork(parent, child)`: the child has the parent's tokens, in the same blocks. No block is taken. The
#   child's table is a list of its own.
# - `append(name)`: one more token; returns `(slot, copy)`. The slot is where the token's keys and values
#   go. `copy` is `None`, or `(source, destination)`, two block ids: the caller copies the whole block
#   before it writes. Three cases, in which a block is *taken* from the front of `free_blocks`:
#   the last block is full (or there is none): a new one is taken and put at the end of the table;
#   the last block has room and no other table holds it: nothing is taken;
#   the last block has room and others hold it too: a block is taken, it replaces the last one in this
#   table, and this table no longer holds the old one.
# - `free(name)`: the request is gone from `tables` and `lengths`. Its blocks lose one holder each, **last
#   block of the table first**; a block without holders goes to the end of `free_blocks`.
#
# `append` raises `RuntimeError` when it needs a block and none is free. `ValueError` is raised by `fork`
# when the parent does not exist or the child does, and by `append` and `free` for a name that does not
# exist. After an error nothing has changed.
#
# *Example.* P = 4. "a" has 6 tokens in blocks [0, 1], "b" is forked from it: [0, 1] too, and both counts
# are 2. `append("b")` takes block 2: it returns `(10, (1, 2))`, position 6 of table [0, 2]. Block 1 has
# one holder again, so `append("a")` returns `(6, None)`. Block 0 is full and stays shared.


# %% tags=["exercise"]
class BlockPool:
    """Blocks, who holds them, and the requests that do."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.ref_count = [0] * num_blocks
        self.tables = {}
        self.lengths = {}

    def start(self, name):
        """A request without tokens."""
        self.tables[name] = []
        self.lengths[name] = 0

    def fork(self, parent, child):
        """`child` goes on from `parent`'s tokens, on the same blocks."""
        # YOUR CODE HERE
        raise NotImplementedError("ex4.3")

    def append(self, name):
        """One more token: (its slot, the copy to be made before or None)."""
        # YOUR CODE HERE
        raise NotImplementedError("ex4.3")

    def free(self, name):
        """The request ends; blocks that nobody holds are free."""
        # YOUR CODE HERE
        raise NotImplementedError("ex4.3")


# %%
check("4.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In `append`, find the offset first: 0 means that the last block is full (or that there is none). Only
# then ask who else holds the last block.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# After a copy two counts have changed: the new block's is 1, the old one's is one less. When two requests
# share a block and one has copied it, the other writes in place.
#
# </details>
#
# <details><summary>Help: I see that a request reads another's tokens</summary>
#
# Look for two tables that hold one block while its `ref_count` is 1 (a fork that did not count), for one
# list under two names (`self.tables[child] = self.tables[parent]`), or for a block that went to
# `free_blocks` while a table still held it.
#
# </details>

# %% [markdown]
# ### Exercise 4.4 - Paged attention in torch
#
# 6 points · difficulty 4/5 ●●●●○ · 30 minutes · CPU
#
# *Why it matters.* Gathering a request's keys and values into one piece first copies all of them in every
# layer of every step. A kernel walks the block table instead and never holds more than a block. The
# same walk in torch is a loop over blocks.
#
# *Specification.* `paged_attention(query, key_cache, value_cache, block_tables, seq_lens, scale)`
# returns the attention of one query a request, shape [B, H, C], of the query's dtype.
#
# | argument | shape | what |
# |---|---|---|
# | `query` | [B, H, C] | one token of each of B requests, H query heads of C numbers |
# | `key_cache`, `value_cache` | [N, P, K, C] | N blocks of P tokens, K KV heads; H is a multiple of K |
# | `block_tables` | int64 [B, M] | rows are padded at the end with -1 |
# | `seq_lens` | int64 [B] | tokens of each request, at least 1; the query sees all of them |
# | `scale` | float | factor on the scores |
#
# - Query head h reads KV head h // (H / K). Its scores are `scale` · (query · key), its result is
#   softmax(scores) · values over the request's tokens.
# - Whatever lies in other slots, NaN and infinity included, must not matter. That holds for the rest of a
#   last block, and for the block that -1 would name in Python.
# - Scores may be in the hundreds: subtract the maximum before the exponential.
# - Walk the blocks. No tensor that you make may have more than 4 · B · H · P · C elements; a view of an
#   input does not count. (The tests use C = 16 and up to 64 blocks for this.)
# - No input is changed. All tensors are on one device; query and caches have one dtype, float32 or
#   float64.
#
# A softmax can be computed block by block. Keep, for each query and head, the largest score m so far, the
# sum s of exp(score - m) and the vector o, the same sum with each term times its value. For a
# block with largest score m', let new = max(m, m') and c = exp(m - new). Then s becomes
# c · s + Σ exp(score - new), o becomes c · o + Σ exp(score - new) · value, and m becomes new. At the end
# the answer is o / s. (Milakov and Gimelshein 2018, [arXiv:1805.02867](https://arxiv.org/abs/1805.02867).)
#
# *Example.* One request of two tokens in blocks [3, 0] with P = 1, scores 0 and ln 3, values 1 and 5. After
# block 3: m = 0, s = 1, o = 1. Block 0: new = ln 3, c = 1/3, s = 1/3 + 1 = 4/3, o = 1/3 + 5 = 16/3. The
# answer is 4, which is (1 · 1 + 3 · 5) / 4.


# %% tags=["exercise"]
def paged_attention(query, key_cache, value_cache, block_tables, seq_lens, scale):
    """Attention of one query a request over scattered blocks: [B, H, C]."""
    # YOUR CODE HERE
    raise NotImplementedError("ex4.4")


# %%
check("4.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take the i-th block of all requests at once: `key_cache[block_tables[:, i].clamp(min=0)]` is [B, P, K, C].
# Which of its P tokens exist? Those whose position i · P + offset is below `seq_lens`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Every request has a token in its first block, so m is finite from then on, and a block without tokens
# has c = 1 and adds nothing. Two passes (scores of all blocks first, softmax, then the values block by
# block) are as good.
#
# </details>
#
# <details><summary>Help: I see NaN</summary>
#
# A weight of 0 does not save you: 0 · NaN is NaN. Set masked values (and keys) to 0 with `masked_fill`
# before they are multiplied. And exp(-inf - (-inf)) is NaN: mask with -inf only where another score is
# finite, or start m at the first block's maximum.
#
# </details>

# %% [markdown]
# Your slots beside the engine's, for the first steps of the book's requests A, B and C. The cell waits until
# 4.1 passes; then each line says True: your function could stand in the engine.

# %%
if repr(check("4.1")).startswith("✔"):
    for step, _ in example.run().steps[:4]:
        first, lengths = step.query_start, step.seq_lens
        new = [first[b + 1] - first[b] for b in range(len(lengths))]
        computed = [lengths[b] - new[b] for b in range(len(lengths))]
        ours = slot_mapping(step.block_tables, computed, new, step.block_size)
        print(len(ours), "slots, as the engine has them:", ours == step.slot_mapping)
