# %% [markdown] tags=["row-6"]
# # L00 · The life of a token
#
# A language model does one thing: tokens in, scores for the next token out. On a
# disk it is a file that does nothing; inference makes a tool of it ([Dan Fu, June
# 2026](https://www.youtube.com/watch?v=9EEm4iMAF5s), the lecture behind this book). An
# **inference engine** is what stands around it, so that many can ask at once and
# nothing is computed twice. Here one request goes through a real engine, and we read
# what the engine wrote down about it.
#
# Reading: 45 minutes. Exercise: 20 minutes, 5 points. Needs PyTorch as a language;
# no GPU, no network, no knowledge of inference.
#
# Afterwards you can
#
# - **name** the five stages between a text and its answer, in their order;
# - **predict** the steps, the forward passes and the prefix hits of a request;
# - **compute** the KV slot of a token from a block table;
# - **decide** from shapes whether a step waits for memory or for arithmetic;
# - **read** every line of a request's event log, and fill a table from it.

# %% [markdown]
# ## Where is the token now?
#
# ![Life map of a request: before the first of five stages, scheduling, KV, prefill,
# decode, post-processing; the token is with the request](figures/life_map_start.svg)
#
# A *step* of the engine calls five stages, one after the other. Every lecture opens
# with this map and says where in it we are. The token stands before the first stage.
#
# | stage | the question it answers | where |
# |---|---|---|
# | 1 scheduling | Who gets how many tokens in this step? | [scheduler.py] |
# | 2 KV | Where do keys and values lie, and which exist already? | [manager.py] |
# | 3 prefill | What do the tokens mean that we were given? | [runner.py] |
# | 4 decode | Which token comes next? | [sampler.py] |
# | 5 post-processing | Which text may be shown, and is it the end? | [postprocessor.py] |
#
# The first cell prints nothing, unless something is missing. It seeds the random
# numbers and turns warnings into errors.
#
# [scheduler.py]: ../minifer/scheduling/scheduler.py
# [manager.py]: ../minifer/kv/manager.py
# [runner.py]: ../minifer/execution/runner.py
# [sampler.py]: ../minifer/execution/sampler.py
# [postprocessor.py]: ../minifer/postprocessing/postprocessor.py

# %% tags=["claim"]
try:
    from minifer.course import begin, example, show
except ImportError as error:
    get = 'pip install "minifer[course]"  or, in a clone,  pip install -e ".[course]"'
    raise ImportError(f"minifer is missing: run  {get}") from error
begin("L00")

# %% [markdown]
# ## What enters, and what comes out?
#
# The shortest way in is `LLM.generate`. The bundled model, minifer-tiny, has read
# Python's documentation and nothing else. At temperature 0 it always takes the token
# with the highest score, so the same prompt has the same answer. Look at the counts.

# %% tags=["claim"]
from minifer import LLM, SamplingParams

prompt = "The import statement"
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
with LLM("minifer-tiny", dtype="float32") as llm:
    (output,) = llm.generate(prompt, greedy)
ids, answer = output.prompt_token_ids, output.outputs[0]
print(f"{len(prompt)} characters in, {len(ids)} tokens, the first are {ids[:4]}")
print(f"{len(answer.token_ids)} tokens out, because of {answer.finish_reason!r}")
print("the ids are the text's bytes:", bytes(ids).decode() == prompt)

# %% [markdown]
# What enters the model is token ids, not text. This vocabulary is bytes, so its ids
# can be read off an ASCII table: `T` is 84. Other models have learnt longer pieces of
# text as tokens; nothing below depends on that.
#
# To see language, ask a larger model. The next cell does so where SmolLM2 was pulled,
# and says in one line where it was not. Its text is shown, never compared: what a
# model writes is not what this book claims.

# %% tags=["measure"]
from minifer.weights.pull import pulled_model

print("minifer-tiny:", repr(answer.text))
if pulled_model() is None:
    print("SmolLM2 is not pulled: run  minifer pull")
