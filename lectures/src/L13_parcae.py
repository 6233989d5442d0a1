# %% [markdown]
# # L13 · Parcae: a model that loops
#
# A looped model has few layers, and runs the middle ones again and again. It is small in
# memory, deep in time, and has one disease: what goes round can grow without end. This
# lecture finds the cause, the cure and a proof, and then serves such a model.
#
# 60 minutes of reading, 85 minutes of exercises. Needs L02 (KV cache), L04 (blocks) and
# L07 (decode); no GPU, no network.
#
# After it you can
#
# - **compute** by hand what a loop does to a state, and say when it explodes;
# - **give** a matrix whose norm is above 1 and whose loop dies out;
# - **write** a decay that lies between 0 and 1 whatever training does to it;
# - **prove** a bound on the state, and check it over 1,000 loops;
# - **choose** between three injections of the input;
# - **count** the KV and the readings of a served loop model, and say when looping loses.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the fourth, decode](figures/life_map_decode.svg)
#
# Inside one forward pass, where it goes round. The next cell sets up and prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
    from minifer.course.pictures import parcae_layers as layers
    from minifer.course.pictures import parcae_serving as serving
    from minifer.course.pictures import parcae_state as states
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error
import torch

begin("L13")

# %% [markdown]
# ## What is a looped model?
#
# A state h, an input e, and one rule that is applied again and again: h ← ½ h + e. Let e
# be 3 and begin with 0. The first states are 3 and 4.5. Write down the next two, and
# where this ends.

# %% tags=["claim"]
h, seen = 0.0, []
for _ in range(5):
    h = 0.5 * h + 3
    seen.append(h)
print(seen, "and in the end", 3 / (1 - 0.5))

# %% [markdown]
# 5.25, 5.625, and 6 in the end: there ½ · 6 + 3 is 6 again. Five loops use one weight, ½.

# %% [markdown] tags=["row-29", "correction-1"]
# A looped language model does this with vectors and transformer layers. Ours is
# **Parcae** (Prairie, Novack, Berg-Kirkpatrick and Fu, April 2026,
# [arXiv:2604.12946](https://arxiv.org/abs/2604.12946)). Notes of the guest lecture behind
# this book ([Dan Fu, CS336, June 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s)) call
# it PARSE, which is misheard: the Parcae are the Fates, who spin a thread.

# %% [markdown]
# Its layers stand in three stacks. The *prelude* runs once and makes the input e. The
# *core* runs T times; T is the **depth**. The *coda* runs once. For one token, with T
# **iterations** t = 0 … T − 1:
#
# $$x_t = \bar A\,h_t + \bar B\,e, \qquad h_{t+1} = \mathrm{core}(x_t) = x_t +
# \bar R(x_t)$$
#
# The first half is our rule: Ā says what is kept of the state, B̄ what is added. R̄ is
# what the transformer blocks add. Look for the boxes that store nothing.

# %% tags=["picture"]
from minifer.parcae.presets import PRESETS

loop_140m = PRESETS["parcae-140m"].loop
show(
    layers.unrolled_figure(loop_140m, 8, title="20 layers are run, 6 are stored"),
    alt="20 boxes: layers 0 and 1 once, layers 2 and 3 eight times, 4 and 5 once.",
)

# %% [markdown]
# `parcae-tiny` comes with minifer: one layer that is run 8 times, no prelude, no coda. Here
# is its loop from the library's own stages. Predict whether depths 2 and 8 give the same.

# %% tags=["claim"]
from minifer.execution.reference import DenseBackend, sequence_batch

loaded, backend = serving.loop_tiny(), DenseBackend()
model = loaded.model
ids = loaded.tokenizer.encode(example.TRIO["A"][0])
batch = sequence_batch(ids)


@torch.inference_mode()
def by_hand(loops):
    """Hidden states [S, D] of A's prompt after so many loops."""
    e, p = model.encode(batch, None, backend)
    h, term = model.initial_state(e), model.input_term(e)  # 0, and B̄ e
    for t in range(loops):
        h = model.step(h, term, model.core_pass(p, batch, t))
    return model.finish(h, model.coda_pass(p, batch))


for loops in (1, 2, 8):
    gap = (by_hand(loops) - model(batch, None, backend, loops)).abs().max()
    print(f"{loops} loops: equal to the forward pass, to 1e-5: {bool(gap < 1e-5)}")
