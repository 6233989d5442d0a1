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
    from minifer.course.pictures import prefix_tiers as tiers
    from minifer.course.pictures import prefix_tiers_views as views
except ImportError as error:
    remedy = 'minifer is missing: run  pip install "minifer[course]"  or, in a clone,'
    raise ImportError(remedy + '  pip install -e ".[course]"') from error
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
# Write down how many tokens B will find. Then look at the last column.

# %% tags=["claim"]
roomy = tiers.serve_visits(num_kv_blocks=64, prefix_index="radix")
for visit in roomy.visits:
    found = visit.found["device"]
    print(f"{visit.name:8} {visit.num_prompt_tokens:3} prompt tokens, {found:2} found")
stats = roomy.engine.kv.stats
print(f"in all {stats.num_hits} of {stats.num_queries} = {stats.hit_rate:.0%}")

# %% [markdown]
# B shares 20 tokens with A and finds 16: two full blocks. `chat 2` finds 24 of the 32
# tokens of the first turn, answer included; the last token drawn was never computed, so
# the fourth block was not full. The **hit rate** is the share of prompt tokens found.
#
# In the picture each box is a block. Look for the place where two requests part.

# %% tags=["picture"]
tree = tiers.tree_data(roomy.engine.kv.pool.index, roomy.events)
figure = views.tree_figure(tree, title="Prompts form a tree")
alt = "Rows of blocks. B and A again find A's blocks 0 and 1, behind which A and B "
show(figure, alt=alt + "fork; C again finds two of C, chat 2 three of the chat.")

# %% [markdown]
# A and B part *inside* block 2: `ment is ` and `ment exe`. The four letters they share
# there are computed twice: the price of blocks, at most P - 1 tokens a request.
#
# Here is one token of B's shared part in the microscope. Look for its forward pass.
# (Not compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "B", position=3)

# %% [markdown]
# There is none: a hit stands in its place.
#
# ## When are two blocks the same?
#
# Take two prompts, `Red car is fast and` and `Old dog is fast and`. Their second blocks
# hold the same eight letters, `is fast `, in the same places. May they share a block? We
# compute both and compare. Before you look: in which of the four layers do keys and
# values differ?

# %% tags=["claim"]
apart = tiers.block_differences("Red car is fast and", "Old dog is fast and")
for name, layers in apart.items():
    print(f"{name:6} differ in", [i for i in range(4) if layers[i] > 0.1], end=", ")
    print("agree in", [i for i in range(4) if layers[i] < 1e-6])

# %% [markdown]
# In layer 0 a key depends on its token and its position alone. From layer 1 on it depends
# on what attention has mixed in: on **every token before it**.

# %% tags=["picture"]
title = "Equal tokens, other beginning: only layer 0 agrees"
alt = "Bars: keys and values of the block 'is fast ' after two beginnings differ by "
alt += "nothing in layer 0, by more than one in layers 1, 2 and 3."
show(views.difference_figure(*apart.values(), title=title), alt=alt)

# %% [markdown] tags=["row-8", "correction-14"]
# So a block may be shared if its tokens *and all tokens before it* are the same. Of
# a related prompt, a variant, only an exact beginning is found.
#
# ## What may a block be called?
#
# Equal content, equal name, in every process: that is called *content-addressed*. First
# the tempting mistake, to name a block by its own tokens. We put such an index into the
# engine in place of its own. Look at `match`: it finds blocks until the first is missing.


# %% tags=["claim"]
from itertools import takewhile


class FlatIndex(dict):
    """A wrong index: a block is known by its own tokens, whatever stands before it."""

    def match(self, keys):
        known = takewhile(lambda key: key.token_ids in self, keys)
        return [self[key.token_ids] for key in known]

    def insert(self, key, block_id, previous):
        return self.setdefault(key.token_ids, block_id) == block_id

    def remove(self, key, block_id):
        return [self.pop(key.token_ids)]


