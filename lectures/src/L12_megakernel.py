# %% [markdown]
# # L12 · Fusion to megakernel
#
# A decode step of a small model is short, and much of it is waiting: for launches, for
# the last block of each kernel, for bytes that could have been on their way. This lecture
# removes these one by one, and ends with a step that is one kernel. Then comes the harder
# question: who says that it is right?
#
# 60 minutes of reading, 100 minutes of exercises. Needs L07 (launches, waves) and L11
# (Triton kernels); no GPU, no network.
#
# After it you can
#
# - **compute** what launches, waves and tails cost a step, and for whom that matters;
# - **fuse** a norm with the product behind it, show that nothing changed, and say what was
#   saved;
# - **schedule** the instructions of a step with counters in the place of launches;
# - **prove** that a schedule can neither hang nor race, or read why it can;
# - **judge** a published share of a memory's bandwidth.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the fourth, decode](figures/life_map_decode.svg)
#
# In decode, and we look inside one step. The next cell sets up and prints nothing. (Beside
# a GPU, start Jupyter with `TRITON_INTERPRET=1`: the co-simulator below needs it.)

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import textwrap
from dataclasses import replace

begin("L12")

# %% [markdown]
# ## What is one step?
#
# Request A, three tokens of it, with another back end: each decode step is a single launch
# of one kernel. Before you look: may its tokens differ from those of other lectures?

# %% tags=["claim"]
run = example.run({"A": (example.TRIO["A"][0], 3)}, backend="megakernel")
print("A's tokens as ever:", run.tokens("A") == example.run().tokens("A")[:3])

# %% [markdown]
# They may not, and do not. Under the microscope nothing has changed either: this whole
# lecture happens inside the event of the forward pass. (The engine's own lines are shown,
# so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(run, "A", position=21, stage="decode")

# %% [markdown]
# ## What does a step pay for its launches?
#
# One kernel at a time means one launch after the other. Hazy Research report 1.3 µs for
# each on an H100, with CUDA graphs, and 7 kernels a layer for Llama 3.2 1B
# (["Look Ma, No Bubbles!"](https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles),
# May 2025). By hand: 16 layers; 2.47 GB of weights; a memory of 3.35 TB/s. Which part of
# the floor are all launches together? And for a prompt of 2,048 tokens?

# %% tags=["claim", "row-22"]
from minifer.claims.launch_overhead import STEPS

shares = {step.label: 100 * step.launching / step.floor for step in STEPS[:5]}
for step in STEPS[:5]:
    paid = f"floor {step.floor * 1e6:7,.0f} µs, launches {step.launching * 1e6:5.1f} µs"
    print(f"{step.label:28} {paid}")

# %% [markdown]
# 146 µs beside 738: a fifth, for a small model and one request. (Modelled from that one
# reported number.) It fades quickly.

# %% tags=["picture"]
from minifer.course.pictures import megakernel as pictures

title = "Launches cost a small model a fifth, and everybody else little"
axis = "launches, of the floor of the step (%, modelled)"
show(
    pictures.bars_figure(shares, title=title, x=axis),
    alt="Launches as a share of the floor: 20 % for 1B at batch 1, 1 % for a prompt.",
)

# %% [markdown]
# So this lecture is about short steps.
#
# ## What does fusion save?
#
# A **fused** kernel does the work of several. minifer lists the kernels of a layer in both
# forms. Look at their number, and at the weights.

# %% tags=["claim"]
from minifer.course.pictures import megakernel_data as data
from minifer.kernels.mega.shapes import MODELS, decode_shape

llama = decode_shape(MODELS["llama-1b"], splits=2)  # a context in two parts
plain, fused = (data.kernels(llama, fused=fused) for fused in (False, True))
for way in (plain, fused):
    count = f"{len(way.names)} a layer, {way.launches} a step"
    print(f"{count}, {way.weight_bytes / 1e6:,.0f} MB of weights")

# %% [markdown]
# Half the launches, the same weights. (16 · 7, and 3 outside of the layers.) The third row of
# the picture is where we are going.

# %% tags=["picture"]
title = "Fusion removes launches: 14 a layer, then 7, then none"
show(
    pictures.kernels_figure(plain.names, fused.names, title=title),
    alt="The 14 kernels of a layer; below them the 7 fused ones, each as wide as what "
    "it replaces; below those one box, the megakernel.",
)

