# %% [markdown]
# # Exercises 00 · The life of a token
#
# One exercise, 5 points, about 20 minutes. Write where it says `YOUR CODE HERE`, run the
# cell, then run the check below it. `minifer grade 0` gives the points.

# %%
from minifer.course import check, example

# %% [markdown]
# ### Exercise 0.1 - Fill a table from a trace
#
# 5 points · difficulty 2/5 ●●○○○ · 20 minutes · CPU
#
# *Why it matters.* When a reply is slow, the event log is where the time is found. A few
# numbers a request tell most stories: it waited, its prompt was long, its prefix was
# known, or its work was thrown away and done again.
#
# *Specification.* `life_table(events)` returns a dictionary: one row for each request
# that was admitted, by its id, in the order of admission. A row is a dictionary with
# these six keys.
#
# | key | what |
# |---|---|
# | `"first_step"` | the first step that computes a token of it; `None` when no step has |
# | `"prefill"` | positions of its prompt that it computed, each counted once |
# | `"decode"` | positions behind its prompt that it computed, each counted once |
# | `"again"` | computations of a position that it had computed before |
# | `"cached"` | tokens that prefix hits spared it, all its hits added up |
# | `"drawn"` | tokens that were drawn for it |
#
# `events` is a list of `Event`, in order, with the fields `step`, `request_id`, `name`,
# `token_range` and `data`. A `token_range` is a half-open pair (start, end) of positions.
#
# | event | says |
# |---|---|
# | `request.admitted` | the request came; `token_range` is its prompt, (0, length) |
# | `request.scheduled` | this step will compute the positions in `token_range` |
# | `request.preempted` | its KV is lost and it starts anew later; what was scheduled for it earlier *in the same step* is not computed |
# | `kv.prefix_hit` | the positions in `token_range` were found in the cache |
# | `token.sampled` | one token was drawn |
#
# Every other event is of no concern; some have `request_id` or `token_range` `None`. The
# events of several requests stand mixed. A request comes before its other events. A
# position found in the cache is not computed by that. The trace may end at any step, so a
# request may wait, or have drawn nothing yet. An empty trace gives an empty dictionary.
# The list is not changed. All numbers are plain ints.
#
# *Example.* A has 20 prompt tokens. Step 1 schedules (0, 16) and step 2 (16, 20), which
# draws a token; step 3 schedules (20, 21) and draws another. So far
# `{"A": {"first_step": 1, "prefill": 20, "decode": 1, "again": 0, "cached": 0,
# "drawn": 2}}`. Now A is preempted in step 4 and scheduled in step 5: 16 tokens are found
# in the cache, (16, 22) is computed and draws a third token. Positions 16 to 20 are
# computed again, position 21 for the first time: `"decode": 2, "again": 5,
# "cached": 16, "drawn": 3`, and the rest as before.


# %% tags=["exercise"]
def life_table(events):
    """{request id: its row of six numbers}, see the table above."""
    ### BEGIN SOLUTION
    table, prompts, spans = {}, {}, {}
    for event in events:
        who = event.request_id
        if event.name == "request.admitted":
            keys = ("first_step", "prefill", "decode", "again", "cached", "drawn")
            table[who] = dict.fromkeys(keys, 0)
            prompts[who] = event.token_range[1]
            spans[who] = []
        elif event.name == "request.scheduled":
            spans[who].append((event.step, event.token_range))
        elif event.name == "request.preempted":
            spans[who] = [span for span in spans[who] if span[0] != event.step]
        elif event.name == "kv.prefix_hit":
            table[who]["cached"] += event.token_range[1] - event.token_range[0]
        elif event.name == "token.sampled":
            table[who]["drawn"] += 1
    for who, row in table.items():
        row["first_step"] = min((step for step, _ in spans[who]), default=None)
        computed = set()
        for _, (start, end) in spans[who]:
            for position in range(start, end):
                if position in computed:
                    row["again"] += 1
                elif position < prompts[who]:
                    row["prefill"] += 1
                else:
                    row["decode"] += 1
                computed.add(position)
    return table
    ### END SOLUTION


# %%
check("0.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Collect first, count later: keep a list of (step, token_range) a request. A preemption
# takes away entries of its own step; what is left at the end was computed.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Walk through the collected ranges position by position, with a set of the positions
# computed so far. Three questions in this order decide the column: computed before?
# inside the prompt? neither?
#
# </details>
#
# <details><summary>Help: I see `KeyError: None`</summary>
#
# Some events belong to the whole step and have no request: look at the event's name
# before you look for its request.
#
# </details>
#
# Your table for the book's three requests (it says so when 0.1 is not attempted). Look
# for what B saved, and compare with the timeline of the lecture.

# %%
if __name__ == "__main__":  # not when the grader reads this file
    try:
        for name, row in life_table(example.run().events).items():
            print(name, row)
    except NotImplementedError:
        print("0.1 is not attempted")
