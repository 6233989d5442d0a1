# %% [markdown]
# # Exercises 07 · Decode
#
# Four exercises, 16 points and 4 for the starred one, about 90 minutes. They follow
# [lecture L07](../lectures/L07_decode.ipynb). Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 7` gives the points.
#
# An answer uses Python and torch. Every function takes its inputs as they are and changes none of
# them. Shapes: B requests, S tokens of the longest context, H query heads, K KV heads, C numbers a
# head, P tokens a block.

# %%
import torch

from minifer.course import check

# %% [markdown]
# ### Exercise 7.1 - Decode a ragged batch
#
# 6 points · difficulty 4/5 ●●●●○ · 25 minutes · CPU
#
# *Why it matters.* One request at a time reads the weights B times. The batched step must give each
# request what it would have got alone, also when its neighbours' contexts are longer.
#
# *Specification.* `decode_attention(query, keys, values, lengths)` is one decode step's attention:
#
# | | shape | |
# |---|---|---|
# | `query` | [B, H, C] | one query a request |
# | `keys`, `values` | [B, S, K, C] | contexts, padded to the longest |
# | `lengths` | int64 [B] | tokens of each context, 1 to S |
# | result | [B, H, C] | of `query`'s dtype |
#
# For request b and query head h, with KV head `h * K // H` (H is a multiple of K):
# scores = query · key / √C over the first `lengths[b]` keys, softmax, weighted sum of the values. What
# lies beyond a request's length **may hold anything, NaN and infinity included**, and must not show in
# the result. There may be no Python loop over requests, heads or tokens: one batched computation.
#
# *Example.* With `lengths = [1, 3]` the first row of the result is the first value of each KV head,
# repeated for the query heads that share it.


