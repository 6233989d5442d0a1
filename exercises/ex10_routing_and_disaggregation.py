# %% [markdown]
# # Exercises 10 · Routing and disaggregation
#
# Four exercises, 20 points, about 110 minutes. They follow
# [lecture L10](../lectures/L10_routing_and_disaggregation.ipynb). Write where it says `YOUR CODE HERE`, run
# the cell, then run the check below it. `minifer grade 10` gives the points.
#
# An answer uses Python; no function may change its arguments. For 10.4 a function is given that runs minifer's
# simulator, and `minifer.simulation` is open to whoever wants to look further.

# %%
import functools
import hashlib
import math

from minifer.course import check

# %% [markdown]
# ### Exercise 10.1 - Score the replicas
#
# 5 points · difficulty 2/5 ●●○○○ · 20 minutes · CPU
#
# *Why it matters.* A router that only looks at prefixes builds a queue at one replica; one that only looks at
# queues computes everything everywhere. One sum of blocks sees both.
#
# *Specification.* `cheapest(num_tokens, matched, replicas, weight, block_size)` chooses a replica for a prompt:
#
# | argument | what |
# |---|---|
# | `num_tokens` | tokens of the prompt, at least 1 |
# | `matched` | dict: replica's name → leading tokens of the prompt that it holds; a name that is missing holds none, and **a number may exceed the prompt**, of which then all is held |
# | `replicas` | list of dicts with the keys `"name"`, `"healthy"` (bool), `"waiting"` (prompt tokens that are still to be computed there) and `"decoding"` (blocks of requests that generate) |
# | `weight` | of prefill against decode, at least 0 |
# | `block_size` | tokens a block |
#
# The cost of a replica, in blocks, is
#
# `weight * (waiting + tokens of the prompt that it does not hold) / block_size + decoding`
#
# without rounding. It returns the pair (name, cost) of the healthy replica with the lowest cost, the cost as a
# float; of equal ones the first in the list. When none is healthy, or the list is empty, it raises `ValueError`.
#
# *Example.* Blocks of 16, weight 1, a prompt of 160 tokens. The first replica holds 32 of them, the second 80,
# the third 128; nobody waits, and 10, 5 and 9 blocks decode. The costs are 18, 10 and 11: the second one takes it.
# (The example of Dynamo's documentation,
# [Routing concepts](https://docs.nvidia.com/dynamo/v1.2.0/components/router/routing-concepts).)


# %% tags=["exercise"]
def cheapest(num_tokens, matched, replicas, weight, block_size):
    """(name, cost in blocks) of the healthy replica that costs least."""
    # YOUR CODE HERE
    raise NotImplementedError("ex10.1")