print("2 and 8 loops agree:", torch.allclose(by_hand(2), by_hand(8), atol=0.1))

# %% [markdown]
# B̄ e is computed once, for e is the same in every iteration. Depth is no part of the
# weights: it is chosen when the model runs. Exercise 13.2 is this loop.
#
# ## Why do loops explode?

# %% [markdown] tags=["row-30"]
# Without blocks and input, sixteen loops of h ← a h multiply h by a¹⁶. For a = 2 that is
# 2¹⁶, the guest lecture's example. Guess a¹⁶ for 0.9 and for 1.1 before you look.

# %% tags=["claim", "row-30"]
for a in (0.5, 0.9, 1.0, 1.1, 2.0):
    print(f"a = {a}: {a**16:,.5f}")

# %% [markdown] tags=["row-30"]
# 65,536; and 0.9 and 1.1, which look alike, part by a factor of 25. Training walks into
# this. The talk reports a naive looped model that trains with a learning rate of 2·10⁻⁴
# and ends in NaN with 6·10⁻⁴, its state at 10¹⁹; in the paper's table 2 it diverges from
# 4·10⁻⁴ on. (Reported.)

# %% [markdown]
# A transformer block is no multiplication by a number. Does the number still decide? Take
# an untrained model with random blocks and force Ā to be ρ times the unit matrix. Nothing
# else changes. Which of the five lines will level off?

# %% tags=["picture", "row-30"]
radii = (0.447, 0.9, 1.0, 1.05, 1.2)
forced = states.forced_traces(radii, num_loops=64)
lines = {f"ρ = {rho}": seen.state.mean(1).tolist() for rho, seen in forced.items()}
show(
    states.norms_figure(lines, title="Below 1 the state settles, above 1 it explodes"),
    alt="Length of the state over 64 iterations for five ρ, log axis. 0.447 and 0.9 "
    "level off, 1.0 grows slowly, 1.05 and 1.2 by a factor each time.",
)

# %% [markdown]
# In numbers: the last loop's growth, and the mean ‖R̄‖ divided by the first line's.

# %% tags=["claim", "row-30"]
for rho, seen in forced.items():
    added = float(seen.block.mean() / forced[0.447].block.mean())
    print(f"ρ = {rho}: growth {seen.growth():.3f}, ‖R̄‖ {added:.1f}")

# %% [markdown]
# The blocks add equally much however long the state is: each begins with a norm, reads
# x / rms(x), and never learns how long x is. Their part is bounded, ‖R̄‖ ≤ M; the linear
# part is not. So ρ decides: below 1 the state settles, at 1 it grows by an amount, above 1
# by a factor.
#
# ## Must the norm be below 1?

# %% [markdown] tags=["row-31", "correction-8"]
# "A norm above 1 explodes" is how the talk's notes put it. What counts is another number.
# The **spectral radius** ρ(A) is the largest absolute eigenvalue; the **norm** ‖A‖ is
# the most that A can stretch a vector in one step. Take
#
# $$A = \begin{pmatrix} \tfrac12 & 4 \\ 0 & \tfrac12 \end{pmatrix}, \qquad h_0 =
# \begin{pmatrix} 0 \\ 1 \end{pmatrix}$$
#
# Both eigenvalues are ½. By hand: h₁ = (4, ½), h₂ = (4, ¼). Go on to h₄. Does it
# explode?

# %% tags=["claim", "row-31", "correction-8"]
A = torch.tensor([[0.5, 4.0], [0.0, 0.5]], dtype=torch.float64)
free = states.free_injection(A)  # the library's injection with this Ā
norm = float(torch.linalg.matrix_norm(A, 2))
print(f"spectral radius {free.spectral_radius():.3f}, norm {norm:.3f}")
h = torch.tensor([0.0, 1.0], dtype=torch.float64)
for t in range(1, 6):
    print(f"h_{t} =", (h := A @ h).tolist())

# %% [markdown]
# It dies out: the second entry is halved each time, and the first one lives on the second.
# On the way it was four times as long as at the start. Look at the hump.

# %% tags=["picture", "row-31"]
from minifer.parcae.lab.stability.bounds import block_bound, gains

powers = gains(free, 12).power.tolist()
show(
    states.norms_figure(
        {"‖Aᵗ‖": powers, "‖A‖ᵗ": [norm**t for t in range(4)]},
        title="The norm is 4, yet it dies out; in five loops it does not look so",
        y="most that t loops can stretch a vector",
    ),
    alt="Norm of the t-th power of A: about 4 for two loops, below 1 from the sixth "
    "on. The power of the norm rises to 67 in three loops.",
)

