# %% [markdown]
# # L09 · Bug clinic
#
# Inference engines fail quietly. The reply is fluent, the status is 200, and the number
# that went wrong is four layers and thirty steps away. This lecture goes the way from a
# symptom to its cause, on the real engine with real faults: what each looks like, how to
# find the step and the layer, how to make the failure small, and who keeps watch.
#
# 60 minutes of reading, 190 minutes of exercises. Needs L04 (blocks), L05 (prefixes) and
# L08 (stops); no GPU, no network.
#
# After it you can
#
# - **recognise** what NaN, a stale slot, a wrong reuse and a lost message look like;
# - **locate** the first wrong step and layer with a handful of comparisons;
# - **shrink** a failing log to the requests that matter;
# - **write** a test that fails with one fault and with no other;
# - **compute** how many replies one must check to see a rare fault, and say what a guard
#   costs and when it errs.

# %% [markdown]
# ## Where is the token now?
#
# ![The strip of the five stages; the token stands in the last, post-processing](figures/life_map_postprocessing.svg)
#
# It has become text, and the text is wrong. Symptoms show here. The cause may lie in any
# of the five stages. The next cell sets up and prints nothing.

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
except ImportError as error:
    remedy = 'minifer is missing: pip install "minifer[course]", or -e ".[course]" here'
    raise ImportError(remedy) from error

import torch

from minifer.course.pictures import clinic as pictures

begin("L09")

# %% [markdown]
# ## What does a broken engine look like?
#
# `minifer.faults` holds 22 faults of production engines, each a switch on the real
# engine, each with its public reports. Here are five of them. The model is minifer-tiny,
# whose English is poor in good health, too: do not read for sense, compare left and
# right. Which of the five would you notice without the left column?

# %% tags=["measure"]
from minifer.course.pictures import clinic_cases as scenes

shown = ["unchecked-nan", "stale-after-reuse", "one-token-is-decode", "wrong-script"]
gallery = scenes.cases([*shown, "salt-ignored"])
explore(lambda: pictures.gallery_html(gallery))

# %% [markdown]
# One token for ever and a foreign script hit the eye. A reply about something else does
# so only to whoever knows what was asked. The last text is right, letter by letter: what
# is wrong is whose cache it came from. (A *salt* in a block's
# name keeps tenants apart; `salt-ignored` drops it.)
#
# Look at how many of the five end with any warning.

# %% tags=["claim"]
for case in gallery:
    warned = "error" in case.broken
    print(f"{case.name:20} says that something is wrong: {warned}")

# %% [markdown]
# None. A crash would be a kindness. So the search begins with a comparison: the same
# request, in two ways that must give the same.
#
# ## Why does one NaN become one token for ever?
#
# The talk this book follows tells of kernels whose error became NaN in the logits, and
# of replies that repeated one token without end (Dan Fu, guest lecture in Stanford's
# CS336, [June 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s), from 21:38 on). Why one
# token, and why for ever?
#
# Three facts do it. Predict each: the place of the largest of 2, NaN, 1; of three NaN;
# and what 0 · NaN adds to a sum.

# %% tags=["claim", "row-16"]
nan = torch.nan
print("largest of 2, NaN, 1 is at", int(torch.tensor([2.0, nan, 1.0]).argmax()))
print("largest of NaN, NaN, NaN is at", int(torch.tensor([nan, nan, nan]).argmax()))
weights, values = torch.tensor([1.0, 0.0]), torch.tensor([5.0, nan])
print("1 · 5 + 0 · NaN is a number:", bool((weights @ values).isfinite()))

# %% [markdown]
# NaN counts as the largest, of several the first wins, so a row of NaN gives token 0. And
# attention weighs every earlier value: once one of them is NaN, so is each later output,
# whatever its weight. Token 0 is drawn, appended, attended to, and drawn again.
#
# Now in the engine, with its own check switched off: at the end of step 16 (step 0 is the
# prefill) one number of layer 2's values becomes NaN. Each cell below is what a layer put
# out in a step. Which cells will be black? Decide on the layers below 2.