# %% [markdown]
# Two prompts go first, then `Old dog is fast and`. Its first block is truly there, from
# the second prompt. Of its second, `is fast `, there is one, too: computed after
# `Red car `. Look at what is found, and whether the model's scores are right.

# %% tags=["claim"]
texts = "Red car is fast and", "Old dog sleeps a lot", "Old dog is fast and"
truth = tiers.serve_last(texts, 24, enable_prefix_caching=False)
flat, chained = (
    tiers.serve_last(texts, 24, index=FlatIndex()),
    tiers.serve_last(texts, 24),
)
for name, got in {"own tokens": flat, "engine": chained}.items():
    right = bool((got.logits - truth.logits).abs().max() < 1e-3)
    print(f"{name:10} found {got.num_found:2}, logits right: {right}")

# %% [markdown]
# Twice as many tokens found, and wrong scores. Would anybody notice? Read the two
# texts. (Written by the model: not compared.)

# %% tags=["measure"]
print(f"truth      {truth.text!r}\nown tokens {flat.text!r}")
print(f"logits off by {(flat.logits - truth.logits).abs().max():.2f}")

# %% [markdown]
# The texts begin alike. A wrong hit does not crash: it shifts scores, and the text drifts
# later, or not at all. So names have to be right by construction.
#
# The surest name of a block is its whole *beginning*: all tokens up to its end. It is
# long: for n blocks it takes P·(1 + 2 + … + n) tokens to spell all names. The **hash
# chain** has the same meaning in 32 bytes:
#
# name(block i) = SHA-256( name(block i - 1), tokens of block i )
#
# Count both for 1,024 tokens. Then look whether names of random prompts are equal exactly
# where beginnings are. (Names are the engine's; you write them in exercise 5.1.) In the
# last line a broken hash calls two blocks alike, and the engine knows the first.

# %% tags=["claim"]
import random

P, n = 8, 1024 // 8
print("tokens spelt:", P * sum(range(1, n + 1)), "or in a chain", P * n)
prompts = tiers.random_prompts(random.Random(5), 300)
pairs = tiers.names_of(prompts)
names, beginnings = map(set, zip(*pairs, strict=True))
one_each = len(pairs) == len(names) == len(beginnings)
print(
    f"{len(beginnings)} different beginnings; a name for each, and only one: {one_each}"
)
print("one name, found:", tiers.found_under_one_name(b"Red car ", b"Old dog "))

# %% [markdown]
# One name a beginning. SHA-256 is slower than Python's `hash`, but nobody knows how to
# make two inputs with one digest, and prompts come from strangers. The engine still
# compares tokens on every hit, so `Old dog ` found nothing: a name suggests, tokens decide.
#
# ## What else belongs into the name?
#
# Everything that shapes keys and values, or that decides who may see them. An *adapter*
# (a small set of weights laid over the model's) gives other keys for the same tokens. A
# *salt* is a tenant's own word: with it, tenants share nothing, and none can find out by
# the clock what another has asked. Look at the third row, and at the last.

# %% tags=["claim"]
from minifer.kv.prefix_key import make_key

engine, _ = tiers.open_engine(num_kv_blocks=32)
for salt in ("red", "red", "blue", None):
    answer = tiers.serve_one(engine, "A", *example.TRIO["A"], cache_salt=salt)
    print(f"A with salt {salt!s:5} finds {answer.num_cached_tokens}")
names = {make_key(None, [1, 2], ((kind, "a"),)).digest for kind in ("salt", "adapter")}
print('salt "a" and adapter "a" have', len(names), "names")

# %% [markdown]
# Red finds red's blocks only. The *kind* is hashed as well as the value: without it an
# adapter's name could imitate a tenant's salt
# ([vllm#44701](https://github.com/vllm-project/vllm/issues/44701)).
#
# ## How does a prompt find its beginning?
#
# We build the slow twin, a set of whole beginnings. The look-up stops at the first miss.
# `range(P, len(tokens), P)` leaves out a block that ends with the prompt. Why?