# %% [markdown]
# How can a norm be part of a product? RMSNorm divides x by its root mean square and
# multiplies by gains. By hand: x = (1, 7), the mean of the squares is 25, the root 5.
# With gains (1, ½) the normed row is (0.2, 0.7); times weights (10, 10) that is 9. Or:
# 10 · 1 · 1 + 10 · ½ · 7 = 45 first, then 45 / 5 = 9. The divisor is the same for every
# column, so it may come last, and the product need not wait for it.

# %% tags=["claim"]
import torch

x, gain, w = (torch.tensor(v) for v in ([1.0, 7.0], [1.0, 0.5], [10.0, 10.0]))
root = x.pow(2).mean().sqrt()
print(f"norm, then product: {float(w @ (gain * (x / root))):.2f}")
print(f"product, then divide: {float(w @ (gain * x)) / float(root):.2f}")

# %% [markdown]
# minifer's kernel goes a third way: it finds the root while its first weights are on their
# way, and norms each slice as it multiplies it; so it rounds as the two kernels do. Look
# for equality with float64, on minifer-tiny's weights.

# %% tags=["claim"]
from minifer.kernels import gemv, norm_gemv, rms_norm

layer, eps = example.tiny().model.layers[0], example.tiny().config.rms_norm_eps
norm, weight = layer.input_layernorm.weight, layer.self_attn.qkv_proj.weight
x = torch.randn(1, 192)
with torch.inference_mode():
    exact = x.double() * (x.double().pow(2).mean() + eps).rsqrt() * norm.double()
    gap = norm_gemv.norm_gemv(x, norm, eps, weight) - exact @ weight.double().T
print("fused equals float64, to 1e-5:", bool(gap.abs().max() < 1e-5))

# %% [markdown]
# And what was saved? Predict the share of bytes, for Llama 1B's first product (2,048
# columns, 3,072 rows, two bytes a number).

# %% tags=["claim"]
from minifer.perf.devices import DEVICES

h100, D, N = DEVICES["H100-SXM"], llama.hidden, llama.qkv_rows
apart = rms_norm.rms_norm_cost(1, D).bytes + gemv.gemv_cost(D, N).bytes
saved = apart - norm_gemv.norm_gemv_cost(1, D, N).bytes
print(f"apart {apart / 1e6:.2f} MB, of which fusion saves {saved:,.0f} bytes")
print(f"a launch is worth {1.3e-6 * h100.memory_bandwidth / 1e6:.1f} MB")

# %% [markdown]
# 8 kB of 12.6 MB: one write and one read of the normed x. But in the time of a launch the memory
# could read a third of that matrix. Decode is fused for time, not for bytes. (Attention
# over many rows, L06, is fused for its bytes.)
#
# The second fusion joins RoPE with the write to the KV cache: a rotated key goes there
# and nowhere else. Three tokens, the last with slot −1. Look at how many slots were written.

# %% tags=["claim"]
from minifer.kernels.rope_append import rope_append, rope_append_reference

q, k, v = (torch.randn(3, heads, 16) for heads in (4, 2, 2))
angles, slots = torch.arange(24.0).view(3, 8) / 8, torch.tensor([9, 30, -1])
ours, slow = ([torch.full((4, 8, 2, 16), torch.nan) for _ in "kv"] for _ in range(2))
turned = rope_append(q, k, v, angles.cos(), angles.sin(), *ours, slots)
truth = rope_append_reference(q, k, v, angles.cos(), angles.sin(), *slow, slots)
pairs = [(turned, truth), *zip(ours, slow, strict=True)]
same = [torch.allclose(a, b, atol=1e-6, equal_nan=True) for a, b in pairs]
print("queries, key cache, value cache equal:", same)
print("slots written:", int(ours[0].view(32, -1).isfinite().all(1).sum()))

# %% [markdown]
# Two slots, and equality. What does fusion cost? Each of the 192 programs of Llama 1B's
# first product finds the root for itself. With one row those threads would have waited. With
# many rows arithmetic counts: 4 FLOPs an element against 32 for the program's 16 rows of
# weights, an eighth more. From 17 rows on minifer's norm is a kernel of its own again.
# Exercise 12.4 is the fused product.
#
# ## Who waits for the last block?
#
# A kernel is a grid of **thread blocks**, dealt to the SMs, the processors of a GPU; the
# next one starts when the last block has ended. Equal blocks run in **waves** (L07).
# Attention over a ragged batch has unequal ones. By hand: contexts of A 1,000, B 1,000
# and C 4,000 tokens, 2 KV heads, 4 SMs, a block for each request and head, in this order.
# A and B take all SMs for 1,000 tokens' time, C's two blocks 4,000 more. Which share of
# the SMs' time is used? And with each context in parts of 1,000?

