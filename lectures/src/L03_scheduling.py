# %% [markdown]
# # L03 · Scheduling and continuous batching
#
# Many requests share one model. Before every step somebody decides who computes how
# many tokens, and all that a user feels as waiting is decided there. This lecture
# builds that somebody in small cells, on a clock that costs nothing, and then finds
# it again in the engine.
#
# Reading 65 minutes, exercises 95 minutes. Needs L00, and from L01 the idea that a
# step waits for memory or for arithmetic. No GPU, no network.
#
# After it you can **compare** static and continuous batching in steps and in
# milliseconds, **trace** a request through its states, **plan** a step under a token
# budget and a block budget, **choose** a budget for a given pause between tokens, and
# **decide** who is preempted, who may overtake and who starves.

# %% [markdown]
# ## Where is the token now?
#
# ![The life map: start, scheduling, KV, prefill, decode, post-processing; scheduling is
# lit](figures/life_map_scheduling.svg)
#
# At the first stage. Its request has been admitted and waits in a queue; no block
# holds its keys and values yet, and no arithmetic has been done for it.
#
# The set-up prints nothing, unless something is missing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error
begin("L03")

# %% [markdown]
# Under the microscope: what this stage does for the last token of C's prompt. Look for
# the step that schedules it. (The engine's own lines are shown: not compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

trio = example.run(enable_prefix_caching=False)
microscope(trio, "C", position=17, stage="scheduling")

# %% [markdown]
# It came before step 1 and was scheduled in step 5. Why not before?
#
# ## What does a scheduler decide?
#
# A **scheduler** answers one question a step: how many tokens does each request
# compute now? The answer is a **plan**. Its numbers add up to no more than the
# **token budget**.
#
# Take the book's three requests: A, B and C bring 20, 29 and 18 tokens and want 12, 9
# and 6. The budget is 16. (The prefix cache is off here, so B shares nothing with A;
# L05 turns it on.) One rule plans every step: *those who run come first, then the
# queue, until the budget is spent*. Write down the plans of steps 1 to 5, then
# compare.

# %% tags=["claim"]
from minifer.course.pictures.schedule_data import bars, describe, shares, transitions

for step, plan in enumerate(shares(trio.events)[:6], start=1):
    print(f"step {step}: {plan}, {sum(plan.values())} tokens")

# %% [markdown]
# Step 2 gives A its last 4 prompt tokens and B the other 12. In step 3 A, one token
# behind, is served first. Nothing in the rule says *prefill* or *decode*: a request is
# some tokens behind, and a step lets it catch up. Both words describe how far behind
# it was.
#
# The picture is drawn from the events that the engine wrote. Look for the mixed steps,
# in which one request decodes while another prefills.

# %% tags=["picture"]
from minifer.course.pictures.schedule import Panel, curves, gantt, state_machine

life = bars(trio.events)
show(gantt(life, title="Steps 3 to 5 mix prefill and decode"), alt=describe(life))

# %% [markdown]
# Nobody waits for a batch to fill or to end.
#
# ## Which states does a request pass through?
#
# Three: **waiting** (in the queue, owns no blocks), **running** (owns blocks and a
# *seat*, one of `max_num_seqs`), **finished**. One arrow leads back. A running request
# that needs a block when none is free takes it from another one, which is
# **preempted**: it loses its blocks and waits again.
#
# At their ends the three have 31, 37 and 23 tokens in the cache (the last token drawn
# is never computed): 4, 5 and 3 blocks of 8. Twelve blocks hold everybody. What do six
# do? Predict the number on the arrow back, `running > waiting`.

# %% tags=["claim"]
tight = example.run(enable_prefix_caching=False, num_kv_blocks=6)
for blocks, run in ((12, trio), (6, tight)):
    counts = transitions(run.events)
    print(f"{blocks} blocks:", {f"{a} > {b}": n for (a, b), n in counts.items()})
print("same tokens:", all(trio.tokens(name) == tight.tokens(name) for name in "ABC"))

# %% [markdown]
# Eight preemptions, and not one token of the answers has changed. A preempted request
# keeps what it has drawn. Keys and values are lost, and those can be computed again.
# Look at the arrows in and out of *running*: 11 = 8 + 3.