else:
    question = {"role": "user", "content": "What is an inference engine? One sentence."}
    with LLM(str(pulled_model())) as llm:
        (reply,) = llm.chat([question], greedy.with_(max_tokens=16))
    print("SmolLM2:", repr(reply.outputs[0].text))

# %% [markdown]
# minifer-tiny has the sound of a manual, not its sense. From here on we count tokens
# and do not read them.
#
# ## How many passes does one request take?
#
# Below `generate` there is a loop: give the engine requests, then call `step` until
# nobody waits. Every stage reports what it does to a *sink*, here a list of *events*.
# Look at how little it takes. (Blocks and budget come later.)

# %% tags=["claim"]
from minifer import Engine, EngineConfig
from minifer.events import ListSink

sink, settings = ListSink(), EngineConfig(block_size=8, num_kv_blocks=12)
with Engine.from_loaded(example.tiny(), settings, sinks=[sink]) as engine:
    engine.add_request("A", prompt, greedy)
    while engine.has_unfinished_requests:
        latest = engine.step()
print("finished in step", sink.events[-1].step)
print("the same tokens:", latest[0].outputs[0].token_ids == answer.token_ids)

# %% [markdown]
# Twelve steps, and the tokens of `generate`. A *forward pass* over the prompt yields
# the first new token, and each further one needs a pass of its own. So n tokens take
# one pass of *prefill* (tokens we were given) and n − 1 of *decode* (tokens that were
# drawn). **Write down** both numbers for 1, 2 and 12 tokens, then look.

# %% tags=["claim"]
from minifer.course.figure_data import block_map_data, timeline_data

for n in (1, 2, 12):
    spans = timeline_data(
        example.run({"A": (prompt, n)}, max_num_batched_tokens=64).events
    )
    kinds = [span.kind for span in spans]
    print(
        n,
        "tokens:",
        kinds.count("prefill"),
        "prefill,",
        kinds.count("decode"),
        "decode",
    )

# %% [markdown]
# One prefill and n − 1 decode passes, each time. `example.run` is the loop above with
# two additions: a *recorder* before the model that keeps every step's input and
# scores, and a virtual clock, one millisecond a step. All lectures use it. Its text
# is folded here; look for the loop.

# %% tags=["measure"]
from minifer.course.source import show_source

show_source(example.run)

# %% [markdown]
# Now the log of the first two steps. Look at the order of the stages.

# %% tags=["claim"]
alone = example.run({"A": (prompt, 12)}, max_num_batched_tokens=64)
for event in alone.events:
    if event.step <= 2 and not event.name.startswith("step."):
        tokens = "[{}, {})".format(*event.token_range) if event.token_range else ""
        print(f"{event.step}  {event.stage:15} {event.name:20} {tokens}")
laps = [e.name for e in alone.events if e.step == 1 and e.name.startswith("step.")]
print("laps of step 1:", ", ".join(name.removeprefix("step.") for name in laps))

# %% [markdown]
# Read step 1 aloud: blocks are allocated, the full ones published so that others can
# find them, the request is scheduled, one forward pass computes the tokens [0, 20),
# token 20 is drawn and its text released. (Stage 2 speaks before stage 1 is done: a
# plan without blocks would be none, so the scheduler asks for them while it plans.)
# Step 2 computes token 20 and draws token 21. The scheduler treats both kinds alike
# and sees how far a request is behind.
#
# ## Stage 1: who gets how many tokens?
#
# Three requests arrive together: A as before, B that begins with A's words, and C.
# They and their colours go through the whole book. A step may compute 16 tokens, its
# *token budget*, so no step keeps the others waiting for long. Running requests come
# first, then the queue. **Do two steps by hand:** A gets 16 of its 20 tokens, then
# the rest, and B what A leaves of step 2.

