# %% [markdown]
# # L08 · Sampling and text
#
# The forward pass ends in scores, and a reader waits for words. Between the two, one
# small stage draws a token and another decides which text may leave. Both run once a
# token, and much of what users call a model's style is set here.
#
# 75 minutes to read, 125 for the exercises. Needs L02 (prefill and decode); no GPU, no
# network.
#
# After this lecture you can **compute** what temperature, min-p, top-k and top-p leave
# of a distribution and **explain** why their order matters; **write** a draw whose
# result no neighbour can change; **predict** which bytes and characters a stream holds
# back; **decide** what a safety check may cost; and **find** the case in which each of
# these loses.

# %% [markdown]
# ## Where is the token now?
#
# ![The life of a token with post-processing lit](figures/life_map_postprocessing.svg)
#
# The prompt is computed, keys and values are stored, and the model has given one row
# of numbers. [sampler.py] turns it into a token; [detokenizer.py], [stop_strings.py]
# and the hooks turn tokens into text.
#
# [sampler.py]: ../minifer/execution/sampler.py
# [detokenizer.py]: ../minifer/postprocessing/detokenizer.py
# [stop_strings.py]: ../minifer/postprocessing/stop_strings.py

# %% tags=["claim"]
try:
    from minifer.course import begin, example, explore, show
    from minifer.course.pictures import sampling as pic
    from minifer.course.pictures import text_stream as txt
except ImportError as error:
    clone = 'in a clone,  pip install -e ".[course]"'
    remedy = f'minifer is missing: run  pip install "minifer[course]"  or, {clone}'
    raise ImportError(remedy) from error
begin("L08")

# %% [markdown]
# Here are the two stages at work on A's first token. Step through it.

# %% tags=["measure"]
from minifer.course.microscope import microscope

microscope(example.run(), "A", position=20, stage="postprocessing")

# %% [markdown]
# ## What does the model hand over?
#
# A row of V **logits**, one real number a token of the vocabulary. *Softmax* makes
# probabilities of them: p = exp(logit) ÷ sum of all exp. By hand, for 2, 1 and 0: e² =
# 7.39, e = 2.72, 1, sum 11.11, so 0.67, 0.24 and 0.09.
#
# Here are the rows of A's first, third and seventh token. Look for the one in which the
# model is sure. (`␣` is a space, `\n` a new line.)

# %% tags=["claim"]
import torch

print("by hand:", [round(p, 2) for p in torch.tensor([2.0, 1, 0]).softmax(-1).tolist()])
run = example.run()
first, sure, open_ = (pic.logits_before(run, "A", place) for place in (0, 2, 6))
for row in (first, sure, open_):
    p = row.softmax(-1)
    print(f"{pic.favourites(p)}   {pic.entropy(p):.1f} bits")

# %% [markdown]
# After `The import statement i` the model bets 0.92 on `s`. Where a new word begins,
# its favourite has 0.22. *Entropy* puts a number to it: 0 bits for a certain token,
# log₂ n for n equally likely ones. 4 bits are as open as 16 equal tokens.
#
# No setting below adds knowledge. Each moves probability between tokens, and what
# helps an open row can hurt a sure one.
#
# ## What does temperature change?
#
# Logits are divided by T before the softmax. That raises each probability to the power
# 1/T, up to a common factor. Write down what T = 2 makes of 0.67, 0.24, 0.09: the
# square roots 0.82, 0.49, 0.30 over their sum 1.61. Then look.


# %% tags=["claim"]
def warm(logits, temperature):
    """log(p / largest p): the likeliest token is at 0, the others below."""
    return (logits - logits.max()) / temperature


hand = torch.tensor([2.0, 1.0, 0.0])
for T in (2, 1, 0.5, 0.01):
    p = [round(x, 2) for x in warm(hand, T).softmax(-1).tolist()]
    print(f"T = {T:4}: {p}, exp(2 / T) is {float((hand[0] / T).exp()):.2g}")

# %% [markdown]
# The order never changes, only the distances: below 1 the favourite gains, above 1 the
# rest. The last line shows why `warm` takes the largest logit off *before* it divides:
# exp(200) does not fit into a float32.
#
# Is a small T the same as taking the largest logit, *greedy*? Each of the 27 rows of A,
# B and C is drawn from 50 times, with T = 0 and with T = 0.01. Look for rows in which
# not every draw is the largest.

# %% tags=["claim"]
every_row = pic.rows_of(run)
for T in (0, 0.01):
    print(f"T = {T}: not always the largest in {pic.doubtful_rows(every_row, T)}")
