# %% [markdown]
# # Exercises 14 · Scaling laws for recurrence, and a capstone
#
# Seven exercises, 34 points, about 4¾ hours. They follow
# [lecture L14](../lectures/L14_scaling_laws.ipynb). Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 14` gives the points.
#
# 14.1 to 14.3 are about laws. 14.4 to 14.7 are the capstone of the book: an engine that serves a loop model
# with paged keys and values, a prefix cache and continuous batching. Its four parts are graded each for
# itself: whoever skips one can still do the others.
#
# An answer uses Python, numpy and torch. No function changes its inputs.

# %%
import math
from collections import Counter, deque

import numpy as np
import torch

from minifer.course import check
from minifer.course.loop_model import attention

# %% [markdown]
# ### Exercise 14.1 - A law, and its error on hidden points
#
# 5 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* A curve drawn through the points it was fitted to always looks right. The points it has not
# seen decide.
#
# *Specification.* Three functions. All lists hold floats.
#
# - `fit_power_law(x, y)` returns `(coefficient, exponent)` of y ≈ coefficient · x^exponent: the straight line of
#   least squares through the points (log x, log y). x and y have at least two entries, all above 0, and x at
#   least two different values.
# - `fit_saturation(depths, losses, rates)` fits losses ≈ floor + scale · exp(−rate · depth). For *each* rate of
#   the list `rates` the best floor and scale follow by linear least squares. It returns the
#   `(floor, scale, rate)` with the smallest sum of squared errors over all points. (No two rates
#   are equally good in the tests.) There are at least 3 different depths.
# - `hidden_error(depths, losses, seen, rates)` fits a saturation as above to the points with depth ≤ `seen` only
#   and returns the largest absolute error, in nats, at the other points. At least 3 points are seen and at
#   least one is hidden; they come in any order.
#
# *Example.* `fit_power_law([1.0, 4.0, 16.0], [2.0, 4.0, 8.0])` is `(2.0, 0.5)`, up to rounding.
# Losses 2 + 0.5^T, that is 2.5, 2.25, 2.125, 2.0625 at depths 1 to 4, with `rates = [0.5, math.log(2), 1.0]` give
# `(2.0, 1.0, math.log(2))`, and the hidden error with `seen = 3` is 0.


# %% tags=["exercise"]
def fit_power_law(x, y):
    """Two lists → (coefficient, exponent)."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.1")


def fit_saturation(depths, losses, rates):
    """→ (floor, scale, rate) of the smallest squared error."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.1")


def hidden_error(depths, losses, seen, rates):
    """→ the largest error, in nats, where the fit has not looked."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.1")


# %%
check("14.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `np.polyfit(a, b, 1)` gives slope and intercept. The intercept is the logarithm of the coefficient.
#
# </details>
# <details><summary>Hint 2</summary>
#
# For one rate the model is linear in floor and scale: `np.linalg.lstsq` with the columns 1 and exp(−rate · T).
#
# </details>
# <details><summary>Help: my hidden error is too small</summary>
#
# Does the fit see the hidden points? Split first, fit then.
#
# </details>

# %% [markdown]
# ### Exercise 14.2 - An optimum with a band
#
# 5 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* "The best depth is 5.3" is half a sentence. The other half says how much it would have been
# with other seeds, and sometimes it says: the data have no best depth.
#
# *Specification.* Two functions.
#
# `best_depth(mus, losses)` lays a parabola of least squares through the points (log μ, loss) and returns its lowest
# point as a μ (a float). It returns `None` when the data have no minimum: when the parabola does not open
# upwards (its quadratic coefficient is not above 0), or when its lowest point is not strictly between the smallest
# and the largest μ. `mus` holds at least 3 different values above 0; no case in the tests is on the edge.
#
# The lecture draws budgets, to ask how sure an exponent is. Here seeds are drawn, to ask how sure one budget's best depth is.
# `depth_band(mus, runs, draws, level)` returns `(low, high, without)`:
#
# - `runs` is a list of S lists, one a seed: its losses at each of `mus`;
# - `draws` is a list of at least one bootstrap draw, each a list of S seed numbers from 0 to S − 1, repeats among them. For
#   each draw take the mean over the drawn seeds at each μ, a seed drawn twice counting twice, and the best
#   depth of these means;
# - `without` is the share (0 to 1) of the draws that have no best depth;
# - `low` and `high` are the percentiles (1 − level) / 2 and (1 + level) / 2 (as shares, not per cent) of the best depths
#   that were found, as `np.quantile` computes them. If `without` is above one half both are `None`: there is
#   no band.
#
# *Example.* `best_depth([1.0, 2.0, 4.0], [2.0, 1.0, 2.0])` is 2.0 and `best_depth([1.0, 2.0, 4.0], [1.0, 2.0, 3.5])` is
# `None`: the loss only rises.


# %% tags=["exercise"]
def best_depth(mus, losses):
    """→ the lowest point of a parabola in log μ, or None."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.2")


