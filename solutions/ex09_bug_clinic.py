# %% [markdown]
# # Exercises 09 · Bug clinic
#
# Six exercises, 40 points, about 190 minutes. They follow
# [lecture L09](../lectures/L09_bug_clinic.ipynb). Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 9` gives the points.
#
# **9.1 to 9.4 are four patients.** Each is the real engine with one fault. For each you hand in three things:
#
# | function | points | |
# |---|---|---|
# | `diagnosis_1()` | 2 | returns the fault's name, from the menu |
# | `test_1(engine)` | 4 | raises `AssertionError` when the engine has this fault, and returns otherwise |
# | `repair_1()` | 2 | returns the name of the broken part and a new one: `("length", a_function)` |
#
# **A test** is graded by engines. Two points: it fails on engines with the patient's fault, and passes on healthy
# ones. Two more: it also passes on engines with any *other* fault of the menu. The engines have another model,
# block size and pool each time, so a test that knows a reply by heart fails healthy engines; 4 to 8 tokens are
# a block, 12 to 16 blocks a pool. Any exception but `AssertionError` is a mistake. A test uses the engine it is
# given and nothing else.
#
# **The menu.**
#
# | fault | what goes wrong |
# |---|---|
# | `hash-without-parent` | a block's name covers its own tokens, and not what stands before them |
# | `held-bytes-dropped` | a token that ends inside a character is forgotten |
# | `lost-boundary-slot` | of a prompt that ends with a block, the last token's KV is not stored |
# | `off-by-one-length` | a decode step reads one KV slot too many |
# | `resumed-with-prompt-only` | a preempted request forgets what it has generated |
# | `salt-ignored` | tenants that should be kept apart find each other's blocks |
# | `stop-string-leaks` | text that may become a stop string is sent too early |
# | `wrong-position-after-preemption` | a preempted request counts its positions from 1 |
#
# **The parts.** A repair is one of these functions, written anew. Putting in a new part where the old one was
# healthy cures nobody. A part changes none of its arguments.
#
# | part | returns |
# |---|---|
# | `characters(held, new)` | `held + new` are bytes of a UTF-8 text. A pair: the text of all characters that are complete (U+FFFD for what can never become one, as Python's decoder has it with `errors="replace"`), and the bytes of a last character that has only begun |
# | `key(parent, tokens, salt)` | `bytes`, the name of a full block: equal for equal arguments, different for different ones (also when 1,000 are made). `parent`: the name of the block before, `None` for the first; `tokens`: a tuple of ints; `salt`: a text or `None` |
# | `length(position)` | how many KV slots a token at this position may read, its own included |
# | `positions(start, end)` | a list: the positions of the request's tokens number `start` to `end` − 1, counted from 0 |
# | `release(held, new, stops)` | no stop string is complete in the text `held + new`. A pair: what may be sent, and what must be held: the longest end of it that begins a stop string |
# | `resume(prompt, output)` | a list: the tokens that a request without any KV must compute before it can go on |
# | `slots(table, block_size, start, end)` | a list: the KV slot of each token `start` to `end` − 1. Token p lies in block `table[p // block_size]`, whose slots begin at its id times `block_size` |
#
# **An engine** has
#
# - `engine.block_size`, `engine.num_blocks`;
# - `engine.ask(*prompts, max_tokens=8, stop=(), says=None, salt=None)`: serves all prompts in one batch, greedily,
#   and returns a list of replies, one a prompt. With `says` the model is made to say that text, and the reply ends
#   with it; `max_tokens` is then ignored. Without it nothing but `max_tokens` or a stop string ends a reply. No prompt
#   with its reply is longer than the pool. `salt` names the tenant; tenants share no blocks;
# - `engine.oracle(prompt, tokens)`: the log-probability of each of the tokens after the prompt, computed by the slow
#   twin: the same weights, no cache, no batch.
#
# A reply has `text` (as it was streamed), `tokens`, `logprobs` (of its tokens, when they were drawn), `num_cached`
# (tokens of the prompt that were found in the cache) and `num_preemptions`. The model is byte-level: a token is a
# byte (ids from 256 on are special and show no text), and a prompt of n ASCII characters has n tokens. The full blocks
# of a prompt are looked up in the cache from the front, and the search ends at the first that is not found. Memory
# that nobody has written holds plausible numbers.
#
# An answer uses Python, torch, `minifer.course.check`, and, to look around, `patient`, `healthy` and `report`:

# %%
from minifer.course import check
from minifer.course.clinic import healthy, patient, report

# %% [markdown]
# `patient(1)` to `patient(4)` are engines to experiment with, `healthy()` is one to compare with. Blocks have 16
# tokens here, and there are 16 of them. (In the grader both are healthy.)

# %%
print(patient(1), healthy())
print(healthy().ask("The import statement", max_tokens=12)[0])

# %% [markdown]
# ### Exercise 9.1 - The patient who swallows
#
# 8 points · difficulty 2/5 ●●○○○ · 30 minutes · CPU
#
# *The complaint.* "Most of what I read is perfect. Typographic quotation marks do not come out at all, and my
# colleague in Seoul says that our product cannot spell."

# %%
print(report(1))

# %% [markdown]
# *Why it matters.* An evaluation in English has never seen this.
#
# *Specification.* Write `diagnosis_1`, `test_1` and `repair_1` as said at the top. In `test_1` make sure that
# the fault gets its chance: what must an engine say so that it can go wrong?


# %% tags=["exercise"]
def diagnosis_1():
    """The fault's name, from the menu."""
    ### BEGIN SOLUTION
    return "held-bytes-dropped"
    ### END SOLUTION


def test_1(engine):
    """Raises AssertionError when the engine has this fault."""
    ### BEGIN SOLUTION
    text = "“naïve” 你好 👋."
    (reply,) = engine.ask("Say it again: ", says=text)
    assert reply.text == text
    ### END SOLUTION


def repair_1():
    """→ (name of the broken part, a function that does what the table says)."""
    ### BEGIN SOLUTION
    import codecs

    def characters(held, new):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(held + new)
        return text, decoder.getstate()[0]

    return "characters", characters
    ### END SOLUTION


