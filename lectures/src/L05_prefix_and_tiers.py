# %% [markdown]
# # L05 · Prefix look-up and tiers
#
# Most prompts begin like an earlier one: the same instructions, the same document, the
# same conversation with one more turn. Their keys and values are there already, if they
# can be found again. This lecture gives blocks names, decides who is thrown out when
# memory is full, and puts two slower tiers below it.
#
# Reading: 65 minutes. Exercises: 95 minutes, 20 points. Needs
# [L04](L04_paged_kv.ipynb) (blocks, block tables, reference counts); a CPU is enough.
#
# Afterwards you can
#
# - **write** the name of a block, and say what happens without each of its parts;
# - **predict** to the token what a prompt finds;
# - **run** LRU by hand over a tree of prefixes, with blocks in use;
# - **decide** from a bandwidth and a prefill speed whether a hit is worth loading;
# - **explain** why a damaged file costs time and never an answer.

# %% [markdown]
# ## Where is the token now?
#
# ![The token is at the KV stage: its request is scheduled, and the engine asks which of
# its keys and values exist already](figures/life_map_kv.svg)
#
# The scheduler wants to admit a request and asks the KV stage: how much of this prompt
# have you seen? The next cell prints nothing, unless something is missing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: run  pip install "minifer[course]"  or, in a clone,  pip install -e ".[course]"'
    raise ImportError(remedy) from error
begin("L05")

# %% [markdown]
# ## What do prompts have in common?
#
# A, B and C of this book come one after the other, each when the one before has gone. Then
# comes a *conversation*: a question, and a second turn that sends the question, the
# answer and `And a tuple?`. Last, C and A come again. Blocks hold P = 8 tokens, and a
# token of this model is a byte.
#
# A's prompt is `The import statement`, 20 tokens; B's is `The import statement executes`.
# Write down how many tokens B will find. Then look at the columns.

# %% tags=["claim"]
from minifer.course.pictures.prefix_tiers import serve_visits, tree_data

roomy = serve_visits(num_kv_blocks=64, prefix_index="radix")
for visit in roomy.visits:
    found = visit.found["device"]
    print(f"{visit.name:8} {visit.num_prompt_tokens:3} prompt tokens, {found:2} found")
stats = roomy.engine.kv.stats
print(f"in all {stats.num_hits} of {stats.num_queries} = {stats.hit_rate:.0%}")

# %% [markdown]
# B shares 20 tokens with A and finds 16: two full blocks. `chat 2` finds 24 of the 32
# tokens that were there before, answer included; the last token drawn was never computed,
# so the fourth block was not full. `C again` and `A again` find what they left. The
# **hit rate** is the share of prompt tokens that are found.
#
# In the picture each box is a block. Look for the place where two requests part.

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers_views import tree_figure

tree = tree_data(roomy.engine.kv.pool.index, roomy.events)
show(
    tree_figure(tree, title="Prompts form a tree: what they share is stored once"),
    alt="Tree of 13 blocks in four rows. A's blocks 0 and 1 are found by B and by A again; "
    "behind them the tree forks into A's block 2 and B's blocks 2 and 3. C's two blocks "
    "are found by C again. The first three of six blocks of the chat are found by chat 2.",
)

# %% [markdown]
# A and B part *inside* block 2: `ment is ` and `ment exe`. The four letters they share
# there are computed twice. This is the price of blocks, at most P - 1 tokens a request.
#
# Here is one token of B's shared part in the microscope, in the run of all three
# together. (The engine's own lines are shown, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "B", position=3)

# %% [markdown]
# No step computes the token: a hit stands where the others have a forward pass.
#
# ## When are two blocks the same?
#
# Take two prompts, `Red car is fast and` and `Old dog is fast and`. Their second blocks
# hold the same eight letters, `is fast `, in the same places 8 to 15. May they share a
# block? We compute both and compare what lies in the cache. Before you look: in which of
# the four layers do keys and values differ?

# %% tags=["claim"]
import torch

from minifer.course.pictures.prefix_tiers import open_engine, serve_one


def second_block(text):
    """Keys and values of tokens 8 to 15: [layers, P, heads, C] each."""
    engine, _ = open_engine(enable_prefix_caching=False)
    serve_one(engine, "x", text, 1)
    storage = engine.runner.kv
    return [
        torch.stack([t[1] for t in both]) for both in (storage.keys, storage.values)
    ]


red, old = second_block("Red car is fast and"), second_block("Old dog is fast and")
apart = [
    (a - b).abs().amax(dim=(1, 2, 3)).tolist() for a, b in zip(red, old, strict=True)
]
for name, layers in zip(("keys", "values"), apart, strict=True):
    print(f"{name:6} differ in layer 0: {layers[0] > 1e-6}, after it by more than")
    print(f"       {min(layers[1:]):.0f} in every layer")

# %% [markdown]
# In layer 0 a key depends on its token and its position alone. From layer 1 on it depends
# on what attention has mixed in: on **every token before it**.

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers_views import difference_figure

