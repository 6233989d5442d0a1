# %% [markdown]
# # L14 · Scaling laws for recurrence, and closing the loop
#
# A loop model runs its middle layers T times with the same weights (L13). More loops cost
# arithmetic, keys and values, and time; what do they buy? This lecture reads the curves,
# fits the laws, asks how sure they are, and chooses a depth for a budget. Then the book
# ends where it began: with what one token costs.
#
# 60 minutes of reading, 280 minutes of exercises (190 of them the capstone). Needs L01
# (costs) and L13 (the loop), the capstone L03 to L05 too; no GPU, no network.
#
# After it you can
#
# - **read** curves at equal parameters and at equal FLOPs, and say what each compares;
# - **fit** a power law and a saturating law, with an error on points the fit never saw;
# - **put** a band around a fitted exponent, and **refuse** one that the data do not hold;
# - **choose** the number of loops for a budget of time, bytes or joules;
# - **predict** the cost of each stage of a token's life before you measure it.

# %% [markdown]
# ## Where is the token now?
#
# ![Life map of a request with its start lit, before the first of five
# stages](figures/life_map_start.svg)
#
# Before the next one enters, somebody decides how deep it will be
# thought about. The next cell sets up and prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import numpy as np

from minifer.course.pictures import scaling
from minifer.course.pictures import scaling_data as lab

begin("L14")

# %% [markdown]
# ## What does a loop cost in training?
#
# The smallest published model, parcae-140m, has 2 layers before the loop, 2 in it and 2
# behind it. Eight loops make 2 + 8 · 2 + 2 = 20 layers of arithmetic out of 6 layers of
# weights. In training half of the loops carry a gradient. A forward pass is 2 FLOPs a
# weight, with the way back it is 6. **By hand**, in layers: one loop costs 6 · 6 = 36. Eight
# loops cost 4 · 6 for the outer layers, 4 · 2 · 6 for four loops with a gradient and
# 4 · 2 · 2 for four without: 88. That is 2.4 times as much; head and readout, which
# run once, dilute it.
#
# What it buys is reported by the authors
# ([arXiv:2604.12946](https://arxiv.org/abs/2604.12946), April 2026, table 5): perplexity
# on held-out text, against a plain model of equal parameters and equal tokens. Look at
# both columns.

# %% tags=["claim"]
from minifer.parcae.lab.laws.flops import training_flops
from minifer.parcae.lab.laws.training_law import COMPARISONS
from minifer.parcae.presets import PRESETS

for row in COMPARISONS:
    config = PRESETS[row.size]
    price = training_flops(config, 8) / training_flops(config, 1)
    before, after = row.transformer_perplexity, row.parcae_perplexity
    print(f"{row.size}: perplexity {before} → {after},", end=" ")
    print(f"{price:.2f} times the FLOPs a token")

# %% [markdown]
# Better at every size, and each token of training costs 2.0 to 2.4 times as much
# (computed). Both are true; they answer different questions.
#
# - **Iso-parameter**: equal weights, equal tokens. *I have this much memory.*
# - **Iso-FLOP**: equal arithmetic in training. *I have this much money.*
#
# ## What do the two kinds of curves say?
#
# The authors fit a law to 36 models of this size:
#
# $$L(\mu, D) = E + X\,N(\mu)^{-x} + Y\,D^{-y}$$
#
# μ is the mean number of loops in training, D the tokens, N(μ) the parameters with the
# core counted μ times. At equal D, more loops can only help: N grows. At equal FLOPs
# they cost tokens, so D falls. **Draw** for yourself how the second curve must look
# before you see it.

# %% tags=["picture"]
title = "Loops are free only when nobody counts the FLOPs (law as reported)"
budgets = 1e18, 4e18, 16e18
show(
    scaling.iso_figure("parcae-140m", 11.2e9, budgets, title=title),
    alt=scaling.ALT["iso"],
)

# %% [markdown]
# On the left a curve that only falls. On the right a valley, and the valley moves: who
# has more to spend should spend some of it on loops. The same as numbers.

