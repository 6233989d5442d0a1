# %% [markdown]
# # L11 · Triton kernels
#
# Below the model's formulas lie kernels: small programs that run a thousand times at
# once. This lecture writes some, draws which program touches which number, counts the
# bytes, and asks which tests would find a wrong one.
#
# 60 minutes of reading, 210 minutes of exercises. Needs L06 (prefill) and L07 (decode);
# no GPU, no network. Triton has wheels for Linux alone: elsewhere read the outputs; the
# exercises run everywhere.
#
# After it you can
#
# - **assign** rows, tiles and lanes to programs, and **mask** what does not exist;
# - **count** the bytes and sectors that a kernel asks for, and compare with its price;
# - **reduce** a row in tiles, down to a softmax that nobody holds at once;
# - **find** an access outside, an undefined lane and a race, and say who cannot see it;
# - **predict** a kernel's time from its bytes, and measure it without fooling yourself.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the fourth, decode](figures/life_map_decode.svg)
#
# Where it was in L07, one level deeper: inside one operation of one step. The next cell
# sets up, asks Triton for its interpreter, and prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"
begin("L11")

# %% [markdown]
# ## What runs when a kernel is launched?
#
# A token of A under the microscope, at position 24. What the model does for it (stage 4)
# is a list of operations; on a GPU each is a **kernel**, a function that is launched
# many times at once. (The engine's own lines are shown, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

run = example.run()
microscope(run, "A", position=24, stage="decode")

# %% [markdown]
# A run of a kernel's code is a **program** (CUDA: thread block). Programs differ in
# nothing but their number, and may run in any order. A program handles a **block** of
# numbers; its places are **lanes**, and a block's size is a power of two.
#
# By hand: 6 numbers, blocks of 4. How many programs, and which lanes have nothing to do?
# Two: program 1 has elements 4 and 5, and its lanes 2 and 3 are **masked**: they load
# and store nothing. In Triton ([Tillet, Kung and Cox
# 2019](https://doi.org/10.1145/3315508.3329973)):

# %% tags=["claim"]
from minifer.course.block_program import AccessError, simulate, tl, triton


@triton.jit
def add_kernel(A, B, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + at, mask=at < n, other=0.0)
    b = tl.load(B + at, mask=at < n, other=0.0)
    tl.store(OUT + at, a + b, mask=at < n)


# %% [markdown]
# `A + at` are four addresses. `other` is what a masked lane holds. To see what programs
# do, we run the source in **the record**: a simulator of this book that executes one
# program after the other and writes down every load and store. Predict the bytes that
# are read (float32).

# %% tags=["claim"]
a, b, out = torch.arange(6.0), torch.full((6,), 10.0), torch.empty(6)
ran = simulate(lambda: add_kernel[(2,)](a, b, out, 6, BLOCK=4))
print("right:", torch.equal(out, a + b), out.tolist())
print("bytes read:", ran.trace.bytes(kind="load"), "written:", ran.trace.bytes("OUT"))

# %% [markdown]
# 48 and 24: masked lanes ask for no bytes. The picture is drawn from the record.

# %% tags=["picture"]
from minifer.course.pictures import block_programs as pictures

show(
    pictures.lanes_figure(
        ran.trace, "A", title="Two programs of four lanes share six numbers"
    ),
    alt="Program 0 reads elements 0 to 3 of A with lanes 0 to 3. Program 1 reads 4 and "
    "5; its lanes 2 and 3 point behind the end and are masked.",
)

# %% [markdown]
# The same source can run in four places. They form a **ladder**, and each rung sees what
# the others cannot.
#
# | rung | is | sees |
# |---|---|---|
# | torch, float64 | the formula | what the result should be |
# | the record | this book's block program | each element touched, by whom; races |
# | Triton's interpreter | Triton on numpy | whether Triton understands the source |
# | a GPU | compiled code | time, registers, threads inside of a program |
#
# A plain launch takes the interpreter: the set-up asks for it, so that all machines show
# the same. Expect the same sum.

