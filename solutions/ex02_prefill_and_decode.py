# %% [markdown]
# # Exercises 02 · Prefill and decode
#
# Four exercises, 18 points, about 75 minutes, all on a CPU. They go with
# [lecture 02](../lectures/L02_prefill_and_decode.ipynb). Write where it says `YOUR CODE HERE`,
# run the cell, then run the check below it. `minifer grade 2` gives the points.
#
# Plain Python and torch; no import of the engine. The letters: T new tokens, S tokens there are
# with them, H query heads, K key and value heads, C numbers a head.

# %%
import itertools
import math

import torch

from minifer.course import check

# %% [markdown]
# ### Exercise 2.1 - A causal mask that knows its offset
#
# 4 points · difficulty 2/5 ●●○○○ · 10 minutes · CPU
#
# *Why it matters.* A prompt comes in chunks, and decode is a chunk of one token. The mask that
# textbooks draw, a square with its diagonal in the upper left corner, is right for the first chunk
# only.
#
# *Specification.* `causal_mask(num_cached, num_new)` returns a bool tensor of shape
# [num_new, num_cached + num_new] on the CPU: may query row t see key s?
#
# - Before the chunk, `num_cached` tokens are in the cache. Row t is the token at position
#   num_cached + t; column s is the token at position s.
# - A token sees itself and every earlier token, and no later one.
# - `num_new` may be 0: a tensor of no rows. `num_cached` may be 0: a square.
# - Raise `ValueError` when one of them is negative.
#
# *Example.* `causal_mask(2, 3)`, with 1 for `True`:
#
# ```
# 1 1 1 0 0
# 1 1 1 1 0
# 1 1 1 1 1
# ```


# %% tags=["exercise"]
def causal_mask(num_cached, num_new):
    """bool [num_new, num_cached + num_new]: may query row t see key s?"""
    ### BEGIN SOLUTION
    if num_cached < 0 or num_new < 0:
        raise ValueError(f"counts must not be negative, got {num_cached}, {num_new}")
    query = torch.arange(num_cached, num_cached + num_new)
    key = torch.arange(num_cached + num_new)
    return key[None, :] <= query[:, None]
    ### END SOLUTION