lead = -every_row["B", 6].topk(2).values.diff().item()
print(f"lead in B's seventh row: {lead:.2f}")

# %% [markdown]
# T = 0 cannot be a division, so engines treat it as a case of its own: the largest
# logit, the lowest id among equals. T = 0.01 is not the same. Where the two best logits
# are 0.02 apart, dividing by 0.01 makes that 2, and the loser keeps a chance of 12 %.
#
# The picture shows all temperatures at once. Look where the curves end on the right,
# and how far the sure row has come by T = 2.

# %% tags=["picture"]
three = {"A's first token": first, "A's third, sure": sure, "A's seventh, open": open_}
title = "Heat makes rows alike: at T = 4 the sure one is nearly as open as the others"
show(
    pic.entropy_figure(three, [0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4], title),
    alt="Entropy over temperature of three rows of A. All rise, the sure one last.",
)

# %% [markdown]
# Heat does not know which tokens are sensible: at T = 2 even the sure row spends 3 bits.
# Here temperature loses: one bad byte, and the model continues from it.
#
# ## Which tokens may be drawn at all?
#
# So the tail is cut before the draw. Three filters, on probabilities 0.4, 0.3, 0.2, 0.1:
#
# | filter | keeps | here |
# |---|---|---|
# | min-p 0.45 ([arXiv:2407.01082](https://arxiv.org/abs/2407.01082)) | tokens at least 0.45 times as likely as the best | 0.4, 0.3, 0.2 |
# | top-k 2 ([arXiv:1805.04833](https://arxiv.org/abs/1805.04833)) | the 2 likeliest | 0.4, 0.3 |
# | top-p 0.6 ([arXiv:1904.09751](https://arxiv.org/abs/1904.09751)) | the fewest likeliest whose sum reaches 0.6 | 0.4, 0.3 |
#
# A masked token gets −inf, whose exp is 0. Look which two of four
# equals stay.


# %% tags=["claim"]
def keep_min_p(x, min_p):
    """Mask tokens less than min_p times as likely as the best; x is from `warm`."""
    return x.masked_fill(x.exp() < min_p, -torch.inf)


def keep_top_k(x, k):
    """Mask all but k tokens; of equals, the lower ids stay."""
    order = sorted(range(len(x)), key=lambda token: (-float(x[token]), token))
    return x.index_fill(0, torch.tensor(order[k:], dtype=torch.int64), -torch.inf)


logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
print("min-p 0.45:", pic.alive(keep_min_p(warm(logits, 1), 0.45)))
print("top-k 2:", [pic.alive(keep_top_k(x, 2)) for x in (logits, torch.zeros(4))])

# %% [markdown]
# Exactly k tokens stay, the lowest ids among equals. Top-p is exercise 8.1, so here the
# engine's own does it. Predict each line: a token stays while the sum *before* it is
# below p. (Tokens 0 to 3 have 0.4 to 0.1.)

# %% tags=["claim"]
for p in (0.1, 0.39, 0.4, 0.41, 0.7, 0.71, 1.0):
    print(f"top-p {p:4} keeps {pic.filter_stages(logits, top_p=p)[-1].support}")

# %% [markdown]
# The token that *crosses* p stays (0.41 keeps two), reaching p adds none (0.4 keeps
# one), and one token always survives. Leaving the crossing token out is the most common
# mistake: at 0.39 nothing would be left to draw. (In float32, 0.4 + 0.3 need not be
# 0.7. The engine takes what differs by a millionth as equal.)
#
# Are our two filters the engine's? 300 random rows of 40 tokens, full of ties, with
# random settings. Look for any row in which a different set survives.

# %% tags=["claim"]
import random

rng, same = random.Random(8), 0
for _ in range(300):
    row = torch.tensor([rng.randint(-6, 6) / 2 for _ in range(40)])
    T, min_p, k = rng.choice((0.5, 2)), rng.choice((0, 0.1, 0.3)), rng.randint(1, 40)
    ours = keep_top_k(keep_min_p(warm(row, T), min_p), k)
    theirs = pic.filter_stages(row, temperature=T, min_p=min_p, top_k=k)[3]
    close = torch.allclose(ours.double().softmax(-1), theirs.probabilities, atol=1e-6)
    same += pic.alive(ours) == theirs.support and close
print(f"{same} of 300 rows: same tokens, same probabilities")

