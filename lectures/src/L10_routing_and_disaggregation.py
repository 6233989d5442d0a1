# %% [markdown]
# # L10 · Cache-aware routing and prefill/decode disaggregation
#
# Several engines raise a question that no scheduler answers: *which* one shall take
# this request?
# This lecture puts a router in front of real engines, a simulator beside them, and asks
# of each idea what it costs.
#
# 70 minutes of reading, 110 minutes of exercises. Needs L03 (scheduling), L05 (prefix
# look-up) and L07 (decode); no GPU, no network.
#
# After it you can
#
# - **score** replicas by load and by prefix, and say when each of them is wrong;
# - **bound** what affinity may cost;
# - **tell** what a router knows from what is so;
# - **decide** whether KV is worth moving, from a bandwidth and a prefill speed;
# - **explain** when cold prompts, or prefill, deserve machines of their own, and
#   **find** the condition under which a published gain vanishes.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands before the first of them, with its
# request](figures/life_map_start.svg)
#
# It is a request still, and there are several engines. The next cell prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

from minifer.course.pictures import disaggregation as apart
from minifer.course.pictures import routing as pictures
from minifer.course.pictures import routing_data as fleet
from minifer.course.pictures import routing_view as views

begin("L10")

# %% [markdown] tags=["row-7"]
# ## Which of two replicas?
#
# A **replica** is a whole engine with a model and a KV cache of its own. Two of them, x
# and y, and four requests with the same system prompt: 100 tokens, 80 of them shared. A
# token takes 1 ms to compute, one request after the other; answers are one token.
#
# By hand, all four at once. *Affinity* sends them to where the prefix is: 100, then 20
# each, so the first tokens come after 100, 120, 140 and 160 ms. *In turn*, each replica
# computes the prefix: 100, 100, 120, 120. Now the same 150 ms apart. Write down the
# mean of both, then let the simulator check.

# %% tags=["claim", "row-7"]
from minifer.config import EngineConfig
from minifer.simulation.cluster import Cluster, identical
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import FittedSteps, PrefillPrices
from minifer.simulation.workloads.arrivals import Arrival

one_by_one = EngineConfig(block_size=20, num_kv_blocks=50, max_num_seqs=1)
two = identical(2, FittedSteps(PrefillPrices(0.0, 0.001)), one_by_one)
TURN, AFFINITY = "round_robin", "prefix_affinity:load_factor=inf"
for gap in (0.0, 0.15):
    four = [Arrival(f"r{i}", gap * i, 100, 1, (1, 2, 3, 4, 10 + i)) for i in range(4)]
    for policy in (TURN, AFFINITY):
        records = simulate(four, Cluster(two, router=policy), name_tokens=20).requests
        waits = [round(record.ttft * 1e3) for record in records]
        work = sum(record.prompt_len - record.reused_len for record in records)
        print(f"{gap * 1e3:3.0f} ms apart, {policy:31}: {waits} {work} tokens computed")

# %% [markdown]
# Affinity always computes 160 tokens in place of 240. All at once it is slower, 130 ms
# against 110 on average; apart it is faster, 40 against 60. A prefix saves *work*, and
# an idle replica saves *waiting*. Which is worth more depends on how many others are
# there.
#
# ## What does a score weigh?
#
# Work and waiting, in blocks that stand before the request: of prompts that wait there,
# of this prompt what the replica lacks, of requests that decode. NVIDIA's Dynamo adds
# them up and takes the lowest sum ([Routing
# concepts](https://docs.nvidia.com/dynamo/v1.2.0/components/router/routing-concepts),
# 2026). Its example has three workers with 8, 5 and 2 blocks to prefill and 10, 5 and 9
# that decode. The third has most of the prompt. Who wins?


# %% tags=["claim"]
from minifer.routing.dynamo import dynamo_cost


def parts(prompt, matched, waiting, decoding, weight=1.0, block=16):
    """Blocks that stand before a prompt on a replica. Tokens but for `decoding`."""
    return {
        "prompts that wait": weight * waiting / block,
        "this prompt, not held": weight * max(0, prompt - matched) / block,
        "decoding": float(decoding),
    }


print([dynamo_cost(*blocks) for blocks in ((8, 10), (5, 5), (2, 9))])

# %% [markdown]
# The second. Is `parts` the rule that the router applies? Two replicas in 2,000 random
# states: our lowest sum against the library's choice.

