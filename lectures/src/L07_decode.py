# %% [markdown]
# # L07 · Decode
#
# After the prompt, a request gets one token a step, and each step reads the whole model
# for it. This lecture counts those bytes, shares them among requests, and looks at what
# is left: contexts that cannot be shared, launches, idle processors, and the idea of
# checking several tokens at once.
#
# 55 minutes of reading, 90 minutes of exercises. Needs L01 (roofline), L04 (blocks) and
# L06 (prefill); no GPU, no network.
#
# After it you can
#
# - **predict** the time of a decode step from bytes, for any batch and context;
# - **decide** when a larger batch stops helping, and which resource ends it;
# - **write** a decode step over requests of different lengths, and show that it equals
#   one request at a time;
# - **pad** a batch to a fixed shape so that the padding changes nothing;
# - **merge** partial attentions, and **accept** or reject drafted tokens exactly.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the fourth, decode](figures/life_map_decode.svg)
#
# Its prompt is in the cache. From now on it comes by once a step, alone. The next cell
# sets up and prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import torch

from minifer.course.pictures import decode as pictures

begin("L07")

# %% [markdown]
# ## What does the engine do for one token?
#
# Here are A, B and C again, under a budget of 16 tokens. From step 5 on everybody
# decodes. Look at how long the hatched part is: of 13 steps, prefill is over after 4.

# %% tags=["picture"]
from minifer.course.figures import timeline

run = example.run()
show(
    timeline(
        run.events, title="Most steps decode: one token a request, again and again"
    ),
    alt="Timeline of A, B and C over 13 steps. Prefill ends in step 4; then A decodes "
    "to step 13, B to step 11 and C to step 9, one token a step each.",
)

# %% [markdown]
# One drawn token of A under the microscope, at position 24: a step draws it, the next
# one computes it. (The engine's own lines are shown, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(run, "A", position=24, stage="decode")

# %% [markdown]
# The work of a decode step is one row a request. A product of a matrix with one row is
# a **GEMV** (general matrix-vector product): each weight is read for one multiply and one
# add. With 2-byte weights that is one FLOP a byte, where an H100 could do 295.
#
# So the time of a step is the time to read. For Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3) in bfloat16: the step
# reads 15.0 GB of weights, and 131,072 bytes of KV for each token of context. By hand:
# 15.0 GB over 3.35 TB/s is how many milliseconds? Then look.

# %% tags=["claim", "row-12"]
from minifer.course import shapes
from minifer.perf.devices import DEVICES

llama, h100 = shapes.LLAMA_8B, DEVICES["H100-SXM"]
(alone,) = pictures.decode_points(llama, h100, [1], context=1024)
print(f"weights {alone.weight_bytes / 1e9:.1f} GB, KV {alone.kv_bytes / 1e9:.2f} GB")
print(f"{alone.seconds * 1e3:.2f} ms, {alone.tokens_per_second:.0f} tokens a second")

# %% [markdown] tags=["row-12", "correction-11", "row-5"]
# 4.5 ms, 221 tokens a second, however fast the chip multiplies. (Modelled, a floor;
# the data sheet's bandwidth is never quite reached.) Two ways lead out: fewer bytes a
# weight, or more tokens for each reading. The rest of this lecture is the second.
#
# Every weight for every token? That is a *dense* model. In a **mixture of experts** a
# token passes a few of many MLPs, and a step reads those that its tokens chose. DeepSeek-V3
# ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), December 2024) has 671 billion
# weights, 37 of them active for a token; Kimi K2
# ([arXiv:2507.20534](https://arxiv.org/abs/2507.20534), July 2025) a trillion and 32. The
# price: requests that choose different experts share less.
#
# How have models grown? A plain transformer has about 12 D² weights a layer, 4 in
# attention and 8 in the MLP, and an embedding of V · D. **By hand** for BERT-base of 2018:
# 12 layers, D = 768, V = 30,000. Then look at the others.

