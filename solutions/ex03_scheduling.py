# %% [markdown]
# # Exercises 03 · Scheduling and continuous batching
#
# Four exercises, 20 points, about 95 minutes. Write where it says `YOUR CODE HERE`, run
# the cell, then run the check below it. `minifer grade 3` gives the points.
#
# All answers are plain Python: counts of tokens and blocks, lists, no tensors.

# %%
from dataclasses import dataclass, field

from minifer.course import check

# %% [markdown]
# ### Exercise 3.1 - Admission with bounded overtaking
#
# 6 points · difficulty 2/5 ●●○○○ · 25 minutes · CPU
#
# *Why it matters.* A head of the queue that does not fit stops everybody behind it. If
# all may pass it, it may wait for ever. Between the two lies a limit on how often a
# request may be passed.
#
# *Specification.* `admit(waiting, token_budget, free_blocks, free_seats, block_size,
# patience)` returns a list: the indices of the waiting requests that join the next
# step, in the order of the queue.
#
# `waiting` is a list of pairs `(num_prompt_tokens, times_passed)`, the oldest request
# first. There is no chunking here: a request joins with its whole prompt, of at least
# one token, or not at all. Go through the queue once, from front to back.
#
# - A request **fits** when a seat is left, its prompt is no longer than what is left of
#   the token budget, and the blocks its prompt fills are no more than the free blocks
#   that are left. A prompt of n tokens fills n / `block_size` blocks, rounded up. To
#   need exactly what is left is to fit.
# - A request that fits is admitted. It takes a seat, its tokens and its blocks from
#   what is left for those behind it.
# - A request that does not fit is passed, if it was passed less than `patience` times
#   so far: go on to the next one. If its `times_passed` is `patience` or more, stop:
#   nobody behind it is admitted in this step.
#
# With `patience` 0 nobody is ever passed. The queue may be empty; budget, blocks and
# seats may be 0. Nothing is changed: the caller counts who was passed.
#
# *Example.* Budget 512, 40 free blocks of 16, 8 seats, patience 2, and the queue
# `[(600, 0), (100, 0), (300, 0), (200, 0)]`. The first is longer than 512 and is
# passed. 100 tokens fit (7 blocks; 412 tokens and 33 blocks are left), 300 fit (19
# blocks; 112 tokens are left), 200 do not: `[1, 2]`. Had the first been passed twice
# already, the answer would be `[]`.