# %% tags=["picture"]
from minifer.course.pictures import clinic_data as data
from minifer.faults.numerics import nan_in_cache, unchecked_nan, wrong_script
from minifer.faults.scenes import OTHER, QUESTIONS, SHARED, ask

well = data.trace(QUESTIONS[0])
sick = data.trace(QUESTIONS[0], ill=lambda engine: unchecked_nan(engine, layer=2))
grid = data.health(data.gaps(well, sick))
show(
    pictures.health_figure(grid, title="NaN goes up and to the right, and never back"),
    alt="Layers by steps. Well up to step 16; from step 17 layers 2, 3 and logits are "
    "NaN, from step 18 layers 0 and 1 differ, for they read another token.",
)

# %% [markdown]
# NaN goes to all layers above and to all steps after. The layers below stay finite, and
# from step 18 on their numbers are other ones: they read token 0 now. So the lowest
# black cell of the first black column is the culprit. The reply, counted:

# %% tags=["claim", "row-16"]
first_black = [column.count("NaN") > 0 for column in zip(*grid, strict=True)].index(
    True
)
print("first step with NaN:", first_black, "· its lowest row: layer", end=" ")
print([row[first_black] for row in grid].index("NaN"))
print("tokens from there on:", sorted(set(sick.tokens[first_black:])))
print("how it ended, to all appearance:", sick.finish_reason)

# %% [markdown]
# `length`: a success. What the reader sees is token 0 of the vocabulary: "!" in GPT-2,
# Llama 3 and Qwen, hence the replies of "!!!!" that vLLM's maintainers trace to NaN
# ([vllm#22881](https://github.com/vllm-project/vllm/issues/22881)). In SmolLM2 it is the
# end token: the reply stops there.
#
# The engine's own check looks at every row of logits before a token is drawn: one
# reduction a step. Look at what it does about the row, and about the blocks, which other
# users could find. The second prompt is the first one again.

# %% tags=["claim"]
from minifer.faults.matrix import build_engine

engine = build_engine(example.tiny(), num_kv_blocks=16)
with nan_in_cache(engine):
    (reply,) = ask(engine, QUESTIONS[0], max_tokens=24)
answer = reply.outputs[0]
print(f"{answer.finish_reason}, {answer.stop_reason}, {len(answer.token_ids)} tokens")
(again,) = ask(engine, QUESTIONS[0], max_tokens=2)
print("found in the cache afterwards:", again.num_cached_tokens, "tokens")

# %% [markdown]
# The request ends with an error after the tokens that were good, and its blocks are
# withdrawn: NaN in a shared prefix would be everybody's. (A check that replaces NaN by 0
# would hide it.)
#
# ## How do you find the layer?
#
# Not every fault is NaN. Here something happened in one layer at some step, and from
# there on numbers are wrong. The oracle is a healthy engine, and the sick one is
# made to read its tokens; comparing everything means 5 rows times 24 steps.
#
# Wrong stays wrong, as we saw. So look in the middle, and throw half away. By hand: to
# find one step among 24, how many looks does it take? And then one row among 5?


# %% tags=["claim"]
def first_bad(count, is_bad):
    """First bad of `count` places, the last of which is bad; where we looked."""
    good, bad, looks = -1, count - 1, []
    while bad - good > 1:
        middle = (good + bad) // 2
        looks.append(middle)
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad, looks


# %% [markdown]
# Three engines with an illness each: one key of the cache loses its sign. Layer and step
# are known here, so that we can check the hunter.

# %% tags=["claim"]
secrets = {"first": (1, 4), "second": (3, 15), "third": (0, 9)}
grids = {}
for name, (layer, after) in secrets.items():
    ill = data.trace(
        QUESTIONS[0], ill=data.turned_key(layer, after), forced=well.tokens
    )
    grids[name] = data.health(data.gaps(well, ill))
    (step, row), looks = data.hunt(grids[name], first_bad)
    right = (step, row) == (after + 1, layer)
    print(f"{name}: step {step}, layer {row}, {len(looks)} looks, right: {right}")

