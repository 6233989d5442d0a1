# %% [markdown]
# # Exercises 12 · Fusion to megakernel
#
# Four exercises, 24 points, about 100 minutes. They follow
# [lecture L12](../lectures/L12_megakernel.ipynb). Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 12` gives the points.
#
# 12.1 to 12.3 are plain Python, 12.4 uses torch. Every function takes its inputs as they are and changes
# none of them. An SM is one of the processors of a GPU.

# %%
import torch

from minifer.course import check

# %% [markdown]
# ### Exercise 12.1 - Waves and tails
#
# 4 points · difficulty 2/5 ●●○○○ · 20 minutes · CPU
#
# *Why it matters.* The next kernel waits for the last block of this one. How work is cut decides how long
# that is, and the best cut depends on the batch.
#
# *Specification.* Write two functions.
#
# `tail(durations, num_sms)` runs one kernel. `durations` is a list of its blocks, positive numbers, in their
# order. A block goes to the SM that is free first, and runs there to its end. The result is a pair: the time at
# which the last block ends, and the share of the SMs' time up to then in which a block ran (a float, at most 1).
# `num_sms` below 1 raises `ValueError`, whatever
# there is to do. Without any block the result is `(0, 1.0)`.
#
# `best_part(contexts, num_sms, overhead, parts)` chooses how attention is cut. `contexts` are the tokens of
# each request, in the order of the batch, each at least 1. With a part size p, a context becomes as many blocks
# of p tokens as fit, and behind them one with the rest if there is a rest. A block of t tokens lasts
# t + `overhead`. All blocks together, request by request, are one kernel as above. Return the size from the
# list `parts` with which it ends first; among equally good ones the largest.
#
# *Example.* `tail([3, 3, 3, 3, 3], 4)` is `(6, 0.625)`: 15 of 24. For `best_part([8, 2], 2, 0, [2, 8, 4])` the ends
# are 6, 8 and 6, so the answer is 4.


# %% tags=["exercise"]
def tail(durations, num_sms):
    """When the last block ends, and the share of the SMs' time that was used."""
    # YOUR CODE HERE
    raise NotImplementedError("ex12.1")


def best_part(contexts, num_sms, overhead, parts):
    """The part size whose kernel ends first."""

    # YOUR CODE HERE
    raise NotImplementedError("ex12.1")


