# %% [markdown]
# # Exercises 01 · From electricity to intelligence
#
# Four exercises, 12 points and 3 optional (★), about 70 minutes, all on a CPU. They go with
# [lecture 01](../lectures/L01_electricity_to_intelligence.ipynb). Write where it says
# `YOUR CODE HERE`, run the cell, then run the check below it. `minifer grade 1` gives the points.
#
# Plain Python; no import of the engine. One multiply-add is 2 **FLOPs**. Bytes count once for what is
# read and once for what is written.

# %%
import math

from minifer.course import check, example

# %% [markdown]
# ### Exercise 1.1 - Cost of a matrix product
#
# 3 points · difficulty 1/5 ●○○○○ · 10 minutes · CPU
#
# *Why it matters.* Nearly all of a language model is matrix products. Two numbers about each, FLOPs and
# bytes, say which part of a machine will be the limit.
#
# *Specification.* `matmul_cost(M, N, K, dtype, weight_dtype=None)` returns a tuple of two ints,
# `(flops, bytes)`, of the product Y [M, N] = X [M, K] · W [K, N].
#
# - FLOPs: every element of Y takes K multiplications and K additions.
# - Bytes: X and W are each read once, Y is written once. X and Y hold numbers of `dtype`, W of
#   `weight_dtype`, or of `dtype` when it is `None`.
# - Bytes of a number: `"float32"` 4, `"bfloat16"` and `"float16"` 2, `"float8"` and `"int8"` 1, `"int4"`
#   half. A matrix takes whole bytes: an odd number of `"int4"` is rounded up, for each of the three
#   matrices on its own.
# - Raise `ValueError` for a dtype that is not in this list, and for M, N or K below 1.
#
# *Example.* `matmul_cost(1, 3, 4, "bfloat16")` is `(24, 38)`: 2 · 1 · 3 · 4 FLOPs; 4 + 12 + 3 numbers of
# two bytes. With `weight_dtype="int4"` it is `(24, 20)`: 8 + 6 + 6 bytes.


# %% tags=["exercise"]
def matmul_cost(M, N, K, dtype, weight_dtype=None):
    """(FLOPs, bytes) of X [M, K] · W [K, N]."""
    # YOUR CODE HERE
    raise NotImplementedError("ex1.1")


