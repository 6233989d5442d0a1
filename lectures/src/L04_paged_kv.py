# %% [markdown]
# # L04 · Paged KV cache
#
# Keys and values of every token stay in memory until its request is done. How long the
# request will be nobody knows, so nobody knows how much memory to set aside. This
# lecture cuts the cache into blocks of a few tokens, hands them out one by one, and
# shows what that costs.
#
# 60 minutes of reading, 90 minutes of exercises. Needs L02 (what a KV cache is); no GPU,
# no network.
#
# After it you can
#
# - **compute** what a contiguous reservation wastes, and name the three kinds of waste;
# - **translate** a position into a slot by a block table, and back;
# - **build** a pool of blocks with reference counts, and grow, fork and free tables on it;
# - **explain** when a shared block is copied, and when it must not be;
# - **check** attention over scattered blocks against attention over one piece;
# - **predict** the waste of a block size, and say where blocks lose.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the second, KV](figures/life_map_kv.svg)
#
# The scheduler wants to compute some tokens. Before the model runs, each of them needs a
# place for its key and its value. The set-up cell prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import torch

from minifer.course.pictures import paged_kv, paged_kv_data

begin("L04")

# %% [markdown]
# The book's three requests run through the engine. Here is all that this stage does for
# one token of A, the one at position 24, under the microscope: it gets a block, it gets a
# slot, and six steps later the block is free again. (The engine's own lines are shown, so
# nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

run = example.run()
microscope(run, "A", position=24, stage="kv")

# %% [markdown]
# Three events. The rest of this lecture is why.
#
# ## How much memory does a request need, and who knows it?
#
# Each layer keeps a key and a value of each token. minifer-tiny has 4 layers, 6 KV heads
# of 16 numbers, 4 bytes a number. Do the product: 2 · 4 · 6 · 16 · 4. Then the book's
# three requests: A brings 20 tokens and wants 12. How many of these 32 does the cache
# have to keep?

# %% tags=["claim"]
from minifer.perf.costs import kv_bytes_per_token

token_bytes = kv_bytes_per_token(example.tiny().config, element_bytes=4)
states = paged_kv_data.pool_states(run)  # the cache in each step, read off the events
finals = {name: len(text) for state in states for name, text in state.text.items()}
print(f"a token: {token_bytes:.0f} bytes")
for name, (text, wanted) in example.TRIO.items():
    print(f"{name}: {len(text)} + {wanted} tokens, the cache keeps {finals[name]}")

# %% [markdown]
# 3,072 bytes a token, and 31 tokens, not 32: the last token is drawn and shown, but
# nothing is computed after it, so its key and value are never needed.
#
# Here we asked for exactly so many tokens. A user does not say: the answer ends where the
# model ends it, somewhere below a limit.
#
# ## What does a reservation waste?
#
# Attention is easiest when a request's keys lie in one piece, a *contiguous* stretch of
# memory. To keep it so, the engine must *reserve* the stretch before the first token.
# Say the limit is 64 tokens and the cache has 96 slots. How many of our three requests
# can run together? Look at the top strip.

# %% tags=["picture"]
show(
    paged_kv.reservation_figure(states[7], finals, longest=64),
    alt="Three strips of 96 slots in step 8. With 64 slots reserved a request, A has "
    "tokens in part of its 64, and the other 32 slots are too few for B. With exact "
    "reservations A, B and C lie side by side. With blocks of 8, A and B share two "
    "blocks, each request holds what it has filled so far, and two blocks are free.",
)

# %% [markdown]
# One. The strip shows three kinds of waste:
#
# - **kept for later**: slots whose token will come, but has not;
# - **internal fragmentation**: slots inside a reservation that will never be used;
# - **external fragmentation**: free slots that are of no use, because no free stretch
#   is long enough.
#
# Redo the numbers for A in step 8.

# %% tags=["claim"]
tokens, longest, cache = len(states[7].text["A"]), 64, 96
print("A has", tokens, "tokens, will have", finals["A"], "and reserved", longest)
print("kept for later:", finals["A"] - tokens)
print("internal fragmentation:", longest - finals["A"])
print("external fragmentation:", cache - longest, "slots free, B wants", longest)