# %% tags=["claim"]
trio = example.run()
spans = timeline_data(trio.events)
print(
    "prompts:", {name: len(out.prompt_token_ids) for name, out in trio.outputs.items()}
)
print("step   A   B   C   sum")
for step in range(1, len(trio.steps) + 1):
    now = [s for s in spans if s.step == step and s.tokens]
    new = {s.request_id: s.tokens[1] - s.tokens[0] for s in now}
    row = "".join(f"{new.get(name, '-'):>4}" for name in "ABC")
    print(f"{step:4}{row}{sum(new.values()):6}")
    assert sum(new.values()) <= example.BUDGET

# %% [markdown]
# A's prompt comes in chunks of 16 and 4: *chunked prefill*. Step 3 mixes a decode of
# A, the end of B's prompt and the beginning of C's. From step 5 on all three decode
# in one forward pass, and whoever is done leaves: *continuous batching*. The picture
# shows the same table as a *timeline*. Look for the step in which A stops being blue.

# %% tags=["picture"]
from minifer.course.figures import block_map, timeline

show(
    timeline(
        trio.events, title="Three requests share the steps; B starts 16 tokens ahead"
    ),
    alt="Timeline of A, B and C over 13 steps. A prefills 16 and 4 tokens, then "
    "decodes to step 13. B waits a step, finds 16 tokens in the cache, prefills 12 and "
    "1, decodes to step 11. C waits two steps, prefills 14 and 4, decodes to step 9.",
)

# %% [markdown]
# B waits one step and C two; a green bar stands where B found something. B has 29
# prompt tokens, yet got 12 + 1: stage 2 knows why.
#
# Chunks have a price. Here is A alone under three budgets. Look at the step of its
# first token.

# %% tags=["claim"]
for budget in (64, 16, 4):
    run = example.run({"A": (prompt, 12)}, max_num_batched_tokens=budget)
    first = next(event.step for event in run.events if event.name == "token.sampled")
    print(
        f"budget {budget:2}: first token in step {first}, {len(run.steps)} steps in all"
    )

# %% [markdown]
# Alone, A gains nothing from a small budget and waits up to four steps longer for its
# first token. A budget is for those who would have to wait behind it.
#
# ## Stage 2: where do keys and values lie?
#
# Attention reads a key and a value of every earlier token. The **KV cache** keeps
# them in *blocks* of P = 8 tokens (papers also say *page*). A request's *block table*
# lists its blocks, which need not be neighbours. Look for blocks that stand in two
# tables.

# %% tags=["claim"]
columns = {column.step: column for column in block_map_data(trio.events)}
for step in (2, 9):
    for name, table in columns[step].tables.items():
        print(f"step {step}  {name}  {list(table)}")
found = {name: out.num_cached_tokens for name, out in trio.outputs.items()}
print("found in the cache:", found)

# %% [markdown]
# B's table begins with A's blocks 0 and 1. The prompts share these 16 tokens, hence
# their keys and values, and B skips them: a *prefix hit*. Four more common tokens lie
# in A's block 2, which was not full; B computes those itself.
#
# The model is given *slots*, places in the cache: slot = table[position // P] · P +
# position mod P. By hand, for position 25: 25 // 8 = 3 and 25 mod 8 = 1. A's table
# has block 8 in place 3, so the slot is 8 · 8 + 1 = 65; B has block 4 there, slot 33.
# Look whether every slot the engine gave agrees.

# %% tags=["claim"]
P = example.BLOCK_SIZE