# %% tags=["claim"]
plain = torch.empty(6)
add_kernel[(2,)](a, b, plain, 6, BLOCK=4)
print("interpreter and record agree:", torch.equal(plain, out))

# %% [markdown]
# One source, two rungs, one result.
#
# ## What does a missing mask do?
#
# Take both masks away, one at a time. Before you look: which of the two mistakes makes
# the result of `add` wrong?


# %% tags=["claim"]
@triton.jit
def loads_all(A, B, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(OUT + at, a + b, mask=at < n)


@triton.jit
def stores_all(A, B, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(A + at, mask=at < n, other=0.0)
    tl.store(OUT + at, a + tl.load(B + at, mask=at < n, other=0.0))


# %% [markdown]
# First in Triton's interpreter, with each tensor between **guard bands**: memory full of
# NaN, in which a change shows afterwards.

# %% tags=["claim"]
from minifer.course.guard_bands import GuardBands

for kernel in (loads_all, stores_all):
    bands = GuardBands()
    x, y, z = (bands.place(name, t) for name, t in zip("aby", (a, b, out), strict=True))
    kernel[(2,)](x, y, z.fill_(0), 6, BLOCK=4)
    outside = bands.written_outside(("y",))
    print(f"{kernel.fn.__name__}: right {torch.equal(z, a + b)}, written {outside}")

# %% [markdown]
# Neither! The first reads two numbers of somebody else and throws them away; the second
# puts two numbers into somebody else's memory. Both pass a test that compares results.
# Guard bands find the second, and the first if what it reads reaches the result. The
# record knows where tensors end:

# %% tags=["claim"]
for kernel in (loads_all, stores_all):
    try:
        simulate(lambda kernel=kernel: kernel[(2,)](a, b, out, 6, BLOCK=4))
    except AccessError as error:
        print(str(error).splitlines()[0])

# %% [markdown]
# On a GPU the first one works until a tensor is the last in its mapped memory.
#
# ## Which bytes come along?
#
# Memory gives out **sectors** of 32 bytes. A **warp**, 32 threads of a program that run
# together, one lane each here, asks for all its sectors at once ([CUDA C++ Best Practices
# Guide](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/), "Coalesced access").
# By hand: 32 lanes with 4 bytes each, side by side: 128 bytes, 4 sectors. Now 32 lanes
# down a column of a matrix with rows of 32 numbers: how many?


# %% tags=["claim"]
@triton.jit
def line_kernel(M, OUT, step_lane, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    tl.store(OUT + lane, tl.load(M + lane * step_lane))


matrix, line = torch.randn(32, 32), torch.empty(32)
asked = {}
for name, step in (("a row", 1), ("a column", 32)):
    record = simulate(lambda s=step: line_kernel[(1,)](matrix, line, s, WIDTH=32)).trace
    asked[name] = next(record.select("M"))
    share = record.efficiency("M")
    print(f"{name}: {record.sectors('M')} sectors, {share:.1%} of their bytes used")

# %% [markdown]
# 4 against 32: seven of eight bytes travel for nothing. (The record takes lanes in order;
# a compiler may deal them out in another way. This count is a model.)

# %% tags=["picture"]
show(
    pictures.sectors_figure(asked, title="A column asks for eight times the bytes"),
    alt="A matrix of 32 rows, each four sectors of 32 bytes. Reading a row asks for 4 "
    "sectors, all of row 0. Reading a column asks for 32, the first of every row.",
)

# %% [markdown]
# This is why a weight is stored [out, in] and read along `in`, and why the cache keeps a
# head's numbers together. It loses nothing but freedom: whoever needs the matrix
# transposed must move it, or bring tiles to the SM's own memory first.
#
# ## How does a row become one number?
#
# A **reduction** makes one number from the lanes of a block. Masked lanes take part, so
# `other` must change nothing: 0 for a sum, −∞ for a maximum. A softmax has both.


# %% tags=["claim"]
@triton.jit
def softmax_kernel(X, OUT, D, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    at = tl.program_id(0) * D + lane
    x = tl.load(X + at, mask=lane < D, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))  # exp(−∞) = 0
    tl.store(OUT + at, e / tl.sum(e, 0), mask=lane < D)


def softmax(x):
    out = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], WIDTH=width)
    return out


# %% [markdown]
# Awkward widths find mistakes: 1, one below and one above a power of two, and 100. The
# truth is torch's, in float64. The interpreter first, then the record.

# %% tags=["claim"]
for D in (1, 31, 33, 100):
    x = torch.randn(3, D) * 50
    truth = torch.softmax(x.double(), 1)
    for run_it in (softmax, lambda x: simulate(softmax, x).result):
        assert torch.allclose(run_it(x).double(), truth, atol=1e-6), D
print("softmax is right for widths 1, 31, 33 and 100")

# %% [markdown]
# RMSNorm is the same with one reduction: (1, 2, 2) has the mean square 3 and becomes
# (1, 2, 2) / √3. Here is the engine's own kernel, at three widths, against float64.
# Exercise 11.1 writes it.

# %% tags=["claim"]
from minifer.kernels import rms_norm as norm

for D in (3, 33, 100):
    x, weight = torch.randn(5, D), torch.randn(D)
    truth = norm.rms_norm_reference(x.double(), weight.double(), 1e-5)
    near = torch.allclose(norm.rms_norm(x, weight, 1e-5).double(), truth, atol=1e-5)
    print(f"width {D}: as float64 says, to 1e-5: {near}")
hand = norm.rms_norm(torch.tensor([[1.0, 2.0, 2.0]]), torch.ones(3), 0.0) * 3**0.5
print("by hand:", [round(v, 4) for v in hand[0].tolist()])

# %% [markdown]
# Its price is in the cost model: rows in, rows out, weights once. The record runs the
# engine's kernel, too, with the tiles it would have on a GPU. Which of the three will be
# asked for more often than the price says?

# %% tags=["claim"]
from minifer.perf.costs import ElementBytes

x, weight = torch.randn(32, 100), torch.randn(100)
done = simulate(norm.rms_norm, x, weight, 1e-5, tiles=norm.norm_tiles(100))
record, truth = done.trace, norm.rms_norm_reference(x.double(), weight.double(), 1e-5)
print("right:", torch.allclose(done.result.double(), truth, atol=1e-5))
price = norm.rms_norm_cost(32, 100, element=ElementBytes(4, 4, 4))
print("programs:", record.grid[0], " price:", int(price.bytes), "bytes")
for name in ("X", "OUT", "WEIGHT"):
    print(f"{name:6} asked {record.bytes(name)}, different {record.unique_bytes(name)}")
print("all that differs is the price:", record.unique_bytes() == price.bytes)

# %% [markdown]
# Every program reads the weights. They come from memory once, then from L2: the price is
# what memory moves, not what programs ask for. With rows wider than a program can hold
# (65,536) this kernel ends; others then read the row twice.
#
# What a sum is *kept in* matters as much as what it reads. In float16 the numbers above
# 2,048 lie 2 apart. Add 4,000 ones, one after the other; guess both results.

# %% tags=["claim"]
for dtype in (torch.float16, torch.float32):
    total = torch.zeros((), dtype=dtype)
    for _ in range(4000):
        total += 1
    print(f"{dtype}: {total.item():.0f}")

# %% [markdown]
# So kernels convert after the load, add in float32, and round once, at the store.
#
# ## How does a program walk along a matrix?
#
# A GEMV has N rows and K columns, too many for one block. A program takes BN rows and
# walks along K in **tiles** of BN × BK. By hand: 10 × 20 weights in tiles of 4 × 8. How
# many programs, tiles each, and lanes without a weight? 3, 3, and 3 · 3 · 32 − 200 = 88.

# %% tags=["claim"]
from minifer.kernels.gemv import gemv, gemv_cost, gemv_tiles
from minifer.kernels.products import SHAPES, Gpu, Tiles

W, x = torch.randn(10, 20), torch.randn(20)
product = simulate(gemv, x, W, tiles=Tiles(4, 8, 1, 1))
walk = product.trace
tiles = list(walk.select("W", "load"))
masked = sum(int((~tile.active).sum()) for tile in tiles)
right = torch.allclose(product.result.double(), W.double() @ x.double(), atol=1e-5)
print(f"right: {right}; {walk.grid[0]} programs, {len(tiles)} tiles, {masked} masked")
print("every weight is read once:", bool((walk.counts("W") == 1).all()))
same = walk.unique_bytes() == gemv_cost(20, 10, 4).bytes
print("different bytes are the price:", same)

# %% [markdown]
# As predicted. Step through the programs and their tiles; look at the last of each.

# %% tags=["picture"]
explore(
    lambda program, tile: pictures.step_figure(walk, "W", program, tile),
    alt=lambda program, tile: pictures.step_alt(walk, "W", program, tile),
    program=[2, 0, 1],
    tile=[2, 0, 1],
)

# %% [markdown]
# x is asked for by each program. More rows a program: fewer such reads, and fewer
# programs. On 132 SMs that is a choice that can lose, so the engine takes as many rows as
# still give every SM a program. Look at the last line.

# %% tags=["claim"]
for name in ("head", "qkv", "output"):
    for N, K in SHAPES[name]:
        rows = gemv_tiles(N, K, 2, Gpu(132)).rows
        programs = -(-N // rows)
        print(f"{name:6} {N:6} × {K}: {rows:2} rows a program, {programs} programs")

# %% [markdown]
# 144 programs for 132 SMs: twelve SMs have two, and the others, with one, wait for them:
# the tail of L07. A small model on a large chip has no good tile.
#
# ## May a kernel overwrite its input?
#
# RoPE turns pairs: (a, b) → (a cos − b sin, b cos + a sin). Let one program compute the
# first half, another the second, and write back in place. By hand, a quarter turn of
# (3, 4): right is (−4, 3). What if program 0 has written when program 1 reads?


# %% tags=["claim"]
@triton.jit
def quarter_turn(X, OUT):
    a, b = tl.load(X), tl.load(X + 1)
    if tl.program_id(0) == 0:
        tl.store(OUT, -b)
    else:
        tl.store(OUT + 1, a)


for order in ("forward", "backward"):
    x = torch.tensor([3.0, 4.0])
    record = simulate(lambda x=x: quarter_turn[(2,)](x, x), order=order).trace
    print(f"programs {order}: {x.tolist()}")
print(record.conflicts()[0])

# %% [markdown]
# Two orders, two results, both wrong. A launch promises no order, so a program must not
# touch what another one writes: the record compares all pairs and names a **race**
# whatever order ran. The interpreter has one order, and runs no threads: a kernel can be
# right there and wrong when compiled
# ([triton#11153](https://github.com/triton-lang/triton/issues/11153)). The engine's
# kernel turns a whole head in one program, and writes keys where the cache wants them.
# Look for races, and for a slot of −1.

# %% tags=["claim"]
from minifer.course import kernel_examples as engine

done = engine.rope_append(slots=[5, -1, 0])
written = done.record.counts("KEY_CACHE", "store").flatten(1).sum(1).tolist()
print("races:", len(done.record.conflicts()), " numbers written, by block:", written)
print("queries and caches as float64 says:", [e < 1e-5 for e in done.errors.tolist()])

# %% [markdown]
# With two slots a block, slots 5 and 0 lie in blocks 2 and 0; the token without a slot
# wrote nothing. Exercise
# 11.3 is the rotation in place.
#
# ## How does a softmax fit that nobody can hold?
#
# Attention of 8,192 queries has 67 million scores a head: no program holds a row of them
# beside everything else. But a softmax can be met tile by tile. Keep the largest score so
# far, the sum of exp(score − largest), and the weighted values; when the largest grows,
# shrink both sums ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867)). By
# hand: scores ln 1, ln 3, then ln 4, values 10, 20, 40. After the first tile the largest
# is ln 3, the sum 4/3. By which factor does ln 4 shrink it?

# %% tags=["claim"]
scores, values = torch.tensor([1.0, 3.0, 4.0]).log(), torch.tensor([10.0, 20.0, 40.0])
top, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)
for tile in (slice(0, 2), slice(2, 3)):
    new_top = torch.maximum(top, scores[tile].max())
    shrink, p = torch.exp(top - new_top), torch.exp(scores[tile] - new_top)
    total = total * shrink + p.sum()
    acc = acc * shrink + (p * values[tile]).sum()
    top = new_top
    print(f"shrink {shrink:.2f}, sum {total:.3f}, values {acc:.3f}")
print(f"result {acc / total:.2f}, all at once {torch.softmax(scores, 0) @ values:.2f}")

# %% [markdown]
# By ¾, which is exp(ln 3 − ln 4). This is FlashAttention ([Dao et al.
# 2022](https://arxiv.org/abs/2205.14135)): the scores live in registers and die there.
# Here is the engine's kernel on a causal prompt of 48 tokens, 16 queries a program, 16
# keys a tile. The map shows which scores exist at all.

# %% tags=["picture"]
table = [4, 1, 5, 0, 3, 2]
done = engine.flash_attention(table, tile=16)
grid = pictures.attention_map(done.record, "KEY_CACHE", table, 48, 16)
show(
    pictures.attention_figure(grid, 16, title="A third of all scores never exists"),
    alt="The 48 by 48 matrix of scores as computed by three programs: those below the "
    "diagonal are used, triangles above it in the diagonal tiles are computed and "
    "hidden, the tiles above are never computed.",
)

# %% [markdown]
# Count them: 48 · 49 / 2 scores are needed. And compare with float64, also with scores in
# the hundreds, where exp alone would overflow.

# %% tags=["claim"]
cells = [state for row in grid for state in row]
print({state or "never": cells.count(state) for state in ("used", "hidden", "")})
for factor in (1, 100):
    near = engine.flash_attention(table, factor=factor).error < 1e-4
    print(f"queries × {factor}: as float64 says, to 1e-4: {near}")

# %% [markdown]
# 1,176 are used, 360 hidden on the diagonal. Tiles make it fast, and short prompts pay
# for them: in a tile of 64 × 64 a prompt of 5 tokens uses 15 of 4,096 scores. So one
# query, in decode, has a kernel of its own.
#
# ## Where do the keys of a decode lie?
#
# In blocks, anywhere. Here is the engine's step in which A, B and C all decode for the
# first time, with its real block tables. Whose blocks are shared, and why?

# %% tags=["claim"]
P = example.BLOCK_SIZE
step = next(s for s, _ in run.steps if len(s.token_ids) == len(s.seq_lens) == 3)
names = [entry.request.request_id for entry in step.scheduled]
for name, length, blocks in zip(names, step.seq_lens, step.block_tables, strict=True):
    print(f"{name}: {length} tokens, blocks {blocks[: -(-length // P)]}")

# %% [markdown]
# B begins with A's words. Every key looks up its own block, so that a tile may span
# several. Contexts are cut in two parts for more programs (L07). The pool below is NaN
# wherever no token lies; the rows are what the record saw.

# %% tags=["picture"]
from minifer.course.figures import request_colours

N = example.NUM_BLOCKS
where = step.block_tables, step.seq_lens, N, P
done = engine.paged_decode(*where, num_splits=2)
read = pictures.blocks_read(done.record, "KEY_CACHE")
show(
    pictures.blocks_figure(
        read, names, request_colours(names), N,
        title="A and B share two blocks; nobody reads another's slot",
    ),
    alt="For each request and part of its context, the slots read in each of the 12 "
    "blocks of the pool. A and B both read blocks 0 and 1, C reads others.",
)  # fmt: skip

# %% [markdown]
# Is it right, and is its price right? The price counts each context once.

# %% tags=["claim"]
bytes_read = sum(done.record.bytes(f"{what}_CACHE") for what in ("KEY", "VALUE"))
print("keys and values:", bytes_read, "bytes, price:", int(done.cost.kv_bytes))
print("as float64 says, to 1e-5:", done.error < 1e-5)

# %% [markdown]
# Now the mistake behind the Chinese replies of L09: one slot too many, `<=` for `<`. We
# hand the kernel lengths that are 1 too large. First the pool with NaN where nobody's
# tokens are, then with zeros. Which of the two would you rather test with?

# %% tags=["claim", "row-18"]
for fill in (torch.nan, 0.0):
    errors = engine.paged_decode(*where, extra=1, fill=fill).errors
    words = (
        "not finite" if e.isinf() else "wrong" if e > 1e-3 else "right" for e in errors
    )
    print(f"filled with {fill}: {', '.join(words)}")

# %% [markdown]
# With zeros everything is finite, and softly wrong. Poison makes it loud; L09 hunts it in
# the engine.
#
# ## Which tests find which mistakes?
#
# Sixteen attention kernels with one mistake each, and four suites of tests. *Usual* has
# the form of the public attention test in [CS336's second
# assignment](https://github.com/stanford-cs336/assignment2-systems): one seed, one
# input of 4 × 128 × 64, an error of 1e-2 allowed. Each further suite adds something:
# *ragged* shapes and 1e-4 against float64, *large* scores, the strict *record*. How
# many of the sixteen does the usual suite accept?

# %% tags=["claim"]
from minifer.course.kernel_mistakes import SUITES, verdicts

found = verdicts()
print("the right kernel passes everything:", not any(found[0].found))
first = [verdict.first for verdict in found[1:]]
for suite in SUITES:
    print(f"{suite:7} finds {first.count(suite)} that nothing before it finds")

# %% [markdown]
# Row by row:

# %% tags=["picture"]
from minifer.course.pictures import kernel_speed as speed

show(
    speed.verdict_figure(
        found[1:], title="The usual test accepts more wrong kernels than it finds"
    ),
    alt="Sixteen mistakes and four suites. The usual suite finds the gross ones: "
    "causal ignored, own key hidden, mask transposed, no rescaling, only the sum "
    "rescaled, denominator + 0.1. Ragged shapes find wrong scales, rounding and a "
    "dropped tile, large scores the missing maximum, the record the rest.",
)

# %% [markdown]
# Ten: six of the first twelve, and all of the last four, three that misuse memory and
# one that rounds products to TF32, which only GPUs do. Small random scores never
# overflow, powers of two have no tail, and 1e-2 forgives bfloat16. (That handout
# promises powers of two; then a dropped tail is no mistake. A learner still believes
# the kernel is finished.) And some mistakes no result shows on a CPU: a mask without
# `other` holds 0 in Triton's interpreter and anything on a GPU.
#
# Exercises 11.1 to 11.5 are graded by such shapes, by the record, and by guard bands.
#
# ## What does only the compiler know?
#
# Triton compiles for a GPU that is not there, in another process. Its assembler says what
# became of the source: the **registers** of a thread, numbers **spilled** to memory for
# want of registers, the width of loads. Look for spills, and for loads of 128 bits: 16
# bytes a lane, the widest there is.

# %% tags=["claim"]
from minifer.kernels.aot_report import compile_kernels

for row in compile_kernels(["sm_90"], ["rms_norm bf16 D=2048"]).kernels:
    wide = row.loads(128)
    print(f"{row.kernel}, {row.case}, {row.target}: {row.error or 'compiles'}")
    print("spills:", row.spills, " all loads of 128 bits:", 0 < wide == row.loads())

# %% [markdown]
# `minifer kernels report` says it of all kernels and chips
# ([29 November 2026](../tests/reports/2026-11-29-kernels.md): with triton 3.9 nothing is
# spilled to memory). The interpreter shows none of this, nor a missing barrier: passing
# there is necessary and not sufficient.
#
# ## How fast should it be?
#
# A decode kernel's floor is its bytes over the bandwidth. But it also has to start:
# reported are 1.3 µs from one kernel to the next in a CUDA graph on an H100 ([Look Ma,
# No Bubbles](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles), May 2025).
# With that and nothing else, modelled for Llama 3.2 1B on an H200: which kernels can
# come near the memory's speed?

# %% tags=["claim"]
from minifer.course import shapes
from minifer.perf.devices import DEVICES

rows = speed.forecasts(shapes.LLAMA_1B, DEVICES["H200-SXM"])
for row in rows:
    size, time = f"{row.bytes / 1e6:9.3f} MB", f"{row.seconds * 1e6:7.2f} µs"
    print(f"{row.name:32} {size} {time} {row.share:4.0%}")

# %% [markdown]
# The head, and less and less the smaller ones. A norm is nearly all start.

# %% tags=["picture"]
show(
    speed.forecast_figure(rows, title="Only large kernels reach the memory's speed"),
    alt="Modelled share of the H200's bandwidth for six decode kernels: RMSNorm and "
    "RoPE below 1 %, paged attention of 4,096 tokens 57 %, products of a layer 67 and "
    "84 %, the head 99 %.",
)

# %% [markdown]
# So a faster RMSNorm gains next to nothing; one that disappears in the next kernel
# gains its start. That is L12. On a GPU the next cell measures the engine's kernels;
# without one it says so.

# %% tags=["measure"]
print("\n".join(speed.measured_here("llama-1b")))

# %% [markdown]
# Measured times lie, unless all of this holds:
#
# 1. the result was compared first: a wrong kernel has no speed;
# 2. the first calls do not count: they compile;
# 3. the clock waits for the GPU: a launch returns before the kernel runs;
# 4. the data is cold: repeated on the same few megabytes it comes from L2;
# 5. bytes ÷ time stays below the memory's own speed. If not, look at 1 to 4.
#
# The fourth can be seen on any CPU. A product with a small matrix, repeated, and one with
# a large one, each read once a call: which "bandwidth" is the memory's?

# %% tags=["measure"]
print("\n".join(speed.warm_and_cold()))

# %% [markdown]
# The large one's; the small one is in a cache. (This machine's numbers, not compared; on
# a busy machine they jump.) `minifer bench kernels` follows the five rules.
#
# At the end, everything together: the engine with `backend="triton"`, its steps made of
# these kernels, here in the interpreter. Expect the tokens of the torch back end.

# %% tags=["claim"]
two = {"A": (example.TRIO["A"][0], 2)}
tokens = [example.run(two, backend=name).tokens("A") for name in ("torch", "triton")]
print("the same tokens from Triton kernels:", tokens[0] == tokens[1])

# %% [markdown]
# The same text, one level down.
#
# ## Takeaways
#
# - A program is a number and a block; masks say which lanes exist, `other` what they hold.
# - Bytes asked for, different bytes, sectors: three counts, and the price is the second.
# - Add in float32, round once. Subtract the largest score, and rescale when it grows.
# - Programs have no order. What one writes, no other may touch.
# - The interpreter hides what a GPU shows (threads, undefined lanes), and a GPU hides what
#   the record shows. Test with poison, awkward shapes and large numbers.
# - Small kernels cannot come near the memory's speed; they can only disappear.
#
# ## Questions
#
# **1.** 100 rows of 77 numbers, one program a row. How many lanes are masked?
#
# <details><summary>Answer</summary>
#
# The block has 128 lanes: 51 are masked in each of 100 programs, 5,100.
#
# </details>
#
# **2.** A GEMV of 1,000 × 1,000 in tiles of 16 × 256: how many programs, tiles each, and
# how often is x read?
#
# <details><summary>Answer</summary>
#
# 63 programs of 4 tiles; x is asked for 63 times.
#
# </details>
#
# **3.** 32 lanes read every second float32 of a row. How many sectors, which share is
# used?
#
# <details><summary>Answer</summary>
#
# 32 · 8 bytes = 256 bytes, 8 sectors, one half.
#
# </details>
#
# **4.** A running sum is 6 with the largest score 2. The next tile's only score is 2 +
# ln 3. What is the sum now?
#
# <details><summary>Answer</summary>
#
# 6 · exp(−ln 3) + 1 = 3.
#
# </details>
#
# **5.** A kernel moves 9.6 MB in 2.0 µs on a chip with 4.8 TB/s. What do you say?
#
# <details><summary>Answer</summary>
#
# Its floor is 2.0 µs, so it would waste nothing, not even a start: the data was in a
# cache, or the clock did not wait.
#
# </details>
#
# The numbers, checked by the record and by arithmetic.

# %% tags=["claim"]
record = simulate(softmax, torch.randn(100, 77)).trace
lanes = sum(int((~access.active).sum()) for access in record.select("X"))
print("1.", lanes == 5100)
print("2.", (triton.cdiv(1000, 16), triton.cdiv(1000, 256)) == (63, 4))
skip = simulate(lambda: line_kernel[(1,)](matrix, line, 2, WIDTH=32)).trace
print("3.", (skip.sectors("M"), skip.efficiency("M")) == (8, 0.5))
print("4.", round(float(6 * torch.exp(-torch.tensor(3.0).log()) + 1), 4) == 3)
print("5.", 9.6e6 / 4.8e12 == 2.0e-6)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - vLLM and SGLang have Triton kernels for what vendors' libraries lack; attention
#   mostly comes from FlashAttention and [FlashInfer](https://arxiv.org/abs/2501.01005).
# - [Triton-Puzzles](https://github.com/gpu-mode/Triton-Puzzles) draw accesses from
#   Triton's own interpreter, which changes with versions
#   ([#24](https://github.com/gpu-mode/Triton-Puzzles/issues/24)); hence a record that
#   uses nothing of it.
# - A masked value that is not overwritten, 0 · NaN, is among the most repeated bugs of
#   attention kernels.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 11.1 | [RMSNorm](../exercises/ex11_triton_kernels.ipynb) | 4 | 20 |
# | 11.2 | [GEMV with ragged N and K](../exercises/ex11_triton_kernels.ipynb) | 6 | 35 |
# | 11.3 | [RoPE, in place or not](../exercises/ex11_triton_kernels.ipynb) | 4 | 25 |
# | 11.4 | [Flash attention, forward](../exercises/ex11_triton_kernels.ipynb) | 10 | 90 |
# | 11.5 | [Paged attention of a decode step](../exercises/ex11_triton_kernels.ipynb) | 8 | 40 |
#
# ## Where to read on
#
# 1. [the package's words](../kernels/__init__.py): in which order to read the kernels.
# 2. [rms_norm.py](../kernels/rms_norm.py): the parts that every kernel file has.
# 3. [block_program.py](../minifer/course/block_program.py): the record.
# 4. [compat.py](../kernels/compat.py): what Triton's versions and its interpreter do.
# 5. [kernels.py](../minifer/perf/gpu/kernels.py): a benchmark that follows the five rules.