# %% tags=["claim", "row-5"]
grown = {"BERT-base": (12, 768, 30_000), "GPT-3": (96, 12_288, 50_257)}
for name, (layers, D, V) in grown.items():
    print(f"{name:9} {(12 * layers * D**2 + V * D) / 1e9:6.2f} billion weights")
ms = [round(2e12 * n / h100.memory_bandwidth) for n in (671, 37)]
print("671 billion, and 37 of them:", ms, "ms to read")

# %% [markdown] tags=["row-5"]
# Their papers say 110 million ([arXiv:1810.04805](https://arxiv.org/abs/1810.04805)) and
# 175 billion ([arXiv:2005.14165](https://arxiv.org/abs/2005.14165)). Open models are at a
# trillion by now. The 5 to 10 trillion of closed ones are a “probably” of the lecture this
# book grew from ([Dan Fu, CS336, June
# 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s)); no laboratory confirms them. (The
# last line is for bfloat16, and as if one H100 could hold it all.)
#
# ## What does a batch share?
#
# Sixty-four requests in one step read the weights once. Their keys and values are their
# own. Write down, before you look: at which batch do the 15 GB of weights and the KV
# reads weigh the same, with contexts of 1,024 tokens?

# %% tags=["claim"]
batches = 1, 4, 16, 64, 256
print("context  batch  weights GB  KV GB  step ms  tokens/s")
for context in (1024, 16_384):
    for p in pictures.decode_points(llama, h100, batches, context):
        bytes_read = f"{p.weight_bytes / 1e9:10.1f} {p.kv_bytes / 1e9:7.1f}"
        speed = f"{p.seconds * 1e3:8.1f} {p.tokens_per_second:9,.0f}"
        print(f"{context:7} {p.batch:6} {bytes_read} {speed}")

# %% [markdown]
# 15.0 GB are 112 contexts of 1,024 tokens, or 7 of 16,384. Short contexts: a batch of
# 256 yields 74 times the tokens of one, and a step takes 3.5 times as long. Long
# contexts: 8 times the tokens, at 33 times the latency. The picture shows why.

# %% tags=["picture"]
points = pictures.decode_points(llama, h100, batches, 1024)
show(
    pictures.bytes_figure(
        points, title="The larger the batch, the more of a step is KV"
    ),
    alt="Weights and KV in what a step reads, at 1,024 tokens of context. KV is 1, 3, "
    "13, 36 and 70 % for batches of 1, 4, 16, 64 and 256. A token costs 15.14, 3.89, "
    "1.07, 0.37 and 0.19 GB.",
)

# %% [markdown]
# A token's cost falls from 15 GB to 0.19, of which 0.13 are its own KV: the floor.
#
# In a formula, with W bytes of weights, k bytes of KV a token, contexts of S tokens and
# bandwidth β, both memory-bound:
#
# $$\text{tokens per second} = \frac{B\,\beta}{W + B\,S\,k}
# \;\longrightarrow\; \frac{\beta}{S\,k} \quad (B \to \infty)$$
#
# The cost model counts activations too. Look at how little the formula misses.

# %% tags=["claim"]
from minifer.perf.costs import kv_bytes_per_token

k, W, beta = kv_bytes_per_token(llama), alone.weight_bytes, h100.memory_bandwidth
worst = 0.0
for context in (1024, 16_384):
    for p in pictures.decode_points(llama, h100, batches, context):
        formula = p.batch * beta / (W + p.batch * context * k)
        worst = max(worst, abs(formula / p.tokens_per_second - 1))
    print(f"context {context:6}: never above {beta / (context * k):,.0f} tokens/s")
print(f"largest gap between formula and model: {worst:.0%}")

# %% [markdown]
# The gap is largest for the big batches, whose rows are read and written themselves.
#
# ## Which batch should one choose?
#
# The one who waits wants a short step, the one who pays wants many tokens a second. A
# curve with one point a batch shows what can be had together. Look at where each curve
# turns from steep to flat.

