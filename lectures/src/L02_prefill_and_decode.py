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
# the newest token (stage 4). Both stages are one call. This lecture is about why they
# behave so differently. The first cell prints nothing, unless something is missing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = (
        'minifer is missing: run  pip install "minifer[course]"  '
        'or, in a clone,  pip install -e ".[course]"'
    )
    raise ImportError(remedy) from error
begin("L02")

# %% [markdown]
# ## What does one more word cost?
#
# A *forward pass* takes tokens and gives, for each of them, a score for every token
# that could come next. To *generate*, take the best next token after the last one,
# append it, and start again. The loop below the surface of every chat is no more than
# that. Without a memory, every pass computes the whole text again.
#
# Take 4 tokens that are given (the *prompt*) and 5 that are wanted. The first pass
# computes 4 tokens and draws the fifth. **Write down** how many tokens all passes
# compute together, and how many there are to compute at all.
#
# We write a pass as *(query, context)*: tokens computed, and tokens there are with
# them. In attention every computed token looks at itself and at all earlier ones:
# look also at the number of these *pairs*.

# %% tags=["claim"]
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
from minifer.course.pictures.prefill_decode import draw_cells

show(
    draw_cells(naive, cached, given, title="The same five tokens: 30 computed or 8"),
    alt="Two grids, a row a forward pass, a column a position. Without a cache, pass 1 "
    "computes positions 0 to 3 and each later pass computes all positions again and one "
    "more. With a cache, pass 1 is the same, and each later pass computes one position "
    "and reads the keys and values of those before it.",
)

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
# Doubling T multiplies the naive tokens by 4 and the pairs by 8; the cached ones by 2
# and 4. So naive generation is O(T²) in everything done once a token (the products
# with the weights) and O(T³) in attention. A cache takes one power of T off both.
#
# What must be kept, so that nothing is computed twice? For that we need the model.
#
# ## What is in a forward pass?
#
# All of minifer-tiny is 26 tensors. Look at four of the first layer.

# %% tags=["claim"]
import torch
import torch.nn.functional as F

config, weights = example.tiny().config, example.tiny().model.state_dict()
L, H, K, C = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
print(f"{L} layers, {H} query heads, {K} key and value heads of {C} numbers")
for name in ("qkv_proj", "o_proj"):
    print(f"{name:13}", list(weights[f"layers.0.self_attn.{name}.weight"].shape))
for name in ("gate_up_proj", "down_proj"):
    print(f"{name:13}", list(weights[f"layers.0.mlp.{name}.weight"].shape))

# %% [markdown]
# `qkv_proj` is three matrices in one: 12 · 16 rows make queries, 6 · 16 keys and
# 6 · 16 values. Two query heads share a key head (*grouped-query attention*), which
# halves what must be kept. We write the pass from the inside out. Norm and MLP first:
# look whether any line mixes two tokens.


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
alone, together = mlp(x[2:3], 0), mlp(x, 0)[2:3]
print("alone as in company:", torch.allclose(alone, together, atol=1e-5))

# %% [markdown]
# None does. A token's row never looks at another row: it may as well be computed
# alone. Only attention mixes tokens, and all it wants of the others is their keys and
# values. Those of an earlier token do not change when a later one comes, because no
# token looks ahead. **So keys and values are what must be kept**: of each layer, each
# key head, each token. We give them room in advance. Look at what the room holds
# before anything is written.


# %% tags=["claim"]
class Cache:
    """Room for `capacity` tokens: keys and values [L, capacity, K, C]."""

    def __init__(self, capacity):
        self.keys = torch.full((L, capacity, K, C), torch.nan)
        self.values = self.keys.clone()
        self.length = 0  # tokens that are in


room = Cache(capacity=8)
print(room.length, "tokens in, all NaN:", bool(room.keys.isnan().all()))
print("numbers a token:", 2 * L * K * C)

# %% [markdown]
# NaN on purpose: whoever reads a place that nobody wrote spoils the result, and
# notices. A token takes 768 numbers.
#
# Two things in attention depend on where a chunk begins, its *offset*: the rotation of
# queries and keys, and the mask. You write both in exercises 2.1 to 2.3, so here they
# come from the engine, and the sections below take them apart. Look for the one line
# that knows the offset.

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
print(
    "logits", list(logits_of(forward(ids, cache)).shape), "in the cache:", cache.length
)

