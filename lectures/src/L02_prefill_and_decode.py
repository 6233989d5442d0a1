# %% [markdown]
# # L02 · Two machines in one: prefill and decode
#
# A language model is one function, yet an engine runs it as two machines. One reads a
# whole prompt at once, the other writes one token at a time. What makes the second
# possible is a memory between the passes, the **KV cache**. Here you build it, on
# the weights of a real (small) model, and hold it against the truth.
#
# Reading: 60 minutes. Exercises: 75 minutes, 18 points. Needs PyTorch as a language
# and [L00](L00_the_life_of_a_token.ipynb); a CPU is enough.
#
# Afterwards you can
#
# - **count** the tokens, pairs and FLOPs of generation with and without a cache;
# - **write** a generate loop with a KV cache whose mask and positions know where a
#   chunk begins;
# - **show** that one chunk, many chunks and one token at a time give the same logits;
# - **compute** TTFT, TPOT, ITL and throughput from timestamps, and say what each hides;
# - **name** three cases in which the cache buys nothing or costs too much.

# %% [markdown]
# ## Where is the token now?
#
# ![Life map of a request with stage 3, prefill, lit; decode and post-processing
# follow](figures/life_map_prefill.svg)
#
# The scheduler has chosen the tokens of this step, and their places in memory are
# known. Now the model runs: first over the prompt (stage 3), then, lap after lap, over
# the newest token (stage 4). The first cell prints nothing, unless something is missing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    get = 'pip install "minifer[course]"  or, in a clone,  pip install -e ".[course]"'
    raise ImportError(f"minifer is missing: run  {get}") from error
begin("L02")

# %% [markdown]
# The book's three requests run, and the microscope shows what this stage does for the
# first token that A draws. Look at what else its pass computes. (The engine's own lines
# are shown, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

run = example.run()
microscope(run, "A", position=20, stage="decode")

# %% [markdown]
# One pass computes 15 tokens of prefill and this decode: it makes no difference between
# them. In what sense are they two machines?
#
# ## What does one more word cost?
#
# A *forward pass* takes tokens and gives, after each of them, a score for every token
# that could come next. To *generate*, append the best next token after the last one, and
# start again. Without a memory, every pass computes the whole text again.
#
# Take 4 tokens that are given (the *prompt*) and 5 that are wanted. The first pass
# computes 4 tokens and draws the fifth. **Write down** how many tokens all passes
# compute together, and how many there are to compute at all.
#
# We write a pass as *(query, context)*: tokens computed, and tokens there are with
# them. In attention every computed token looks at itself and at all earlier ones:
# look also at the number of these *pairs*.

# %% tags=["claim"]
from minifer.course.pictures import prefill_decode as pictures
from minifer.course.pictures import prefill_decode_data as data
from minifer.perf.costs import attended_pairs

given, wanted = 4, 5
naive = [(n, n) for n in range(given, given + wanted)]
cached = [(given, given)] + [(1, n) for n in range(given + 1, given + wanted)]


def work(passes):
    """Tokens computed and (query, key) pairs attended, over all passes."""
    return sum(q for q, _ in passes), sum(attended_pairs(q, n) for q, n in passes)


print("naive ", naive, "tokens, pairs:", *work(naive))
print("cached", cached, "tokens, pairs:", *work(cached))

# %% [markdown]
# 4 + 5 + 6 + 7 + 8 = 30 tokens, where 8 exist. (The ninth token of the text, the last
# one drawn, is never computed: nobody asks what comes after it.) The picture shows
# each pass as a row. Look at the crosses: work that was done before.

# %% tags=["picture"]
figure = pictures.draw_cells(naive, cached, given, title="30 tokens computed, or 8")
show(figure, alt=pictures.ALT["cells"])

# %% [markdown]
# The left triangle is filled with crosses, the right one with reading. How fast does
# the waste grow? With a prompt of one token and T wanted, the naive loop computes
# 1 + 2 + … + T ≈ T²/2 tokens, and pass n attends about n²/2 pairs, T³/6 in all.
# Predict what doubling T does to each column.

# %% tags=["claim"]
print("wanted   naive: tokens     pairs   cached: tokens   pairs")
for T in (64, 128, 256):
    slow = work([(n, n) for n in range(1, T + 1)])
    fast = work([(1, n) for n in range(1, T + 1)])
    print(f"{T:6} {slow[0]:15,} {slow[1]:9,} {fast[0]:16,} {fast[1]:7,}")