def slot(table, position):
    return table[position // P] * P + position % P


print("position 25:", {name: slot(columns[9].tables[name], 25) for name in "AB"})
given = [number for step, _ in trio.steps for number in step.slot_mapping]
ours = [
    slot(columns[span.step].tables[span.request_id], position)
    for span in spans
    if span.tokens
    for position in range(*span.tokens)
]
print(len(given), "slots, all as computed:", given == ours)

# %% [markdown]
# All agree. The picture shows every block in every step. Look at the top rows
# (shared), the green feet (full, a later prompt can find them) and the last column
# (what is left at the end).

# %% tags=["picture"]
cached = len(columns[None].cached)  # at the end
show(
    block_map(
        trio.events, 12, title="B shares two blocks of A; full blocks outlive users"
    ),
    alt="Block map, 12 blocks over 13 steps. A holds blocks 0 and 1, from step 2 to 11 "
    "together with B. A, B and C take further blocks as they grow. At the end "
    f"{cached} full blocks are free but still cached, {12 - cached} are free.",
)

# %% [markdown]
# Blocks cost the empty end of each request's last one, and a look-up per token. They
# pay when lengths are unknown or beginnings are shared; a lone request gains nothing.
#
# What does an identical second request find? Its 20 tokens fill two blocks and a
# half. And a prompt of 16, exactly two blocks? **Write down** both numbers.

# %% tags=["claim"]
for text in (prompt, prompt[:16]):
    twice = example.run(
        {"first": (text, 12), "second": (text, 12)}, max_num_batched_tokens=64
    )
    second = next(s for s in timeline_data(twice.events) if s.request_id == "second")
    hit = twice.outputs["second"].num_cached_tokens
    same = twice.tokens("first") == twice.tokens("second")
    print(f"{len(text)} tokens: found {hit}, prefilled {second.tokens}, same: {same}")

# %% [markdown]
# 16 of the 20 were found and [16, 20) prefilled, for the same answer. Of the 16 only
# 8: no prompt is ever found whole, because the cache keeps keys and values, and
# drawing a token takes scores. Both requests ran in one step: in every layer all keys
# and values are written before any is read.
#
# ## Stage 3: what does prefill cost?
#
# A step reads every weight once, for one token or for many. More tokens do more
# arithmetic for each byte read: their *arithmetic intensity*, FLOPs a byte, is
# higher. A chip has a ratio of its own, peak FLOP/s over bytes/s. Below it a step
# waits for memory (*bandwidth-bound*), above it for arithmetic (*compute-bound*).
#
# One model, the shapes of Llama 3.1 8B
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), table 3, July 2024) in
# bfloat16; one chip, an H100 by its data sheet. Modelled, not measured. Look for the
# row where the limit changes.

# %% tags=["claim", "row-11"]
from minifer import ModelConfig
from minifer.perf.costs import decode_cost, prefill_cost
from minifer.perf.devices import DEVICES

llama = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
)
h100 = DEVICES["H100-SXM"]
flops, bandwidth = h100.peak_flops / 1e12, h100.memory_bandwidth / 1e12
print(f"{h100.name} ({h100.source}, {h100.date}):")
print(
    f"{flops:.0f} TFLOP/s ÷ {bandwidth:.2f} TB/s = {h100.ridge_point:.0f} FLOPs a byte"
)
for tokens in (1, 16, 256, 512, 2048):
    cost = prefill_cost(llama, tokens).total()
    limit = "arithmetic" if cost.intensity > h100.ridge_point else "memory"
    print(f"{tokens:5} tokens: {cost.intensity:4.0f} FLOPs a byte, limit: {limit}")

# %% [markdown]
# One token does one FLOP a byte: a multiply and an add for each weight of two bytes.
# Many do less than one each, for their own inputs and outputs move too. Between 256
# and 512 tokens a step the limit moves from memory to arithmetic: the land of
# prefill. Beyond, a larger chunk makes a token no cheaper, and others wait longer.
#
# And here? The next cell measures what this machine can do at best (read bandwidth
# and matrix products), predicts the *floor* under a step of minifer-tiny from the
# same formulas, and runs the engine beside it. **Guess** first: by what factor does
# the engine miss the floor at one token, and at 256? (Measured, so not compared.)

# %% tags=["measure"]
from minifer.course.pictures import life
from minifer.perf.limit import this_machine

here = this_machine(seconds=0.5)
times = life.step_times(example.tiny(), here, [1, 4, 16, 64, 256])
for time in (times[0], times[-1]):
    ms, factor = time.measured * 1e3, time.measured / time.predicted
    print(
        f"{time.tokens:3} tokens: {ms:5.1f} ms measured, {factor:.1f} times the floor"
    )