# %% [markdown]
# Seven or eight looks instead of 120. Move the slider `looks` to follow the search: first
# along the logits for the step, then down that column for the layer. What was not looked
# at is not shown.


# %% tags=["picture"]
def hunt_view(looks, engine):
    """The search after so many looks."""
    found, cells = data.hunt(grids[engine], first_bad)
    done = looks >= len(cells)
    said = f"began in step {found[0]}, layer {found[1]}" if done else "not known yet"
    title = f"{min(looks, len(cells))} looks: {said}"
    return pictures.health_figure(
        grids[engine], title=title, looked=cells[:looks], found=found if done else None
    )


explore(
    hunt_view,
    alt="Layers by steps. Cells that were looked at are numbered, first along the top, "
    "then down a column; the rest is white. At last a frame marks the first wrong one.",
    looks=[8, 0, 1, 2, 3, 4, 5, 6, 7],
    engine=list(grids),
)

# %% [markdown]
# Bisection rests on one belief: once wrong, always wrong. Why that holds, and where it
# does not, the next fault will show. It is from the talk, too.
#
# ## What did the off-by-one kernel read?
#
# Replies turned Chinese in the middle of an English sentence. Quantisation was suspected,
# then a fine-tune. In truth a kernel read one slot too many, memory that nobody had
# written for this request, and the model went on from what it found (the same talk). A
# public relative:
# [onnxruntime-genai#2354](https://github.com/microsoft/onnxruntime-genai/pull/2354).
#
# By hand: two keys with equal scores, values 1 and 3. The mean is 2. A third slot with
# the same score joins. What comes out when its value is 0? 100? NaN?

# %% tags=["claim", "row-18"]
for extra in (0.0, 100.0, nan):
    values = torch.tensor([1.0, 3.0, extra])
    print(
        f"slot holds {extra:5}: {float(torch.softmax(torch.zeros(3), 0) @ values):.2f}"
    )

# %% [markdown]
# Nearly right, absurd, nothing: the same bug, and what lies in the slot decides. So we
# switch the fault on in the engine, on one text, over memory with five contents. Write
# down which of them a user would notice.

# %% tags=["picture", "row-18"]
contents = data.slot_contents()
show(
    pictures.slot_figure(
        contents, title="What lies in the slot decides whether anyone notices"
    ),
    alt="Distance from the truth for a slot that holds zeros, what another reply "
    "left, 4 and 16 times that, and NaN: little, little, much, more, and no logits.",
)

# %% [markdown]
# The order, without the digits (which differ from machine to machine):

# %% tags=["claim", "row-18"]
zeros, stale, four, sixteen, poison = contents
print("plain leftovers are nearer to the truth than large ones:", stale.kl < four.kl)
print("and do they change most tokens:", stale.changed > stale.steps / 2)
print("16 times as large, most tokens:", sixteen.changed > sixteen.steps / 2)
print("NaN: not a single token is drawn from it:", poison.kl is None)

# %% [markdown]
# Plausible memory is one voice among many, and hardly a token changes: such a fault can
# live long. Large leftovers win the softmax. (Measured here on minifer-tiny. Chinese
# comes when the leftovers are a Chinese user's: our model has never read any.)
#
# NaN is the only content that is found at once. That is the trick called **poison**: in
# debug mode the engine fills with NaN whatever nobody owns, so a read of it fails in the
# first step. Look at two engines with the same fault.

# %% tags=["claim"]
from minifer.faults.memory import off_by_one_length

for debug in (False, True):
    engine = build_engine(example.tiny(), num_kv_blocks=16, debug=debug)
    with off_by_one_length(engine):
        (reply,) = ask(engine, QUESTIONS[0])
    answer = reply.outputs[0]
    ended = f"{answer.finish_reason} after {len(answer.token_ids)} tokens"
    print(f"poison {debug!s:5}: {ended}")

# %% [markdown]
# One token came from the prefill, which reads no slot too many; the first decode step
# fails. It costs a write of every freed block, so it runs in tests and on one replica
# in many.
#
# How did the wrong numbers spread? The engine again reads the healthy one's tokens; each
# cell is shaded by the size of the difference. Look for white cells in the bottom row,
# and at what stands above them.