# %% [markdown]
# A radius below 1 is what a loop needs *in the end*; a norm below 1 suffices and is too
# strict. But a model of 8 loops never sees the end: to it the hump is real. When do both
# numbers say the same? (200 random matrices.)

# %% tags=["claim", "row-31", "correction-8"]
full = torch.randn(200, 6, 6, generator=torch.Generator().manual_seed(1))
for kind, matrices in ("full", full), ("diagonal", full * torch.eye(6)):
    norms = torch.linalg.matrix_norm(matrices, 2).tolist()
    radii = [states.free_injection(m).spectral_radius() for m in matrices]
    apart = [n - r for n, r in zip(norms, radii, strict=True)]
    below, equal = min(apart) > -1e-5, max(apart) < 1e-5
    print(f"{kind}: never norm < ρ: {below}; norm = ρ: {equal}")

# %% [markdown]
# For a diagonal matrix they coincide, and there is no hump: each channel goes its own
# way. That is one reason to take a diagonal. (The paper says "spectral norm" for ρ.)
#
# ## How does ρ stay below 1 while everything is learned?

# %% [markdown] tags=["row-32", "correction-9"]
# Parcae does not learn Ā. It learns a system in *continuous* time, dh/dt = A h + B e,
# whose diagonal A is negative: left alone, h decays like $e^{At}$. A loop is a step of
# length Δ in it:
#
# $$A = -\exp(A_{\log}), \quad \Delta = \mathrm{softplus}(d) = \log(1 + \exp d),$$
# $$\bar A = \exp(\Delta A) \in (0, 1), \quad \bar B = \Delta B$$
#
# So A is negative and Ā, which the loop multiplies with, is positive. A_log and d, in
# code `dt_bias`, may be any numbers: exp and softplus are positive. By hand, for
# A_log = d = 0: A = −1, Δ = ln 2. What is Ā?

# %% tags=["claim", "row-32", "correction-9"]
zero = states.diagonal_injection([0.0], [0.0])
keeps, adds = (float(x) for x in zero.discretise())
print(f"Ā = {keeps:.4f}, B̄ = {adds:.4f}")
wild = states.diagonal_injection([-3.0, 3.0, -3.0, 3.0], [-3.0, -3.0, 3.0, 3.0])
print("other parameters:", [round(x, 4) for x in wild.retention().tolist()])

# %% [markdown]
# ½: the rule of the first section. Why exp, and not Euler's rule 1 + Δ A, which is good
# enough for B? Look for the line that leaves the grey band.

# %% tags=["picture", "row-32"]
show(
    states.decay_figure(title="exp keeps every decay in (0, 1), Euler's rule does not"),
    alt="Decay against dt_bias: three curves of exp, for A_log -2, 0 and 2, stay "
    "between 0 and 1; Euler's rule for A_log 2 falls below -2.",
)

# %% [markdown]
# Three mistakes, for a channel with A_log = 1 and d = −2 or 2. Which can leave (−1, 1)?

# %% tags=["claim", "row-32"]
from math import exp, log1p

rate = exp(1.0)  # −A
for d in (-2.0, 2.0):
    right, delta = states.diagonal_injection([1.0], [d]).retention(), log1p(exp(d))
    print(
        f"d = {d:+.0f}: right {right.item():.3f}, Euler {1 - delta * rate:.3f},",
        end=" ",
    )
    print(f"no softplus {exp(-d * rate):.3f}, sign flipped {exp(delta * rate):.1f}")

# %% [markdown]
# All three; each trains as long as its parameters happen to be harmless.
#
# "Below 1" is said of real numbers. A format has a largest number below 1, and what is
# closer becomes 1. See where that is, and which of B and A_log `.to(bfloat16)` rounds.

# %% tags=["claim"]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    largest = 1 - torch.finfo(dtype).eps / 2
    print(f"{dtype}: the largest number below 1 is {largest:.9f}")
half = states.pushed_model("diagonal", 0).to(torch.bfloat16)
print("after .to(bfloat16):", half.adapter.B.dtype, half.adapter.A_log.dtype)
d, a = torch.tensor([-20.0, 12.0]).half()
delta, rate = torch.nn.functional.softplus(d), a.exp()
print("float16:", float(delta), "·", float(rate), "=", float(delta * rate))

