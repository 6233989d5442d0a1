# %% [markdown]
# # Exercises 08 · Sampling and text
#
# Five exercises, 25 points, about 125 minutes. Read
# [lecture 08](../lectures/L08_sampling_and_text.ipynb) first. Write where it says
# `YOUR CODE HERE`, run the cell, then run the check below it. `minifer grade 8` gives the points.
# Everything is plain Python and torch on the CPU; nothing of minifer is needed.

# %%
import random

import torch

from minifer.course import check

# %% [markdown]
# ### Exercise 8.1 - Top-p, to the boundary
#
# 5 points · difficulty 3/5 ●●●○○ · 25 minutes · CPU
#
# *Why it matters.* Top-p is in every engine, and its boundary is where they go wrong: one token too few
# and the draw has nothing to choose from, one too many and improbable tokens get through.
#
# *Specification.* `nucleus(logits, temperature, top_p)` returns the probabilities, float64 [V], with which
# the next token is drawn.
#
# - `logits`: float32 [V], V ≥ 1, not changed. Some may be −inf (masked): they get 0. At least one is
#   finite. Finite ones may be large: 500 must not overflow.
# - `temperature` > 0 is applied first: p is the softmax of logits ÷ temperature.
# - Order the tokens by falling **logit**, not by p: at a very high temperature p may be equal where
#   logits are not. Among equal logits the lower id comes first. Going down that order, a token is kept
#   while the sum of p *before* it is below `top_p`. So the first is always kept, the token that crosses
#   `top_p` is kept, and one before which `top_p` is already reached is not.
# - Sums are of floats: read "below `top_p`" as `sum_before < top_p * (1 - 1e-6)`, with p and sums in
#   float64. 0 < `top_p` ≤ 1; `top_p` = 1 keeps every token whose logit is finite.
# - The kept probabilities are rescaled to add up to 1; all others are exactly 0.
#
# *Example.* Logits log 0.5, log 0.3, log 0.2 at temperature 1: `top_p` 0.5 gives [1, 0, 0], 0.51 and 0.8
# give [0.625, 0.375, 0], 0.81 gives [0.5, 0.3, 0.2].


# %% tags=["exercise"]
def nucleus(logits, temperature, top_p):
    """Probabilities float64 [V] after temperature and top-p."""
    # YOUR CODE HERE
    raise NotImplementedError("ex8.1")