# %% tags=["claim"]
def beginnings_of(tokens):
    """The whole beginnings that may be found, the shortest first."""
    return [tuple(tokens[:end]) for end in range(P, len(tokens), P)]


def find(shelf, tokens):
    """How many leading beginnings of a prompt are on the shelf."""
    return len(list(takewhile(shelf.__contains__, beginnings_of(tokens))))


long = list(range(40))
engine, _ = tiers.open_engine(num_kv_blocks=32)
tiers.serve_one(engine, "before", long, 1)
for length in (15, 16, 17, 24, 25):
    theirs = tiers.serve_one(engine, "now", long[:length], 1).num_cached_tokens
    ours = find(set(beginnings_of(long)), long[:length]) * P
    print(f"{length} tokens, all seen before: we find {ours:2}, the engine {theirs:2}")

# %% [markdown]
# A prompt of 16 tokens finds 8, though all 16 are cached. To draw the next token the engine
# needs *logits*, and these are not cached. At least one token is always left to compute;
# here that takes the whole last block.
#
# The engine has two indexes. `HashChainIndex` is a dictionary of names, as in vLLM. ★
# `RadixIndex` is the tree of the first picture, as in SGLang: runs of blocks that nobody
# has branched off are one node, and tokens themselves are compared on the way down. Look
# whether all three agree on the 300 prompts.

# %% tags=["claim", "row-8"]
cut = [[*tokens, 0] for tokens in prompts]  # one token left over, whatever the length
shelf, ours = set(), []
for tokens in cut:
    ours.append(find(shelf, tokens))
    shelf.update(beginnings_of(tokens))
keys = [tiers.keys_of(tokens) for tokens in prompts]
for index in ("hash", "radix"):
    theirs = tiers.replay(keys, 2000, index)
    print(f"{index:5} finds {sum(theirs)} blocks, prompt by prompt: {theirs == ours}")

# %% [markdown]
# Equal for every prompt. The dictionary is shorter to write; the tree knows which blocks
# stand behind others. Look for the case of two prompts that part in the middle of a run.

# %% tags=["measure"]
from minifer.course.source import show_source

show_source(type(roomy.engine.kv.pool.index).match)

# %% [markdown] tags=["row-20", "correction-10"]
# It is the line with `inside an edge`.
#
# ## Who is evicted?
#
# A request that ends gives its blocks back. They are free, yet their keys and values (no
# other activations) stay until somebody needs the memory: a free block is a cached block. Which one goes first? **LRU**:
# the least recently used.
#
# Do it by hand, with room for four blocks. A uses a0, a1, a2; then B uses b0; then C
# needs two new blocks. If A's blocks count as used in the order a0, a1, a2, then a0 is the
# oldest and goes first. Then a1 and a2 are there, but nobody can find them: look-up begins
# at a0. So a prefix is *touched from its tail to its head*, and a2 goes first, then a1:
# **leaves first**. Below, this is one word, `reversed`. Look at the fourth number of each
# list, and at the two sums.


# %% tags=["claim"]
def lru(prompts, room, order=reversed):
    """Blocks that each prompt finds, with room for so many."""
    shelf, found = {}, []  # a dictionary keeps the order in which names came in
    for tokens in prompts:
        found.append(find(shelf, tokens))
        for beginning in order(beginnings_of(tokens)):
            shelf[beginning] = shelf.pop(beginning, None)  # now the most recent
        while len(shelf) > room:
            del shelf[next(iter(shelf))]
    return found


by_hand = [[1] * 25, [2] * 9, [3] * 17, [1] * 25]
print(
    "A, B, C, A, leaves first:", lru(by_hand, 4), "head first:", lru(by_hand, 4, iter)
)
print(
    "300 prompts, 20 blocks:", sum(lru(cut, 20)), "or", sum(lru(cut, 20, iter)), "found"
)