# %% [markdown]
# In bfloat16 a decay of 0.9985 is 1, and the channel never forgets. In float16 the
# formula breaks: Δ underflows, exp overflows, and 0 · ∞ is NaN. So A_log and d stay
# float32. Exercise 13.1 is a decay that survives all of it.
#
# ## What holds the input down?

# %% [markdown] tags=["row-32"]
# A radius below 1 bounds the state if the input is bounded. Nothing in a prelude bounds
# e, so its output is normalised before it enters the loop. That is the "simple norm" that
# controls B in the talk. (The paper reports a 1.3B model without it that trained well for
# 150,000 steps, then had spikes of loss.) Multiply all embeddings by 1,000: what reaches
# the state, with the norm and without?

# %% tags=["claim", "row-32"]
for norm_of_e in (True, False):
    small, large = (states.state_with_input(x, norm=norm_of_e) for x in (1, 1000))
    same, grown = abs(large / small - 1) < 1e-3, large > 50 * small
    print(f"norm {norm_of_e}: same state {same}, more than 50 times as long {grown}")

# %% [markdown]
# With the norm, ‖e‖ cannot pass √D times the norm's largest gain.
#
# ## How far can the state go?
#
# Now the proof. For a diagonal Ā with ρ = max Ā below 1, one loop makes h no longer than
# ρ ‖h‖, and adds two vectors of bounded length:
#
# $$\|h_{t+1}\| \le \rho\,\|h_t\| + \|\bar B e\| + M$$
#
# Put the line into itself t times. What is left is a geometric series:
#
# $$\|h_t\| \le \rho^t \|h_0\| + \frac{1-\rho^t}{1-\rho}\,(\|\bar B e\| + M)
# \;\longrightarrow\; \frac{\|\bar B e\| + M}{1-\rho}$$
#
# With ρ = ½, start 0 and ‖B̄ e‖ + M = 3 it says 3, 4.5, 5.25, … 6: our first example
# *reaches* its bound, so nothing smaller can be proved. Here are 1,000 loops of a
# trained model on A's 20 tokens. How many of the 20,000 states will lie above?

# %% tags=["claim", "row-32"]
from minifer.parcae.lab.stability.forced import trace

seen = trace(model, torch.tensor([ids]), 1000, torch.Generator().manual_seed(0))
rho, M = model.adapter.spectral_radius(), float(seen.block.max())
t = torch.arange(1001, dtype=torch.float64)[:, None]
drive = seen.drive + M
limit = rho**t * seen.state[0] + (1 - rho**t) / (1 - rho) * drive
above = int((seen.state[1:] > limit[1:] * (1 + 1e-6)).sum())
print(f"ρ = {rho:.2f}: {above} of {seen.state[1:].numel()} states are above")
library = gains(model.adapter, 1000).bound(seen.state[0], drive)
print("the library's bound is the same:", torch.allclose(library, limit, rtol=1e-4))
print("M is below what the weights allow:", block_bound(model) > M)

# %% [markdown]
# None. M was measured; the last line has a bound from the blocks' weights, which no text
# can break. (Exercise 13.3 is such a check.) Look at how much room the bound leaves.

# %% tags=["picture"]
show(
    states.norms_figure(
        {
            "bound, largest": limit.max(1).values.tolist(),
            "state, largest": seen.state.max(1).values.tolist(),
            "state, mean": seen.state.mean(1).tolist(),
        },
        title="The state settles in ten loops and stays below its bound for 1,000",
        y="‖h_t‖",
        log_x=True,
    ),
    alt="Over 1,000 iterations, log axes, the bound rises for ten loops to 4,000 and "
    "stays; the largest state stays near 800, the mean state near 540.",
)

# %% [markdown]
# What the bound does *not* say: that M and B̄ are small. They are learned. In
# [trainings of 120 steps](results/parcae_stability.md) (recorded here, November 2026) at a
# learning rate of 0.1 the diagonal model keeps ρ = 0.85, and its state still goes to
# 3,800; concat goes to ρ = 10 and 10¹¹. Neither ends in NaN: clipping and the last norm
# hide the explosion from the loss. Watch ρ and ‖h‖.
#
# What explodes forward explodes backward, through the same matrices. Push a diagonal and
# a concat injection about at random, as a high learning rate would; look at the gradient
# that reaches h₀ through 32 loops.