# %% tags=["exercise"]
def decode_attention(query, keys, values, lengths):
    """query [B, H, C], keys and values [B, S, K, C], lengths [B] → [B, H, C]."""
    ### BEGIN SOLUTION
    B, H, C = query.shape
    S, K = keys.shape[1:3]
    beyond = torch.arange(S)[None, :] >= lengths[:, None]
    hidden = beyond[:, :, None, None]
    keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    grouped = query.reshape(B, K, H // K, C)
    scores = torch.einsum("bkgc,bskc->bkgs", grouped, keys) / C**0.5
    scores = scores.masked_fill(beyond[:, None, None, :], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("bkgs,bskc->bkgc", weights, values).reshape(B, H, C)
    ### END SOLUTION


# %%
check("7.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A bool matrix [B, S] says what lies beyond each length. Fill the scores there with −∞ before the softmax.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Query heads 0 … H/K − 1 share KV head 0, the next H/K share head 1. `reshape(B, K, H // K, C)` puts them
# side by side.
#
# </details>
# <details><summary>Help: I see that some numbers are NaN</summary>
#
# A weight of 0 does not silence a NaN: 0 · NaN is NaN. Overwrite the hidden keys and values themselves.
#
# </details>

# %% [markdown]
# ### Exercise 7.2 - Merge partial attentions
#
# 6 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* A long context is read by many processors at once. Each sees a part of the keys and
# cannot know the sum of the others.
#
# *Specification.* `merge(outputs, lses)` joins N parts of one attention:
#
# - `outputs`: [N, H, C], float; part n's attention over its own keys, normalised by its own sum;
# - `lses`: [N, H]; log Σ exp(score) over the part's keys: the logarithm of that sum. A part without any
#   key has lse −∞, and its output may then hold anything, NaN included;
# - it returns a pair: the attention over all keys together [H, C], and its log-sum-exp [H], so that results
#   can be merged again. Both have the dtype of `outputs`.
#
# For each head at least one part has keys, unless all have none: then its output is 0 and its lse −∞.
# Scores may be large: an lse of 1,000 must not overflow, one of −1,000 must not underflow to a division by 0.
#
# *Example.* Two parts with outputs 1 and 5 (H = C = 1) and lses log 3 and log 1 give the output
# (3 · 1 + 1 · 5) / 4 = 2 and the lse log 4.


# %% tags=["exercise"]
def merge(outputs, lses):
    """outputs [N, H, C], lses [N, H] → output [H, C], lse [H]."""
    ### BEGIN SOLUTION
    top = lses.max(dim=0).values  # [H]
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = torch.exp(lses - top)  # [N, H]; 0 for a part without keys
    total = weights.sum(dim=0)
    safe = outputs.masked_fill((weights == 0)[:, :, None], 0)
    summed = (weights[:, :, None] * safe).sum(dim=0)
    output = summed / total.clamp(min=torch.finfo(outputs.dtype).tiny)[:, None]
    return output, top + torch.log(total)
    ### END SOLUTION


# %%
check("7.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# exp(lse) is the part's sum, and its share of all sums is its weight. Subtract the largest lse from all of
# them first: shares do not change, and nothing overflows.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The lse of the whole is the largest lse plus the logarithm of Σ exp(lse − largest).
#
# </details>
# <details><summary>Help: I see NaN for a head without keys</summary>
#
# −∞ minus −∞ is NaN. Replace the largest lse by 0 where it is −∞.
#
# </details>

# %% [markdown]
# ### Exercise 7.3 - Padding that changes nothing
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* A recorded graph has a fixed number of rows. The rows nobody asked for must not write
# into anybody's memory; a slot of 0 is the first token of whoever owns block 0.
#
# *Specification.* `pad_batch(token_ids, positions, slots, lengths, block_tables, size)` pads a decode step to
# `size` rows. The first four are lists of B ints, `block_tables` is a list of B lists of block ids. It returns
# the five in the same order as new lists of length `size`:
#
# - the first B rows as they are, but for one thing: all block tables get the same width, that of the longest
#   of them, by appending 0 (a padded entry is never reached, for it lies beyond the length);
# - each further row is inactive: token 0, position 0, **slot −1** (which is not written), length 1, and a block
#   table of zeros of that width.
#
# `size` below B, or no rows at all (B = 0), raises `ValueError`. The inputs, inner lists included, are neither
# changed nor shared with the result.
#
# *Example.* `pad_batch([7], [9], [21], [10], [[5, 2]], 2)` is
# `([7, 0], [9, 0], [21, -1], [10, 1], [[5, 2], [0, 0]])`.


# %% tags=["exercise"]
def pad_batch(token_ids, positions, slots, lengths, block_tables, size):
    """Five lists of B rows → five lists of `size` rows, the further ones inactive."""
    ### BEGIN SOLUTION
    B = len(token_ids)
    if not 1 <= B <= size:
        raise ValueError(
            f"size must be at least the number of rows, 1 or more: {size} for {B}"
        )
    extra = size - B
    width = max(len(table) for table in block_tables)
    tables = [table + [0] * (width - len(table)) for table in block_tables]
    tables += [[0] * width for _ in range(extra)]
    return (
        token_ids + [0] * extra,
        positions + [0] * extra,
        slots + [-1] * extra,
        lengths + [1] * extra,
        tables,
    )
    ### END SOLUTION


# %%
check("7.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `[[0] * width] * 3` is three times the *same* list.
#
# </details>

# %% [markdown]
# ### Exercise 7.4 ★ - Accept or reject, exactly
#
# 4 points · difficulty 4/5 ●●●●○ · 25 minutes · CPU · optional
#
# *Why it matters.* A small model drafts, the large one checks. Done right the tokens have the large model's
# distribution, whatever the small one proposes; done nearly right, nobody notices for a long time.
#
# *Specification.* p and q are the probabilities of the large and of the drafting model over the same V tokens,
# float64 tensors [V] that sum to 1. The draft is a token drawn from q, so q of it is above 0. Write two functions:
#
# - `accept(p, q, draft, u)` returns a bool: keep the draft? It is kept with probability min(1, p(draft) / q(draft)).
#   `u` is uniform in [0, 1): the answer is True exactly when `u` is *below* that probability.
# - `residual(p, q)` returns the probabilities [V], float64, from which a rejected draft is replaced:
#   proportional to max(0, p − q). When p and q are equal (no entry of p is above q's) nothing is ever rejected;
#   return p then.
#
# Neither may change its inputs, and `residual` returns a tensor of its own.
#
# *Example.* p = [0.5, 0.5], q = [0.8, 0.2]. Draft 0 is kept when u < 0.625, draft 1 always; the residual is
# [0, 1]. Together: token 0 comes with 0.8 · 0.625 = 0.5.
#
# *Source.* Leviathan, Kalman and Matias 2022, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192), section 2.3;
# Chen et al. 2023, [arXiv:2302.01318](https://arxiv.org/abs/2302.01318).


# %% tags=["exercise"]
def accept(p, q, draft, u):
    """True when the drafted token is kept."""
    ### BEGIN SOLUTION
    return bool(u < min(1.0, float(p[draft]) / float(q[draft])))
    ### END SOLUTION


def residual(p, q):
    """Probabilities of the token that replaces a rejected draft."""
    ### BEGIN SOLUTION
    gap = (p - q).clamp(min=0)
    total = gap.sum()
    return gap / total if total > 0 else p.clone()
    ### END SOLUTION


# %%
check("7.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where q proposes a token too often, it is rejected with what is too much. Where q proposes it too rarely, the
# residual makes up for it.
#
# </details>