# %% [markdown]
# Twenty rows of logits for A's twenty tokens. Are they right? The truth may not come
# from our code or the engine's: it is the same model written once more in float64,
# from the formulas, without a cache
# ([exact.py](../minifer/course/exact.py)). Three float32 results stand against it:
# ours, the engine's steps, and the engine's slow twin. Look for errors that are
# rounding (float32 carries 7 digits) and no more.

# %% tags=["claim"]
from minifer.course.exact import exact_logits
from minifer.execution.reference import reference_logits

run = example.run()
text = ids + run.tokens("A")  # 20 given, 12 drawn
exact = exact_logits(example.tiny().model, text)


def agrees(logits, rows):
    """Is the largest error against float64 below 0.0005? (The logits span tens.)"""
    return bool((logits - exact[rows]).abs().max() < 5e-4)


span = float(exact.max() - exact.min())
drawn = [logits for _, logits in example.run({"A": example.TRIO["A"]}).steps]
print("logits span more than ten:", span > 10)
print("ours  ", agrees(logits_of(forward(text, Cache(32))), slice(0, 32)))
print("twin  ", agrees(reference_logits(example.tiny().model, text), slice(0, 32)))
print("engine", agrees(torch.cat(drawn), slice(19, 31)))

# %% [markdown]
# All three agree with float64, at every position they computed. From here on the
# question "is it right?" has one answer: `agrees`.
#
# ## Which keys may a new token see?
#
# A prompt may come in *chunks*, because a step has a token budget. Eight tokens as
# 5 + 3: the query at position 5 may see keys 0 to 5, so the first row of the second
# chunk has six allowed keys, not one. The mask of T new tokens after S − T cached ones
# is [T, S] and its diagonal starts in column S − T. **Sketch** the mask of the second
# chunk, then look.

# %% tags=["picture"]
from minifer.course.pictures.prefill_decode import draw_chunks

show(
    draw_chunks(
        [[8], [5, 3], [1] * 8], title="Cut as you like: each query sees the same"
    ),
    alt="Three attention masks of 8 tokens, a row a query, a column a key. In one chunk, "
    "a triangle of new keys. As 5 + 3, the last three rows see five cached keys and a "
    "small triangle of new ones. One by one, each row sees cached keys and its own; "
    "nothing is masked.",
)

# %% [markdown]
# Row by row the coloured keys are the same; only their source differs. A chunk of one
# token needs no mask at all: *decode is the last row of the triangle*. In numbers:
# look at the rows of the second chunk, then at every way to cut A's 20 tokens in two.

# %% tags=["claim"]
from minifer.execution.attention import causal_mask

print(causal_mask(3, 8, None).int())


def in_chunks(tokens, sizes, **parts):
    """Logits [T, V] of a text that comes in chunks, through one cache."""
    cache, rows, start = Cache(len(tokens)), [], 0
    for size in sizes:
        rows.append(logits_of(forward(tokens[start : start + size], cache, **parts)))
        start += size
    return torch.cat(rows)


cuts = [agrees(in_chunks(ids, (n, 20 - n)), slice(0, 20)) for n in range(1, 20)]
print(len(cuts), "cuts in two, all right:", all(cuts))
print("token by token:", agrees(in_chunks(ids, [1] * 20), slice(0, 20)))

# %% [markdown]
# One chunk, two chunks, twenty chunks: the same logits at every position. The engine
# makes the same claim about its budget. Look at the steps, which differ, and at the
# answers.

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


def wrong_rows(logits):
    """Positions whose logits are not the truth's."""
    return [t for t in range(len(logits)) if not agrees(logits[t], t)]


print("one chunk:", wrong_rows(in_chunks(ids, [20], attend=upper_left)))
print("12 + 8:   ", wrong_rows(in_chunks(ids, [12, 8], attend=upper_left)))
singles = wrong_rows(in_chunks(ids, [1] * 20, attend=upper_left))
print("one by one:", len(singles), "wrong, the first is", singles[0])

# %% [markdown]
# A test with one chunk sees nothing. The second chunk is wrong from its first row on,
# and in decode every token sees key 0 alone. Nothing crashes, the model goes on
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
# and 103 as well. Look for the same in a head of the model's size.