# %% tags=["claim"]
for kind in ("diagonal", "concat"):
    size, finite = states.start_gradient(kind, push=1, num_loops=32)
    print(f"{kind}: below 1 {size < 1}, above 1,000 {size > 1000}; all finite {finite}")

# %% [markdown]
# The diagonal loop forgets its start, and that is fine: e enters every loop and brings
# gradient to the weights. Training draws T at random for each sequence, so that the model
# can be read out at any depth ([depth.py](../parcae/depth.py)).
#
# ## Which injection?
#
# | | Ā | B̄ e | ρ | can | cannot |
# |---|---|---|---|---|---|
# | `diagonal` (Parcae) | exp(ΔA) | Δ · B e | below 1 | forget, whatever is learned | mix channels |
# | `concat` ([Huginn](https://arxiv.org/abs/2502.05171)) | W, left half | W, right half | free | mix, rotate | promise anything |
# | `add` | 1 | e | 1 | do without parameters | forget |
#
# Move the slider: `push` is how far noise has moved the parameters of a model of random
# weights. Which curves stay?

# %% tags=["picture"]
explore(
    states.injection_view,
    alt="Length of the state over the loops, log axis: diagonal levels off, add grows "
    "slowly, concat explodes from a push of 1 on.",
    labels={"push": "push (deviations)", "loops": "loops T"},
    push=[2, 0, 1, 3],
    loops=[64, 8, 16],
)

# %% [markdown]
# With push 1 and 8 loops add and concat look alike, with 64 not: an unstable loop can
# hide at the depth it was trained for. The radii behind the curves:

# %% tags=["claim"]
for push in (0, 1, 2, 3):
    below = {kind: p.rho < 1 for kind, p in states.pushed_states(push, 2).items()}
    print(f"push {push}: ρ below 1: {below}")

# %% [markdown]
# The diagonal alone cannot leave. At a harmless learning rate (10⁻², recorded) the three
# train to losses of 2.43, 2.47 and 2.47: stability does not make a model good, it lets
# one train at all.
#
# ## What does depth buy?
#
# `parcae-tiny` on text it was not trained on, in bits a byte. (Python's help, which
# differs between versions of Python: only the order of the numbers is compared.) Where
# will more loops stop helping? It was trained with 8 on average.

# %% tags=["picture", "row-33"]
bits = serving.bits_by_depth((1, 2, 3, 4, 6, 8, 12, 16))
show(
    serving.depth_figure(bits, title="Depth helps up to where it was trained, no more"),
    alt="Bits a byte against loops: about 2.6 at 1, 1.7 at 4, 1.6 at 8 and after.",
)

# %% [markdown]
# (Recorded on the whole held-out text: 2.70, 1.68 and 1.65 bits at 1, 4 and 8 loops, and
# one loop [gives](results/parcae_tradeoff.md) 4.2 times the tokens a second of eight.)
# What holds for any text of this kind:

# %% tags=["claim", "row-33"]
print("1 > 2 > 4 > 8 loops:", bits[1] > bits[2] > bits[4] > bits[8])
print("the first four loops buy over 0.8 bits:", bits[1] - bits[4] > 0.8)
print("16 instead of 8 change less than 0.05:", abs(bits[16] - bits[8]) < 0.05)

# %% [markdown] tags=["row-33"]
# The paper's headline is quality *per parameter* (reported, tables 3 and 5): at 350
# million parameters perplexity falls from 10.76 to 10.09, "6.3 %", against an earlier
# looped model; and Parcae 770M scores 25.07 on Core, a mean over 22 tasks, where a plain
# 1.3B has 25.45 and a plain 770M 22.42. What part of the gap is that? And what does a
# token of the smaller model cost, at 8 loops?

# %% tags=["claim", "row-33"]
from minifer.parcae.costs import decode_cost, kv_bytes_per_token

print(f"perplexity down by {(10.76 - 10.09) / 10.76:.1%}")
print(f"of the gap in Core {(25.07 - 22.42) / (25.45 - 22.42):.1%}")
pair = {"770M, 8 loops": ("parcae-770m", 8), "1.3B, 1 loop": ("parcae-1.3b", 1)}
for name, (preset, loops) in pair.items():
    cost = decode_cost(PRESETS[preset], loops).total()
    kv = kv_bytes_per_token(PRESETS[preset], loops) / 1024
    spent = f"{cost.flops / 1e9:.2f} GFLOP, {cost.weight_bytes / 1e9:.2f} GB read"
    print(f"{name}: {spent}, {kv:.0f} KiB of KV a token")

