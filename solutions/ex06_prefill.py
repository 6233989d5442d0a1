# %% [markdown]
# # Exercises 06 · Prefill
#
# Four exercises, 13 points and 4 for the starred one, about 75 minutes. They follow
# [lecture L06](../lectures/L06_prefill.ipynb). Write where it says `YOUR CODE HERE`, run the cell,
# then run the check below it. `minifer grade 6` gives the points.
#
# An answer uses Python and torch. Every function takes its inputs as they are and changes none of
# them.

# %%
import torch

from minifer.course import check

# %% [markdown]
# ### Exercise 6.1 - cu_seqlens and positions
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Every engine begins a step by laying its requests out on one token axis. Whoever
# reads the layout, the mask, the KV write, the sampler, trusts these lists.
#
# *Specification.* `pack(requests)` lays out one step. `requests` is a list of
# `(token_ids, num_computed, num_new)`:
#
# - `token_ids`: list of ints, all tokens of the request so far;
# - `num_computed`: how many of them, from the first, have their KV in the cache already;
# - `num_new`: how many this step computes: those at positions `num_computed` up to
#   `num_computed + num_new`, the end not included.
#
# It returns a tuple of four lists of ints, in the order of the requests:
#
# | | list | length |
# |---|---|---|
# | 1 | the tokens this step computes, end to end | T, the sum of `num_new` |
# | 2 | their positions, each within its own request | T |
# | 3 | `cu_seqlens`: 0, then the end of each request's rows | number of requests + 1 |
# | 4 | `seq_lens`: each request's context after the step, `num_computed + num_new` | number of requests |
#
# No requests give `([], [], [0], [])`. `num_new` below 1, `num_computed` below 0, or a request that
# reaches beyond its tokens (`num_computed + num_new > len(token_ids)`) raises `ValueError`.
#
# *Example.* `pack([([7, 8, 9], 0, 3), ([4, 5, 6, 1], 3, 1)])` is
# `([7, 8, 9, 1], [0, 1, 2, 3], [0, 3, 4], [3, 4])`: the second request computes its token at
# position 3.


# %% tags=["exercise"]
def pack(requests):
    """One step's tokens, positions, cu_seqlens and seq_lens."""
    ### BEGIN SOLUTION
    tokens, positions, cu_seqlens, seq_lens = [], [], [0], []
    for token_ids, num_computed, num_new in requests:
        end = num_computed + num_new
        if num_new < 1 or num_computed < 0 or end > len(token_ids):
            raise ValueError(
                f"num_computed and num_new must fit {len(token_ids)} tokens, "
                f"got {num_computed} and {num_new}"
            )
        tokens += token_ids[num_computed:end]
        positions += range(num_computed, end)
        cu_seqlens.append(cu_seqlens[-1] + num_new)
        seq_lens.append(end)
    return tokens, positions, cu_seqlens, seq_lens
    ### END SOLUTION