# %% [markdown]
# The picture has all five. Look at the left end, where the measured line is flat.

# %% tags=["picture"]
show(
    life.draw_step_times(times, here.name),
    alt="Time of a forward pass in milliseconds against tokens in the step, 1 to 256, "
    "both axes logarithmic: the predicted floor, and above it the engine's measured "
    "times, which change little while the step is small.",
)

# %% [markdown]
# A model this small pays mostly for being called: some hundred operations a step,
# whatever their size. The floor knows nothing of that. The larger the step, the
# closer the two come. L01 draws the whole roofline, and L07 asks what a GPU pays for
# its launches.
#
# ## Stage 4: what does decode cost, and who picks the token?
#
# Decode computes one token a request. The bytes a step reads, over bandwidth, are a
# floor under its time. Look at what is read, alone and with 64 requests in the step,
# with short contexts and with long ones.

# %% tags=["claim"]
for batch, context in ((1, 1024), (64, 1024), (64, 8192)):
    cost = decode_cost(llama, batch, context=context).total()
    seconds = h100.seconds(cost.flops, cost.bytes)
    read = f"{cost.weight_bytes / 1e9:.1f} GB weights, {cost.kv_bytes / 1e9:.1f} GB KV"
    best = f"{seconds * 1e3:.1f} ms a step, {batch / seconds:,.0f} tokens/s"
    print(f"{batch:2} requests of {context} tokens: {read}; at best {best}")

# %% [markdown]
# Alone, a request reads 15.0 GB of weights for each token: all 8.03 billion but the
# 128,256 · 4096 of the input embedding, of which it needs one row, at 2 bytes. A
# token's KV is 2 · 32 layers · 8 heads · 128 · 2 bytes = 131 kB. 64 requests share
# the read of the weights, which is why engines batch. KV is each request's own: in
# the last row it is most of what is read, and batching helps less.
#
# The pass ends in *logits*, one score for each token of the vocabulary. At
# temperature 0 the sampler takes the largest. Look at how many rows of logits a step
# asks for.

# %% tags=["claim"]
drawn = [
    event.data["token_id"] for event in trio.events if event.name == "token.sampled"
]
largest = [int(row.argmax()) for _, logits in trio.steps for row in logits]
print("rows of logits a step:", [len(logits) for _, logits in trio.steps])
print(len(drawn), "tokens drawn, each the largest:", drawn == largest)

# %% [markdown]
# Step 1 asks for none, because A's prompt goes on. The rows add up to the 12 + 9 + 6
# = 27 tokens that were wanted.
#
# ## Stage 5: when may text be shown?
#
# A token is a piece of bytes, not of text. → is three bytes, three tokens of this
# model. A *stop string* ends a reply, and no part of it may be shown; here it is
# `END`. We feed the engine's own two gates by hand. **Mark** the tokens of `go → END`
# that release nothing, then look.

# %% tags=["claim"]
tokenizer = example.tiny().tokenizer
shown = life.shown_text(tokenizer.encode("go → END"), tokenizer.decode, "END")
for token in shown:
    print(
        f"{token.token:3}  releases {token.released!r:4} bytes held back: {token.held}"
    )

# %% [markdown]
# The first two bytes of → wait for the third. `E` and `N` wait because `END` may
# follow, and `D` completes it. The picture is what a reader at a screen sees.

# %% tags=["picture"]
show(
    life.draw_shown(shown, title="Five of ten tokens release nothing"),
    alt="Ten tokens of the reply go → END in a row. The two first bytes of the arrow "
    "and the three letters of the stop string release nothing, the others their text.",
)

# %% [markdown]
# Holding back costs time at the screen; never more than a character, or the part of a
# stop string that may still become one. What if it does not? `EN` followed by a
# space is released at once. The last claim is about the engine: three characters of
# A's own answer become its stop string. Look where the answer ends.