# %% [markdown]
# All of them. The engine's code differs because it works on whole batches, and counts what
# is equal up to rounding as equal. Unfold it: temperature and min-p.

# %% tags=["measure"]
from minifer.course.source import show_source

show_source(pic.scaled_logits)

# %% [markdown]
# Now both rows of A through all filters. Look at the top-k column: does it cut where
# the model is sure?

# %% tags=["picture"]
settings = {"temperature": 1.5, "min_p": 0.05, "top_k": 12, "top_p": 0.8}
stages = {name: pic.filter_stages(row, **settings) for name, row in three.items()}
del stages["A's first token"]
title = "T = 1.5, min-p 0.05, top-k 12, top-p 0.8: the sure row keeps one token"
alt = "The eight likeliest tokens of two rows after each filter; cut ones are crossed."
show(pic.filters_figure(stages, title=title), alt=alt)

# %% [markdown]
# Each filter alone loses somewhere. Count the tokens that stay, on the sure row, the
# open row, and a row with no opinion at all.

# %% tags=["claim"]
for cut in ({"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}):
    left = [pic.filter_stages(x, **cut)[-1] for x in (sure, open_, torch.zeros(288))]
    print(f"{cut!s:16} keeps {[len(stage.support) for stage in left]}")

# %% [markdown]
# Top-k keeps 12 tokens where one is right. Top-p and min-p follow the model's own
# opinion; where it has none they cut little or nothing: of 288 equals, top-p keeps 231.
#
# ## Does the order matter?
#
# It does, and engines differ in it. This one uses vLLM's: penalties → temperature →
# min-p → top-k → top-p. Take 0.5, 0.3, 0.2 with T = 2 and top-p 0.45. Temperature
# first: 0.42, 0.32, 0.26, and 0.42 is below 0.45. Top-p first: 0.5 is not. Which tokens
# are left? And does top-p 0.8 mean the same at each T?

# %% tags=["claim"]
logits, right = torch.tensor([0.5, 0.3, 0.2]).log(), {"temperature": 2, "top_p": 0.45}
print("temperature first:", pic.filter_stages(logits, **right)[-1].support)
print("top-p first:", pic.filter_stages(logits, top_p=0.45)[-1].support)
*_, seen, left = pic.filter_stages(logits, top_k=2, top_p=0.6)
print("top-p sees", [round(p, 3) for p in seen.probabilities.tolist()], left.support)
short = (open_ * 10).round() / 10  # short numbers: the same picture on every machine
stages = [pic.filter_stages(short, temperature=T, top_p=0.8) for T in (0.5, 1, 2)]
print("top-p 0.8 at T = 0.5, 1, 2 keeps", [len(stage[-1].support) for stage in stages])

# %% [markdown]
# Different tokens survive. The third line is subtler: top-p adds up what top-k has left,
# *renormalised*. 0.5 ÷ 0.8 = 0.625 passes 0.6 alone; the old 0.5 would have let a
# second token stay. And a top-p tuned at one temperature is another setting at the next:
# it keeps 4 of A's seventh tokens, 11, or 21.
#
# Move the sliders, and watch the number that is left.


# %% tags=["picture"]
def view(temperature, top_p):
    stages = pic.filter_stages(short, temperature=temperature, top_p=top_p)
    return pic.filters_html([stages[i] for i in (0, 1, 4)])


heat, mass = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0), (0.7, 0.8, 0.9, 0.95, 1.0)
alt = "Twelve tokens: the model's probabilities, after temperature, after top-p"
explore(view, alt=alt, temperature=heat, top_p=mass)

# %% [markdown]
# ## How is one token drawn?
#
# As a race. Each token runs for a random time, exponential with rate p, and the first
# to arrive wins. The chance that token i is first is its rate over the sum of all
# rates: pᵢ. No running sum is needed; the winner has the *largest* log p − log q, with
# q exponential of rate 1.
#
# The q are not taken from a generator with a state. They are a **function** of (seed,
# output index, token id): [noise.py] scrambles these numbers with Philox (Salmon et al.,
# SC 2011). Look who arrives first.
#
# [noise.py]: ../minifer/execution/noise.py

# %% tags=["claim"]
from minifer.execution.noise import vocabulary_noise

for seed, index in ((7, 0), (7, 1), (8, 0), (7 + 2**32, 0)):
    q = vocabulary_noise([seed], [index], 3)[0]
    times = [round(t, 2) for t in (q / logits.exp()).tolist()]
    print((seed, index), times, "wins:", int((logits - q.log()).argmax()))

# %% [markdown]
# The smallest time wins. The same seed (64 bits) and index are the same race, in any
# batch.
#
# Are the draws right? 20,000 seeds, five tokens. *Chi-square* adds up (drawn −
# expected)² ÷ expected; right draws exceed the limit less than once in a million times. A test
# that cannot fail proves nothing, so the second line draws at T = 1.1 on purpose.

# %% tags=["claim"]
p, counts = [0.5, 0.25, 0.12, 0.08, 0.05], {}
row = torch.tensor(p).log()
for name, T in (("T = 1", 1), ("T = 1.1, on purpose", 1.1)):
    tokens = pic.draw(row, range(20_000), temperature=T)
    found = counts[name] = [tokens.count(token) for token in range(5)]
    print(name, found, "passes:", pic.chi_square(found, p) < pic.chi_square_limit(4))
print("top-k 3:", sorted(set(pic.draw(row, range(20_000), top_k=3))))
print("spared winners win:", pic.spared_win_again(open_, range(500), top_k=12))

# %% [markdown]
# A temperature off by a tenth is found out. The rest is sharper: a token that was cut is
# never drawn, not once in 20,000, and those it spares run the same race. Look which token gives the error away.

# %% tags=["picture"]
figure = pic.draws_figure(counts, p, "01234", "20,000 right draws stay in their band")
alt = "Drawn over expected counts. At T = 1 all lie in their bands, at 1.1 two do not."
show(figure, alt=alt)

# %% [markdown]
# The rarest token is off by most, the commonest leaves the narrowest band.
#
# ## Whose randomness is it?
#
# Requests share a batch. They must not share a source of randomness, or a stranger's
# arrival changes your answer. Here is the mistake, in place of the engine's sampler. Look
# at what `multinomial` cannot know.

# %% tags=["claim"]
from minifer import SamplingParams
from minifer.execution.sampler import Sampled


class SharedGenerator:
    """The bug: every row takes its numbers from one stream."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, logits, rows):
        p = logits[[row.logits_row for row in rows]].softmax(-1)
        tokens = torch.multinomial(p, 1, generator=self.generator)[:, 0]
        return [Sampled(token) for token in tokens.tolist()]


# %% [markdown]
# It does not know which row is whose. Now A runs alone, with B and C, under another
# token budget, and in a cache so small that requests are preempted and computed again.
# Which answers agree?

# %% tags=["claim"]
seeded = SamplingParams(temperature=1, seed=7, ignore_eos=True)
stream = pic.in_company(seeded, SharedGenerator)
groups = {"own noise": pic.in_company(seeded), "one stream": stream}
for name, strips in groups.items():
    print(name, {case: strip == strips["alone"] for case, strip in strips.items()})

# %% [markdown]
# With noise of its own, A's answer is A's. With one stream it changes with the company,
# the budget and the cache, and no seed brings it back. The picture shows A's tokens
# from these eight runs. Look how soon the strips part.

# %% tags=["picture"]
figure = pic.answers_figure(groups, "One stream: A's answer depends on B and C")
show(figure, alt="Eight strips of A's tokens: own noise agrees, one stream parts.")

# %% [markdown]
# They part once another request has taken numbers from the stream. Isolation buys a
# reply that can be drawn again, for as long as the logits agree; its cost comes last.
#
# ## What did the model itself say?
#
# A **log-probability** is the logarithm of the model's own probability: 0 is certain,
# −0.69 one side of a coin. Those of a reply add up: 0.5 · 0.25 is −0.69 − 1.39 = −2.08.
# They are taken from the raw logits, *before* any rule. Look whether temperature shows.

# %% tags=["claim"]
for T in (0.5, 2):
    got = example.run(sampling=seeded.with_(temperature=T, logprobs=2))
    logprobs, own = pic.logprobs_of(got, "A"), pic.logprob_gap(got, "A") < 1e-4
    added = abs(sum(logprobs) - got.outputs["A"].outputs[0].cumulative_logprob) < 1e-4
    print(f"T = {T}: model's own {own}, add up {added}, worst {min(logprobs):.1f}")

# %% [markdown]
# The model's own at any temperature, so replies of different settings can be compared.
# The other side: a logprob is not the chance with which the token was drawn here. The
# worst one at T = 2 is a token that the model had nearly ruled out.
#
# ## What do penalties punish?
#
# Three rules lower the logits of tokens that were there before. **Repetition**
# (after [arXiv:1909.05858](https://arxiv.org/abs/1909.05858), which divides alone) looks at
# prompt *and* output: it divides a positive logit and multiplies a negative one. **Presence** and
# **frequency** look at the output alone: one subtracts once, the other once for each
# time. The logits are 2, −2, 1, −1, 0.5, the prompt tokens 0 and 1, the output 2, 2, 3.
# Fill in the rows first.

# %% tags=["claim"]
scores = [2.0, -2.0, 1.0, -1.0, 0.5]
for name, value in (("repetition", 2), ("presence", 0.5), ("frequency", 0.5)):
    penalty = {f"{name}_penalty": value}
    print(pic.penalized(scores, [0, 1], [2, 2, 3], **penalty), name)

# %% [markdown]
# Token 1, at −2, sinks to −4: *dividing* it would have lifted it to −1. Token 4 was
# never there and keeps its score.
#
# Where do they lose? Wherever repetition is right. The rule of a table needs its next
# `-`, which leads by 4 logits: 98 %. Each earlier `-` takes a frequency penalty of 0.5
# off the lead. How many does the rule survive? And A's text?

# %% tags=["measure"]
lead = [pic.penalized([4], [], [0] * n, frequency_penalty=0.5)[0] for n in (0, 4, 8)]
print("lead of the next '-':", lead)
for penalty in (0, 2):
    params = SamplingParams(temperature=0, ignore_eos=True, frequency_penalty=penalty)
    got = example.run({"A": ("The import statement", 48)}, sampling=params)
    print(f"frequency penalty {penalty}: {got.outputs['A'].outputs[0].text!r}")

# %% [markdown]
# After eight dashes the ninth is a coin toss, and letters that ran out are replaced,
# whatever the rest then spells. Penalties cure loops and bend all else.
#
# ## When are bytes text?
#
# A token is a piece of bytes. In UTF-8 a character is one to four bytes, and its first
# byte says how many: below 0x80 one, from 0xC0 two, from 0xE0 three, from 0xF0 four.
# `👋` is F0 9F 91 8B. A stream that decodes each token alone shows U+FFFD, the
# character for "no character", four times, and cannot take them back. So bytes wait
# until their character is whole. Look at what each byte of `é👋` releases.


# %% tags=["claim"]
class Utf8Stream:
    """Bytes in, whole characters out."""

    held = b""

    def push(self, byte):
        self.held += bytes([byte])
        first = self.held[0]
        if len(self.held) < 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0):
            return ""
        text, self.held = self.held.decode(errors="replace"), b""
        return text


tokenizer, stream = example.tiny().tokenizer, Utf8Stream()
print([tokenizer.decode([byte]) for byte in "é👋".encode()], "alone")
print([stream.push(byte) for byte in "é👋".encode()], "as a stream")

# %% [markdown]
# The engine cannot count like that: its tokens may hold half a character, or three and
# a half. It decodes a short window of tokens and waits while the text ends in U+FFFD.
# Compare both on 200 random texts of all widths, then on bytes that are no character.

# %% tags=["claim"]
from minifer.postprocessing.detokenizer import IncrementalDetokenizer

agree = 0
for _ in range(200):
    data = "".join(rng.choices("aé日👋 \n", k=20)).encode()
    ours, theirs = Utf8Stream(), IncrementalDetokenizer(tokenizer.decode)
    agree += [ours.push(byte) for byte in data] == [theirs.push(byte) for byte in data]
print(agree, "of 200 texts come in the same pieces; then F0, H, i, F0, 9F:")
for stream in (ours, theirs):
    print(type(stream).__name__, [stream.push(byte) for byte in b"\xf0Hi\xf0\x9f"])
print("at the end, the engine:", [theirs.flush()])

# %% [markdown]
# Equal on text. On broken bytes ours trusts the first byte and swallows what follows;
# the engine sees that `H` continues no character. A reply cut inside a character ends
# with U+FFFD: the bytes were drawn, and hiding them would make stream and full decode
# differ. The price is up to three tokens of delay a character, outside ASCII only.
#
# Tokens of a learnt vocabulary are larger. Look at the pieces of SmolLM2, where it was
# pulled; an empty one is a token whose bytes wait.

# %% tags=["measure"]
print(txt.smollm_pieces("hi 👋🏽 there, 日本") or "not pulled: run  minifer pull")

# %% [markdown]
# ## When may text be shown?
#
# A **stop string** ends a reply, and no part of it may reach the reader. Tokens do not
# respect its borders: a search in each token's text misses it, and a search in all the
# text finds it when half has been sent. So the end of the text waits. The blunt rule:
# hold back the stop's length minus one, always. Look what `AN` waits for.


# %% tags=["claim"]
class HoldTail:
    """Hold back len(stop) - 1 characters, whatever they are."""

    def __init__(self, stop):
        self.stop, self.held, self.hit = stop, "", False

    def push(self, text):
        text = self.held + text
        self.hit, keep = self.stop in text, len(self.stop) - 1
        cut = text.index(self.stop) if self.hit else max(0, len(text) - keep)
        self.held = "" if self.hit else text[cut:]
        return text[:cut]


tail = HoldTail("END")
print([tail.push(letter) for letter in "AN END"], tail.hit)

# %% [markdown]
# It is right, and every reader waits for nothing. The engine holds back the longest
# suffix that can still *become* a stop string, and no more (by Aho and Corasick's
# automaton, 1975). Same text, less waiting? Count over 300 random texts; then predict
# which stop wins in the last lines.

# %% tags=["claim", "row-10"]
from minifer.postprocessing.stop_strings import StopStrings

equal, blunt, least = 0, 0, 0
for _ in range(300):
    text = "".join(rng.choices("END  ", k=30)) + "END"
    pair = HoldTail("END"), StopStrings(["END"])
    ours, theirs = (txt.waiting(matcher, text) for matcher in pair)
    equal += ours[0] == theirs[0] == text[: text.index("END")]
    blunt, least = blunt + ours[1], least + theirs[1]
print(f"{equal} of 300 equal; waiting: {blunt} characters against {least}")
for stops in (["cd", "abc"], ["bc", "abc"], ["abc", "bc"]):
    released, _ = txt.waiting(matcher := StopStrings(stops), "xabcdy")
    print(f"stops {stops} in 'xabcdy': hit {matcher.hit!r}, text {released!r}")

# %% [markdown]
# The same text for a fraction of the waiting. The match that *completes* first wins; of
# two that complete at one character, the earlier in the list.
#
# Now all of it in the engine; only the words are scripted. Look for text that waits because of bytes (A, B) and of the stop `END` (C).

# %% tags=["picture"]
stopping = SamplingParams(temperature=0, ignore_eos=True, stop=["END"])
told = example.run(sampling=stopping, prepare=txt.scripted())
title = "Bytes wait for their character, letters for a stop"
alt = "Bytes of A, B, C by step. Parts of characters wait, C's END never leaves."
show(txt.stream_figure(told.events, title), alt=alt)

# %% [markdown]
# The same in numbers: bytes held after each token, and what the reader got.

# %% tags=["claim"]
tokens = txt.stream_data(told.events)
for name, output in told.outputs.items():
    held, reply = [t.held for t in tokens if t.request_id == name], output.outputs[0]
    print(f"{name}: {held}, {reply.finish_reason}, {reply.text!r}")

# %% [markdown] tags=["row-10"]
# Seven tokens of A and B waited for a character. C's last three letters were drawn, held
# and dropped; B's last could begin a stop, but nothing followed: it was shown.
#
# ## Who else may stop the stream?
#
# A *hook* sees the text after the stop strings and before the reader. It may release
# less than it was given, and it may end the reply. Here is a whole safety check: no
# four digits in a row may pass. What must it hold back?

# %% tags=["claim"]
import re

from minifer.postprocessing.hooks import HookVerdict


class PinHook:
    """Digits wait until they are known to be fewer than four."""

    held = ""

    def on_token(self, token_id, text):
        text, self.held = self.held + text, ""
        if pin := re.search(r"\d{4}", text):
            return HookVerdict(text[: pin.start()], "content_filter", "pin")
        cut = len(text.rstrip("0123456789"))
        self.held = text[cut:]
        return HookVerdict(text[:cut])

    def on_finish(self, text):
        last = self.on_token(0, text)
        return HookVerdict(last.text + self.held, last.finish_reason, last.stop_reason)


# %% [markdown]
# The engine's [SafetyHook] takes word lists or regular expressions. On 300 random texts
# in random chunks: the same text, the same verdict?
#
# [SafetyHook]: ../minifer/postprocessing/guards/safety.py

# %% tags=["claim", "row-10"]
results = []
for _ in range(300):
    chunks = txt.random_chunks(rng, "12ab", 8)
    pin = txt.SafetyHook([txt.RegexCheck(r"\d{4}")])
    results.append([txt.guarded(hook, chunks) for hook in (PinHook(), pin)])
ended = sum(bool(a[1]) for a, _ in results)
print(sum(a == b for a, b in results), "of 300 agree,", ended, "replies ended")

# %% [markdown]
# They agree, but do not wait alike. A regular expression that can match n characters
# holds back n − 1 at every moment: what is still possible it cannot say. Predict the level of each curve, then compare with the measured one.

# %% tags=["picture"]
checks = {
    "word list 'secret key'": txt.WordListCheck(["secret key"]),
    "4 digits: predicted 3": txt.RegexCheck(r"\d{4}"),
    "address of at most 40: predicted 39": txt.RegexCheck(r"\w+@\w+", max_match=40),
}
answer = "The desk opens at 9 and closes at 17. Room 204 is by the secret door. OK?"
held = {name: txt.held_by(check, answer) for name, check in checks.items()}
alt = "Characters held along a reply: a word list few and rarely, patterns 3 and 39."
show(txt.held_figure(held, "A pattern holds its longest match minus one"), alt=alt)

# %% [markdown]
# In time: at four characters and 20 ms a token, the address check delays everything by
# about 10 tokens, 200 ms. A reply of fewer than 40 characters arrives in one piece, at
# its end: there such a check loses most. Now a check ends a real reply. What was paid,
# and what was shown?

# %% tags=["claim"]
print("highest levels:", [max(series) for series in held.values()])
reply = txt.served_with([txt.SafetyHook([txt.WordListCheck(["single"])])])
print(reply.finish_reason, "by", reply.stop_reason, [reply.text], len(reply.token_ids))

# %% [markdown]
# Twelve tokens were drawn, six characters shown. `content_filter` tells the caller that
# text is missing.
#
# Not every guard withholds. The repetition guard watches for a tail that says the same
# over and over, and must know what repeats for good reasons. Look at a loop, a table and
# a list of zeros.

# %% tags=["claim"]
from minifer.postprocessing.guards import default_guards

for passage in ("ha ", "| --- ", "0, "):
    (guard,) = default_guards("stop", None, lambda *alarm: None)
    ends = [guard.on_token(ord(c), c).finish_reason is not None for c in passage * 60]
    print(f"{passage!r:8}", ends.index(True) + 1 if any(ends) else "goes on")

# %% [markdown]
# The loop ends after 64 tokens; table and zeros go on, up to a far larger limit. A loop
# that changes a little each time is not seen.
#
# ## What does it all cost?
#
# Count by hand for greedy: one look for the largest reads 4 bytes a logit, and nothing is
# copied. A drawn token also needs noise. Guess how many times as much it moves.

# %% tags=["claim"]
from minifer.course.pictures import sampling_costs as cost

greedy, drawn = (cost.bytes_a_logit(32_768, temperature=T) for T in (0, 1))
print(f"greedy {greedy:.0f} bytes a logit; drawn over 99 times:", drawn > 99 * greedy)

# %% [markdown]
# Now their share of the 15.0 GB of weights that a step of Llama 3.1 8B reads (L00), for
# 64 requests and V = 128,256: modelled with bytes counted here, not measured.

# %% tags=["measure"]
ways = {"greedy": {"temperature": 0}, "top-k 50": {"top_k": 50}, "whole row": {}}
for name, params in ways.items():
    moved = cost.bytes_a_logit(32_768, **params)
    share = moved * 128_256 * 64 / 15e9
    print(f"{name:9} {moved:.0f} bytes a logit, {share:.1%} of a step")

# %% [markdown]
# Independence has a price: ten rounds of Philox over whole rows move almost 200 times
# the bytes of an argmax. Cutting *first* makes the draw cheaper, since only k tokens
# need noise; a fused kernel keeps the rounds in registers and reads 4 bytes a logit.
#
# Counted bytes over this machine's bandwidth predict the time here. Lines are
# predicted, marks measured where this notebook ran. Look where they part.

# %% tags=["picture"]
from minifer.perf.limit import this_machine

bandwidth = this_machine(seconds=0.4).memory_bandwidth
costs = {name: cost.sampling_costs(bandwidth, **ways[name]) for name in ways}
alt = "Time of a token over vocabulary size, three ways: predicted and measured."
show(cost.costs_figure(costs, "Bytes predict large rows, calls small ones"), alt=alt)

# %% [markdown]
# For large rows the counted bytes tell the order of magnitude (fresh memory is cleared
# first). For small ones about a hundred calls do, whatever they move: there, cutting
# first gains nothing.
#
# ## Takeaways
#
# - Temperature changes distances, never the order; filters cut, and rescale the rest.
# - Order is part of the meaning: penalties, temperature, min-p, top-k, top-p.
# - Top-p keeps the token that crosses p. Reaching p adds none; one always survives.
# - Noise is a function of (seed, output index, token id): neighbours cannot change it.
# - Log-probabilities are the model's own, from before every rule.
# - Text leaves when it is certain: whole characters, no possible beginning of a stop.
# - What a check must hold back is its price. A pattern of n characters holds n − 1.
#
# ## Questions
#
# **1.** Logits 1 and 0. At which T is the first token three times as likely?
#
# <details><summary>Answer</summary>exp(1/T) = 3, so T = 1 ÷ ln 3 ≈ 0.91.</details>
#
# **2.** Probabilities 0.6, 0.3, 0.1: how many tokens does top-p 0.9 keep?
#
# <details><summary>Answer</summary>Two: 0.9 is reached, and reaching adds none.</details>
#
# **3.** A token with logit −3 stands in the prompt only. What do a repetition penalty
# of 1.5 and a presence penalty of 1 leave?
#
# <details><summary>Answer</summary>−4.5: presence looks at the output only.</details>
#
# **4.** The stop is `aab`, the text so far `xaaa`. How many characters wait?
#
# <details><summary>Answer</summary>Two: they can still become the stop, the first a
# cannot.</details>
#
# **5.** `ï 日` is streamed byte by byte. How many bytes release nothing?
#
# <details><summary>Answer</summary>Three: one of ï, two of 日.</details>
#
# The answers, computed:

# %% tags=["claim"]
print(1, round(1 / torch.tensor(3.0).log().item(), 2))
row = torch.tensor([0.6, 0.3, 0.1]).log()
print(2, len(pic.filter_stages(row, top_p=0.9)[-1].support))
print(3, *pic.penalized([-3], [0], [], repetition_penalty=1.5, presence_penalty=1))
matcher, stream = StopStrings(["aab"]), IncrementalDetokenizer(tokenizer.decode)
matcher.push("xaaa")
print(4, len(matcher.held), 5, [stream.push(b) for b in "ï 日".encode()].count(""))

# %% [markdown]
# All hold.
#
# ## In real engines
#
# - **vLLM** has the order used here, and the blunt rule for stops. Their history: a
#   beginning that leaked ([#3574](https://github.com/vllm-project/vllm/issues/3574)), a
#   stop over two tokens missed ([#2577](https://github.com/vllm-project/vllm/issues/2577)),
#   empty first chunks ([#13087](https://github.com/vllm-project/vllm/issues/13087)). Top-p
#   by sorting cost 15 % of its throughput, a fused kernel next to nothing (reported in
#   [#11394](https://github.com/vllm-project/vllm/pull/11394), December 2024).
# - **SGLang** withholds what may become a stop since
#   [#11462](https://github.com/sgl-project/sglang/pull/11462).
# - **TensorRT-LLM** met float32 sums that never reach p
#   ([#19485](https://github.com/NVIDIA/TensorRT-LLM/issues/19485)); in its Edge variant
#   Philox was reported to forget the output index
#   ([#211](https://github.com/NVIDIA/TensorRT-Edge-LLM/issues/211)), September 2026.
# - An *approximate* top-k let improbable tokens through in production; the remedy was
#   an exact one: Anthropic, [A postmortem of three recent
#   issues](https://www.anthropic.com/engineering/a-postmortem-of-three-recent-issues),
#   September 2025.
#
# ## Exercises
#
# | | title | points | minutes | |
# |---|---|---|---|---|
# | 8.1 | Top-p, to the boundary | 5 | 25 | [open](../exercises/ex08_sampling_and_text.ipynb) |
# | 8.2 | Penalties: prompt and output | 4 | 15 | [open](../exercises/ex08_sampling_and_text.ipynb) |
# | 8.3 | A detokenizer for any vocabulary | 6 | 35 | [open](../exercises/ex08_sampling_and_text.ipynb) |
# | 8.4 | Stop strings with the least waiting | 6 | 30 | [open](../exercises/ex08_sampling_and_text.ipynb) |
# | 8.5 | Randomness of one's own | 4 | 20 | [open](../exercises/ex08_sampling_and_text.ipynb) |
#
# ## Where to read on
#
# L09 breaks the engine on purpose, and some of its symptoms look like sampling. The
# slow twin [sampler_reference.py] says in 85 lines what the sampler must do.
#
# [sampler_reference.py]: ../minifer/execution/sampler_reference.py