# %% tags=["picture"]
figure = state_machine(counts, title="Every arrow back costs another arrow forth")
show(
    figure,
    alt="States with counts: new to waiting 3, waiting to running 11, running back to "
    "waiting by preemption 8, running to finished 3.",
)

# %% [markdown]
# What they cost we see below.
#
# ## How long is a step?
#
# A schedule is judged in milliseconds, so steps need a duration. We take the cost
# model of L01 as a **virtual clock**: FLOPs and bytes of the step's batch over the
# peaks of one chip, whichever takes longer. One model, the shapes of Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3) in bfloat16; one
# chip, an H100 by its data sheet. Modelled, not measured, and the same on every
# computer.
#
# Two of the rows you can do by hand: 15 GB of weights over 3.35 TB/s, and 8192 tokens
# · 2 · 8 billion FLOPs over 989 TFLOP/s.

# %% tags=["claim"]
from minifer.course.pictures.schedule_run import step_seconds
from minifer.course.shapes import LLAMA_8B
from minifer.perf.devices import DEVICES

h100 = step_seconds(LLAMA_8B, DEVICES["H100-SXM"])
# A batch is a list of (tokens of this step, length after it), one pair a request.
batches = {"1 decode": [(1, 1024)], "64 decodes": [(1, 1024)] * 64}
batches |= {f"prefill of {n}": [(n, n)] for n in (512, 8192)}
print({name: f"{h100(batch) * 1e3:.1f} ms" for name, batch in batches.items()})

# %% [markdown] tags=["row-7"]
# A decode step takes 5 to 7 ms whether one request is in it or 64: it waits for the
# weights. A long prompt takes as long as 30 decode steps. These two facts are the
# reason for the next two sections.
#
# ## Why not wait until the whole batch is done?
#
# Serving used to mean: collect a batch, run it to the end, collect the next. That is
# **static batching**. **Continuous batching** makes the batch anew before every step
# (Orca, [OSDI 2022](https://www.usenix.org/conference/osdi22/presentation/yu), calls
# it iteration-level scheduling).
#
# With two seats, by hand: A and B take them for 12 and 9 steps, C needs 6. Static: C
# begins when A is done, 12 + 6 = 18 steps. Continuous: C takes B's seat, 9 + 6 = 15.
#
# Now we build it. First, what a scheduler knows of a request. Look at `behind`.

# %% tags=["claim"]
from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Request:
    name: str
    prompt: int
    wanted: int
    computed: int = 0  # tokens whose keys and values are in the cache
    drawn: int = 0
    blocks: int = 0

    @property
    def behind(self):
        return self.prompt + self.drawn - self.computed


print("A is", Request("A", 20, 12).behind, "tokens behind when it comes")

# %% [markdown]
# Around it runs a loop, `play`: requests arrive, a scheduler makes a plan, the clock
# moves by what the plan costs, and whoever has caught up draws a token. Unfold it once.

# %% tags=["measure"]
from minifer.course.pictures.schedule_run import Arrival, play, random_worlds, serve
from minifer.course.source import show_source

show_source(play)

# %% [markdown]
# It reports the same events as the engine, so one picture serves both. The two
# schedulers differ by one `if`. Look for it, then for the empty seats.


# %% tags=["claim"]
def take_seats(waiting, running, seats=2):
    while waiting and len(running) < seats:
        running.append(waiting.popleft())
    return {r: r.behind for r in running}


def static(waiting, running):
    if running:  # the batch is not over
        return {r: r.behind for r in running}
    return take_seats(waiting, running)


ours = [Arrival("A", 0, 20, 12), Arrival("B", 0, 29, 9), Arrival("C", 0, 18, 6)]
policies = {"static": static, "continuous": take_seats}
runs = {name: play(ours, policies[name], h100, Request) for name in policies}
for name, run in runs.items():
    used, steps = sum(map(len, run.plans)), len(run.plans)
    print(f"{name:10} {steps} steps, {used} of {2 * steps} seats used,", end=" ")
    print(f"C's first token after {run.ttft('C') * 1e3:.0f} ms")