# %% tags=["claim"]
mus = range(1, 13)
losses = lab.iso_parameter("parcae-140m", mus, 11.2e9)
print("equal tokens: each loop helps:", losses == sorted(losses, reverse=True))
for budget in budgets:
    losses = lab.iso_flop("parcae-140m", mus, budget)
    best = min(mus, key=lambda mu: losses[mu - 1])
    print(f"{budget / 1e18:2.0f}e18 FLOPs: lowest at μ = {best}, an edge:", best == 12)

# %% [markdown]
# At the largest budget the lowest point is the last one tried. **An edge is not a
# minimum.** The law may fall further, or the form may be wrong there. (It was fitted on
# 2 to 12 loops, and the table in the paper says 8 where the law says 12 or more.)
#
# ## How is an exponent found?
#
# Take budgets of 1, 4 and 16, and best depths of 2, 4 and 8. Four times the budget, twice
# the depth: each time. So depth grows like the square root, μ* ∝ C^0.5. On logarithmic
# axes that is a straight line of slope 0.5, and a straight line is what least squares
# can fit. Look for the hand-made 0.5, and whether the library agrees.

# %% tags=["claim"]
from minifer.parcae.lab.laws.fits import fit_power_law


def exponent(x, y):
    """The slope of a straight line through the logarithms, by least squares."""
    u, v = (np.log(values) - np.log(values).mean() for values in (x, y))
    return float(u @ v / (u @ u))


print(f"by three points: {exponent([1, 4, 16], [2, 4, 8]):.2f}")
rng = np.random.default_rng(14)
for points in range(3, 9):
    x = np.geomspace(1, 64, points)
    y = x**0.4 * rng.lognormal(0, 0.2, points)
    assert abs(exponent(x, y) - fit_power_law(x, y).exponent) < 1e-9
print("the library finds the same on noisy data")

# %% [markdown]
# A protocol deserves a test in which the truth is known. So we *make* an experiment: six
# budgets, seven depths, losses that form a valley in log μ around a best depth of
# 2 · (C / C₀)^0.40, and noise of 0.003 nats on each. The protocol of the paper must find
# 0.40 back: a parabola for each budget, its lowest point, a line through the logarithms.

# %% tags=["picture"]
title = "Six valleys, six lowest points, one exponent (generated data)"
show(
    scaling.protocol_figure(lab.generated(0.40, noise=0.003, seed=0), title=title),
    alt=scaling.ALT["protocol"],
)

# %% [markdown]
# It finds 0.38. How far off may one such experiment be? Look at three true exponents, 50
# experiments each, and the largest error. Which of the three should be the hardest? (At
# the largest budget, 64 times the smallest, the best depth is 2 · 64^p.)

# %% tags=["claim", "row-34"]
for truth in (0.25, 0.40, 0.55):
    found = [lab.generated(truth, 0.003, seed).law().exponent for seed in range(50)]
    off = max(abs(p - truth) for p in found)
    print(f"true {truth:.2f}: mean {np.mean(found):.2f}, largest error {off:.2f}")

# %% [markdown]
# On average the protocol recovers what was put in. With 0.55 the best depth ends at 20,
# beyond the 12 that were tried: the parabola extrapolates, and the error is the largest.
# (Kept on purpose; our lab refuses it.)
#
# Why logarithms? Depths that are off by 20 % each are equally good measurements, at 2
# loops and at 10. Without logarithms the large ones shout. **Guess** how much wider the
# answers scatter then.

# %% tags=["claim"]
ratios = np.array(lab.BUDGETS) / lab.BUDGETS[0]
logs, plain = [], []
for _ in range(200):
    depths = 2 * ratios**0.4 * rng.lognormal(0, 0.2, len(ratios))
    logs.append(exponent(ratios, depths))
    plain.append(lab.line_fit(ratios, depths))