# %% tags=["claim"]
pair = torch.tensor([[1.0, 0.0]])


def rotated(pair, angle):
    """A pair [1, 2], as a point in the plane, turned about the origin."""
    point = torch.view_as_complex(pair) * torch.polar(
        torch.ones(1), torch.tensor(angle)
    )
    return torch.view_as_real(point)


print("by hand:", round(float((rotated(pair, 3.0) * rotated(pair, 1.0)).sum()), 3))
q, k = torch.randn(1, 1, C), torch.randn(1, 1, C)
scores = []
for shift in (0, 100, 700):
    at = torch.tensor([3 + shift]), torch.tensor([1 + shift])
    scores.append(float((turn(q, at[0]) * turn(k, at[1])).sum()))
print("shifted by 0, 100, 700, the same:", max(scores) - min(scores) < 1e-3)

# %% [markdown]
# Only the distance counts. So a rotated key can be kept for ever, *if* the new query
# turns by its true position. Which numbers form a pair is a convention, and there are
# two. Look at where the partner of dimension 1 sits.

# %% tags=["picture"]
from minifer.course.pictures.prefill_decode import draw_pairs

show(
    draw_pairs(8, title="One rotation, two conventions: who is whose partner?"),
    alt="A head of 8 dimensions, twice. Half-split: the pairs are 0 and 4, 1 and 5, 2 and "
    "6, 3 and 7. Interleaved: the pairs are 0 and 1, 2 and 3, 4 and 5, 6 and 7.",
)

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


print("one chunk:", wrong_rows(in_chunks(ids, [20], turn=from_zero)))
print("12 + 8:   ", wrong_rows(in_chunks(ids, [12, 8], turn=from_zero)))
one_by_one = wrong_rows(in_chunks(ids, [1] * 20, turn=from_zero))
print("one by one: right are", sorted({*range(20)} - {*one_by_one}))

# %% [markdown]
# Again one chunk is right and everything after the first chunk is wrong: to the
# second chunk the first one lies at the wrong distance. Both mistakes share a lesson.
# *Prefill alone proves nothing; test the seam.*
#
# ## Is it the same text?
#
# Two generate loops on one `forward`. The naive one hands it the whole text and an
# empty cache, each time; the cached one hands it the prompt once and then one token.
# Look at the answers and at the tokens computed.


# %% tags=["claim"]
def generate_naive(prompt, wanted):
    tokens, computed = list(prompt), 0
    for _ in range(wanted):
        hidden = forward(tokens, Cache(len(tokens)))
        computed += len(hidden)
        tokens.append(int(logits_of(hidden[-1:]).argmax()))
    return tokens[len(prompt) :], computed


def generate_cached(prompt, wanted):
    cache, tokens, new, computed = Cache(len(prompt) + wanted), [], list(prompt), 0
    while len(tokens) < wanted:
        hidden = forward(new, cache)
        computed += len(hidden)
        tokens.append(int(logits_of(hidden[-1:]).argmax()))
        new = tokens[-1:]
    return tokens, computed


slow, fast = generate_naive(ids, 12), generate_cached(ids, 12)
print("tokens computed:", slow[1], "naive,", fast[1], "cached")
print("same text, the engine's too:", slow[0] == fast[0] == run.tokens("A"))

# %% [markdown]
# 20 + 21 + … + 31 = 306 tokens against 20 + 11 = 31, for one text. (Could rounding
# have turned a choice? The next cell asks how far the best logit leads, too.) What
# does it save in arithmetic? `minifer.perf.costs` counts FLOPs from the shapes; so
# that we need not believe it, torch counts the products that really run. Look whether
# the two counts are equal.

# %% tags=["claim"]
from torch.utils.flop_counter import FlopCounterMode

from minifer.course.pictures.prefill_decode_data import generation_passes, total_flops
from minifer.perf.costs import step_cost

products = ("qkv", "output", "gate_up", "down", "head")
for name, generate in (("naive", generate_naive), ("cached", generate_cached)):
    passes = generation_passes(20, 12, cached=name == "cached")
    with FlopCounterMode(display=False) as counter:
        generate(ids, 12)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    costs = [step_cost(config, [one]) for one in passes]
    equal = counted == sum(cost[op].flops for cost in costs for op in products)
    print(
        f"{name:6} {total_flops(config, passes) / 1e6:6.1f} MFLOP; as counted: {equal}"
    )