# %% tags=["picture"]
ill = data.trace(QUESTIONS[0], ill=off_by_one_length, forced=well.tokens)
differences = data.gaps(well, ill)
show(
    pictures.gap_figure(
        differences, title="Layer 0 recovers now and then, the layers above never do"
    ),
    alt="Layers by steps, shaded by the difference from a healthy engine. From step 1 "
    "on all layers differ; layer 0 alone is white at steps 4 and 20.",
)

# %% [markdown]
# What is special about these steps? The prompt has 28 tokens and a block 16.

# %% tags=["claim", "row-18"]
n = len(example.tiny().tokenizer.encode(QUESTIONS[0]))
steps = range(1, differences.shape[1])
breaks = [step for step in steps if differences[0, step] < 1e-6]
print("layer 0 is right in steps", breaks, "· contexts of", [n + s for s in breaks])
print("the logits are right in steps", [s for s in steps if differences[-1, s] < 1e-6])

# %% [markdown]
# A context that fills its last block has no slot behind it, so nothing wrong is read. But
# earlier steps have *written* keys and values from wrong numbers, and those stay. The
# cache remembers: that is why wrong stays wrong. What the good steps have in common, here
# a length, names the cause.
#
# Who uses a length in that step? The microscope stands on one decoded token of A and
# shows, event by event, the line of the engine that speaks. (Lines move when the code
# does, so nothing is compared.)

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "A", position=24, stage="decode")

# %% [markdown]
# One forward pass computes three tokens of three lengths: with each comes the number of
# slots to read, and the fault is in it.
#
# A fault behind the last layer writes nothing. Then the belief is false, and bisection
# loses. `wrong-script` makes one character likely, three tokens out of eight. Where will
# the search end?

# %% tags=["claim"]
ill = data.trace(QUESTIONS[0], ill=wrong_script, forced=well.tokens)
top = data.health(data.gaps(well, ill))[-1]
wrong = [step for step, state in enumerate(top) if state != "well"]
found, looks = first_bad(wrong[-1] + 1, lambda step: top[step] != "well")
print("wrong steps:", wrong)
print(f"bisection says step {found}, after looking at {looks}; it began in {wrong[0]}")

# %% [markdown]
# It looked at good steps in between and searched on the wrong side. Where a fault comes
# and goes, compare every step.
#
# ## How small can a failure be made?
#
# A report from production is a log: twelve requests, the last one answered with
# something else. Which of them are needed? Leave out one after another, and keep it out
# if the failure stays. (For long logs leave out halves first: delta debugging, Zeller and
# Hildebrandt 2002, [doi:10.1109/32.988498](https://doi.org/10.1109/32.988498).)


# %% tags=["claim"]
def shrink(log, fails):
    """The log without every request that the failure does not need."""
    place = 0
    while place < len(log):
        shorter = log[:place] + log[place + 1 :]
        if fails(shorter):
            log = shorter
        else:
            place += 1
    return log


# %% [markdown]
# The fault: `stale-after-reuse`, a block that was handed to somebody else can still be
# found under its old name. A window is an engine seen from outside: it serves with
# `ask`, and its oracle is the slow twin. (`says` scripts a reply: each token is made
# the likeliest.) The log fails when the last reply's
# log-probabilities are not the oracle's. Guess how many requests are left.

# %% tags=["claim"]
from minifer.course.clinic import window

question = SHARED + QUESTIONS[1]
log = [question]
for number in range(10):
    log.append(f"{number} " + (SHARED if number % 2 else OTHER) + QUESTIONS[number % 3])
log.append(question)


def is_wrong(engine, prompt):
    """Does the reply differ from the slow twin's, in any log-probability?"""
    (reply,) = engine.ask(prompt, max_tokens=4)
    truth = engine.oracle(prompt, reply.tokens)
    return any(abs(a - b) > 1e-3 for a, b in zip(reply.logprobs, truth, strict=True))