# %%
check("8.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.sort(x, descending=True, stable=True)` keeps equals in the order of their ids. Its `indices` say
# which token stands at which place; use them to carry the decision back.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The sum *before* a token is the cumulative sum *with* it, minus its own p.
#
# </details>
#
# <details><summary>Help: I see probabilities that are NaN</summary>
#
# `exp` of a large number is inf, and inf ÷ inf is NaN. Take the largest logit off before you divide by
# the temperature; the softmax is the same.
#
# </details>
#
# <details><summary>Help: I see one token too many where the sum reaches top_p exactly</summary>
#
# As floats, 0.5 + 0.3 may lie a little below 0.8. Compare with `top_p * (1 - 1e-6)`, as the text says.
#
# </details>

# %% [markdown]
# ### Exercise 8.2 - Penalties: prompt and output
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* Three penalties with similar names look at different tokens. A mix-up is invisible in
# a chat and ruins code, where the prompt is full of names that the reply must use.
#
# *Specification.* `penalize(logits, prompt, output, repetition, presence, frequency)` returns new logits,
# float32 [V].
#
# - `logits` float32 [V], `prompt` and `output`: lists of token ids below V, either may be empty, ids may
#   occur many times. None of the three is changed.
# - First repetition (> 0; 1 is off): of every token that occurs in `prompt` **or** `output`, a positive
#   logit is divided by it and any other multiplied by it. Once, however often the token occurs.
# - Then, of every token that occurs in `output`: `presence` is subtracted once and `frequency` once for
#   each occurrence in `output`. Both may be negative; 0 is off.
# - A logit of −inf stays −inf.
#
# *Example.* Logits [2, −2, 1, −1, 0.5], prompt [0, 1], output [2, 2, 3]. Repetition 2 gives
# [1, −4, 0.5, −2, 0.5]; presence 0.5 gives [2, −2, 0.5, −1.5, 0.5]; frequency 0.5 gives
# [2, −2, 0, −1.5, 0.5]; all three together [1, −4, −1, −3, 0.5].


# %% tags=["exercise"]
def penalize(logits, prompt, output, repetition, presence, frequency):
    """Logits float32 [V] after the three penalties."""
    # YOUR CODE HERE
    raise NotImplementedError("ex8.2")


# %%
check("8.2")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `set` removes repeats; `list.count` counts them.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Dividing a negative logit by 2 *raises* it: the token would be rewarded.
#
# </details>

# %% [markdown]
# ### Exercise 8.3 - A detokenizer for any vocabulary
#
# 6 points · difficulty 4/5 ●●●●○ · 35 minutes · CPU
#
# *Why it matters.* Every streaming server has this class, and a wrong one shows �, loses spaces, or gets
# slower with every token of a long reply.
#
# *Specification.* A class `Detokenizer` for one reply:
#
# - `Detokenizer(decode)`: `decode(ids)` is the tokenizer's function from a list of ids to text. It never
#   raises; for bytes that are no character, or not yet, it writes "\ufffd". `decode([])` is "".
# - `push(token_id)` takes the next token and returns the text that may be shown now. "" while the text of
#   all tokens so far, `decode(all ids)`, **ends with** "\ufffd": its last character may be unfinished.
#   Otherwise everything that was not returned yet: then all chunks so far, joined, are `decode(all ids)`.
# - `flush()` ends the reply: it returns what was not returned yet, "\ufffd" and all, so that all chunks
#   and `flush()`, joined, are `decode(all ids)`. A second `flush()` returns "".
#
# Three things that real vocabularies do:
#
# 1. A token may hold part of a character, or the end of one and the begin of the next.
# 2. A SentencePiece `decode` drops one space at the very **start** of what it is given: `decode([i])` may
#    be "hi" though token i is " hi". So a token decoded alone can lose its space.
# 3. A token may be nothing at all: special tokens decode to "", alone and among others.
#
# And the cost must not grow with the reply: no call of `decode` gets more than **16 ids** in a reply in
# which at most seven pushes in a row return "". Broken bytes need no special care: what counts is
# `decode(all ids)`. (In the tests they come at the end of a reply only.)
#
# *Example.* With one token a byte, "Hi 👋!" is pushed as 8 tokens and returns
# "H", "i", " ", "", "", "", "👋", "!". Without the last two tokens, `flush()` returns "\ufffd".


# %% tags=["exercise"]
class Detokenizer:
    """Text of one reply, token by token."""

    def __init__(self, decode):
        # YOUR CODE HERE
        raise NotImplementedError("ex8.3")

    def push(self, token_id):
        """The text that may be shown now."""
        # YOUR CODE HERE
        raise NotImplementedError("ex8.3")

    def flush(self):
        """At the end: what was not returned yet."""
        # YOUR CODE HERE
        raise NotImplementedError("ex8.3")


# %%
check("8.3")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep two lists: tokens that were shown last, as *context*, and tokens that wait. The new text is
# `decode(context + waiting)` without its first `len(decode(context))` characters.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The context needs to be no more than what became text the last time. But it must have *some* text: if
# it decodes to "", the next token stands at the start again and loses its space.
#
# </details>
#
# <details><summary>Help: I see one space too few after a special token</summary>
#
# You made a token with no text the context. Leave it among the waiting ones until text comes.
#
# </details>

# %% [markdown]
# ### Exercise 8.4 - Stop strings with the least waiting
#
# 6 points · difficulty 4/5 ●●●●○ · 30 minutes · CPU
#
# *Why it matters.* A stop string that leaks shows the reader the next speaker's name; one that is missed
# lets the model go on for both. And text that is held back for no reason is latency.
#
# *Specification.* A class `StopMatcher` for one reply:
#
# - `StopMatcher(stops, include=False)`: `stops` is a list of non-empty strings, perhaps empty, perhaps
#   with repeats; it is not changed. Attribute `hit` is None, and the stop string once one was found.
# - `push(text)` takes the next piece of text (any length, "" too) and returns what may be shown now.
#   However the text is cut into pieces, the result is as if it came character by character:
#   - The stop that **completes first** wins. Of two that complete at the same character, the one earlier
#     in `stops` wins, whichever is longer.
#   - On a hit everything before the stop that was not returned yet is returned; with `include=True` the
#     stop too. What follows it is dropped, and every later `push` and `flush` returns "".
#   - Without a hit, what stays back is the longest suffix of the text so far that is a proper beginning of
#     a stop string (shorter than that stop); all else has been returned. With `include=True` nothing stays
#     back, since all of it may be shown in any case.
# - `flush()` ends the reply: it returns what was held back. A second `flush()` returns "".
#
# Stops are matched in the text of the reply, not in what was returned; a match may span any number of
# pieces. Stops have at most 20 characters here, so speed is no concern.
#
# *Example.* `StopMatcher(["xyy"])` on the pieces "x", "x", "x", " ", "y", "y" returns "", "x", "x", "x ",
# "y", "y", and `flush()` returns "". `StopMatcher(["END"])` on "AN", " E", "ND of" returns "AN", " ", ""
# and `hit` is "END".


# %% tags=["exercise"]
class StopMatcher:
    """Shows text up to the first stop string, and holds back as little as it can."""

    def __init__(self, stops, include=False):
        # YOUR CODE HERE
        raise NotImplementedError("ex8.4")

    def push(self, text):
        """Take new text and return what may be shown now."""
        # YOUR CODE HERE
        raise NotImplementedError("ex8.4")

    def flush(self):
        """At the end: what was held back."""
        # YOUR CODE HERE
        raise NotImplementedError("ex8.4")


# %%
check("8.4")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go character by character, whatever the pieces are: then "completes first" needs no thought. After each
# character ask two questions: does the text end with a stop? If not, how much of its end may become one?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# For the second question try suffixes from the longest down: `stop.startswith(suffix)`. Starting a counter
# again at each mismatch is the classic mistake: with the stop "aab" the text "aaab" has one.
#
# </details>

# %% [markdown]
# ### Exercise 8.5 - Randomness of one's own
#
# 4 points · difficulty 3/5 ●●●○○ · 20 minutes · CPU
#
# *Why it matters.* A reply that changes because a stranger's request arrived cannot be debugged, and a
# seed that does not repeat the reply is a promise broken.
#
# *Specification.* `draw_batch(logits, seeds, indices)` returns a list of R token ids, one a row.
#
# - `logits` float32 [R, V], not changed, R ≥ 0; some entries may be −inf, at least one of each row is
#   finite. `seeds`: R ints from 0 to 2⁶⁴ − 1. `indices`: R ints ≥ 0, the output index of each draw.
# - Row r's token is drawn with the probabilities softmax(logits[r]); a token at −inf is never drawn.
# - It is a **function** of logits[r], seeds[r] and indices[r] alone: the same in any batch, at any place,
#   after any other calls. Two rows with equal logits, seed and index give equal tokens.
# - Draws for different (seed, index) are independent. Not even (seed 5, index 3) and (seed 4, index 4),
#   or (seed 3, index 5), may share their randomness.
# - The caller's generators (`random`, `torch`) are neither seeded nor advanced: only objects of your own
#   may be.
#
# *Example.* `draw_batch(torch.zeros(2, 9), [7, 7], [0, 0])` gives the same token twice, and the same again
# tomorrow; with `[0, 1]` as indices the two tokens need not be equal.


# %% tags=["exercise"]
def draw_batch(logits, seeds, indices):
    """One token id a row, drawn with randomness of its own."""
    # YOUR CODE HERE
    raise NotImplementedError("ex8.5")


# %%
check("8.5")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A generator made for one draw and thrown away cannot remember anything. `random.Random(text)` seeds one
# from a text; `random.Random.choices` draws with weights.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Seed and index must not be added: 5 + 3 = 4 + 4. Put them into one text, or one tuple to be hashed by
# something that is the same in every process (`hash` of a text is not).
#
# </details>
#
# <details><summary>Help: I see the same tokens for different seeds</summary>
#
# torch's CPU generator looks at the lowest 32 bits of the number in `manual_seed` and ignores the rest:
# 5 and 2³² + 5 are one seed to it.
#
# </details>
