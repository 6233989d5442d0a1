# %% [markdown]
# # L01 · From electricity to intelligence
#
# Electricity goes into a chip, words come out. In between there are two things to pay
# for: **arithmetic**, and **bytes** that travel from memory to where the arithmetic
# is done. This lecture counts both for every part of a language model, predicts from
# the shapes alone how fast tokens can come and what each costs in joules, and then
# holds the prediction against your own machine.
#
# Reading: 60 minutes. Exercises: 70 minutes, 12 points and 3 optional. Needs PyTorch as a language
# and [L00](L00_the_life_of_a_token.ipynb); a CPU is enough.
#
# Afterwards you can
#
# - **turn** watts into joules a token, and say what such a number includes;
# - **compute** the FLOPs and bytes of a matrix product, of attention, of a whole step;
# - **place** an operation under a roofline and name what limits it;
# - **predict** tokens a second at batch 1 and at batch B, and the batch from which
#   another request is no longer free;
# - **name** three cases in which batching or smaller numbers gain nothing.

# %% [markdown]
# ## Where is the token now?
#
# ![Life map of a request with its start lit, before the first of five
# stages](figures/life_map_start.svg)
#
# The token stands at the door. Every stage behind it is built as it is because of the
# numbers on this page. The first cell prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    get = 'pip install "minifer[course]"  or, in a clone,  pip install -e ".[course]"'
    raise ImportError(f"minifer is missing: run  {get}") from error
begin("L01")

# %% [markdown]
# A's token 20, drawn and computed (not compared).

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "A", position=20, stage="decode")

# %% [markdown] tags=["row-1", "row-2", "row-3", "row-4", "correction-7"]
# Each pass reads everything.
#
# ## What does one token cost, in joules?
#
# The lecture this book grew from (Dan Fu, [CS336, June
# 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s)) calls GPUs the new oil. It tells of
# Manhattan's 130,000 horses of 1902, outnumbered by cars in 1912 (popular history, Eric
# Morris, *Access* 30, 2007; its conference on manure in 1898 is folklore), and calls last
# year the 1912 of programming. So how much oil does a token burn?
#
# A watt is a joule a second. A chip that draws 700 W and makes 200 tokens a second
# spends 700 / 200 = 3.5 joules on each. So we need one thing: tokens a second.
#
# One model and one chip accompany us: Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), July 2024) in *bfloat16*, two
# bytes a number, on an H100. To write one token, a chip must read nearly every
# *weight* (a number the model learnt) once: 8 billion of them, 16 GB. Its data sheet
# (NVIDIA, March 2023) promises 3.35 TB/s, its *bandwidth*. **Write down** how many
# milliseconds that takes, and how many joules at 700 W.

# %% tags=["claim", "row-1"]
from minifer.course.pictures import electricity
from minifer.course.shapes import LLAMA_8B as llama
from minifer.perf.costs import decode_cost, num_parameters, step_cost
from minifer.perf.devices import DEVICES

h100 = DEVICES["H100-SXM"]
read = decode_cost(llama, batch_size=1, context=1).total().weight_bytes
seconds = read / h100.memory_bandwidth
print(f"{num_parameters(llama):,} weights; one token reads {read / 1e9:.2f} GB")
print(f"{seconds * 1e3:.2f} ms, at best {1 / seconds:.0f} tokens a second")
print(f"{h100.power_watts * seconds:.2f} J a token at {h100.power_watts} W")

# %% [markdown]
# About 4.5 ms, 220 tokens a second, 3 joules. (Less than 16 GB are read: of the table
# that turns tokens into vectors, a token needs one row.) The time is a *floor*: no
# program is faster. The power is a *ceiling*: no H100 draws more for long. A floor
# times a ceiling is an estimate and no bound; with a *measured* time it becomes an
# upper bound of what the chip used.
#
# Now a measured number. The ML.ENERGY leaderboard [reports 0.20 J a token in
# September 2024 and 0.12 J in December
# 2025](https://ml.energy/blog/measurement/energy/llm-inference-energy-a-longitudinal-analysis)
# for this model on this chip, the second with newer software. That is 15 to 26 times
# less than ours. The report says how: 64 requests at once. The rest of this lecture is
# about that factor.
#
# Look at a whole answer, and mind the boundary. Google [reports 0.24 Wh
# for the median text prompt of its Gemini apps](https://arxiv.org/abs/2508.15734)
# (August 2025), with hosts, idle machines and cooling; ours is one chip and another
# model.