def fails(log):
    """Is the last reply of this log wrong, on a fresh engine with the fault?"""
    engine = window("stale-after-reuse", num_blocks=24)
    for prompt in log[:-1]:
        engine.ask(prompt, max_tokens=1)
    return bool(log) and is_wrong(engine, log[-1])


small = shrink(log, fails)
print(f"{len(log)} requests, the failure needs {len(small)}")
print("the question is first and last:", small[0] == small[-1] == question)

# %% [markdown]
# Question, enough strangers to push it out of the cache, question. The shape of what is
# left says it: asked again *after eviction*. A good reproduction is half a diagnosis.
#
# ## What makes a test worth keeping?
#
# Two tests could come of this. The first asks whether the reply is right. The second
# looks at the mechanism: after eviction nothing of the question may be found. (The
# search goes from the front and ends at the first missing block.)


# %% tags=["claim"]
def fill(engine):
    """Other people's requests, enough to evict everything before them."""
    for letter in "abcdef":
        engine.ask(letter * (4 * engine.block_size), max_tokens=1)


def reply_is_right(engine):
    engine.ask(question, max_tokens=1)
    fill(engine)
    return not is_wrong(engine, question)


def evicted_is_not_found(engine):
    engine.ask(question, max_tokens=1)
    fill(engine)
    return engine.ask(question, max_tokens=1)[0].num_cached == 0


# %% [markdown]
# A test must fail with its fault and pass without; the better one fails for nothing
# else. Five engines: predict the rows in which the two tests disagree.

# %% tags=["claim"]
print("engine               right reply  nothing found")
for fault in (
    None, "stale-after-reuse", "off-by-one-length", "wrong-script", "eos-ignored"
):  # fmt: skip
    print(f"{fault or 'healthy':20}", end="")
    for test in (reply_is_right, evicted_is_not_found):
        passed = test(window(fault, num_blocks=24))
        print(f"{'passes' if passed else 'FAILS':>12}", end=" ")
    print()

# %% [markdown]
# The first test is an alarm bell: it rings for many things, and says little. The second
# is a specific **regression test**: it passes on the others here, so when it fails you
# know where to look. Exercises 9.1 to 9.4 ask for the second kind, and grade it by
# engines with other faults.
#
# What the first compares with is an **invariant**: alone or in company, cached or not, in
# chunks or whole, evicted or not, the greedy reply in float32 is the same. No golden
# text is needed, and a new model changes nothing.
#
# ## Who notices when nobody looks?
#
# The clinic has 13 detectors, some inside the engine, some beside it. A detector catches
# a fault when it rings with it and is silent without, on the same workload. Four faults;
# which detectors will ring for a NaN that nobody checks?

# %% tags=["picture"]
named = ["unchecked-nan", "off-by-one-length", "stale-after-reuse", "eos-ignored"]
watch = scenes.watched(named)
show(
    pictures.alarms_figure(
        watch.caught,
        watch.detectors,
        title="No detector sees everything, some see much",
    ),
    alt="Four faults by the detectors that need no debug mode; a dot where one rang. "
    "Replay rings for three of the four, end-token alone for the end token.",
)

# %% [markdown]
# **Replay** computes one request in N again, alone and with nothing from the cache:
# equality once more, the strongest detector, for a share of the machine. (All 22 faults:
# `minifer faults --matrix`, half a minute.) And no false alarm?

# %% tags=["claim"]
print("alarms of a healthy engine:", watch.false_alarms)
print(
    "faults that nobody saw:", [name for name, who in watch.caught.items() if not who]
)
print("seen by replay:", [n for n, who in watch.caught.items() if "replay" in who])

# %% [markdown]
# None: whoever rings for nothing is soon not heard.
#
# ## Why does a test of a thousand replies not see it?
#
# At trillions of tokens a day, says the talk, faults of 0.001 % become visible. Small
# numbers first: a fault in one reply of ten, three replies checked. The chance that all
# three are good is 0.9³ = 0.729, so it is seen with 27 %. The same formula for one in
# 100,000: what will 1,000 replies give, and how many does 95 % take?