# %% [markdown]
# 33 of 64 slots for nothing, and 32 more that nobody can use. If the lengths were known
# (middle strip), all three would fit, yet slots for later tokens would still stand empty,
# and gaps would come back when requests of other lengths leave.
#
# How bad is it with many requests? A model, not the engine: 16,384 slots, a line at the
# door that never ends, a token a step for each request. Lengths are log-normal, μ = 4.6 and
# σ = 0.9 for prompts, μ = 5 and σ = 1 for answers, both cut at 1,024. Four policies: reserve
# the longest; reserve the prompt and, as if known, the answer's length rounded up to a
# power of two; reserve exactly the length; or take blocks of 16 as tokens come, with 4 %
# kept free. Guess the first column.

# %% tags=["claim"]
lengths = paged_kv_data.draw_lengths(2000)
shares = paged_kv_data.reservations(lengths)
prompt, answer = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
print(f"mean prompt {prompt:.0f}, answer {answer:.0f}, limit {paged_kv_data.LONGEST}")
for s in shares:
    parts = f"{s.stored:4.0%} tokens {s.later:4.0%} later {s.never:4.0%} never"
    print(f"{s.policy:13} {parts} {s.gaps:4.0%} gaps, {s.running:3.0f} requests")

# %% [markdown]
# Less than a quarter of the cache holds tokens when the longest is reserved, about half
# with every length known in advance. The last row is what this lecture builds.

# %% tags=["picture"]
show(
    paged_kv.shares_figure(shares),
    alt="Four bars, the use of a full cache. Reserving the longest: most slots are "
    "never used. Powers of two: less waste, but gaps. Exact and known: a third is kept "
    "for later tokens. Blocks: nearly all slots hold a token.",
)

# %% [markdown]
# Reported by others: Kwon et al. measured in September 2023
# ([arXiv:2309.06180](https://arxiv.org/abs/2309.06180), figure 2) that 20.4 % to 38.2 %
# of the KV memory of earlier systems held tokens. Their systems reserve in the same three
# ways; their lengths differ from ours.
#
# It matters because a step reads all weights once, for however many requests. As long as
# it waits for memory (L01), four times the requests are nearly four times the tokens a
# second; the paper reports 2 to 4 times the throughput of the systems before it.
#
# ## What if a request's memory need not be in one piece?
#
# Cut the cache into **blocks** of P slots (papers also say *page*). A request holds a
# list of blocks, its **block table**, in the order of its tokens. Where the blocks lie
# does not matter. The token at position p lies in the block that the table has in place
# p // P, at offset p mod P. Counted through the whole cache, its **slot** is
# block · P + offset.
#
# In step 4, B has the table [0, 1, 3, 4], and P = 8. Where is position 27? 27 // 8 = 3
# and 27 mod 8 = 3: block 4, offset 3, slot 35. Look for it in the picture. It is the last
# `e` of `executes`, since the model's tokens are bytes.

# %% tags=["picture"]
show(paged_kv.pool_figure(states[3]), alt=states[3].words)

# %% [markdown]
# Above, each request in the order of its tokens; below, the cache as it lies. Blocks 0
# and 1 stand in two tables: A and B begin with the same 16 tokens (L05 says how the
# engine finds that out). Dots are tokens the model drew. A thick frame marks what this
# step writes.
#
# Which character lies where, and does the engine tell the model the same slots?