# %% [markdown]
# 18 and 15, as counted. The work is equal, 27 seats; what static batching adds is
# empty ones.

# %% tags=["picture"]
both = {name: bars(run.events) for name, run in runs.items()}
figure = gantt(
    both, title="Continuous batching gives B's seat to C at once", rows="seat"
)
show(
    figure,
    alt="By seat. Static: A for 12 steps, B for 9, then seat 1 is empty; C alone for 6 "
    "more steps. Continuous: C follows B in seat 1, 15 steps in all.",
)

# %% [markdown]
# When does it gain nothing, and when does it *lose*? Three cases: equal lengths, a lone
# request, and a newcomer with 4000 prompt tokens. Look at the steps of the first two,
# and at A's longest pause in the third.

# %% tags=["claim"]
cases = {"equal lengths": [Arrival(name, 0, 20, 6) for name in "ABCD"]}
cases["alone"] = [Arrival("A", 0, 20, 6)]
cases["C brings 4000"] = [*ours[:2], Arrival("C", 0, 4000, 6)]
for case, arrivals in cases.items():
    for name, policy in policies.items():
        run = play(arrivals, policy, h100, Request)
        pause = f"A's longest pause {max(run.gaps('A')) * 1e3:4.1f} ms"
        print(f"{case:13} {name:10} {len(run.plans):2} steps, {pause}")

# %% [markdown]
# Nothing to gain in the first two. In the third the newcomer's prompt is computed
# between two tokens of A, whose pause is thirteen times the usual. Static batching is
# not bothered: C was not let in.
#
# ## What does one long prompt do to everybody else?
#
# The time between two tokens is *ITL*, inter-token latency. A step ends for all its
# requests at once, so one long prompt makes one long step, and everybody who decodes
# sees a **stall**. The remedy is to cap the step: the budget cuts the prompt into
# chunks, which ride along with the decodes (**chunked prefill**; Sarathi-Serve,
# [arXiv:2403.02310](https://arxiv.org/abs/2403.02310)).
#
# Here A and B decode when C arrives with 8192 tokens. The scheduler is the engine's
# own, on our clock (`serve`). Predict A's longest pause for both budgets: one takes
# the prompt whole, the other 512 tokens a step.

# %% tags=["claim"]
long_prompt = [Arrival("A", 0, 64, 60), Arrival("B", 0, 64, 60)]
long_prompt += [Arrival("C", 0.05, 8192, 6)]
stall = {b: serve(long_prompt, h100, max_num_batched_tokens=b) for b in (16384, 512)}
for budget, run in stall.items():
    pause, first = max(run.gaps("A")) * 1e3, run.ttft("C") * 1e3
    print(f"budget {budget:5}: pause {pause:5.1f} ms, C's first token {first:.0f} ms")

# %% [markdown]
# The pause falls from 134 ms to 9 ms. C pays with its *TTFT*, the time to the first
# token: every chunk reads the weights again, and the keys and values of all chunks
# before it. Look at the long pause and at what replaces it.

# %% tags=["picture"]
gaps = {f"budget {budget}": run.gap_series("A") for budget, run in stall.items()}
panel = Panel("time of A's token (ms)", "since the token before (ms)", gaps, spans=True)
show(
    curves(panel, title="One long pause becomes sixteen short ones (H100, modelled)"),
    alt="Pause before each token of A over time. Taken whole, C's prompt makes one "
    "pause of 134 ms among pauses of 5; a budget of 512 makes sixteen of 7 to 9 ms.",
)

# %% [markdown]
# Which budget is right, if A may never pause for longer than 20 ms? Guess, then look
# at both columns, and at the last one: the same prompt when nobody else is there.

# %% tags=["claim"]
print("budget  A's pause  C's TTFT  C's TTFT alone")
for budget in (64, 128, 256, 512, 2048, 8192):
    run = serve(long_prompt, h100, max_num_batched_tokens=budget)
    alone = serve(long_prompt[2:], h100, max_num_batched_tokens=budget).ttft("C")
    both = f"{max(run.gaps('A')) * 1e3:6.1f} ms  {run.ttft('C') * 1e3:5.0f} ms"
    print(f"{budget:6}  {both}  {alone * 1e3:11.0f} ms")

