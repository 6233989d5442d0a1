# %% [markdown]
# # L00 · The life of a token
#
# A language model does one thing: tokens in, scores for the next token out. An
# **inference engine** is what stands around it, so that many can ask at once and
# nothing is computed twice. Here one request goes through a real engine, and we read
# what the engine wrote down about it.
#
# 30 minutes. Needs `pip install -e ".[course]"` in the repository; no GPU, no
# network.

# %% [markdown]
# ## Where is the token now?
#
# ![A request passes scheduling, KV look-up, prefill, decode and post-processing;
# decode and post-processing repeat once a token](figures/life_of_a_token.svg)
#
# A *step* of the engine calls five stages, one after the other. The token stands
# before the first.
#
# | stage | the question it answers | where |
# |---|---|---|
# | 1 scheduling | Who gets how many tokens in this step? | [scheduler.py] |
# | 2 KV | Where do keys and values lie, and which exist already? | [manager.py] |
# | 3 prefill | What do the tokens mean that we were given? | [runner.py] |
# | 4 decode | Which token comes next? | [sampler.py] |
# | 5 post-processing | Which text may be shown, and is it the end? | [postprocessor.py] |
#
# After this notebook you can **predict** how many steps a request takes, **compute**
# the KV slot of a token, **decide** whether a step is limited by memory or by
# arithmetic, and **explain** each line of a request's event log.
#
# The first cell prints nothing, unless something is missing.
#
# [scheduler.py]: ../minifer/scheduling/scheduler.py
# [manager.py]: ../minifer/kv/manager.py
# [runner.py]: ../minifer/execution/runner.py
# [sampler.py]: ../minifer/execution/sampler.py
# [postprocessor.py]: ../minifer/postprocessing/postprocessor.py

# %% tags=["claim"]
try:
    from minifer import Engine, EngineConfig, SamplingParams
except ImportError as error:
    remedy = 'minifer is missing: run  pip install -e ".[course]"  in the repository'
    raise ImportError(remedy) from error

import torch

torch.set_num_threads(1)  # one thread adds numbers in one order

# %% [markdown]
# ## What enters the engine?
#
# All is there. What enters is token ids, not text. The bundled model's vocabulary is
# bytes, so its ids can be read off an ASCII table: `T` is 84. Look at how many tokens
# the prompt becomes.

# %% tags=["claim"]
from minifer.weights.resolve import load_model

loaded = load_model("minifer-tiny", dtype="float32")
tokenizer = loaded.tokenizer
prompt = "The import statement"
ids = tokenizer.encode(prompt)
print(f"{len(prompt)} characters, {len(ids)} tokens, the first are {ids[:4]}")
print("the ids are the text's bytes:", bytes(ids).decode() == prompt)

# %% [markdown]
# Twenty characters became twenty tokens. Other models have learnt longer pieces of
# text as tokens; nothing below depends on that.
#
# ## What does one request do, step by step?
#
# To watch, we put a recorder before the model. Look at how little the engine knows of
# a model: one method.


# %% tags=["claim"]
class Recorder:
    """Stands before the engine's runner and keeps every step's input and logits."""

    def __init__(self, runner):
        self.runner, self.steps = runner, []

    def forward(self, step):
        logits = self.runner.forward(step)
        self.steps.append((step, logits))
        return logits


# %% [markdown]
# The engine calls `forward` once a step. `run` calls `engine.step()` until every
# request is finished. All stages report to a *sink*, a list of events; look where it
# goes in. The clock is virtual, a millisecond a step.

# %% tags=["claim"]
from minifer.events import ListSink