print("scatter with logarithms below 0.08:", np.std(logs) < 0.08)
print("without them at least 1.2 times as wide:", np.std(plain) > 1.2 * np.std(logs))

# %% [markdown]
# Same data, same law; the wrong space throws a good part of the data away.
#
# ## How sure is it?

# %% [markdown] tags=["row-34"]
# The talk that this book grew from says: *more data, more recurrence*. The paper's
# numbers (reported, section 5.2): μ* ∝ C^0.40 at 140 M parameters and C^0.38 at 370 M,
# D* ∝ C^0.77 to C^0.78. Its table 6 prints the best depth of each budget, rounded to
# the depths that were tried. Six points for the smaller model: 2, 2, 4, 6, 8 and 10
# loops.
#
# Two questions to any fit. What does it say of a point it has *not seen*? We hide the last
# budget. And how much would it change with other points? We **bootstrap**: draw six of
# the six with replacement, fit, repeat 400 times, keep the middle 90 %. Write down both
# answers first.

# %% tags=["claim", "row-34"]
from minifer.parcae.lab.laws.training_law import ISOFLOP_ROWS

table = [(row.budget, row.mu) for row in ISOFLOP_ROWS if row.size == "parcae-140m"]
law = fit_power_law(*zip(*table, strict=True))
guess = fit_power_law(*zip(*table[:-1], strict=True))
budget, hidden = table[-1]
low, high = lab.exponent_band(table)
print(f"all six points: μ* ∝ C^{law.exponent:.2f} (reported: 0.40)")
print(f"five points: C^{guess.exponent:.2f}; at {budget / 1e18:.0f}e18 FLOPs", end=" ")
print(f"it says {float(guess(budget)):.0f} loops, the table says {hidden}")
print(f"90 % of the resampled fits: {low:.2f} to {high:.2f}")

# %% [markdown]
# The reported exponent lies in the band. The band is wide, and one point moves the answer
# more than the second digit is worth: five points miss the sixth by far. A law from
# six points on a grid says *that* depth should grow, hardly how fast.
#
# And which FLOPs? The best D is C over the cost of a token. Embedding tables are looked
# up, not multiplied; the head multiplies. The authors' script counts most of the tables and
# leaves out the head. What does each make of D*, given μ* ∝ C^0.40?

# %% tags=["claim", "row-34"]
from minifer.parcae.lab.laws.training_law import implied_tokens_exponent

for size in ("parcae-140m", "parcae-370m"):
    ours = implied_tokens_exponent(size)
    script = implied_tokens_exponent(size, script=True)
    print(
        f"{size}: D* ∝ C^{ours:.2f} by matrices that multiply, {script:.2f} by script"
    )

# %% [markdown]
# The reported 0.77 to 0.78 lie nearer to the count of what multiplies. The exponents of μ*
# and D* need not sum to 1: a token's cost is a fixed part plus a price a loop.
#
# ## What does our own lab say?
#
# We ran the protocol, small: a loop of one layer, width 32, 17 thousand parameters, on
# characters of Python's help topics; three budgets, four depths, three seeds (measured
# here, November 2026,
# [parcae_laws.md](results/parcae_laws.md)). **Predict** the best depth of each budget.

# %% tags=["claim", "row-34"]
from minifer.parcae.lab.laws.isoflop import by_budget
from minifer.parcae.lab.laws.isoflop import scaling as mu_law

budgets = by_budget(lab.lab_points())
for b in budgets:
    losses = ", ".join(f"{mean:.2f}" for mean in b.mean)
    print(f"{b.budget:.0e} FLOPs: losses {losses}; lowest at μ = {b.best};", end=" ")
    print("minimum inside:", b.parabola.inside)
print("a law of μ*:", mu_law(budgets))

# %% [markdown]
# One loop wins, at every budget we tried. No parabola has its minimum inside, so there is
# no μ* and no exponent: the library says `None`. That is the result: **the
# method can be shown here, the exponent cannot.**
#
# Can we say more? Fit a law of *tokens alone* to the three points of μ = 1. It knows
# nothing of loops. Let it predict the nine others: held-out points, of other depths.