# %%
check("2.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down the position of each row and the position of each column, as two vectors. The mask is
# one comparison of the two.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A vector [T, 1] compared with a vector [1, S] gives a table [T, S].
#
# </details>
#
# <details><summary>Help: I see "expected torch.bool, got torch.float32"</summary>
#
# `torch.ones` makes floats. Comparisons make bools.
#
# </details>

# %% [markdown]
# ### Exercise 2.2 - RoPE with positions, in both layouts
#
# 5 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* The cached keys were turned by their positions long ago. A new query must be
# turned by its true position, and both must agree on which numbers form a pair. It is easy to get
# wrong: in one course a *test* was corrected to the wrong pairs, and corrected back
# ([61](https://github.com/skyzh/tiny-llm/pull/61),
# [62](https://github.com/skyzh/tiny-llm/pull/62)).
#
# *Specification.* `rope(x, positions, theta, layout)` returns x rotated, in a new tensor of the same
# shape and dtype.
#
# - `x` is [T, heads, C], floating point. `positions` is int64 [T]: where each of the T tokens stands
#   in its text. They may begin anywhere, have gaps and repeat. T may be 0.
# - A head has C / 2 pairs. Pair i of a token at position p turns by the angle
#   p · theta^(−2i / C), in radians: (a, b) becomes (a · cos − b · sin, a · sin + b · cos).
# - `layout="half"`: pair i is (dimension i, dimension i + C/2). `layout="interleaved"`: pair i is
#   (dimension 2i, dimension 2i + 1). The rotated pair goes where it came from.
# - Angles, cosines, sines and products are in float64; the result is rounded once, to x's dtype.
#   (The engine computes in float32, as the models' makers do.)
# - Raise `ValueError` when C is odd, when `layout` is another word, or when `positions` does not
#   have T entries. No input is changed.
#
# *Example.* `rope(x, torch.tensor([1]), 10000.0, "half")` with the only head [1, 2, 3, 4] in float64.
# The pairs are (1, 3) and (2, 4), the angles 1 and 0.01: the result is
# [−1.98411, 1.95990, 2.46238, 4.01980]. With "interleaved" the pairs are (1, 2) and (3, 4):
# [−1.14264, 1.92208, 2.95985, 4.02980].


# %% tags=["exercise"]
def rope(x, positions, theta, layout):
    """Rotate x [T, heads, C] by the tokens' positions [T]."""
    ### BEGIN SOLUTION
    T, _, C = x.shape
    if C % 2:
        raise ValueError(f"the last dimension of x must be even, got {C}")
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout must be half or interleaved, got {layout!r}")
    if positions.shape != (T,):
        raise ValueError(
            f"positions must have {T} entries, got {list(positions.shape)}"
        )
    even = torch.arange(0, C, 2, dtype=torch.float64)  # 2i
    speed = theta ** (-even / C)
    angles = (positions.double()[:, None] * speed)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    if layout == "half":
        first, second = slice(0, C // 2), slice(C // 2, C)
    else:
        first, second = slice(0, C, 2), slice(1, C, 2)
    a, b = x[..., first].double(), x[..., second].double()
    out = torch.empty_like(x)
    out[..., first] = (a * cos - b * sin).to(x.dtype)
    out[..., second] = (a * sin + b * cos).to(x.dtype)
    return out
    ### END SOLUTION


# %%
check("2.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are T · C/2 angles: one for each token and pair, the same for every head. Make them as a table
# [T, C/2] and put an axis of size 1 in the middle for the heads.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A slice picks the first numbers of all pairs, another one the second numbers. In one layout they are
# two halves, in the other every second entry. All else is shared.
#
# </details>
#
# <details><summary>Help: I see "The size of tensor a must match the size of tensor b"</summary>
#
# x is [T, heads, C/2] after slicing, the angles are [T, C/2]: torch lines up the last axes, so the
# angles need the shape [T, 1, C/2].
#
# </details>

# %% [markdown]
# ### Exercise 2.3 - Attention with a cache
#
# 6 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* This one function is both machines: with T = 1,000 it prefills, with T = 1 it
# decodes. If it is right for every way of cutting a text, so is the engine built on it.
#
# *Specification.* `cached_attention(query, key, value, past)` returns `(out, (keys, values))`.
#
# - `query` is [T, H, C], `key` and `value` are [T, K, C], of one floating-point dtype: the T ≥ 1 new
#   tokens, already rotated. `past` is `None`, or a pair (keys, values) of shape [S₀, K, C] with the
#   tokens before them, oldest first; S₀ may be 0. `None` means S₀ = 0.
# - `keys` and `values` are [S₀ + T, K, C]: those of the past, then the new ones. They may share memory
#   with the inputs, but no input is changed.
# - New token t sees the S₀ + t + 1 keys up to and with its own. Its output, for each head, is
#   softmax(q · k · C^(−1/2)) over these keys, times their values. `out` is [T, H, C], in the dtype of
#   `query`, computed in that dtype.
# - *Grouped heads:* H is a multiple of K, and query head h reads key and value head h // (H // K). With
#   H = 4 and K = 2, query heads 0 and 1 share key head 0.
# - Scores may be as large as ±10,000; the output must stay finite.
# - Raise `ValueError` when H is not a multiple of K.
#
# *Example.* One head, C = 1, past keys [0] and past values [10], one new token with query [1],
# key [0] and value [20]: both scores are 0, both weights are 1/2, the output is 15. The new cache holds
# the values 10 and 20.


# %% tags=["exercise"]
def cached_attention(query, key, value, past):
    """T new tokens attend to the past and to each other; returns (out, (keys, values))."""
    ### BEGIN SOLUTION
    T, H, C = query.shape
    K = key.shape[1]
    if H % K:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {H} and {K}"
        )
    if past is None:
        keys, values = key, value
    else:
        keys = torch.cat((past[0], key), dim=0)
        values = torch.cat((past[1], value), dim=0)
    S = keys.shape[0]
    spread_keys = keys.repeat_interleave(H // K, dim=1)  # [S, H, C]
    spread_values = values.repeat_interleave(H // K, dim=1)
    scores = torch.einsum("thc,shc->hts", query, spread_keys) / math.sqrt(C)
    later = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    out = torch.einsum("hts,shc->thc", weights, spread_values)
    return out, (keys, values)
    ### END SOLUTION


# %%
check("2.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First make the new cache. From then on there is one list of S = S₀ + T keys, and the mask of exercise
# 2.1 with S₀ cached tokens.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `repeat_interleave` along the head axis turns K heads into H, each copy next to its original. `repeat`
# puts them in another order.
#
# </details>
#
# <details><summary>Help: I see "numbers are NaN"</summary>
#
# Either a row of the mask hides all keys (a token always sees itself), or `exp` of a large score
# overflowed: `torch.softmax` subtracts the largest score first, a formula written out has to do so
# too.
#
# </details>

# %% [markdown]
# ### Exercise 2.4 - Latency from timestamps
#
# 3 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Two engines are compared by four numbers. Whoever computes them from the wrong
# differences compares something else.
#
# *Specification.* Times are floats, seconds on one clock. `latency(arrival, token_times)` returns a
# dictionary; `token_times` holds when each output token came, in order.
#
# | key | what |
# |---|---|
# | `"ttft"` | time to first token: from arrival to the first token; `None` without tokens |
# | `"itl"` | list of inter-token latencies: from each token to the next; empty for fewer than two tokens |
# | `"tpot"` | time per output token after the first: the mean of `"itl"`; `None` for fewer than two |
# | `"e2e"` | from arrival to the last token; `None` without tokens |
#
# Several tokens may come at the same time. Raise `ValueError` when a token comes before the one before
# it, or before the arrival.
#
# `throughput(requests)` is the output tokens a second of a whole run. `requests` is a list of
# (arrival, token_times), in any order; some may have no tokens. It is the number of all tokens over the
# time from the first arrival to the last token; 0.0 when there is no token at all, and `None` when that
# time is 0. No input is changed.
#
# *Example.* `latency(1.0, [1.5, 1.6, 2.0])`: TTFT 0.5, ITL [0.1, 0.4], TPOT 0.25, E2E 1.0 (up to
# rounding). `throughput([(1.0, [1.5, 1.6, 2.0]), (0.0, [1.0])])` is 4 / 2.0 = 2.0.


# %% tags=["exercise"]
def latency(arrival, token_times):
    """TTFT, ITL, TPOT and end-to-end time of one request, see the table."""
    ### BEGIN SOLUTION
    times = [arrival, *token_times]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if any(gap < 0 for gap in gaps):
        raise ValueError(f"times must not go back, got {arrival} and {token_times}")
    itl = gaps[1:]
    return {
        "ttft": gaps[0] if gaps else None,
        "itl": itl,
        "tpot": sum(itl) / len(itl) if itl else None,
        "e2e": times[-1] - arrival if gaps else None,
    }
    ### END SOLUTION


def throughput(requests):
    """Output tokens a second, from the first arrival to the last token of all."""
    ### BEGIN SOLUTION
    count = sum(len(times) for _, times in requests)
    if count == 0:
        return 0.0
    first = min(arrival for arrival, _ in requests)
    last = max(max(times) for _, times in requests if times)
    return count / (last - first) if last > first else None
    ### END SOLUTION


# %%
check("2.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# n tokens have n − 1 gaps between them. The gap before the first token is TTFT and belongs to no ITL.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A request without tokens still has an arrival, and the run begins with the earliest of all.
#
# </details>

# %% [markdown]
# ### Your functions in the model
#
# The weights of minifer-tiny, your `rope` and your `cached_attention`, request A: prefill once, then
# one token at a time. The cell says whether the text is the engine's. (Needs 2.2 and 2.3.)

# %%
from minifer.course.own_model import try_yours

try_yours(rope, cached_attention)