# %% [markdown]
# 512 keeps the promise and costs C nothing that shows. Below 256 a chunk no longer
# fills the chip: the step waits for the weights, and TTFT grows fourfold while the
# pause hardly shrinks. That is chunking at a loss. The last column is another: where
# nobody decodes there is no pause to shorten, and a chunk can only cost.
#
# Is the clock honest? The same story with a real engine and the bundled model on
# *this* machine: A decodes, and after ten steps C comes with 900 tokens. Predicted is
# the roofline's floor for this machine's measured bandwidth and FLOP/s (L01). Look at
# the two spikes first, then at the distance between the lines.

# %% tags=["picture"]
from minifer.course.pictures.schedule_here import stall_here

here = stall_here(1024, 64)
panel = Panel("engine step", "duration of the step (ms)", here, log_y=True)
show(
    curves(panel, title="The spike is real; a tiny model has a floor of its own"),
    alt="Measured and predicted duration of each step on this machine, for budgets of "
    "1024 and 64: one high step against a plateau of fifteen lower ones.",
)

# %% [markdown]
# The shape is as predicted: one spike, or a plateau. The measured line lies above the
# predicted one, most of all in decode steps. A model this small leaves the machine
# busy with Python and with starting small operations, of which a roofline knows
# nothing. The clock is good for comparing two schedules, not for promising a latency.
#
# ## What if memory runs out?
#
# Tokens are one budget, *blocks* are the other. A request that outgrows its last block
# needs a new one; when none is free, somebody must give way. Our scheduler needs two
# small things. First: how many blocks are missing? Free blocks are not stored but
# counted, so none can leak. B, 29 tokens, stands before two free blocks of 8.