# %% [markdown]
# A finds one block again, or none. The engine sorts no tree for this: it frees a request's
# blocks from tail to head into one queue, which is the LRU. Look whether the twin and both
# of the engine's indexes agree.

# %% tags=["claim"]
for size in (8, 12, 20, 40, 80):
    ours = lru(cut, size)
    same = [tiers.replay(keys, size, index) == ours for index in ("hash", "radix")]
    print(f"{size:2} blocks: {sum(ours):4} found, hash and radix agree: {same}")

# %% [markdown]
# They do. One rule is missing in our twin: a block that a running request holds is
# *pinned*, and never evicted. The engine takes it out of the queue. Count its evictions
# with room for 8 blocks, and those of a block in use.

# %% tags=["claim"]
narrow, together = tiers.serve_visits(num_kv_blocks=8), example.run(num_kv_blocks=8)
print("visits: {} evicted, {} in use".format(*tiers.evictions(narrow.events)))
print(
    "A, B, C together: {} evicted, {} in use".format(*tiers.evictions(together.events))
)
print(
    "found now:",
    {v.name: v.found["device"] for v in narrow.visits if v.found["device"]},
)

# %% [markdown]
# None in use. But `C again` and `A again` find nothing now: the chat has pushed their blocks
# out. More room would help. How much?
#
# ## How large must the cache be?
#
# Three *workloads* of 240 prompts of 12 blocks each. *shared*: 16 beginnings of 8 blocks,
# the n-th used with weight 1/n, and an end of its own. *circle*: 12 documents, one after
# the other, round and round. *new*: nothing comes twice. With all 240 prompts kept, circle
# finds 95 %. Predict what it finds with room for eleven of its twelve documents, 132 blocks.

# %% tags=["claim"]
kinds = ("shared", "circle", "new")
loads = {kind: tiers.workload(kind, random.Random(7)) for kind in kinds}
bounds = {kind: tiers.hit_rate(loads[kind], 2880) for kind in kinds}
for kind in kinds:
    rates = [f"{tiers.hit_rate(loads[kind], n):4.0%}" for n in (32, 132, 138, 144, 512)]
    print(f"{kind:7}", *rates, f" nothing evicted {bounds[kind]:.0%}")

# %% [markdown] tags=["row-20"]
# Nothing at all. LRU throws out the document that is needed next, every time. One document
# short is as bad as no cache. From there on leaves-first softens the fall: 138 blocks keep
# half of each document.
#
# Still LRU is "within twice the optimum": it misses less than twice as often as one who
# knows the future *and has half the room* ([Sleator and Tarjan,
# 1985](https://doi.org/10.1145/2786.2793)). Look at misses, then at hits: 240 minus misses.

# %% tags=["claim", "row-20"]
from minifer.claims.lru import lru_misses, optimal_misses

circle = [*range(12)] * 20  # the documents, by number
best = {room: optimal_misses(circle, room) for room in (11, 6)}
print("misses of LRU with 11:", lru_misses(circle, 11), " of the best, by room:", best)

# %% [markdown] tags=["row-20", "correction-13"]
# The bound holds, and promises no hit: none here, where the best has most. (The lecture
# behind this book, [Dan Fu, June 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s), had a
# slide on LRU whose text a model had invented, as the speaker said.) Where is shared?

# %% tags=["picture"]
sizes = (16, 24, 32, 48, 64, 96, 128, 132, 138, 144, 192, 256, 384, 512)
curves = {
    kind: (sizes, [tiers.hit_rate(loads[kind], s) for s in sizes]) for kind in kinds
}
title = "Sharing pays early; a circle pays at once or not"
alt = "Share of blocks found against cache size, 16 to 512 blocks: shared rises to its "
alt += "bound; circle is 0 up to 132 blocks and 95 % from 144 on; new stays at 0."
show(views.hit_rate_figure(curves, bounds, title=title), alt=alt)

