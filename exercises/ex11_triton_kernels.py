# %% [markdown]
# # Exercises 11 · Triton kernels
#
# Five exercises, 32 points, about 210 minutes. They follow
# [lecture L11](../lectures/L11_triton_kernels.ipynb). Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 11` gives the points.
#
# You write real Triton kernels. No GPU is needed: each answer runs in **the record** (the lecture's simulator of
# block programs), which refuses any access outside of a tensor, and then in **Triton's interpreter**, between guard
# bands of NaN. Triton has no wheels for macOS and Windows: there `tl` and `triton` are the record's own, the same source
# is accepted, and `check` and `minifer grade` say that the interpreter was left out.
#
# An answer uses `tl` and `triton`. What holds for all five:
#
# - The signature of each kernel is fixed, and so is its **grid**: the text says which programs there are. Arguments
#   marked `tl.constexpr` are known when the kernel is compiled; blocks have sides that are powers of two.
# - A program reads and writes nothing outside of its tensors. Masked lanes get an `other` if what they hold can
#   reach a result: without one they hold anything on a GPU, and NaN in the record.
# - Sums and products are float32; a result is rounded once, when it is stored. With `tl.dot` that means
#   `input_precision="ieee"` and float32 operands of at least 16 by 16. (`tl.sum` of a product does as well.)
# - `out` is what the caller gives, in memory that holds anything; each of its elements is written exactly once, by one
#   program. Inputs are not changed. The kernel gets them as they come and computes all of it; the host computes nothing.
# - A kernel may use no global but `tl`, `triton`, and functions that are `@triton.jit`, too. Nobody counts time.
#
# Shapes: T tokens, S tokens of context, H query heads, K KV heads, C numbers a head, D width, P tokens a block.

# %%
from minifer.course import check
from minifer.course.block_program import tl, triton

# %% [markdown]
# ### The language
#
# All that the five need, and a little more. B, BM, BN are sides of blocks.
#
# | you write | it is |
# |---|---|
# | `tl.program_id(0)`, `tl.program_id(1)` | the number of this program, along each axis of the grid |
# | `tl.arange(0, B)` | the lanes 0 … B − 1 |
# | `tl.zeros([B], tl.float32)`, `tl.full([BM, BN], 1.0, tl.float32)` | a new block |
# | `b[:, None]`, `c[None, :]` | b as a column, c as a row; where the two meet, each lane of b meets each of c |
# | `+ - * /`, `//` and `%`, `< <= ==`, `& \| ~` | lane by lane; masks take `&`, never `and` |
# | `tl.where(m, a, b)`, `tl.maximum(a, b)`, `tl.minimum(a, b)` | lane by lane, of blocks or numbers |
# | `tl.exp(b)`, `tl.log(b)`, `tl.sqrt(b)` | lane by lane, of float32 |
# | `tl.sum(b, axis)`, `tl.max(b, axis)` | b without this axis: of [BM, BN], axis 1 leaves [BM] |
# | `tl.dot(a, b, input_precision="ieee")`, `tl.trans(a)` | the product of two matrices; a transposed |
# | `X + offsets` | an address for each lane; offsets count elements |
# | `tl.load(X + at, mask=m, other=0.0)`, `tl.store(OUT + at, b, mask=m)` | all have one shape, or stretch to it; a single number is loaded without a block |
# | `b.to(tl.float32)`, `X.dtype.element_ty` | b in another dtype; the dtype of what X points to |
# | `for start in range(0, n, B):` | a loop; n may be known only when the program runs |
# | `if FLAG:` | FLAG is a `tl.constexpr`; what a block holds cannot decide, `tl.where` does |
# | `kernel[(programs, more)](…)`, `triton.cdiv(a, b)`, `triton.next_power_of_2(n)` | outside of kernels: a launch with a grid of two axes; a / b rounded up; the power of two from n on |
#
# An example with most of it, which is no answer: the largest number of each column, for each of several matrices.