# %% tags=["claim", "row-23"]
contexts = {"A": 1000, "B": 1000, "C": 4000}
for part in (None, 2000, 1000):
    dealt = data.attention(contexts, num_sms=4, part=part, heads=2)
    print(f"part {part or 'uncut':>5}: end {dealt.end:5,.0f}, {dealt.busy:.0%} busy")

# %% [markdown]
# 12,000 tokens of work on 4 SMs take 3,000 at best; uncut they take 5,000. The idle rest
# is the **tail**. Below is a calculator, in which each block pays an overhead, too, in
# tokens' time. Find the part from which on smaller ones make it worse, and see what
# "longest first" does without any cut.


# %% tags=["picture"]
def tail_view(part, sms, overhead, order):
    """Attention of A, B and C as blocks on SMs; part: tokens, 0 for no cut."""
    sort = order == "longest first"
    dealt = data.attention(
        contexts, sms, part=part or None, heads=2, overhead=overhead, longest_first=sort
    )
    title = f"{len(dealt.blocks)} blocks end at {dealt.end:,.0f}; {dealt.busy:.0%} busy"
    return pictures.tail_figure(dealt, title=title)


explore(
    tail_view,
    alt="Blocks of A, B and C on SMs. Uncut, C's two run alone for most of the time.",
    labels={"part": "tokens a part (0: uncut)", "overhead": "overhead (tokens)"},
    part=[0, 4000, 2000, 1000, 500, 250, 125],
    sms=[4, 6, 8],
    overhead=[125, 0, 250],
    order=["as they come", "longest first"],
)

# %% [markdown]
# The same in numbers, and where the 125 comes from: what an overhead of 1.2 µs (an
# assumption) is worth to one SM of an H100.

# %% tags=["claim"]
for part in (None, 2000, 1000, 500, 250, 125):
    dealt = data.attention(contexts, 4, part=part, heads=2, overhead=125)
    print(f"part {part or 'uncut':>5}: end {dealt.end:5,.0f}")
tokens = 1.2e-6 * h100.memory_bandwidth / h100.num_sms / (2 * llama.head_dim * 2)
print(f"1.2 µs are {tokens:.0f} tokens of one KV head of Llama 1B")

# %% [markdown] tags=["row-23", "correction-12"]
# Parts of 2,000 are best; parts of 125 are worse than no cut at all.
#
# One often reads that a GPU cannot go on until the *longest sequence* of the batch has
# ended. More exactly: the next *kernel* waits for the *last thread block* of this one,
# which is the longest sequence's only as long as nobody cuts it. Hazy Research's example
# is a batch of four, one of them huge
# ([ThunderMLA](https://hazyresearch.stanford.edu/blog/2025-03-04-thundermla), March 2025).
# An even share for 132 SMs is 53,185 / 132 = 403 tokens. Why are parts of 403 not the best?

# %% tags=["claim", "row-23"]
ragged = {"1": 4641, "2": 45_118, "3": 1730, "4": 1696}
for part in (None, 2048, 420, 403, 256):
    dealt = data.attention(ragged, 132, part=part)
    blocks = f"{len(dealt.blocks):3} blocks, end {dealt.end:6,.0f}"
    print(f"part {part or 'uncut':>5}: {blocks}, {dealt.busy:.1%} busy")

# %% [markdown] tags=["row-24", "correction-5"]
# 403 makes 134 blocks: a second wave for two of them. 420 makes 130. The best part
# depends on the batch, so engines plan it for every step.
#
# ThunderMLA makes one kernel of the parts and their merge. For this batch its authors
# report 41 µs on an H100 after FlashMLA's 52, and 20 to 35 % in general. The "30 to 70 %"
# that is often quoted is said to stand on a slide of the talk this book comes from
# ([Dan Fu, CS336, June 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s)); we know no
# publication of it. All reported, nothing measured here.

# %% tags=["claim", "row-24"]
print(f"52 → 41 µs: {52 / 41 - 1:.0%} faster, {1 - 41 / 52:.0%} less time")

