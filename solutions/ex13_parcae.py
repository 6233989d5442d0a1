# %% [markdown]
# # Exercises 13 · Parcae
#
# Four exercises, 18 points, about 85 minutes. They follow [lecture L13](../lectures/L13_parcae.ipynb). Write
# where it says `YOUR CODE HERE`, run the cell, then run the check below it. `minifer grade 13` gives the points.
#
# An answer uses Python and torch. Every function takes its inputs as they are and changes none of them.
# Shapes: D numbers in a state, N rows (tokens), T loops.

# %%
import torch
import torch.nn.functional as F

from minifer.course import check

# %% [markdown]
# ### Exercise 13.1 - A decay that cannot leave (0, 1)
#
# 4 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* The stability of the loop hangs on this number. "Between 0 and 1" is true of the formula and
# of real numbers; a format of 16 bits and a careless order of operations break it.
#
# *Specification.* Two functions, with Δ = softplus(`dt_bias`) = log(1 + exp(`dt_bias`)):
#
# - `decay(A_log, dt_bias)`: two tensors [D] of the same float dtype (float16, bfloat16, float32 or float64) with
#   entries from −80 to 80. It returns **float32** [D]: exp(−Δ · exp(`A_log`)), computed in float32 or better,
#   whatever the dtype of the inputs. Where that rounds to less than `torch.finfo(torch.float32).tiny`, the
#   result is this number; where it rounds to 1, the result is 1 − 2⁻²⁴, the largest float32 below 1. So it is
#   never 0, never 1, never NaN. Where neither happens, autograd must be able to go through it.
# - `input_term(dt_bias, B, e)`: `dt_bias` [D], `B` [D, D] and `e` [N, D], of one float dtype. It returns float32
#   [N, D]: row n is Δ · (B ê), where ê is row n of `e` divided by √(mean of its D squares + 10⁻⁵). All of it is
#   computed in float32 or better. (B ê is a matrix times a vector; Δ multiplies entry by entry.)
#
# *Example.* `decay` of `A_log` = `dt_bias` = [0.] is [0.5]. With `A_log` = 80 and `dt_bias` = −80 the product
# Δ · exp(`A_log`) is 1, and the result is exp(−1) = 0.3679. With D = 1, B = 1, `dt_bias` = 0 and e = 1000 or 5
# the input term is ln 2 = 0.6931.


# %% tags=["exercise"]
def decay(A_log, dt_bias):
    """A_log, dt_bias [D] → what a loop keeps of each channel, float32 [D], in (0, 1)."""
    ### BEGIN SOLUTION
    delta = F.softplus(dt_bias.float())
    kept = torch.exp(-delta * A_log.float().exp())
    return kept.clamp(torch.finfo(torch.float32).tiny, 1 - 2**-24)
    ### END SOLUTION


def input_term(dt_bias, B, e):
    """dt_bias [D], B [D, D], e [N, D] → what every loop adds, float32 [N, D]."""
    ### BEGIN SOLUTION
    e = e.float()
    unit = e / torch.sqrt(e.square().mean(dim=1, keepdim=True) + 1e-5)
    return F.softplus(dt_bias.float()) * (unit @ B.float().T)
    ### END SOLUTION


