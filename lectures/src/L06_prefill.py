# %% [markdown]
# # L06 · Prefill
#
# A prompt is many tokens that are all known. The model can compute them together, and
# those of other prompts with them. This lecture packs prompts of different lengths onto
# one axis, cuts a long one into chunks, and finds the place where a step stops waiting
# for memory and starts waiting for arithmetic.
#
# 55 minutes of reading, 75 minutes of exercises. Needs L01 (roofline), L02 (KV cache)
# and L04 (blocks); no GPU, no network.
#
# After it you can
#
# - **lay out** prompts of any lengths on one token axis, and say what marks their ends;
# - **draw** the mask of a step that mixes whole prompts, chunks and decodes;
# - **prove** by numbers that packing and chunking change no logit;
# - **compute** from which number of tokens on prefill is compute-bound;
# - **choose** a chunk size, and name what it costs whom.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the third, prefill](figures/life_map_prefill.svg)
#
# It has been scheduled and has its blocks. Now its key, its value and its hidden state
# are computed, with those of all the tokens beside it. The next cell sets up and prints
# nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import torch

from minifer.course.pictures import packed_prefill as pictures

begin("L06")

# %% [markdown]
# ## How do three prompts become one batch?
#
# A, B and C have prompts of 20, 29 and 18 tokens. A matrix needs rows of one length, so
# the oldest way pads each prompt to the longest. Before you look: how many rows does
# padding compute, and how many are thrown away?

# %% tags=["claim"]
tokenizer = example.tiny().tokenizer
prompts = {name: tokenizer.encode(text) for name, (text, _) in example.TRIO.items()}
lengths = {name: len(ids) for name, ids in prompts.items()}
padded, packed = len(lengths) * max(lengths.values()), sum(lengths.values())
print(lengths, "padded:", padded, "packed:", packed)
print(f"thrown away: {padded - packed} of {padded}, {1 - packed / padded:.0%}")

# %% [markdown]
# 87 rows for 67 tokens: 23 % of the work is for nothing. In general the share is
# 1 − mean / longest. With one prompt of 2,000 tokens among thirty-one of 100 it is 92 %.
#
# The other way lays the prompts end to end on one **token axis**. The model does not
# mind: norms, projections and the MLP treat each row alone. Compare the two in the
# picture.

# %% tags=["picture"]
show(
    pictures.packing_figure(
        lengths, title="Packed, three prompts take 67 rows, not 87"
    ),
    alt="Above, three rows of length 29, of which A fills 20, B all 29 and C 18; the "
    "rest is padding. Below, one row of 67 tokens: A, B and C end to end.",
)

# %% [markdown]
# The packed row holds no hole. What it has lost is the information where a prompt ends.
# Two lists bring it back:
#
# - **cu_seqlens** (cumulative sequence lengths; in minifer `query_start`): where each
#   request begins, and one more number for the end;
# - **positions**: the place of each token in its own request.
#
# By hand, for prompts of 3, 1 and 2 tokens: cu_seqlens is [0, 3, 4, 6], positions are
# [0, 1, 2, 0, 0, 1]. For A, B and C the next cell does the same; look at where the
# positions start again.

# %% tags=["claim"]
from itertools import accumulate

cu_seqlens = [0, *accumulate(lengths.values())]
positions = torch.cat([torch.arange(n) for n in lengths.values()])
print("cu_seqlens:", cu_seqlens)
print("positions around the first border:", positions[18:23].tolist())

# %% [markdown]
# Position 19 is A's last, and B begins at 0. Exercise 6.1 asks for the general case, in
# which some of a request's tokens are computed already.
#
# ## Who may look at whom?
#
# One operation does look at other rows: attention. A query may see a key when both
# belong to the same request and the key is not later. As two conditions on the packed
# axis this is a matrix of blocks along the diagonal, each a triangle. Count before you
# run it: triangles of 20, 29 and 18 rows hold how many pairs?