# %% tags=["claim"]
gemini = 0.24 * 3600  # watt hours to joules
alone, batched = h100.power_watts * seconds, 0.12
print(f"0.24 Wh = {gemini:.0f} J")
print(
    f"as much as {gemini / alone:.0f} tokens alone, {gemini / batched:.0f} in a batch"
)
print(f"at 0.12 J and 700 W a step of 64 takes at least {0.12 * 64 / 700 * 1e3:.0f} ms")

# %% [markdown]
# The last line reads a power meter as a clock: 64 tokens of 0.12 J are 7.7 J, for which
# a chip of 700 W needs at least 11 ms.
#
# ## What does a matrix product move?
#
# Nearly all of a model is products of a matrix of activations X with a matrix of
# weights W. Take X with 1 row of 4 numbers, W with 4 rows of 3. Each of the 3 results
# takes 4 multiplications and 4 additions: 24 *FLOPs* (floating-point operations). Read
# 4 + 12 numbers, write 3: 19 numbers, 38 bytes. FLOPs over bytes is the **arithmetic
# intensity**: 24 / 38 = 0.63 FLOPs a byte.
#
# We let torch count: one instrument sees the FLOPs, one the bytes of every operation.
# Look whether the small product agrees, then what more rows do.

# %% tags=["claim"]
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from minifer.perf.counted import count_bytes