# %% [markdown]
# Either way to count lies within 20 to 35 %, neither in 30 to 70. Exercise 12.1 is the tail.
#
# ## What lies between two kernels?
#
# A tail, a launch, and then all SMs begin from nothing. While nobody reads there is a
# **bubble**. minifer has a model of a step in time: 132 SMs that share a memory, 1.2 µs of
# overhead a block or instruction, 1.3 µs between kernels. *It is a model; nothing in it is
# measured.* Four ways to run a step: two with launches, two as one kernel, the last of
# which fetches weights while an SM waits. Predict where the largest step down is.

# %% tags=["claim"]
from minifer.perf.timeline import decode as ways

shown = (ways.UNFUSED, ways.FUSED, ways.COUNTERS, ways.PREFETCH)
panels = [ways.panel(way, llama, h100, context=512) for way in shown]
times = [data.step_time(panel) for panel in panels]
for t in times:
    spent = f"{t.total:5,.0f} µs, nobody reads for {t.bubble:3.0f}"
    print(f"{t.name:20}: {t.launches:3} launches, {spent}")

# %% [markdown]
# Fusion is the largest, from 1,332 to 1,040 µs: launches and their gaps. Counters remove most
# of the bubbles that are left, prefetch nearly half of the rest. As a picture (with prefetch
# bytes arrive while an SM waits: green grows, blue shrinks):

# %% tags=["picture"]
show(
    pictures.time_figure(times, title="What shrinks is the time in which nobody reads"),
    alt="Modelled times 1,332, 1,040, 872 and 837 µs; the bubbles shrink most.",
)

# %% [markdown]
# And two layers of each, SM by SM; below each panel, how much of the memory is in use.
# Look for what fills the white columns.

# %% tags=["picture"]
from minifer.perf.timeline import gantt

show(
    gantt.figure(panels, "White is waiting: launches leave most, prefetch least"),
    alt="SMs against time, two layers, four panels. Un-fused kernels leave many white "
    "columns, the megakernel few; with prefetch those are yellow.",
)

# %% [markdown] tags=["row-26"]
# Yellow is the idea: weights depend on nothing, so the output projection's arrive before
# attention has ended. The talk says it of keys and values, too: those of earlier tokens
# can be read while this token's query is computed. minifer's kernel fetches weights early,
# not KV; but the model can be told that old KV depends on nothing. Four layers, a context
# of 16,384: what do early bytes save?

# %% tags=["claim", "row-26"]
from minifer.perf.timeline.model import simulate, tasks

four = decode_shape(replace(MODELS["llama-1b"], num_layers=4), splits=32)
plain = tasks(ways.megakernel(four, 132, "round_robin"), context=16_384)
for what, early in (("nothing", 0), ("weights", 65_536), ("weights, old KV", 65_536)):
    chip = ways.Assumptions().machine(h100, prefetch=early)
    queues = data.with_early_kv(plain) if "KV" in what else plain
    print(f"early: {what:15} {simulate(queues, chip).seconds * 1e6:5.0f} µs")

# %% [markdown]
# Both help a little. Do they always? Three SMs, any two of which fill a memory of 100 bytes
# a second. A and B, 100 bytes each, come first; C and D wait for both, C behind A on the
# first SM, D alone on the third. Each takes a second more than its bytes. D's SM has time,
# and fetches early.

# %% tags=["claim", "row-26"]
from minifer.perf.timeline.model import Machine, Task

a, b = (Task(name, weights=100, signal=0) for name in "AB")
c, d = (Task(name, weights=100, wait=0, target=2) for name in "CD")
for early in (0, 100):
    chip = Machine(3, 100.0, program_bandwidth=50.0, overhead=1.0, prefetch=early)
    print(f"{early:3} bytes early: {simulate([[a, c], [b], [d]], chip).seconds:.0f} s")

# %% [markdown]
# A second later. The early bytes took bandwidth from those for whom everybody waits.
#
# ## What takes the place of a launch?
#
# A launch orders things: all of this kernel after all of that one. Inside one kernel every
# SM walks a queue of **instructions** with a small interpreter. An instruction may wait
# until a **counter** (a semaphore) has reached a target, and adds to a counter when it is
# done. Here is such an interpreter; look at how it finds that nobody can go on.

# %% tags=["claim"]
from collections import Counter, namedtuple