# %% tags=["picture"]
many = (1, 2, 4, 8, 16, 32, 64, 128, 256)
curves = {f"context {S:,}": (llama, h100, many, S) for S in (1024, 4096, 16_384)}
show(
    pictures.pareto_figure(
        {name: pictures.decode_points(*case) for name, case in curves.items()},
        title="Batching is nearly free until KV outweighs the weights",
    ),
    alt="Throughput against time per token on log axes, modelled, for contexts of "
    "1,024, 4,096 and 16,384 tokens, batches 1 to 256. Each curve rises steeply, then "
    "bends flat, the longer contexts sooner.",
)

# %% [markdown]
# Left of the bend more requests cost hardly anything. Right of it each buys throughput
# with everyone's latency. This is the curve on which an operator picks a point.
#
# And memory ends it. Weights take 16 GB of 80 (with the embedding, which a step hardly
# reads), the rest is KV. How many contexts fit? And which part of the formula's ceiling
# does a full card reach? Guess whether long contexts reach less of it than short ones.

# %% tags=["claim"]
from minifer.perf.costs import num_parameters

free = h100.memory_bytes - 2 * num_parameters(llama)
for context in (1024, 4096, 16_384):
    fit = int(free // (context * k))
    share = fit * context * k / (W + fit * context * k)
    print(f"context {context:6}: {fit:4} requests fit, {share:.0%} of the ceiling")
for gigabytes in (24, 40):
    kv = gigabytes * 1e9 - 2 * num_parameters(llama)
    print(f"a card of {gigabytes} GB, full: {kv / (W + kv):.0%} of the ceiling")

# %% [markdown]
# The context does not matter: a full card reads 64 GB of KV beside 15 GB of weights,
# and 64 of 79 is 81 %. That is past the bend, at 24 ms a step. A card with less memory
# is full before it: with 24 GB, 8 of KV, it stops at 35 %. That is why KV is paged
# (L04), shared (L05) and moved (L10): memory for KV *is* throughput.
#
# ## Does it hold on this machine?
#
# A model of 6.5 million random float32 weights, contexts of 128 tokens, one thread. First
# the bytes of a step, by the formula: W is 4 bytes for each weight but the embedding's,
# of which a request reads one row.

# %% tags=["claim"]
from minifer.course.pictures.packed_prefill import random_model

sizes = (1, 2, 4, 8, 16, 32)
for p in pictures.decode_points(shapes.SMALL, h100, (1, 32), 128, pictures.FLOAT32):
    own = p.kv_bytes == p.batch * 129 * kv_bytes_per_token(shapes.SMALL, 4)
    print(f"{p.batch:2} requests: weights {p.weight_bytes / 1e6:.1f} MB,", end=" ")
    print(f"KV {p.kv_bytes / 1e6:.1f} MB, 129 tokens each: {own}")

# %% [markdown]
# 129, because a step reads 128 tokens of context and writes one. The floor below uses
# bandwidth and FLOP/s measured a moment ago. Expect both curves to be flat at first;
# predict where this machine's bend lies (its ridge point is far below a GPU's).

# %% tags=["picture"]
from minifer.perf.limit import this_machine

here = this_machine(seconds=0.5)
floor = pictures.decode_points(shapes.SMALL, here, sizes, 128, pictures.FLOAT32)
measured = pictures.measure_decode(random_model(shapes.SMALL), shapes.SMALL, sizes, 128)
show(
    pictures.decode_figure(
        floor, measured, title="One step for 32 costs far less than 32 steps for 1"
    ),
    alt="Time of a decode step against its requests, 1 to 32, on log axes: the "
    "predicted floor and what was measured here. Both are flat at first, then rise.",
)

# %% [markdown]
# The distance between the curves is what the roofline leaves out: calls, small
# operations, gathering scattered blocks. The numbers (this machine's, not compared):

# %% tags=["measure"]
for a, b in zip(floor, measured, strict=True):
    times = f"floor {a.seconds * 1e3:5.2f} ms, measured {b.seconds * 1e3:5.2f} ms"
    print(f"{a.batch:3} requests: {times}, {b.tokens_per_second:6.0f} tokens/s")

# %% [markdown]
# Compare the first and the last line: 32 times the tokens, in a step that takes nowhere
# near 32 times as long. On a busy machine single lines may jump.
#
# Much of the distance is calls, which a step in one call does not make. To see a real
# model on all cores, run `minifer bench decode --backend compiled`, and once more with
# `--backend torch`: besides tokens a second it prints the **MBU** (model bandwidth
# utilization), the share of this machine's read bandwidth that weights and KV take.
#
# ## How does one step serve contexts of different lengths?
#
# Row b of the step belongs to request b, whose context has S_b tokens. Written plainly
# it is a loop: one query, its own keys, its own values. Look at the shapes.


# %% tags=["claim"]
def decode_one(query, keys, values):
    """query [H, C], keys and values [S, K, C] → [H, C]: one request's attention."""
    group = query.shape[0] // keys.shape[1]  # query heads that share a KV head
    k, v = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [S, H, C]
    scores = torch.einsum("hc,shc->hs", query, k) * query.shape[-1] ** -0.5
    return torch.einsum("hs,shc->hc", torch.softmax(scores, dim=-1), v)


# %% [markdown]
# The engine does all requests of a step in one operation: contexts are gathered into a
# rectangle as long as the longest, and what lies beyond a request's own length is
# hidden. To see that nothing hidden leaks, everything that nobody owns is NaN. Lengths
# 29, 1, 8 and 9 are a ragged end, a first token, a full block and one more; the longest
# comes first, for a batch may come in any order.

# %% tags=["claim"]
from minifer.execution.attention import paged_attention
from minifer.execution.forward_batch import ForwardBatch

H, K, C, P = 4, 2, 16, 8
seq_lens, tables = [29, 1, 8, 9], [[4, 7, 1, 3], [5], [2], [9, 0]]
keys, values = pictures.scattered_context(tables, seq_lens, (12, P, K, C))
query = torch.randn(4, H, C)
last = [n - 1 for n in seq_lens]  # the position of each query
batch = ForwardBatch.build(
    [0] * 4, last, [-1] * 4, range(5), seq_lens, tables, range(4), P
)
together = paged_attention(query, keys, values, batch, scale=C**-0.5)
for b, (table, n) in enumerate(zip(tables, seq_lens, strict=True)):
    own = keys[table].flatten(0, 1)[:n], values[table].flatten(0, 1)[:n]
    gap = float((together[b] - decode_one(query[b], *own)).abs().max())
    print(f"context {n:2}: equal to one request alone, to 1e-5: {gap < 1e-5}")

# %% [markdown]
# Four times True, and no NaN. The engine's version differs from ours in one line worth
# remembering: it sets hidden values to 0 *besides* giving them the weight 0, because
# 0 · NaN is NaN. Exercise 7.1 is this batched step.
#
# The same for the whole model: B requests in one step against B steps of one. Look at
# the logits' largest difference.

# %% tags=["claim"]
from minifer.execution.reference import reference_logits

model = example.tiny().model
rows_seen, largest = 0, 0.0
for step, logits in run.steps:
    for row, (entry, _) in enumerate(step.sampled):
        ids = list(entry.request.token_ids)[: entry.end]
        truth = reference_logits(model, ids)[-1]
        largest = max(largest, float((logits[row] - truth).abs().nan_to_num(9).max()))
        rows_seen += 1
print(rows_seen, "rows of logits, all as if alone, to 1e-4:", largest < 1e-4)

# %% [markdown]
# 27 rows, in batches of one to three, equal the slow twin that knows no batch.
#
# ## What does a launch cost?
#
# On a GPU each operation is a **kernel**, and each kernel has to be launched. At batch 1
# a kernel of this model reads for about 20 µs; a launch costs about 1.3 µs even when
# the whole step is replayed from a CUDA graph (reported by Hazy Research,
# ["Look Ma, No Bubbles!"](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles),
# May 2025). A CUDA graph is a recording of launches that the GPU replays without asking
# the CPU. Say 7 kernels a layer. Which model suffers more, one of 8 or of 1 billion
# parameters?

# %% tags=["claim"]
models = {"8B": llama, "1B": shapes.LLAMA_1B}
for name, config in models.items():
    step = pictures.launches(config, h100, 1, 1024, per_layer=7, gap=1.3e-6)
    lost = f"{step.kernels} launches, {step.kernels * step.gap * 1e6:.0f} µs lost"
    print(f"{name}: {lost}, {step.share:.0%} of the floor's speed")

# %% [markdown]
# The small one: its kernels are shorter and the gaps are not. (Shapes of Llama 3.2 1B:
# [model card](https://huggingface.co/meta-llama/Llama-3.2-1B), September 2024.) Move the
# sliders: a batch makes kernels longer and hides the gaps, dearer launches show them.


# %% tags=["picture"]
def launch_view(launch, batch):
    """The first kernels of a step of both models. launch: µs a launch costs."""
    rows = {
        name: pictures.launches(config, h100, batch, 1024, 7, launch * 1e-6)
        for name, config in models.items()
    }
    shares = ", ".join(f"{name} {step.share:.0%}" for name, step in rows.items())
    return pictures.launch_figure(rows, title=f"Share of the floor's speed: {shares}")


explore(
    launch_view,
    alt="The first kernels of a decode step of an 8B and of a 1B model, with a gap "
    "before each: the gaps take a larger part of the smaller model's step.",
    labels={"launch": "launch (µs)", "batch": "batch (requests)"},
    launch=[1.3, 0.0, 5.0],
    batch=[1, 16, 64],
)

# %% [markdown]
# Fewer, larger kernels lose less: fusion. One kernel for the whole step loses least:
# the megakernel of L12.
#
# ## Why must shapes stand still, and what is padding worth?
#
# A recorded graph replays with the same shapes and the same memory. So an engine records
# it for a few batch sizes, and a step of 3 requests runs in the graph for 4: row 3 is
# padding. It must read something, since a softmax over no key is 0 / 0, and write
# nothing. In minifer a padded row has slot −1, which is not written. Here is one step of
# the model over a cache of our own.

# %% tags=["claim"]
from minifer.execution.backend import TorchBackend

backend, config = TorchBackend(), example.tiny().config


@torch.inference_mode()
def decode_step(kv, slots, lens, tables):
    """Logits of one step; every row decodes the letter e."""
    B, last = len(slots), [n - 1 for n in lens]
    batch = ForwardBatch.build(
        [ord("e")] * B, last, slots, range(B + 1), lens, tables, range(B), 8
    )
    return model.logits(model(batch, kv, backend), backend)


# %% [markdown]
# Three requests of 3, 12 and 8 tokens, without and with a row of padding: look at the
# rows that count, and at the cache.

# %% tags=["claim"]
tables, lens, slots = [[0], [2, 1], [5]], [3, 12, 8], [2, 11, 47]
plain, padded = (pictures.full_cache(config, 6, 8) for _ in range(2))
three = decode_step(plain, slots, lens, tables)
four = decode_step(padded, [*slots, -1], [*lens, 1], [*tables, [0]])
print(
    "rows that count are equal, to 1e-4:", bool((four[:3] - three).abs().max() < 1e-4)
)
same = [
    torch.allclose(a, b, atol=1e-5)
    for a, b in zip(plain.keys, padded.keys, strict=True)
]
print("the cache is the same after both:", all(same))

# %% [markdown]
# Nothing changed. Now the mistake: padding with slot 0, because 0 looks harmless. Block
# 0 belongs to the first request, and slot 0 is its first token. Which row will be wrong,
# in this step or in a later one?

# %% tags=["claim"]
broken = pictures.full_cache(config, 6, 8)
decode_step(broken, [*slots, 0], [*lens, 1], [*tables, [0]])
after = [decode_step(kv, [3, 12, 47], [4, 13, 8], tables) for kv in (plain, broken)]
wrong = (after[0] - after[1]).abs().max(dim=1).values > 1e-2
print("requests that the next step gets wrong:", wrong.nonzero().flatten().tolist())

# %% [markdown]
# Request 0 answers with a first token that is not its own, from now on. Nothing fails;
# the text goes on. vLLM has had a cousin of it: padded rows, written at slot −1, fell on
# the last slot of the cache
# ([vllm#43810](https://github.com/vllm-project/vllm/issues/43810)). Exercise 7.3 is the
# padding.
#
# ## Who reads one long context?
#
# Attention of one request with 8 KV heads is 8 pieces of work. An H100 has 132
# **streaming multiprocessors** (SMs), its processors. 8 of 132 busy is 6 %, and they read
# the longest context alone. **Split-K** (also: split-KV, Flash-Decoding) cuts each
# context into parts for more SMs. Equal pieces run in waves of 132; predict whether 16
# or 17 parts are better.

# %% tags=["claim"]
for parts in (1, 4, 16, 17, 33):
    programs = 8 * parts
    waves = -(-programs // 132)
    print(f"{parts:2} parts: {programs:3} pieces, {waves} waves, "
          f"{pictures.busy_sms(programs, 132):.0%} busy")  # fmt: skip

# %% [markdown]
# 16 parts fill a wave but for 4 SMs. 17 need a second wave for 4 pieces, and half of all
# time is idle: a **tail effect**.

# %% tags=["picture"]
cuts = (1, 2, 4, 8, 12, 16, 17, 24, 33)
show(
    pictures.split_figure(132, 8, cuts, title="One part too many halves the use"),
    alt="Busy SM time against the parts of a context, 8 KV heads on 132 SMs: it rises "
    "to 97 % at 16 parts, falls to 52 % at 17, and is 100 % at 33.",
)

# %% [markdown]
# The parts must then become one result. Softmax over all keys is not the mean of
# softmaxes over parts: each part has divided by its own sum. What a part must hand over,
# besides its output, is the logarithm of that sum, its **log-sum-exp**. With it the parts
# can be weighted as if they had never been apart. By hand: scores 0 and ln 3 in part
# one, ln 4 in part two. The sums are 4 and 4, so each part weighs one half.

# %% tags=["claim"]
scores = torch.tensor([1.0, 3.0, 4.0]).log()  # 0, ln 3, ln 4
v = torch.tensor([10.0, 20.0, 40.0])
whole = float(torch.softmax(scores, 0) @ v)
parts = [(scores[:2], v[:2]), (scores[2:], v[2:])]
outputs = [float(torch.softmax(s, 0) @ x) for s, x in parts]
sums = [float(s.exp().sum()) for s, _ in parts]
print("outputs of the parts:", [round(x, 3) for x in outputs])
print("sums:", [round(x, 3) for x in sums])
print(f"whole {whole:.2f}, half and half {sum(outputs) / 2:.2f}")

# %% [markdown]
# Half and half is right here, for the sums are equal. In general the weights are the
# shares of the sums; exercise 7.2 computes them without overflow. minifer's kernel does
# it in two launches; it pays for long contexts and small batches, and for a full GPU it
# only adds a launch. See what it chooses.

# %% tags=["claim"]
from minifer.kernels.paged_decode import num_splits

for batch_size, context in ((1, 64), (1, 8192), (4, 8192), (64, 8192)):
    chosen = num_splits(batch_size, kv_heads=8, max_context=context, num_sms=132)
    print(f"batch {batch_size:2}, context {context:4}: {chosen} parts")

# %% [markdown]
# A short context is not worth a cut, and 64 requests keep every SM busy uncut. One long
# context gets 15 parts, not 16: each part must be merged, so the engine takes the fewest
# that use the SMs at least 85 % as well as the best count would. 15 · 8 of 132 are 91 %.
#
# ## Can one reading yield more than one token?
#
# L06 found that a step of a few tokens costs what a step of one does. So let somebody
# guess the next k tokens, and let the model *check* all of them in one step:
# **speculative decoding**. At temperature 0 a guess is right when it is the model's own
# choice. The simplest guesser looks for the last two tokens earlier in the text and
# copies what followed.

# %% tags=["claim"]
from minifer.execution.reference import reference_generate


def guess(ids, k):
    """Up to k tokens that followed the last earlier place of the final two."""
    for start in range(len(ids) - 3, -1, -1):
        if ids[start : start + 2] == ids[-2:]:
            return ids[start + 2 : start + 2 + k]
    return []


# %% [markdown]
# The check is one call of the slow twin over text and guess together: position by
# position it says what the model would have chosen. The first wrong guess is replaced
# by the model's own choice, so each call yields at least one token. Before you look:
# with guesses of 8, how many calls do 48 tokens need at least?


# %% tags=["claim"]
def speculate(ids, count, k):
    """Greedy tokens and model calls: each call checks a guess and adds one token."""
    ids, end, calls = list(ids), len(ids) + count, 0
    while len(ids) < end:
        draft = guess(ids, k)
        choice = (
            reference_logits(model, ids + draft).argmax(-1).tolist()[len(ids) - 1 :]
        )
        right = 0
        while right < len(draft) and draft[right] == choice[right]:
            right += 1
        ids, calls = ids + draft[:right] + [choice[right]], calls + 1
    return ids[end - count : end], calls


prompt = example.tiny().tokenizer.encode(example.TRIO["A"][0])
truth = reference_generate(model, prompt, 48)
for k in (0, 2, 4, 8):
    tokens, calls = speculate(prompt, 48, k)
    calls_made = f"{calls:2} model calls for 48 tokens"
    print(f"guess {k}: {calls_made}, same tokens: {tokens == truth}")

# %% [markdown]
# 48 / 9 makes 6 calls at least; it takes 28, since most guesses are wrong or missing. The
# tokens are the same. A wrong guess costs nothing but the rows computed for it.
#
# The engine does this, too, for every request of a step. A guess takes slots like any
# token; one that is wrong leaves the table, and its blocks are the first to be used
# again. The engine's guesser looks for more than two last tokens where it can. Look for
# fewer steps than tokens, and for equality.

# %% tags=["claim"]
alone = {"A": (example.TRIO["A"][0], 48)}
for method in ("none", "ngram"):
    served = example.run(alone, speculative_method=method, num_speculative_tokens=8)
    same, right = served.tokens("A") == truth, served.engine.speculation_stats
    accepted = f"{right.num_accepted_tokens} of {right.num_draft_tokens} guesses right"
    print(f"{method:>5}: {len(served.steps)} steps, {accepted}, same tokens: {same}")

# %% [markdown]
# Two of the steps are the prompt's, the last of which yields the first token. Without
# guesses 47 more follow; each right guess saves one of them.
#
# If each guess is right with chance a, whatever the others are, a step yields
# 1 + a + … + a^k tokens on average (Leviathan, Kalman and Matias 2022,
# [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)). And it costs a step of k + 1
# rows for each request. When does that lose? Look for ratios below 1 (modelled, Llama
# 3.1 8B on an H100, k = 4, a free guesser).

# %% tags=["claim"]
from minifer.perf.costs import step_cost


def floor_of(rows, requests):
    """Seconds of a step that computes `rows` tokens for each request of 1,024."""
    total = step_cost(
        llama, [(rows, 1024)] * requests, num_logits=rows * requests
    ).total()
    return h100.seconds(total.flops, total.bytes)


print("speed-up of 4 guesses a step    a = 0.2   a = 0.5   a = 0.8")
for requests in (1, 16, 64, 256):
    cost = floor_of(5, requests) / floor_of(1, requests)
    gains = [pictures.expected_tokens(a, 4) / cost for a in (0.2, 0.5, 0.8)]
    print(
        f"{requests:4} requests, a step costs {cost:4.2f}  "
        + "".join(f"{g:10.2f}" for g in gains)
    )

# %% [markdown]
# Alone, every right guess is a gain. With 256 requests a step is no longer waiting for
# memory: rows cost arithmetic, and wrong guesses slow everyone down. A real guesser
# takes time, too. At a temperature above 0 a guess is accepted with a probability that
# keeps the model's distribution exactly; that is exercise 7.4, and
# `speculative_acceptance="rejection"` in the engine. By default it keeps the reply
# itself: noise belongs to seed and place (L08), so a guess is right when it is the token
# that would have been drawn there.
#
# ## Takeaways
#
# - A decode step takes as long as reading what it needs: weights once, KV per request.
# - Batching divides the weights. KV is the floor, in time and in memory.
# - The batch to choose is a point on a curve between two users.
# - Padding reads something and writes nothing; a padded slot is no slot of anybody.
# - Launches cost the small model most. Waves that are not full leave a tail.
# - Parts of a softmax merge through their log-sum-exp.
# - Checking several guesses costs about one step, as long as memory is what it waits for.
#
# ## Questions
#
# **1.** 10 GB of weights, 2 TB/s, 100 kB of KV a token, contexts of 1,000 tokens. How
# long is a step of one request, and of 100?
#
# <details><summary>Answer</summary>
#
# (10 + 0.1) GB / 2 TB/s = 5.05 ms; (10 + 10) GB / 2 TB/s = 10 ms.
#
# </details>
#
# **2.** The same machine: which throughput is never reached, however many requests?
#
# <details><summary>Answer</summary>
#
# β / (S k) = 2 TB/s / 100 MB = 20,000 tokens a second.
#
# </details>
#
# **3.** Two parts of a context have outputs 1 and 5 and sums 3 and 1. What is the whole?
#
# <details><summary>Answer</summary>
#
# (3 · 1 + 1 · 5) / 4 = 2.
#
# </details>
#
# **4.** 100 equal pieces on 40 SMs. How much of the SMs' time is used?
#
# <details><summary>Answer</summary>
#
# Three waves of 40 places for 100 pieces: 83 %.
#
# </details>
#
# **5.** Guesses are right half of the time, two a step. How many tokens does a step
# yield?
#
# <details><summary>Answer</summary>
#
# 1 + 0.5 + 0.25 = 1.75.
#
# </details>
#
# The numbers, checked.

# %% tags=["claim"]
print("1.", [round((10e9 + n * 1e8) / 2e12 * 1e3, 2) for n in (1, 100)] == [5.05, 10.0])
print("2.", 2e12 / (1000 * 1e5) == 20_000)
print("3.", (3 * 1 + 1 * 5) / 4 == 2)
print("4.", f"{pictures.busy_sms(100, 40):.0%}" == "83%")
print("5.", pictures.expected_tokens(0.5, 2) == 1.75)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - vLLM and SGLang record CUDA graphs for a list of batch sizes and pad to the next.
# - Flash-Decoding ([Dao, Haziza, Massa and Sizov, October
#   2023](https://crfm.stanford.edu/2023/10/12/flashdecoding.html)) is the split with the
#   merge; FlashAttention's heuristic for the number of parts is the one minifer uses.
# - Speculation with n-grams, small models or extra heads is in all of them. Its state
#   must be rolled back after a rejection:
#   [vllm#39273](https://github.com/vllm-project/vllm/issues/39273) is what happens
#   otherwise.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 7.1 | [Decode a ragged batch](../exercises/ex07_decode.ipynb) | 6 | 25 |
# | 7.2 | [Merge partial attentions](../exercises/ex07_decode.ipynb) | 6 | 25 |
# | 7.3 | [Padding that changes nothing](../exercises/ex07_decode.ipynb) | 4 | 15 |
# | 7.4 ★ | [Accept or reject, exactly](../exercises/ex07_decode.ipynb) | 4 | 25 |
#
# ## Where to read on
#
# 1. [attention.py](../minifer/execution/attention.py): `_decode`, the batched step.
# 2. [costs.py](../minifer/perf/costs.py): `decode_cost`, what a step reads.
# 3. [paged_decode.py](../kernels/paged_decode.py): the split and the merge as a kernel.
# 4. [kv_storage.py](../minifer/execution/kv_storage.py): how a slot below 0 is not written.
# 5. [timeline](../minifer/perf/timeline/__init__.py): launches, waves and gaps, modelled.
# 6. [proposer.py](../minifer/execution/speculation/proposer.py): who guesses, and how often
#    it was right.