# %% tags=["claim", "row-15"]
from minifer.claims.rare_bugs import TOKENS_A_DAY, TOKENS_A_REQUEST, chance_to_see
from minifer.perf.rare_events import rate_bound, trials_to_see

rate = 1e-5
print(f"one in 10, 3 replies: {chance_to_see(3, 0.1):.1%}")
print(f"one in 100,000, 1,000 replies: {chance_to_see(1000, rate):.1%}")
print(f"for 95 %: {trials_to_see(rate):,} replies")
print(f"no failure in 1,000 allows one in {1 / rate_bound(1000):.0f}, with 95 %")
incidents = TOKENS_A_DAY / TOKENS_A_REQUEST * rate
print(f"at 10¹² tokens a day, 1,000 a request: {incidents:,.0f} bad replies a day")

# %% [markdown]
# 299,572 replies. And a clean test of 1,000 says only "less than one in 334": three
# divided by n, the *rule of three* (Hanley and Lippman-Hand,
# [JAMA 1983](https://doi.org/10.1001/jama.1983.03330370053031)). The rate of 0.001 % is
# the talk's example; no measurement is published.
#
# The formula wants independent replies. Does running each prompt many times help?

# %% tags=["picture", "row-15"]
show(
    pictures.chance_figure(title="Repeating the same prompts is no new trial"),
    alt="Chance to see a fault of one in 100,000, against the replies checked. With "
    "other prompts it reaches 95 % at 300,000; with each prompt 1,000 times it stays "
    "below 1 % there and needs 1,000 times as many.",
)

# %% [markdown]
# Not if the prompt decides: its length, its last block, its characters. A fault of one
# length in sixteen is common for that length and absent from all others. So sweep what
# faults depend on (lengths, batch sizes, full pools) instead of drawing more of the same.
#
# ## What does a guard cost, and when does it err?
#
# What tests cannot see must be watched for while serving. A **guard** looks at a reply as
# it is written. A loop: a passage that is there again and again. A table: the same. Which
# of these will the engine's guard call a loop, and after how many tokens?

# %% tags=["claim"]
rule = "| --- " * 8 + "|\n"
texts = {
    "I will try again. (30 times)": "I will try again. " * 30,
    "ha ha ha (8 times)": "ha " * 8,
    "a table's rule": "| a | b |\n" + rule,
    "a hundred such rules": rule * 100,
    "a list that counts": "".join(f"Step {n}: try again. " for n in range(50)),
}
for name, text in texts.items():
    place = scenes.tripped_at(text)
    print(f"{name:30} {'no loop' if place is None else f'a loop after {place}'}")

# %% [markdown]
# The rule of a table is what a stricter guard has killed in public, in the middle of a
# valid tool call
# ([vLLM-2080Ti-Definitive#122](https://github.com/weicj/vLLM-2080Ti-Definitive/issues/122));
# here layout has a limit of its own. A loop that counts is not found: every guard has
# such a hole. That is why the default only reports. Exercise 9.5 is this guard.
#
# Not every loop is a fault: greedy decoding of a healthy model may circle
# ([Holtzman and others, 2019](https://arxiv.org/abs/1904.09751)). First ask whether the
# oracle loops, too.
#
# ## Why does a tool call come again and again?
#
# Another case of the talk: after a change in how tool calls were handled, a model
# searched without end, tens of thousands of tokens a reply. There was no error. It
# showed in the lengths of the completions. Here a model that calls a tool until it sees
# the result, once with the engine's chat template and once with a template that loses
# the tool's message. How many turns will the second one take, of six?

# %% tags=["claim", "row-17"]
from contextlib import nullcontext

from minifer.faults.tools import converse, tool_result_dropped
from minifer.postprocessing.guards.tool_loop import tool_loop

for fault in (lambda engine: nullcontext(), tool_result_dropped):
    engine, seen = build_engine(example.tiny(), num_kv_blocks=16), []
    with fault(engine):
        messages = converse(engine, lambda turns, seen=seen: seen.append(list(turns)))
    calls = sum("tool_calls" in message for message in messages)
    rang = [turn for turn, history in enumerate(seen) if tool_loop(history)]
    answered = messages[-1]["role"] == "assistant"
    print(f"{calls} calls, answered: {answered}, the guard rings before turns {rang}")