# %% [markdown] tags=["row-33"]
# 6.2 % by the table, 87.5 % of the gap. (Costs are modelled; at one loop Parcae stands for
# a plain model of its size.) So the smaller model does and reads 1.7 times as much and
# keeps twice the KV. It wins where *memory for weights* is short, and loses where time or
# KV is. At equal *training* compute table 6 has loops behind one pass, on Core, in 4 of 9
# rows; L14 weighs this.
#
# Depth beyond training can do harm. Ouro, trained at 4 loops, falls on GSM8K
# (school mathematics) from 0.79 to 0.02 at 20 loops (a third party's measurement of
# [arXiv:2510.25741](https://arxiv.org/abs/2510.25741)'s model). A small ρ keeps a state
# finite; it does not keep it useful.
#
# ## What must an engine remember of a loop?
#
# A layer of the core makes other keys and values in each iteration, and a later token's
# iteration t attends to earlier tokens' iteration t. So a **KV slot** is a pair (layer,
# iteration). By hand: prelude 1, core 2, coda 1, T = 3. How many slots? A plain model of
# these layers has 4.
#
# An engine may keep fewer. `first-m` keeps m iterations, and later ones read the last of
# these. `cyclic-m` overwrites in turn. `terminal` is cyclic-1.

# %% tags=["picture"]
from minifer.loops import LoopConfig

small_loop = LoopConfig(prelude=1, core=2, coda=1)
policies = ("full", "first-2", "cyclic-2", "terminal")
show(
    layers.slots_figure(small_loop, 3, policies, title="Fewer slots, less exact KV"),
    alt="KV slots of four layers at three iterations: full 8, first-2 and cyclic-2 6, "
    "terminal 4.",
)

# %% [markdown]
# 1 + 2 · 3 + 1 = 8. Now a published size: 1.3B, 8 layers in each stack, 8 loops, 2-byte
# numbers, contexts of 4,096. Which policy would you like? The loss is
# [recorded](results/parcae_tradeoff.md) on parcae-tiny (nats a token above `full`).

# %% tags=["claim"]
from dataclasses import replace

config = PRESETS["parcae-1.3b"]
recorded = {"full": 0.0, "first-4": 0.0474, "cyclic-2": 0.0036, "terminal": 0.0038}
for policy, loss in recorded.items():
    slots = replace(config.loop, kv_policy=policy).num_kv_slots
    kv = kv_bytes_per_token(config, 8, policy)
    size = f"{kv / 1024:.0f} KiB a token, {60e9 // (4096 * kv):.0f} contexts in 60 GB"
    print(f"{policy:8} {slots} slots, {size}, loss +{loss}")

# %% [markdown]
# `terminal` costs next to nothing in loss and keeps a plain model's KV. It costs sharing:
# where slots are overwritten, KV depends on *when* it was computed. The engine says so.

# %% tags=["claim"]
from minifer import EngineConfig

for policy in ("first-4", "terminal"):
    try:
        EngineConfig(loop_kv_policy=policy)
        print(policy, "with a prefix cache: accepted")
    except ValueError as error:
        print(str(error).split(":")[0])

# %% [markdown]
# Exercise 13.4 counts all of this.
#
# ## Can each request have a depth of its own?
#
# A asks for 8 loops, B for 4, C for 1, in one engine. Their truth is the slow twin: one
# request, no cache, the whole text again for every token. Will company change anybody's
# tokens?

# %% tags=["claim"]
mixed = serving.serve()
for name, ask in serving.TRIO.items():
    answer = mixed.run.outputs[name].outputs[0]
    same = answer.token_ids == serving.greedy_alone(ask)
    print(f"{name}: loops {set(answer.num_loops) == {ask.num_loops}}, tokens {same}")

# %% [markdown]
# Six times True. Tokens at different iterations go through the core *together*; only
# attention looks into each one's own slot. What three depths say to A's prompt (not
# compared):

# %% tags=["measure"]
prompt = example.TRIO["A"][0]
for loops in (1, 2, 8):
    ask = serving.Ask(prompt, 40, loops)
    print(loops, repr(loaded.tokenizer.decode(serving.greedy_alone(ask))))

# %% [markdown]
# And one of A's tokens under the microscope: look at how often the core is read for it.

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(mixed.run, "A", position=24, stage="decode")