# %% tags=["claim"]
tokens_law = fit_power_law([b.tokens[0] for b in budgets], [b.mean[0] for b in budgets])
others = [
    (n, m) for b in budgets for n, m in zip(b.tokens[1:], b.mean[1:], strict=True)
]
errors = [abs(float(tokens_law(n)) / m - 1) for n, m in others]
print(f"loss ∝ D^{tokens_law.exponent:.2f}; the nine others are within", end=" ")
print(f"{max(errors):.1%}, {np.mean(errors):.1%} on average")

# %% [markdown]
# A line through three points names nine others within 2 %, while at one budget the losses
# differ by 16 % and more. Look how they lie.

# %% tags=["picture"]
title = "In a small lab tokens explain the loss, and loops only use them up"
show(
    scaling.tokens_figure(budgets, tokens_law, title=title),
    alt=scaling.ALT["tokens"],
)

# %% [markdown]
# At this size a loop hardly changes what a token teaches; it makes the token dearer. (Two
# points of μ = 2 lie above the line by more than their seeds differ: there it hurt.)
# Characters need little depth. A task made of k steps needs about k loops ([the same
# report](results/parcae_laws.md)). What a small lab can show: the protocol, forms of
# curves, mistakes. What it cannot: where a curve goes at a million times its budget.
#
# ## When does one more loop stop helping?
#
# Now one trained model, run with T loops. Two candidates for its loss:
#
# | T | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|
# | 2 + ½^T | 2.50 | 2.25 | 2.125 | 2.0625 |
# | 2 + ½ / T | 2.50 | 2.25 | 2.167 | 2.125 |
#
# The first is an **exponential**: each loop halves what is left, and soon nothing is. The
# second is a **power law**: there is always something left. At two loops nobody can tell
# them apart. The lab trained with several ways to draw depth; here is the mean of three
# seeds, with both forms fitted on the depths up to μ and carried on. Move the slider.

# %% tags=["picture"]
settings = {
    "Poisson, μ = 8": ("poisson", 8),
    "Poisson, μ = 12": ("poisson", 12),
    "Poisson, μ = 4": ("poisson", 4),
    "constant, μ = 4": ("constant", 4),
    "constant, μ = 2": ("constant", 2),
}


def saturation(training):
    """The lab's curve; a fit needs at least four depths up to μ."""
    title = f"Depth drawn in training: {training}. What saturates has no tail"
    forms = "exponential", "power"
    return scaling.depth_figure(*settings[training], forms, title=title)


explore(saturation, alt=scaling.depth_alt, training=list(settings))

# %% [markdown]
# The power law promises gains that do not come. One curve is an anecdote; count over all
# curves that were trained with drawn depths. Which form predicts T > μ best?

# %% tags=["claim"]
from minifer.parcae.lab.laws.depth_law import fit_forms

wins = []
for curve in lab.lab_curves():
    beyond = {form: fit.beyond for form, fit in fit_forms(curve).items()}
    if curve.job.depth.startswith("poisson") and None not in beyond.values():
        wins.append(min(beyond, key=beyond.get))
print(f"exponential: {wins.count('exponential')} of {len(wins)} curves")

# %% [markdown]
# 11 of 12; the paper found the exponential best, too (reported, appendix L). So the gain
# of a loop falls by a constant factor each time, and by 2 μ loops at the latest nothing is left
# to gain. There may be something to lose: look at 24 loops against the best depth.

# %% tags=["claim"]
from minifer.parcae.lab.laws.depth_law import group

for g in group(lab.lab_curves()):
    loss = f"{g.overshoot:.3f} ± {g.overshoot_spread:.3f} nats"
    print(f"{g.depth:13} μ = {g.mu:2}: best at T = {g.best:2}, 24 loops lose {loss}")