# %% [markdown]
# Times 4 and 8 without a cache, times 2 and 4 with one. So naive generation is O(T²) in
# what is done once a token (the products with the weights) and O(T³) in attention. A
# cache takes one power of T off both. But what must it keep? For that we need the model.
#
# ## What is in a forward pass?
#
# All of minifer-tiny is 26 tensors. Look at three of the first layer.

# %% tags=["claim"]
import torch
import torch.nn.functional as F

config, weights = example.tiny().config, example.tiny().model.state_dict()
L, H, K, C = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
print(f"{L} layers, {H} query heads, {K} key and value heads of {C} numbers")
for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"):
    print(f"{name:18}", list(weights[f"layers.0.{name}.weight"].shape))

# %% [markdown]
# In attention a token asks with its *query*, is found by its *key* and gives its *value*.
# `qkv_proj` makes all three: 12 · 16 rows of queries, 6 · 16 of keys and 6 · 16 of values.
# Two query heads share a key head (*grouped-query attention*). We write the pass from the
# inside out. Norm and MLP first: look whether any line mixes two tokens.


# %% tags=["claim"]
def norm(x, name):
    """x [T, D] scaled to length √D, times a weight: every token on its own."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    return x * scale * weights[name]


def mlp(x, layer):
    """x [T, D] → [T, D]: every token on its own."""
    both = x @ weights[f"layers.{layer}.mlp.gate_up_proj.weight"].T
    gate, up = both.chunk(2, dim=-1)
    return (F.silu(gate) * up) @ weights[f"layers.{layer}.mlp.down_proj.weight"].T


x = torch.randn(6, config.hidden_size)
print("alone as in company:", torch.allclose(mlp(x[2:3], 0), mlp(x, 0)[2:3], atol=1e-5))

# %% [markdown]
# None does: a token may as well be computed alone. Only attention mixes tokens, and all
# it wants of the others is their keys and values. Those of an earlier token do not change
# when a later one comes, because no token looks ahead. **So keys and values are what must
# be kept**: of each layer, each key head, each token. We give them room in advance. Look
# at what the room holds before anything is written.


# %% tags=["claim"]
class Cache:
    """Room for `capacity` tokens: keys and values [L, capacity, K, C]."""

    def __init__(self, capacity):
        self.keys = torch.full((L, capacity, K, C), torch.nan)
        self.values = self.keys.clone()
        self.length = 0  # tokens that are in


room = Cache(capacity=8)
print("all NaN:", bool(room.keys.isnan().all()), "numbers a token:", 2 * L * K * C)

# %% [markdown]
# NaN on purpose: whoever reads a place that nobody wrote will notice.
#
# Two things in attention depend on where the new tokens begin, their *offset*: the
# rotation of queries and keys, and the mask. You write both in exercises 2.1 to 2.3; here
# they come from the engine. Look for the line that knows the offset.

# %% tags=["claim"]
from minifer.execution.attention import chunk_attention
from minifer.execution.backend import TorchBackend


def turn(heads, positions):
    """Rotate heads [T, n, C] by the tokens' positions [T]."""
    return TorchBackend().rope(heads, *example.tiny().model.rotary(positions))


def attention(x, layer, cache, turn, attend):
    """T new tokens x [T, D] look at everything up to themselves."""
    start, end = cache.length, cache.length + len(x)
    qkv = x @ weights[f"layers.{layer}.self_attn.qkv_proj.weight"].T
    q, k, v = qkv.unflatten(-1, (-1, C)).split((H, K, K), dim=1)
    positions = torch.arange(start, end)
    cache.keys[layer, start:end] = turn(k, positions)
    cache.values[layer, start:end] = v
    keys, values = cache.keys[layer, :end], cache.values[layer, :end]
    out = attend(turn(q, positions), keys, values, C**-0.5)
    return out.flatten(1) @ weights[f"layers.{layer}.self_attn.o_proj.weight"].T


# %% [markdown]
# `start` is where the cache ends: the new tokens stand behind what is in. Keys are
# kept *after* rotation, so an old key is never touched again. The rest is a loop over
# layers. Look at what `forward` changes: only the cache.