# %% [markdown]
# KV depends on the depth, so depth belongs to the name of a block (L05). A's prompt of 20
# tokens is asked four times, one after the other, with 8, 4, 8 and 4 loops. How many
# tokens does each find?

# %% tags=["claim"]
asks = [serving.Ask(prompt, 3, loops) for loops in (8, 4, 8, 4)]
answers = serving.one_after_another(asks)
print("found:", [answer.num_cached_tokens for answer in answers])
truth = [serving.greedy_alone(ask) for ask in asks]
print("tokens right:", [a.outputs[0].token_ids for a in answers] == truth)

# %% [markdown]
# Two full blocks each, from the visit with the same depth. Two depths halve the cache.
#
# ## Who waits for whom?
#
# A wants 2 tokens at 8 loops, B 4 at 4, C 6 at 1. The core's weights are read once for all
# who loop. In **lockstep** a step ends when its deepest request is through, and everybody
# gets a token. In **continuous** depth batching it ends when the first one is; the others
# are *suspended* with their state and KV, and go on in the next step. Count the readings
# of the core for both, before you look. (*Seats* are places in the batch.)

# %% tags=["claim"]
from minifer.parcae.lab.depth_batching import Job, bound, simulate

wishes = {"A": (2, 8), "B": (4, 4), "C": (6, 1)}
asks = {n: serving.Ask(example.TRIO[n][0], *wish) for n, wish in wishes.items()}
ways = {
    way: serving.serve(asks, loop_batching=way, max_num_batched_tokens=128)
    for way in ("lockstep", "continuous")
}
jobs = [Job(depth, tokens) for tokens, depth in wishes.values()]
for way, served in ways.items():
    count, reads = simulate(jobs, seats=3, ending=way), len(served.applications)
    same = (count.core_applications, count.steps) == (reads, served.steps)
    print(f"{way}: {reads} readings, {served.steps} steps; as simulated: {same}")
print("no order needs fewer than", bound(jobs, 3), "readings")

# %% [markdown]
# 8 + 8 + 4 + 4 + 1 + 1 = 26 against 16, the least there can be. From the engine's own run,
# who looped when:

# %% tags=["picture"]
show(
    serving.applications_figure(ways, title="Continuous: no waiting, and more steps"),
    alt="Requests A, B and C over the readings of the core. In lockstep, 26 readings, "
    "6 steps, B and C wait. Continuous: 16 readings, no waiting, 9 steps.",
)

# %% [markdown]
# Look at the thick lines: a step also reads the head, and costs preparation. On a CPU with
# parcae-tiny continuous was only 0.8 times as fast (recorded): there steps cost more than
# loops. It wins where the core is most of the model. Lockstep is minifer's default.
#
# ## When may a token leave early?
#
# A state that hardly turns any more is unlikely to change its answer: a token **exits**
# when 1 − cosine of two successive states is below a threshold. Look at how much the
# letters of one reply differ.

# %% tags=["picture"]
leaves = serving.one_after_another([serving.Ask(prompt, 40, 8, 0.01)])[0].outputs[0]
written = loaded.tokenizer.decode(leaves.token_ids)
title = f"{sum(leaves.num_loops) / 40:.1f} loops a token instead of 8"
show(
    serving.exit_figure(written, leaves.num_loops, 8, title=title),
    alt="Loops of each of 40 tokens of a reply: the first takes 8, most others fewer.",
)

# %% [markdown]
# Between 4 and 6 for most. A threshold is a trade. Look for the two ends: 0 must change
# nothing, and a large one must leave early.

# %% tags=["claim"]
whole = serving.greedy_alone(serving.Ask(prompt, 24, 8))
for threshold in (0.0, 0.003, 0.03, 1.0):
    ask = serving.Ask(prompt, 24, 8, threshold)
    left = serving.one_after_another([ask])[0].outputs[0]
    mean = sum(left.num_loops) / 24
    print(f"threshold {threshold}: {mean:.1f} loops a token, ", end="")
    print("same tokens:", left.token_ids == whole)