# %% tags=["claim"]
from minifer.routing.dynamo import DynamoCost

equal = 0
for request, states, held in views.random_choices(2_000):
    costs = {}
    for s in states:
        blocks = request.num_tokens, held[s.name], s.prefill_tokens, s.decode_blocks
        costs[s.name] = sum(parts(*blocks).values())
    chosen = DynamoCost().choose(request, states, held).replica
    equal += chosen == min(costs, key=costs.get)
print("equal choices:", equal)

# %% [markdown]
# Replica x holds 900 of a prompt's 1,000 tokens, and 12 blocks decode there; y holds
# nothing and does nothing. Move the first slider: how many tokens may wait at x before
# y is better?


# %% tags=["picture"]
def score_view(waiting, weight):
    """Both replicas' costs. waiting: prompt tokens before ours at x."""
    x, y = parts(1_000, 900, waiting, 12, weight), parts(1_000, 0, 0, 0, weight)
    title = f"{waiting:,} tokens wait at x, which has 900 of our 1,000"
    return pictures.score_figure({"x": x, "y": y}, title=title)


explore(
    score_view,
    alt="Cost of replicas x and y as stacked bars: prompts that wait, blocks of this "
    "prompt that are missing, and blocks that decode. The lower one is chosen.",
    labels={"waiting": "waiting at x (tokens)", "weight": "weight of prefill"},
    waiting=[400, 0, 200, 600, 800, 1_000, 2_000],
    weight=[1.0, 0.0, 0.5, 2.0],
)

# %% [markdown]
# At 708 tokens they are equal: (708 + 100) / 16 + 12 = 62.5. With a weight of 0,
# prefixes count for nothing.
#
# Other rules draw a line. SGLang's router follows the prefix unless loads are
# **imbalanced**: unless the longest queue exceeds the shortest by more than 64 *and* by
# a factor above 1.5. Affinity with **bounded loads**
# ([arXiv:1608.01350](https://arxiv.org/abs/1608.01350)) gives nobody more than c times
# the mean, rounded up. By hand: three replicas have 6, 1 and 1 requests, c = 1.25. How
# many may each have, the new one included?

# %% tags=["claim"]
from minifer.routing.cache_aware import imbalanced
from minifer.routing.policy import ReplicaState
from minifer.routing.prefix_affinity import PrefixAffinity

print("100 against 30:", imbalanced([100, 30]), " 60 against 10:", imbalanced([60, 10]))
loaded = [ReplicaState(n, num_requests=m) for n, m in (("x", 6), ("y", 1), ("z", 1))]
for factor in (1.0, 1.25, 2.0):
    limit = PrefixAffinity(load_factor=factor).load_limit(loaded)
    print(f"c = {factor:4}: at most {limit}")

# %% [markdown]
# ⌈1.25 · 9 / 3⌉ = 4: x is full, whatever it holds, and at c = 2 as well. And prefixes
# that nobody holds? **Rendezvous hashing** hashes prefix and name together, and the
# highest hash wins. With 3, 9 and 5 for x, y and z it is y; without y, z. Exercises
# 10.1 and 10.2 are these rules.
#
# ## What happens on real engines?
#
# Three chats, those of A, B and C, four turns each. A later prompt is all that was said
# before and a question more. Two engines with minifer-tiny serve them behind minifer's
# own router; a step is the unit of time. The same requests go through the simulator,
# which has no model: it has the engine's scheduler and KV manager. Before you look: in
# turn, three chats over two replicas. How often does a turn find the one before?

# %% tags=["claim", "row-7"]
traffic, BOUNDED = fleet.chats(), "prefix_affinity"
total, live = sum(len(ask.prompt) for ask in traffic), {}
print(f"{len(traffic)} requests, {total} prompt tokens. Computed, and TTFT in steps:")
for policy in (TURN, "least_load", BOUNDED):
    live[policy] = real = fleet.serve_live(traffic, policy)
    model = fleet.serve_simulated(traffic, policy)
    print(f"{policy:15} real {real.computed}, {real.mean_ttft:.2f}", end=";  ")
    print(f"simulated {model.computed}, {model.mean_ttft:.2f}", end=";  ")
    print("alike:", real.ttft == model.ttft, real.together == model.together)

# %% [markdown]
# In turn, 383 of 631 tokens are computed, with affinity 199: a chat that changes its
# replica every turn finds what it said two turns ago. And request by request,
# replicas and steps of the real engines are the simulator's, which runs the engine's
# own scheduler and cache. *How long a step takes* is the part that is modelled, and
# here it is one.
#
# And the answers? They must be the same from any replica.