# %% [markdown]
# Trained with 2 loops, a model loses by looping on: at a constant 2 by six times its seeds'
# spread, with drawn ones by less than two. Trained with 8 or 12 it does not.
#
# ## How many loops for a budget?
#
# Gains halve, costs do not. **By hand:** the loss is 2 + ½^T, a loop takes 1 ms, and a
# millisecond is worth 0.1 nats to us. The second loop gains 0.25, the third 0.125, the
# fourth 0.0625. We stop at three. For a loss L∞ + Z e^(−zT) (here Z = 1,
# z = ln 2) one more loop after T gains Z (1 − e^(−z)) e^(−zT); loop while that is above its price. Should a nat become worth ten
# times as much, this buys ln 10 / z loops more: a *fixed number*, here 3.3.
#
# Now a real model. parcae-tiny ships with minifer: one layer, looped 8 times. First
# the cost: how often does the engine apply the core, and what does a token leave behind?
# Predict both from T alone, for 12 tokens of request A.

# %% tags=["claim"]
from minifer import SamplingParams
from minifer.parcae.costs import kv_bytes_per_token
from minifer.weights.resolve import load_model

loop_model = load_model("parcae-tiny", dtype="float32")
only_a = {"A": example.TRIO["A"]}
greedy = SamplingParams(temperature=0, ignore_eos=True)
for T in (1, 2, 4, 8):
    run = example.run(only_a, model=loop_model, sampling=greedy.with_(num_loops=T))
    steps = [e.data for e in run.events if e.name == "step.forward"]
    applied = sum(data["core_applications"] for data in steps)
    same = applied == T * len(steps)
    kv = kv_bytes_per_token(loop_model.config, T, element_bytes=4)
    print(f"T = {T}: {len(steps)} steps, T core applications each: {same};", end=" ")
    print(f"{kv:,.0f} bytes of KV a token")

# %% [markdown]
# Depth multiplies arithmetic *and* memory: every loop keeps keys and values of its own.
# What does it buy? The server was measured at each depth, and with early exit, where a
# token leaves when its state stops turning (measured here, November 2026,
# [parcae_tradeoff.md](results/parcae_tradeoff.md)).

# %% tags=["picture"]
tradeoff = lab.lab_results("parcae_tradeoff")
title = "Four loops are a bargain; four more cost twice as much and gain little"
show(
    scaling.pareto_figure(tradeoff["tradeoff"], title=title),
    alt=scaling.ALT["pareto"],
)

# %% [markdown]
# A curve like L07's: left of the bend a loop buys much, right of it you pay for
# digits. A budget picks the point: the lowest loss among the depths that it pays for.
# (Timed were 1, 2, 4 and 8: 1.89, 2.67, 3.98 and 8.02 ms. A straight line through them
# says what the others cost.) Look at the last budget.

# %% tags=["claim"]
losses, costs, (a, b) = lab.measured_depths()
print(f"a token: about {a:.1f} ms, and {b:.1f} ms a loop, on the machine of the report")
for limit in (1, 2, 4, 8, 16):
    T = lab.cheapest(costs, losses, limit)
    answer = f"{T} loops, loss {losses[T]:.3f}" if T else "no depth is cheap enough"
    print(f"at most {limit:2} ms a token: {answer}")

# %% [markdown]
# With 16 ms one should still take 8 loops: 12 and 16 cost more and are *worse* here, by
# some 0.005 nats. The best depth at an unlimited budget is finite.
#
# ## Who pays for a loop?
#
# On a GPU a token alone waits for bytes (L01), and a looped weight is the same byte read
# again. If the core fits on the chip, it need not be. Parcae-140m, bfloat16, one request
# with 512 tokens of context on an H100 (modelled: a floor, no launches, joules at full
# power). Which columns will residency change?

# %% tags=["claim"]
from minifer.perf.devices import DEVICES