# %% tags=["claim"]
def missing(r, new, running, blocks, P):
    free = blocks - sum(other.blocks for other in running)
    return -(-(r.computed + new) // P) - r.blocks - free  # ceiling division


A = Request("A", 20, 12, computed=20, drawn=3, blocks=3)
B = Request("B", 29, 9)
lacks = [missing(B, new, [A], blocks=5, P=8) for new in (8, 16, 29)]
print("for 8, 16 and 29 tokens B lacks", lacks, "blocks")

# %% [markdown]
# A prompt of 29 fills four blocks: two are missing. Second: who gives way? The one that
# came last, for then nobody is overtaken. Look at what it keeps.


# %% tags=["claim"]
def preempt(waiting, running):
    victim = running.pop()
    victim.computed = victim.blocks = 0  # `drawn` stays: no token is lost
    waiting.appendleft(victim)


queue, seated = deque([B]), [A]
preempt(queue, seated)
print("queue:", [r.name for r in queue], "- A is", A.behind, "tokens behind")

# %% [markdown]
# A is at the front, 23 tokens behind: its 20 and the three it drew. Resuming needs no
# code at all, for the rule sees a request that is far behind.
#
# Now the whole scheduler. Two things to look for: nobody is admitted in a step that had
# to preempt, and a head that does not fit stops the queue (`overtake` is for later).


# %% tags=["claim"]
def scheduler(budget, seats, blocks, P=16, overtake=False):
    def schedule(waiting, running):
        plan, left, before = {}, budget, len(running)
        for r in list(running):
            new = min(r.behind, left)
            while new and r in running and missing(r, new, running, blocks, P) > 0:
                preempt(waiting, running)
            if not new or r not in running:
                break
            plan[r], left = new, left - new
            r.blocks = -(-(r.computed + new) // P)
        for r in list(waiting) if len(running) == before else ():
            new = min(r.behind, left)
            if not new or len(running) == seats:
                break
            if missing(r, new, running, blocks, P) <= 0:
                waiting.remove(r)
                running.append(r)
                plan[r], left = new, left - new
                r.blocks = -(-new // P)
            elif not overtake:
                break
        return plan

    return schedule


again = play(ours, scheduler(16, 64, 6, P=8), h100, Request)
print("each plan as the engine's:", again.plans == shares(tight.events))

# %% [markdown]
# The engine's plans, step by step, with their eight preemptions. What did they cost?
# Look at the hatched boxes.

# %% tags=["picture"]
life = bars(tight.events)
show(
    gantt(life, title="B computes its first tokens seven times over"),
    alt=describe(life),
)

# %% [markdown]
# This is **thrashing**. B is let in because 15 of its tokens find room; in the next
# step the next block is missing and all is thrown away. Count the tokens that went
# through the model against those that were needed, and try two remedies: a budget that
# takes a prompt whole, and a single seat.

# %% tags=["claim"]
needed = sum(len(prompt) + wanted - 1 for prompt, wanted in example.TRIO.values())
for options in ({}, {"max_num_batched_tokens": 64}, {"max_num_seqs": 1}):
    run = example.run(enable_prefix_caching=False, num_kv_blocks=6, **options)
    work = sum(sum(plan.values()) for plan in shares(run.events))
    print(f"{len(run.steps)} steps, {work} tokens for {needed} needed {options or ''}")

# %% [markdown]
# More than half of the work was for nothing. Under a budget of 64 a prompt enters when
# all its blocks are there, and with one seat nobody enters whose memory may be missing.
#
# Is preemption a bad idea, then? Two crowds of twelve, one with short prompts (200 +
# 100 tokens) and one with long ones (4000 + 300), and memory for two and a half
# requests, four and a half, or six and a half. We let everybody in, or cap the seats at
# what fits. Predict: in which crowd does preemption pay?

# %% tags=["claim"]
from minifer.course.pictures.schedule_data import door_or_cap, load_curve

ratio = {}
for prompt, wanted in ((200, 100), (4000, 300)):
    crowd = [Arrival(f"r{i}", 0, prompt, wanted) for i in range(12)]
    fit, times, work = door_or_cap(crowd, h100, (2, 4, 6))
    ratio[f"prompts of {prompt}"] = fit, times
    print(f"prompts of {prompt}: work", [round(w, 1) for w in work])

# %% [markdown]
# *Work* is tokens computed per token needed: up to 30 for the long prompts. Look at the
# line at 1 in the plot: below it the open door is faster, above it the cap.

# %% tags=["picture"]
panel = Panel("requests that fit in memory", "time, open door ÷ capped seats", ratio)
show(
    curves(
        panel, title="Short prompts are cheap to recompute, long ones thrash", line=1
    ),
    alt="Time with everybody admitted over time with capped seats, memory for 2 to 6 "
    "requests. Short prompts stay between 0.8 and 1.1; long ones fall from 3 to 1.9.",
)

# %% [markdown]
# Recomputing 300 tokens costs as much as one or two decode steps, and the seat that
# preemption fills earns that back. Recomputing 4000 costs a dozen decode steps, and
# again and again. Preemption is insurance for when memory is *rarely* short; when it is
# short all the time, admit fewer.
#
# ## Does the engine make the same plans?
#
# What you have read claims to be the engine's policy. Both serve 200 random workloads
# on one clock, with random budgets, seats and blocks, and we compare every plan of
# every step and every token's time. Look at the preemptions: the comparison must have
# met them.

# %% tags=["claim", "row-7"]
equal = steps = preempted = 0
worlds = random_worlds(seed=3, count=200)
for arrivals, options in worlds:
    mine = play(arrivals, scheduler(*options.values()), h100, Request)
    engine = serve(arrivals, h100, **options)
    equal += mine.plans == engine.plans and mine.token_times == engine.token_times
    steps, preempted = steps + len(engine.plans), preempted + engine.num_preemptions
print(f"{equal} of 200 workloads equal: {steps} steps, {preempted} preemptions")

# %% [markdown]
# All equal, to the last bit of the clock. Where does the engine's code differ? Unfold
# it. It asks the KV manager where ours counts (`can_allocate`), because blocks can be
# shared; it asks a policy where ours takes the last and the first (`victim`, `head`);
# and it knows requests that want n answers, wait for a disk, guess (`_schedule_drafts`,
# L07), or stop between two loops of a loop model.

# %% tags=["measure"]
from minifer.scheduling.scheduler import Scheduler

show_source(Scheduler._schedule_running)
show_source(Scheduler._schedule_waiting)

# %% [markdown]
# One difference changes plans: the prefix cache, on by default. A preempted request
# often finds its own full blocks again. Look at what is left of 196 tokens.

# %% tags=["claim"]
for cache in (False, True):
    run = example.run(enable_prefix_caching=cache, num_kv_blocks=6)
    work = sum(sum(plan.values()) for plan in shares(run.events))
    back = transitions(run.events)["running", "waiting"]
    print(f"prefix cache {cache!s:5}: {back} preemptions, {work} tokens computed")

# %% [markdown]
# Fewer than are needed, for B also skips what it shares with A. L05 is about how.
#
# ## What must hold in every step?
#
# A scheduler goes wrong quietly: the answers stay right, and a block or a request is
# lost once a week. So we write down what must hold, and look in every step: blocks held
# and blocks free are all there are; the plan keeps budget and seats; a request's tokens
# are computed in order; and *the oldest open request advances*. The last one excludes
# starvation: the oldest ends after at most as many steps as it has tokens, then the
# next one is the oldest. Look for four equal numbers, and for 100 workloads whose
# requests all finished once.

# %% tags=["claim"]
from collections import Counter

from minifer.kv.invariants import check_invariants

held, ends = Counter(), {}


def watch(plan, engine, requests):
    check_invariants(engine.kv, requests)  # of blocks; raises when one is broken
    now = {entry.request: entry for entry in plan.scheduled}
    oldest = next(r for r in requests if r in now or not r.finished)
    held["budget"] += plan.num_tokens <= engine.config.max_num_batched_tokens
    held["seats"] += len(now) <= engine.config.max_num_seqs
    held["in order"] += all(e.start in (0, ends.get(r, 0)) for r, e in now.items())
    held["oldest advances"] += oldest in now
    ends.update({r: entry.end for r, entry in now.items()})


for arrivals, options in worlds[:100]:
    counts = transitions(serve(arrivals, h100, watch=watch, **options).events)
    held["finished once"] += counts["running", "finished"] == len(arrivals)
print(dict(held))

# %% [markdown]
# The engine's tests do the same with random arrivals, aborts and forks; the exercises'
# grader does it with your code.
#
# ## Who may overtake whom?
#
# First come, first served is fair and has a price: a head that does not fit stops
# everybody behind it (**head-of-line blocking**), though blocks are free. R holds 5 to
# 8 of 10 blocks for 40 steps, H needs 9, and small requests of one block arrive, one a
# step. Look at both waits for 30 and for 120 of them; `overtake` lets the queue pass H.

# %% tags=["claim"]
for count in (30, 120):
    small = [Arrival(f"s{i}", i + 2, 8, 4) for i in range(count)]
    line = [Arrival("R", 0, 80, 40), Arrival("H", 1, 140, 4), *small]
    for overtake in (False, True):
        policy = scheduler(256, 64, 10, overtake=overtake)
        run = play(line, policy, lambda batch: 1.0, Request)
        mean = sum(run.ttft(s.name) for s in small) / count
        print(f"{count:3} small, overtake {overtake!s:5}: ", end="")
        print(f"H waits {run.ttft('H'):3.0f} steps, a small one {mean:4.1f} on average")

# %% [markdown]
# With overtaking the small ones hardly wait, and H waits as long as they keep coming:
# **starvation**. minifer does not overtake; exercise 3.1 builds the compromise. (Fair
# between requests is not fair between users: who sends a hundred gets a hundred turns.
# VTC, below, counts tokens per user.)
#
# Some requests *should* overtake: those with a better **priority** (a smaller number).
# It starves in the same way, and the remedy is **ageing**: waiting improves a
# request's place. In minifer `priority_ageing_steps` of waiting are worth one level.
# One seat, one step a request, two low requests and 100 high ones, one a step. How long
# does the first low one wait?

# %% tags=["claim"]
wanting = [Arrival(name, 0, 4, 1, priority=1) for name in ("low", "next")]
wanting += [Arrival(f"high{i}", i, 4, 1, priority=0) for i in range(100)]
for ageing in (None, 40, 10):
    options = {"scheduling_policy": "priority", "priority_ageing_steps": ageing}
    run = serve(wanting, lambda batch: 1.0, max_num_seqs=1, **options)
    passed = sum(run.ttft(f"high{i}") > 1 for i in range(100))
    print(f"ageing {ageing}: low waits {run.ttft('low'):.0f} steps, passes {passed}")

# %% [markdown]
# Without ageing the low one waits for all of them; with ageing as long as the setting
# says, whatever arrives. The price is paid by those it passes: each waits one step more.
#
# ## What do users feel when more of them come?
#
# 100 requests, one in five with a long prompt, arrive independently, at a rate we
# choose. *p50* is the latency that half of them do not exceed, *p99* that of all but
# one in a hundred; *TPOT* is a request's mean pause. Predict what doubles first
# when the rate doubles from 20 to 40 and to 80 a second.

# %% tags=["claim"]
rates, traffic = (20, 10, 40, 60, 80), {}
for budget in (2048, 256):
    traffic[budget] = load_curve(rates, h100, count=100, max_num_batched_tokens=budget)
    for load in traffic[budget][::2]:
        print(f"budget {budget:4}, {load}")

# %% [markdown]
# The median sleeps while the tail wakes: from 20 to 40 a second the p50 of TTFT moves by
# a few milliseconds, its p99 grows by half or doubles. The smaller budget keeps TPOT flat
# at any rate and pays with TTFT. Neither wins; it depends on which of the two was
# promised. Move both sliders, and find the rate at which you would buy a second GPU.

# %% tags=["picture"]
from minifer.course.pictures.schedule import load_view


def view(rate, budget):
    return load_view(traffic, rate=rate, budget=budget)


words = {"rate": "requests a second", "budget": "token budget"}
explore(view, rate=sorted(rates), budget=list(traffic), labels=words)

# %% [markdown]
# (Modelled: a floor, without the engine's own overhead, on one draw of arrivals.)
#
# ## Is it still the same answer?
#
# With the real engine, look at the last word of each row: budget, seats, blocks and
# policy change, tokens do not.

# %% tags=["claim"]
names = ("max_num_batched_tokens", "max_num_seqs", "num_kv_blocks", "scheduling_policy")
settings = [(budget, 64, 12, "fcfs") for budget in (1, 3, 16, 64)]
settings += [(16, 1, 12, "fcfs"), (16, 64, 5, "fcfs"), (5, 2, 5, "priority")]
for values in settings:
    run = example.run(**dict(zip(names, values, strict=True)))
    same = all(run.tokens(name) == trio.tokens(name) for name in "ABC")
    print(f"{values}: {len(run.steps)} steps, same tokens: {same}")

# %% [markdown]
# That is the invariant of the book. A scheduler is free to choose *when*; it has no say
# in *what*. (Float32, temperature 0; at other temperatures the noise of a draw depends
# on the request's seed and the token's place, not on the schedule.)
#
# ## Takeaways
#
# - A plan says how many tokens each request computes; prefill and decode are how far
#   behind it is.
# - Continuous batching fills the seats of those who finish. It gains nothing when all
#   lengths are equal, and its newcomers interrupt those who decode.
# - A step ends for all at once: the token budget bounds the longest pause, and TTFT pays.
#   Below the budget that fills the chip there is little left to gain.
# - Preemption by recomputation keeps every token drawn and throws away work. It pays while
#   it is rare.
# - First come, first served blocks behind its head; overtaking and priorities starve;
#   ageing bounds the wait.
# - The clock was modelled, the plans were real, the tokens never changed.
#
# ## Questions
#
# **1.** X and Y bring 20 tokens each; the budget is 16. What is the plan of step 3?
#
# <details><summary>Answer</summary>
#
# X 1, Y 8. Step 1 gives X 16, step 2 gives X 4 and Y 12, which leaves Y 8.
#
# </details>
#
# **2.** Requests of 3, 9, 3 and 3 steps, two seats. How many steps, static and
# continuous?
#
# <details><summary>Answer</summary>
#
# Static 9 + 3 = 12. Continuous 9: one seat serves the 9, the other 3 + 3 + 3.
#
# </details>
#
# **3.** A request with 50 prompt tokens is preempted after it drew 7. How far behind is
# it, and how many blocks of 16 does it need to catch up?
#
# <details><summary>Answer</summary>
#
# 57 tokens behind, 4 blocks. The seven are computed with the prompt, not drawn again.
#
# </details>
#
# **4.** Llama 3.1 8B on an H100, 16 GFLOP a token: which of the budgets 512, 1024 and
# 2048 keep the pause below 20 ms?
#
# <details><summary>Answer</summary>
#
# 512 and 1024. 20 ms · 989 TFLOP/s = 19.8 TFLOP are about 1230 tokens.
#
# </details>
#
# **5.** Priority 3, ageing 10 steps a level, arrived in step 5. Which requests of
# priority 0 can still be served before it?
#
# <details><summary>Answer</summary>
#
# Those that arrive before step 35: three levels are worth 30 steps. Of two that rank
# equal the older goes first.
#
# </details>
#
# The answers with numbers are checked here. Look for four times True.

# %% tags=["claim"]
pair = [Arrival("X", 0, 20, 4), Arrival("Y", 0, 20, 4)]
print("1.", serve(pair, h100, max_num_batched_tokens=16).plans[2] == {"X": 1, "Y": 8})
four = [Arrival(f"r{n}{i}", 0, 1, n) for i, n in enumerate((3, 9, 3, 3))]
steps = [len(play(four, p, h100, Request).plans) for p in policies.values()]
print("2.", steps == [12, 9])
late = Request("X", 50, 9, drawn=7)
print("3.", (late.behind, missing(late, 57, [], 0, 16)) == (57, 4))
runs = [serve(long_prompt, h100, max_num_batched_tokens=n) for n in (512, 1024, 2048)]
print("4.", [max(run.gaps("A")) < 0.02 for run in runs] == [True, True, False])

# %% [markdown]
# Four times True; the fifth answer is exercise 3.4.
#
# ## In real engines
#
# - **vLLM** (V1) plans by the rule of this lecture: running requests first, then waiting
#   ones, and none of these in a step that preempted; a preempted request goes to the
#   front of the queue with nothing computed. Its
#   [tuning guide](https://docs.vllm.ai/en/stable/configuration/optimization/) says what
#   to do about preemptions: more memory for KV, fewer seats, a smaller budget.
# - **SGLang** calls a block a page and a preemption *retraction*. It can order the queue
#   by the longest cached prefix, and returns to arrival order above 128 waiting requests;
#   in minifer that is `scheduling_policy="lpm"`.
# - **TensorRT-LLM** says *in-flight batching*, and offers both sides of our trade as a
#   [policy](https://nvidia.github.io/TensorRT-LLM/performance/performance-tuning-guide/useful-runtime-flags.html):
#   `GUARANTEED_NO_EVICT` admits what is sure to fit, `MAX_UTILIZATION` admits more and
#   may pause requests.
#
# ## Exercises
#
# In [ex03_scheduling](../exercises/ex03_scheduling.ipynb); `minifer grade 3` gives the
# points.
#
# | id | title | points | minutes |
# |---|---|---|---|
# | 3.1 | Admission with bounded overtaking | 6 | 25 |
# | 3.2 | Mix decodes and chunks | 6 | 25 |
# | 3.3 | Preempt, resume, finish | 6 | 30 |
# | 3.4 ★ | Priority with ageing | 2 | 15 |
#
# ## Where to read on
#
# - [scheduler.py](../minifer/scheduling/scheduler.py) and
#   [policies.py](../minifer/scheduling/policies.py): 560 lines, and you know most of them.
# - Orca, [OSDI 2022](https://www.usenix.org/conference/osdi22/presentation/yu); vLLM,
#   [arXiv:2309.06180](https://arxiv.org/abs/2309.06180); Sarathi-Serve,
#   [arXiv:2403.02310](https://arxiv.org/abs/2403.02310); fairness between users, VTC,
#   [arXiv:2401.00588](https://arxiv.org/abs/2401.00588).
# - L04 looks into the blocks that were only counted here, L06 into the chunks.