# %% tags=["claim"]
print([t.released for t in life.shown_text(b"EN d", tokenizer.decode, "END")])
whole = example.run({"A": (prompt, 24)}).outputs["A"].outputs[0].text
stop = whole[10:13]
with_stop = SamplingParams(temperature=0, ignore_eos=True, stop=stop)
ended = example.run({"A": (prompt, 24)}, sampling=with_stop).outputs["A"].outputs[0]
print("ends before the stop string:", ended.text == whole[: whole.index(stop)])
print(ended.finish_reason, "because of it:", ended.stop_reason == stop)
begun = greedy.with_(stop=whole[-2:] + "END")
cut = example.run({"A": (prompt, 24)}, sampling=begun).outputs["A"].outputs[0]
print("a stop that had only begun:", cut.finish_reason, cut.text == whole)

# %% [markdown]
# Right before the stop string, and the output says why. Where a reply ends otherwise,
# what was held is shown.
#
# ## Is it still the same model?
#
# Chunks, blocks, shared prefixes and batches may change how fast an answer comes,
# never the answer. This is **the invariant of the book**: in float32 at temperature 0
# a request's tokens are the same whatever the engine does. The truth is a slow twin,
# [reference.py]: no cache, no batch, every token from scratch. Look first whether the
# largest logit leads by more than rounding could turn.
#
# [reference.py]: ../minifer/execution/reference.py

# %% tags=["claim"]
import torch

from minifer.execution.reference import reference_generate, reference_logits

model, truth, lead, rounding = example.tiny().model, {}, [], []
for name, (text, count) in example.TRIO.items():
    start = tokenizer.encode(text)
    truth[name] = reference_generate(model, start, count)
    right = reference_logits(model, start + truth[name])[len(start) - 1 : -1]
    best = right.topk(2).values
    lead.append((best[:, 0] - best[:, 1]).min())
    steps = example.run({name: (text, count)}).steps
    rounding.append((torch.cat([logits for _, logits in steps]) - right).abs().max())
print("lead more than ten times the rounding:", bool(min(lead) > 10 * max(rounding)))

# %% [markdown]
# Rounding cannot turn a choice here. Now look at the last column, and at the steps.

# %% tags=["claim"]
print("block  budget  prefix cache  steps  found  same tokens")
names = ("block_size", "max_num_batched_tokens", "enable_prefix_caching")
rows = [(8, 16, True), (1, 16, True), (4, 5, True), (16, 64, True), (8, 1, True)]
for values in [*rows, (8, 16, False)]:
    run = example.run(num_kv_blocks=128, **dict(zip(names, values, strict=True)))
    found = sum(out.num_cached_tokens for out in run.outputs.values())
    same = all(run.tokens(name) == truth[name] for name in truth)
    setting = "{:5} {:7} {!s:>13}".format(*values)
    print(f"{setting} {len(run.steps):6} {found:6} {same!s:>12}")

# %% [markdown]
# The same tokens, every time. Steps and tokens found differ: these an engine is free
# to choose. No setting wins everywhere: blocks of 1 or 4 find all 20 common tokens,
# blocks of 8 and 16 find 16, yet a table of small blocks is long; a budget of 1 keeps
# nobody waiting long and takes 75 steps.
#
# ## What happened to one token?
#
# Take the token at position 20 of A, the first that A did not bring along. Its life
# is all events that concern it: its own, those about the block that holds its keys
# and values, and the forward pass that computed it. **Sketch it** from the tables
# above: in which step is it drawn, in which computed, and when is its block full?

# %% tags=["claim"]
from minifer.course.microscope import life_of_token, microscope

token = life_of_token(trio, "A", position=20)
for frame in token.frames:
    print(f"step {frame.step:2}  {frame.stage:14}  {frame.name}")
computed = [frame.step for frame in token.frames if frame.name == "step.forward"]
print("computed in step", *computed, "in slot", token.frames[-1].slot)