show(
    difference_figure(
        *apart, title="Equal tokens, other beginning: only layer 0 agrees"
    ),
    alt="Bars of the largest difference of keys and values of the block 'is fast ' after "
    "two beginnings: none in layer 0, more than one in layers 1, 2 and 3.",
)

# %% [markdown]
# So a block may be shared if its tokens *and all tokens before it* are the same. The
# position needs no extra care: with everything before it, it is the same, too.
#
# ## What may a block be called?
#
# We need a name for the content of a block: equal content, equal name, in every process.
# That is called *content-addressed*. First the tempting mistake: name a block by its own
# tokens. We put such an index into the engine in place of its own. An index has three
# methods; look at `match`, which finds blocks until the first that is missing.


# %% tags=["claim"]
class FlatIndex:
    """A wrong index: a block is known by its own tokens, whatever stands before it."""

    def __init__(self):
        self.blocks = {}

    def match(self, keys):
        found = []
        for key in keys:
            if key.token_ids not in self.blocks:
                break
            found.append(self.blocks[key.token_ids])
        return found

    def insert(self, key, block_id, previous):
        return self.blocks.setdefault(key.token_ids, block_id) == block_id

    def remove(self, key, block_id):
        return [self.blocks.pop(key.token_ids)]


# %% [markdown]
# Two prompts go first, `Red car is fast and` and `Old dog sleeps a lot`. Then comes
# `Old dog is fast and`. Its first block is truly there, from the second prompt. Its
# second block is `is fast `, and there is one: computed after `Red car `. Look at what
# is found, and whether the model's scores are right.

# %% tags=["claim"]
BEFORE = ("Red car is fast and", "Old dog sleeps a lot")


def served(index=None, caching=True):
    """Tokens found, 24 tokens drawn, and the logits of the first."""
    engine, _ = open_engine(num_kv_blocks=32, enable_prefix_caching=caching)
    if index is not None:
        engine.kv.pool.index = index
    for text in BEFORE:
        serve_one(engine, text, text, 1)
    engine.runner = recorder = example.Recorder(engine.runner)
    output = serve_one(engine, "x", "Old dog is fast and", 24)
    first = next(logits for _, logits in recorder.steps if len(logits))
    return output.num_cached_tokens, output.outputs[0], first


truth, flat, chained = served(caching=False), served(FlatIndex()), served()
for name, (found, _, logits) in {"own tokens": flat, "engine": chained}.items():
    off = (logits - truth[2]).abs().max().item()
    print(f"{name:10} found {found:2}, logits right: {off < 1e-3}")

# %% [markdown]
# Twice as many tokens found, and wrong scores. Would anybody notice? Read the two
# texts. (Written by the model: not compared.)

# %% tags=["measure"]
for name, (_, output, logits) in {"truth": truth, "own tokens": flat}.items():
    off = (logits - truth[2]).abs().max().item()
    print(f"{name:10} {output.text!r}, logits off by {off:.2f}")

# %% [markdown]
# The sentences begin alike. A wrong hit does not crash: it shifts scores, and the text
# drifts later, or not at all. Reports of such bugs come in months, not minutes, after
# the release. So the name has to be right by construction.
#
# The surest name of a block is its whole beginning: all tokens up to its end. It is also
# long. For a prompt of n blocks it takes P·(1 + 2 + … + n) tokens to spell all names. The
# **hash chain** has the same meaning in 32 bytes:
#
# name(block i) = SHA-256( name(block i - 1), tokens of block i )
#
# Count both for 1,024 tokens. Then look whether names of random prompts are equal exactly
# where beginnings are. (`make_key` is the engine's; you write it in exercise 5.1.)

# %% tags=["claim"]
import random

from minifer.course.pictures.prefix_tiers import keys_of

P, blocks = 8, 1024 // 8
print(
    "tokens spelt:",
    sum(P * n for n in range(1, blocks + 1)),
    "or in a chain",
    P * blocks,
)

rng = random.Random(5)
stems = [[rng.randrange(4) for _ in range(40)] for _ in range(6)]
prompts = [rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(4)] * rng.randrange(20)
           for _ in range(300)]  # fmt: skip
pairs = [
    (key.digest, tuple(tokens[: (i + 1) * P]))
    for tokens in prompts
    for i, key in enumerate(keys_of(tokens))
]
names, beginnings = {n for n, _ in pairs}, {b for _, b in pairs}
print(len(pairs), "blocks with", len(beginnings), "different beginnings")
print(
    "a name for each, and only one:", len(set(pairs)) == len(names) == len(beginnings)
)

# %% [markdown]
# One name a beginning. SHA-256 is slower than Python's `hash`, but nobody can construct
# two inputs with one digest, and a stranger's prompt is exactly where one would try. The
# engine still compares tokens on every hit: a name suggests, tokens decide.
#
# ## What else belongs into the name?
#
# Everything that shapes keys and values, or that decides who may see them. An *adapter*
# (a small set of weights laid over the model's) gives other keys for the same tokens. A
# *salt* is a word of the tenant's: with it, tenants share nothing, and none can find out
# by the clock what another has asked. Look at the third row, and at the last line.