# %%
@triton.jit
def column_max_kernel(
    X, OUT, N, K, BN: tl.constexpr, BK: tl.constexpr, FLOOR: tl.constexpr
):
    """Program (i, b): BK columns of matrix b of X [B, N, K], in tiles of BN rows → OUT [B, K]."""
    tile, matrix = tl.program_id(0), tl.program_id(1)
    k = tile * BK + tl.arange(0, BK)
    top = tl.full([BK], -float("inf"), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        there = (n < N)[:, None] & (k < K)[None, :]
        at = matrix * N * K + n[:, None] * K + k[None, :]
        x = tl.load(X + at, mask=there, other=-float("inf"))
        top = tl.maximum(top, tl.max(x.to(tl.float32), 0))
    if FLOOR:
        top = tl.maximum(top, 0.0)  # no less than 0
    tl.store(OUT + matrix * K + k, top, mask=k < K)


def column_max(x, out, BN, BK, FLOOR):
    """x [B, N, K] → out [B, K]."""
    B, N, K = x.shape
    grid = (triton.cdiv(K, BK), B)
    column_max_kernel[grid](x, out, N, K, BN=BN, BK=BK, FLOOR=FLOOR)


# %% [markdown]
# ### Exercise 11.1 - RMSNorm
#
# 4 points · difficulty 2/5 ●●○○○ · 20 minutes · CPU
#
# *Why it matters.* A row becomes one number, and then a row again: all that a reduction needs, in ten lines.
#
# *Specification.* `rms_norm_kernel` normalises row r of `X` in program r:
#
# out[r, d] = weight[d] · x[r, d] / √(mean over d of x[r, d]² + eps)
#
# | | | |
# |---|---|---|
# | `X` | [rows, D] | rows begin `row_stride` elements apart, `row_stride` ≥ D; between them lies what belongs to nobody |
# | `WEIGHT` | [D] | |
# | `OUT` | [rows, D] | dense: rows are D apart |
# | `D` | int | 1 or more, no power of two in general |
# | `eps` | float | may be 0; then no row is zero |
# | `WIDTH` | constexpr | the power of two from D on |
#
# `X`, `WEIGHT` and `OUT` have one dtype, float32 or float16; squares of float16 numbers may be larger than float16 goes.
# Each program reads its row once, and the weights once. The launch is given.
#
# *Example.* x = [1, 2, 2], weight = [1, 1, 2], eps = 0: the mean square is 3, and out = [1, 2, 4] / √3.


# %% tags=["exercise"]
@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, row_stride, D, eps, WIDTH: tl.constexpr):
    """One row a program."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.1")


def rms_norm(x, weight, eps, out):
    """x [rows, D] with dense rows, weight [D] → out [rows, D]."""
    rows, D = x.shape
    width = triton.next_power_of_2(D)
    rms_norm_kernel[(rows,)](x, weight, out, x.stride(0), D, eps, WIDTH=width)


# %%
check("11.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A row is `tl.arange(0, WIDTH)`, of which the first D lanes are real. A masked lane that holds 0 adds nothing to the sum.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `.to(tl.float32)` right after the load. `tl.store` rounds to the dtype of what the pointer points to.
#
# </details>
# <details><summary>Help: I see "lanes lie outside X"</summary>
#
# The last row ends where the tensor ends. Lanes from D to WIDTH need a mask, in the load and in the store.
#
# </details>

# %% [markdown]
# ### Exercise 11.2 - GEMV with ragged N and K
#
# 6 points · difficulty 3/5 ●●●○○ · 35 minutes · CPU
#
# *Why it matters.* A decode step is mostly this. Each weight is read once; what a tile reads too much, or twice, is time.
#
# *Specification.* `gemv(x, weight, out, BN, BK)` computes out[n] = Σ_k weight[n, k] · x[k] with one launch of
# `gemv_kernel`. Write both.
#
# | | | |
# |---|---|---|
# | `x` | [K] | dense, float32 or float16 |
# | `weight` | [N, K] | dense, of x's dtype |
# | `out` | [N] | dense, of x's dtype |
# | `BN`, `BK` | int | powers of two, sides of a tile; N and K need be no multiples of them |
#
# The grid is one axis: program p computes rows p · BN … p · BN + BN − 1, as many programs as cover all N rows and no
# more. A program walks along K in tiles of BN × BK weights. Each weight is read **exactly once** in the whole launch, and
# each program reads each element of x exactly once. Sums are float32: with 4,000 terms in float16 nothing is left of them.
#
# *Example.* N = 3, K = 5, BN = 2, BK = 4: two programs with two tiles each. Program 1 has one row, and the second tile
# of each has one column.


# %% tags=["exercise"]
@triton.jit
def gemv_kernel(X, W, OUT, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """BN rows of W [N, K] a program, in tiles of BK columns."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.2")