# %%
check("9.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With `says` you choose the text. Compare what was streamed with what the model was made to say.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Python has a decoder that is fed piece by piece, in the module `codecs`; it knows what it still holds.
#
# </details>

# %% [markdown]
# ### Exercise 9.2 - The patient who remembers too much
#
# 8 points · difficulty 3/5 ●●●○○ · 35 minutes · CPU
#
# *The complaint.* "We fill in forms. Each form has a header of its own and the same three paragraphs below. Now and
# then a reply speaks of the header of another form. Nothing is slow; it is rather quicker than it was."

# %%
print(report(2))

# %% [markdown]
# *Why it matters.* A stranger's words shape the reply, and nobody is told.
#
# *Specification.* Write `diagnosis_2`, `test_2` and `repair_2`. Two faults of the menu have to do with what is found
# in the cache; your test must know this one from the other. A reply has a number that says what was found. Mind where
# the search ends: behind a header that the engine has never seen nothing is found, on any engine.


# %% tags=["exercise"]
def diagnosis_2():
    """The fault's name, from the menu."""
    ### BEGIN SOLUTION
    return "hash-without-parent"
    ### END SOLUTION


def test_2(engine):
    """Raises AssertionError when the engine has this fault."""
    ### BEGIN SOLUTION
    header, paragraph = "h" * engine.block_size, "p" * engine.block_size
    engine.ask(header + paragraph)
    (reply,) = engine.ask(paragraph + "?")
    assert reply.num_cached == 0
    ### END SOLUTION


def repair_2():
    """→ (name of the broken part, a function that does what the table says)."""
    ### BEGIN SOLUTION
    import hashlib

    def key(parent, tokens, salt):
        return hashlib.sha256(repr((parent, tokens, salt)).encode()).digest()

    return "key", key
    ### END SOLUTION


# %%
check("9.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Prompts can be built of whole blocks: `"h" * engine.block_size` is one. A prompt that begins with a block which the
# engine has seen only *behind* another: may it find that block?
#
# </details>

# %% [markdown]
# ### Exercise 9.3 - The patient who starts over
#
# 8 points · difficulty 3/5 ●●●○○ · 35 minutes · CPU
#
# *The complaint.* "Fine all morning. At noon, when everybody asks at once, some replies stop in the middle of a word
# and begin again from the top. On the bill they are no longer than they should be."

# %%
print(report(3))

# %% [markdown]
# *Why it matters.* A test of one request at a time never meets it.
#
# *Specification.* Write `diagnosis_3`, `test_3` and `repair_3`. The test must bring about what happens at noon:
# `num_preemptions` says whether it did. A request holds a block for each `block_size` tokens of prompt and reply, or
# for a part of them; when all `num_blocks` are taken, somebody is preempted.


# %% tags=["exercise"]
def diagnosis_3():
    """The fault's name, from the menu."""
    ### BEGIN SOLUTION
    return "resumed-with-prompt-only"
    ### END SOLUTION


def test_3(engine):
    """Raises AssertionError when the engine has this fault."""
    ### BEGIN SOLUTION
    half = engine.num_blocks * engine.block_size // 2
    for reply in engine.ask("One. ", "Two. ", "Three. ", max_tokens=half):
        # A character takes a token at least.
        assert len(reply.text) <= len(reply.tokens)
    ### END SOLUTION


def repair_3():
    """→ (name of the broken part, a function that does what the table says)."""

    ### BEGIN SOLUTION
    def resume(prompt, output):
        return prompt + output

    return "resume", resume
    ### END SOLUTION


# %%
check("9.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three short prompts with long replies fit at first and no longer at the end.
#
# </details>
# <details><summary>Hint 2</summary>
#
# "No longer on the bill": compare what was streamed with the tokens that were counted.
#
# </details>
# <details><summary>Help: my test fails on another fault of the menu</summary>
#
# More than one fault shows under preemption, and it may change words without adding any. What does only this one do?
#
# </details>

# %% [markdown]
# ### Exercise 9.4 - The patient with a good day and a bad day
#
# 8 points · difficulty 4/5 ●●●●○ · 45 minutes · CPU
#
# *The complaint.* "One of my prompts always gets a poor answer. I put a space in front of it, and the answer is good. I
# put a second one: still good. My colleague has a prompt like that too, and hers is twice as long."

# %%
print(report(4))

# %% [markdown]
# *Why it matters.* Nothing crashes, nothing is NaN, and the text is fluent: only an oracle knows.
#
# *Specification.* Write `diagnosis_4`, `test_4` and `repair_4`. The engine's `logprobs` and the oracle's differ by
# less than 0.0001 where all is well (float32). Where something is wrong, at least one of eight tokens differs by more,
# and some by hardly more. Another fault of the menu makes numbers wrong in every decode step whose context does not
# fill its last block. A test that is to know the two apart looks at more than one prompt, and leaves the replies their
# eight tokens.


# %% tags=["exercise"]
def diagnosis_4():
    """The fault's name, from the menu."""
    ### BEGIN SOLUTION
    return "lost-boundary-slot"
    ### END SOLUTION


def test_4(engine):
    """Raises AssertionError when the engine has this fault."""

    ### BEGIN SOLUTION
    def is_wrong(prompt):
        (reply,) = engine.ask(prompt)  # eight tokens: one of them shows it
        truth = engine.oracle(prompt, reply.tokens)
        pairs = zip(reply.logprobs, truth, strict=True)
        errors = [abs(ours - true) for ours, true in pairs]
        return max(errors) > 1e-4

    text = "The for statement is used to iterate"[: 2 * engine.block_size]
    beside = is_wrong("x" + text)  # other blocks: nothing of it is found by the next
    assert beside or not is_wrong(text)
    ### END SOLUTION


def repair_4():
    """→ (name of the broken part, a function that does what the table says)."""

    ### BEGIN SOLUTION
    def slots(table, block_size, start, end):
        return [
            table[p // block_size] * block_size + p % block_size
            for p in range(start, end)
        ]

    return "slots", slots
    ### END SOLUTION


# %%
check("9.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Sweep the length of a prompt from one block to three, and print for each length the largest difference between
# `reply.logprobs` and the oracle.
#
# </details>
# <details><summary>Help: I see wrong numbers beside the bad length, too</summary>
#
# Prompts that begin alike share blocks, and a block with a hole in it is found by the next prompt. Begin each prompt
# with another letter.
#
# </details>

# %% [markdown]
# ### Exercise 9.5 - A guard against loops that lets tables pass
#
# 5 points · difficulty 3/5 ●●●○○ · 30 minutes · CPU
#
# *Why it matters.* A loop runs to the limit and costs a seat in every batch. A guard that kills a table costs a user.
#
# *Specification.* Complete the class `LoopGuard`, which watches one reply. `push(token, text)` takes the next
# token and the text that it adds, and returns whether the reply is a loop: False until it is one, then True for good.
#
# For a period p let r be how many of the last tokens in a row each equal the token p places before. If r ≥ 1, the
# *tail* of period p has p + r tokens; with r = 0 period p does not count. The reply is a loop when, for some p from 1
# to `max_period` that counts, the tail is at least `min_count` · p tokens long and
#
# - at least `min_tokens` long, if the *passage*, the texts of the last p tokens joined, is no layout;
# - at least `max_layout` long, if it is layout, as `is_layout` says.
#
# One `push` may compare a token with at most `max_period` others, however long the reply is, and
# keep no more of it than that.
#
# *Example.* With `LoopGuard(max_period=8, min_count=3, min_tokens=6, max_layout=12)` the tokens 1 2 1 2 1 2 with
# texts "a" and "b" are a loop from the sixth on (period 2: six tokens, three times). 7 7 7 7 7 7 with the text "-" is
# layout, and a loop from the twelfth on. 1 2 3 4 1 2 3 4 is none: twice is not three times.

# %%
RULERS = set(" \t\n|-=_*#.:+~")
NUMBERS = set("0123456789 \t\n,;.()[]{}+-")


def is_layout(passage):
    """Rulers, tables, indentation and rows of numbers repeat for good reasons."""
    numbers = set(passage) <= NUMBERS and any(c.isdigit() for c in passage)
    return set(passage) <= RULERS or numbers


# %% tags=["exercise"]
class LoopGuard:
    """Watches one reply for a passage that is there again and again."""

    def __init__(self, max_period=64, min_count=4, min_tokens=48, max_layout=512):
        ### BEGIN SOLUTION
        self.max_period, self.min_count = max_period, min_count
        self.min_tokens, self.max_layout = min_tokens, max_layout
        self.tokens, self.texts = [], []  # the last max_period, newest first
        self.runs = {}  # period → tokens in a row that equal the one a period before
        self.tripped = False
        ### END SOLUTION

    def push(self, token, text):
        """Take the next token and its text; returns True from the loop on."""
        ### BEGIN SOLUTION
        self.texts = [text, *self.texts][: self.max_period]
        self.runs = {
            p: self.runs.get(p, 0) + 1
            for p, old in enumerate(self.tokens, start=1)
            if old == token
        }
        self.tokens = [token, *self.tokens][: self.max_period]
        for p, run in self.runs.items():
            tail = p + run
            layout = is_layout("".join(self.texts[:p]))
            least = self.max_layout if layout else self.min_tokens
            if tail >= max(least, self.min_count * p):
                self.tripped = True
        return self.tripped
        ### END SOLUTION


# %%
check("9.5")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each period keep how many of the last tokens in a row equal the one p places before. A new token either
# lengthens that run by one or ends it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `collections.deque(maxlen=n)` keeps the last n and forgets what is older.
#
# </details>

# %% [markdown]
# ### Exercise 9.6 - A breaker for tool loops
#
# 3 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Each turn of a tool loop is a success for the server. Somebody has to look at the conversation.
#
# *Specification.* `find_loop(calls, limit=3, allow=())` looks through the tool calls of one conversation, in order.
# Each is a triple of texts (name, arguments, result). It returns the index of the first call that completes a loop:
# the `limit`-th in a row with the same name, arguments and result. None if there is no loop.
#
# - Arguments and results that are JSON are compared as JSON values: the order of keys and blanks do not count. What is
#   no JSON is compared as text, without blanks at its ends. (1, 1.0 and true are three values, and the JSON text
#   `"a"` is not the bare text a. JSON is what Python's `json.loads` takes, so NaN is; it equals itself here.)
# - Calls of the tools named in `allow` are left out: they complete no loop and interrupt none.
# - A call whose result differs from the last one makes progress: polling is no loop.
#
# *Example.* Three times `("search", '{"q": "a", "n": 1}', "[]")`, the second one with `'{"n":1,"q":"a"}'`: the loop
# is complete at index 2.


# %% tags=["exercise"]
def find_loop(calls, limit=3, allow=()):
    """Index of the call that completes a loop, or None."""
    ### BEGIN SOLUTION
    import json

    def same_spelling(text):
        try:
            return json.dumps(json.loads(text), sort_keys=True)
        except ValueError:
            return text.strip()

    last, count = None, 0
    for index, (name, arguments, result) in enumerate(calls):
        if name in allow:
            continue
        call = (name, same_spelling(arguments), same_spelling(result))
        count = count + 1 if call == last else 1
        last = call
        if count >= limit:
            return index
    return None
    ### END SOLUTION


# %%
check("9.6")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `json.dumps(json.loads(text), sort_keys=True)` is one spelling for all spellings of a value.
#
# </details>