# %% [markdown] tags=["row-8"]
# What do real services see? Reported, not measured here:
#
# | where | found | source |
# |---|---|---|
# | DeepSeek's service, 24 hours | 56.3 % of 608 billion input tokens | [open-infra-index, day 6](https://github.com/deepseek-ai/open-infra-index), Feb 2025 |
# | two workloads of Alibaba Cloud | 62 % and 54 % | [arXiv:2506.02634](https://arxiv.org/abs/2506.02634), ATC 2025 |
# | Kimi's conversations, published trace | 37 % of blocks at best | bound of the trace of [arXiv:2407.00079](https://arxiv.org/abs/2407.00079), FAST 2025 |
#
# In that trace LRU finds 4 % with room for 1,000 blocks of 512 tokens, and 33 % with room
# for 30,000 (our replay). Large caches pay, and device memory is the dearest place for one.
#
# ## Where do evicted blocks go?
#
# Into slower memory. The engine has three *tiers*: the **device** (8 blocks here), main
# memory, **DRAM** (9 blocks), and a folder on **disk**. After each step the blocks it
# filled are copied to DRAM, and from there to disk in the background. A look-up asks all
# three, in this order, for one unbroken beginning. Look who finds what where.

# %% tags=["claim", "row-19"]
from pathlib import Path
from tempfile import TemporaryDirectory

scratch = TemporaryDirectory()
folder = Path(scratch.name) / "kv"
tiered = tiers.serve_visits(folder=folder, dram_blocks=9)
print("         device  DRAM  disk")
for visit in tiered.visits:
    print(f"{visit.name:8}" + "".join(f"{n:6}" for n in visit.found.values()))
same = [a.tokens == b.tokens for a, b in zip(tiered.visits, roomy.visits, strict=True)]
print("tokens as with 64 blocks on the device:", all(same))

# %% [markdown]
# `C again` finds 16 tokens in DRAM. `A again` finds its first block in DRAM and its second
# on disk: one prefix from two tiers. Look at the picture for the moment when DRAM is full.

# %% tags=["picture"]
columns = tiers.occupancy_data(tiered.events, dram_blocks=9)
title = "What leaves the device stays in DRAM, what leaves DRAM stays on disk"
alt = (
    "Blocks held over 72 steps. The device fills with cached blocks, DRAM up to 9, the "
)
alt += "disk up to 13. Found: B, chat 2 on the device, C again in DRAM, A again below."
show(views.occupancy_figure(columns, tiered.held, title=title), alt=alt)

# %% [markdown]
# Device and hits are drawn from the engine's events, DRAM and disk from the tiers. Events
# must give the same DRAM: what came in, at most 9. Look whether they do, in every step.

# %% tags=["claim"]
from_events = [column.dram for column in columns]
print(
    "steps:", len(columns), " events agree:", from_events == [n for n, _ in tiered.held]
)
print("DRAM full from step", 1 + from_events.index(9), " on disk:", tiered.held[-1][1])

# %% [markdown]
# They do. Move the slider from visit to visit. `A0` is the first block of A, D is the chat.
# DRAM is in the order of use. Watch A0 and A1 after `chat 2`: who went first?

# %% tags=["picture"]
view, alt, names = views.shelves_view(tiered, num_blocks=8, dram_blocks=9)
explore(view, alt=alt, labels={"visit": "after the visit"}, visit=names)

# %% [markdown]
# A1 left DRAM before A0: leaves first, here too. The disk has room and keeps all 13.
#
# ## When is a hit in a slower tier worth it?
#
# Loading wins if it is faster than computing:
#
# bytes / bandwidth < tokens / prefill speed, so bandwidth > **B_min** = bytes a token ·
# prefill speed
#
# By hand: a token of minifer-tiny has 2 · 4 layers · 6 heads · 16 · 4 bytes = 3,072 bytes.
# Say prefill makes 10,000 tokens a second. Then B_min is 30.7 MB/s: a disk of 100 MB/s
# pays, one of 20 MB/s does not. *The faster the chip computes, the faster its disks must
# be.* The engine's rule, with these numbers:

# %% tags=["claim", "row-19"]
from minifer.kv.tiers.break_even import BreakEven, mooncake_break_even

for disk in (100, 20):
    rule = BreakEven(kv_bytes_per_token=3072)
    rule.prefill.observe(10_000, seconds=1.0)
    rule.bandwidth["disk"].observe(disk * 1e6, seconds=1.0)
    verdict = "load" if rule.wins("disk", 512) else "recompute"
    print(f"B_min {rule.min_bandwidth / 1e6:.1f} MB/s, disk {disk:3} MB/s: {verdict}")

# %% [markdown]
# The engine measures both rates while it runs. What does it do when the tier is slower
# than recomputing? We tell it of a disk of 1 kB/s and send A again, to a new engine on
# the same folder. Look at what is loaded and what is refused.

# %% tags=["claim"]
engine, _ = tiers.open_engine(kv_disk_path=folder)
rule, stats = engine.kv.tiers.break_even, engine.kv.tiers.stats
rule.prefill.observe(10_000, seconds=1.0)
rule.bandwidth["disk"].observe(1e3, seconds=1.0)
answer = tiers.serve_one(engine, "A", *example.TRIO["A"])
print("loaded:", stats.hits["disk"], " refused:", stats.refused["disk"], end="  ")
print("same tokens:", tuple(answer.outputs[0].token_ids) == tiered.visits[0].tokens)
engine.close()

# %% [markdown]
# 16 tokens were there, and computing them was faster: a cache may always say no.
#
# Now large models. Mooncake (arXiv:2407.00079, equation 2) writes B_min with a model's
# shape. Look whether we get the paper's 6 and 19 GB/s for a 70B model at 8,192 tokens, and
# which links are fast enough.

# %% tags=["claim"]
for name, (flops, width, group, size) in tiers.SYSTEMS.items():
    least = mooncake_break_even(flops, width, group, 8192, element_bytes=size)
    slowest = [link for link, rate in tiers.LINKS.items() if rate > least][-1]
    print(f"{name:35} B_min {least / 1e9:5.2f} GB/s, slowest that pays: {slowest}")

# %% [markdown]
# The paper's numbers come out. (The links are limits: PCIe 5 moves 32 GT/s on 16 lanes,
# coded 128 of 130: 63 GB/s one way; the slow net is an assumption.) One NVMe disk loses
# against eight H800, and on a small CPU everything wins: **a demonstration on a laptop
# overstates what a disk is worth.**
#
# And this machine? Predict first: recomputing takes the FLOPs of a prefill over the rate of
# a matrix product, loading takes bytes over the rate of memory, or of one large file; all
# rates measured here. Look at the last two numbers: which belongs beside B_min?

# %% tags=["measure"]
from minifer.perf.limit import this_machine

lengths = (64, 128, 256, 512, 960)
times = tiers.time_reload(Path(scratch.name) / "timing", lengths)
large = tiers.file_read_rate(scratch.name)
predicted = tiers.predict_reload(lengths, this_machine(), large, {"20 MB/s": 20e6})
speed, files = 960 / times.recompute[-1], 3072 * 960 / times.disk[-1]
print(f"prefill {speed:,.0f} tokens/s, so B_min is {3072 * speed / 1e6:.0f} MB/s")
print(f"one large file {large / 1e6:,.0f} MB/s, block files {files / 1e6:,.0f} MB/s")

# %% [markdown]
# Lines are predicted, points are measured; the dotted line is a modelled tier.