# %%
check("6.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three requests of 3, 1 and 2 new tokens have cu_seqlens [0, 3, 4, 6]: each entry is the one before it
# plus the request's new tokens.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A position says where a token stands in its own request. It has nothing to do with the row.
#
# </details>
# <details><summary>Help: I see "expected 4 items, got 3"</summary>
#
# The result is a tuple of four lists, in the order of the table.
#
# </details>

# %% [markdown]
# ### Exercise 6.2 - The mask of a packed step
#
# 6 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* One forgotten border in this matrix lets one user's prompt speak in another's
# answer. A test with one request cannot see it.
#
# *Specification.* `packed_mask(cu_seqlens, seq_lens)` returns a bool tensor of shape [T, S] on the CPU.
#
# - Rows are the queries of the step, as 6.1 lays them out: request b owns rows `cu_seqlens[b]` up to
#   `cu_seqlens[b + 1]`. T is `cu_seqlens[-1]`.
# - Columns are the keys of all contexts, end to end in the order of the requests: first the
#   `seq_lens[0]` keys of request 0 at positions 0, 1, 2, …, then those of request 1, and so on. S is
#   the sum of `seq_lens`.
# - The queries of request b are the *last* tokens of its context.
# - An entry is True when the query may see the key: same request, and the key's position is at most
#   the query's.
#
# Both arguments are lists of ints with at least one request; every request has at least one query
# and at most `seq_lens[b]` of them.
#
# *Example.* `packed_mask([0, 2, 3], [3, 1])` (2 new tokens after 1 computed, and a first token alone) is
#
# ```
# [[1, 1, 0,  0],
#  [1, 1, 1,  0],
#  [0, 0, 0,  1]]
# ```


# %% tags=["exercise"]
def packed_mask(cu_seqlens, seq_lens):
    """bool [T, S]: may query row t see key column s?"""
    ### BEGIN SOLUTION
    T, S = cu_seqlens[-1], sum(seq_lens)
    mask = torch.zeros(T, S, dtype=torch.bool)
    left = 0
    for b, length in enumerate(seq_lens):
        top, bottom = cu_seqlens[b], cu_seqlens[b + 1]
        query = torch.arange(length - (bottom - top), length)[:, None]
        key = torch.arange(length)[None, :]
        mask[top:bottom, left : left + length] = key <= query
        left += length
    return mask
    ### END SOLUTION


# %%
check("6.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Fill the matrix one request at a time: a block of `cu_seqlens[b + 1] - cu_seqlens[b]` rows and
# `seq_lens[b]` columns.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A request with 3 queries in a context of 10 has them at positions 7, 8 and 9.
#
# </details>
# <details><summary>Help: I see that only the chunked cases fail</summary>
#
# Then rows count from position 0, as if nothing were computed. See hint 2.
#
# </details>

# %% [markdown]
# ### Exercise 6.3 - Whose logits
#
# 3 points · difficulty 2/5 ●●○○○ · 10 minutes · CPU
#
# *Why it matters.* Logits of a long prompt are gigabytes that nobody reads. And the row that is read
# must be the request's own: sampling from a neighbour's row gives a fluent answer to another question.
#
# *Specification.* `last_hidden(hidden, cu_seqlens, seq_lens, num_tokens)` picks the rows of `hidden`, a
# float tensor [T, D], whose logits somebody needs: the last row of every request whose context is
# complete after this step. Request b is complete when `seq_lens[b] == num_tokens[b]`, where
# `num_tokens[b]` is how many tokens it has; a chunk that does not reach the end of its prompt is read by
# nobody. It returns a tensor [R, D], a copy with the dtype of `hidden`, in the order of the requests; R
# may be 0.
#
# *Example.* For `cu_seqlens = [0, 4, 16]`, `seq_lens = [20, 28]` and `num_tokens = [20, 29]` it returns row 3
# alone: the second request has one token to go.


# %% tags=["exercise"]
def last_hidden(hidden, cu_seqlens, seq_lens, num_tokens):
    """hidden [T, D] → [R, D]: one row for each request that is complete."""
    ### BEGIN SOLUTION
    rows = [
        cu_seqlens[b + 1] - 1
        for b, (seen, total) in enumerate(zip(seq_lens, num_tokens, strict=True))
        if seen == total
    ]
    return hidden[torch.tensor(rows, dtype=torch.int64)]
    ### END SOLUTION


# %%
check("6.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The last row of request b is the one before request b + 1 begins.
#
# </details>
# <details><summary>Help: I see "tensors used as indices must be long", or "non-empty TensorList"</summary>
#
# In that step nobody is complete, and the list of rows is empty. `torch.tensor([])` is made of
# floats: give it a dtype. `torch.stack` cannot stack nothing: index `hidden` instead.
#
# </details>

# %% [markdown]
# ### Exercise 6.4 ★ - Choose a chunk for a TPOT target
#
# 4 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU · optional
#
# *Why it matters.* A long prompt among decoding requests has two victims to choose from: its own TTFT, or
# everybody else's time between tokens. An operator promises the second and minimises the first.
#
# *Specification.* `choose_chunk(num_tokens, candidates, step_seconds, target)` returns the chunk size with
# which a prompt of `num_tokens` is prefilled soonest without slowing a step beyond the target:
#
# - a chunk size c cuts the prompt into steps of c tokens, the last of which may be shorter;
# - `step_seconds(query, context)` gives the seconds of a step that computes `query` tokens of the prompt,
#   after which `context` tokens of it are in the cache;
# - a candidate is allowed when *every* one of its steps takes at most `target` seconds;
# - among the allowed the one with the smallest sum of step times wins; of equals the smaller chunk.
#
# `num_tokens` is at least 1. `candidates` is a list of distinct ints of at least 1, in any order, some
# perhaps larger than the prompt. It returns an int, or `None` when no
# candidate is allowed. `step_seconds` is any function: longer contexts may cost more, and larger chunks
# need not be faster.
#
# *Example.* With `step_seconds = lambda query, context: max(4.0, query)`, 20 tokens and candidates 2, 4, 8
# and 16: chunks of 2 take 10 · 4 = 40 s, of 4 take 20 s, of 8 take 8 + 8 + 4 = 20 s, of 16 take
# 16 + 4 = 20 s. With a target of 8 the answer is 4, with a target of 3 it is `None`.


# %% tags=["exercise"]
def choose_chunk(num_tokens, candidates, step_seconds, target):
    """The chunk size with the least time to the first token whose steps keep the target."""
    ### BEGIN SOLUTION
    best = None
    for chunk in sorted(candidates):
        times = []
        for start in range(0, num_tokens, chunk):
            end = min(start + chunk, num_tokens)
            times.append(step_seconds(end - start, end))
        if max(times) <= target and (best is None or sum(times) < best[0]):
            best = (sum(times), chunk)
    return None if best is None else best[1]
    ### END SOLUTION


# %%
check("6.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each candidate make the list of its steps' times. One comparison uses its maximum, the other its
# sum.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The last step is shorter, but its context is the longest.
#
# </details>