def depth_band(mus, runs, draws, level):
    """→ (low, high, share of the draws without a best depth)."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.2")


# %%
check("14.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For a x² + b x + c the lowest point is at x = −b / (2 a). Here x is log μ.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `[runs[seed] for seed in draw]` is the drawn experiment, repeats and all.
#
# </details>

# %% [markdown]
# ### Exercise 14.3 - An answer in numbers
#
# 4 points · difficulty 2/5 ●●○○○ · 30 minutes · CPU
#
# *Why it matters.* Somebody says: "Loops are free. Let us train everything with eight." Answer them. An
# argument that can be checked names its numbers.
#
# *Specification.* `points` is the log of an iso-FLOP experiment, a list of tuples
# `(budget, mu, seed, loss, tokens)`: training budget in FLOPs, mean loops, seed, loss in nats, tokens of the
# training. Every budget has the same μ, at least 3 of them, and the same seeds, at least 2; `tokens` is the same
# for all seeds; the order is arbitrary. *Mean* is over seeds. No two means are equal.
#
# `numbers(points)` returns a dictionary:
#
# | key | value |
# |---|---|
# | `"lowest"` | list of ints: for each budget, ascending, the μ with the lowest mean loss |
# | `"gap"` | float: at the *largest* budget, the second-lowest mean loss minus the lowest |
# | `"spreads"` | float: `"gap"` divided by the larger of the two standard deviations over seeds (with n − 1) of these two μ |
# | `"tokens"` | float: at the largest budget, tokens at the *smallest* μ over tokens at the *largest* μ |
#
# `essay(points)` returns your answer as one string of 80 to 300 words (split at white space), at least 40 of
# them different, with at most 20 numbers in all. It must contain, in this order
# or any other, the four numbers of these very points: each entry of `"lowest"` as a word of its own (digits,
# punctuation allowed around it), the gap with three decimals, the spreads with one, the tokens with one. So
# write it as an f-string. The grader finds the numbers; whether the argument is good, a person must judge. Say at least:
# what was compared (equal what?), what won, how large the difference is beside the seeds', why more loops
# mean fewer tokens, and what such an experiment cannot show.
#
# *Example.* Two seeds with losses 2.0 and 2.2 have the mean 2.1 and the standard deviation 0.141.


# %% tags=["exercise"]
def numbers(points):
    """→ {"lowest": [...], "gap": ..., "spreads": ..., "tokens": ...}"""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.3")


def essay(points):
    """→ 80 to 300 words that name the numbers."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.3")