# %% [markdown]
# Drawn and shown in step 2, computed in step 3 (a decode, in a pass that prefills for
# B and C), not to be found by others before step 6, and kept after A has left. The **token
# microscope** steps through the same events. For each it shows the stage, a sentence
# made from the event, the statement of the engine that reported it, and blocks and
# timeline at that moment. In a running notebook, use the buttons; elsewhere, unfold
# the lines.

# %% tags=["picture"]
microscope(trio, "A", position=20)

# %% [markdown]
# Change the cell to position 3, a token of the prompt, and look for B in its life. On
# the command line, `minifer trace "…" --request 0 --microscope life.html` writes the
# same as a page for a browser.
#
# ## How long does it feel?
#
# Users feel *TTFT*, the time to the first token, and *TPOT*, the time per output
# token after it. First a claim about the virtual clock, a millisecond a step: C's
# first token comes in step 4 and its sixth in step 9. **Write down** C's TTFT and
# TPOT, counted in steps from its arrival in step 0.

# %% tags=["claim"]
for name, out in trio.outputs.items():
    times_of = out.metrics
    ttft, tpot = times_of.ttft * 1e3, times_of.tpot * 1e3
    print(f"{name}: TTFT {ttft:.0f} steps, TPOT {tpot:.0f} step")

# %% [markdown]
# Everybody gets a token a step once started: 4 steps and then 1 for C. Now in
# seconds, on the machine where this notebook was built. (Not compared.)

# %% tags=["measure"]
with Engine.from_loaded(example.tiny(), EngineConfig()) as engine:
    for name, (text, _) in example.TRIO.items():
        engine.add_request(name, text, greedy.with_(max_tokens=48))
    while engine.has_unfinished_requests:
        latest = engine.step()
for name, metrics in ((out.request_id, out.metrics) for out in latest):
    print(f"{name}: TTFT {metrics.ttft * 1e3:.1f} ms, TPOT {metrics.tpot * 1e3:.1f} ms")

# %% [markdown]
# The three decode side by side, so their TPOT is nearly the same.
#
# ## Which lecture opens which box?
#
# | lecture | stage | the question |
# |---|---|---|
# | L01 electricity to intelligence | all | What does a token cost in bytes, FLOPs and joules? |
# | L02 prefill and decode | 3, 4 | Why is one model two machines? |
# | L03 scheduling | 1 | Who runs, who waits, who has to leave? |
# | L04 paged KV | 2 | How is memory cut so that nothing is wasted? |
# | L05 prefix and tiers | 2 | What was computed before, and is fetching it worth it? |
# | L06 prefill | 3 | How do many prompts share one pass? |
# | L07 decode | 4 | How does one token at a time become fast? |
# | L08 sampling and text | 4, 5 | How do scores become a token, and tokens text? |
# | L09 bug clinic | all | From a strange reply to the line at fault |
# | L10 routing and disaggregation | around | Many engines, and prefill apart from decode |
# | L11 Triton kernels | 3, 4 | The operations on a GPU, by hand |
# | L12 megakernel | 4 | A whole decode step in one launch |
# | L13 Parcae | 3, 4 | A model that loops over its own layers |
# | L14 scaling laws | – | What training to loop buys |
#
# ## Takeaways
#
# - n output tokens take one prefill pass (or its chunks) and n − 1 decode passes.
# - A step hands out a token budget; prompts are cut to fit, and all share the pass. A
#   lone request pays for a small budget with a later first token.
# - A block table turns positions into slots. Full blocks with one beginning are
#   shared; the last token of a prompt is always computed.
# - Few tokens a step wait for memory, many wait for arithmetic; a tiny model waits
#   for its own calls.
# - Text is shown when it is certain: whole characters, no part of a stop string.
# - None of it changes a token.
#
# ## Questions
#
# **1.** 40 prompt tokens, a budget of 16, 10 tokens wanted, an empty engine. How many
# steps?
#
# <details><summary>Answer</summary>
#
# 12: three of prefill (16, 16 and 8 tokens), the last of which draws the first token,
# and nine of decode.
#
# </details>
#
# **2.** Blocks of 4 tokens, block table [7, 2, 5]. Which slot has position 9? Which
# position, slot 10?
#
# <details><summary>Answer</summary>
#
# 9 // 4 = 2 is block 5, offset 1: slot 21. Slot 10 is block 2, offset 2; block 2 is
# the second in the table: position 6.
#
# </details>
#
# **3.** A prompt of 24 tokens comes a second time; blocks of 8. How many are found,
# and why not all?
#
# <details><summary>Answer</summary>
#
# 16: the last token must be computed for its logits, and only full blocks are found.
#
# </details>
#
# **4.** The model of stage 4 with 64 requests of 8192 tokens: which share of the bytes
# read is KV, in percent?
#
# <details><summary>Answer</summary>
#
# 82: 68.7 GB of KV beside 15.0 GB of weights.
#
# </details>
#
# **5.** The stop string is `ABA`, the reply `ABABA`, a token a letter. Which text is
# shown in all?
#
# <details><summary>Answer</summary>
#
# None. The earliest match wins: it ends at the third letter and begins at the first.
#
# </details>
#
# The engine checks the folded answers. Look for five times True.