top = exact[19:31].topk(2).values
print("the best leads by more than 0.01:", bool((top[:, 0] - top[:, 1]).min() > 0.01))

# %% [markdown]
# Equal to the last product, and ten times less with a cache. The lead of the best
# token is far above the errors we allow, so the equality of the texts is no luck.
#
# The engine goes through the same steps with other means: its cache is cut into
# blocks, so a slice `[:end]` becomes a list of *slots*
# ([attention.py](../minifer/execution/attention.py)); many requests share one pass;
# all single queries of a step run as one batch; and the head is applied only to rows
# that somebody will sample from.
#
# ## Why do we call it two machines?
#
# `forward` does not know whether it prefills or decodes. The hardware does. This is
# the run of A, B and C, drawn from the engine's events: above, what each step
# computes; below, what it must move. Look at steps 1 and 13.

# %% tags=["picture"]
from minifer.course.pictures.prefill_decode import draw_work

show(
    draw_work(
        config, run.events, title="Prefill does the arithmetic, decode the reading"
    ),
    alt="Two bar charts over 13 engine steps of A, B and C. Arithmetic: about equal and "
    "large in steps 1 to 3, almost all of it prefill, smaller in step 4, a fraction of "
    "that from step 5 on, all decode. Bytes: nearly the same in every step, mostly "
    "weights with a thin layer of keys and values on top.",
)

# %% [markdown]
# The traffic hardly changes: a step reads every weight once, for 16 tokens or for one.
# The arithmetic drops to a sixteenth. So prefill is limited by arithmetic and decode
# by memory, as soon as a chip can do more FLOPs than one for each byte it reads.
#
# The same for a model and a chip of today: Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3) in bfloat16 on an
# H100 by its data sheet. Modelled, not measured. **Guess** how much longer a drawn
# token takes than a given one.

# %% tags=["claim"]
from minifer.course.pictures.prefill_decode_data import LLAMA_8B
from minifer.perf.devices import DEVICES

h100 = DEVICES["H100-SXM"]
print(h100.source, h100.date)
each = {}
for name, one in (("prefill 1,000", (1000, 1000)), ("decode 1     ", (1, 1001))):
    cost = step_cost(LLAMA_8B, [one]).total()
    seconds = h100.seconds(cost.flops, cost.bytes)
    each[name] = seconds / one[0]
    limit = "arithmetic" if cost.intensity > h100.ridge_point else "memory"
    share = f"{cost.flops / 1e9:7,.0f} GFLOP, {cost.bytes / 1e9:5.1f} GB"
    print(f"{name}: {share}, {seconds * 1e3:5.2f} ms at best, limit {limit}")
print(
    f"a drawn token takes {max(each.values()) / min(each.values()):.0f} times as long"
)

# %% [markdown]
# Hundreds of times. The decode machine wants bandwidth and company (a batch shares the
# read of the weights, [L07](L07_decode.ipynb)); the prefill machine wants arithmetic
# ([L06](L06_prefill.ipynb)). That is why some engines give each its own chips, and why
# all others must take care how they mix.
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
from minifer.course.pictures.prefill_decode_data import token_times
from minifer.outputs import RequestMetrics

four = RequestMetrics(first_token_time=0.3, last_token_time=0.5, num_output_tokens=4)
print(f"TTFT {four.ttft * 1e3:.0f} ms, TPOT {four.tpot * 1e3:.1f} ms")
last = 0.0
for name, (arrival, times) in token_times(run.events).items():
    engine = run.outputs[name].metrics
    ttft, tpot = times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1)
    same = abs(engine.ttft - ttft) + abs(engine.tpot - tpot) < 1e-9
    last = max(last, times[-1])
    print(
        f"{name}: TTFT {ttft * 1e3:.0f} ms, TPOT {tpot * 1e3:.0f} ms, engine's: {same}"
    )
print(
    f"throughput: {sum(len(run.tokens(n)) for n in 'ABC')} tokens in {last * 1e3:.0f} ms"
)