Toy = namedtuple("Toy", "name wait target signal")


def interpret(queues):
    """The order in which instructions end, and the first of each stuck queue."""
    counters, place, order = Counter(), [0] * len(queues), []
    while True:
        heads = [(i, q[place[i]]) for i, q in enumerate(queues) if place[i] < len(q)]
        able = [(i, toy) for i, toy in heads if counters[toy.wait] >= toy.target]
        if not able:
            return order, [toy.name for _, toy in heads]
        i, toy = able[0]
        counters[toy.signal] += 1
        place[i] += 1
        order.append(toy.name)


# %% [markdown]
# By hand: an MLP on two SMs. `up0` and `up1` each make half of the hidden vector; `down0`
# and `down1` need all of it, so they wait for 2. Three cases: as it should be; with `down1`
# in front of `up1`; with a target of 1. Which one hangs, and which is worse?

# %% tags=["claim"]
up = [Toy(f"up{i}", "", 0, "up") for i in range(2)]
down = [Toy(f"down{i}", "up", 2, "down") for i in range(2)]
early = [toy._replace(target=1) for toy in down]
for name, queues in {
    "sound": [[up[0], down[0]], [up[1], down[1]]],
    "swapped": [[up[0], down[0]], [down[1], up[1]]],
    "target 1": [[up[0], early[0]], [up[1], early[1]]],
}.items():
    order, stuck = interpret(queues)
    print(f"{name:>8}: {' '.join(order):20} stuck: {' '.join(stuck) or 'nobody'}")

# %% [markdown]
# Swapped, both SMs wait for ever: a **deadlock**. With a target of 1, `down0` ran before
# `up1` and read a half that nobody had written: a **race**. It ends, and is wrong now and
# then, which is worse.
#
# minifer's instructions are sixteen numbers: what to do, on which layer and tiles, wait,
# target, signal. Here are the queues of minifer-tiny's first layer on 4 SMs. Look for the
# counter that attention waits for.

# %% tags=["picture"]
from minifer.course.pictures import megakernel_run as runs
from minifer.course.pictures import megakernel_step as step
from minifer.kernels.mega.schedule import assign, build

one_layer = assign(build(replace(step.tiny_shape(), layers=1), 4), 4)
title = "Counters say when; queues say who, and in which order"
show(
    runs.queues_figure(one_layer, title=title),
    alt="Four queues of seven instructions, each with the counter it waits for.",
)

# %% [markdown]
# On the GPU the interpreter is the same loop ([kernel.py](../kernels/mega/kernel.py)):
#
# ```python
# while op != HALT:
#     ...                                     # ask for the first weights
#     wait_for(COUNTERS, counter, target)     # poll, with acquire
#     ...                                     # one of ten operations
#     signal(COUNTERS + to * STRIDE, amount)  # barrier, then add, with release
# ```
#
# To poll is to read until the counter is there; who reads a *release* with *acquire* sees all
# that was written before it. One program an SM, one launch a step. All must be on the chip at
# once: a program that has not started cannot signal.
#
# Any order that respects the counters should give the same logits, bit for bit, since each
# sum is taken in one fixed order. The kernel's slow twin runs a schedule one instruction
# at a time, and checks what each touches. Six random schedules of A's step, each in a
# random order:

# %% tags=["claim"]
graph = build(step.tiny_shape(), 4)
logits = [
    step.run_reference(assign(graph, 4, "random", seed=i), seed=i) for i in range(6)
]
print("all bits equal:", all(torch.equal(logits[0], other) for other in logits))
print("those of the model, to 1e-4:", step.step_of_a().error(logits[0]) < 1e-4)

# %% [markdown]
# The same bits six times. Exercise 12.2 makes such schedules, 12.3 their counters.
#
# ## Who says that it cannot hang?
#
# Six orders are six of very many. So minifer *proves* a schedule, without running it
# ([verify.py](../kernels/mega/verify.py)):
#
# 1. every target is the sum of *all* that is ever added to its counter;
# 2. queues and counters together have no circle (as a graph: no cycle);
# 3. every piece of the step is done once;
# 4. of two instructions that touch the same memory, one of them writing, the earlier one
#    in the model happens before the other.
#
# From 1 and 2 follows that it ends: of what is not done, take the first in a topological
# order; all it waits for is done, so it can run. From 3 and 4 follows that it computes
# what the model computes. Two layers of Llama 1B on an H100:

# %% tags=["claim"]
from minifer.kernels.mega.verify import verify

two = decode_shape(replace(MODELS["llama-1b"], num_layers=2), splits=2)
report = verify(assign(build(two, 132), 132))
print("proved:", report.ok)
print(f"{report.num_instructions:,} instructions, {report.num_pairs:,} pairs in order")
print("longest chain, each after the one before:", report.critical_path)

# %% [markdown]
# Proved, pair by pair. Now break it. In minifer-tiny's schedule for 3 SMs one DOWN is
# changed in three ways; it multiplies what three GATE_UPs have made. Say for each whether
# it hangs or races.

# %% tags=["claim"]
from minifer.kernels.mega.isa import Op

sound = assign(build(step.tiny_shape(), 3), 3)
edits = {
    "no wait": step.edited(sound, Op.DOWN, wait=-1, target=0),
    "target 4 for 3": step.edited(sound, Op.DOWN, target=4),
    "target 2 for 3": step.edited(sound, Op.DOWN, target=2),
}
for name, broken in edits.items():
    text = f"{name}: {verify(broken).errors[0]}"
    print(textwrap.fill(text, 84, subsequent_indent="    "))

# %% [markdown]
# A race (not the one you expected? DOWN also writes x, which GATE_UP may still be reading),
# a deadlock, and a partial wait: timing decides which of the three is not waited for.
# minifer keeps a list of such faults, after public bug reports. How many does the proof miss?

# %% tags=["claim"]
from minifer.kernels.mega.mutants import MUTANTS, mutate

whole = assign(build(step.tiny_shape(splits=2, batch=2), 3), 3)
verdicts = {name: verify(mutate(name, whole)).errors for name in MUTANTS}
kinds = Counter(errors[0].split(":")[0] for errors in verdicts.values() if errors)
print(f"{len(MUTANTS)} broken schedules, {len(MUTANTS) - kinds.total()} missed")
print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))

# %% [markdown]
# None. The proof trusts one thing: that an instruction touches what it says it touches.
#
# ## What does a race look like when it runs?
#
# A **co-simulator** runs the Triton kernel itself, all programs at once, on this CPU. They
# take turns at polls, signals, loads and stores; a seed decides. Every access is compared
# with what others did before (vector clocks, what each has seen of the others: Fidge
# 1988, Mattern 1989), so a race is found even when nothing went wrong this time. One SM is kept late on purpose: SM 0, which has
# the changed DOWN, or SM 1, which has a GATE_UP. Look at the second line.

# %% tags=["claim"]
from minifer.kernels.cosim.simulate import Interleaving

late = {i: Interleaving("priority", seed=0, starve=i) for i in (0, 1)}
watched = {
    "sound, SM 1 late": step.watch(sound, late[1]),
    "no wait, SM 0 late": step.watch(edits["no wait"], late[0]),
    "no wait, SM 1 late": step.watch(edits["no wait"], late[1]),
    "target 4, SM 1 late": step.watch(edits["target 4 for 3"], late[1]),
}
for name, seen in watched.items():
    print(f"{name}: {seen.verdict}")

# %% [markdown]
# With SM 0 late every logit is right, and the race is found all the same: no test of outputs
# could. The deadlock is named, not waited for. In the co-simulator's words (whoever came
# second "did not wait", whatever the cause):

# %% tags=["claim"]
result = watched["no wait, SM 1 late"].result
races = [race for race in result.races if (race.kind, race.buffer) == ("WAR", "HIDDEN")]
place = result.races.index(races[0])
print(textwrap.fill(result.reasons[place].split(": ", 1)[1], 84))

# %% [markdown]
# WAR: a write after a read that should have come after it. Here is the moment. Pale is an
# instruction that has begun, strong is when it runs.

# %% tags=["picture"]
title = "DOWN has read all of the vector before GATE_UP, on the late SM, has written"
show(
    runs.interleaving_figure(result, edits["no wait"], races[0], title=title),
    alt="Three programs in turns. A framed DOWN on SM 0 has ended before a framed "
    "GATE_UP on SM 1, whose result it should have read, runs.",
)

# %% [markdown]
# ## How near is the speed of light?
#
# A step of Llama 3.2 1B reads 2.47 GB: over 3.35 TB/s, 738 µs. What do 72 % and 78 % of the
# bandwidth mean in time, and which is below the millisecond that was announced?