# %% tags=["claim"]
log = example.run({"q": ("x" * 40, 10)}, max_num_batched_tokens=16)
again = example.run({"first": ("x" * 24, 1), "second": ("x" * 24, 1)})
table, cost = [7, 2, 5], decode_cost(llama, 64, context=8192).total()
share = cost.kv_bytes / (cost.kv_bytes + cost.weight_bytes)
print("1.", len(log.steps) == 12)
print("2.", table[9 // 4] * 4 + 9 % 4 == 21 and table.index(10 // 4) * 4 + 10 % 4 == 6)
print("3.", again.outputs["second"].num_cached_tokens == 16)
print("4.", round(100 * share) == 82)
print(
    "5.",
    not any(t.released for t in life.shown_text(b"ABABA", tokenizer.decode, "ABA")),
)

# %% [markdown]
# All five hold.
#
# ## In real engines
#
# - [vLLM](https://github.com/vllm-project/vllm) names things as this book does:
#   `num_computed_tokens`, `block_table`, `slot_mapping`, `max_num_batched_tokens`. Its
#   scheduler knows no phases either. Blocks and tables come from its paper,
#   PagedAttention ([arXiv:2309.06180](https://arxiv.org/abs/2309.06180)).
# - [SGLang](https://github.com/sgl-project/sglang) finds prefixes in a radix tree
#   ([arXiv:2312.07104](https://arxiv.org/abs/2312.07104)); it says *page* for block and
#   *extend* for prefill.
# - [TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM) calls continuous batching
#   *in-flight batching*.
# - Chunked prefill in mixed steps is described in Sarathi-Serve
#   ([arXiv:2403.02310](https://arxiv.org/abs/2403.02310)).
#
# ## Exercises
#
# | id | title | points | minutes | where |
# |---|---|---|---|---|
# | 0.1 | Fill a table from a trace | 5 | 20 | [notebook](../exercises/ex00_the_life_of_a_token.ipynb) |
#
# `minifer grade 0` gives the points.
#
# ## Where to read on
#
# In this order; each file takes one sitting.
#
# 1. [engine.py](../minifer/engine.py), `Engine.step`: the five calls.
# 2. [scheduling/scheduler.py](../minifer/scheduling/scheduler.py): the line that cuts a
#    prompt.
# 3. [kv/manager.py](../minifer/kv/manager.py): why a prompt is never found whole.
# 4. [kv/step_input.py](../minifer/kv/step_input.py): the slot formula.
# 5. [execution/attention.py](../minifer/execution/attention.py): where prefill and
#    decode part.
# 6. [detokenizer.py](../minifer/postprocessing/detokenizer.py): when a character is
#    complete.
# 7. [execution/reference.py](../minifer/execution/reference.py): the slow twin.