# %% tags=["claim"]
from minifer import SamplingParams
from minifer.kv.prefix_key import make_key

engine, _ = open_engine(num_kv_blocks=32)
greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2)
for number, salt in enumerate(("red", "red", "blue", None)):
    engine.add_request(str(number), example.TRIO["A"][0], greedy.with_(cache_salt=salt))
    while engine.has_unfinished_requests:
        outputs = engine.step()
    print(f"A with salt {salt!s:5} finds {outputs[-1].num_cached_tokens}")
kinds = [make_key(None, [1, 2], ((kind, "a"),)).digest for kind in ("salt", "adapter")]
print('salt "a" and adapter "a" have one name:', kinds[0] == kinds[1])

# %% [markdown]
# Red finds red's blocks and no others'. The *kind* is hashed as well as the value. An
# engine that wrote both without their kind let an adapter's name imitate a tenant's salt
# ([vllm#44701](https://github.com/vllm-project/vllm/issues/44701)).
#
# ## How does a prompt find its beginning?
#
# We build the slow twin: a dictionary from *whole beginnings* to nothing. The look-up
# walks from block to block and stops at the first miss. `range(P, len(tokens), P)` ends
# before the last token. Why?


# %% tags=["claim"]
def beginnings_of(tokens):
    """The whole beginnings that may be found, the shortest first."""
    return [tuple(tokens[:end]) for end in range(P, len(tokens), P)]


def find(shelf, tokens):
    """How many leading beginnings of a prompt are on the shelf."""
    found = 0
    for beginning in beginnings_of(tokens):
        if beginning not in shelf:
            break
        found += 1
    return found


for length in (15, 16, 17, 24, 25):
    engine, _ = open_engine(num_kv_blocks=32)
    tokens = list(range(length))
    ours = find(set(beginnings_of(list(range(40)))), tokens) * P
    serve_one(engine, "before", list(range(40)), 1)
    theirs = serve_one(engine, "now", tokens, 1).num_cached_tokens
    print(f"{length} tokens, all seen before: we find {ours:2}, the engine {theirs:2}")

# %% [markdown]
# A prompt of 16 tokens finds 8, though all 16 are cached. Keys and values of its last
# token exist, but to draw the next token the engine needs *logits*, and these are not
# cached. At least one token is always left to compute; with whole blocks that makes the
# last block.
#
# The engine has two indexes. `HashChainIndex` is a dictionary of names, as in vLLM. ★
# `RadixIndex` is the tree of the first picture, as in SGLang: runs of blocks that nobody
# has branched off are one node, and tokens themselves are compared on the way down. Look
# whether all three agree on the 300 prompts.

# %% tags=["claim"]
from minifer.course.pictures.prefix_tiers import replay

shelf, ours = set(), []
cut = [[*tokens, 0] for tokens in prompts]  # one token left over, whatever the length
for tokens in cut:
    ours.append(find(shelf, tokens))
    shelf.update(beginnings_of(tokens))