# %%
check("14.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Group first: a dictionary budget → μ → list of losses. `np.std(values, ddof=1)` divides by n − 1.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Write the essay on paper with blanks, then fill them: `f"… {n['gap']:.3f} nats …"`.
#
# </details>

# %% [markdown]
# ## The capstone
#
# You are given a loop model without a memory. `minifer.course.loop_model` is open to these four exercises (and
# no other part of minifer): you may use
#
# | | |
# |---|---|
# | `tiny_loop_model()` | parcae-tiny: bytes are its tokens, `bytes(tokens).decode(errors="replace")` its text |
# | `model.layers`, `model.loops` | `(prelude, core, coda)`, how many layers each stack has; the default depth |
# | `model.kv_heads`, `model.head_dim` | K and C of one token's keys, [K, C], in one KV slot |
# | `model.hidden(token_ids, positions, loops, attend)` | one pass over T rows, a token each: lists of T token ids, T positions in their requests, T depths → [T, D] |
# | `model.logits(hidden)` | [R, D] → [R, V] |
# | `attention(query, keys, values)` | causal attention of the last n of S positions: [n, H, C], [S, K, C], [S, K, C] → [n, H, C] |
# | `Parts(slot, kv, cache, plan)` | holds the parts of an engine, see 14.7 |
#
# The model calls `attend(place, rows, query, keys, values)` in every layer and every loop. `place.stage` is
# `"prelude"`, `"core"` or `"coda"`, `place.layer` counts in that stack from 0, `place.iteration` counts the loops of the core
# from 0 (and is 0 elsewhere). `rows` is the list of row numbers that take part, ascending: in iteration t of the core those
# with more than t loops, elsewhere all. `query` [n, H, C], `keys` and `values` [n, K, C] belong to these rows, in this order;
# `attend` returns [n, H, C]. So *you* keep keys and values, and *you* decide who sees whose.

# %% [markdown]
# ### Exercise 14.4 - Capstone I: a slot for every loop
#
# 5 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* Loop 3 of a token must attend to loop 3 of the earlier ones. If two loops share a place, the
# later overwrites the earlier, and the text is still fluent.
#
# *Specification.*
#
# `kv_slot(layers, loops, stage, layer, iteration)` numbers the KV slots of a model whose core runs at most `loops` times.
# `layers = (P, R, C)`. First come the P layers of the prelude, then the R core layers of iteration 0, the R of
# iteration 1, … up to iteration `loops` − 1, then the C layers of the coda. A stage that is none of the three, a `layer`
# that the stage does not have, an `iteration` outside 0 … `loops` − 1 in the core, or other than 0 elsewhere, raises `ValueError`.
#
# The class `PagedKV` stores keys and values in blocks:
#
# | call | what it does |
# |---|---|
# | `PagedKV(num_slots, num_blocks, block_size, kv_heads, head_dim)` | room for `num_blocks` blocks of `block_size` tokens in each KV slot, float32 |
# | `kv.write(slot, table, positions, keys, values)` | token i of `keys` and `values` [n, K, C] stands at position `positions[i]` of a request with the block table `table`: position p lies in block `table[p // block_size]`, row `p % block_size` |
# | `kv.read(slot, table, length)` | keys and values of positions 0 … length − 1, two tensors [length, K, C], in order |
#
# `slot`, `table` and `positions` are an int and lists of ints. Slots do not share anything. A position that the table has no
# block for, or a negative one, raises `ValueError` in `write`, and then nothing is written; so does a `length` too large in `read`. What `read` returned stays as
# it is when something is written later. Nothing is written in other places than those named.
#
# *Example.* With `layers = (1, 2, 1)` and 3 loops there are 1 + 6 + 1 slots: core layer 1 in iteration 2 is slot 6, the coda is 7.


# %% tags=["exercise"]
def kv_slot(layers, loops, stage, layer, iteration):
    """The number of a KV slot."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.4")


class PagedKV:
    """Keys and values in blocks, for each KV slot."""

    def __init__(self, num_slots, num_blocks, block_size, kv_heads, head_dim):
        # YOUR CODE HERE
        raise NotImplementedError("ex14.4")

    def write(self, slot, table, positions, keys, values):
        """keys, values [n, K, C] → their places."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.4")

    def read(self, slot, table, length):
        """→ keys, values [length, K, C]."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.4")


# %%
check("14.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Compute all places before you write the first: then a bad position leaves nothing behind.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Indexing a tensor with a *list* copies; indexing with an int or a slice gives a view, which changes with the storage.
#
# </details>

# %% [markdown]
# ### Exercise 14.5 - Capstone II: a prefix cache that knows the depth
#
# 5 points · difficulty 4/5 ●●●●○ · 50 minutes · CPU
#
# *Why it matters.* The keys of a token depend on all tokens before it and on how often *they* were looped. A block found by
# its tokens alone answers a request of 8 loops with the thoughts of one loop.
#
# *Specification.* The class `PrefixCache(num_blocks, block_size)` hands out blocks 0 … num_blocks − 1. A block has *holders* (a
# number, how many requests use it) and perhaps a *name*. It is *free* when it has no holder; a free block keeps its name
# until it is taken.
#
# | call | what it does |
# |---|---|
# | `cache.free` | how many blocks are free (an attribute or property) |
# | `cache.find(tokens, loops)` | block ids, a list, of the longest beginning of `tokens` that is named for this depth, in full blocks; each gets one holder more. At least one token stays to be computed: of n tokens at most (n − 1) // block_size blocks |
# | `cache.take(count)` | a list of `count` free blocks, each with one holder and *without* its old name; or `None`, and nothing has changed, when fewer are free |
# | `cache.name(tokens, loops, table)` | `table` holds the keys and values of `tokens`, computed with `loops` loops: each *full* block of it gets its name, unless this name is taken by another block (which keeps it) |
# | `cache.drop(table)` | one holder less for each block of the table |
#
# The name of a block is all it depends on: the depth, and *all* tokens from the first of the request to the last of the block.
# Lists are lists of ints; `table` may have more blocks than `tokens` fill. To name a block that has that very name already
# changes nothing (a block has at most one name; the tests never rename). Different blocks of one table, and of different requests, may have equal tokens.
#
# **Which free blocks are taken first?** First those without a name, the smallest id first; then named ones, the one that has
# been free longest first. `drop` makes the blocks free from the *last* of the table to the first, so that the end of a
# prefix goes before its beginning. At the start all blocks are free and without a name. In the tests only held blocks are dropped and named.
#
# *Example.* Blocks of 2, four of them. `take(2)` is `[0, 1]`; `name([5, 6, 7], 8, [0, 1])` names block 0 (block 1 is not full); after
# `drop([0, 1])` all four are free; `find([5, 6, 9], 8)` is `[0]`, but `find([5, 6, 9], 4)` is `[]` and `find([5, 6], 8)` is `[]`.
# If block 0 is dropped again, `take(4)` is `[1, 2, 3, 0]`.


# %% tags=["exercise"]
class PrefixCache:
    """Blocks, their holders, and their names."""

    def __init__(self, num_blocks, block_size):
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")

    @property
    def free(self):
        """Blocks without a holder."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")

    def find(self, tokens, loops):
        """→ blocks of the longest cached beginning, held once more."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")

    def take(self, count):
        """→ `count` free blocks, or None."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")

    def name(self, tokens, loops, table):
        """The full blocks of `table` can be found from now on."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")

    def drop(self, table):
        """One holder less for each block."""
        # YOUR CODE HERE
        raise NotImplementedError("ex14.5")


# %%
check("14.5")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A dictionary from `(loops, tuple(tokens[:end]))` to a block is a prefix cache. It needs its reverse, too, to forget a
# name when the block is taken.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two collections of free blocks: a set without names, and a list with names in the order in which they became free.
#
# </details>

# %% [markdown]
# ### Exercise 14.6 - Capstone III: who computes how much
#
# 4 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* One pass serves everybody. Who gets how many of its tokens decides who waits.
#
# *Specification.* `plan_step(running, waiting, budget, seats, free_blocks)` plans one step and returns
# `(tokens, admitted)`. All are lists of ints, or ints.
#
# - `running`: for each running request, how many tokens it has to compute before its next one can be drawn (at least 1).
#   1 means that it decodes.
# - `waiting`: a list of pairs `(todo, blocks)`: tokens of the prompt, and blocks that the request will need in all its life.
# - `budget`: tokens of the step, all together (at least 1). `seats`: most requests that may run. `free_blocks`: free now.
#
# `tokens` says for each running request how many it computes, in the same order; `admitted` does so for the first ones of `waiting`, who
# run from now on, and is as long as there are of them.
#
# 1. First those that decode get their token, in order, while the budget lasts.
# 2. Then the other running ones, in order: each as much as it has to do, at most what is left of the budget. 0 is possible.
# 3. Then the waiting ones, in order: one is admitted if a seat is free, something of the budget is left, and its blocks are no
#    more than the free ones, less the blocks of those admitted before it. It gets as much as it has to do, at most what is left. The first
#    that cannot be admitted ends the step's planning: **nobody overtakes**.
#
# *Example.* `plan_step([5, 1], [(9, 2), (3, 1)], 8, 4, 10)` is `([5, 1], [2])`: the decode, 5 tokens of a prompt, 2 of the next one;
# then the budget is spent. `plan_step([], [(4, 3), (4, 1)], 8, 4, 2)` is `([], [])`.


# %% tags=["exercise"]
def plan_step(running, waiting, budget, seats, free_blocks):
    """→ (tokens of the running ones, tokens of the first of the waiting ones)."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.6")