h100, depths = DEVICES["H100-SXM"], (1, 2, 4, 8, 16)
again = lab.serving("parcae-140m", h100, depths, 512)
kept = lab.serving("parcae-140m", h100, depths, 512, resident=True)
print("loops   read again: µs, mJ   kept: µs, mJ   KV kB a token")
for x, y in zip(again, kept, strict=True):
    times = f"{x.seconds * 1e6:13.0f} {x.joules * 1e3:6.0f}"
    times += f"{y.seconds * 1e6:9.0f} {y.joules * 1e3:5.0f}"
    print(f"{x.loops:5} {times} {x.kv / 1e3:15.0f}")

# %% [markdown]
# At 8 loops keeping the core saves more than half of the time. It changes nothing about
# KV, which no chip keeps: the last column grows with T whatever one does. With long
# contexts or many requests KV is most of what is read, and a loop costs nearly its full
# price again. (A [timeline model](results/loop_resident.md) adds launches, which cost
# such a small model more than either.)
#
# Is it worth it? We need quality in the same unit. An independent group trained 116
# models ([arXiv:2604.21106](https://arxiv.org/abs/2604.21106), reported) and found that r
# loops of a core are worth r^0.46 cores of a plain model. So 8 loops of a core are as good
# as 8^0.46 = 2.6 cores, for the arithmetic of 8. Let us assume it holds for Parcae. (That
# is kind: with gradients through part of the loops only, as here, they found 0.38.) Tables
# and head are left out.

# %% tags=["claim"]
rows = lab.worth("parcae-140m", depths)
for row in rows:
    print(f"{row.loops:2} loops: as good as {row.quality:.2f} times the size;", end=" ")
    print(f"FLOPs {row.flops:.2f}, bytes {row.read:.2f}, or {row.resident:.2f} if kept")

# %% [markdown]
# Three verdicts from one table, drawn below: quality grows faster than memory, and slower
# than arithmetic.

# %% tags=["picture"]
title = "A loop beats bytes that are kept, and loses to bytes read again"
show(scaling.worth_figure(rows, title=title), alt=scaling.ALT["worth"])

# %% [markdown]
# - **Memory is short** (a phone, or a core in L2): loop. Quality comes without bytes.
# - **Arithmetic or traffic is short** (training, large batches): a plain model of the
#   same cost is better, by this law.
# - **KV is short** (long contexts): every loop stores its own; share slots (L13), or do
#   not loop.
#
# ## What speaks against it?
#
# All reported, by others and by the authors. Look right of the trained depth.

# %% tags=["picture"]
title = "Bounded is not useful: more loops than in training can ruin a model"
show(scaling.evidence_figure(title=title), alt=scaling.ALT["evidence"])

# %% [markdown]
# Sources: [OpenMythos#28](https://github.com/kyegomez/OpenMythos/issues/28),
# [#58](https://github.com/kyegomez/OpenMythos/pull/58); a third party's runs of
# [Ouro](https://arxiv.org/abs/2510.25741). Stability (L13) bounds the state; it does not
# make it better. And the paper's own table 6, at equal FLOPs: how often does the best μ
# score *below* one loop on its benchmark?

# %% tags=["claim"]
from minifer.parcae.lab.laws.counter_evidence import (
    equivalent_parameters,
    rows_that_lose,
)

lost = rows_that_lose()
print(f"{len(lost)} of {len(ISOFLOP_ROWS)} rows lose to one loop on Core:")
for row in lost:
    print(
        f"  {row.size} at {row.budget / 1e18:.0f}e18: {row.looped[0]} < {row.fixed[0]}"
    )
once, core = 220e6, 190e6  # by hand: 410M in all, looped 4 times
print(f"worth {equivalent_parameters(once, core, 4) / 1e6:.0f}M,", end=" ")
print(f"costs like {equivalent_parameters(once, core, 4, phi=1) / 1e6:.0f}M")