# %% tags=["claim"]
answers = [served.answers for served in live.values()]
print("same answers under all policies:", all(one == answers[0] for one in answers))

# %% [markdown]
# A router cannot make an answer wrong. Now a rush: eight users with one system prompt,
# a step apart. Look at who waits for whom when affinity has no bound.

# %% tags=["picture"]
queue, rushed = fleet.rush(), {}
for policy in (AFFINITY, BOUNDED, TURN):
    rushed[policy] = fleet.serve_live(queue, policy)
show(
    pictures.replica_gantt(
        {"no bound": rushed[AFFINITY], "bound: 1.25 × mean": rushed[BOUNDED]},
        title="Without a bound, one replica does everything",
    ),
    alt="Two timelines of two replicas. Without a bound all eight requests are at one, "
    "four of them wait for a seat until step 15 to 17, and the other replica is idle. "
    "Within a bound five are at one and three at the other; one waits until step 15.",
)

# %% [markdown]
# A replica has four seats: requests 4 to 7 wait for one, in grey, beside an idle
# replica. In numbers: requests at each replica, tokens computed, mean steps to a first
# token. Where does each rule pay?

# %% tags=["claim"]
for policy, real in rushed.items():
    model = fleet.serve_simulated(queue, policy)
    print(
        f"{policy:31} {real.loads!s:6} {real.computed}, {real.mean_ttft:.2f}", end=" "
    )
    print(f"simulated {model.computed}, {model.mean_ttft:.2f}")

# %% [markdown]
# The bound computes the five blocks of the prefix a second time, and more than halves
# the waiting. In turn costs as many tokens here and waits least: affinity can lose.
#
# ## What does the router know?
#
# It has never seen a KV cache. Engines report what changes in theirs (`BlockStored`,
# `BlockRemoved`), and the router keeps a copy: the **index**, block name → replicas.
# Names come from the prompt, so both sides find the same ones (L05). One replica with
# 12 blocks, two routers: one hears its events, one only remembers what it sent. Where
# does the third row leave the first?

# %% tags=["claim"]
seen = views.watch_beliefs(traffic[:9], num_blocks=12)
for name in ("truth", "heard", "remembered"):
    print(f"{name:10}", getattr(seen, name))

# %% [markdown]
# The one that hears is right each time.

# %% tags=["picture"]
show(
    pictures.belief_figure(
        seen, title="A router that only remembers believes in blocks that are gone"
    ),
    alt="Blocks that a replica of 12 is said to hold, over nine requests. The truth "
    "and what its events say stay below 12; what was sent grows to 20.",
)

# %% [markdown]
# What does a false belief cost? A's third turn again: look at what is promised and
# found. Then a batch of events gets lost: the index notices a gap in the numbers,
# trusts the replica less, and asks for a **snapshot**.

# %% tags=["claim"]
again, hears = traffic[6], seen.hears
promised = seen.remembers.matched_tokens(again.to_route()).get("x", 0)
tokens, found = fleet.answer(seen.engine, "again", again.prompt, again.wanted)
print(f"promised {promised}, found {found}; same answer:", tokens == answers[0]["A.2"])
seen.publisher.take()  # lost on the way
hears.apply(seen.publisher.take())
print("after the gap: exact", not hears.is_approximate("x"), hears.snapshots_wanted())
hears.apply(seen.publisher.snapshot())
right = hears.num_blocks("x") == seen.held
print("after a snapshot: exact", not hears.is_approximate("x"), right)

# %% [markdown]
# 56 tokens were promised and 16 are found. A stale view costs work and never a token.
# Replicas that publish nothing are a trap
# ([dynamo#11473](https://github.com/ai-dynamo/dynamo/issues/11473)); minifer then
# believes what it sent, for `ttl` seconds.
#
# ## How much more do four replicas carry?
#
# **Goodput** is the rate of requests that keep every limit of a **service-level
# objective (SLO)**: here a first token within 1 s, and 0.1 s a token after it. Four
# replicas with the step times of OPT 13B on an A100 (published with
# [DistServe](https://arxiv.org/abs/2401.09670), OSDI 2024) and small caches; 400
# requests of 16 tenants, each with a system prompt of 2,048 tokens, one of whom sends
# four requests in ten (more than OPT reads). SGLang's
# rule balances above a difference of 4 requests, not 64. Simulated: nothing here is
# measured. Which policy carries most? Look at the busiest replica.