def run(requests, stop=(), **options):
    """Run {id: (prompt, max_tokens)} to the end: outputs, events, recorded steps."""
    sink, options = ListSink(), {"block_size": 8, "num_kv_blocks": 12, **options}
    engine = Engine.from_loaded(
        loaded,
        EngineConfig(**options),
        sinks=[sink],
        clock=lambda: engine.events.step / 1000,
    )
    engine.runner = recorder = Recorder(engine.runner)
    # ignore_eos: exactly max_tokens, whatever the model would like
    greedy = SamplingParams(temperature=0, ignore_eos=True, stop=stop)
    for name, (text, max_tokens) in requests.items():
        engine.add_request(name, text, greedy.with_(max_tokens=max_tokens))
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs, sink.events, recorder.steps


# %% [markdown]
# Nothing has run yet. Request A asks for 12 tokens after its 20. Count before you
# look: a *forward pass* over the prompt yields the first new token, and each further
# one needs a pass of its own.

# %% tags=["claim"]
from minifer.course.figure_data import block_map_data, timeline_data

_, events, _ = run({"A": (prompt, 12)})
kinds = [span.kind for span in timeline_data(events)]
print(len(kinds), "steps:", {kind: kinds.count(kind) for kind in ("prefill", "decode")})
for event in events:
    if event.step <= 2:
        tokens = "[{}, {})".format(*event.token_range) if event.token_range else ""
        print(f"{event.step}  {event.stage:15} {event.name:20} {tokens}")

# %% [markdown]
# One prefill and eleven decode steps. Read step 1 aloud: blocks are allocated, the
# full ones published so that others can find them, the request is scheduled, one
# forward pass computes the tokens [0, 20), token 20 is drawn and its text released.
# (Stage 2 speaks before stage 1 is done: a plan without blocks would be none, so the
# scheduler asks for them while it plans.)
# Step 2 computes token 20 and draws token 21. Tokens we were given are prefilled,
# tokens that were drawn are decoded; the scheduler treats both alike and sees how far
# a request is behind.
#
# What does the model write? It is tiny and has read Python's documentation and
# nothing else: expect the sound of a manual, not sense. (Shown, but not compared when
# this notebook is tested.)

# %% tags=["measure"]
print(repr(run({"A": (prompt, 64)})[0]["A"].outputs[0].text))

# %% [markdown]
# It goes on byte by byte. From here on we count tokens and do not read them.
#
# ## Stage 1: who gets how many tokens?
#
# Three requests arrive together: A as before, B that begins with A's words, and C. A
# step may compute 16 tokens, its *token budget*; so no step keeps the others waiting
# for long. Running requests come first, then the queue. Do two steps by hand: A gets
# 16 of its 20 tokens, then the rest, and B what A leaves of step 2.

# %% tags=["claim"]
BUDGET = 16
trio = {
    "A": (prompt, 12),
    "B": (prompt + " executes", 9),
    "C": ("A class definition", 6),
}
outputs, events, steps = run(trio, max_num_batched_tokens=BUDGET)
spans = timeline_data(events)
print("prompts:", {name: len(out.prompt_token_ids) for name, out in outputs.items()})
print("step   A   B   C   sum")
for step in range(1, len(steps) + 1):
    now = [s for s in spans if s.step == step and s.tokens]
    new = {s.request_id: s.tokens[1] - s.tokens[0] for s in now}
    row = "".join(f"{new.get(name, '-'):>4}" for name in "ABC")
    print(f"{step:4}{row}{sum(new.values()):6}")
    assert sum(new.values()) <= BUDGET

# %% [markdown]
# A's prompt comes in chunks of 16 and 4: *chunked prefill*. Step 3 mixes a decode of
# A, the end of B's prompt and the beginning of C's. From step 5 on all three decode
# in one forward pass, and whoever is done leaves: *continuous batching*. The cost:
# A's first token comes in step 2 instead of 1.
#
# B has 29 prompt tokens, yet got 12 + 1. Stage 2 knows why.
#
# ## Stage 2: where do keys and values lie?
#
# Attention reads a key and a value of every earlier token. The **KV cache** keeps
# them in *blocks* of P = 8 tokens (papers also say *page*). A request's *block table*
# lists its blocks, which need not be neighbours. Look for blocks that stand in two
# tables.