# %% [markdown]
# Everybody decodes at the same pace; they differ in the wait. Each user gets 1,000
# tokens a virtual second, the engine gives 27 / 13 ms = 2,077: latency is a user's
# number, throughput the operator's.
#
# A mean hides a stall. On the real clock: A and B are decoding when D arrives with a
# prompt of 900 tokens. In a step with room for all of it, everybody waits for D's
# prefill. Look for the gap in A's and B's rows. (Measured where this was built.)

# %% tags=["picture"]
from minifer import Engine, EngineConfig, SamplingParams
from minifer.course.pictures.prefill_decode import draw_ticks
from minifer.events import ListSink


def late_prompt(budget):
    """A and B decode, after ten steps D comes: outputs and events, on the real clock."""
    sink, done = ListSink(), {}
    options = EngineConfig(num_kv_blocks=96, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    with Engine.from_loaded(example.tiny(), options, sinks=[sink]) as engine:
        for name in "AB":
            engine.add_request(name, example.TRIO[name][0], params)
        while engine.has_unfinished_requests:
            if engine.events.step == 10 and "D" not in done:
                engine.add_request("D", "and so on " * 90, params.with_(max_tokens=8))
                done["D"] = None
            done |= {output.request_id: output for output in engine.step()}
    return done, sink.events


stalled, events = late_prompt(budget=1024)
show(
    draw_ticks(events, title="One long prompt, and everyone's next token waits"),
    alt="Token times of A, B and D. A and B produce tokens at a steady pace, then both "
    "have one long gap while D's prompt is computed, then all three go on together.",
)

# %% [markdown]
# The gap is D's TTFT. Did TPOT notice? Look at A with the prompt in one piece and in
# chunks of 64. (Measured, not compared.)

# %% tags=["measure"]
from itertools import pairwise

for budget, log in ((1024, events), (64, late_prompt(64)[1])):
    times = token_times(log)["A"][1]
    gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
    tpot = sum(gaps) / len(gaps)
    print(
        f"budget {budget:4}: A's TPOT {tpot:5.1f} ms, largest ITL {max(gaps):5.1f} ms"
    )

# %% [markdown]
# The TPOTs are of one size, for D's prompt has to be computed either way; the largest
# gap is many times TPOT in one case and little more than TPOT in the other. That is why
# one reports the whole distribution of ITL or the largest gap, and not only TPOT
# ([arXiv:2410.14257](https://arxiv.org/abs/2410.14257) shows how each of these numbers
# can be gamed). Chunks have a price too, D waits longer:
# [L03](L03_scheduling.ipynb).
#
# ## What does the clock say?
#
# Prediction first. A floor: every operation takes at least as long as its FLOPs or its
# bytes do, at rates measured on *this* machine. On top a fixed price a pass, for
# Python and a hundred small calls; we take it from one pass over one token. Nothing
# else is fitted. What do you expect of the naive passes: flat, rising, rising faster?
#
# First a claim that needs no clock: without a cache the work of the last pass grows
# with the text, with one it hardly does.

# %% tags=["claim"]
for way in ("naive", "cached"):
    passes = generation_passes(20, 96, cached=way == "cached")
    flops = [step_cost(config, [one]).total().flops for one in passes]
    print(f"{way:6} last pass over the second: {flops[-1] / flops[1]:.2f}")

# %% [markdown]
# Now the clock. `timed` runs the passes on our own `forward` and keeps the best of
# three runs of each. To forget everything, it is enough to set the cache's length to 0.

# %% tags=["measure"]
from dataclasses import replace
from time import perf_counter

from minifer.course.pictures.prefill_decode_data import predicted_seconds
from minifer.perf.limit import read_bandwidth, this_machine


def timed(passes):
    """Seconds of each pass, the best of three."""
    runs, tokens = [], (ids * 64)[: passes[-1][1]]
    for _ in range(3):
        cache, seconds = Cache(len(tokens)), []
        for query, context in passes:
            begin, cache.length = perf_counter(), context - query
            logits_of(forward(tokens[cache.length : context], cache)[-1:]).argmax()
            seconds.append(perf_counter() - begin)
        runs.append(seconds)
    return [min(times) for times in zip(*runs, strict=True)]


weight_bytes = sum(w.nbytes for w in weights.values())
here = this_machine(seconds=0.3, device="cpu")
here = replace(here, memory_bandwidth=read_bandwidth(weight_bytes, device="cpu"))
single = [(1, n) for n in range(1, 9)]
price = min(timed(single)) - predicted_seconds(config, single, here)[0]
print(f"{here.peak_flops / 1e9:.0f} GFLOP/s, {here.memory_bandwidth / 1e9:.0f} GB/s")
print(f"fixed price of a pass: {price * 1e3:.2f} ms")

# %% [markdown]
# The bandwidth is that of reading as many bytes as the model has: so small a model
# stays in the processor's caches. Look at the points (measured), the lines
# (predicted: floor plus price) and the dots (the floor alone).

# %% tags=["picture"]
from minifer.course.pictures.prefill_decode import Series, draw_times

PROMPT, OUTPUT = len(ids), 96
seconds, floor, guess = {}, {}, {}
for way in ("naive", "cached"):
    passes = generation_passes(PROMPT, OUTPUT, cached=way == "cached")
    seconds[way] = timed(passes)
    floor[way] = predicted_seconds(config, passes, here)
    guess[way] = predicted_seconds(config, passes, here, price)
kept = range(1, OUTPUT, 5)
series = [
    Series(
        way, kept, *([times[way][n] for n in kept] for times in (floor, guess, seconds))
    )
    for way in seconds
]
show(
    draw_times(
        series,
        title="Each naive pass takes longer than the one before, a cached one does not",
        x="tokens drawn so far",
        y="time of one pass (ms)",
    ),
    alt="Milliseconds of a pass against tokens drawn, predicted and measured. Naive "
    "passes rise steadily, cached passes stay flat; measured points lie above the floor.",
)

# %% [markdown]
# The cached passes are flat and almost all of their time is the fixed price: this
# model is too small to be limited by anything but Python. The naive ones rise. Where
# points lie above the line, the processor did not reach the rate of a large square
# product, least of all in attention. Never below the floor: that would be a mistake in
# the model of cost.
#
# Summed up: the time to generate n tokens, for n from 1 to 96. Look at the left end.

# %% tags=["picture"]
counts = [1, 2, 4, 8, 16, 32, 64, 96]
series = [
    Series(
        way,
        counts,
        *([sum(t[way][:n]) for n in counts] for t in (floor, guess, seconds)),
    )
    for way in seconds
]
show(
    draw_times(
        series,
        title="The cache earns nothing on the first token and more with each further one",
        x="tokens wanted",
        y="time of the generation (ms)",
        log=True,
    ),
    alt="Total time against tokens wanted, both logarithmic, predicted and measured. Naive "
    "and cached begin together at one token and part more and more.",
)
ratio = sum(seconds["naive"]) / sum(seconds["cached"])

# %% [markdown]
# At one token both do the same work. The lines part slowly, as the fixed price is paid
# by both; without it, by the floor alone, they part at the second token.
#
# ## Where does the cache lose?
#
# **At one token.** To score a text, to classify it, to embed it, one pass is all there
# is. The cache is written and never read. Look at the first row, then at what a second
# token changes.

# %% tags=["claim"]
print("wanted   naive FLOPs over cached   KV bytes kept")
for wanted in (1, 2, 12, 96):
    naive, cached = (
        total_flops(LLAMA_8B, generation_passes(1000, wanted, cached=way))
        for way in (False, True)
    )
    kept_bytes = 2 * 32 * 8 * 128 * 2 * (1000 + wanted - 1)
    print(f"{wanted:6} {naive / cached:25.2f} {kept_bytes:15,}")

# %% [markdown]
# Ratio 1.00, and 131 MB kept for nobody. From the second token on the cache wins in
# arithmetic and never stops.
#
# **In memory.** A token of this model keeps 2 (key and value) · 32 layers · 8 heads ·
# 128 numbers · 2 bytes. Every user's tokens are their own, so memory, not arithmetic,
# decides how many fit. **Guess** how many users with 8,000 tokens fit beside the
# weights on a chip of 80 GB.

# %% tags=["claim"]
from minifer.perf.costs import kv_bytes_per_token, num_parameters

per_token = int(kv_bytes_per_token(LLAMA_8B))
left = h100.memory_bytes - 2 * num_parameters(LLAMA_8B)
print(f"{per_token:,} bytes a token; {left / 1e9:.0f} GB left for keys and values")
print("users with 8,000 tokens:", int(left // (8000 * per_token)))
read = step_cost(LLAMA_8B, [(1, 8000)]).total().weight_bytes
print(
    f"a lone decode reads more cache than weights from {read / per_token:,.0f} tokens on"
)

# %% [markdown]
# Sixty-one, however fast the chip. And with a long context the cache is no longer a
# thin layer on the weights: each step reads all of it. So blocks must be packed tightly
# ([L04](L04_paged_kv.ipynb)), shared where beginnings are equal and moved to slower
# memory when idle ([L05](L05_prefix_and_tiers.ipynb)).
#
# **In the seam.** The two mistakes above cannot happen without a cache. Whoever keeps
# state can keep the wrong state.
#
# Try lengths of your own: how much is saved, and what is kept for it?

# %% tags=["picture"]
from minifer.course.pictures.prefill_decode import saved_view

lengths = [1, 10, 100, 1000, 4000]
explore(saved_view, prompt=[1000, *lengths], output=[100, *lengths])

# %% [markdown]
# A long prompt with one token wanted saves nothing; a short prompt with many saves
# less than you may think, since its early passes are short either way.
#
# ## Takeaways
#
# - Without a cache, generating T tokens computes T²/2 tokens and T³/6 pairs; with one,
#   T and T²/2.
# - Only attention mixes tokens, and it needs nothing of earlier tokens but keys and
#   values. So these are kept, rotated keys and all.
# - A chunk after a cache needs to know its offset twice: in the mask and in the
#   positions. A test with a single chunk sees neither mistake.
# - One chunk, many chunks and one token at a time give the same logits: prefill and
#   decode are the same function at different sizes.
# - A step reads every weight once, whatever it computes. Many tokens: limited by
#   arithmetic. Few: limited by memory.
# - TTFT is waiting and prefill, ITL is decode and whoever interrupts it. TPOT is a mean
#   and hides the interruption.
# - For one wanted token the cache is a cost. For long contexts it is the largest thing
#   in memory.
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
passes = [generation_passes(10, 6, cached=way) for way in (False, True)]
print("1.", [work(p)[0] for p in passes] == [75, 15])
mask = causal_mask(3, 8, None)
print("2.", list(mask.shape) == [3, 8] and int(mask.sum()) == 21)
three = RequestMetrics(1.0, None, 1.2, 1.6, None, 3)
print("3.", [round(t, 3) for t in (three.ttft, three.tpot)] == [0.2, 0.2])
print("4.", 2000 * per_token == 262_144_000)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - **No phases in the scheduler.** vLLM's V1 scheduler says in its first comment that
#   there is no decoding phase nor prefill phase: a request has computed tokens and
#   tokens, and the scheduler lets the one catch up with the other
#   ([scheduler.py](https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/sched/scheduler.py)).
#   minifer does the same. nano-vLLM makes each step either all prefill or all decode
#   ([scheduler.py](https://github.com/GeeeekExplorer/nano-vllm/blob/main/nanovllm/engine/scheduler.py)),
#   and so do the batches of
#   [mini-sglang](https://github.com/sgl-project/mini-sglang), SGLang's small sibling,
#   prefill first.
# - **Chunks to protect ITL.** Sarathi-Serve
#   ([arXiv:2403.02310](https://arxiv.org/abs/2403.02310)) mixes decodes with chunks of
#   prefill; it is where "stall-free" batching comes from.
# - **Two machines indeed.** DistServe
#   ([arXiv:2401.09670](https://arxiv.org/abs/2401.09670)) and Splitwise
#   ([arXiv:2311.18677](https://arxiv.org/abs/2311.18677)) run prefill and decode on
#   different chips and send the cache across.
# - **The words on the dashboard.** vLLM exports `vllm:time_to_first_token_seconds` and
#   `vllm:inter_token_latency_seconds` as histograms
#   ([metrics](https://docs.vllm.ai/en/latest/usage/metrics/)). TensorRT-LLM's
#   documents call the two phases *context phase* and *generation phase*
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