# %% tags=["claim"]
from minifer.simulation.steps.published import PUBLISHED_STEPS

A100 = PUBLISHED_STEPS["distserve-opt-13b-a100-tp1"]
rates, curves = (4, 8, 12, 16, 20, 24, 28), {}
SGLANG = "cache_aware:balance_abs=4"
names = {TURN: "in turn", "least_load": "fewest requests", SGLANG: "SGLang's rule",
         AFFINITY: "prefix, no bound", BOUNDED: "prefix, bounded"}  # fmt: skip
print("                 found  busiest  most goodput")
for policy, name in names.items():
    cluster = apart.four_replicas(policy, A100)
    runs = [apart.carried(apart.shared_prompts(r, 400, seed=1), cluster) for r in rates]
    curves[name], at_16 = [run.goodput for run in runs], runs[3]
    print(f"{name:16} {at_16.hit_rate:5.0%} {at_16.busiest:8.0%}", end=" ")
    print(f"{max(curves[name]):13.1f}")

# %% [markdown]
# Without a bound 81 % of all tokens are found, and one replica gets 73 % of the
# requests: it has everything and no time. With a bound nearly as much is found, and
# that is worth more than the fairest queue; SGLang's rule carries most. Whose goodput
# falls below the rate first?

# %% tags=["picture"]
show(
    pictures.goodput_figure(
        curves, rates, title="Prefixes within limits carry most, without one they stall"
    ),
    alt="Goodput against the rate of requests for five policies, simulated. All follow "
    "the rate up to 12 a second but prefixes without a bound, which stay below 7.4. In "
    "turn and fewest requests peak at 16, bounded prefixes at 20, SGLang's rule at 24.",
)

# %% [markdown]
# Past their limits all curves but the unbounded one fall: requests that are late are
# computed all the same. And if nobody shares anything? Then a good rule must not lose.
# Prompts as long as those, each alone, six a second:

# %% tags=["claim"]
for policy, name in names.items():
    cluster = apart.four_replicas(policy, A100)
    run = apart.carried(apart.single_prompts(6, 480, seed=1), cluster)
    print(f"{name:16} {run.goodput / run.offered:.0%} of the requests keep the SLO")

# %% [markdown]
# A hash puts prompts at random, and random is worse than in turn: bounded affinity
# loses. SGLang's rule follows a prefix only where there is one.

# %% [markdown] tags=["row-21", "row-19"]
# ## Do cold prompts deserve replicas of their own?
#
# In long chats nine of ten prompts are *warm*: their KV lies somewhere, in a device, in
# DRAM, or in a store that all nodes share (the tiers of L05, and one more). The tenth
# is *cold*. By hand, 84,000 tokens at 1 / 40,000 s take 2.1 s, and attention nearly as
# long: a cold prompt takes 4 s; a warm one, with 3,000 new tokens, a third of a
# second. A tenth of the requests is 57 % of the work.
#
# Together AI routes them apart: **cache-aware disaggregation**
# ([post](https://www.together.ai/blog/cache-aware-disaggregated-inference), March
# 2026). The guest lecture ([June 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s))
# calls it two lines in the routing layer. What is cold? The post gives no threshold; a
# closed pull request of its first author does
# ([smg#469](https://github.com/smg-project/smg/pull/469)): a prompt that is long
# enough, matched in too small a part, *and* has enough left to compute.

# %% tags=["claim", "row-21"]
from minifer.routing.cold_warm import is_cold

rule = {"match_threshold": 0.1, "unmatched": 50, "min_tokens": 50}
for tokens, matched in ((100, 5), (110, 95), (52, 4)):
    print(f"{tokens} tokens, {matched} matched: cold", is_cold(tokens, matched, **rule))

# %% [markdown]
# The third has too few left. Two nodes, 1.1 requests a second, simulated
# with those step times. A warm prompt is
# late after 1 s, a cold one after 10 s. *Equal*: both nodes take all, where the least
# work waits. *Apart*: one node for each kind. *Soft*: a warm one may take an idle cold
# node. *Threshold*: whatever has more than 1,024 new tokens is cold. *Ordered*: both
# take all, in chunks, the shortest remaining prompt first, with ageing. Who gains and
# who pays?