# %% tags=["picture"]
won = times.disk[-1] < times.recompute[-1]
alt = (
    "Time against prefix length, 64 to 960 tokens: recomputing, loading from disk and "
)
alt += "DRAM, measured as points, predicted as lines; a modelled tier of 20 MB/s."
title = "Here the disk " + ("wins" if won else "loses")
show(views.reload_figure(times, predicted, title=title), alt=alt)

# %% [markdown]
# Predictions are floors. Recomputing is slower than its FLOPs say: small matrices do not
# reach the peak. Loading misses its line by more: a block is a file of 25 kB, and opening
# and checking it takes longer than moving its bytes. So the rate of *block files* counts.
# Larger models move 0.5 to 2 MB a block, and come closer to the line.
#
# ## What is left after a restart, or a flipped bit?
#
# The folder is still there, and the names of its files say what it holds. Look at what a
# new engine finds.

# %% tags=["claim"]
again = tiers.serve_visits(folder=folder, visits=(("A", 12), ("B", 9), ("C", 6)))
for before, now in zip(tiered.visits, again.visits, strict=False):
    print(f"{now.name} finds {now.found}, same tokens: {now.tokens == before.tokens}")
again.engine.close()

# %% [markdown]
# A and C come from disk; B finds A's blocks on the device by then, and one of its own on
# disk. A file is named by the block's name and all else its bytes depend on: weights,
# dtype, shape. It is a [safetensors](https://github.com/huggingface/safetensors) file; look
# at what it says of itself.

# %% tags=["claim"]
from safetensors import safe_open

disk = tiered.engine.kv.tiers.disk
first, second = tiers.keys_of(example.TRIO["A"][0].encode())
with safe_open(disk.path(first), framework="pt") as file:
    said, shape = file.metadata(), file.get_slice("kv").get_shape()
print(sorted(said), f"\ntokens {said['token_ids']}, shape {shape}")
print("names for other weights, dtype, shape:", tiers.names_of_file(disk.format, first))

# %% [markdown]
# Four names for four meanings of the bytes. The header says which block this is, and carries a
# checksum of the payload. To read a
# block is to write its header a second time and compare every byte. We flip a bit in 400
# places, cut the file short, and ask for it under another name. How many are accepted?


# %% tags=["claim"]
def accepted(content, key=first):
    return disk.format.decode(key, bytearray(content)) is not None


content, flipped = disk.path(first).read_bytes(), []
for place in random.Random(1).sample(range(len(content)), 400):
    bad = content[place] ^ 1 << place % 8
    flipped.append(accepted(content[:place] + bytes([bad]) + content[place + 1 :]))
print("whole:", accepted(content), " a bit flipped:", sum(flipped), "of", len(flipped))
print("cut short:", accepted(content[:-1]), " another name:", accepted(content, second))

# %% [markdown]
# And in the engine? We flip a bit of A's second block on disk. Write down what A will
# find, and whether it will answer differently.

# %% tags=["claim"]
tiered.engine.close()
content = disk.path(second).read_bytes()
disk.path(second).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
after = tiers.serve_visits((("A", 12),), folder=folder)
print(
    "found:", after.found("A"), " files refused:", after.engine.kv.tiers.stats.corrupt
)
print("same tokens:", after.visits[0].tokens == tiered.visits[0].tokens, end="  ")
print("written anew:", disk.read(second) is not None)
after.engine.close()

# %% [markdown]
# The first block is found, the second is a *miss*: deleted, computed, written again. (A
# file is written under another name, synced and renamed: a process that is killed leaves
# no half file under a good name.)
#
# ## When does caching lose?
#
# A circle, a slow tier, and new prompts. What did the last cost, with 132 blocks?

# %% tags=["claim"]
found, asked = tiers.replay(loads["new"], 132), 240 * 12
print(f"{asked} blocks looked up, {sum(found)} found, {asked - 132} evicted")

# %% [markdown]
# Every block threw out another. In seconds, naming against computing:

# %% tags=["measure"]
naming = tiers.time_names(1000)
print(f"1,000 tokens: names {naming * 1e3:.2f} ms, prefill {1e6 / speed:.0f} ms")

# %% [markdown]
# About a hundredth, even for this tiny model. The true cost is elsewhere: blocks nobody will
# ask for push out others, and are copied and written to disk. An engine may store a block
# only at its second use (`kv_write_policy="second_touch"`). In the trace above three of
# four blocks are used once: that spares their writes.
#
# ## Is it still the same model?
#
# A, B and C together, the cache off and on. All but the third column may differ.

# %% tags=["claim", "row-8"]
off, small = {"enable_prefix_caching": False}, {"num_kv_blocks": 8}
dram = small | {"kv_dram_bytes": 10**6, "kv_load_policy": "always"}
plain = example.run(**off)
print(" steps  found   same  options")
for options in (off, {}, {"prefix_index": "radix"}, small, dram):
    run = example.run(**options)
    same = all(run.tokens(r) == plain.tokens(r) for r in "ABC")
    hits = sum(output.num_cached_tokens for output in run.outputs.values())
    print(f"{run.events[-1].step:6} {hits:6} {same!s:>6}  {options}")
    run.engine.close()

# %% [markdown]
# 16 of 67 prompt tokens are found, with every cache, and no token changes.
#
# ## Takeaways
#
# - A block may be shared if its tokens and everything before them are the same; a chained
#   hash is a name for exactly that.
# - Whatever shapes or protects KV belongs into the name, with its kind.
# - Only full blocks are found, and one token is always left to compute.
# - A free block is a cached block. LRU touches a prefix from tail to head, so leaves go
#   first; what is in use never goes.
# - One document short of its circle, LRU finds nothing; new prompts find nothing ever.
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
engine, _ = tiers.open_engine(num_kv_blocks=16, block_size=16)
answers = [tiers.serve_one(engine, name, list(range(64)), 1) for name in "xy"]
print(1, answers[1].num_cached_tokens == 48)
pair = [tiers.keys_of([7] * 40 + [middle] + [7] * 59) for middle in (7, 8)]
print(2, tiers.replay(pair, 64)[1] * P == 40)
x, y, z = [1] * 17, [2] * 9, [3] * 9
print(3, lru([x, y, x, z, y], 3)[-1] == 0 and lru([x, y, z, x], 3)[-1] == 1)
print(4, round(131_072 * 20_000 / 1e9, 1) == 2.6)
scratch.cleanup()

# %% [markdown]
# All four hold.
#
# ## In real engines
#
# - **vLLM** names blocks of 16 tokens by a hash chain with salt, adapter and image in the
#   key, and frees a request's tail first
#   ([design](https://docs.vllm.ai/en/latest/design/prefix_caching/)). minifer follows it,
#   and compares tokens as well.
# - **SGLang** keeps a radix tree and evicts its leaves
#   ([arXiv:2312.07104](https://arxiv.org/abs/2312.07104)); *HiCache* puts DRAM and storage
#   below it ([blog, Sep 2025](https://lmsys.org/blog/2025-09-10-sglang-hicache)).
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
# 1. [kv/prefix_key.py](../minifer/kv/prefix_key.py): the name of a block.
# 2. [kv/prefix_index.py](../minifer/kv/prefix_index.py) and
#    [kv/radix_index.py](../minifer/kv/radix_index.py): one interface, two ways.
# 3. [kv/block_pool.py](../minifer/kv/block_pool.py): the queue that is the LRU.
# 4. [kv/tiers/tiers.py](../minifer/kv/tiers/tiers.py): device, DRAM, disk.
# 5. [kv/tiers/disk.py](../minifer/kv/tiers/disk.py): what a crash may leave behind.
#
# Next: [L06](L06_prefill.ipynb), what is done with the tokens that were not found.
