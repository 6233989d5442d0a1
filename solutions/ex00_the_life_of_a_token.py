# %% [markdown]
# # Exercises 00 · The life of a token
#
# One exercise, 5 points, about 15 minutes. Write where it says `YOUR CODE HERE`, run the cell, then
# run the check below it. `minifer grade 0` gives the points.

# %%
from minifer.course import check, example

# %% [markdown]
# ### Exercise 0.1 - Read a request's life off its trace
#
# 5 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# *Why it matters.* When a reply is slow, the event log is where the time is found. Four numbers of it
# tell most stories.
#
# *Specification.* `summarize(events, request_id)` returns a dictionary of four ints:
#
# | key | what |
# |---|---|
# | `"first_step"` | the step in which the request is first scheduled |
# | `"num_prefill_tokens"` | tokens computed before its first token is drawn |
# | `"num_cached_tokens"` | tokens spared by prefix hits (0 when there is none) |
# | `"num_output_tokens"` | tokens drawn |
#
# `events` is a list of `Event` (fields `step`, `request_id`, `name`, `token_range`, `data`), in order.
# `request.scheduled` carries the half-open `token_range` that a step computes, `token.sampled` one drawn
# token, `kv.prefix_hit` the `token_range` that was found. Other requests' events stand between. The
# list is not changed. An id that is never scheduled raises `ValueError`.
#
# *Example.* A request of 20 prompt tokens under a budget of 16 is scheduled for [0, 16), then [16, 20),
# then a token is drawn: 20 prefill tokens.


# %% tags=["exercise"]
def summarize(events, request_id):
    """Four numbers of one request's life, see the table."""
    ### BEGIN SOLUTION
    mine = [event for event in events if event.request_id == request_id]
    scheduled = [event for event in mine if event.name == "request.scheduled"]
    if not scheduled:
        raise ValueError(f"request_id must be scheduled in events, got {request_id!r}")
    drawn = [event for event in mine if event.name == "token.sampled"]
    before = scheduled
    if drawn:
        before = [event for event in scheduled if event.step <= drawn[0].step]
    hits = [event.token_range for event in mine if event.name == "kv.prefix_hit"]
    return {
        "first_step": scheduled[0].step,
        "num_prefill_tokens": sum(
            end - start for start, end in (e.token_range for e in before)
        ),
        "num_cached_tokens": sum(end - start for start, end in hits),
        "num_output_tokens": len(drawn),
    }
    ### END SOLUTION


# %%
check("0.1")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A step may both finish the prompt and draw the first token.
#
# </details>

# %% [markdown]
# Your function on the book's three requests (needs 0.1):

# %%
### BEGIN AUTHOR
for name in example.TRIO:
    print(name, summarize(example.run().events, name))
### END AUTHOR