# %% tags=["claim", "row-21"]
from minifer.claims import routing as study

chosen = {"equal": study.BASE, "apart": study.HARD, "apart, soft": study.SOFT,
          "wrong threshold": study.WRONG, "ordered": study.AGED}  # fmt: skip
late = {}
for name, key in chosen.items():
    *late[name], everybody = apart.too_late(study.DEPLOYMENTS[key], rate=1.1)
    warm, cold = late[name]
    print(f"{name:16} late: {warm:4.0%} of warm, {cold:4.0%} of cold, {everybody:4.0%}")

# %% [markdown]
# Apart, half as many warm prompts are late, and five times as many cold ones: they have
# one node and not two. Of all requests 8 % are late and not 12: by that count a gain.
# Soft is free for the cold ones. A threshold for short prompts calls most later turns
# cold and ruins both. And *ordered* keeps both kinds within a tenth, with all nodes for
# all. (It must know how long a prompt takes: for prefill that is known.)

# %% tags=["picture"]
show(
    pictures.late_figure(late, title="Apart, warm prompts gain and cold ones lose"),
    alt="Shares of warm and of cold prompts that come too late, in five deployments: "
    "equal 13 and 4 %, apart 6 and 22 %, soft 4 and 22 %, wrong threshold 47 and 39 %, "
    "ordered 6 and 10 %.",
)

# %% [markdown] tags=["row-21", "correction-6"]
# ## Where do 40 % come from, and where do they vanish?
#
# "Up to 40 % faster" is how it was told. The post says **up to 40 % higher sustainable
# throughput**, for contexts above 100,000 tokens under mixed load: more requests before
# latency breaks, not faster ones. `minifer claims routing` searches for the highest
# rate that two nodes carry. Modelled there, 30 November 2026, four seeds:
#
# | what counts as carried | apart | ordered |
# |---|---|---|
# | 90 % of all requests in time | +23 % (16 to 32 % by the seeds) | +32 % |
# | 90 % of warm *and* 90 % of cold ones | −17 % | +18 % |
#
# With the wrong threshold the gain is a loss (−64 %), and under a median nothing is
# proved: past saturation half of the requests still look fine while cold ones wait for
# ever. The gain is that of one cold prompt in ten, two nodes, first come first served,
# and a condition that warm requests dominate. In exercise 10.4 you find the range
# yourself.
#
# Is anybody late less often at a rate that both carry?

# %% tags=["claim", "correction-6"]
for name in ("equal", "apart"):
    warm, cold, _ = apart.too_late(study.DEPLOYMENTS[chosen[name]], rate=0.5)
    print(f"0.5 requests/s, {name:6} late: {warm:.0%} of warm, {cold:.0%} of cold")

# %% [markdown] tags=["row-14"]
# Nobody. Below the limit a second node for all is worth as much to warm ones.
#
# ## What does a prompt do to those who decode?
#
# The other line to cut along is prefill against decode. Four requests decode, one token
# every 30 ms or so, when a prompt of 8,192 tokens comes. Step times are fitted
# to what Splitwise measured for Llama 2 70B on eight H100
# ([arXiv:2311.18677](https://arxiv.org/abs/2311.18677)): 0.09 ms a prompt token, and
# 0.1 s for attention. By hand: for how long does nobody get a token, if the prompt
# is computed in one step? In chunks of 512? On another node?

# %% tags=["claim", "row-14"]
runs = apart.stalls()
for name, run in runs.items():
    print(f"{name:13} longest pause {run.pause * 1e3:3.0f} ms,", end=" ")
    print(f"first token after {run.seconds:.2f} s, nodes: {run.num_nodes}")

# %% [markdown]
# One step of 841 ms and one of decode: 873. Chunks make it 88, some sixteen times, and
# the long prompt waits half a second more for its first token. On a node of its own
# nobody notices.

# %% tags=["picture"]
show(
    pictures.progress_figure(
        runs, title="A whole prompt stops everybody; chunks slow them down"
    ),
    alt="Tokens of one short request over time in three deployments. With whole "
    "prompts the line is level for 0.9 s; with chunks of 512 it rises slowly for 1.4 "
    "s; with a node for prefill it goes on as before and ends 0.9 s sooner.",
)