# %% [markdown]
# The model is not stupid: in its prompt the call was never made. The breaker counts
# equal calls with equal results and rings before turn 3, after three of them. A poll
# whose answer changes is no loop. Exercise 9.6 is this breaker. A public case made over
# 220 calls in 25 minutes ([pi#9637](https://github.com/earendil-works/pi/issues/9637)).
#
# And the dashboard? Let one reply in 1,000 run into the limit of 16,384 tokens (modelled:
# log-normal lengths, median 250). Which moves: the mean, the median, the 99th percentile?
# Look for the hump at the right.

# %% tags=["picture", "row-17"]
healthy, looping = (scenes.completion_lengths(rate) for rate in (0.0, 1e-3))
show(
    pictures.lengths_figure(
        {"healthy": healthy, "one in 1,000 loops": looping},
        title="A loop in one reply of a thousand is a second hump in the lengths",
    ),
    alt="Histogram of reply lengths on log axes, modelled. Both curves are one hump "
    "around 250 tokens; with loops a narrow second one stands at 16,384.",
)

# %% [markdown]
# The same in numbers: each statistic with loops, over the one without.

# %% tags=["claim", "row-17"]
import numpy as np

for q in (0.5, 0.99, 0.9995):
    ratio = np.quantile(looping, q) / np.quantile(healthy, q)
    print(f"quantile {q:6}: × {ratio:.2f}")
print(f"mean           : × {looping.mean() / healthy.mean():.2f}")

# %% [markdown]
# Median and 99th percentile know next to nothing, the mean moves by what a busy day
# moves it, the far tail shouts. Watch it, and the share of replies that end by
# `length`.
#
# ## Which of this has happened?
#
# Separate incidents, each by its own account:
#
# | who, when | symptom | cause |
# |---|---|---|
# | AI21 on vLLM, [vllm#32118](https://github.com/vllm-project/vllm/pull/32118), January 2026 | rare, confident gibberish under memory pressure | a new request with one token to compute was taken for a decode, and read the recurrent state that another had left |
# | Anthropic, [post-mortem of 17 September 2025](https://www.anthropic.com/engineering/a-postmortem-of-three-recent-issues) | Thai or Chinese characters in English replies, from 25 August | an optimisation on some servers gave rare tokens a high probability |
# | Anthropic, the same text, another bug | the likeliest token is missing now and then | an approximate top-k, compiled wrongly |
# | OpenAI, [report of 21 February 2024](https://status.openai.com/incidents/ssg8fh7sfyz3) | word salad | kernels gave wrong results on certain GPU configurations |
# | vLLM, [vllm#39273](https://github.com/vllm-project/vllm/issues/39273) | fragments that repeat and decay | recurrent state not rolled back after rejected guesses |
# | vLLM, [vllm#43961](https://github.com/vllm-project/vllm/pull/43961) | a benchmark falls from 0.91 to 0.01 as the cache fills | blocks reused with what was in them |
#
# AI21's way was this lecture's: a script that compares log-probabilities of two runs,
# memory kept scarce so that the fault comes often, and request ids carried through the
# forward pass ([summary](https://www.plushcap.com/content/ai21-labs/blog/ai21-labs-one-token-to-corrupt-them-all-a-vllm-debugging-tale)).
# Our `one-token-is-decode` is that fault on attention: the third pair of the gallery. Its
# first token is read off another user's blocks, which is more than a wrong answer.
#
# ## Takeaways
#
# - A broken engine is fluent. Compare two ways that must agree; do not judge texts.
# - NaN goes up and to the right. The lowest cell of the first bad column is the culprit.
# - Bisection is cheap and believes that wrong stays wrong.
# - What lies in memory decides whether a wrong read shows. Poison makes it show.
# - Shrink first: the shape of what is left is half a diagnosis.
# - A good regression test fails with its fault and with no other.
# - A clean test of n replies allows faults of 3/n; repeats of a prompt are no trials.
# - Guards report, tails tell, and each guard has a hole.
#
# ## Questions
#
# **1.** A row of logits is [1, NaN, 7, NaN]. Which token does argmax draw?
#
# <details><summary>Answer</summary>
#
# Token 1: NaN counts as the largest, and the first one wins.
#
# </details>
#
# **2.** Of 64 steps the last is wrong, and wrong stays wrong. How many looks find the
# first wrong one, at most?
#
# <details><summary>Answer</summary>
#
# Six: each halves what is left.
#
# </details>
#
# **3.** 3,000 independent replies without a failure. Which rates are left possible?
#
# <details><summary>Answer</summary>
#
# Up to 3 / 3,000 = 0.1 %, with 95 % confidence.
#
# </details>
#
# **4.** Three equal scores, values 2, 4 and the leftover 30 of an extra slot. What comes
# out, and what should?
#
# <details><summary>Answer</summary>
#
# 12 instead of 3.
#
# </details>
#
# **5.** A test passes on a healthy engine and fails with the fault it was written for.
# What is still to be asked?
#
# <details><summary>Answer</summary>
#
# Whether it also fails with other faults. Then it is an alarm, and no diagnosis.
#
# </details>
#
# The numbers, checked.