# %%
check("12.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep one number for each SM: when it is free. The next block goes to the smallest of them.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `min(parts, key=…)` with a pair as key: first the end, then minus the size.
#
# </details>

# %% [markdown]
# ### Exercise 12.2 - A schedule that does not hang
#
# 8 points · difficulty 4/5 ●●●●○ · 40 minutes · CPU
#
# *Why it matters.* In a megakernel each SM walks a queue of its own, and waits where an instruction's input is
# not there yet. A poor order costs time; a wrong one never ends.
#
# *Specification.* `schedule(costs, needs, num_sms)` returns `num_sms` queues: lists of instruction numbers, one
# for each SM, every instruction in one of them and once. Instruction i takes `costs[i]`, an integer of at least 1,
# and may start only when all instructions in the list `needs[i]` have ended. Numbers have no order: i may need
# an instruction with a higher number. `num_sms` is at least 1.
#
# The **way** of an instruction is the length of the longest chain that begins with it: its own cost, plus the
# largest way among those that need it (0 if nobody does). Make the schedule by going through time:
#
# - an instruction is **ready** when all that it needs has ended;
# - whenever an SM is free and something is ready, a free SM starts the ready instruction with the longest way
#   (of equals the one with the lowest number); nobody is left idle while something is ready;
# - of what ends at the same moment, all has ended before anything starts at that moment.
#
# A queue holds its instructions in the order of their start; which of several free SMs takes one is up to you.
# Queues may be empty. When needs go in a circle there is no schedule: `ValueError`.
#
# *Example.* `schedule([1, 1, 2], [[2], [], []], 2)`: the ways are 1, 1 and 3. Instruction 2 starts first, and 1 beside
# it. When 1 has ended nothing is ready; when 2 has, 0 starts. One answer is `[[2, 0], [1]]`. It ends at 3.
#
# *Source.* Graham 1969, ["Bounds on Multiprocessing Timing Anomalies"](https://doi.org/10.1137/0117039): if no SM
# idles while something is ready, the end is less than twice the best possible one.


# %% tags=["exercise"]
def schedule(costs, needs, num_sms):
    """One queue of instruction numbers for each SM."""
    # YOUR CODE HERE
    raise NotImplementedError("ex12.2")


# %%
check("12.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First the ways, from the end: an instruction's way is known when those of all that need it are. A topological
# order, walked backwards, has that property; if not everything gets into the order there is a circle.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Then time. Keep what runs on each SM and when it ends. Start what can start, go to the earliest end, let
# everything end that ends there, and again.
#
# </details>
# <details><summary>Help: I see "ends at … and the rule ends at …"</summary>
#
# Look at moments at which several instructions end: if one of them is followed up before the others have ended, something
# something with a shorter way may get the SM. To end earlier than the rule is wrong, too: the rule is asked for. Then look at
# equals: of two with the same way the lower number goes first.
#
# </details>

# %% [markdown]
# ### Exercise 12.3 - Counters for every dependency
#
# 6 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* Counters are all that keeps a megakernel's instructions apart. One wait too few is a race, one
# too many a deadlock, and a wait for everything is a barrier, which is what the megakernel wanted to be rid of.
#
# *Specification.* `instructions` is a list in the order of the model. Each is a pair `(reads, writes)` of lists of
# buffer names, without repeats; an instruction may read what it writes (x += …). Every buffer b has two counters,
# `("written", b)` and `("read", b)`, both 0 at first. When an instruction has ended, it adds 1 to `("written", b)` for
# each b it writes and 1 to `("read", b)` for each b it reads. Write two functions.
#
# `waits(instructions)` returns a list with one dict for each instruction: counter → target. It may start when each of
# these counters is at least its target. Wait for what conflicts, and for nothing else:
#
# - before b is read or written, everybody *earlier in the list* who writes b must have ended;
# - before b is written, everybody earlier in the list who reads b must have ended, too;
# - a target is the number of those, and an entry with a target of 0 is left out.
#
# These counters go on counting, so a target may be less than the final value. It is safe because later writers wait for the
# earlier ones; the counters of the lecture have one target each, the sum.
#
# `stuck(queues, instructions, targets)` runs queues of instruction numbers, one for each SM, each from front to back,
# with `targets` as `waits` returns them (or a broken version of that). It returns the sorted list of all
# instructions that can never start (not only the first of each queue, as the lecture's toy does): `[]` for a sound schedule. A number may be in no queue at all; then it never ends,
# and is not listed.
#
# *Example.* x is written, read by two, and written again: `[([], ["x"]), (["x"], ["y"]), (["x"], ["z"]), (["y"], ["x"])]`. The
# last must wait for `{("written", "y"): 1, ("written", "x"): 1, ("read", "x"): 2}`, the first for `{}`.


# %% tags=["exercise"]
def waits(instructions):
    """One dict for each instruction: (kind, buffer) → target."""
    # YOUR CODE HERE
    raise NotImplementedError("ex12.3")


def stuck(queues, instructions, targets):
    """The instructions that can never start, sorted."""
    # YOUR CODE HERE
    raise NotImplementedError("ex12.3")


# %%
check("12.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Walk the list once and count, for each buffer, the writers and readers so far. The waits of an instruction
# are the counts as they are *before* it is counted itself.
#
# </details>
# <details><summary>Hint 2</summary>
#
# For `stuck`: as long as somebody can do the first of what is left of its queue, let it. When nobody can, everything
# that is left is stuck.
#
# </details>

# %% [markdown]
# ### Exercise 12.4 - A norm inside a product
#
# 6 points · difficulty 3/5 ●●●○○ · 15 minutes · CPU
#
# *Why it matters.* A norm of its own is a launch, and while it runs no weight is read. Fused, the weights stream
# from the first moment on, and x is read once.
#
# *Specification.* `norm_product(x, gain, weight, eps, width)` computes RMSNorm and the product behind it, in one
# pass over the columns:
#
# h = gain · x / √(mean(x²) + eps),  y = h Wᵀ
#
# | | shape | |
# |---|---|---|
# | `x` | [B, D] | a `Memory`, as below |
# | `gain` | [D] | a tensor, may be used as often as you like |
# | `weight` | [N, D] | a `Memory` |
# | result | float32 [B, N] | |
#
# A `Memory` is a matrix that you cannot hold: `.columns` is D, and `.load(start, stop)` returns the columns from start
# up to but not including stop, as a tensor. What it returned **is gone at the next load** of that matrix (it turns to NaN): what you
# keep is sums, not columns. **Each column of x and of weight is loaded once**, in pieces of
# at most `width` columns; D need not be a multiple of it. So when the first weights are there, the mean of all squares
# is not known yet. Numbers may be bfloat16: compute in float32. The mean is over D. With `eps` above 0 a
# row of zeros gives 0.
#
# *Example.* x = (1, 7), gain (1, ½), weights (10, 10), eps 0, width 1: the squares are 1 + 49, the products
# 10 + 35, and 45 / √25 = 9.


# %%
class Memory:
    """A matrix whose columns are loaded in pieces, of which the last one is there."""

    def __init__(self, matrix):
        self._matrix = matrix
        self._piece = matrix[:, :0].clone()
        self.columns = matrix.shape[1]

    def load(self, start, stop):
        self._piece.fill_(float("nan"))
        self._piece = self._matrix[:, start:stop].clone()
        return self._piece


# %% tags=["exercise"]
def norm_product(x, gain, weight, eps, width):
    """x [B, D], gain [D], weight [N, D] → float32 [B, N], each column loaded once."""
    # YOUR CODE HERE
    raise NotImplementedError("ex12.4")


# %%
check("12.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The divisor is one number a row, the same for all columns. What is summed over columns, products and squares,
# can be summed in the same pass, and divided at the end.
#
# </details>
# <details><summary>Help: I see a difference only for small x</summary>
#
# eps belongs under the root, beside the mean of the squares.
#
# </details>