# %%
check("1.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three matrices, three sizes: M · K, K · N and M · N numbers. None of them is moved twice.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Count in bits, and turn each matrix into bytes at the end: `(bits + 7) // 8` rounds up.
#
# </details>
#
# <details><summary>Help: I see a float where an int is expected</summary>
#
# `/` always makes a float in Python, `0.5 * n` too. Use `//`.
#
# </details>

# %% [markdown]
# ### Exercise 1.2 - Bytes of a decode step
#
# 5 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* The bytes of a decode step over a machine's bandwidth are the floor under the time of
# a token. An error of a factor of 4 here (it is a common one) is an error of a factor of 4 in every plan
# made with it.
#
# *Specification.* `decode_step_bytes(config, contexts, weight_bytes=2, kv_bytes=2)` returns a dictionary
# of three numbers, the bytes one decode step moves:
#
# | key | what |
# |---|---|
# | `"weights"` | weights that are read |
# | `"kv_read"` | keys and values that attention reads |
# | `"kv_written"` | keys and values that are new |
#
# - `contexts[b]` is the number of tokens of request b, the token of this step included. Each request
#   computes one token. All keys and values of a request are read, its newest among them.
# - `weight_bytes` and `kv_bytes`: bytes of one number; 0.5 is possible.
# - The model, with `D = config.hidden_size`, `F = config.intermediate_size`, `L = config.num_layers`,
#   `H = config.num_heads`, `K = config.num_kv_heads`, `C = config.head_dim`, `V = config.vocab_size`:
#
# | part | numbers | how often |
# |---|---|---|
# | embedding, V rows of D | one row a request | once |
# | queries, keys and values | D · (H + 2 K) · C | every layer |
# | attention output | H · C · D | every layer |
# | gate and up | D · 2 F | every layer |
# | down | F · D | every layer |
# | two norms | 2 · D | every layer |
# | last norm | D | once |
# | head | V · D, all of them | once |
#
# - All parts but the embedding are read whole, once, however many requests there are. With
#   `config.tie_word_embeddings` the head *is* the embedding's matrix; it is read whole all the same, and
#   the embedding's rows are counted as above.
# - Every layer keeps, for each token, a key and a value of C numbers for each of its K KV heads.
# - No requests (an empty list): all three are 0. A context below 1: `ValueError`.
#
# *Example.* D = 8, F = 16, L = 2, H = 4, K = 2, C = 2, V = 10, contexts `[5, 1]`: a layer has
# 8 · (4 + 2 · 2) · 2 + 4 · 2 · 8 + 8 · 2 · 16 + 16 · 8 + 2 · 8 = 592 numbers, the whole step reads
# 2 · 8 + 2 · 592 + 8 + 80 = 1288: `{"weights": 2576, "kv_read": 192, "kv_written": 64}`. A token's KV
# is 2 layers · 2 (K and V) · 2 heads · 2 numbers · 2 bytes = 32 bytes; 6 tokens are read, 2 written.


# %% tags=["exercise"]
def decode_step_bytes(config, contexts, weight_bytes=2, kv_bytes=2):
    """Bytes that one decode step moves, see the table."""
    # YOUR CODE HERE
    raise NotImplementedError("ex1.2")


# %%
check("1.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three questions, one after the other: what is read once a step, what once a request, what once a token
# of context?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Queries have H heads, keys and values K. Only keys and values are kept, so H does not occur in the KV.
#
# </details>
#
# <details><summary>Help: my weights are too large by V · D, but only for some models</summary>
#
# Those with tied embeddings? The matrix is read whole once, as the head. As the embedding only one row a
# request is read, tied or not.
#
# </details>

# %% [markdown]
# ### Exercise 1.3 - Critical batch
#
# 4 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* Up to the critical batch another request costs nearly nothing; beyond it, every
# request pays for its arithmetic. Whoever sizes a service asks for this number first, and sometimes it
# does not exist.
#
# *Specification.* `critical_batch(weight_bytes, request_bytes, request_flops, peak_flops, bandwidth)`
# returns the smallest batch B ≥ 1, an int, for which a step's arithmetic takes *at least as long* as its
# traffic, or `None` when there is no such batch.
#
# - A step of B requests does `B * request_flops` FLOPs, at `peak_flops` FLOP/s.
# - It moves `weight_bytes + B * request_bytes` bytes, at `bandwidth` bytes/s: the weights are shared, its
#   KV is each request's own.
# - All five are ints; `request_bytes` may be 0, the others are above 0. They may be large (10¹⁵). The
#   result must be exact: do not divide floats. Do not search: B may be 10³⁰.
#
# *Example.* A machine of 100 FLOP/s and 10 bytes/s, 200 bytes of weights, requests of 4 FLOPs. With no
# bytes of their own, B requests take 4 B / 100 and 200 / 10 seconds: equal at B = 500, so
# `critical_batch(200, 0, 4, 100, 10)` is 500. With `request_bytes=1` a request's own byte takes 0.1 s,
# its arithmetic 0.04 s: `None`. With 19 FLOPs and 1 byte: 0.19 B ≥ 20 + 0.1 B first holds at B = 223.


# %% tags=["exercise"]
def critical_batch(weight_bytes, request_bytes, request_flops, peak_flops, bandwidth):
    """The smallest batch whose arithmetic takes as long as its traffic, or None."""
    # YOUR CODE HERE
    raise NotImplementedError("ex1.3")


# %%
check("1.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the inequality down, then multiply both sides by `peak_flops * bandwidth`: no division is left.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Bring all B to one side. What stands before B may be 0 or negative: what does that mean?
#
# </details>
#
# <details><summary>Help: I am off by one, sometimes</summary>
#
# The smallest int that is at least a / b is `-(-a // b)`. `a // b + 1` is too large when b divides a.
#
# </details>

# %% [markdown]
# ### Exercise 1.4 ★ - Joules a token
#
# 3 points · optional · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* A chip draws power while it waits, and while it reads prompts that nobody is charged
# for by the token. Averages that forget it make services look cheaper than they are.
#
# *Specification.* `joules_per_token(steps, idle_watts, max_watts)` returns a float: the joules of all
# steps together over the tokens of all steps together.
#
# - `steps` is a list of tuples `(seconds, busy, tokens)`. During a step the chip draws
#   `idle_watts + busy * (max_watts - idle_watts)` watts, with `busy` from 0 to 1. `tokens` were written in
#   it; a step of prefill, or a pause, may have written 0.
# - Raise `ValueError` when no token was written at all, when a `busy` is outside [0, 1], and when
#   `max_watts < idle_watts`.
# - Relative errors up to 10⁻⁹ are accepted. `steps` is not changed.
#
# *Example.* A chip of 100 W idle and 700 W at most. Prefill: 0.2 s, fully busy, no token. Ten decode steps
# of 0.01 s, half busy, 4 tokens each. 0.2 · 700 + 10 · 0.01 · 400 = 180 J for 40 tokens: 4.5 J.


# %% tags=["exercise"]
def joules_per_token(steps, idle_watts, max_watts):
    """Joules of all steps over tokens of all steps."""
    # YOUR CODE HERE
    raise NotImplementedError("ex1.4")


# %%
check("1.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two sums, one division at the end.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The average of each step's joules a token is another number: short steps would count as much as long
# ones, and a step without tokens would have none.
#
# </details>
#
# <details><summary>Help: I see ZeroDivisionError</summary>
#
# The tokens of all steps may add up to 0, also when there is no step at all. Raise `ValueError` before you
# divide.
#
# </details>

# %% [markdown]
# Your function on a real model (needs 1.2): minifer-tiny in float32, three requests of 32, 29 and 24
# tokens. Watched, the engine reads 5,538,816 bytes of weights in such a step.

# %%
# decode_step_bytes(example.tiny().config, [32, 29, 24], 4, 4)