# %% [markdown] tags=["row-14"]
# **Prefill/decode disaggregation** removes the stall, and needs a second node and a
# link. DistServe reports 7.4 times the requests
# ([arXiv:2401.09670](https://arxiv.org/abs/2401.09670), OSDI 2024), Splitwise 1.4 times
# the throughput at 20 % lower cost, Mooncake 59 to 498 % more capacity
# ([arXiv:2407.00079](https://arxiv.org/abs/2407.00079)); each against a system, and
# under limits, of its own. With equal kernels, and 90 % of requests within a TTFT of
# 400 ms and 100 ms a token, `minifer claims disaggregation` models 0.67 times the
# goodput a GPU for one prefill and one decode GPU, beside GPUs that do both.
#
# ## What moves, and is it still the same answer?
#
# What moves is KV. Two real engines: one computes A's prompt of 20 tokens and hands its
# full blocks over; the other goes on as if it had computed them. How many tokens does
# that one compute before the first of its answer?

# %% tags=["claim", "row-14"]
from minifer.course.pictures.prefix_tiers import keys_of
from minifer.execution.reference import reference_logits

(text, wanted), model = example.TRIO["A"], example.tiny().model
store = {"kv_dram_bytes": 10**6, "kv_load_policy": "always"}
prefill = example.run({"A": (text, 1)}, **store).engine
prompt = list(text.encode())
payloads = prefill.kv.tiers.export(keys_of(prompt))


def hand_over(engine):
    """Before A comes: what the other engine computed of it."""
    engine.kv.tiers.imports.take("A", keys_of(prompt), payloads)


decode = example.run({"A": (text, wanted)}, prepare=hand_over, **store)
steps = [sum(e.end - e.start for e in step.scheduled) for step, _ in decode.steps]
print(len(payloads), "blocks,", sum(map(len, payloads)), "bytes; tokens a step:", steps)
alone = reference_logits(model, prompt)[-1]
gap = float((decode.steps[0][1][-1] - alone).abs().max())
print("logits of one engine, to 1e-4:", gap < 1e-4, end=",  ")
print("same answer:", decode.tokens("A") == example.run().tokens("A"))

# %% [markdown]
# Four: the last block is not full, so it is computed again. Here is the token at
# position 5, which was never computed on this engine.

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(decode, "A", position=5, stage="kv")

# %% [markdown]
# `minifer serve --disaggregate 1:1` does this over shared memory or TCP, block by block
# while the prompt is computed. What does not come in time is computed again.
#
# ## When is moving worth it?
#
# A token's KV is k bytes; computing it takes 1/v seconds. Moving wins above the
# bandwidth
#
# $$B_{\min} = k \cdot v$$
#
# and below it, computing again does. By hand: Llama 3.1 8B has 131,072 bytes a token,
# and one H100 at half its peak computes some 30,000 tokens a second: 3.9 GB/s.
# Mooncake's equation 2 gives the same from a model's shape; for a 70B model on 8 × A800
# and 8 × H800 the paper prints 6 and 19 GB/s.

# %% tags=["claim", "row-19"]
from minifer.course import shapes
from minifer.kv.tiers.break_even import break_even_bandwidth, mooncake_break_even
from minifer.perf.costs import kv_bytes_per_token
from minifer.perf.devices import DEVICES

H100, llama = DEVICES["H100-SXM"], shapes.LLAMA_8B
for n in (1_024, 8_192, 32_768):
    seconds = apart.recompute_seconds(llama, H100, n)
    least = break_even_bandwidth(n * kv_bytes_per_token(llama), seconds)
    print(f"{n:6} tokens: {seconds * 1e3:4.0f} ms, B_min {least / 1e9:.1f} GB/s")
for name, chip in (("8 x A800", "A100-80GB-SXM"), ("8 x H800", "H100-SXM")):
    b_min = mooncake_break_even(8 * DEVICES[chip].peak_flops, 8_192, 8, 8_192)
    print(f"{name}, 70B: {b_min / 1e9:.2f} GB/s")

# %% [markdown]
# The longer the prompt the lower the bar, since attention grows faster than KV. Which
# of three links crosses the line?