# %% [markdown]
# Four of nine, mostly at the small budgets. (The paper's claim at equal FLOPs is about
# *loss*, and about the larger budgets; both can be true.) The last line is the
# independent group's example: 410 million parameters, looped four times, are worth about
# 580 and cost about 1,000. (The split is ours, chosen to meet their numbers.)
#
# ## One token, five stages: did the book predict it?
#
# Fourteen lectures built a model of what a request costs. Here are A, B and C for the
# last time. Below stands, from earlier lectures, what each stage must do, worked out
# from prompt lengths 20, 29 and 18, 12 + 9 + 6 tokens wanted, blocks of 8 and a budget
# of 16. **Cover the output** and do it yourself.

# %% tags=["claim"]
from minifer.course.pictures import closing
from minifer.perf.costs import kv_bytes_per_token as plain_kv

did, kv = closing.counts(), plain_kv(example.tiny().config, 4)
facts = {
    "1 scheduling: A's prompt is cut at 16": did.chunks == [(0, 16), (16, 20)],
    "1 scheduling: 2 steps of prompt, then 11": did.steps == 2 + 11,
    "2 KV: B finds A's two full blocks": did.hits == {"B": 16},
    "3 prefill: 20 + 13 + 18, and 11 + 8 + 5": did.computed == 51 + 24,
    "4 decode: each leaves keys and values": did.kv_bytes == 75 * kv,
    "4 decode: 27 draws": did.draws == 12 + 9 + 6,
    "5 text: a piece for each": did.pieces == 27,
}
for fact, holds in facts.items():
    print(f"{fact}: {holds}")

# %% [markdown]
# Seven times True: counts are predicted to the unit. A's token at position 24 under the
# microscope, once more (not compared).

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "A", position=24, stage="postprocessing")

# %% [markdown]
# And *time*? The roofline gives a floor (L01). A prediction needs prices, measured on
# *other* requests, so that A's time is held out: a fixed part a step, and a price for what
# each part handles (requests, new blocks, tokens, or draws).

# %% tags=["picture"]
from minifer.perf.limit import this_machine

prices = closing.price_list(closing.measure(closing.OTHERS))
steps = closing.measure(example.TRIO)
found = closing.life("A", steps, prices)
floor = closing.floors("A", steps, example.tiny().config, this_machine(seconds=0.5))
title = "Running the model is nearly all of a token's time"
show(closing.life_figure(found, floor, title=title), alt=closing.ALT)

# %% [markdown]
# The prices were learned from requests d to h, and A was not among them. How far off are
# they, stage by stage? (This machine's numbers, not compared.)

# %% tags=["measure"]
for stage, (predicted, measured) in found.items():
    times = f"predicted {predicted * 1e3:6.2f} ms, measured {measured * 1e3:6.2f} ms"
    print(f"{stage:15} {times}, off by {predicted / measured - 1:+.0%}")
whole = [sum(pair[place] for pair in found.values()) for place in (0, 1)]
print(f"A's whole life: off by {whole[0] / whole[1] - 1:+.0%}")

# %% [markdown]
# Compare the errors with the distance to the floor. A list of twelve prices names the time
# of requests it has never seen; the roofline says how much of it physics asks for. What
# lies between is all that an engine does, and all that is left to do.
#
# ## Takeaways
#
# - Equal parameters, equal tokens, equal FLOPs, equal bytes: four questions. Say which.
# - Power laws are fitted in logarithms, judged on hidden points, reported with a band.
# - An edge is no minimum. `None` is a result.
# - The loss of one model saturates exponentially in loops, near its training depth.
# - A loop buys quality for no memory, and pays in arithmetic, KV and time.
# - Counts can be predicted exactly, times with prices, and a floor from the shapes.
#
# ## Questions
#
# **1.** The best depth is 3 at a budget of 1 and 12 at a budget of 256. Which exponent?
#
# <details><summary>Answer</summary>
#
# log 4 / log 256 = 1/4.
#
# </details>
#
# **2.** A loss is 1 + 2^(1 − T). A loop costs 1 ms, and we pay at most 0.2 nats for a
# millisecond. How many loops?
#
# <details><summary>Answer</summary>
#
# The second gains 0.5, the third 0.25, the fourth 0.125: three.
#
# </details>
#
# **3.** Prelude 4, core 4, coda 4 layers of equal size. How many layers of arithmetic at 6
# loops, and how many times that of one loop?
#
# <details><summary>Answer</summary>
#
# 4 + 24 + 4 = 32 layers against 12: 2.67 times.
#
# </details>
#
# **4.** The same model: how many KV slots does a token take, and how many times as many as
# at one loop?
#
# <details><summary>Answer</summary>
#
# The same 32, and the same 2.67 times: each layer keeps what it made in each loop.
#
# </details>
#
# **5.** By r^0.46, what are 4 loops of a core of 100M worth, beside 50M that run once?
#
# <details><summary>Answer</summary>
#
# 50 + 4^0.46 · 100 = 50 + 189 = 239M, for the arithmetic of 450M.
#
# </details>
#
# The numbers, checked.