def gemv(x, weight, out, BN, BK):
    """x [K], weight [N, K] → out [N]."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.2")


# %%
check("11.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `n[:, None] * K + k[None, :]` are the offsets of a tile [BN, BK]. Two masks meet in `&`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `range(0, K, BK)` goes on while a tile begins before K; the last one may be ragged. `triton.cdiv` rounds up.
#
# </details>
# <details><summary>Help: I see NaN although the weights are masked</summary>
#
# x beyond K is not masked: 0 · NaN is NaN.
#
# </details>

# %% [markdown]
# ### Exercise 11.3 - RoPE, in place or not
#
# 4 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* Rotating queries and keys where they lie saves a tensor. It also makes the order of loads and stores,
# and who does what, part of the result; the interpreter, which runs one program after the other, may never show it.
#
# *Specification.* `rope_kernel` turns each head of each token. C = 2 · HALF; pair i of a head is (head[i], head[i + HALF]):
#
# (a, b) → (a · cos − b · sin, b · cos + a · sin), with cos[t, i] and sin[t, i] of token t
#
# | | | |
# |---|---|---|
# | `X`, `OUT` | [T, H, C] | dense, float32 or float16. **`OUT` may be the same tensor as `X`** |
# | `COS`, `SIN` | [T, HALF] | dense, float32 |
# | `PAIRS` | constexpr | the power of two from HALF on |
#
# Program p turns head p % H of token p // H, all of it: the launch, with T · H programs, is given. No program may touch an
# element that another one writes, whichever runs first.
#
# *Example.* HALF = 1, head (3, 4), cos 0, sin 1: (−4, 3), a quarter turn.


# %% tags=["exercise"]
@triton.jit
def rope_kernel(X, COS, SIN, OUT, H, HALF, PAIRS: tl.constexpr):
    """One head of one token a program."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.3")


def rope(x, cos, sin, out):
    """x [T, H, C], cos and sin [T, C/2] → out [T, H, C], which may be x."""
    T, H, C = x.shape
    half = C // 2
    pairs = triton.next_power_of_2(half)
    rope_kernel[(T * H,)](x, cos, sin, out, H, half, PAIRS=pairs)


# %%
check("11.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Load both halves before you store either. What is in a block stays as it was loaded.
#
# </details>
# <details><summary>Help: I see "element … is written by program … and program … reads"</summary>
#
# Your program touches a head that is another one's: a missing mask from HALF on, or an offset without the factor 2.
#
# </details>

# %% [markdown]
# ### Exercise 11.4 - Flash attention, forward
#
# 10 points · difficulty 5/5 ●●●●● · 90 minutes · CPU
#
# *Why it matters.* A matrix of scores [T, S] never goes to memory: a row of them is met tile by tile, with two numbers
# kept on the way. This is what made long prompts affordable.
#
# *Specification.* `flash(q, k, v, out, lse, causal, BM, BN)` computes attention with one launch of `flash_kernel`. Write
# both.
#
# | | | |
# |---|---|---|
# | `q`, `out` | [H, T, C] | dense, float32 or float16 |
# | `k`, `v` | [H, S, C] | dense, of q's dtype; S ≥ T ≥ 1 |
# | `lse` | [H, T] | dense, float32 |
# | `causal` | bool | |
# | `BM`, `BN` | int | 16 or 32: queries of a program, keys of a tile |
#
# For each head and query t: scores = q[t] · k[s] / √C; out[t] = Σ softmax(scores)[s] · v[s]; lse[t] = log Σ exp(scores), the
# natural logarithm. The T queries are the *last* T of the S positions: when `causal`, query t sees keys 0 … S − T + t.
#
# Program (i, h) computes queries i · BM … of head h; the grid is (tiles of queries, H). It walks over tiles of BN keys from
# key 0 on. When `causal`, it **reads no tile of which none of its queries sees a key**. A program reads each of its queries once, each
# key and value that one of them sees once, and none twice. Scores may be in the hundreds, of either sign. `WIDTH` is C padded to a power of two, at least 16.
#
# *Example.* H = T = C = 1, S = 2, q = [1], k = [0, log 3], v = [8, 4]: weights ¼ and ¾, out = 5, lse = log 4.


# %% tags=["exercise"]
@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE, T, S, C, scale,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """BM queries of one head a program: tile program_id(0), head program_id(1)."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.4")


def flash(q, k, v, out, lse, causal, BM, BN):
    """q [H, T, C], k and v [H, S, C] → out [H, T, C], lse [H, T]."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.4")