# %% [markdown]
# The first token always takes 8 loops, for it comes from the prompt. On held-out text
# (recorded) a threshold of 0.01 means 4.8 loops a token and costs 0.009 nats. A token that
# has left makes no keys and values in the iterations it skips; later ones read those of
# its last loop, an approximation. And it pays less than it seems: 1.3 times the tokens a
# second alone, 1.02 times with 8 requests in lockstep, where the step runs to the deepest.
#
# ## Takeaways
#
# - A loop reuses weights: depth costs time and KV, not parameters.
# - Blocks behind a norm add a bounded vector; the linear part decides: a ρ below 1 settles.
# - ρ is not the norm. For a diagonal matrix it is.
# - A negative diagonal in continuous time gives a decay in (0, 1), whatever is learned; a
#   norm bounds the input. Together they bound the state, provably.
# - Bounded is not good: M is learned, and depth beyond training may do harm.
# - KV is per iteration; depth belongs to a block's name. Policies trade slots for sharing.
# - Early exit saves loops; steps and the deepest request may take them back.
#
# ## Questions
#
# **1.** h ← 0.8 h + e with e = 1, begun at 0. Where is it after 2 loops, and where does it
# settle?
#
# <details><summary>Answer</summary>
#
# 0.8 · 1 + 1 = 1.8; in the end 1 / (1 − 0.8) = 5.
#
# </details>
#
# **2.** A_log = 0 and Δ = ln 4. What are Ā and, for B = 1, B̄?
#
# <details><summary>Answer</summary>
#
# exp(−ln 4) = ¼, and ln 4 = 1.386.
#
# </details>
#
# **3.** ρ = 0.9, ‖B̄ e‖ = 2, M = 3, start 0. What is the largest state, ever?
#
# <details><summary>Answer</summary>
#
# (2 + 3) / (1 − 0.9) = 50.
#
# </details>
#
# **4.** Prelude 2, core 4, coda 2, 6 loops. How many KV slots under `full`, `first-2` and
# `terminal`?
#
# <details><summary>Answer</summary>
#
# 2 + 24 + 2 = 28, 2 + 8 + 2 = 12, and 8.
#
# </details>
#
# **5.** Ten requests in one step, nine of depth 2 and one of depth 10, in lockstep. For
# how much of the step do the nine wait?
#
# <details><summary>Answer</summary>
#
# For 8 of 10 readings of the core.
#
# </details>
#
# The numbers, checked.

# %% tags=["claim"]
print("1.", round(1 / (1 - 0.8), 9) == 5 and 0.8 * 1 + 1 == 1.8)
four = states.diagonal_injection([0.0], [torch.tensor(3.0).log().item()])  # Δ = ln 4
print("2.", [round(float(x), 3) for x in four.discretise()] == [0.25, 1.386])
print("3.", round((2 + 3) / (1 - 0.9), 9) == 50)
loop = LoopConfig(prelude=2, core=4, coda=2, max_num_loops=6)
some = "full", "first-2", "terminal"
print("4.", [replace(loop, kv_policy=policy).num_kv_slots for policy in some])
ten = [Job(2, 1)] * 9 + [Job(10, 1)]
print("5.", simulate(ten, 10, "lockstep").core_applications - 2)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - The authors' code ([sandyresearch/parcae](https://github.com/sandyresearch/parcae))
#   generates with one depth for all, without paged KV and early exit.
# - Continuous depth batching: [arXiv:2608.09444](https://arxiv.org/abs/2608.09444) reports
#   1.5 to 1.9 times the throughput on Ouro and Huginn.
# - [Ouro](https://huggingface.co/ByteDance/Ouro-1.4B) has loops and an exit threshold in
#   its `config.json`; by default every token runs all 4.
# - [MELT](https://arxiv.org/abs/2605.07721) trains a looped model to live with one KV cache a
#   layer, shared by all loops.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 13.1 | [A decay that cannot leave (0, 1)](../exercises/ex13_parcae.ipynb) | 4 | 20 |
# | 13.2 | [One loop for rows of different depth](../exercises/ex13_parcae.ipynb) | 5 | 15 |
# | 13.3 | [Bound the state, and check the bound](../exercises/ex13_parcae.ipynb) | 5 | 30 |
# | 13.4 | [KV slots of a loop](../exercises/ex13_parcae.ipynb) | 4 | 20 |
#
# ## Where to read on
#
# 1. [injection.py](../parcae/injection.py): the three injections.
# 2. [model.py](../parcae/model.py): the stages.
# 3. [bounds.py](../parcae/lab/stability/bounds.py): M from the weights.
# 4. [loops.py](../minifer/loops.py): slots and policies.
# 5. [runner.py](../minifer/execution/loops/runner.py): depth batching and early exit.
# 6. [kv_quality.py](../parcae/lab/tradeoff/kv_quality.py): what each saving loses.