# %% tags=["claim"]
from dataclasses import replace

from minifer.loops import LoopConfig

print("1.", round(exponent([1, 256], [3, 12]), 6) == 0.25)
gains = [2.0 ** (1 - T) - 2.0**-T for T in range(1, 9)]  # of loop T + 1
print("2.", 1 + sum(gain > 0.2 for gain in gains) == 3)
slots = [replace(LoopConfig(4, 4, 4), max_num_loops=T).num_kv_slots for T in (6, 1)]
print("3. and 4.", slots == [32, 12])
print("5.", round(equivalent_parameters(50, 100, 4)) == 239)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - vLLM runs a looped model, Ouro, at its full number of steps
#   ([vllm#27794](https://github.com/vllm-project/vllm/pull/27794)); a depth that differs
#   from token to token is in none of the large engines, to our knowledge.
# - Mixing depths in one batch pays where steps are expensive (continuous depth
#   batching, [arXiv:2608.09444](https://arxiv.org/abs/2608.09444), reported); on our
#   small model lockstep was faster, as
#   [measured](results/parcae_tradeoff.md).
# - Compute-optimal training has had its laws refitted, too: Kaplan et al. 2020
#   ([arXiv:2001.08361](https://arxiv.org/abs/2001.08361)), Hoffmann et al. 2022
#   ([arXiv:2203.15556](https://arxiv.org/abs/2203.15556)), and a replication that found
#   the latter's third fit and its bands wrong
#   ([arXiv:2404.10102](https://arxiv.org/abs/2404.10102)).
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 14.1 | [A law, and its error on hidden points](../exercises/ex14_scaling_laws.ipynb) | 5 | 30 |
# | 14.2 | [An optimum with a band](../exercises/ex14_scaling_laws.ipynb) | 5 | 30 |
# | 14.3 | [An answer in numbers](../exercises/ex14_scaling_laws.ipynb) | 4 | 30 |
# | 14.4 | [Capstone I: a slot for every loop](../exercises/ex14_scaling_laws.ipynb) | 5 | 30 |
# | 14.5 | [Capstone II: a prefix cache that knows the depth](../exercises/ex14_scaling_laws.ipynb) | 5 | 50 |
# | 14.6 | [Capstone III: who computes how much](../exercises/ex14_scaling_laws.ipynb) | 4 | 30 |
# | 14.7 | [Capstone IV: the engine](../exercises/ex14_scaling_laws.ipynb) | 6 | 80 |
#
# ## Where to read on
#
# 1. [fits.py](../parcae/lab/laws/fits.py): the fits, without start values.
# 2. [training_law.py](../parcae/lab/laws/training_law.py): the published laws as
#    functions, each with its source.
# 3. [engine.py](../minifer/engine.py): `step`, five calls. You have now read all five.
#
# What to build next, if you have an engine of your own from the capstone: an exit for
# tokens whose state has settled, and the right rule for the keys they did not make;
# slots that loops share; a scheduler that mixes depths and is faster for it; a law of
# *serving* cost, with its error on requests it has not seen.
# And if a number in this book is wrong, that is a result: change the cell, and show it.