# %%
check("14.6")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two passes over `running`: once for those with 1 to do, once for the others. The result keeps the order of `running`.
#
# </details>

# %% [markdown]
# ### Exercise 14.7 - Capstone IV: the engine
#
# 6 points · difficulty 5/5 ●●●●● · 80 minutes · CPU
#
# *Why it matters.* Now it serves. Every clever part is right only if nobody can tell from the text that it is there.
#
# *Specification.* `serve(model, requests, parts, budget, seats, share=True)` answers all requests greedily and returns a list of
# lists of token ids, one a request, in their order.
#
# - `model`: as described above. `requests`: a list of `(prompt, max_tokens, loops)`: token ids (at least one), how
#   many to generate (at least 1), how often the core runs for each token of this request (at most as often as `parts.slot` has
#   slots for). All are there from the start, in the order in which they wait. Each gets exactly `max_tokens` tokens.
# - `parts.slot(stage, layer, iteration)` numbers KV slots; `parts.kv` has `write` and `read` as in 14.4, and `block_size`; `parts.cache`
#   has `find`, `take`, `name`, `drop`, `free` as in 14.5, and `num_blocks`; `parts.plan` is called as `plan_step` in 14.6. The tests bring their own, which
#   keep the specifications, and for the last point use yours.
# - `budget`, `seats`: for `parts.plan`. `share`: whether prefixes are shared. Without, `find` and `name` are never called.
#
# Work in steps; each asks `parts.plan` once and makes **one** call of `model.hidden` for all rows of the step.
#
# 1. *Blocks.* A request needs blocks for `len(prompt) + max_tokens - 1` tokens (the last one drawn is never computed). All of them are
#    held from admission on: what `find` gives, and the rest from `take`. One that needs more blocks than `parts.cache.num_blocks`
#    raises `ValueError` before anything is computed. For the plan, `free_blocks` is `parts.cache.free`, and a waiting request has its
#    whole prompt to do and needs all its blocks; what is found at admission is not computed again, so it may compute fewer tokens in that step than it was granted.
# 2. *Rows.* Each scheduled request brings its next tokens; each token is computed exactly once, but for those that were found.
# 3. *Attention.* A row attends to all earlier positions of its own request at the same place, and to itself. All rows of a request are
#    written before it reads.
# 4. *Draw.* A request whose tokens are all computed gets the token of the largest logit of its last row.
# 5. *Share.* After a step, the blocks that are full by then are named; in time for those that are admitted in the next step.
# 6. A request that has its tokens drops its blocks at once, after it was named. In the end all blocks are free.
#
# *Example.* The cell below the check runs three requests on parcae-tiny with your parts.