def count(rows, inputs, outputs):
    """FLOPs and bytes of x [rows, inputs] · W in bfloat16, as torch performs it."""
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    weight = torch.ones(outputs, inputs, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as flops:
        _, seen = count_bytes(lambda: linear(x, weight), [weight], [])
    return flops.get_total_flops(), seen.weights + seen.activations


print("1 row, 4 → 3:", *count(1, 4, 3), "(FLOPs, bytes)")
for rows in (1, 4, 16, 64):
    flops, moved = count(rows, 4096, 4096)
    print(f"{rows:3} rows, 4096 → 4096: {flops / moved:5.2f} FLOPs a byte")

# %% [markdown]
# With B rows the weights are read once and used B times. As long as B is small
# against the width, the intensity of a product in two-byte numbers is about B. One
# row is a matrix times a *vector* (GEMV); many rows, a matrix times a matrix (GEMM).
#
# ## Which of the two is the limit?
#
# A chip has a ratio of its own: the H100 does 989 · 10¹² FLOPs a second (dense
# bfloat16, data sheet) and reads 3.35 · 10¹² bytes. 989 / 3.35 = 295 FLOPs for each
# byte it reads: its **ridge point**. Work below 295 waits for memory
# (*memory-bound*), work above waits for arithmetic (*compute-bound*). At intensity I
# no more than min(peak, I · bandwidth) FLOPs a second are possible: the **roofline**
# ([Williams, Waterman and Patterson,
# 2009](https://doi.org/10.1145/1498765.1498785)).
#
# The product below is the widest of Llama's layers (4096 → 2 · 14,336). **Write
# down** what share of its arithmetic the H100 can use at one row.

# %% tags=["claim"]
from minifer.course.pictures import roofline as pictures

print(f"ridge point of the H100: {h100.ridge_point:.0f} FLOPs a byte")
for rows in electricity.ROWS:
    cost = step_cost(llama, [(rows, rows)])["gate_up"]
    share = pictures.attainable(h100, cost.intensity) / h100.peak_flops
    limit = "memory" if cost.intensity < h100.ridge_point else "arithmetic"
    print(f"{rows:5} rows: {cost.intensity:6.1f} FLOPs a byte, {share:6.1%}, {limit}")

# %% [markdown]
# One row uses a third of one per cent; between 256 and 512 rows the limit changes
# sides. In the picture every point stands on the roof: it is a prediction. Look how
# far the first is from the flat part.

# %% tags=["picture"]
show(electricity.draw_products(llama, h100), alt=electricity.ALT["products"])

# %% [markdown]
# ## What is in one step of a model?
#
# A *step* is one forward pass of the engine. In a *decode* step each request brings
# one token. The cost model [costs.py](../minifer/perf/costs.py) lists its operations
# from the shapes. Look for those that are not near 1 FLOP a byte.

# %% tags=["claim"]
one = decode_cost(llama, batch_size=1, context=1024)
for name in ("qkv", "output", "gate_up", "down", "head", "attention_scores", "norms"):
    op = one[name]
    print(f"{name:17}{op.bytes / 1e6:9.1f} MB {op.intensity:6.2f} FLOPs a byte")
total = one.total()
print(f"{'whole step':17}{total.bytes / 1e6:9.1f} MB {total.intensity:6.2f}")

# %% [markdown]
# Products with weights: 1. Attention's scores do nearly 4, and we shall see why. The
# MLP (`gate_up` and `down`) holds three quarters of the bytes.
#
# Is the cost model right? First its FLOPs: we count those of all products ourselves.
# A step is a list of (query, context): tokens that a request computes, and has with
# them. Query and key meet in *pairs*, for a token at position p with p + 1 keys.


# %% tags=["claim"]
import random
from dataclasses import replace


def product_flops(config, batch):
    """FLOPs of the matrix products of a step, attention's two among them."""
    D, C, F = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * C, config.num_kv_heads * C
    tokens = sum(query for query, _ in batch)
    pairs = sum(sum(range(s - t + 1, s + 1)) for t, s in batch)
    weights = D * (q + 2 * kv) + q * D + D * 2 * F + F * D
    layer = tokens * weights + 2 * pairs * q  # scores, and values
    return 2 * (config.num_layers * layer + len(batch) * D * config.vocab_size)


products = ("qkv", "output", "gate_up", "down", "head")
products += ("attention_scores", "attention_values")
draw, same = random.Random(0), 0
for _ in range(200):
    config = replace(
        llama, num_layers=draw.randint(1, 9), head_dim=2 * draw.randint(1, 9)
    )
    batch = [(t, t + draw.randint(0, 50)) for t in draw.choices(range(1, 30), k=5)]
    cost = step_cost(config, batch)
    same += product_flops(config, batch) == sum(cost[name].flops for name in products)
print(f"{same} of 200 random steps: the engine counts the same FLOPs")

# %% [markdown]
# All 200 agree. Unfold the engine's own version and look for what ours lacks: norms,
# biases, windows, and bytes beside each FLOP.

# %% tags=["measure"]
from minifer.course.source import show_source

show_source(step_cost)

# %% [markdown]
# Now its bytes, on a model that we can run, minifer-tiny. An engine whose every operation is watched
# serves the book's three requests A, B and C. Look whether weights, and bytes in each
# step, are as predicted.

# %% tags=["claim"]
from minifer.perf.costs import ElementBytes
from minifer.perf.counted import CountingRunner, padded_kv_read

tiny, float32 = example.tiny(), ElementBytes(4, 4, 4)
held = sum(p.numel() for p in tiny.model.parameters())
print(f"{held:,} weights, as predicted:", held == num_parameters(tiny.config))

watched = []


def watch(engine):
    engine.runner = runner = CountingRunner(engine.runner)
    watched.append(runner)


run = example.run(prepare=watch)
steps = watched[0].steps
costs = [
    step_cost(tiny.config, s.batch, num_logits=s.num_logits, element=float32)
    for s in steps
]
pairs = list(zip(steps, costs, strict=True))
exact = [s.seen.weights == c.total().weight_bytes for s, c in pairs]
print(f"weight bytes: {sum(exact)} of {len(steps)} steps exact")
exact = [s.seen.kv_written == c["kv_write"].kv_bytes for s, c in pairs]
print(f"KV bytes written: {sum(exact)} of {len(steps)} steps exact")

# %% [markdown]
# Weights and writes agree to the byte. And reads? Attention reads the keys and values
# (*KV*) of all earlier tokens. The engine's plain attention reads requests of unequal
# length side by side, each as long as the longest: it *pads*. Look how many steps read
# more than the model says, and whether padding is all of it.

# %% tags=["claim"]
more, explained = [], []
for step, cost in pairs:
    predicted = cost.total().kv_bytes - cost["kv_write"].kv_bytes
    padded = padded_kv_read(tiny.config, step.batch, 4)
    more.append(step.seen.kv_read / predicted)
    explained.append(step.seen.kv_read == padded)
print(f"{sum(ratio > 1 for ratio in more)} of {len(more)} steps read more KV")
print(f"at most {max(more):.2f} times as much; padding is all of it:", all(explained))

# %% [markdown]
# Where contexts differ, the plain attention pays for the longest; a kernel that reads
# block by block need not ([L07](L07_decode.ipynb)). The prediction stays the floor.
#
# The same three requests, drawn from the engine's events: who computed how many
# tokens in which step. **Write down** which steps you expect to be the tallest before
# you look: A, B and C bring 20, 13 and 18 tokens that no cache has, at most 16 a step.

# %% tags=["picture"]
served = pictures.engine_steps(run.events, tiny.config, h100, float32)
tokens = [sum(query for query, _ in entry.batch) for entry in served]
show(
    pictures.step_bars(
        served, title="A full step does 8 FLOPs a byte, a late one half of one"
    ),
    alt="Bars of FLOPs a byte for the engine's 13 steps. The steps that prefill are "
    f"tall, the decode steps low. Tokens computed, step by step: {tokens}.",
)

# %% [markdown]
# Tokens in a step, and with them the intensity, fall as the requests turn from prefill
# to decode and then leave one by one. (Four-byte numbers: half a FLOP a byte for each
# token.)

# %% tags=["claim"]
print("tokens a step:", tokens)
print("limited by memory on an H100:", sum(e.limit == "memory" for e in served))
weights = sum(entry.cost.weight_bytes for entry in served)
alone = sum(
    decode_cost(tiny.config, 1, 1, element=float32).total().weight_bytes
    for _ in range(27)
)
print(f"bytes of weights: {weights / 1e6:.0f} MB for 27 tokens")
print(f"one by one, the prompts not counted: {alone / 1e6:.0f} MB")

# %% [markdown]
# All 13 steps wait for memory. Serving the three together reads the weights 13 times
# instead of at least 27.
#
# ## Why does attention not profit from a batch?
#
# One query meets one key of C numbers: C multiplications, C additions, and 2 · C
# bytes to fetch the key. 2 C / 2 C = 1 FLOP a byte, for the values again. Here four
# query heads share one key head (*grouped-query attention*, GQA,
# [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)), so each key that is fetched
# is used four times: intensity H / K = 4. A second request brings its own keys. It
# cannot share.
#
# Look at the two columns as the batch grows, then at the same model without sharing.

# %% tags=["claim"]
print("batch   MLP product   attention   attention without GQA")
unshared = replace(llama, num_kv_heads=32)
for batch in (1, 16, 256):
    grouped = decode_cost(llama, batch, 4096)
    single = decode_cost(unshared, batch, 4096)["attention_scores"].intensity
    product, scores = (
        grouped["gate_up"].intensity,
        grouped["attention_scores"].intensity,
    )
    print(f"{batch:5} {product:12.1f} {scores:12.4f} {single:15.4f}")

# %% [markdown]
# The product climbs with the batch, attention stays below H / K, below 1 without
# sharing. What about *prefill*, where a prompt of S tokens is computed at once? Its S
# queries share the keys, and see half of them on average: expect something like S / 2
# times more. Look at the growth.

# %% tags=["claim"]
from minifer.perf.costs import prefill_cost

sizes = pictures.powers_of_two(16, 4096)
prefill = [prefill_cost(llama, size)["attention_scores"].intensity for size in sizes]
for size, intensity in zip(sizes[::2], prefill[::2], strict=True):
    print(f"prompt of {size:4}: {intensity:6.1f} FLOPs a byte in attention")

# %% [markdown]
# Four times the prompt, four times the intensity: 0.4 · S. (Not 4 · S / 2, because now
# queries and results move too, 4096 numbers a token each against 1024 of keys.) The
# picture puts the three side by
# side: two lines cross the ridge, the third never will.

# %% tags=["picture"]
show(electricity.draw_intensity(llama, h100), alt=electricity.ALT["intensity"])

# %% [markdown]
# ## How large a batch fills the chip?
#
# A step of B requests reads the weights once and B times KV; it does B times the
# FLOPs. Its floor is the slower of the two. Alone a token took 4.5 ms. **Write down**
# how much longer a step of 64 requests takes, each with a context of 1024 tokens: a
# token's KV is 2 · 32 layers · 8 heads · 128 · 2 bytes = 131 kB.

# %% tags=["claim"]
print("batch   ms a step   tokens/s   J a token   KV share   fits")
for row in pictures.batch_rows(llama, h100, [1, 8, 64, 256, 512], context=1024):
    cost = decode_cost(llama, row.batch, 1024).total()
    share = cost.kv_bytes / (cost.kv_bytes + cost.weight_bytes)
    print(f"{row.batch:5} {row.seconds * 1e3:9.2f}", end=" ")
    print(f"{row.tokens_per_second:10,.0f} {row.joules_per_token:10.3f}", end=" ")
    print(f"{share:10.0%} {row.fits!s:>7}")

# %% [markdown]
# 64 requests take 7.0 ms instead of 4.5: 64 times the work for 1.6 times the time,
# and 0.08 J a token instead of 3. The measured 0.12 to 0.20 J
# lies above it, as it must: its steps took at least 11 ms, by the power meter above,
# where our floor says 7.
#
# From which batch on is another request no longer free? For products alone: when B
# reaches the ridge, 295, the **critical batch**. For whole steps we search: the
# smallest batch whose FLOPs take longer than its bytes. Guess before you look what a
# context of 1024 does to it.

# %% tags=["claim"]
for context in (1, 128, 256, 512, 1024):
    batches = range(1, 20_001)
    cost = decode_cost(llama, 1, context).total()
    weights, kv = (
        read - 2 * 4096,
        cost.kv_bytes + 2 * 4096,
    )  # shared; each request's own
    slower = [
        b
        for b in batches
        if b * cost.flops / h100.peak_flops > (weights + b * kv) / h100.memory_bandwidth
    ]
    found = f"{slower[0]:6,}" if slower else "  none"
    print(f"context {context:4}: critical batch {found}")

# %% [markdown]
# Without a context, a little below 300. At 256 tokens it is nearly three times as
# large, and from 512 on there is none: each request's own KV takes longer to read than
# its arithmetic to do. At the contexts people use, decode on this chip is memory-bound
# at *every* batch. Batching still pays, for it shares the weights; it cannot fill the
# arithmetic.
#
# Where does batching lose? Look at three curves, one a context, drawn as far as memory
# holds the KV.

# %% tags=["picture"]
curves = electricity.throughput(llama, h100)
show(electricity.draw_throughput(curves), alt=electricity.ALT["throughput"])

# %% [markdown]
# A curve bends: more requests, hardly more tokens. A curve ends: no room for another
# request. And what no curve shows: each user's own tokens come slower with every
# neighbour.

# %% tags=["claim"]
for context, (batches, rates) in curves.items():
    each = rates[-1] / batches[-1]
    gain = f"{rates[-1] / rates[0]:5.1f} times the tokens, {each:.0f}/s each"
    print(f"context {context:6,} ends at batch {batches[-1]:3}: {gain}")

# %% [markdown]
# At 32,768 tokens each there is room for 8, and they get 3.1 times the tokens of one.
# (All three end at 68 tokens/s for each: a full memory takes equally long to read,
# whoever filled it.) Move the sliders: watch the whole step wander along the roof.

# %% tags=["picture"]
explore(
    pictures.step_view(llama, h100),
    alt=lambda batch, context: pictures.step_alt(llama, h100, batch, context),
    labels={"batch": "requests", "context": "tokens each has"},
    batch=[1, 4, 16, 64, 256, 1024],
    context=[1024, 128, 8192, 32768],
)

# %% [markdown]
# ## What does a smaller number buy?
#
# A weight in 8 bits is half a read. Arithmetic stays in bfloat16, as it does in many
# kernels (they widen the weights on the chip). By hand: batch 1 reads half as much,
# so it should be twice as fast. Where does the gain go? Look along a row, then down.

# %% tags=["claim"]
small = ElementBytes(weight=1)
print("speed-up of 8-bit weights    batch 1   batch 64   batch 1024")
for context in (16, 1024, 8192):
    gains = []
    for batch in (1, 64, 1024):
        wide, narrow = (
            pictures.batch_rows(llama, h100, [batch], context, element)[0].seconds
            for element in (ElementBytes(), small)
        )
        gains.append(f"{wide / narrow:10.2f}")
    print(f"context {context:5}             ", *gains)

# %% [markdown]
# Twice at batch 1, as predicted. Nothing at batch 1024 with short contexts: there
# arithmetic is the limit, and widening the weights is extra work (not counted here),
# so the smaller number *loses*. Little where KV is most of the bytes: then the KV must
# shrink. And what it costs in quality no roofline shows.
#
# ## Which chip for which work?
#
# The table of [devices.py](../minifer/perf/devices.py) holds what makers print, each
# with source and date. Where the model does not fit one chip, as many share it as
# hold it, and read their parts side by side (links between chips cost nothing here,
# which is kind). Look at the ridge, then at the number of chips.

# %% tags=["claim"]
import math

print("chip           ridge  chips  tokens/s  J a token at batch 1, and 64")
size = 2 * num_parameters(llama)
for chip in DEVICES.values():
    chips = math.ceil(size / chip.memory_bytes)
    rows = pictures.batch_rows(llama, chip, [1, 64], context=1024)
    joules = "  ".join(f"{row.joules_per_token:8.3f}" for row in rows)  # chips cancel
    rate = rows[0].tokens_per_second * chips
    print(f"{chip.name:15}{chip.ridge_point:5.0f}{chips:7}{rate:10,.0f}  {joules}")

# %% [markdown]
# A GPU's ridge is 150 to 300: it wants batches. The last two chips keep weights in
# SRAM on the chip itself, and their ridge is 2 to 6: they are busy with a handful of
# requests. Groq's price is capacity: 70 chips for one model. At such speeds what we
# left out decides: links, and the start of each operation.
#
# ## What can this machine do?
#
# `this_machine` reads a large buffer and multiplies two matrices, as fast
# as torch can with the threads it has, and gives the best of several tries; we ask for
# the CPU. **Write down** your guess of both: GB/s and GFLOP/s. (Not
# compared.)

# %% tags=["measure"]
from minifer.perf.limit import measured_again, this_machine

here = this_machine(device="cpu")
print(here.name)
print(f"reads {here.memory_bandwidth / 1e9:.1f} GB/s")
print(f"multiplies {here.peak_flops / 1e9:,.0f} GFLOP/s in float32")
print(f"ridge point: {here.ridge_point:.1f} FLOPs a byte")

# %% [markdown]
# A CPU core has a low ridge: it reaches its peak with a few rows. (`begin` gave torch
# one thread; with more, both numbers grow.)
#
# What was read a moment ago lies in a *cache*, small memory near the core. Look at the
# steps as the buffer grows, and at the line where the weights of minifer-tiny end.

# %% tags=["picture"]
medium = electricity.medium_model()
rates = electricity.read_rates()
models = {"minifer-tiny": tiny.config, "medium": medium.config}
show(electricity.draw_caches(rates, models), alt=electricity.ALT["caches"])

# %% [markdown]
# Small buffers come several times faster. minifer-tiny is 5.3 MiB in float32: its
# weights stay in a cache from step to step, so a prediction with memory's bandwidth
# is too *slow* for its bytes. An honest test needs a model larger than a usual cache.
# Ours, *medium*, has random weights: what they say changes no time.

# %% tags=["claim"]
for name, model in (("minifer-tiny", tiny), ("medium", medium)):
    held = sum(p.numel() for p in model.model.parameters())
    size = electricity.weight_mib(model.config)
    print(f"{name:13} {held:10,} weights, {size:5.1f} MiB:", 4 * held == size * 2**20)

# %% [markdown]
# ## Does the engine keep to it?
#
# Predicted: FLOPs, weight bytes and KV bytes of the step under this machine's roof.
# Measured: the engine's own report, the `step.forward` of its events, best of several
# steps. (Its clock is injected; ours stands still while neighbours use the core.)
# **Write down** by what factor you expect to miss, then look for the largest. (Not
# compared. One bound is asserted: no step may be faster than its bytes at the fastest
# rate at which any buffer was read, caches included.)

# %% tags=["picture"]
groups = electricity.measure_steps(medium)
here = measured_again(here, device="cpu")
fastest = max(rates.values())
for steps in groups:
    assert steps.best > (steps.cost.weight_bytes + steps.cost.kv_bytes) / fastest
show(electricity.draw_here(here, groups, medium.config), alt=electricity.ALT["here"])

# %% [markdown]
# As a rule large chunks of prefill come nearest to the roof, and steps of 4 to 16 tokens
# miss it most. Where does the time go? If a step were a fixed part and a price for each
# request and each byte of KV, three numbers would describe all decode steps: we fit
# them. (Not compared.)

# %% tags=["measure"]
from minifer.perf.step_model import fit_step_model

decodes = [g for g in groups if g.kind == "decode"]
features = {
    "requests": [float(g.num_tokens) for g in decodes],
    "KV": [g.cost.kv_bytes for g in decodes],
}
fitted = fit_step_model(features, [g.best for g in decodes])
print(f"fixed {fitted.prices['fixed'] * 1e3:5.1f} ms a step, off by {fitted.error:.0%}")
print(f"plus  {fitted.prices['requests'] * 1e3:5.1f} ms a request")
print(f"plus  {fitted.prices['KV'] * 1e9:5.2f} ms a MB of KV")
floor = decodes[0].cost.weight_bytes / here.memory_bandwidth
each = f"{1e9 / here.memory_bandwidth:.2f} ms a MB"
print(f"the weights alone, by the roofline: {floor * 1e3:.1f} ms, {each}")
for g in decodes[:5]:
    print(f"batch {g.num_tokens:2}: {g.num_tokens / g.best:5.0f} tokens/s")

# %% [markdown]
# Hold the fixed part against the weights' floor: so much of it the roofline predicts.
# A request adds far more than its bytes. A library has one routine for a matrix times a
# vector and another for large matrices, and a few rows fit neither well: look in the
# last lines for a batch that yields *fewer* tokens than a smaller one. And a MB of KV
# may cost more than a MB of weights, for the plain attention gathers keys and values
# into new tensors, which are written and read again.
#
# How much more moves than must? The instrument that counted bytes also saw the
# *activations*, what operations hand to each other. Look at both kinds of step.

# %% tags=["claim"]
watched.clear()
short = {"A": ("The import statement", 3)}
example.run(short, prepare=watch, max_num_batched_tokens=64)
for step in watched[0].steps[:2]:
    cost = step_cost(tiny.config, step.batch, element=float32).total()
    query, context = step.batch[0]
    print(f"query {query}, context {context}: weights exact", end=" ")
    print(step.seen.weights == cost.weight_bytes, end=", activations more ")
    print(step.seen.activations > cost.activation_bytes)

# %% [markdown]
# A norm is five operations in torch, each of which reads and writes everything. Kernels
# that join them save those bytes ([L07](L07_decode.ipynb)). And minifer-tiny? Predict:
# its weights are in a cache, so is it faster than memory's floor? (Not compared.)

# %% tags=["measure"]
from minifer.perf.steps import busy_clock, decoding, group

source = decoding(tiny, 1, 64, steps=20, clock=busy_clock)
steps = group(tiny, "decode 1 × 64", source.take(20))
print(f"measured {steps.best * 1e3:.2f} ms")
print(f"floor by memory {steps.floor(here) * 1e3:.2f} ms")
print(f"floor by the fastest cache {steps.cost.weight_bytes / fastest * 1e3:.2f} ms")

# %% [markdown]
# It is slower than either. Its four layers are about 200 small operations, and torch
# takes microseconds to start each, whatever it moves. For a model this small neither
# roof counts, but the number of operations. The same is true of a GPU at batch 1, where
# starting a kernel costs about a microsecond even when it is recorded in advance
# ([Hazy Research, May
# 2025](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles): 1.3 µs each).
#
# ## Takeaways
#
# - Joules a token = watts · seconds a step / tokens a step. Say what is inside the
#   boundary: the chip, the machine, or the building.
# - A product with B rows has an intensity of about B in two-byte numbers: decode
#   alone waits for memory.
# - A batch shares weights. It cannot share KV: attention of decode stays at H / K.
# - Another request is nearly free until KV outweighs the weights, arithmetic fills
#   up, or memory is full. Each user pays with slower tokens.
# - Smaller weights help where weights are most of the bytes, and nowhere else.
# - A roofline is a floor under the time. Caches, libraries and the start of each
#   operation decide how far above it a program stays. Measure.
#
# ## Questions
#
# **1.** A product with X [32, 1000] and W [1000, 500], two-byte numbers: how many
# FLOPs, how many bytes?
#
# <details><summary>Answer</summary>
#
# 2 · 32 · 1000 · 500 = 32,000,000 FLOPs. 32,000 + 500,000 + 16,000 numbers are
# 1,096,000 bytes.
#
# </details>
#
# **2.** A chip with 300 TFLOP/s and 2 TB/s: from which intensity on is it
# compute-bound?
#
# <details><summary>Answer</summary>
#
# 300 / 2 = 150 FLOPs a byte.
#
# </details>
#
# **3.** 64 query heads, 8 KV heads: what intensity does decode's attention approach,
# in two-byte numbers?
#
# <details><summary>Answer</summary>
#
# 64 / 8 = 8 FLOPs a byte, whatever the batch.
#
# </details>
#
# **4.** A step takes 10 ms, the chip draws 500 W, 50 requests decode. Joules a token?
#
# <details><summary>Answer</summary>
#
# 500 · 0.010 / 50 = 0.1 J.
#
# </details>
#
# **5.** Why may a small model be *faster* than its bytes over memory's bandwidth?
#
# <details><summary>Answer</summary>
#
# Its weights stay in a cache, which is faster than memory.
#
# </details>
#
# The cost model checks the first four. Look for four times True.

# %% tags=["claim"]
print("1.", count(32, 1000, 500) == (32_000_000, 1_096_000))
print("2.", replace(h100, peak_flops=300e12, memory_bandwidth=2e12).ridge_point == 150)
eight = replace(llama, num_heads=64)
scores = decode_cost(eight, 1, 100_000)["attention_scores"].intensity
print("3.", round(scores) == 8)
print("4.", round(500 * 0.010 / 50, 9) == 0.1)

# %% [markdown]
# All four hold.
#
# ## In real engines
#
# - **vLLM** caps a step by `--max-num-batched-tokens` and `--max-num-seqs`
#   ([docs](https://docs.vllm.ai/en/latest/configuration/optimization/)): how far along
#   the roof a step goes, and how long neighbours wait.
# - **SGLang** gives KV what weights leave, by `--mem-fraction-static`
#   ([docs](https://docs.sglang.ai/advanced_features/server_arguments.html)): where our
#   curves end.
# - *How to Scale Your Model* ([inference
#   chapter](https://jax-ml.github.io/scaling-book/inference/)) derives the same
#   critical batch for TPUs; kipply's [transformer inference
#   arithmetic](https://kipp.ly/transformer-inference-arithmetic/) (2022) began it.
#
# ## Exercises
#
# | id | title | points | minutes |
# |---|---|---|---|
# | 1.1 | Cost of a matrix product | 3 | 10 |
# | 1.2 | Bytes of a decode step | 5 | 25 |
# | 1.3 | Critical batch | 4 | 20 |
# | 1.4 ★ | Joules a token | 3 | 15 |
#
# All in [ex01](../exercises/ex01_electricity_to_intelligence.ipynb).
#
# ## Where to read on
#
# 1. [costs.py](../minifer/perf/costs.py): FLOPs and bytes of every operation.
# 2. [devices.py](../minifer/perf/devices.py): the chips, their sources and dates.
# 3. [limit.py](../minifer/perf/limit.py): how a machine is measured;
#    `minifer bench limit` does it with all cores and draws your roofline.
# 4. [counted.py](../minifer/perf/counted.py): how bytes are counted.
#
# Next: [L02](L02_prefill_and_decode.ipynb), where one model turns out to be two
# machines.