# %% tags=["exercise"]
def admit(waiting, token_budget, free_blocks, free_seats, block_size, patience):
    """Indices of the requests that join the next step, in the order of the queue."""
    ### BEGIN SOLUTION
    tokens, blocks, seats, admitted = token_budget, free_blocks, free_seats, []
    for index, (prompt, passed) in enumerate(waiting):
        need = -(-prompt // block_size)
        if seats > 0 and prompt <= tokens and need <= blocks:
            admitted.append(index)
            tokens -= prompt
            blocks -= need
            seats -= 1
        elif passed >= patience:
            break
    return admitted
    ### END SOLUTION


# %%
check("3.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep three numbers: tokens, blocks and seats that are left. All of them shrink when a
# request is admitted, and only then.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Compare *before* you subtract. `-(-n // p)` is n / p rounded up.
#
# </details>
#
# <details><summary>Help: a long queue gives one request too many</summary>
#
# Look at the request that does not fit: was it passed `patience` times already? Then
# the walk ends there, even if all behind it would fit.
#
# </details>

# %% [markdown]
# ### Exercise 3.2 - Mix decodes and chunks
#
# 6 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* A mixed step keeps decodes smooth while a long prompt is computed in
# chunks. Two mistakes are old acquaintances: a chunk that takes the budget of a decode,
# and a new prompt of one token that is taken for a decode (L09 tells what that did).
#
# *Specification.* `mix(running, waiting, token_budget, max_chunk, free_seats,
# block_size)` returns the plan of one step: a list of triples
# `(index, num_new, kind)`, in the order in which budget is handed out.
#
# `running` and `waiting` are lists of triples `(num_prompt, num_output, num_computed)`,
# the oldest first. `index` counts the running ones from 0 and goes on with the waiting
# ones: waiting request j has index `len(running) + j`. A request is **behind** by
# `num_prompt + num_output - num_computed` tokens, at least 1. `num_computed` of a
# waiting request is 0; its `num_output` is above 0 when it was preempted.
#
# 1. **Decodes first.** A running request decodes when its whole prompt is computed and
#    it is exactly 1 token behind. In the order of the list, each decode gets
#    `(index, 1, "decode")` as long as budget is left.
# 2. **Then chunks**: the other running requests in the order of the list, then the
#    waiting ones in the order of the list. A chunk is as large as possible: no more
#    than the request is behind, than `max_chunk`, and than the budget that is left. A
#    chunk that does not bring the request all the way must end on a block boundary
#    (`num_computed + num_new` is a multiple of `block_size`): make it smaller until it
#    does. If nothing is left of it, the request gets no entry and the next one is
#    looked at. Otherwise it gets `(index, num_new, "prefill")`.
# 3. Each waiting request that gets an entry takes a seat. When no seat is left, no
#    further waiting request gets an entry.
#
# The numbers in the plan never add up to more than `token_budget`. Lists may be empty,
# the budget and the seats may be 0. Nothing is changed.
#
# *Example.* Blocks of 8, budget 32, `max_chunk` 16, one seat.
# `running = [(20, 0, 16), (10, 3, 12)]`: the first still has 4 tokens of its prompt to
# compute, the second is one behind its 13 and decodes.
# `waiting = [(40, 0, 0), (9, 0, 0)]`. The plan is
# `[(1, 1, "decode"), (0, 4, "prefill"), (2, 16, "prefill")]`: request 3 has no seat,
# and 11 tokens of budget stay unused. With a budget of 12 request 2 would get 7 tokens,
# rounded down to 0, so the seat and all 7 are there for request 3; it is 9 behind, and
# 7 of 9 are rounded down to 0, too: `[(1, 1, "decode"), (0, 4, "prefill")]`.


# %% tags=["exercise"]
def mix(running, waiting, token_budget, max_chunk, free_seats, block_size):
    """[(index, num_new, "decode" or "prefill"), …]: the plan of one step."""
    ### BEGIN SOLUTION
    plan, left, seats = [], token_budget, free_seats
    chunks = []
    for index, (prompt, output, computed) in enumerate([*running, *waiting]):
        behind = prompt + output - computed
        if computed >= prompt and behind == 1:
            if left > 0:
                plan.append((index, 1, "decode"))
                left -= 1
        else:
            chunks.append((index, behind, computed))
    for index, behind, computed in chunks:
        if index >= len(running) and seats <= 0:
            break
        new = min(behind, max_chunk, left)
        if new < behind:
            new -= (computed + new) % block_size
        if new <= 0:
            continue
        plan.append((index, new, "prefill"))
        left -= new
        if index >= len(running):
            seats -= 1
    return plan
    ### END SOLUTION


# %%
check("3.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two passes: the first hands out decodes and keeps all others in a list, the second
# goes through that list.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The end of a chunk is `num_computed + num_new`. What it lies past the last block
# boundary is `(num_computed + num_new) % block_size`; take that much away from
# `num_new`. The result may be 0 or below: then there is no chunk.
#
# </details>
#
# <details><summary>Help: a prompt of one token is called a decode</summary>
#
# One token behind is not enough: its prompt must be computed. A new prompt of one token
# has computed nothing.
#
# </details>

# %% [markdown]
# ### Exercise 3.3 - Preempt, resume, finish
#
# 6 points · difficulty 4/5 ●●●●○ · 30 minutes · CPU
#
# *Why it matters.* When memory runs out somebody gives up its blocks and computes its
# tokens again later. No token may be lost, none drawn twice, no block forgotten. All
# three have happened in engines that passed their tests.
#
# A request of this exercise (two requests are equal only when they are the same object):


# %%
@dataclass(eq=False)
class Sequence:
    prompt: list  # token ids
    priority: int = 0  # a smaller number is more important
    output: list = field(default_factory=list)  # token ids drawn so far
    num_computed: int = 0  # tokens of prompt + output whose KV is in its blocks
    block_table: list = field(default_factory=list)  # block ids


# %% [markdown]
# *Specification.* Three functions. They change their arguments as said, and nothing
# else. `running` is a list of sequences, `waiting` a `collections.deque` with the next
# one in front (`waiting[0]`), `free_blocks` a list of block ids.
#
# **`preempt(running, waiting, free_blocks)`** chooses a victim among the running, puts
# it at the *front* of `waiting` and returns it.
#
# - The victim has the largest `priority` number; among equals the smallest
#   `num_computed` (the cheapest to compute again); among equals again it is the one
#   furthest back in `running`.
# - It leaves `running`, whose other members keep their order. Its blocks are appended
#   to `free_blocks` in any order, its `block_table` becomes `[]`, its `num_computed` 0.
#   Prompt and output stay.
# - When `running` is empty it raises `ValueError`.
#
# **`resume(running, waiting, free_blocks, block_size)`** lets the *front* of `waiting`
# run, if all its tokens, prompt and output, fit into free blocks.
#
# - It needs `len(prompt) + len(output)`, at least 1, over `block_size` blocks, rounded
#   up. If nobody waits or fewer blocks are free, nothing changes and `[]` is returned.
#   Nobody is overtaken.
# - Otherwise the sequence moves to the end of `running`; its blocks are taken with
#   `free_blocks.pop()`, one after the other, and stand in `block_table` in that order.
# - Returns a new list: the ids of the tokens that the next step must compute for it, in
#   order. `num_computed` stays 0; the step will raise it.
#
# **`finish(sequence, running, free_blocks)`** ends a running sequence: it leaves
# `running`, its blocks are appended to `free_blocks` in any order and its
# `block_table` becomes `[]`; all else stays. If the sequence is not in `running`
# (finished before, or waiting), nothing happens. Returns `None`.
#
# *Example.* Blocks of 4; `free_blocks` is `[7]`. Running are A (8 tokens computed,
# blocks [0, 1]) and B (prompt `[5, 6, 7]`, output `[9, 9]`, 5 computed, blocks [2, 3]),
# both of priority 0. `preempt` takes B: `free_blocks` is `[7, 2, 3]`, B is in front of
# the queue, 0 computed, output still `[9, 9]`. `resume` needs 2 blocks, takes 3 and
# then 2, returns `[5, 6, 7, 9, 9]`, and B runs behind A.


# %% tags=["exercise"]
def preempt(running, waiting, free_blocks):
    """Send the cheapest of the least important back to the queue; returns it."""
    ### BEGIN SOLUTION
    if not running:
        raise ValueError("running must hold at least one sequence, got none")
    place = max(
        range(len(running)),
        key=lambda i: (running[i].priority, -running[i].num_computed, i),
    )
    victim = running.pop(place)
    free_blocks.extend(victim.block_table)
    victim.block_table = []
    victim.num_computed = 0
    waiting.appendleft(victim)
    return victim
    ### END SOLUTION


def resume(running, waiting, free_blocks, block_size):
    """Let the front of the queue run again; returns the token ids to compute."""
    ### BEGIN SOLUTION
    if not waiting:
        return []
    head = waiting[0]
    tokens = head.prompt + head.output
    needed = -(-len(tokens) // block_size)
    if needed > len(free_blocks):
        return []
    running.append(waiting.popleft())
    head.block_table = [free_blocks.pop() for _ in range(needed)]
    return tokens
    ### END SOLUTION


def finish(sequence, running, free_blocks):
    """End a running sequence and give its blocks back; twice is once."""
    ### BEGIN SOLUTION
    if sequence not in running:
        return
    running.remove(sequence)
    free_blocks.extend(sequence.block_table)
    sequence.block_table = []
    ### END SOLUTION


# %%
check("3.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `max(..., key=...)` with a tuple as key compares the first entries, then the second
# ones. A number that should be *small* goes in with a minus.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# What must be computed after a preemption? Everything whose KV is gone: prompt *and*
# output. The tokens are known, so none is drawn again until all of them are computed.
#
# </details>
#
# <details><summary>Help: "block 3 is in two places"</summary>
#
# Blocks were given back and still stand in a `block_table`, or were given back twice.
# Empty the table when you give its blocks back, and look in `finish` whether the
# sequence is running at all.
#
# </details>

# %% [markdown]
# ### Exercise 3.4 ★ - Priority with ageing
#
# 2 points · difficulty 3/5 ●●●○○ · 15 minutes · CPU
#
# *Why it matters.* Without ageing a stream of important requests starves all others.
# With it, how long anybody can be overtaken is a number in the configuration.
#
# *Specification.* A request is a pair `(priority, arrival)` of ints: a smaller priority
# is more important, `arrival` is the step in which it came. All wait at the same speed,
# and `ageing` steps of waiting are worth one level of priority: at step `now` a
# request's *effective* priority is `priority - (now - arrival) / ageing`, as an exact
# fraction. `ageing` is an int of at least 1, or `None`: then waiting counts for
# nothing, and the effective priority is the priority.
#
# - `pick(waiting, now, ageing)` returns the index of the request that is next: the
#   smallest effective priority; among equals the smallest `arrival`; among equals again
#   the smallest index. `waiting` is a list of at least one request; no `arrival` is
#   above `now`.
# - `takes_seat(waiter, runner, now, ageing)` says whether a waiting request may preempt
#   a running one: `True` when its *plain* priority is strictly smaller **and** its
#   effective priority is strictly smaller, otherwise `False`. (With the first condition
#   alone two requests could preempt each other for ever, with the second alone age would
#   throw out the important.)
#
# Nothing is changed. The numbers may be large; floats are not exact enough, even for
# small ones.
#
# *Example.* `ageing` 10, `now` 40. `(1, 0)` has waited 40 steps: 1 - 4 = -3. `(0, 12)`
# has 0 - 2.8 = -2.8. So `pick([(0, 12), (1, 0)], 40, 10)` is 1, and
# `takes_seat((0, 12), (1, 0), 40, 10)` is `False`. With `None` they are 0 and `True`.


# %% tags=["exercise"]
def pick(waiting, now, ageing):
    """Index of the request that is next."""
    ### BEGIN SOLUTION
    return min(
        range(len(waiting)),
        key=lambda i: (_effective(waiting[i], now, ageing), waiting[i][1], i),
    )
    ### END SOLUTION


def takes_seat(waiter, runner, now, ageing):
    """May the waiting request take the running one's place?"""
    ### BEGIN SOLUTION
    better = waiter[0] < runner[0]
    mine, theirs = (_effective(r, now, ageing) for r in (waiter, runner))
    return better and mine < theirs


def _effective(request, now, ageing):
    """The effective priority times `ageing`: an exact int."""
    priority, arrival = request
    return priority if ageing is None else priority * ageing - (now - arrival)
    ### END SOLUTION


# %%
check("3.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Multiply by `ageing`: the order is the same, and all numbers are ints.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Python compares tuples entry by entry, which is what "among equals" asks for.
#
# </details>
#
# <details><summary>Help: two requests that should be equal are not</summary>
#
# In floats 1 - 4/3 and 0 - 1/3 differ in the last digit. Ints do not.
#
# </details>
#
# Your ageing on the lecture's example: one seat, a low request and 100 high ones, one a
# step. Look at how long the low one waits (it says so when 3.4 is not attempted).


# %%
def steps_of_the_low_one(ageing):
    waiting = [(1, 0)]
    for step in range(100):
        waiting.append((0, step))
        if waiting.pop(pick(waiting, step, ageing)) == (1, 0):
            return step + 1
    return "more than 100"


if __name__ == "__main__":  # not while it is graded
    try:
        for ageing in (None, 40, 10):
            print(f"ageing {ageing}: {steps_of_the_low_one(ageing)} steps")
    except NotImplementedError:
        print("3.4 is not attempted")