# %% tags=["claim"]
owner = torch.repeat_interleave(torch.arange(3), torch.tensor([*lengths.values()]))
same_request = owner[:, None] == owner[None, :]
not_later = positions[:, None] >= positions[None, :]
mask = same_request & not_later
print("pairs:", int(mask.sum()), "of", mask.numel())
print("by hand:", sum(n * (n + 1) // 2 for n in lengths.values()))

# %% [markdown]
# 210 + 435 + 171 = 816 pairs of 4,489: one dense product computes 5.5 times what is
# needed.
# Hold on to that; it is the price of writing packed attention as one masked product.
#
# To see whether the model agrees, we need a **back end** with this attention. In
# minifer a back end is what runs the operations; ours inherits all of them and changes
# one. Look at how `attend` uses the mask.

# %% tags=["claim"]
import torch.nn.functional as F

from minifer.execution.reference import DenseBackend


class PackedBackend(DenseBackend):
    """Attention over a whole packed batch in one product, under a mask [T, T]."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def attend(self, query, key, value, kv, slot, batch, scale, window):
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


# %% [markdown]
# The slow twin computes each prompt alone. If packing is right, every logit of every
# token is the same, up to the rounding of float32. `packed_logits` runs the real model
# on our axis; look at the largest difference.

# %% tags=["claim"]
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.reference import reference_logits

model = example.tiny().model
flat = [token for ids in prompts.values() for token in ids]


@torch.inference_mode()
def packed_logits(mask, positions):
    T = len(flat)
    rows, table = list(range(T)), [[0]] * 3
    batch = ForwardBatch.build(
        flat, positions, [-1] * T, cu_seqlens, [*lengths.values()], table, rows, 1
    )
    backend = PackedBackend(mask)
    return model.logits(model(batch, None, backend), backend).split([*lengths.values()])


alone = [reference_logits(model, ids) for ids in prompts.values()]
together = packed_logits(mask, positions.tolist())
for name, ours, truth in zip("ABC", together, alone, strict=True):
    gap = float((ours - truth).abs().max())
    print(name, "equal to the prompt alone, to 1e-4:", gap < 1e-4)

# %% [markdown]
# Packing changes nothing. The next two cells change the packing, to see what a mistake
# looks like.
#
# ## What happens when the mask forgets a border?
#
# Suppose only `not later` on the packed axis is kept, the mask of one long text. Which
# of the three requests will be wrong? Decide before you run.

# %% tags=["claim"]
one_text = torch.ones(packed, packed, dtype=torch.bool).tril()
leaked = packed_logits(one_text, positions.tolist())
for name, ours, truth in zip("ABC", leaked, alone, strict=True):
    wrong = int(((ours - truth).abs().max(dim=1).values > 1e-2).sum())
    print(name, f"{wrong} of {len(truth)} tokens have other logits")

# %% [markdown]
# A is untouched: nothing stands before it. B reads A's prompt and C reads both. So a
# test that looks at the first request of a batch, or at batches of one, never fails. It
# is also a leak of one user's text into another's answer.
#
# The second mistake is quieter. Let the positions run on from 0 to 66 over all three
# prompts, with the right mask. Look at the differences, and try to explain them.

# %% tags=["claim"]
running_on = packed_logits(mask, list(range(packed)))
for name, ours, truth in zip("ABC", running_on, alone, strict=True):
    print(
        name, "largest difference below 1e-2:", bool((ours - truth).abs().max() < 1e-2)
    )

# %% [markdown]
# Hardly anything changes. This model, like most, has rotary positions: queries and keys
# are turned by an angle for each position, so that attention sees only the *distance* of
# two tokens. Within a request all distances are still right. The mistake is real,
# though: it shows when keys come from somewhere else. Let B find its first 16 tokens in
# the cache, where A computed them at positions 0 to 15. Its other 13 tokens must
# continue at 16; let them continue at 36, after A's 20 rows, and look again.

# %% tags=["claim"]
start = cu_seqlens[1]  # B's first row
shifted = positions.tolist()
shifted[start + 16 : start + 29] = range(36, 49)
found, wrong_place = alone[1], packed_logits(mask, shifted)[1]
gap = (found - wrong_place).abs().max(dim=1).values
print("tokens of B with other logits:", int((gap > 1e-2).sum()), "of 29")
print("the first of them:", int((gap > 1e-2).nonzero()[0]))

# %% [markdown]
# Every token after the border is wrong, those before it are right. A bug that needs a
# prefix hit and a second request in the batch passes every test of one prompt.
#
# ## What if part of a prompt is computed already?
#
# Then a request has fewer queries than keys. It has `num_computed` keys in the cache,
# from a prefix hit or from an earlier chunk, and computes T new ones. New token t
# stands at position num_computed + t and sees num_computed + t + 1 keys. The mask is no
# longer square: T rows, and one column for every token of every context.
#
# The real engine makes such a step when A, B and C share a budget of 16 tokens. Look at
# step 2: A computes the rest of its prompt. B finds 16 of its 29 tokens in A's blocks
# and computes 12 of the other 13; then the budget is used up.

# %% tags=["claim"]
run = example.run()
for number, (step, _) in enumerate(run.steps[:4], start=1):
    parts = pictures.parts_of(step)
    text = "  ".join(f"{p.request_id}: {p.queries} after {p.computed}" for p in parts)
    print(f"step {number}  query_start {step.query_start}  {text}")

# %% [markdown]
# Step 2 gives A 4 queries after 16 keys and B 12 queries after 16. Step 3 holds a
# decode of A (1 after 20), the last prompt token of B (1 after 28) and 14 tokens of C.
# To attention, a decode is a chunk of one.
#
# One token of B under the microscope, at position 20: the step that computes it among
# 15 others. (The engine's own lines are shown, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(run, "B", position=20, stage="prefill")

# %% [markdown]
# One forward pass, 16 tokens, ours among them: on the axis it stands behind A's four.
#
# Here is the mask of step 2. Look at the hatched part: keys that no query of this step
# computes.

# %% tags=["picture"]
parts = pictures.parts_of(run.steps[1][0])
show(
    pictures.mask_figure(
        parts, title="Step 2: 16 queries, of which A's 4 and B's 12 begin after 16 keys"
    ),
    alt="A mask of 16 rows and 48 columns. A's 4 rows see 16 cached keys and a "
    "triangle of 4. B's 12 rows see 16 cached keys and a triangle of 12.",
)

# %% [markdown]
# Two rectangles with a staircase each. Now every step of the run, under several
# budgets: move the sliders and predict the picture first. The number of rows never
# exceeds the budget.

# %% tags=["picture"]
runs = {
    budget: example.run(max_num_batched_tokens=budget) for budget in (16, 5, 21, 67)
}


def mask_view(budget, step):
    """The mask of one step of the engine under one token budget."""
    steps = runs[budget].steps
    parts = pictures.parts_of(steps[min(step, len(steps)) - 1][0])
    return pictures.mask_figure(parts, title=f"Budget {budget}, step {step}")


explore(
    mask_view,
    alt="The mask of one step of A, B and C: a staircase a request, after the keys "
    "that lie in the cache.",
    labels={"budget": "budget (tokens)", "step": "engine step"},
    budget=[16, 5, 21, 67],
    step=[1, 2, 3, 4, 5, 6, 7, 8],
)

# %% [markdown]
# With 67, step 1 finishes all three prompts: 51 rows, since B finds 16 tokens in A's
# blocks. With 5, A alone takes four steps.
#
# ## Does chunking change an answer?
#
# It must not: this is the invariant of the book. The engine runs the trio under six
# budgets; look at the steps, which differ, and at the last two columns, which may not.

# %% tags=["claim"]
from minifer.execution.reference import reference_generate

truth = {
    name: reference_generate(model, prompts[name], wanted)
    for name, (_, wanted) in example.TRIO.items()
}
print("budget  steps  rows computed  same tokens")
for budget in (1, 5, 16, 20, 64, 512):
    got = example.run(max_num_batched_tokens=budget, num_kv_blocks=64)
    rows = sum(step.query_start[-1] for step, _ in got.steps)
    same = all(got.tokens(name) == truth[name] for name in truth)
    print(f"{budget:6} {len(got.steps):6} {rows:14} {same!s:>12}")

# %% [markdown]
# The same tokens from 75 steps or from 12. The rows computed are the same as well: a
# chunked prompt computes no token twice.
#
# Also its pairs are the same. Token p sees p + 1 keys, whatever chunk it stands in. Do
# one by hand: 5 tokens in chunks of 2, 2 and 1 make 3 + 7 + 5 = 15 pairs, and 5 · 6 / 2
# is 15. The cost model of L01 counts them for a long prompt.

# %% tags=["claim"]
from minifer.perf.costs import attended_pairs

S = 8192
for chunk in (8192, 2048, 500):
    ends = [min(S, start + chunk) for start in range(0, S, chunk)]
    starts = range(0, S, chunk)
    pairs = [attended_pairs(e - s, e) for s, e in zip(starts, ends, strict=True)]
    print(f"chunks of {chunk:5}: {len(pairs):3} steps, {sum(pairs):,} pairs")

# %% [markdown]
# 33.6 million pairs each time. So what does chunking cost? Two things are read again in
# every step: the weights, and the keys and values of all earlier chunks.
#
# ## Why does the engine not attend under one big mask?
#
# Our `PackedBackend` computes all pairs and hides most. With R prompts of n tokens it
# computes R² n² pairs and needs R n (n + 1) / 2: it wastes more the more prompts there
# are. Look at the share that is needed.

# %% tags=["claim"]
for R in (1, 3, 32):
    for n in (20, 512):
        needed, dense = R * n * (n + 1) // 2, (R * n) ** 2
        share = f"{needed:10,} of {dense:12,} = {needed / dense:.1%}"
        print(f"{R:2} prompts of {n:3}: {share}")

# %% [markdown]
# A single prompt wastes half, thirty-two waste 98 %. That is why a **varlen** attention
# kernel (for sequences of variable length) takes cu_seqlens instead of a mask: it cuts
# each request's own rectangle into tiles and never visits what lies between requests.
# minifer's torch path gets there by a loop over requests. The loop loses when chunks are
# many and tiny, each a call; the GPU kernel `flash_attention` has the loop inside.
# Compare our masked attention with the engine's
# on real steps: random queries over a paged cache, for every step of the run.

# %% tags=["claim"]
from minifer.execution.attention import paged_attention

H, K, C, P = 4, 2, 16, example.BLOCK_SIZE
generator = torch.Generator().manual_seed(6)


def rand(*shape):
    return torch.randn(*shape, generator=generator)


def masked_attention(query, keys, values, batch):
    """One product over the whole cache: every slot is a key, most are hidden."""
    mask = torch.zeros(len(query), len(keys), dtype=torch.bool)
    for b, length in enumerate(batch.seq_lens_host):
        start, end = batch.query_start_host[b : b + 2]
        slots = batch._slots(batch.block_tables[b], length)
        seen = torch.arange(length) <= batch.positions[start:end, None]
        mask[start:end, slots] = seen
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


# %% [markdown]
# The mask hides every slot that is not this request's, free blocks included. Under a
# budget of 21, A takes 20 rows and B the last. Look whether the two agree in all steps.

# %% tags=["claim"]
largest = 0.0
for step, _ in runs[5].steps + runs[21].steps:
    batch = ForwardBatch.of(step, torch.device("cpu"))
    keys, values = rand(12, P, K, C), rand(12, P, K, C)
    query = rand(batch.num_tokens, H, C)
    ours = masked_attention(query, keys.flatten(0, 1), values.flatten(0, 1), batch)
    theirs = paged_attention(query, keys, values, batch, scale=C**-0.5)
    largest = max(largest, float((ours - theirs).abs().nan_to_num(9).max()))
print(len(runs[5].steps + runs[21].steps), "steps, equal to 1e-5:", largest < 1e-5)

# %% [markdown]
# Equal, in the batches of two schedules. The engine differs in two ways. It gathers
# only a request's own slots, and it zeroes masked values: a slot that was never written
# may hold NaN, and a weight of 0 times NaN is NaN. Our version trusts the mask.
#
# ## Whose logits does anybody read?
#
# A prompt of n tokens yields n rows of hidden states, and only the last one is asked
# for a next token. The **head**, the product with the vocabulary, is left out for the
# others. How much does that save? For Llama 3.1 8B (32 layers, 8.03 billion parameters,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3, which rounds the
# checkpoint's vocabulary of 128,256) and a prompt of 8,192 tokens, look at the size of
# what is not computed.

# %% tags=["claim"]
from minifer.course.shapes import LLAMA_8B as llama
from minifer.perf.costs import step_cost

every = step_cost(llama, [(S, S)], num_logits=S)["head"]
last = step_cost(llama, [(S, S)], num_logits=1)["head"]
print(f"head for every row: {every.flops / 1e12:.1f} TFLOP")
print(f"logits in float32: {S * llama.vocab_size * 4 / 1e9:.1f} GB")
size = llama.vocab_size * 4 / 1e3
print(f"for the last row: {last.flops / 1e9:.2f} GFLOP, {size:.0f} kB")

# %% [markdown]
# 4.2 GB of logits for nothing, on a card that needs this memory for KV. So a step names
# the rows somebody reads. A chunk that does not end its prompt is read by nobody. Look
# at the rows the engine asks for: step 1 (16 of A's 20 tokens) wants none.

# %% tags=["claim"]
for number, (step, logits) in enumerate(run.steps[:4], start=1):
    last_rows = [end - 1 for end in step.query_start[1:]]
    print(f"step {number}  last rows {last_rows}  asked for {step.logits_rows}")
    assert len(logits) == len(step.logits_rows)

# %% [markdown]
# In step 2 row 3 is A's last; B's row 15 is the end of a chunk, not of its prompt, and
# nobody reads it. (A request for log-probabilities of its prompt reads them all; then
# the head is paid for.) Exercise 6.3 is this gather.
#
# ## When does a step wait for arithmetic?
#
# A step reads every weight once, and does 2 FLOPs for each weight and token. With
# weights of b bytes, T tokens make about 2 T / b FLOPs a byte. L01 called the chip's
# ratio the ridge point: 295 on an H100 in bfloat16. Predict the T at which prefill
# crosses it, then look at the step's floor (modelled).

# %% tags=["claim", "row-11"]
from minifer.perf.devices import DEVICES

h100 = DEVICES["H100-SXM"]
for T in (1, 64, 256, 512, 1024):
    cost = step_cost(llama, [(T, T)]).total()
    limit = "arithmetic" if cost.intensity > h100.ridge_point else "memory"
    floor = h100.seconds(cost.flops, cost.bytes)
    print(
        f"{T:5} tokens: {floor * 1e3:5.1f} ms, {floor / T * 1e6:6.1f} µs each: {limit}"
    )

# %% [markdown] tags=["row-11"]
# From 1 to 256 tokens the step takes 4.5 to 5.4 ms: up to the ridge, more tokens are
# almost free. Past it each costs the same 14 µs, and a longer step only makes others
# wait.
#
# “Prefill is compute-bound, like training without the backward pass” ([Dan Fu, CS336, June
# 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s)) is so for long prompts, his being
# 10,000 tokens, and for full steps. A short prompt alone waits for memory like a decode.
#
# And here? The next figure predicts and measures on this machine, with a model of
# 6.5 million random weights (its times are those of a trained one), large enough that the work
# outweighs the calls. The floor uses bandwidth and FLOP/s measured a moment ago. Expect
# the bend at a much smaller T, for a CPU has far less arithmetic for its bandwidth.

# %% tags=["picture", "row-11"]
from minifer.course.shapes import SMALL as small
from minifer.perf.costs import ElementBytes
from minifer.perf.limit import this_machine

sizes = (1, 4, 16, 64, 256)
here, float32 = this_machine(seconds=0.5), ElementBytes(4, 4, 4)
floors = {}
for T in sizes:
    cost = step_cost(small, [(T, T)], element=float32).total()
    floors[T] = here.seconds(cost.flops, cost.bytes)
measured = pictures.measure_prefill(pictures.random_model(small), small, sizes)
show(
    pictures.prefill_figure(floors, measured, title="Few tokens cost what one does"),
    alt="Time of a prefill step against its tokens, 1 to 256, on log axes: the "
    "predicted floor and what was measured here. Both are flat at first, then rise.",
)

# %% [markdown]
# Two curves of one shape: flat, a bend, then a line. The measured one lies higher by
# the cost of calls and of operations that the roofline gives away. (Small weights stay
# in a cache, so the flat part may even lie low.) The numbers, for whoever reads this
# without eyes on the picture; they are this machine's and not compared.

# %% tags=["measure"]
for T in sizes:
    share = floors[T] / measured[T]
    both = f"floor {floors[T] * 1e3:6.2f} ms, measured {measured[T] * 1e3:6.2f} ms"
    print(f"{T:4} tokens: {both} ({share:.0%} of the floor's speed)")

# %% [markdown]
# On an idle machine the share is largest at the largest step: large products keep it
# busy. Did your guess of the bend hold?
#
# The same two rates of this machine's GPU, where there is one.

# %% tags=["measure"]
if torch.cuda.is_available():
    gpu = this_machine(device="cuda", dtype="bfloat16")
    print(f"{gpu.name}: ridge point {gpu.ridge_point:.0f} FLOPs a byte, measured")
else:
    print("no GPU here: its ridge point is not measured")

# %% [markdown]
# A GPU's bend lies at hundreds of tokens.
#
# ## How large should a chunk be?
#
# A long prompt arrives while 32 requests decode (1,024 tokens of context each). If its
# 8,192 tokens run in one step, the others get no token until it ends: an ITL spike.
# Cut, they wait one chunk. Predict both ends of the table: what does a chunk of 64 do to
# the prompt's TTFT, and one of 8,192 to the neighbours' ITL? (Llama 3.1 8B on an H100,
# modelled.)

# %% tags=["claim"]
chunks = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
costs = [
    pictures.chunk_cost(llama, h100, S, c, decoding=32, context=1024) for c in chunks
]
print("chunk  steps  TTFT ms  longest step ms  KV moved GB")
for cost in costs:
    ms = f"{cost.ttft * 1e3:8.0f} {cost.slowest * 1e3:16.1f}"
    print(f"{cost.chunk:5} {cost.steps:6} {ms} {cost.kv_bytes / 1e9:11.1f}")

# %% [markdown]
# One step of 8,192 stalls everyone for 134 ms. Chunks of 512 stall them for 10 ms, and
# the prompt's first token comes 6 % later. Chunks of 64 make the prompt six times as
# slow: each reads 15 GB of weights for 64 tokens, and all earlier KV again. (The last
# column is the prompt's own KV, written once and read by every later chunk: 70 GB.)

# %% tags=["picture"]
show(
    pictures.chunk_figure(
        costs, title="Just past the ridge, a chunk of 512 costs both users little"
    ),
    alt="Against chunk sizes from 64 to 8,192, modelled: the prompt's TTFT falls from "
    "800 to 134 ms and is flat from 512 on; the longest step rises from 6 to 134 ms.",
)

# %% [markdown]
# The curves bend around the ridge point of 295 tokens, and that is no accident: below
# it a step's weights are read for too few tokens, above it time grows with the chunk.
# Which side to err on is a choice between two users.
#
# ## When do packing and chunking lose?
#
# - **Alone on the machine.** One prompt, no neighbours: nobody gains from a chunk, and
#   a chunk below the ridge reads weights for too few tokens.
# - **Prompts of one length.** Padding adds nothing then (1 − mean / longest is 0), and a
#   rectangle needs no lists and no kernel of its own.
# - **Long contexts.** Each chunk reads all earlier keys and values again: bytes grow
#   with S² / chunk.
#
# A lone prompt, whole and in chunks. Which of the four lines will be more than 5 %
# slower than the whole?

# %% tags=["claim"]
for S_long in (8_192, 131_072):
    whole = pictures.chunk_cost(llama, h100, S_long, S_long)
    for chunk in (512, 128):
        cut = pictures.chunk_cost(llama, h100, S_long, chunk)
        kv = f"KV moved {cut.kv_bytes / 1e9:,.0f} GB, not {whole.kv_bytes / 1e9:,.0f}"
        print(f"{S_long:7} tokens in {chunk}s: {cut.ttft / whole.ttft - 1:+.0%}, {kv}")

# %% [markdown]
# Chunks of 512 cost a lone prompt nothing here: the model of L01 lets reads hide behind
# arithmetic, and a chunk past the ridge has enough of it. (A real kernel hides less.)
# Chunks of 128 cost most where the prompt is short: a long one has its own arithmetic,
# the pairs of attention.
#
# ## Does the order of requests matter?
#
# On the packed axis somebody is first. If a row's result depended on its place, answers
# would depend on who else is there. The engine gets the trio in all six orders; look for
# six times True.

# %% tags=["claim"]
from itertools import permutations

for order in permutations("ABC"):
    got = example.run(
        {name: example.TRIO[name] for name in order}, max_num_batched_tokens=67
    )
    same = all(got.tokens(name) == truth[name] for name in order)
    print("".join(order), [p.queries for p in pictures.parts_of(got.steps[0][0])], same)

# %% [markdown]
# The shares differ, for whoever of A and B comes second finds the other's blocks. The
# answers do not. (Bitwise equality is more than this: a matrix product may round
# differently for another number of rows.)
#
# ## Takeaways
#
# - Packed prompts need no padding; cu_seqlens and positions replace the rectangle.
# - Attention is the only place where rows meet. Its mask is a staircase a request.
# - A test on the first request, or on one request, cannot see a leak between requests.
# - Chunking changes neither tokens nor pairs. It costs reads: weights and earlier KV.
# - Up to the ridge point more tokens in a step are nearly free; past it they cost others.
# - Logits are computed where somebody reads them.
#
# ## Questions
#
# **1.** Prompts of 7, 1 and 4 tokens. What are cu_seqlens and the last rows?
#
# <details><summary>Answer</summary>
#
# [0, 7, 8, 12], and rows 6, 7 and 11.
#
# </details>
#
# **2.** A request has 10 tokens in the cache and computes 3. How many pairs does its
# attention compute?
#
# <details><summary>Answer</summary>
#
# 11 + 12 + 13 = 36.
#
# </details>
#
# **3.** The border between requests is missing in the mask. Which request of a batch is
# right nevertheless?
#
# <details><summary>Answer</summary>
#
# The first.
#
# </details>
#
# **4.** A chip does 100 TFLOP/s and reads 1 TB/s; weights have 2 bytes. From how many
# tokens on is a step compute-bound, roughly?
#
# <details><summary>Answer</summary>
#
# The ridge point is 100 FLOPs a byte. A token brings 2 FLOPs for each weight of 2
# bytes, one a byte: 100 tokens.
#
# </details>
#
# **5.** A prompt of 4,096 tokens runs in chunks of 512. How many tokens' keys does
# attention read, over all steps?
#
# <details><summary>Answer</summary>
#
# Each step reads its whole context, itself included: 512 · (1 + 2 + … + 8) = 18,432.
#
# </details>
#
# The engine's own functions check the answers that are numbers.

# %% tags=["claim"]
print("1.", [0, *accumulate([7, 1, 4])] == [0, 7, 8, 12])
print("2.", attended_pairs(3, 13) == 36)
print("4.", 100e12 / 1e12 == 100)
print("5.", sum(range(512, 4097, 512)) == 18_432)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - vLLM packs with `query_start_loc` and `seq_lens`, and mixes chunks and decodes in one
#   step by default since its V1 engine; the budget is `max_num_batched_tokens`.
# - SARATHI ([arXiv:2308.16369](https://arxiv.org/abs/2308.16369)) introduced chunked
#   prefill with decodes riding along, Sarathi-Serve
#   ([arXiv:2403.02310](https://arxiv.org/abs/2403.02310)) the stall-free schedule.
# - FlashAttention ([arXiv:2205.14135](https://arxiv.org/abs/2205.14135)) and its varlen
#   interface with cu_seqlens are what most engines call for prefill.
# - Cutting prefill off to machines of its own, instead of mixing it with decode, is
#   disaggregation: L10.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 6.1 | [cu_seqlens and positions](../exercises/ex06_prefill.ipynb) | 4 | 15 |
# | 6.2 | [The mask of a packed step](../exercises/ex06_prefill.ipynb) | 6 | 25 |
# | 6.3 | [Whose logits](../exercises/ex06_prefill.ipynb) | 3 | 10 |
# | 6.4 ★ | [Choose a chunk for a TPOT target](../exercises/ex06_prefill.ipynb) | 4 | 25 |
#
# ## Where to read on
#
# 1. [step_input.py](../minifer/kv/step_input.py): the picture at the top is the token axis.
# 2. [forward_batch.py](../minifer/execution/forward_batch.py): how a chunk is told from a decode.
# 3. [attention.py](../minifer/execution/attention.py): `chunk_attention`, the staircase.
# 4. [flash_attention.py](../kernels/flash_attention.py): the loop over requests, inside a kernel.
# 5. [scheduler.py](../minifer/scheduling/scheduler.py): the line that cuts a prompt.