# %%
check("13.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `x.float()` first, arithmetic after it. `torch.finfo(torch.float32).tiny` is 1.18 · 10⁻³⁸; `clamp` takes two
# bounds.
#
# </details>
# <details><summary>Hint 2</summary>
#
# log(1 + exp(−80)) is 0 in float32, since 1 + 1.8 · 10⁻³⁵ is 1. `torch.log1p` and
# `torch.nn.functional.softplus` know that.
#
# </details>
# <details><summary>Help: rows of the input term are right for D = 1 only</summary>
#
# With e as rows, B times each row is `e @ B.T`.
#
# </details>

# %% [markdown]
# ### Exercise 13.2 - One loop for rows of different depth
#
# 5 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Requests ask for different depths, and the core's weights are the expensive thing to read: one
# application serves all rows that still loop. Those that are through must neither change nor be computed.
#
# *Specification.* `run_loops(h, term, decay, core, depths)` runs every row to its own depth:
#
# | | shape | |
# |---|---|---|
# | `h` | [N, D] | the states at the start |
# | `term` | [N, D] | what each loop adds to each row |
# | `decay` | [D] | what a loop keeps of each channel |
# | `core` | function, [n, D] → [n, D] | the blocks; it treats each row for itself |
# | `depths` | int64 [N] | loops of each row, 0 or more |
# | result | [N, D] | the states after so many loops, of `h`'s dtype |
#
# One loop of a row is h ← core(decay · h + term). Row n runs `depths[n]` loops; with 0 it stays as it is. `core`
# is called **max(depths) times**. In call t, counted from 0, it gets exactly the rows with `depths[n]` > t, in
# their order, and no others. The result shares no memory with `h`.
#
# *Example.* With D = 1, h = 0, term = 3, decay = ½ and a core that returns its input, depths [1, 3] give the
# states 3 and 5.25, and the core is called three times, with 2, 1 and 1 rows.


# %% tags=["exercise"]
def run_loops(h, term, decay, core, depths):
    """h, term [N, D], decay [D], depths int64 [N] → states [N, D], each at its own depth."""
    ### BEGIN SOLUTION
    h = h.clone()
    for t in range(int(depths.max())):
        looping = depths > t
        h[looping] = core(decay * h[looping] + term[looping])
    return h
    ### END SOLUTION


# %%
check("13.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `depths > t` is a bool mask [N]; `h[mask]` are these rows, and `h[mask] = …` puts them back.
#
# </details>

# %% [markdown]
# ### Exercise 13.3 - Bound the state, and check the bound
#
# 5 points · difficulty 4/5 ●●●●○ · 30 minutes · CPU
#
# *Why it matters.* A proof says what can never happen; a check over a thousand loops says that the code is the
# thing the proof is about. And a proof has a premise: the check must notice when it fails.
#
# *Specification.* One loop is x = decay · h + term, h ← core(x). The core adds at most M: ‖core(x) − x‖ ≤ M for
# every row. Then ‖h‖ ≤ ρ ‖h before‖ + ‖term‖ + M with ρ = max |decay|. Norms are Euclidean, of a row.
#
# - `state_bound(rho, start, drive, loops)` returns what ‖h‖ cannot exceed after `loops` loops from ‖h‖ = `start`,
#   when each loop adds at most `drive` (= ‖term‖ + M). `rho` ≥ 0 may be below, at or above 1, also very close to
#   it, as 1 − 10⁻⁹; `loops` is an int from 0 to 2,000. The result is right to a relative 10⁻¹².
# - `check_loop(decay, term, core, h, loops, M)`: `decay` [D], `term` and `h` [N, D], all float64, `core` as in 13.2,
#   `loops` ≥ 1, M > 0. It runs the loop and returns the largest ‖h_t‖ ÷ bound_t over all rows and all t from 1 to
#   `loops`, a Python float; each row has the bound that follows from its own ‖h_0‖ and ‖term‖. If in any loop
#   ‖core(x) − x‖ of any row is not at most M · (1 + 10⁻⁹) (NaN is not), it raises `ValueError`. `decay` may have
#   negative entries and entries of 1 or more. `core` is called `loops` times, if nothing is refused.
#
# *Example.* `state_bound(0.5, 0.0, 3.0, 3)` is 5.25, and with `rho` = 1 it is 9. With D = 1, decay ½, term 2, h = 0,
# M = 1 and a core that returns x + 1 the state *is* its bound in every loop: the answer is 1. With M = 0.5 it is
# refused.


# %% tags=["exercise"]
def state_bound(rho, start, drive, loops):
    """What ‖h‖ cannot exceed after so many loops."""
    ### BEGIN SOLUTION
    bound = start
    for _ in range(loops):
        bound = rho * bound + drive
    return bound
    ### END SOLUTION


def check_loop(decay, term, core, h, loops, M):
    """The largest ‖h_t‖ ÷ bound_t of all rows and loops."""
    ### BEGIN SOLUTION
    rho, worst = float(decay.abs().max()), 0.0
    bound, drive = h.norm(dim=1), term.norm(dim=1) + M
    for _ in range(loops):
        x = decay * h + term
        h = core(x)
        added = float((h - x).norm(dim=1).max())
        if not added <= M * (1 + 1e-9):
            raise ValueError(f"the core must add at most M = {M}, it added {added}")
        bound = rho * bound + drive
        worst = max(worst, float((h.norm(dim=1) / bound).max()))
    return worst
    ### END SOLUTION


# %%
check("13.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# (1 − ρᵗ) / (1 − ρ) is 0 / 0 at ρ = 1 and loses digits near it. The sum 1 + ρ + … + ρᵗ⁻¹ does not; nor does
# putting the line into itself, loop by loop.
#
# </details>
# <details><summary>Help: my ratio is above 1</summary>
#
# Is ρ the largest *absolute* entry of decay? Does the drive hold M? Is h_t compared with the bound of the same t?
#
# </details>

# %% [markdown]
# ### Exercise 13.4 - KV slots of a loop
#
# 4 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* A looped model is small in weights and large in KV. Who sizes a cache from the number of
# layers runs out of it; who mixes up two slots reads another iteration's keys, and nothing fails.
#
# *Specification.* A model has `prelude`, `core` and `coda` layers (0 or more, core 1 or more), numbered in this order
# from 0; the core runs `loops` ≥ 1 times. `policy` says which iterations keep keys and values:
#
# | policy | S, slots of a core layer | slot s of iteration t |
# |---|---|---|
# | `"full"` | `loops` | t |
# | `"terminal"` | 1 | 0 |
# | `"cyclic-M"` | min(M, `loops`) | t mod M |
# | `"first-M"` | min(M, `loops`) | min(t, M − 1) |
#
# M is an int of at least 1, as in `"first-2"` or `"cyclic-12"`. Slots are numbered from 0: the prelude's layers; then for s = 0, 1, …,
# S − 1 all core layers in order; then the coda's layers.
#
# - `num_slots(prelude, core, coda, loops, policy)` returns how many slots there are.
# - `kv_slot(prelude, core, coda, loops, policy, layer, iteration)` returns the slot that a layer attends to in an
#   iteration 0 … `loops` − 1. In prelude and coda, which run once, the iteration does not matter.
# - `contexts(memory, tokens, block_size, slots, kv_heads, head_dim, element_bytes)` returns how many contexts of
#   `tokens` tokens fit into `memory` bytes (all ints). A token takes a key and a value in every slot, each of
#   `kv_heads · head_dim` numbers of `element_bytes`. Memory is given out in whole blocks of `block_size` tokens, and
#   no two contexts share one.
#
# *Example.* Prelude 1, core 2, coda 1, 3 loops: `"full"` has 8 slots, and layer 2 in iteration 1 has slot 4; `"first-2"`
# has 6, and layer 1 in iteration 2 reads slot 3. `contexts(1000, 5, 4, 3, 1, 2, 2)` is 5: a block is 96 bytes, a
# context takes two, and there is room for ten.


# %% tags=["exercise"]
def num_slots(prelude, core, coda, loops, policy):
    """KV slots of the whole model."""
    ### BEGIN SOLUTION
    kind, _, m = policy.partition("-")
    kept = {"full": loops, "terminal": 1}.get(kind) or min(int(m), loops)
    return prelude + kept * core + coda
    ### END SOLUTION


def kv_slot(prelude, core, coda, loops, policy, layer, iteration):
    """The slot that a layer attends to in an iteration."""
    ### BEGIN SOLUTION
    if layer < prelude:
        return layer
    if layer >= prelude + core:
        return num_slots(prelude, core, coda, loops, policy) - (
            prelude + core + coda - layer
        )
    kind, _, m = policy.partition("-")
    if kind == "full":
        s = iteration
    elif kind == "terminal":
        s = 0
    elif kind == "cyclic":
        s = iteration % int(m)
    else:
        s = min(iteration, int(m) - 1)
    return s * core + layer
    ### END SOLUTION


def contexts(memory, tokens, block_size, slots, kv_heads, head_dim, element_bytes):
    """How many contexts fit."""
    ### BEGIN SOLUTION
    block_bytes = 2 * slots * kv_heads * head_dim * element_bytes * block_size
    return memory // block_bytes // -(-tokens // block_size)
    ### END SOLUTION


# %%
check("13.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `"first-12".partition("-")` is `("first", "-", "12")`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Core layer `prelude + j` with slot s: before it lie the prelude, s whole rounds of the core, and j layers.
#
# </details>