# %% tags=["claim", "row-25"]
from minifer.claims.speed_of_light import POST_SHARE, TALK_SHARE

for who, share in (("talk", TALK_SHARE), ("blog", POST_SHARE)):
    print(f"{who}: {share:.0%} of the bandwidth, {data.FLOOR_US / share:,.0f} µs")

# %% [markdown] tags=["row-25", "correction-4"]
# 72 % is reported from the talk's slide, 78 % from the blog of the same group: two figures,
# not one, and only the second is below a millisecond. Nor is a megakernel the only way
# there. A [study](https://github.com/msaroufim/megakernels-vs-cuda-graphs) (September 2026) timed it
# again beside some 100 ordinary kernels in a CUDA graph with **PDL** (programmatic dependent
# launch: a kernel may begin, and fetch weights, before the one in front of it has ended).
# All in one unit, with minifer's *model* beside them:

# %% tags=["picture", "row-25"]
pdl = data.step_time(ways.panel(ways.FUSED_PDL, llama, h100, context=512))
modelled = {t.name: t.total for t in (times[1], pdl, times[3])}
title = "One kernel and a good graph are neighbours; engines were at half"
show(
    pictures.published_figure(data.published(modelled), title=title),
    alt="Times of a decode step: floor 738 µs; reported 946 (78 %), 973, 980 (graph, "
    "PDL), 1,025 (72 %), 1,476 or more (engines); three modelled ones between.",
)

# %% [markdown]
# What the study reports for two chips:

# %% tags=["claim", "row-25"]
for chip in ("H100-SXM", "H200-SXM"):
    graph_us, mega_us = data.study(chip)
    print(f"{chip}: {graph_us} and {mega_us} µs, {graph_us / mega_us - 1:.1%} apart")

# %% [markdown]
# One per cent on an H100, five on an H200. For another model, on a third chip, a
# megakernel was 3 % *slower* than its graph. And what has minifer's own kernel measured?
# (From `lectures/results/`, not compared.)

# %% tags=["measure"]
from pathlib import Path

lines = data.measured_steps(Path("results"))
print("\n".join(lines) or "no step has been timed on a GPU yet: see .ci/gpu")

# %% [markdown]
# A modelled share is no result. The model needs an overhead that no data sheet states: at
# 0.5 µs an instruction it promises over 90 %, at 2.5 µs under 80
# ([tables](results/modelled_bandwidth.md)).
#
# ## Where does it lose?
#
# First the schedule, on four layers of Llama 1B (modelled): counters against a barrier of
# all SMs after each operation, and instructions half as large. What do you expect?

# %% tags=["claim"]
short = decode_shape(replace(MODELS["llama-1b"], num_layers=4), splits=2)
for way, pieces in ((ways.COUNTERS, 1), (ways.GRID, 1), (ways.COUNTERS, 2)):
    panel = ways.panel(way, short, h100, 512, policy="round_robin", pieces=pieces)
    took = f"{panel.timeline.seconds * 1e6:.0f} µs"
    print(f"{way}, {pieces} an SM and operation: {took}")

# %% [markdown]
# Counters gain nothing over barriers *here*: nearly every wait is for a whole operation,
# and the model charges both the same. They pay where an instruction needs less than all of
# the operation before. And smaller instructions pay the overhead twice.
#
# Then the edges. A tile of the tensor cores (units for products) has room for 16 requests.
# Look at what is said to a
# 17th, by the fused product and the megakernel, and to a model that norms its queries (as
# Qwen3 does).

# %% tags=["claim", "row-28"]
config = example.tiny().config
for attempt in (
    lambda: norm_gemv.norm_gemv(torch.randn(17, 192), norm, eps, weight),
    lambda: decode_shape(config, batch=17),
    lambda: decode_shape(replace(config, qk_norm=True)),
):
    try:
        attempt()
    except ValueError as error:
        print(textwrap.fill(str(error), 84, subsequent_indent="    "))

# %% [markdown] tags=["row-28"]
# Another model, another chip, one request more: each is new work. The talk puts it at a
# year of a strong engineer for one GPU, two or three models and batches of 1 to 16; at 17,
# "start over" (reported). A prompt is no case either: launches are 1 % of it (above). For a
# step with a prompt in it minifer goes back to ordinary kernels.