# %% tags=["claim"]
state = states[3]
for name, position in (("A", 0), ("B", 27), ("C", 17)):
    block = state.tables[name][position // 8]
    slot = block * 8 + position % 8
    print(f"{name} at {position}: block {block}, slot {slot}, {state.slots()[slot]!r}")

told = [slot for step, _ in run.steps for slot in step.slot_mapping]
expected = [
    state.slot(entry.request.request_id, position)
    for (step, _), state in zip(run.steps, states, strict=True)
    for entry in step.scheduled
    for position in range(entry.start, entry.end)
]
print(len(told), "slots went to the model, as the tables say:", told == expected)

# %% [markdown]
# The `e` is in slot 35. The list of slots goes to the model as `slot_mapping`. In
# exercise 4.1 you write it for a step of many requests.
#
# ## Who owns a block?
#
# A block is free or in use, never both. Two tables may hold it, so "in use" needs a
# number: the **reference count**, how many tables hold the block. It is free when the
# count is 0. That is all there is to a pool; look at which end blocks are taken from.


# %% tags=["claim"]
class Pool:
    """N blocks; a block is in the free queue exactly when nobody holds it."""

    def __init__(self, num_blocks):
        self.free = list(range(num_blocks))
        self.ref_count = [0] * num_blocks

    def take(self):
        block = self.free.pop(0)
        self.ref_count[block] = 1
        return block

    def share(self, block):
        self.ref_count[block] += 1

    def give_back(self, block):
        if self.ref_count[block] == 0:
            raise ValueError(f"block {block} is free already")
        left = self.ref_count[block] - 1
        self.ref_count[block] = left
        if not left:
            self.free.append(block)


# %% [markdown]
# Taken from the front, given back to the end: the block that has been free longest is
# used first, and what a block held stays as long as possible (L05 lives on that).
#
# The engine's `BlockPool` does the same. We play 3,000 random operations on both and
# compare counts and queues after each.

# %% tags=["claim"]
import random

from minifer.events import EventBus
from minifer.kv.block_pool import BlockPool
from minifer.kv.prefix_index import HashChainIndex

rng, ours = random.Random(4), Pool(24)
theirs = BlockPool(24, HashChainIndex(), EventBus())
held, same = [], True
for _ in range(3000):
    kind = rng.choice(["take", "share", *["give back"] * 2] if held else ["take"])
    block = rng.choice(held) if held else None
    if kind == "take" and ours.free:
        held.append(ours.take())
        same &= [held[-1]] == theirs.allocate(1)
    elif kind == "share":
        held.append(block)
        ours.share(block), theirs.acquire([block])
    elif kind == "give back":
        held.remove(block)
        ours.give_back(block), theirs.release([block])
    same &= ours.free == list(theirs.free_queue) == list(dict.fromkeys(ours.free))
    same &= ours.ref_count == [block.ref_count for block in theirs.blocks]
    same &= ours.ref_count == [held.count(b) for b in range(24)]
print("always the same:", same, "blocks in use at the end:", 24 - len(ours.free))

# %% [markdown]
# Always the same, the queue has no block twice, and each count is the number of holders.
# What if a block is given back once too often? Say what would happen next, if it went
# unnoticed.

# %% tags=["claim"]
for give_back in (ours.give_back, lambda block: theirs.release([block])):
    try:
        give_back(ours.free[0])
    except (ValueError, RuntimeError) as refused:
        print(type(refused).__name__, refused)

# %% [markdown]
# Both refuse. Unnoticed, the block would stand twice in the queue and go to two requests
# that overwrite each other's past. No crash, only wrong text.
#
# The engine's text, folded (not compared). Its queue is an ordered dictionary, because a
# prefix hit takes a block out of the middle, for which a list needs N steps. It reports
# events, and can no longer find what a block held when it is taken.

# %% tags=["measure"]
from minifer.course.source import show_source

show_source(BlockPool)

# %% [markdown]
# Besides the three: `publish`, for L05; `reuse_first`, for wrong guesses (L07).
#
# ## When does a table grow?
#
# A table of n blocks has room for n · P tokens. A new block is needed when a token does
# not fit, and not a token earlier. A has 20 tokens in 3 blocks of 8. Which position needs
# a fourth block, and in which step is it computed? Step 3 computes position 20.

# %% tags=["claim"]
for event in run.events:
    if event.name == "kv.block_allocated" and event.request_id == "A":
        has = len(states[event.step - 1].text["A"])
        blocks = list(event.data["blocks"])
        print(f"step {event.step}: takes {blocks}, has {has} tokens after the step")

# %% [markdown]
# Position 24 is the first of the fourth block, in step 7. Off by one here is the most
# common mistake with blocks: too early wastes a block a request, too late writes past
# the table. (nano-vLLM's line is right, and has been
# [taken for wrong](https://github.com/GeeeekExplorer/nano-vllm/issues/150).) Exercise 4.2
# is about it.
#
# Now 16 requests of many lengths, blocks of 1 to 16, and a cache so small that requests
# are sent back (*preempted*, L03). Has each table exactly the blocks its tokens need, in
# every step? And does our pool, asked for as many blocks as the engine's, hand out the
# same?

# %% tags=["claim"]
many = paged_kv_data.random_requests(16)
tables, sent_back, exact, same = 0, 0, True, True
for P in (1, 3, 8, 16):
    N, pool = 320 // P, Pool(320 // P)
    options = {"block_size": P, "num_kv_blocks": N, "enable_prefix_caching": False}
    log = example.run(many, max_num_batched_tokens=256, **options)
    for event in log.events:
        blocks = list(event.data.get("blocks", ()))
        if event.name == "kv.block_allocated":
            same &= [pool.take() for _ in blocks] == blocks
        elif event.name == "kv.block_freed":
            same &= all(pool.give_back(block) is None for block in blocks)
        sent_back += event.name == "request.preempted"
    for state in paged_kv_data.pool_states(log):
        tables += len(state.tables)
        sizes = {name: -(-len(text) // P) for name, text in state.text.items()}
        exact &= sizes == {name: len(table) for name, table in state.tables.items()}
print(f"{tables} tables of ⌈tokens / P⌉ blocks: {exact}; {sent_back} times sent back")
print("our pool hands out the same:", same, "all free again:", not any(pool.ref_count))

# %% [markdown]
# Equal. Move the slider and follow A, B and C: who takes which block,
# when A and B part, what becomes of the blocks of a request that ends.

# %% tags=["picture"]
explore(
    lambda step: paged_kv.pool_figure(states[step - 1]),
    alt=lambda step: states[step - 1].words,
    labels={"step": "engine step"},
    step=range(1, len(states) + 1),
)

# %% [markdown]
# C ends after step 9 and its blocks are free in step 10. Freeing moves three numbers
# from one list to another; no key is touched. The green feet mark full blocks that stay
# findable.
#
# ## How do several answers share a prompt?
#
# A user may ask for n = 3 answers to A's prompt. The 20 prompt tokens are the same for
# all three, so are their keys and values. After prefill the engine **forks** the
# request: the children get the parent's block table, and the counts go up.
#
# Reading together is safe. Writing is not. Blocks 0 and 1 are full, but block 2 has four
# tokens and room for four more. Let two tables write into it:

# %% tags=["claim"]
cache = list("The import statement") + [" "] * 4  # blocks 0, 1 and 2
tables = {"A": [0, 1, 2], "A#1": [0, 1, 2]}
for name, token in (("A", "!"), ("A#1", "?")):
    cache[tables[name][20 // 8] * 8 + 20 % 8] = token
for name, table in tables.items():
    print(f"{name:4}", "".join(cache[b * 8 + i] for b in table for i in range(8)))

# %% [markdown]
# A wrote `!` and reads `?`. The remedy is as old as operating systems: **copy-on-write**.
# Who is about to write into a block that others hold too takes a new one, copies the
# block, puts it into its own table and lets go of the old one. Only the last block
# of a table is ever written, so at most one block is copied a fork. The last holder
# writes in place.
#
# By hand, for n = 3: how many copies, and how many blocks in the end, when each answer
# has 12 tokens? Then look at the engine.

# %% tags=["claim"]
from minifer import SamplingParams

drawn = SamplingParams(n=3, temperature=1.0, seed=7, ignore_eos=True)
forked = example.run({"A": example.TRIO["A"]}, sampling=drawn)
for event in forked.events:
    if event.name in ("request.forked", "kv.block_copied"):
        data = event.data.get("copies") or event.data["blocks"]
        print(f"step {event.step}: {event.name} {event.request_id:4} {data}")
allocated = [e.data["blocks"] for e in forked.events if e.name == "kv.block_allocated"]
print("blocks taken:", sum(map(len, allocated)), "without sharing:", 3 * 4)

# %% [markdown]
# Two copies for three holders, 8 blocks instead of 12: two shared, then two for each.
# The picture shows it from the events. Look for the arrows in step 3.

# %% tags=["picture"]
from minifer.course.figures import block_map

show(
    block_map(forked.events, 9, title="Three answers share blocks 0 and 1"),
    alt="9 blocks over 13 steps. Blocks 0 and 1 are held by A, from step 3 on by three "
    "requests. In step 3 block 3 is a copy of block 2 for A, block 4 one for A#1; A#2 "
    "keeps block 2. From step 7 on each has one more block.",
)

# %% [markdown]
# Did sharing change an answer? Each continuation draws with a seed of its own, 7, 8
# and 9, so we can ask for the three one by one, with nothing to share.

# %% tags=["claim"]
together = [list(answer.token_ids) for answer in forked.outputs["A"].outputs]
singles = [
    SamplingParams(temperature=1.0, seed=7 + i, ignore_eos=True) for i in range(3)
]
alone = [
    example.run({"A": example.TRIO["A"]}, sampling=one).tokens("A") for one in singles
]
print("three different answers:", len({tuple(answer) for answer in together}) == 3)
print("the same as one by one:", together == alone)
tight = example.run({"A": example.TRIO["A"]}, sampling=drawn, num_kv_blocks=4)
answers = [list(answer.token_ids) for answer in tight.outputs["A"].outputs]
print("in 4 blocks, with room for one copy:", answers == together)

# %% [markdown]
# The same, even where a copy must wait for room. Where does it lose? A fork of a 3-token
# prompt shares no full block and copies one all the same.
#
# ## How does attention read scattered memory?
#
# The oracle first, the slow and plain way: fetch the blocks in the table's order, lay
# them in one piece, cut off what is not filled. Then attend as ever. Look at the shapes.


# %% tags=["claim"]
def gather_dense(cache, table, length):
    """[N, P, K, C] → the first `length` tokens of a request in one piece, [S, K, C]."""
    return cache[table].flatten(0, 1)[:length]


small = torch.arange(12.0).view(4, 3, 1, 1)  # four blocks of three slots
print(gather_dense(small, [2, 0], 5).flatten().tolist())

# %% [markdown]
# Block 2 gives 6, 7, 8, block 0 gives 0 and 1; its last slot is cut off.
#
# The engine's `paged_attention` takes a whole step at once. We compare the two on random
# steps: 1 to 4 requests with lengths of 1, a multiple of P, one more and anything else;
# prompts, chunks and decodes mixed. All slots that no request has filled hold NaN.

# %% tags=["claim"]
from minifer.execution.attention import dense_attention, paged_attention

worst, kinds = 0.0, set()
for _ in range(80):
    case = paged_kv_data.scattered_step(rng)
    paged = paged_attention(case.query, case.keys, case.values, case.batch, 0.3)
    for table, length, rows in case.requests:
        dense = [
            gather_dense(cache, table, length) for cache in (case.keys, case.values)
        ]
        truth = dense_attention(case.query[rows], *dense, 0.3)
        worst = max(worst, float((paged[rows] - truth).abs().nan_to_num(9).max()))
        kinds.add((length == 1, length % case.block_size == 0, len(paged[rows]) == 1))
print(len(kinds), "kinds of requests, largest difference below 1e-12:", worst < 1e-12)

# %% [markdown]
# Equal up to the order of additions, in float64. How the engine differs (its text is
# below, not compared): a request with one query is padded to the longest and they run as
# one batch; a longer query runs alone, over its exact context. It gathers slots, not
# blocks, and it does so once a layer.

# %% tags=["measure"]
show_source(paged_attention)

# %% [markdown]
# Two branches, and `gather` in front of each.
#
# ## What may a freed block hold?
#
# Anything. Freeing a block does not clear it, and a new block holds what its last owner
# left. So what is read must be exactly what was written. Padding makes this subtle: a
# masked slot gets weight 0. Is that enough? What is 0 · NaN?

# %% tags=["claim"]
weights, kept = torch.tensor([1.0, 0.0]), torch.tensor([5.0, float("nan")])
print("weights · values:", (weights * kept).sum().item())
zeroed = kept.masked_fill(weights == 0, 0)
print("masked values zeroed first:", (weights * zeroed).sum().item())

# %% [markdown]
# Zero times NaN is NaN. Masked values have to be set to 0, not weighed with it.
#
# The engine's debug mode makes this a test: it fills every block with NaN when it is freed
# or handed out, unless a look-up can still find it. If one stale slot reached an output,
# no token after it would be right. With 5 blocks, blocks change hands often.

# %% tags=["claim"]
for N in (12, 5):
    log = example.run(debug=True, num_kv_blocks=N, enable_prefix_caching=N > 5)
    count = sum(len(step.block_poison) for step, _ in log.steps)
    again = sum(event.name == "request.preempted" for event in log.events)
    same = all(log.tokens(request) == run.tokens(request) for request in "ABC")
    print(f"{N} blocks: {count} poisoned, {again} times sent back, same tokens: {same}")

# %% [markdown]
# Not one NaN got out, even where requests lost their blocks to each other and began anew.
#
# ## Which block size?
#
# The last block of a request is full in part. If all lengths are equally likely, it has 0
# to P − 1 empty slots, on average (P − 1) / 2. Predict for P = 16, then look at what we
# count in the engine: 16 requests, every request in every step.

# %% tags=["claim"]
counted, found = {}, {}
for P in (1, 2, 4, 8, 16, 32, 64):
    size = {"block_size": P, "num_kv_blocks": 4096 // P, "max_num_batched_tokens": 256}
    log = example.run(many, enable_prefix_caching=False, **size)
    counted[P] = paged_kv_data.empty_slots(log)
    found[P] = example.run(**size).outputs["B"].num_cached_tokens
    print(
        f"P = {P:2}: predicted {(P - 1) / 2:4}, counted {counted[P]:4.1f} empty slots;",
        end="",
    )
    print(f" {-(-1000 // P):4} entries for 1,000 tokens; B finds {found[P]:2}")

# %% [markdown]
# Close, for so few requests. Waste speaks for small blocks. So does sharing: only full
# blocks can be found again, so B finds 20 of A's tokens with small blocks and none with
# blocks of 32. Tables speak against them: ⌈S / P⌉ entries.

# %% tags=["picture"]
show(
    paged_kv.waste_figure(counted),
    alt="Empty slots a request against block size from 1 to 64. Predicted (P - 1) / 2 "
    "and the count in the engine lie on each other.",
)

# %% [markdown]
# Against a reservation of thousands of slots half a block is little: blocks of 16 to 64
# tokens are common.
#
# ## What does a block cost?
#
# The look-up, a number a block, and the way to the keys. Our `gather_dense`, like the
# engine's torch back end, reads keys and values, writes them in one piece, and attention
# reads them again: they move three times instead of once. First in bytes, for 4,096 tokens
# in one layer of 8 KV heads of 64 numbers in float32.

# %% tags=["claim"]
S, kv_bytes = 4096, 2 * 4096 * 8 * 64 * 4
for P in (1, 16, 64):
    table = 4 * -(-S // P)
    print(f"P = {P:2}: table {table:6,} bytes, {table / kv_bytes:.4%} of the KV")
print(f"dense moves {kv_bytes:,} bytes, a gather {3 * kv_bytes:,}")

# %% [markdown]
# The table is nothing. The gather should make attention three times as slow. Predicted
# from the rate at which this machine reads as many bytes again and again, and measured,
# both where this notebook was built (not compared):

# %% tags=["measure"]
from minifer.perf.limit import read_bandwidth

times = paged_kv.time_attention((256, 512, 1024, 2048, 4096), (1, 16))
bandwidths = [read_bandwidth(size, seconds=0.05) for size in times.num_bytes]
print("read bandwidth (GB/s):  ", " ".join(f"{b / 1e9:.0f}" for b in bandwidths))
for name in ("blocks of 1", "blocks of 16"):
    ratios = [a / b for a, b in zip(times.arms[name], times.arms["dense"], strict=True)]
    print(f"{name:12} against dense:", " ".join(f"{ratio:.1f}×" for ratio in ratios))
fresh = [n / 1e6 for n in times.fresh_bytes["blocks of 16"]]
print("fresh memory (MB a call):", " ".join(f"{n:.1f}" for n in fresh))

# %% [markdown]
# Lines are predicted, marks measured.

# %% tags=["picture"]
show(
    paged_kv.times_figure(times, bandwidths),
    alt="Time of one layer's attention against context from 256 to 4,096 tokens, on "
    "logarithmic axes: predicted lines for KV moved once and three times, and measured "
    "marks for dense attention, blocks of 1 and blocks of 16.",
)

# %% [markdown]
# The last line of the numbers says where the prediction is blind. Where it is 0, expect
# about three times. Where each call gets fresh memory for its copy, the operating system
# clears it page by page first, and that can cost more than all the rest.
#
# So why page at all? The loss is in one of many operations of a step, the gain is several
# times the requests in each. And the copy is not needed: a kernel walks the table and
# reads each block where it lies; exercise 4.4 is that walk in torch, and L11 writes it for
# a GPU.
#
# ## Where do blocks lose?
#
# One request of known length: nothing to share, nothing to guess. Tiny blocks: a table as
# long as the text. Large blocks: waste, and little to find. A fourth case is easy to miss.
# Blocks are handed out without a promise: when all requests grow at once, none are left,
# and somebody is sent back and computed again. The model from above says how much.

# %% tags=["claim"]
one = example.run({"A": example.TRIO["A"]}, num_kv_blocks=4)
used = sum(len(e.data["blocks"]) for e in one.events if e.name == "kv.block_allocated")
print(f"one request: {finals['A']} slots in one piece, {used * 8} in {used} blocks")
for headroom in (0, 0.04, 0.2):
    s = paged_kv_data.with_blocks(lengths, headroom=headroom)
    use = f"{s.stored:.0%} hold tokens, {s.running:.0f} requests"
    print(f"{headroom:3.0%} kept free: {use}, {s.recomputed:.0%} computed again")

# %% [markdown]
# Filled to the last block, more than a third of the tokens computed are computed again;
# with 4 % kept free, few, at 95 % use. A reservation never has this trouble.
#
# Reported by others: the paper above (section 7.1) measured its attention kernel 20 % to
# 26 % slower than one over contiguous memory, for the look-ups and branches. Prabhu et al.
# 2024 ([arXiv:2405.04437](https://arxiv.org/abs/2405.04437)) keep the addresses contiguous
# and let the GPU's own page tables do the paging.
#
# ## Takeaways
#
# - Lengths are unknown, so a contiguous cache reserves for the longest: most of it is
#   never used.
# - slot = table[p // P] · P + p mod P. Nothing else in the engine knows where tokens lie.
# - A block is free exactly when its reference count is 0. Freeing moves numbers, not keys.
# - A table grows when a token does not fit, and not before: ⌈tokens / P⌉ blocks.
# - Shared blocks are read together and copied before the first write, at most one a fork.
# - What was not written must not be read: 0 · NaN is NaN.
# - Blocks waste (P − 1) / 2 slots a request; a gather in torch moves KV three times.
#
# ## Questions
#
# **1.** P = 16, a request of 33 tokens. How many blocks, how many empty slots?
#
# <details><summary>Answer</summary>
#
# ⌈33 / 16⌉ = 3 blocks, 48 − 33 = 15 empty slots, the worst case of P = 16.
#
# </details>
#
# **2.** P = 4, table [9, 2, 7]. Which slot has position 6, which position is in slot 29?
#
# <details><summary>Answer</summary>
#
# 6 // 4 = 1 is block 2, offset 2: slot 10. Slot 29 is in block 7, offset 1; block 7 is in
# place 2: position 9.
#
# </details>
#
# **3.** A prompt of 24 tokens, P = 8, n = 4 answers of 10 tokens. How many copies?
#
# <details><summary>Answer</summary>
#
# None. The prompt fills three blocks to the end, so the first new token of each answer
# needs a new block. Nobody writes into a shared one.
#
# </details>
#
# **4.** The same with a prompt of 26 tokens. How many copies?
#
# <details><summary>Answer</summary>
#
# Three: four tables hold the last block, and the last holder writes in place.
#
# </details>
#
# **5.** A cache of 1,000 slots is full of requests of 99 tokens in blocks of 10. How much
# holds tokens? And with a reservation of 250 each?
#
# <details><summary>Answer</summary>
#
# Ten requests of 10 blocks: 990 of 1,000 slots. With reservations four requests: 396.
#
# </details>
#
# The engine answers 3 and 4, arithmetic the rest.

# %% tags=["claim"]
print("1.", (-(-33 // 16), -(-33 // 16) * 16 - 33) == (3, 15))
table = [9, 2, 7]
print("2.", table[6 // 4] * 4 + 6 % 4 == 10, table.index(29 // 4) * 4 + 29 % 4 == 9)
for number, tokens, copies in (("3.", 24, 0), ("4.", 26, 3)):
    four = SamplingParams(n=4, temperature=1.0, seed=1, ignore_eos=True)
    log = example.run({"q": ("x" * tokens, 10)}, sampling=four, num_kv_blocks=32)
    made = sum(len(step.block_copies) for step, _ in log.steps)
    print(number, made == copies)
print("5.", 1000 // (-(-99 // 10) * 10) * 99 == 990, 1000 // 250 * 99 == 396)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - **vLLM** brought blocks to serving ([arXiv:2309.06180](https://arxiv.org/abs/2309.06180)).
#   Default on a GPU: 16 tokens. Its pool counts references and keeps free blocks in a
#   linked list, for the reason ours is an ordered dictionary.
# - **SGLang** says page; by default a page is one token, for the finest sharing, and some
#   of its attention back ends want 16, 32 or 64.
# - **TensorRT-LLM** lets the user set the tokens of a block, a power of two
#   ([KV cache system](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html), read
#   November 2026).
# - In the wild: a padding slot of −1 that Python took for the last block, and overwrote it
#   ([vLLM #43869](https://github.com/vllm-project/vllm/pull/43869)). `write_kv` in
#   [kv_storage.py](../minifer/execution/kv_storage.py) skips slots below 0.
#
# ## Exercises
#
# | | | points | minutes | |
# |---|---|---|---|---|
# | 4.1 | Slot mapping | 4 | 15 | [notebook](../exercises/ex04_paged_kv.ipynb) |
# | 4.2 | Append across a block boundary | 4 | 15 | [notebook](../exercises/ex04_paged_kv.ipynb) |
# | 4.3 | Fork and copy-on-write | 6 | 30 | [notebook](../exercises/ex04_paged_kv.ipynb) |
# | 4.4 | Paged attention in torch | 6 | 30 | [notebook](../exercises/ex04_paged_kv.ipynb) |
#
# ## Where to read on
#
# 1. [kv/block_pool.py](../minifer/kv/block_pool.py): the pool.
# 2. [kv/manager.py](../minifer/kv/manager.py), `allocate` and `fork`: tables grow and part.
# 3. [kv/step_input.py](../minifer/kv/step_input.py): a plan laid out flat, slots included.
# 4. [kv/invariants.py](../minifer/kv/invariants.py): what must hold after every step.
# 5. [execution/attention.py](../minifer/execution/attention.py): paged, and its slow twin.
#
# Blocks that are full and free still hold their keys. L05 finds them again.