keys = [keys_of(tokens[: (len(tokens) - 1) // P * P]) for tokens in cut]
for index in ("hash", "radix"):
    print(
        f"{index:5} finds {sum(replay(keys, 2000, index))} blocks, as we do:", end=" "
    )
    print(replay(keys, 2000, index) == ours)

# %% [markdown]
# Equal for every prompt. The dictionary is shorter to write; the tree knows which blocks
# stand behind others, and a scheduler can ask it which waiting requests belong together.
# Here is its look-up.

# %% tags=["measure"]
from minifer.course.source import show_source
from minifer.kv.radix_index import RadixIndex

show_source(RadixIndex.match)

# %% [markdown]
# `inside an edge` is the case of two prompts that part in the middle of a run.
#
# ## Who is evicted?
#
# A request that ends gives its blocks back. They are free, yet their content stays until
# somebody needs the memory: a free block is a cached block. Which one goes first? **LRU**:
# the least recently used.
#
# Do it by hand, with room for four blocks. A uses a0, a1, a2; then B uses b0; then C
# needs two new blocks. If A's blocks count as used in the order a0, a1, a2, then a0 is the
# oldest and goes first, then a1. And a2? It is there, but nobody can find it: look-up
# begins at a0. So a prefix is *touched from its tail to its head*, and a2 goes first,
# then a1: **leaves first**. Below, this is one word, `reversed`. Look at both sums.

# %% tags=["claim"]
from collections import OrderedDict


def lru(prompts, capacity, order=reversed):
    """Blocks that each prompt finds, with room for `capacity` beginnings."""
    shelf, found = OrderedDict(), []
    for tokens in prompts:
        mine = beginnings_of(tokens)
        found.append(find(shelf, tokens))
        for beginning in mine[: found[-1]]:
            shelf.move_to_end(beginning)  # in use: out of the way of evictions
        for beginning in mine[found[-1] :]:
            if beginning not in shelf and len(shelf) == capacity:
                shelf.popitem(last=False)
            shelf[beginning] = None
        for beginning in order(mine):
            shelf.move_to_end(beginning)
    return found


by_hand = [[1] * 25, [2] * 9, [3] * 17, [1] * 25]
print(
    "A, B, C, A, leaves first:", lru(by_hand, 4), "head first:", lru(by_hand, 4, iter)
)
print(
    "300 prompts, 20 blocks:", sum(lru(cut, 20)), "or", sum(lru(cut, 20, iter)), "found"
)

# %% [markdown]
# By hand, A finds one block again, or none. The engine never sorts a tree for this: it
# frees a request's blocks from the tail to the head into one queue, and the queue's order
# does the rest. Look whether our twin and both of the engine's indexes agree at every
# size.

# %% tags=["claim"]
for capacity in (8, 12, 20, 40, 80):
    ours = lru(cut, capacity)
    same = [replay(keys, capacity, index) == ours for index in ("hash", "radix")]
    print(f"{capacity:2} blocks: {sum(ours):4} found, hash and radix agree: {same}")

# %% [markdown]
# They do. One rule is missing in our twin: a block that a running request holds is
# *pinned*, and never evicted. The engine takes such blocks out of the queue. We count its
# evictions with room for 8 blocks, and how many hit a block in use.

# %% tags=["claim"]
from minifer.course.pictures.prefix_tiers import evictions

narrow = serve_visits(num_kv_blocks=8)
together = example.run(num_kv_blocks=9)
print(
    "one after the other: {} evicted, {} of them in use".format(
        *evictions(narrow.events)
    )
)
print(
    "A, B, C together: {} evicted, {} of them in use".format(
        *evictions(together.events)
    )
)
print(
    "found now:",
    {v.name: v.found["device"] for v in narrow.visits if v.found["device"]},
)

# %% [markdown]
# None in use. But `C again` and `A again` find nothing now: with 8 blocks, the chat has
# pushed them out. Where could they have gone?
#
# First: how much room does one need?
#
# ## How large must the cache be?
#
# Three *workloads* of 240 prompts of 12 blocks each. *shared*: 16 beginnings of 8 blocks,
# the n-th used with weight 1/n, and an end of its own. *circle*: 12 documents, asked about
# one after the other, round and round. *new*: nothing comes twice. With all 240 prompts
# kept, shared finds 62 % and circle 95 %. Predict what circle finds with room for eleven
# of its twelve documents, 132 blocks.

# %% tags=["claim"]
from minifer.course.pictures.prefix_tiers import hit_rate, workload

loads = {kind: workload(kind, random.Random(7)) for kind in ("shared", "circle", "new")}
bounds = {kind: hit_rate(load, 2880) for kind, load in loads.items()}
for kind, load in loads.items():
    rates = [f"{hit_rate(load, size):4.0%}" for size in (32, 64, 132, 144, 512)]
    print(f"{kind:7}", *rates, f" nothing evicted {bounds[kind]:.0%}")

# %% [markdown]
# Nothing at all. LRU throws out the document that is needed next, every time: the classic
# case in which it loses (Sleator and Tarjan, CACM 28(2), 1985). One block short of the
# working set is as bad as none.

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers_views import hit_rate_figure

sizes = (16, 24, 32, 48, 64, 96, 128, 132, 144, 192, 256, 384, 512)
curves = {k: (sizes, [hit_rate(load, s) for s in sizes]) for k, load in loads.items()}
show(
    hit_rate_figure(
        curves, bounds, title="Sharing pays early; a circle pays at once or not"
    ),
    alt="Share of blocks found against cache size from 16 to 512 blocks. shared rises "
    "slowly towards its bound; circle is 0 up to 132 blocks and jumps to 95 % at 144; "
    "new stays at 0.",
)

# %% [markdown]
# What do real services see? Reported, not measured here:
#
# | where | found | source |
# |---|---|---|
# | DeepSeek's service, 24 hours | 56.3 % of 608 billion input tokens | [open-infra-index, day 6](https://github.com/deepseek-ai/open-infra-index), Feb 2025 |
# | two workloads of Alibaba Cloud | 62 % and 54 % at best | [arXiv:2506.02634](https://arxiv.org/abs/2506.02634), ATC 2025 |
# | Kimi's conversations, published trace | 37 % of blocks at best | bound of the trace of [arXiv:2407.00079](https://arxiv.org/abs/2407.00079), FAST 2025 |
#
# In that last trace three of four blocks are used once. With room for 1,000 of its blocks
# of 512 tokens LRU finds 4 %, with 30,000 it finds 33 % (replayed by us). Large caches
# are worth having, and device memory is the dearest place for them.
#
# ## Where do evicted blocks go?
#
# Into slower memory. The engine keeps three *tiers*: the **device** (8 blocks here), main
# memory, **DRAM** (9 blocks), and a folder on **disk**. After each step the blocks it
# filled are copied to DRAM, and from there to disk in the background. A look-up asks the
# device, then DRAM, then the disk, for one unbroken beginning. The same seven visits:

# %% tags=["claim"]
from pathlib import Path
from tempfile import TemporaryDirectory

scratch = TemporaryDirectory()
folder = Path(scratch.name) / "kv"
tiered = serve_visits(folder=folder, dram_blocks=9)
print("         device  DRAM  disk")
for visit in tiered.visits:
    print(f"{visit.name:8}" + "".join(f"{n:6}" for n in visit.found.values()))
same = [a.tokens == b.tokens for a, b in zip(tiered.visits, roomy.visits, strict=True)]
print("tokens as with 64 blocks on the device:", all(same))

# %% [markdown]
# `C again` finds 16 tokens in DRAM. `A again` finds its first block in DRAM and its second
# on disk: one prefix from two tiers. Look at the picture for the moment when DRAM is full.

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers import occupancy_data
from minifer.course.pictures.prefix_tiers_views import occupancy_figure

columns = occupancy_data(tiered.events, dram_blocks=9)
title = "What leaves the device stays in DRAM, what leaves DRAM stays on disk"
show(
    occupancy_figure(columns, tiered.held, title=title),
    alt="Blocks held over 72 steps in three rows. The device is used by one request at a "
    "time and otherwise full of cached blocks. DRAM fills up to 9 blocks during the "
    "first chat and stays full. The disk grows to 13 blocks. Hits: B and chat 2 on the "
    "device, C again in DRAM, A again 8 tokens in DRAM and 8 on disk.",
)

# %% [markdown]
# Device and hits are drawn from the engine's events, DRAM and disk from the tiers
# themselves. DRAM can be had from events, too: it holds what came in, at most 9.

# %% tags=["claim"]
from_events = [column.dram for column in columns]
print(
    "steps:", len(columns), " events agree:", from_events == [n for n, _ in tiered.held]
)
print("DRAM full from step", 1 + from_events.index(9), " on disk:", tiered.held[-1][1])

# %% [markdown]
# Move the slider from visit to visit. Each box is a block: `A0` is the first of A, D is
# the chat. DRAM is drawn in the order of use, the least recent at the left. Watch A0
# and A1 after the first chat: who goes first?

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers_views import found_words, shelves_figure

by_name = {visit.name: visit for visit in tiered.visits}
explore(
    lambda visit: shelves_figure(by_name[visit], num_blocks=8, dram_blocks=9),
    alt=lambda visit: (
        f"Three rows of blocks, device, DRAM and disk, after {visit}. "
        f"It found {found_words(by_name[visit])}."
    ),
    labels={"visit": "after the visit"},
    visit=list(by_name),
)

# %% [markdown]
# A1 leaves DRAM before A0: leaves first, here too. The disk has room and keeps all 13.
#
# ## When is a hit in a slower tier worth it?
#
# Loading wins if it is over before the tokens would be computed:
#
# bytes / bandwidth < tokens / prefill speed, so bandwidth > **B_min** = bytes a token ·
# prefill speed
#
# By hand: a token of minifer-tiny has 2 · 4 layers · 6 heads · 16 · 4 bytes = 3,072 bytes.
# Say prefill makes 10,000 tokens a second. Then B_min is 30.7 MB/s: a disk of 100 MB/s
# pays, one of 20 MB/s does not. *The faster the chip computes, the faster its disks have
# to be.* The engine's rule, with these numbers:

# %% tags=["claim"]
from minifer.kv.tiers.break_even import BreakEven

for disk_mb in (100, 20):
    rule = BreakEven(kv_bytes_per_token=3072)
    rule.prefill.observe(10_000, seconds=1.0)
    rule.bandwidth["disk"].observe(disk_mb * 1e6, seconds=1.0)
    verdict = "load" if rule.wins("disk", 512) else "recompute"
    print(
        f"B_min {rule.min_bandwidth / 1e6:.1f} MB/s, disk {disk_mb:3} MB/s: {verdict}"
    )

# %% [markdown]
# The engine measures both rates while it runs. What does it do when the tier is slower
# than recomputing? We tell it of a disk of 1 kB/s and send A again, to a new engine on
# the same folder. Look at the three counters.

# %% tags=["claim"]
engine, _ = open_engine(kv_disk_path=folder)
rule = engine.kv.tiers.break_even
rule.prefill.observe(10_000, seconds=1.0)
rule.bandwidth["disk"].observe(1e3, seconds=1.0)
answer = serve_one(engine, "A", example.TRIO["A"][0], 12)
stats = engine.kv.tiers.stats
print("loaded:", stats.hits["disk"], " refused:", stats.refused["disk"], end="  ")
print("same tokens:", tuple(answer.outputs[0].token_ids) == tiered.visits[0].tokens)
engine.close()

# %% [markdown]
# 16 tokens were there, and computing them was faster: a cache may always say no. (Every
# 32nd time it tries all the same, for a rate may be that of a bad moment.)
#
# Now large models. Mooncake (arXiv:2407.00079, equation 2) writes B_min with a model's
# shape. Look whether we get the paper's 6 and 19 GB/s for a 70B model at 8,192 tokens, and
# which links are fast enough.

# %% tags=["claim"]
from minifer.kv.tiers.break_even import mooncake_break_even

LINKS = {
    "PCIe 5 x16": 63.0,
    "100 Gb/s net": 12.5,
    "NVMe, PCIe 4 x4": 7.9,
    "slow net": 0.5,
}
rows = {  # FLOP/s, D, query heads a KV head, bytes an element
    "70B, 8 x A800": (8 * 312e12, 8192, 8, 2),
    "70B, 8 x H800": (8 * 989e12, 8192, 8, 2),
    "8B, H200 at half its peak": (989e12 / 2, 4096, 4, 2),
    "SmolLM2-135M, a CPU of 100 GFLOP/s": (100e9, 576, 3, 4),
}
for name, (flops, width, group, size) in rows.items():
    least = mooncake_break_even(flops, width, group, 8192, element_bytes=size) / 1e9
    pays = [link for link, rate in LINKS.items() if rate > least]
    print(
        f"{name:35} B_min {least:6.2f} GB/s, pays: {len(pays)} of {len(LINKS)}",
        pays[-1:],
    )

# %% [markdown]
# The paper's numbers come out. (The links are limits: PCIe 5 moves 32 GT/s on 16 lanes,
# coded 128 of 130: 63 GB/s one way; the slow net is an assumption.) One NVMe disk loses
# against eight H800, and on a small CPU everything wins: **a demonstration on a laptop
# overstates what a disk is worth.**
#
# And this machine? Predict first. Recomputing takes at least the FLOPs of a prefill over
# the measured rate of a matrix product. Loading takes the bytes over the measured rate of
# memory, or of reading one large file. Below, lines are predicted, points are measured;
# the dotted line is a tier of 20 MB/s, modelled.

# %% tags=["measure"]
from minifer.course.pictures.prefix_tiers import file_read_rate, time_reload
from minifer.perf.costs import ElementBytes, prefill_cost
from minifer.perf.limit import this_machine

lengths, machine = (64, 128, 256, 512, 960), this_machine()
times = time_reload(Path(scratch.name) / "timing", lengths)
disk_rate, float32 = file_read_rate(scratch.name), ElementBytes(4.0, 4.0, 4.0)
work = [
    prefill_cost(example.tiny().config, n, element=float32).total() for n in lengths
]
predicted = {
    "recompute": [machine.seconds(cost.flops, cost.bytes) for cost in work],
    "from disk": [3072 * n / disk_rate for n in lengths],
    "from DRAM": [
        2 * 3072 * n / machine.memory_bandwidth for n in lengths
    ],  # read, write
    "a tier of 20 MB/s": [3072 * n / 20e6 for n in lengths],
}
speed = times.num_tokens[-1] / times.recompute[-1]
print(f"prefill {speed:,.0f} tokens/s, so B_min is {3072 * speed / 1e6:.0f} MB/s")
print(f"one large file: {disk_rate / 1e6:,.0f} MB/s", end=", ")
print(f"block files: {3072 * lengths[-1] / times.disk[-1] / 1e6:,.0f} MB/s")
assert times.recompute[-1] >= predicted["recompute"][-1] / 2  # a floor, roughly

# %% [markdown]
# Before the picture, compare the last two numbers: which of them should be compared with
# B_min?

# %% tags=["picture"]
from minifer.course.pictures.prefix_tiers_views import reload_figure

won = times.disk[-1] < times.recompute[-1]
title = (
    "Here the disk " + ("wins" if won else "loses") + "; a slower tier would not pay"
)
show(
    reload_figure(times, predicted, title=title),
    alt="Time against prefix length, 64 to 960 tokens, both axes logarithmic: recomputing, "
    "loading from disk and loading from DRAM, each measured as points and predicted as a "
    "line, and the modelled line of a tier of 20 MB/s.",
)

# %% [markdown]
# Predictions are floors. Recomputing is slower than its FLOPs: small matrices do not reach
# the peak. Loading misses its line by more. A block of this model is a file of 24 kB, and
# opening and checking it takes longer than moving its bytes. So the rate that counts is
# that of *block files*. Real engines move 0.5 to 2 MB a block for this reason.
#
# ## What is left after a restart, or a flipped bit?
#
# The folder is still there. A new process reads the names of its files and knows what it
# has. Look at what a new engine finds of each request.

# %% tags=["claim"]
again = serve_visits(folder=folder, visits=(("A", 12), ("B", 9), ("C", 6)))
for before, now in zip(tiered.visits, again.visits, strict=False):
    print(f"{now.name} finds {now.found}, same tokens: {now.tokens == before.tokens}")
again.engine.close()

# %% [markdown]
# A and C come from disk; B finds A's blocks on the device by then and one of its own on
# disk. A file is named by the hash of the block's name and of everything else its bytes
# depend on: weights, dtype, shape. It is a
# [safetensors](https://github.com/huggingface/safetensors) file, so any tool can open it.

# %% tags=["claim"]
from safetensors import safe_open

disk = tiered.engine.kv.tiers.disk
key = keys_of(example.TRIO["A"][0].encode())[0]
with safe_open(disk.path(key), framework="pt") as file:
    said, kv = file.metadata(), file.get_tensor("kv")
print(sorted(said))
print("tokens:", said["token_ids"], " shape:", list(kv.shape), " bytes:", kv.nbytes)
red_block = kv[:4], kv[4:]  # keys of four layers, then values
print("finite numbers:", bool(kv.isfinite().all()))

# %% [markdown]
# The header says which block this is, and carries a checksum of the payload. To read a
# block is to write its header a second time and compare every byte. We flip one bit in
# each of 400 places all over the file, cut it short, and swap it with another's. `decode`
# answers with the payload, or with None.

# %% tags=["claim"]
content = disk.path(key).read_bytes()
other = keys_of(example.TRIO["C"][0].encode())[0]
places = random.Random(1).sample(range(len(content)), 400)
answers = []
for place in places:
    broken = bytearray(content)
    broken[place] ^= 1 << place % 8
    answers.append(disk.format.decode(key, broken))
print("whole:", disk.format.decode(key, bytearray(content)) is not None)
print(
    "a bit flipped:", sum(a is not None for a in answers), "of", len(places), "accepted"
)
print("cut short:", disk.format.decode(key, bytearray(content[:-1])) is not None)
print("another's name:", disk.format.decode(other, bytearray(content)) is not None)

# %% [markdown]
# And in the engine? We flip a bit of A's second block on disk. Write down what A will
# find, and whether it will answer differently.

# %% tags=["claim"]
tiered.engine.close()
second = disk.path(keys_of(example.TRIO["A"][0].encode())[1])
damaged = bytearray(second.read_bytes())
damaged[-1] ^= 1
second.write_bytes(damaged)
after = serve_visits(folder=folder, visits=(("A", 12),))
print(
    "found:", after.found("A"), " files refused:", after.engine.kv.tiers.stats.corrupt
)
print("same tokens:", after.visits[0].tokens == tiered.visits[0].tokens)
after.engine.close()
print("written anew:", second.read_bytes() != damaged and second.stat().st_size > 0)

# %% [markdown]
# The first block is found, the second is a *miss*: deleted, computed, written again.
# A file is written under another name, flushed to the disk and renamed, so a process
# killed in the middle leaves no half file under a good name.
#
# ## When does caching lose?
#
# Three times in this lecture: LRU in a circle found nothing, a slow tier was refused, and
# new prompts found nothing. What did that last one cost? Every prompt was hashed and
# looked up, and every one of its blocks threw out another. Count it.

# %% tags=["claim"]
found = replay(loads["new"], 132)
print(
    f"{len(found)} new prompts, {12 * len(found)} blocks looked up, {sum(found)} found"
)
print("evictions:", 12 * len(found) - 132)

# %% [markdown]
# And in seconds: naming and looking up against computing. (Not compared.)

# %% tags=["measure"]
import time

started = time.perf_counter()
keys_of(list(range(250)) * 4)  # 1,000 tokens
naming = time.perf_counter() - started
print(
    f"names of 1,000 tokens: {naming * 1e3:.2f} ms; prefill: {1000 / speed * 1e3:.0f} ms"
)

# %% [markdown]
# About a hundredth of a prefill even of this tiny model. The true cost is elsewhere: blocks
# nobody will ask for push out blocks that somebody would. With tiers they are also copied,
# and written to disk. An engine may wait for the second use of a block before it stores
# it (`kv_write_policy="second_touch"`): in the trace above that spares three of four
# writes, and gives up the first reuse of the others.
#
# ## Is it still the same model?
#
# A, B and C together, with the cache off and on. All may differ but the tokens.

# %% tags=["claim"]
plain = example.run(enable_prefix_caching=False)
print("cache             steps  found  of   same tokens")
for name, options in {
    "hash": {},
    "radix": {"prefix_index": "radix"},
    "hash, 9 blocks": {"num_kv_blocks": 9},
    "DRAM": {"kv_dram_bytes": 9 * 24_576, "kv_load_policy": "always"},
}.items():
    run = example.run(**options)
    same = all(run.tokens(r) == plain.tokens(r) for r in "ABC")
    stats = run.engine.kv.stats
    steps = run.events[-1].step
    print(f"{name:16} {steps:6} {stats.num_hits:6} {stats.num_queries:4} {same!s:>11}")
    run.engine.close()
print(f"off              {plain.events[-1].step:6}")

# %% [markdown]
# 16 of 67 prompt tokens are found, and no token changes.
#
# ## Takeaways
#
# - A block may be shared if its tokens and everything before them are the same; a chained
#   hash is a name for exactly that.
# - Whatever shapes or protects KV belongs into the name, with its kind.
# - Only full blocks are found, and one token is always left to compute.
# - A free block is a cached block. LRU touches a prefix from tail to head, so leaves go
#   first; what is in use never goes.
# - One block short of the working set, LRU may find nothing.
# - A tier pays above B_min = bytes a token · prefill speed. Fast chips need fast tiers.
# - A damaged file is a miss. A cache may always say no, and never something else.
#
# ## Questions
#
# **1.** P = 16. A prompt of 64 tokens comes a second time. How many are found?
#
# <details><summary>Answer</summary>
#
# 48. Four blocks are full, but the last token has to be computed, and with it its block.
#
# </details>
#
# **2.** Two prompts of 100 tokens differ in token 40 only (counted from 0), P = 8. How
# many tokens do they share?
#
# <details><summary>Answer</summary>
#
# 40: blocks 0 to 4. Blocks 6 and later hold the same tokens, but after other ones.
#
# </details>
#
# **3.** Room for 3 blocks. x0, x1 are used, then y0, then x0, x1 again, then z0 is needed.
# Who goes? Who would have gone without the second use of x?
#
# <details><summary>Answer</summary>
#
# y0. Without it, x1: the leaf of the least recently used prefix.
#
# </details>
#
# **4.** 131,072 bytes a token, 20,000 tokens/s of prefill. What is B_min? Does an NVMe disk
# of 6.5 GB/s pay?
#
# <details><summary>Answer</summary>
#
# 131,072 · 20,000 = 2.6 GB/s. Yes, if requests do not have to share it among three.
#
# </details>
#
# **5.** Why is a prefix cache without salt a leak, though it never returns another's text?
#
# <details><summary>Answer</summary>
#
# A prompt that is found answers sooner. Whoever can measure the time to the first token can
# guess a beginning, block by block, and see whether somebody has asked it.
#
# </details>
#
# The engine checks the first four. Look for four times True.

# %% tags=["claim"]
engine, _ = open_engine(num_kv_blocks=16, block_size=16)
sixty_four = list(range(64))
serve_one(engine, "1", sixty_four, 1)
print(1, serve_one(engine, "2", sixty_four, 1).num_cached_tokens == 48)
first = [7] * 100
pair = [keys_of(first), keys_of([*first[:40], 8, *first[41:]])]
print(2, replay(pair, 64)[1] * P == 40)
x, y, z = ([n] * (8 * k + 1) for n, k in ((1, 2), (2, 1), (3, 1)))
print(3, lru([x, y, x, z, y], 3)[-1] == 0 and lru([x, y, z, x], 3)[-1] == 1)
least = 131_072 * 20_000
print(4, round(least / 1e9, 1) == 2.6 and least < 6.5e9)
scratch.cleanup()

# %% [markdown]
# All four hold.
#
# ## In real engines
#
# - **vLLM** names blocks of 16 tokens by a hash chain with salt, adapter and image in the
#   key, and frees a request's tail first
#   ([design](https://docs.vllm.ai/en/latest/design/prefix_caching/)). minifer's index and
#   queue follow it; where vLLM relies on the hash, minifer compares tokens as well.
# - **SGLang** keeps a radix tree and evicts its leaves
#   ([arXiv:2312.07104](https://arxiv.org/abs/2312.07104)); *HiCache* puts DRAM and storage
#   below it, with the write policies named here
#   ([blog, Sep 2025](https://lmsys.org/blog/2025-09-10-sglang-hicache)).
# - **TensorRT-LLM** searches a tree of blocks, evicts by priority, and moves blocks to
#   host memory
#   ([documentation](https://nvidia.github.io/TensorRT-LLM/latest/features/kvcache.html)).
# - **Mooncake** pools the DRAM and disks of a whole cluster, and sends a request to where
#   its prefix lies ([arXiv:2407.00079](https://arxiv.org/abs/2407.00079)).
#
# ## Exercises
#
# In [ex05_prefix_and_tiers.ipynb](../exercises/ex05_prefix_and_tiers.ipynb);
# `minifer grade 5` counts the points.
#
# | id | title | points | minutes |
# |---|---|---|---|
# | 5.1 | The name of a block | 4 | 15 |
# | 5.2 | What does a prompt find? | 5 | 20 |
# | 5.3 | Who has to go? | 6 | 40 |
# | 5.4 | Back from the disk, byte for byte | 5 | 20 |
#
# ## Where to read on
#
# 1. [kv/prefix_key.py](../minifer/kv/prefix_key.py): the name, 61 lines.
# 2. [kv/prefix_index.py](../minifer/kv/prefix_index.py) and
#    [kv/radix_index.py](../minifer/kv/radix_index.py): one interface, two ways.
# 3. [kv/block_pool.py](../minifer/kv/block_pool.py): the queue that is the LRU.
# 4. [kv/tiers/tiers.py](../minifer/kv/tiers/tiers.py): device, DRAM, disk.
# 5. [kv/tiers/disk.py](../minifer/kv/tiers/disk.py): what a crash may leave behind.
#
# Next: [L06](L06_prefill.ipynb), what is done with the tokens that were not found.