# %% tags=["picture"]
lengths = [2**i for i in range(9, 17)]
links = {"10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "50 GB/s": 50e9}
show(
    pictures.break_even_figure(
        apart.times_to_have(llama, H100, lengths, links),
        lengths,
        title="Slow links lose, fast ones win, one in between wins for long prompts",
    ),
    alt="Time to compute a prefix again on one H100, and to move its KV over three "
    "links, against its length, log axes. 10 Gbit/s lies above computing up to 65,536 "
    "tokens, 50 GB/s far below, and 25 Gbit/s crosses it between 16,384 and 32,768.",
)

# %% [markdown] tags=["row-13", "correction-2", "correction-3"]
# ## Is one chip right for both phases?
#
# Prefill wants FLOPs, decode bandwidth (L01). A chip whose memory is SRAM has a **ridge
# point** of a few FLOPs a byte where a GPU has hundreds. Notes of the guest lecture
# have it that NVIDIA *acquired* "Grok". The maker of the LPU is **Groq**, and what both
# companies announced on 24 December 2025 is a *non-exclusive licence*, with hires
# ([Groq's newsroom](https://groq.com/newsroom)); Groq goes on as a company, and the sum
# in the press is unconfirmed. (OpenAI and Cerebras: 750 MW through 2028, reported 14
# January 2026.)
#
# How many chips hold an 8B model in bfloat16, and how long does one token take at
# least?


# %% tags=["claim", "row-13"]
import math

from minifer.perf.costs import num_parameters

weights = 2 * num_parameters(llama)
for name in ("H100-SXM", "Groq-LPU-v1", "Cerebras-WSE-3"):
    chip = DEVICES[name]
    needed = math.ceil(weights / chip.memory_bytes)
    floor = weights / (needed * chip.memory_bandwidth)
    print(f"{name:14} ridge {chip.ridge_point:5.1f}, chips {needed:2},", end=" ")
    print(f"{needed * chip.power_watts / 1e3:4.1f} kW, {floor * 1e6:6.1f} µs a token")

# %% [markdown]
# Floors, without communication: less than a thousandth of the
# latency for 30 times the power, and little room for KV. `minifer claims heterogeneous`
# (modelled, 30 November 2026) gives requests/s a kilowatt: at 50 ms a token 54 for
# eight H100 that do both and 37 for GPUs with 128 LPUs, at 1 ms 10 and 37. With half a
# millisecond of talk a step the LPUs fall to 6.
#
# ## What if one device does not hold the model?
#
# Then a replica is several devices. **Tensor parallelism** cuts every matrix: the first
# of a pair by its outputs, the second by its inputs, so that each device needs nothing
# of the others until the end, where their sums are added up: an **all-reduce**. By
# hand, x = (1, 2), two inner places, one device for each.

# %% tags=["claim", "row-9"]
import torch

from minifer.execution.parallel.layers import column_parallel, row_parallel

x, first = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [3.0, -1.0]])
second = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
inner = [part.relu() for part in column_parallel(x, first, 2)]
summands = row_parallel(inner, second)
print("summands", [part.tolist() for part in summands], "sum", sum(summands).tolist())
print("whole", ((x @ first.T).relu() @ second.T).tolist())

# %% [markdown]
# ReLU looks at each place alone; a norm between the two would have to see both. Now
# minifer-tiny on two and three ranks, and what is said: look at the bytes a device
# sends for one sum (in a ring), for Llama 3 70B on 8.

# %% tags=["claim", "row-9"]
from minifer.claims.shapes import LLAMA_70B
from minifer.execution.parallel.layers import all_reduce_bytes

for size in (2, 3):
    gap = float((apart.logits_of_ranks(size, prompt) - alone).abs().max())
    print(f"{size} ranks: logits of one, to 1e-4: {gap < 1e-4}")
sums = 2 * LLAMA_70B.num_layers + 1
sent = all_reduce_bytes(LLAMA_70B, 8, element=2)
print(f"{sent // sums:,} bytes a sum, {sums} sums, {sent:,} bytes a token")
floor = 2 * num_parameters(LLAMA_70B) / (8 * H100.memory_bandwidth) * 1e3
waits = [round(sums * wait / 1e3, 1) for wait in (2, 5, 10)]
print(f"floor {floor:.1f} ms; 2, 5 or 10 µs a sum add", waits)