# %% tags=["claim"]
print("1.", int(torch.tensor([1.0, nan, 7.0, nan]).argmax()) == 1)
print("2.", max(len(first_bad(64, lambda i, n=n: i >= n)[1]) for n in range(64)) == 6)
print("3.", round(rate_bound(3000), 4) == 0.001)
print("4.", float(torch.tensor([2.0, 4.0, 30.0]).mean()) == 12)

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - vLLM counts rows with NaN when `VLLM_COMPUTE_NANS_IN_LOGITS` is set, and has a
#   [repetition detection](https://github.com/vllm-project/vllm/pull/35451) a request can
#   ask for (merged in 2026).
# - FlashInfer fills values, and not keys, with zeros beyond the length, for the reason of
#   this lecture ([flashinfer#358](https://github.com/flashinfer-ai/flashinfer/issues/358)).
# - Qwen3-235B, asked 1,000 times at temperature 0, gave 80 different replies (reported
#   by [Thinking Machines, September 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/)).
#   Sums in another order are no fault; a test in float32 with a tolerance tells the two
#   apart.
#
# ## Exercises
#
# | | | points | minutes |
# |---|---|---|---|
# | 9.1 | [The patient who swallows](../exercises/ex09_bug_clinic.ipynb) | 8 | 30 |
# | 9.2 | [The patient who remembers too much](../exercises/ex09_bug_clinic.ipynb) | 8 | 35 |
# | 9.3 | [The patient who starts over](../exercises/ex09_bug_clinic.ipynb) | 8 | 35 |
# | 9.4 | [The patient with a good day and a bad day](../exercises/ex09_bug_clinic.ipynb) | 8 | 45 |
# | 9.5 | [A guard against loops that lets tables pass](../exercises/ex09_bug_clinic.ipynb) | 5 | 30 |
# | 9.6 | [A breaker for tool loops](../exercises/ex09_bug_clinic.ipynb) | 3 | 15 |
#
# ## Where to read on
#
# 1. [registry.py](../minifer/faults/registry.py): what a fault is; the files beside it, all 22.
# 2. [probes.py](../minifer/faults/probes.py): replay, canaries, the text against its tokens.
# 3. [matrix.py](../minifer/faults/matrix.py): faults times detectors.
# 4. [tool_loop.py](../minifer/postprocessing/guards/tool_loop.py) and
#    [repetition.py](../minifer/postprocessing/guards/repetition.py): the guards.
# 5. [debug.py](../minifer/debug.py) and [shadow.py](../minifer/kv/shadow.py): poison, and who
#    may read what.
# 6. [rare_bugs.py](../minifer/claims/rare_bugs.py): the rare fault, drawn 100,000 times.