# %%
check("11.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep for each query the largest score so far, the sum of exp(score − largest), and the weighted sum of values. When the
# largest grows from m to m', multiply both sums by exp(m − m').
#
# </details>
# <details><summary>Hint 2</summary>
#
# The last key that a tile of queries sees is that of its last query: S − T + tile · BM + BM − 1, or S − 1, if that is less.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Key 0 is seen by every query, so after the first tile the largest score is finite, and −∞ − (−∞) does not occur.
#
# </details>
# <details><summary>Help: I see that only causal cases with S above T fail</summary>
#
# The position of query t is S − T + t, not t.
#
# </details>

# %% [markdown]
# ### Exercise 11.5 - Paged attention of a decode step
#
# 8 points · difficulty 4/5 ●●●●○ · 40 minutes · CPU
#
# *Why it matters.* The keys of a request lie in blocks that are anywhere, beside those of others. One slot too many is another
# user's text; mixed in softly, nobody notices.
#
# *Specification.* `paged_decode_kernel` computes one query head of one request in program (b, h):
#
# | | | |
# |---|---|---|
# | `Q`, `OUT` | [B, H, C] | dense, float32 or float16 |
# | `KEYS`, `VALUES` | [N, P, K, C] | dense, of Q's dtype: N blocks of P slots |
# | `TABLES` | int32 [B, …] | block ids of each request; rows begin `table_stride` elements apart |
# | `LENGTHS` | int32 [B] | tokens of each context, 1 or more |
#
# Token s of request b lies in block `TABLES[b, s // P]`, slot s % P of it. Query head h has KV head h · K // H (H is a multiple of K).
# Scores are query · key · `scale`; softmax over the first `LENGTHS[b]` tokens; weighted sum of values.
#
# Only the first ⌈length / P⌉ entries of a table's row count: what stands behind them may be any number. Slots that are no token of
# the request hold anything, NaN included, and are **not read**; each key and each value of the context is read once a program. A
# tile of BN tokens may span several blocks, and a block several tiles. Scores may be in the hundreds. The launch is given;
# `WIDTH` is C padded to a power of two. Offsets may be int32 here; on a real cache block · P · K · C passes 2³¹, so there one
# converts the block's number to `tl.int64` first.
#
# *Example.* P = 2, table [7, 3, −1], length 3: the tokens lie in slots 0 and 1 of block 7 and slot 0 of block 3.


# %% tags=["exercise"]
@triton.jit
def paged_decode_kernel(
    Q, KEYS, VALUES, TABLES, LENGTHS, OUT, scale, table_stride, H, K, C, P,
    BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One query head of one request a program, its context in tiles of BN tokens."""
    # YOUR CODE HERE
    raise NotImplementedError("ex11.5")


def paged_decode(q, keys, values, tables, lengths, scale, out, BN):
    """q [B, H, C], keys and values [N, P, K, C] → out [B, H, C]."""
    (B, H, C), (_, P, K, _) = q.shape, keys.shape
    paged_decode_kernel[(B, H)](
        q, keys, values, tables, lengths, out, scale, tables.stride(0), H, K, C, P,
        BN=BN, WIDTH=triton.next_power_of_2(C),
    )  # fmt: skip


# %%
check("11.5")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three loads a tile: the block of each token (a load of BN lanes from the table), then keys and values [BN, WIDTH] at offsets
# that follow from it. All three have a mask.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `tl.sum(q[None, :] * k, 1)` are BN scores. The softmax on the way is that of 11.4, with one query.
#
# </details>
# <details><summary>Help: I see "lanes lie outside TABLES", or a negative element of KEYS</summary>
#
# Tokens beyond the length have no block. Mask the look-up, too, and give it an `other` that is a block, or
# mask what follows.
#
# </details>