# %% [markdown]
# At hundreds of GB/s the bytes are 10 µs a token; *waiting for the slowest*, 161 times,
# is what costs (the waits are assumed here, not measured). So tensor parallelism stays
# inside a machine; replicas and phases are spread over a network.
#
# ## Takeaways
#
# - A prefix saves work, an idle replica saves waiting. A score adds both, a bound
#   limits one.
# - A router's view is late. A wrong view costs work and never a token.
# - The simulator shares the engine's scheduler and cache; only its seconds are
#   modelled.
# - Cold prompts apart: warm ones gain, cold ones pay. Ask for both percentiles.
# - Order can give what a partition gives, with all nodes for all.
# - Prefill apart removes stalls and costs a node and a link; chunks cost less.
# - Moving KV wins above k · v bytes a second, and the answer is the same either way.
# - Tensor parallelism pays in waits, not in bytes.
#
# ## Questions
#
# **1.** A prompt of 320 tokens, blocks of 16. x holds 256 and has 30 blocks that
# decode; y holds nothing, and 10 decode. Who has the lower cost at weight 1?
#
# <details><summary>Answer</summary>
#
# x: 4 + 30 = 34. y: 20 + 10 = 30. So y.
#
# </details>
#
# **2.** Four replicas have 7, 2, 1 and 0 requests, c = 1.5. How many may one have?
#
# <details><summary>Answer</summary>
#
# ⌈1.5 · 11 / 4⌉ = ⌈4.125⌉ = 5. The first is full.
#
# </details>
#
# **3.** A prompt of 2,000 tokens, 900 matched. Match threshold 0.5, unmatched 1,024,
# least length 512. Cold? And with 1,200 unmatched as the threshold?
#
# <details><summary>Answer</summary>
#
# 45 % is too little, and 1,100 are left: cold. With 1,200 it is not.
#
# </details>
#
# **4.** 80,000 bytes of KV a token, 20,000 tokens a second. Does a link of 12.5 Gbit/s
# pay?
#
# <details><summary>Answer</summary>
#
# It must carry 1.6 GB/s; 12.5 Gbit/s is 1.56. Almost: no.
#
# </details>
#
# **5.** Two nodes, one in ten prompts cold, 4.3 s and 0.335 s. Which rate saturates the
# cold node, if it takes cold ones only?
#
# <details><summary>Answer</summary>
#
# 1 / (0.1 · 4.3 s) = 2.3 requests a second, however few warm ones there are.
#
# </details>
#
# Checked:

# %% tags=["claim"]
costs = [dynamo_cost((320 - held) / 16, busy) for held, busy in ((256, 30), (0, 10))]
print("1.", costs == [34, 30])
four = [ReplicaState(str(i), num_requests=m) for i, m in enumerate((7, 2, 1, 0))]
print("2.", PrefixAffinity(load_factor=1.5).load_limit(four) == 5)
print("3.", [is_cold(2_000, 900, 0.5, u, 512) for u in (1_024, 1_200)] == [True, False])
print("4.", break_even_bandwidth(80_000, 1 / 20_000) > 12.5e9 / 8)
print("5.", round(1 / (0.1 * 4.3), 1) == 2.3)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - **SGLang's router** and **SMG** hold a tree of texts a worker; **Dynamo** and
#   **llm-d** follow KV events, as minifer does.
# - **vLLM**'s connectors let a decode instance pull blocks.
# - `minifer bench route`, two replicas of SmolLM2 on an idle machine, two seeds,
#   measured on 30 November 2026 ([numbers](results/routing_live.md)): affinity over
#   round robin has 0.73 and 0.74 times the prompt tokens (simulated 0.73 twice) and
#   0.81 and 0.80 times the TTFT (simulated 0.78 and 0.73); beside other programs it
#   lost.
#
# ## Exercises
#
# In
# [ex10_routing_and_disaggregation.ipynb](../exercises/ex10_routing_and_disaggregation.ipynb);
# `minifer grade 10` counts the points.
#
# | id | title | points | minutes |
# |---|---|---|---|
# | 10.1 | Score the replicas | 5 | 20 |
# | 10.2 | Affinity within a bound | 5 | 30 |
# | 10.3 | Transfer or recompute | 4 | 20 |
# | 10.4 | Where do 40 % come from? | 6 | 40 |
#
# ## Where to read on
#
# 1. [routing/policies.py](../minifer/routing/policies.py): nine policies by name.
# 2. [routing/index.py](../minifer/routing/index.py): what a router knows, and how sure
#    it is.
# 3. [routing/cold_warm.py](../minifer/routing/cold_warm.py): three thresholds.
# 4. [serving/disaggregation](../minifer/serving/disaggregation/__init__.py): KV on its
#    way.
# 5. [execution/parallel/layers.py](../minifer/execution/parallel/layers.py): two cuts,
#    one sum.
# 6. [claims/routing.py](../minifer/claims/routing.py): the study behind the table
#    above.