# %% tags=["exercise"]
def serve(model, requests, parts, budget, seats, share=True):
    """→ generated token ids, a list for each request."""
    # YOUR CODE HERE
    raise NotImplementedError("ex14.7")


# %%
check("14.7")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep for each request its tokens, how many are computed, its table and its depth. What it has to do is
# tokens minus computed: the prompt at first, 1 when it decodes.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In `attend`, `rows` are numbers of rows of the whole step, but `query[i]` belongs to `rows[i]`. Remember for each row of
# the step whose it is and at which position.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Two requests of one step must not find each other's blocks: what is named after step n is found from step n + 1 on.
#
# </details>
# <details><summary>Help: my text changes with the budget</summary>
#
# A chunk that is not the last draws no token. And the context of a chunk ends at its own last position, not at the end of
# the prompt.
#
# </details>

# %% [markdown]
# **All four together** are an engine. Put this into a cell of your own and run it:
#
# ```python
# from minifer.course.loop_model import Parts, tiny_loop_model
#
# model, blocks, size = tiny_loop_model(), 24, 8
# P, R, C = model.layers
# storage = PagedKV(P + R * model.loops + C, blocks, size, model.kv_heads, model.head_dim)
# cache = PrefixCache(blocks, size)
# storage.block_size, cache.num_blocks = size, blocks
#
#
# def slot(stage, layer, iteration):
#     return kv_slot(model.layers, model.loops, stage, layer, iteration)
#
#
# texts = ["The import statement", "The import statement executes", "A class definition"]
# requests = [(list(text.encode()), 40, 8) for text in texts]
# replies = serve(model, requests, Parts(slot, storage, cache, plan_step), budget=16, seats=4)
# for text, tokens in zip(texts, replies):
#     print(text + bytes(tokens).decode(errors="replace"))
# ```
#
# Then ask the third for 1 loop and see what thinking is worth; and give the same prompt twice, once with 1 loop and once
# with 8: if the second reply changes, the depth is missing from a name.