# %% tags=["claim"]
@torch.inference_mode()
def forward(ids, cache, turn=turn, attend=chunk_attention):
    """T new token ids → hidden states [T, D]; the cache grows by T tokens."""
    x = weights["embed_tokens.weight"][list(ids)]
    for i in range(L):
        h = norm(x, f"layers.{i}.input_layernorm.weight")
        x = x + attention(h, i, cache, turn, attend)
        x = x + mlp(norm(x, f"layers.{i}.post_attention_layernorm.weight"), i)
    cache.length += len(ids)
    return norm(x, "norm.weight")


def logits_of(hidden):
    """Hidden states [T, D] → a score for every next token [T, V]."""
    return hidden @ weights["embed_tokens.weight"].T


ids = example.tiny().tokenizer.encode(example.TRIO["A"][0])
cache = Cache(32)
print("logits", list(logits_of(forward(ids, cache)).shape), "cached:", cache.length)

# %% [markdown]
# Twenty rows of scores, *logits*, for A's twenty tokens. Are they right? The truth may
# not come from our code or the engine's: it is the model written once more in float64,
# from the formulas ([exact.py](../minifer/course/exact.py)). Three float32 results stand
# against it: ours, the engine's steps, and the engine's slow twin. Look for errors that
# are rounding (float32 carries 7 digits) and no more.

# %% tags=["claim"]
from minifer.course.exact import exact_logits
from minifer.execution.reference import reference_logits

alone = example.run({"A": example.TRIO["A"]})
text = ids + run.tokens("A")  # 20 given, 12 drawn
exact = exact_logits(example.tiny().model, text)


def agrees(logits, rows):
    """Is the largest error against float64 below 0.0005?"""
    return bool((logits - exact[rows]).abs().max() < 5e-4)


print("logits span more than ten:", bool(exact.max() - exact.min() > 10))
print("ours  ", agrees(logits_of(forward(text, Cache(32))), slice(0, 32)))
print("twin  ", agrees(reference_logits(example.tiny().model, text), slice(0, 32)))
print("engine", agrees(torch.cat([logits for _, logits in alone.steps]), slice(19, 31)))

# %% [markdown]
# All three agree with float64, at every position they computed.
#
# ## Which keys may a new token see?
#
# A prompt may come in *chunks*, because a step has a token budget. Eight tokens as
# 5 + 3: the query at position 5 may see keys 0 to 5, so the first row of the second
# chunk has six allowed keys, not one. The mask of T new tokens after S − T cached ones
# is [T, S] and its diagonal starts in column S − T. **Sketch** the mask of the second
# chunk, then look.

# %% tags=["picture"]
ways = [[8], [5, 3], [1] * 8]
figure = pictures.draw_chunks(ways, title="Each query sees the same keys")
show(figure, alt=pictures.ALT["chunks"])

# %% [markdown]
# Row by row the coloured keys are the same; only their source differs. A chunk of one
# token needs no mask at all: *decode is the last row of the triangle*. Look at the rows
# of the second chunk, then at every way to cut A's 20 tokens in two.

# %% tags=["claim"]
from minifer.execution.attention import causal_mask

for row in causal_mask(3, 8, None).int().tolist():
    print(*row)


def in_chunks(sizes, **parts):
    """Logits [T, V] of A's prompt when it comes in chunks, through one cache."""
    cache, rows = Cache(sum(sizes)), []
    for size in sizes:
        new = ids[cache.length : cache.length + size]
        rows.append(logits_of(forward(new, cache, **parts)))
    return torch.cat(rows)


cuts = [agrees(in_chunks([n, 20 - n]), slice(0, 20)) for n in range(1, 20)]
print(len(cuts), "cuts in two, all right:", all(cuts))
print("token by token:", agrees(in_chunks([1] * 20), slice(0, 20)))

# %% [markdown]
# One chunk, two, twenty: the same logits at every position. The engine claims the same
# of its budget. Look at the passes, which differ, and at the answers.

# %% tags=["claim"]
for budget in (20, 16, 7, 1):
    other = example.run({"A": example.TRIO["A"]}, max_num_batched_tokens=budget)
    chunks = [len(step.token_ids) for step, _ in other.steps]
    same = other.tokens("A") == run.tokens("A")
    print(f"budget {budget:2}: {len(chunks)} passes, first {chunks[:4]}, same: {same}")