# %% [markdown]
# ## Takeaways
#
# - Launches cost as much as a step is short: a fifth at 1B and one request, 1 % of a prompt.
# - Fusing in decode saves launches, hardly bytes.
# - The next kernel waits for the last block; cut work evenly, and not into dust.
# - What depends on nothing can be fetched early: weights, and the KV of earlier tokens.
# - Counters replace launches; a target is the sum of all that is added.
# - A right token proves nothing: prove the schedule, and watch the kernel.
# - A megakernel and a good CUDA graph with PDL are within a few per cent.
#
# ## Questions
#
# **1.** 32 layers, 5 kernels each, 2 µs a launch, a step of 4 ms. Which part are launches?
#
# <details><summary>Answer</summary>
#
# 32 · 5 · 2 µs = 320 µs: 8 %.
#
# </details>
#
# **2.** 10 equal blocks of 3 µs on 4 SMs. When can the next kernel start, and which share of
# the SMs' time was used?
#
# <details><summary>Answer</summary>
#
# Three waves: 9 µs. 30 of 36 µs: 83 %.
#
# </details>
#
# **3.** Three instructions add 1, 1 and 2 to a counter. Which target must those have who
# wait for it?
#
# <details><summary>Answer</summary>
#
# 4, the sum. With 3 the last of them might not be waited for; with 5 it hangs.
#
# </details>
#
# **4.** SM 0 has the queue a, b; SM 1 has c, d. a waits for d, c waits for b. What happens?
#
# <details><summary>Answer</summary>
#
# A circle: a before b, b before c, c before d, d before a. Nobody can start.
#
# </details>
#
# **5.** A step of 1.2 GB takes 500 µs on a chip of 3 TB/s. Which share of the speed of light
# is that?
#
# <details><summary>Answer</summary>
#
# The floor is 400 µs: 80 %.
#
# </details>
#
# The numbers, checked.

# %% tags=["claim"]
print("1.", f"{32 * 5 * 2e-6 / 4e-3:.0%}" == "8%")
ten = data.attention({str(i): 3 for i in range(10)}, num_sms=4)
print("2.", ten.end == 9, f"{ten.busy:.0%}" == "83%")
print("3.", 1 + 1 + 2 == 4)
circle = [[Toy("a", "d", 1, "a"), Toy("b", "", 0, "b")]]
circle += [[Toy("c", "b", 1, "c"), Toy("d", "", 0, "d")]]
print("4.", interpret(circle) == ([], ["a", "c"]))
print("5.", f"{1.2e9 / 3e12 / 500e-6:.0%}" == "80%")

# %% [markdown] tags=["row-27"]
# All hold.
#
# ## In real engines
#
# - [Megakernels](https://github.com/HazyResearch/Megakernels) (Hazy Research) is the blog's
#   kernel: a counter for most operations, a warp of its own for loads. It is CUDA on
#   [ThunderKittens](https://github.com/HazyResearch/ThunderKittens), which gives control
#   over shared memory and warps that Triton does not.
# - [Mirage](https://github.com/mirage-project/mirage) compiles a model into one kernel; its
#   counters are never reset: targets grow with each launch.
# - [AutoMegaKernel](https://arxiv.org/abs/2606.09682) checks schedules without a GPU, and
#   reports where it is slower than CUDA graphs.
# - vLLM and SGLang run fused kernels in CUDA graphs.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 12.1 | [Waves and tails](../exercises/ex12_megakernel.ipynb) | 4 | 20 |
# | 12.2 | [A schedule that does not hang](../exercises/ex12_megakernel.ipynb) | 8 | 40 |
# | 12.3 | [Counters for every dependency](../exercises/ex12_megakernel.ipynb) | 6 | 25 |
# | 12.4 | [A norm inside a product](../exercises/ex12_megakernel.ipynb) | 6 | 15 |
#
# ## Where to read on
#
# 1. [isa.py](../kernels/mega/isa.py): what an instruction is, and what it touches.
# 2. [schedule.py](../kernels/mega/schedule.py): who does what, in four policies.
# 3. [verify.py](../kernels/mega/verify.py): the proof, with its theorem.
# 4. [kernel.py](../kernels/mega/kernel.py), [project.py](../kernels/mega/project.py): the
#    kernel.
# 5. [simulate.py](../kernels/cosim/simulate.py): many programs at once on a CPU.
# 6. [model.py](../minifer/perf/timeline/model.py): the model of time.