# %%
check("10.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `matched.get(name, 0)` is right for a name that is missing; `min(…, num_tokens)` for a number that is too large.
#
# </details>

# %% [markdown]
# ### Exercise 10.2 - Affinity within a bound
#
# 5 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* A popular prefix must not drown the replica that holds it. And a prefix that nobody holds
# needs a home that all routers agree on, without asking each other, and that stays when a replica is added.
#
# *Specification.* Two functions.
#
# `preference(prefix, names, matched, enough)` lists all `names` from the most preferred to the least (`enough` is
# 1 or more):
#
# - first those that hold *at least* `enough` tokens (`matched`: name → tokens, a missing name holds none),
#   the most tokens first, equal ones in the order of their hash, the highest first;
# - then all others, whatever they hold, by their hash alone, the highest first. The hash of a replica for a
#   prefix is `weight_of(prefix, name)`, which is given.
#
# `place(order, loads, factor)` returns the first name in `order` whose replica has room. `loads` holds the
# requests of each name in `order`. With m requests in all and n replicas, each may have ⌈factor · (m + 1) / n⌉
# requests, *the new one counted in*. `factor` is a float of at least 1, and may be `math.inf`: then everybody
# has room. (In the tests the product is exact in floating point.)
#
# *Example.* Loads 5, 1 and 0 with factor 1.25: each may have ⌈1.25 · 7 / 3⌉ = 3. The first replica is full. The
# second has room, and would also have with 2 requests: the new one makes 3.
#
# *Source.* Rendezvous hashing: Thaler and Ravishankar 1998. Bounded loads: Mirrokni, Thorup and Zadimoghaddam,
# [arXiv:1608.01350](https://arxiv.org/abs/1608.01350).


# %%
def weight_of(prefix, name):
    """A number that looks random, and is the same everywhere: of a prefix (str) and a replica."""
    digest = hashlib.blake2b(f"{prefix}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


# %% tags=["exercise"]
def preference(prefix, names, matched, enough):
    """All names, from the most preferred to the least."""

    # YOUR CODE HERE
    raise NotImplementedError("ex10.2")


def place(order, loads, factor):
    """The first name in `order` whose replica may have one more request."""
    # YOUR CODE HERE
    raise NotImplementedError("ex10.2")


# %%
check("10.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `sorted(names, key=…, reverse=True)` with a key of two numbers. What must the first number be for a replica that
# holds too little, so that only its hash decides?
#
# </details>
# <details><summary>Hint 2</summary>
#
# One replica always has room: if all had the limit already, they would have more than m requests together.
#
# </details>

# %% [markdown]
# ### Exercise 10.3 - Transfer or recompute
#
# 4 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* Somebody else has computed this prefix. Whether that helps depends on the link, on who else
# is using it, and on how fast one computes.
#
# *Specification.* `fetch_or_compute(num_tokens, local, sources, kv_bytes, prefill_seconds)` decides how a prompt
# of `num_tokens` gets its KV on this replica, which holds the first `local` tokens already (0 ≤ `local` <
# `num_tokens`).
#
# - `sources` is a list of dicts: `"name"`, `"held"` (leading tokens of the prompt that it can send, possibly
#   all), `"bandwidth"` in **bits** a second, `"latency"` in seconds, `"backlog"` (bytes that the link has to
#   send before ours).
# - `kv_bytes` is the KV of one token, in bytes.
# - `prefill_seconds(new, cached)` gives the seconds to compute `new` tokens after `cached` ones.
#
# A source sends what lies beyond `local`. The **last token of the prompt is always computed here**, since its
# logits are wanted: at most `num_tokens - 1` tokens are worth having. The latency and the backlog come before
# the transfer, and the rest of the prompt is computed after it. A source that has nothing beyond `local` is not
# asked.
#
# Return the pair (name, seconds) of what is fastest; `None` as the name says that everything beyond `local` is
# computed. Of equal times computing wins, then the source that comes first in the list.
#
# *Example.* 1,000 tokens, none here, 100,000 bytes a token, 1 ms to compute a token whatever is cached. A source
# that has 800 at 8 Gbit/s (1 GB/s) without latency or backlog takes 0.08 s, and 200 tokens are left: 0.28 s
# against 1 s.


# %% tags=["exercise"]
def fetch_or_compute(num_tokens, local, sources, kv_bytes, prefill_seconds):
    """(name of the source or None, seconds until the prompt's KV is here)."""
    # YOUR CODE HERE
    raise NotImplementedError("ex10.3")


# %%
check("10.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the seconds of computing everything first. Each source must be *below* the best so far.
#
# </details>
# <details><summary>Help: I see times that are a little too small</summary>
#
# What is computed after a transfer attends to what was transferred: `prefill_seconds(new, cached)` wants both.
#
# </details>

# %% [markdown]
# ### Exercise 10.4 - Where do 40 % come from?
#
# 6 points · difficulty 4/5 ●●●●○ · 40 minutes · CPU
#
# *Why it matters.* "Up to 40 % higher sustainable throughput" is a true sentence. Which question does it answer,
# and what has to be changed to get another answer?
#
# Two nodes prefill prompts of 84,000 tokens, of which the share `cold_share` is new (*cold*: nothing but a system
# prompt is stored). `run(kind, rate, cold_share, seed)` simulates 600 seconds of them, after a ramp of 30 seconds
# that counts as well, and returns a tuple of (is it cold?, seconds to its first token), one a request. `kind`
# is `"equal"` (both nodes take all) or `"apart"` (one for cold prompts, one for warm ones). A run takes a
# fraction of a second; runs are kept, so asking again costs nothing.


# %%
from minifer.config import EngineConfig
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, NodeSpec, StoreLevel
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.named import find_steps
from minifer.simulation.workloads.generator import cold_warm


@functools.cache
def run(kind, rate, cold_share=0.1, seed=1):
    """Tuple of (cold, seconds to the first token) of every request: see above."""
    one_by_one = EngineConfig(
        block_size=4096,
        num_kv_blocks=60,
        max_num_batched_tokens=262_144,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    steps = find_steps("cold-warm")  # 30 ms a step, 1/40,000 s a token, and attention
    store = (StoreLevel("cluster", 0, bandwidth=50e9),)
    # PRE_PREFILL is the role of a node for cold prompts
    first = Role.PREFILL if kind == "equal" else Role.PRE_PREFILL
    nodes = tuple(
        NodeSpec(f"node{i}", steps, one_by_one, role, store)
        for i, role in enumerate((first, Role.PREFILL))
    )
    # least_work: to the node with the fewest seconds of work before it
    router = "least_work" if kind == "equal" else "cold_warm"
    cluster = Cluster(nodes, router=router, kv_bytes=70_272)
    traffic = cold_warm(rate, 600.0, seed=seed, cold_share=cold_share)
    records = simulate(traffic, cluster).requests
    # cold_warm gives cold prompts turn 0, warm ones turn 1
    return tuple((record.turn == 0, record.ttft) for record in records)


# %% [markdown]
# *Specification.* A warm request is in time when its first token comes after at most 1 second, a cold one after
# at most 10. Write three functions.
#
# 1. `carried(requests, each)` says whether a run counts as carried. `requests` is what `run` returns. With
#    `each=False` at least 90 % of all requests are in time; with `each=True` at least 90 % of the warm ones *and*
#    at least 90 % of the cold ones. A kind without requests is in time. It returns a bool.
# 2. `sustained(kind, rates, cold_share, seed, each, run)` returns the highest rate that is carried **together with
#    all lower ones** of the ascending list `rates`: the last one before the first that is not carried, or 0.0 when
#    the first one is not. It calls `run(kind, rate, cold_share, seed)` and no rate above the first that fails.
# 3. `report()` returns a dict with what you found on `RATES`. It may hold the numbers, or compute them:
#
# | key | what |
# |---|---|
# | `"equal"`, `"apart"` | the rates that each kind sustains with `cold_share=0.1` and `each=False`, a list of five: with seeds 1 to 5 |
# | `"gains"` | for each of the five seeds apart ÷ equal − 1, rounded to 2 digits |
# | `"vanishes"` | a dict of your choice: a `"cold_share"` (in [0, 1]) and an `"each"` (a bool) for which the gain is gone; and, with seed 1, the rates `"equal"` and `"apart"` that the two kinds sustain there. Apart must be no more than equal, and equal above 0 |
# | `"because"` | a string of 20 to 120 words: why there is a gain, and why it vanishes |
#
# *Example.* Of 90 warm requests 9 are late and of 10 cold ones one: 10 of 100, carried, and with `each=True` too.
# With 2 warm and 5 cold ones late 7 of 100 are late: carried, but not with `each=True`.
#
# *Check.* The numbers are simulated again: 20 seconds of computing are allowed, so search outside of `report` and return
# the numbers. Of `"because"` the words are counted, and it must name the highest of your gains, written with digits and
# the sign, as in `23 %` or `23%`; whether it is right you know best. The runs are shorter and the rates coarser than
# those of the lecture: expect a wider range.


# %%
RATES = [0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
WARM_LIMIT, COLD_LIMIT = 1.0, 10.0  # seconds


# %% tags=["exercise"]
def carried(requests, each):
    """Are enough of them in time?"""

    # YOUR CODE HERE
    raise NotImplementedError("ex10.4")


def sustained(kind, rates, cold_share, seed, each, run=run):
    """The highest rate that is carried with all below it; 0.0 for none."""
    # YOUR CODE HERE
    raise NotImplementedError("ex10.4")


# %% tags=["exercise"]
def report():
    """What you found, see the table above."""
    # YOUR CODE HERE
    raise NotImplementedError("ex10.4")


# %%
check("10.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `[sustained("equal", RATES, 0.1, seed, False) for seed in range(1, 6)]` is the first row. Start with seed 1.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Who pays for the partition? Ask for a condition that hears them. Or ask what a node for cold prompts does when
# there are hardly any.
#
# </details>