# %% tags=["claim"]
P = 8
columns = {column.step: column for column in block_map_data(events)}
for step in (2, 9):
    for name, table in columns[step].tables.items():
        print(f"step {step}  {name}  {list(table)}")
print("found in the cache:", {n: out.num_cached_tokens for n, out in outputs.items()})

# %% [markdown]
# B's table begins with A's blocks 0 and 1. The prompts share these 16 tokens, hence
# their keys and values, and B skips them: a *prefix hit*. Four more common tokens lie
# in A's block 2, which was not full; B computes those itself.
#
# The model is given *slots*, places in the cache: slot = table[position // P] · P +
# position mod P. By hand, for position 25: 25 // 8 = 3 and 25 mod 8 = 1. A's table
# has block 8 in place 3, so the slot is 8 · 8 + 1 = 65; B has block 4 there, slot 33.
# Look whether every slot given agrees.


# %% tags=["claim"]
def slot(table, position):
    return table[position // P] * P + position % P


print("position 25:", {n: slot(columns[9].tables[n], 25) for n in "AB"})
given = [number for step, _ in steps for number in step.slot_mapping]
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
from minifer.course.figures import block_map, show, timeline

cached = len(columns[None].cached)  # at the end
show(
    block_map(events, 12, title="B shares two blocks of A; full blocks outlive users"),
    alt="Block map, 12 blocks over 13 steps. A holds blocks 0 and 1, from step 2 to 11 "
    "together with B. A, B and C take further blocks as they grow. At the end "
    f"{cached} full blocks are free but still cached, {12 - cached} are free.",
)

# %% [markdown]
# Blocks cost the empty end of each request's last one, and a look-up per token. They
# pay when lengths are unknown or beginnings are shared; a lone request gains nothing.
#
# What does an identical second request find? Its 20 tokens fill two blocks and a
# half.

# %% tags=["claim"]
twice, log, _ = run({"first": trio["A"], "second": trio["A"]})
second = next(s for s in timeline_data(log) if s.request_id == "second")
print("found:", twice["second"].num_cached_tokens, "prefilled:", second.tokens)
answers = [out.outputs[0].token_ids for out in twice.values()]
print("same answer:", answers[0] == answers[1])

# %% [markdown]
# 16 were found and [16, 20) prefilled, for the same answer. Both ran in one step: in
# every layer all keys and values are written before any is read. No prompt is ever found
# whole: the cache keeps keys and values, and drawing a token takes logits.
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

# %% tags=["claim"]
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
peak = (
    f"{h100.peak_flops / 1e12:.0f} TFLOP/s over {h100.memory_bandwidth / 1e12:.2f} TB/s"
)
print(f"{h100.name} ({h100.source}, {h100.date}):")
print(f"{peak} = {h100.ridge_point:.0f} FLOPs a byte")
for tokens in (1, 16, 256, 512, 2048):
    cost = prefill_cost(llama, tokens).total()
    limit = "arithmetic" if cost.intensity > h100.ridge_point else "memory"
    print(f"{tokens:5} tokens: {cost.intensity:4.0f} FLOPs a byte, limit: {limit}")

# %% [markdown]
# One token does one FLOP a byte: a multiply and an add for each weight of two bytes.
# Many do less than one each, for their own inputs and outputs move too. Between 256 and 512 tokens a step the limit moves
# from memory to arithmetic: the land of prefill. Beyond, a larger chunk makes a token
# no cheaper, and others wait longer.
#
# ## Stage 4: what does decode cost, and who picks the token?
#
# Decode computes one token a request. The bytes a step reads, over bandwidth, are a
# floor under its time. Look at what is read, alone and with 64 requests in the step.

# %% tags=["claim"]
for batch in (1, 64):
    cost = decode_cost(llama, batch, context=1024).total()
    seconds = h100.seconds(cost.flops, cost.bytes)
    read = f"{cost.weight_bytes / 1e9:.1f} GB weights, {cost.kv_bytes / 1e9:.1f} GB KV"
    best = f"{seconds * 1e3:.1f} ms a step, {batch / seconds:,.0f} tokens/s"
    print(f"{batch:2} requests of 1024 tokens: {read}; at best {best}")

# %% [markdown]
# Alone, a request reads 15.0 GB of weights for each token: all 8.03 billion but the
# 128,256 · 4096 of the input embedding, of which it needs one row, at 2 bytes. A
# token's KV is 2 · 32 layers · 8 heads · 128 · 2 bytes = 131 kB. 64 requests share that
# read, which is why engines batch. KV is each request's own: with long contexts
# batching helps less.
#
# The pass ends in *logits*, one score for each token of the vocabulary. At
# temperature 0 the sampler takes the largest. Look at how many rows of logits a step
# asks for.

# %% tags=["claim"]
drawn = [event.data["token_id"] for event in events if event.name == "token.sampled"]
largest = [int(row.argmax()) for _, logits in steps for row in logits]
print("rows of logits a step:", [len(logits) for _, logits in steps])
print(len(drawn), "tokens drawn, each the largest:", drawn == largest)

# %% [markdown]
# Step 1 asks for none, because A's prompt goes on. The rows add up to the 12 + 9 + 6
# = 27 tokens that were wanted.
#
# ## Stage 5: when may text be shown?
#
# A token is a piece of bytes, not of text. 👋 is four bytes, four tokens of this
# model. Look at what each token releases.

# %% tags=["claim"]
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.stop_strings import StopStrings

detokenizer = IncrementalDetokenizer(tokenizer.decode)
wave = tokenizer.encode("Hi 👋!")
print(len(wave), "tokens release", [detokenizer.push(token) for token in wave])

# %% [markdown]
# Three of the four are held back, the last releases the character. A *stop string*
# ends the text, and no part of it may be shown. Here it is `END`. Which letters have
# to wait?

# %% tags=["claim"]
stops = StopStrings(["END"])
for letter in "AN END":
    released = stops.push(letter)
    print(f"{letter!r} releases {released!r:5} holds {stops.held!r:5} hit: {stops.hit}")

# %% [markdown]
# Only `E` and `N` of the last word wait, for they could begin `END`; the `N` of `AN`
# leaves at once. In the engine both checks run on every token. Now three characters
# of A's own answer become its stop string. Look where the answer ends.

# %% tags=["claim"]
whole = run({"A": (prompt, 24)})[0]["A"].outputs[0].text
stop = whole[10:13]
answer = run({"A": (prompt, 24)}, stop=stop)[0]["A"].outputs[0]
print("ends before the stop string:", answer.text == whole[: whole.index(stop)])
print(answer.finish_reason, "because of it:", answer.stop_reason == stop)

# %% [markdown]
# Right before the stop string, and the output says why.
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
from minifer.execution.reference import reference_generate, reference_logits

truth, lead, rounding = {}, [], []
for name, (text, count) in trio.items():
    start = tokenizer.encode(text)
    truth[name] = reference_generate(loaded.model, start, count)
    right = reference_logits(loaded.model, start + truth[name])[len(start) - 1 : -1]
    best = right.topk(2).values
    lead.append((best[:, 0] - best[:, 1]).min())
    engine_logits = torch.cat([logits for _, logits in run({name: (text, count)})[2]])
    rounding.append((engine_logits - right).abs().max())
print("lead more than ten times the rounding:", bool(min(lead) > 10 * max(rounding)))

# %% [markdown]
# Rounding cannot turn a choice here. Now look at the last column.

# %% tags=["claim"]
print("block  budget  prefix cache  steps  found  same tokens")
names = ("block_size", "max_num_batched_tokens", "enable_prefix_caching")
settings = [(8, 16, True), (1, 16, True), (4, 5, True), (16, 64, True)]
settings += [(8, 1, True), (8, 16, False)]
for values in settings:
    options = dict(zip(names, values, strict=True))
    got, log, _ = run(trio, num_kv_blocks=128, **options)
    found = sum(out.num_cached_tokens for out in got.values())
    same = all(out.outputs[0].token_ids == truth[name] for name, out in got.items())
    setting = "{:5} {:7} {!s:>13}".format(*values)
    print(f"{setting} {log[-1].step:6} {found:6} {same!s:>12}")

# %% [markdown]
# The same tokens, every time. Steps and tokens found differ: these an engine is free
# to choose.
#
# ## The whole life of one token
#
# This is all that happened to the token at position 20 of A, the first that A did not
# bring along. Look for the step that draws it and the step that computes it. (Id and
# text are the model's: not compared.)

# %% tags=["measure"]
from minifer.trace import life_of

print(life_of(events, "A", position=20))

# %% [markdown]
# Drawn and shown in step 2; scheduled and computed in step 3, in a batch with tokens
# of B and C.
#
# Last, all three lives. Sketch them from the table of stage 1 before you look: who
# waits, where are the chunks, where is the prefix hit?

# %% tags=["picture"]
show(
    timeline(events, title="Three requests share the steps; B starts 16 tokens ahead"),
    alt="Timeline of A, B and C over 13 steps. A prefills 16 and 4 tokens, then "
    "decodes to step 13. B waits a step, finds 16 tokens in the cache, prefills 12 and "
    "1, decodes to step 11. C waits two steps, prefills 14 and 4, decodes to step 9.",
)

# %% [markdown]
# B waits one step and C two; a green bar stands where B found its prefix.
#
# And in seconds? Users feel *TTFT*, the time to the first token, and *TPOT*, the time
# per output token after it. Look at both, measured where this notebook was built.
# (Not compared.)

# %% tags=["measure"]
with Engine.from_loaded(loaded, EngineConfig()) as engine:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for name, (text, _) in trio.items():
        engine.add_request(name, text, params)
    while engine.has_unfinished_requests:
        latest = engine.step()
for name, times in ((out.request_id, out.metrics) for out in latest):
    print(f"{name}: TTFT {times.ttft * 1e3:.1f} ms, TPOT {times.tpot * 1e3:.1f} ms")

# %% [markdown]
# The three decode side by side, so their TPOT is nearly the same.
#
# ## Takeaways
#
# - Prefill and decode are one call: many tokens behind, or one.
# - A step hands out a token budget; prompts are cut to fit, and all share the pass.
# - A block table turns positions into slots. Full blocks with one beginning are shared.
# - Few tokens a step wait for memory, many wait for arithmetic.
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
# The engine checks the folded answers. Look for three times True.

# %% tags=["claim"]
_, log, _ = run({"q": ("x" * 40, 10)}, max_num_batched_tokens=16)
again, _, _ = run({"first": ("x" * 24, 1), "second": ("x" * 24, 1)})
table = [7, 2, 5]
print("1.", log[-1].step == 12)
print("2.", table[9 // 4] * 4 + 9 % 4 == 21 and table.index(10 // 4) * 4 + 10 % 4 == 6)
print("3.", again["second"].num_cached_tokens == 16)

# %% [markdown]
# All three hold.
#
# ## Where to read on
#
# In this order; each file takes one sitting.
#
# 1. [engine.py](../minifer/engine.py), `Engine.step`: the five calls.
# 2. [scheduling/scheduler.py](../minifer/scheduling/scheduler.py): the line that cuts a prompt.
# 3. [kv/manager.py](../minifer/kv/manager.py): why a prompt is never found whole.
# 4. [kv/step_input.py](../minifer/kv/step_input.py): the slot formula.
# 5. [execution/attention.py](../minifer/execution/attention.py): where prefill and decode part.
# 6. [detokenizer.py](../minifer/postprocessing/detokenizer.py): when a character is complete.
# 7. [execution/reference.py](../minifer/execution/reference.py): the slow twin.