# %% [markdown]
# Now break it. PyTorch's `is_causal=True` lays the diagonal into the *upper left*
# corner of a mask that is not square: query row t sees keys 0 … t. That is what
# "ignores the offset" means. **Predict**: the text comes as 12 + 8; which of the 20
# rows are wrong? And token by token?


# %% tags=["claim"]
def upper_left(q, k, v, scale):
    """Attention whose mask ignores how much is cached."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    return F.scaled_dot_product_attention(q, k, v, **options)[0].transpose(0, 1)


def print_wrong(**parts):
    """Positions whose logits are not the truth's, for three ways to cut A's prompt."""
    for sizes in ([20], [12, 8], [1] * 20):
        rows = in_chunks(sizes, **parts)
        wrong = [t for t in range(20) if not agrees(rows[t], t)]
        print(f"{len(sizes):2} chunks, wrong:", *wrong)


print_wrong(attend=upper_left)

# %% [markdown]
# A test with one chunk sees nothing. The second chunk is wrong from its first row on,
# and one by one every token sees key 0 alone. Nothing crashes, the model goes on
# talking. (`torch.nn.attention.bias.causal_lower_right` is the mask that is meant.)
#
# ## Where does a token stand, when only the newest is computed?
#
# Attention itself knows no order. **RoPE** (rotary position embedding,
# [arXiv:2104.09864](https://arxiv.org/abs/2104.09864)) puts it in: split a head into
# pairs of numbers, and turn pair i by the angle position · θ^(−2i/C). A score then
# depends on the *distance* of two tokens.
#
# By hand, one pair, one radian a position: a key (1, 0) at position 1 and a query
# (1, 0) at position 3 meet at an angle of 2: score cos 2 = −0.416. At positions 101
# and 103 as well. Look for the same in a whole head.

# %% tags=["claim"]
q, k = torch.randn(1, 1, C), torch.randn(1, 1, C)
scores = []
for shift in (0, 100, 700):
    query, key = turn(q, torch.tensor([3 + shift])), turn(k, torch.tensor([1 + shift]))
    scores.append(float((query * key).sum()))
print("shifted by 0, 100, 700, the same:", max(scores) - min(scores) < 1e-3)
first = turn(torch.tensor([[[1.0] + [0.0] * (C - 1)]]), torch.tensor([2]))
print("a 1 in the first pair, turned to position 2:", round(float(first[0, 0, 0]), 3))

# %% [markdown]
# Only the distance counts. So a rotated key can be kept for ever, *if* the new query
# turns by its true position. Which numbers form a pair is a convention, and there are
# two. Look at where the partner of dimension 1 sits.

# %% tags=["picture"]
figure = pictures.draw_pairs(8, title="One rotation, two conventions")
show(figure, alt=pictures.ALT["pairs"])

# %% [markdown]
# *Half-split* is what Hugging Face checkpoints use, *interleaved* is the paper's and
# that of GGUF files of Llama models, whose query and key rows are permuted to match.
# A model works with either, as long as its weights were made for it. With the other
# one all shapes fit and all text is nonsense.
#
# And a wrong position? A popular slip: each pass counts its tokens from 0. **Predict**
# which rows of 12 + 8 are wrong, when every chunk turns from 0.


# %% tags=["claim"]
def from_zero(heads, positions):
    """Rotation by the position within the chunk, not within the text."""
    return turn(heads, positions - positions[0])


print_wrong(turn=from_zero)

# %% [markdown]
# Again one chunk is right and everything after the first one is wrong: it looks back
# over the wrong distance. Both mistakes share a lesson. *Prefill alone proves nothing;
# test the seam.*
#
# ## Is it the same text?
#
# Two loops on one `forward`. The naive one hands it the whole text and an empty cache,
# each time; the cached one hands it the prompt once and then one token. Look at the
# answers, and whether rounding could have turned a choice: how far does the best logit
# lead?


# %% tags=["claim"]
def generate_naive(prompt, wanted):
    tokens = list(prompt)
    for _ in range(wanted):
        hidden = forward(tokens, Cache(len(tokens)))
        tokens.append(int(logits_of(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def generate_cached(prompt, wanted):
    cache, tokens, new = Cache(len(prompt) + wanted), [], list(prompt)
    while len(tokens) < wanted:
        tokens.append(int(logits_of(forward(new, cache)[-1:]).argmax()))
        new = tokens[-1:]
    return tokens


print("naive as cached:", generate_naive(ids, 12) == generate_cached(ids, 12))
print("cached as the engine:", generate_cached(ids, 12) == run.tokens("A"))
top = exact[19:31].topk(2).values
print("the best leads by more than 0.01:", bool((top[:, 0] - top[:, 1]).min() > 0.01))

# %% [markdown]
# One text, three ways, and a lead far above any error we allow. Now the work: **guess**
# the tokens that each loop computes. `minifer.perf.costs` counts FLOPs from the shapes;
# so that we need not believe it, torch counts the products that really run.

# %% tags=["claim"]
from torch.utils.flop_counter import FlopCounterMode

from minifer.perf.costs import step_cost

products = ("qkv", "output", "gate_up", "down", "head")
for generate in (generate_naive, generate_cached):
    passes = data.generation_passes(20, 12, cached=generate is generate_cached)
    with FlopCounterMode(display=False) as counter:
        generate(ids, 12)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    costs = [step_cost(config, [one]) for one in passes]
    equal = counted == sum(cost[op].flops for cost in costs for op in products)
    flops = data.total_flops(config, passes) / 1e6
    print(f"{work(passes)[0]:3} tokens, {flops:5.1f} MFLOP; as counted: {equal}")

# %% [markdown]
# 20 + 21 + … + 31 = 306 tokens against 20 + 11 = 31, and equal to the last product.
#
# The engine's layer does the same. Unfold it, and look what became of `start`.

# %% tags=["measure"]
from minifer.course.source import show_source
from minifer.models.transformer import Attention

show_source(Attention.forward)

# %% [markdown]
# It is gone. Many requests share a pass, each with an offset of its own, so positions
# come as `cos` and `sin`, one row a token, and the places in the cache as *slots* in
# `batch`: the slice `[:end]` has become a list, for the cache is cut into blocks.
#
# ## Why do we call it two machines?
#
# `forward` does not know whether it prefills or decodes. The hardware does. This is
# the run of A, B and C, from the engine's events: above, what each step computes;
# below, what it must move. Look at steps 1 and 13.

# %% tags=["picture"]
title = "Prefill does the arithmetic, decode the reading"
show(pictures.draw_work(config, run.events, title=title), alt=pictures.ALT["work"])

# %% [markdown]
# The traffic hardly changes: a step reads every weight once, for 16 tokens or for one.
# The arithmetic drops to a sixteenth.
#
# The same for a model and a chip of today: Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3) in bfloat16 on an
# H100 by its data sheet. Modelled, not measured. **Guess** how much longer a drawn
# token takes than a given one.

# %% tags=["claim"]
from minifer.course.shapes import LLAMA_8B as llama
from minifer.perf.devices import DEVICES

h100 = DEVICES["H100-SXM"]
for tokens, context in ((1000, 1000), (1, 1001)):
    cost = step_cost(llama, [(tokens, context)]).total()
    ms = h100.seconds(cost.flops, cost.bytes) * 1e3 / tokens
    limit = "arithmetic" if cost.intensity > h100.ridge_point else "memory"
    moved = f"{cost.flops / 1e9:6,.0f} GFLOP, {cost.bytes / 1e9:4.1f} GB moved"
    print(f"{tokens:4} at once: {moved}, {ms:.4f} ms a token at best, limit {limit}")

# %% [markdown]
# A drawn token takes three hundred times as long as a given one. (Moved are weights,
# keys and values, and what flows between operations.) The decode machine wants bandwidth,
# and company to share the weights with ([L07](L07_decode.ipynb)); the prefill machine
# wants arithmetic ([L06](L06_prefill.ipynb)). That is why some engines give each its own
# chips, and all others must take care how they mix.
#
# ## What does a user feel?
#
# Four words, all made of timestamps. A request arrives at 0; its tokens come at 300,
# 340, 380 and 500 ms.
#
# - **TTFT**, time to first token: 300 ms. Waiting and prefill.
# - **ITL**, inter-token latencies: 40, 40 and 120 ms. One for each decode step.
# - **TPOT**, time per output token after the first: (500 − 300) / 3 = 66.7 ms, the
#   mean of the ITLs.
# - **Throughput**: tokens of all users over the time they took, here 4 / 0.5 s.
#
# The engine keeps these times for each request. Look whether its TPOT is ours, then at
# A, B and C on the virtual clock of one millisecond a step.

# %% tags=["claim"]
from minifer.outputs import RequestMetrics

four = RequestMetrics(first_token_time=0.3, last_token_time=0.5, num_output_tokens=4)
print(f"TTFT {four.ttft * 1e3:.0f} ms, TPOT {four.tpot * 1e3:.1f} ms")
for name, (arrival, times) in data.token_times(run.events).items():
    engine = run.outputs[name].metrics
    ttft, tpot = times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1)
    same = abs(engine.ttft - ttft) + abs(engine.tpot - tpot) < 1e-9
    print(f"{name}: TTFT {ttft * 1e3:.0f} ms, TPOT {tpot * 1e3:.0f} ms, same: {same}")

# %% [markdown]
# Everybody decodes at the same pace; they differ in the wait. Each user gets 1 token a
# virtual millisecond, the engine gives 27 in 13: latency is the user's number,
# throughput the operator's.
#
# A mean hides a stall. On the real clock, A and B are decoding when D arrives with a
# prompt of 900 tokens, and a step has room for all of it. Look for the gap in A's and
# B's rows. (Measured where this was built.)

# %% tags=["picture"]
stalled = data.late_prompt(budget=1024)
figure = pictures.draw_ticks(stalled, title="One long prompt, and everyone waits")
show(figure, alt=pictures.ALT["ticks"])

# %% [markdown]
# The gap is D's TTFT. And as long as D is there, every step takes longer: 900 more
# tokens of cache to read. Did TPOT notice the gap? Look at A, with D's prompt in one
# piece and in chunks of 64 tokens. (Measured, not compared.)

# %% tags=["measure"]
for budget, events in ((1024, stalled), (64, data.late_prompt(64))):
    itl = torch.tensor(data.token_times(events)["A"][1]).diff() * 1e3
    print(
        f"budget {budget:4}: TPOT {itl.mean():.1f} ms, largest ITL {itl.max():.1f} ms"
    )

# %% [markdown]
# TPOT hardly tells the two apart, for D's prompt has to be computed either way; the
# largest gap does. So report the distribution of ITL, not only its mean
# ([arXiv:2410.14257](https://arxiv.org/abs/2410.14257) shows how each of these numbers
# can be gamed). Chunks have a price too: D waits longer ([L03](L03_scheduling.ipynb)).
#
# ## What does the clock say?
#
# Prediction first. A floor: every operation takes at least as long as its FLOPs or its
# bytes do, at rates measured on *this* machine. On top comes a fixed price a pass, for
# Python and a hundred small calls, taken from a pass over one token. Nothing else is
# fitted. How much more arithmetic has the 64th pass than the second?

# %% tags=["claim"]
for way in (False, True):
    passes = data.generation_passes(20, 64, cached=way)
    flops = [step_cost(config, [one]).total().flops for one in passes]
    print(f"cached: {way!s:5} last pass over the second: {flops[-1] / flops[1]:.2f}")

# %% [markdown]
# Four times without a cache. Now the clock: our own `forward`, processor time, the best
# of three runs. To forget everything is to set the cache's length to 0.

# %% tags=["measure"]
cache, tokens = Cache(128), ids * 6


def one_pass(query, context):
    """Compute the last `query` of `context` tokens; those before count as kept."""
    cache.length = context - query
    return logits_of(forward(tokens[cache.length : context], cache)[-1:]).argmax()


times = data.compare_times(config, one_pass, prompt=len(ids), output=64)
print(times.summary())

# %% [markdown]
# The bandwidth is that of reading as many bytes as the model has; so small a model
# may stay in the processor's caches. Look at the points (measured), the lines
# (predicted: floor plus price) and the dots (the floor alone).

# %% tags=["picture"]
title = "Each naive pass takes longer than the one before, a cached one does not"
x, y = "tokens drawn so far", "time of one pass (ms)"
figure = pictures.draw_times([s.every(5) for s in times.series], title=title, x=x, y=y)
show(figure, alt=pictures.ALT["passes"])

# %% [markdown]
# The cached passes are flat, and almost all of their time is the fixed price: this
# model is too small for anything else. The naive ones rise. Points above their line
# say that the processor did not reach the rate of a large square product, least of all
# in attention. A point below its floor would be a mistake in the model of cost.
#
# Summed up: the time to generate n tokens. Look at the left end.

# %% tags=["picture"]
title = "The cache earns nothing on the first token, and more with each further one"
x, y = "tokens wanted", "time of the generation (ms)"
totals = [one.totals([1, 2, 4, 8, 16, 32, 64]) for one in times.series]
figure = pictures.draw_times(totals, title=title, x=x, y=y, log=True)
show(figure, alt=pictures.ALT["totals"])

# %% [markdown]
# At one token both do the same work. The floors part at the second token; the points
# part later, for both pay the fixed price.
#
# ## Where does the cache lose?
#
# **At one token.** To score a text, to classify it, to embed it, one pass is all there
# is. The cache is written and never read. Look at the first row, then at what a second
# token changes.

# %% tags=["claim"]
print("wanted   naive FLOPs over cached   KV bytes kept")
for n in (1, 2, 12, 96):
    passes = (data.generation_passes(1000, n, cached=way) for way in (False, True))
    naive, cached = (data.total_flops(llama, p) for p in passes)
    print(f"{n:6} {naive / cached:25.2f} {2 * 32 * 8 * 128 * 2 * (1000 + n - 1):15,}")

# %% [markdown]
# Ratio 1.00, and 131 MB kept for nobody. From the second token on the cache wins.
#
# **In memory.** A token of this model keeps 2 (key and value) · 32 layers · 8 heads ·
# 128 numbers · 2 bytes. **Guess** how many users with 8,000 tokens fit beside the
# weights on a chip of 80 GB.

# %% tags=["claim"]
from minifer.perf.costs import kv_bytes_per_token, num_parameters

per_token = int(kv_bytes_per_token(llama))
left = h100.memory_bytes - 2 * num_parameters(llama)
print(f"{per_token:,} bytes a token; {left / 1e9:.0f} GB left for keys and values")
print("users with 8,000 tokens:", int(left // (8000 * per_token)))
read = step_cost(llama, [(1, 8000)]).total().weight_bytes
print(f"a decode reads more cache than weights from {read / per_token:,.0f} tokens on")

# %% [markdown]
# Sixty, however fast the chip. And a long context is no longer a thin layer on the
# weights: each step reads all of it. So blocks must be packed tightly
# ([L04](L04_paged_kv.ipynb)), shared where beginnings are equal and moved to slower
# memory when idle ([L05](L05_prefix_and_tiers.ipynb)).
#
# **In the seam.** The two mistakes above cannot happen without a cache.
#
# Try lengths of your own: how much is saved, and what is kept for it?

# %% tags=["picture"]
lengths = [1000, 300, 100, 30, 10, 1]
explore(pictures.saved_view, prompt=lengths, output=lengths)

# %% [markdown]
# With one token wanted nothing is saved, however long the prompt.
#
# ## Takeaways
#
# - Without a cache, generating T tokens computes T²/2 tokens and T³/6 pairs; with one,
#   T and T²/2.
# - Only attention mixes tokens, and all it needs of earlier ones is keys and values.
# - A chunk after a cache needs its offset twice: in the mask and in the positions. A
#   test with a single chunk sees neither mistake.
# - One chunk, many chunks and one token at a time give the same logits.
# - A step reads every weight once: many tokens are limited by arithmetic, few by memory.
# - TTFT is waiting and prefill; ITL is decode and whoever interrupts it; TPOT is a mean
#   and hides the interruption.
# - For one wanted token the cache is a cost; for long contexts it fills the memory.
#
# ## Questions
#
# **1.** 10 tokens given, 6 wanted. How many tokens are computed without and with a
# cache?
#
# <details><summary>Answer</summary>
#
# 10 + 11 + … + 15 = 75, and 10 + 5 = 15.
#
# </details>
#
# **2.** A chunk of 3 tokens comes after 5 cached ones. What shape has the mask, and how
# many of its entries are allowed?
#
# <details><summary>Answer</summary>
#
# [3, 8], with 6 + 7 + 8 = 21 allowed.
#
# </details>
#
# **3.** A request arrives at 1.0 s, its tokens come at 1.2, 1.3 and 1.6 s. TTFT, TPOT
# and largest ITL?
#
# <details><summary>Answer</summary>
#
# 200 ms, (1.6 − 1.2) / 2 = 200 ms, and 300 ms.
#
# </details>
#
# **4.** How many bytes do 2,000 tokens of Llama 3.1 8B keep in bfloat16?
#
# <details><summary>Answer</summary>
#
# 2,000 · 131,072 = 262,144,000, a quarter of a gigabyte.
#
# </details>
#
# **5.** A new engine answers short prompts well. Prompts longer than the token budget
# get fluent nonsense. Name two suspects and a test that tells them apart.
#
# <details><summary>Answer</summary>
#
# The mask or the positions of the second chunk. Compare one layer's rotated queries
# with those of an unchunked run: if they differ, it is the positions; if they are equal
# and the attention output differs, it is the mask.
#
# </details>
#
# The engine checks the numbers. Look for four times True.

# %% tags=["claim"]
passes = [data.generation_passes(10, 6, cached=way) for way in (False, True)]
print("1.", [work(p)[0] for p in passes] == [75, 15])
print("2.", causal_mask(3, 8, None).sum(1).tolist() == [6, 7, 8])
three = RequestMetrics(1.0, None, 1.2, 1.6, None, 3)
print("3.", [round(t, 3) for t in (three.ttft, three.tpot)] == [0.2, 0.2])
print("4.", 2000 * per_token == 262_144_000)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - **No phases in the scheduler.** vLLM's V1 scheduler begins with the comment that it
#   knows no decoding phase nor prefill phase: a request's computed tokens catch up with
#   its tokens ([scheduler.py](https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/sched/scheduler.py)).
#   minifer does the same. A step of nano-vLLM
#   ([scheduler.py](https://github.com/GeeeekExplorer/nano-vllm/blob/main/nanovllm/engine/scheduler.py))
#   or of [mini-sglang](https://github.com/sgl-project/mini-sglang), SGLang's small
#   sibling, is all prefill or all decode.
# - **Chunks to protect ITL.** Sarathi-Serve
#   ([arXiv:2403.02310](https://arxiv.org/abs/2403.02310)) mixes decodes with chunks of
#   prefill, so that none stalls.
# - **Two machines indeed.** DistServe
#   ([arXiv:2401.09670](https://arxiv.org/abs/2401.09670)) and Splitwise
#   ([arXiv:2311.18677](https://arxiv.org/abs/2311.18677)) run prefill and decode on
#   different chips and send the cache across.
# - **The words on the dashboard.** vLLM exports `vllm:time_to_first_token_seconds` and
#   `vllm:inter_token_latency_seconds` as histograms
#   ([metrics](https://docs.vllm.ai/en/latest/usage/metrics/)). Ask from when: its
#   *per-request* TTFT begins when the request is scheduled
#   ([docs](https://docs.vllm.ai/en/latest/features/per_request_metrics)), ours when it
#   arrives. TensorRT-LLM says *context phase* and *generation phase*
#   ([attention](https://nvidia.github.io/TensorRT-LLM/advanced/gpt-attention.html)).
#
# ## Exercises
#
# In [ex02_prefill_and_decode.ipynb](../exercises/ex02_prefill_and_decode.ipynb);
# `minifer grade 2` counts the points.
#
# | id | title | points | minutes |
# |---|---|---|---|
# | 2.1 | A causal mask that knows its offset | 4 | 10 |
# | 2.2 | RoPE with positions, in both layouts | 5 | 25 |
# | 2.3 | Attention with a cache | 6 | 25 |
# | 2.4 | Latency from timestamps | 3 | 15 |
#
# ## Where to read on
#
# 1. [models/transformer.py](../minifer/models/transformer.py): our `forward`, as the
#    engine writes it.
# 2. [models/rope.py](../minifer/models/rope.py): RoPE and four ways to stretch it.
# 3. [execution/attention.py](../minifer/execution/attention.py): mask, chunk and batch
#    of decodes.
# 4. [perf/costs.py](../minifer/perf/costs.py): every FLOP and byte of a step.
# 5. Next: who gets how many tokens in a step? [L03](L03_scheduling.ipynb).
