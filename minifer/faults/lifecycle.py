"""Faults in a request's life: admitted, preempted, resumed, aborted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

from minifer.engine import Engine
from minifer.faults.registry import Fault, github, patched
from minifer.faults.scenes import QUESTIONS, SHARED, ask, finish, written
from minifer.kv.step_input import StepInput
from minifer.outputs import RequestOutput
from minifer.request import Request
from minifer.sampling_params import SamplingParams
from minifer.scheduling.plan import SchedulePlan


@contextmanager
def one_token_is_decode(engine: Engine) -> Iterator[None]:
    """One token to compute, so it is a decode: the row goes on where its last user was."""
    prepare = engine.kv.prepare
    row_state: dict[int, tuple[int, list[int]]] = {}  # batch row → position, block table

    def faulty(plan: SchedulePlan) -> StepInput:
        step = prepare(plan)
        for row, (first, end) in enumerate(pairwise(step.query_start)):
            if end - first == 1 and step.positions[first] == 0 and row in row_state:
                step.positions[first], step.block_tables[row] = row_state[row]
                step.seq_lens[row] = step.positions[first] + 1
            row_state[row] = step.positions[end - 1], list(step.block_tables[row])
        return step

    with patched(engine.kv, prepare=faulty):
        yield


@contextmanager
def wrong_position_after_preemption(engine: Engine) -> Iterator[None]:
    """A resumed request counts the positions of its recomputed tokens from 1, not from 0."""
    prepare = engine.kv.prepare

    def faulty(plan: SchedulePlan) -> StepInput:
        step = prepare(plan)
        for entry, (first, end) in zip(plan.scheduled, pairwise(step.query_start), strict=True):
            if entry.request.num_preemptions and not entry.is_decode:
                step.positions[first:end] = range(entry.start + 1, entry.end + 1)
        return step

    with patched(engine.kv, prepare=faulty):
        yield


@contextmanager
def resumed_with_prompt_only(engine: Engine) -> Iterator[None]:
    """Preemption keeps the prompt and forgets what has been generated."""
    put_back = engine.scheduler.waiting.put_back

    def faulty(request: Request) -> None:
        del request.token_ids[request.num_prompt_tokens :]
        put_back(request)

    with patched(engine.scheduler.waiting, put_back=faulty):
        yield


@contextmanager
def double_free_on_abort(engine: Engine) -> Iterator[None]:
    """Two places clean up after a client that left; each gives the blocks back."""
    abort = engine.abort

    def faulty(request_id: str) -> RequestOutput | None:
        request = engine._requests.get(request_id)
        table = list(request.block_table) if request else []
        output = abort(request_id)
        engine.kv.pool.release(table, request_id)
        return output

    with patched(engine, abort=faulty):
        yield


@contextmanager
def end_token_ignored(engine: Engine) -> Iterator[None]:
    """The model's end tokens are not loaded with it."""
    with patched(engine, _eos_token_ids=frozenset()):
        yield


def _one_letter(engine: Engine) -> str:
    """A prompt of one token arrives while another user is served."""
    greedy = SamplingParams(temperature=0, max_tokens=48)
    engine.add_request("letter-0", SHARED + QUESTIONS[0], greedy)
    engine.add_request(
        "letter-1", "My password is swordfish. " + QUESTIONS[1], greedy.with_(max_tokens=8)
    )
    for _ in range(9):
        engine.step()
    engine.add_request("letter-2", "T", greedy)
    return written(finish(engine)["letter-2"])


def _crowded(engine: Engine) -> str:
    """More than fits: somebody is preempted and comes back."""
    outputs = ask(engine, *QUESTIONS)
    return "\n".join(written(o) for o in outputs if o.metrics.num_preemptions)


def _one_leaves(engine: Engine) -> str:
    """Two users with one beginning; one leaves; others come. What does the other user get?"""
    greedy = SamplingParams(temperature=0, max_tokens=48)
    for name, question in zip(("stays", "leaves"), QUESTIONS, strict=False):
        engine.add_request(name, SHARED + question, greedy)
    for _ in range(8):
        engine.step()
    with suppress(RuntimeError):  # a line in a server's log
        engine.abort("leaves")
    for i in range(6):
        engine.add_request(f"new-{i}", f"{i} " + SHARED + QUESTIONS[2], greedy)
    text = ""
    try:
        while engine.has_unfinished_requests:
            text = next((written(o) for o in engine.step() if o.request_id == "stays"), text)
    except RuntimeError as error:
        text += f"\n[the engine stops: {error}]"
    return text


def _to_the_end(engine: Engine) -> str:
    return written(ask(engine, QUESTIONS[2], temperature=0.8, seed=1, max_tokens=120)[0])


FAULTS = (
    Fault(
        name="one-token-is-decode",
        title="A new request of one token is taken for a decode",
        mechanism="The batch tells prefill from decode by the number of new tokens. A prompt of "
        "one token, or the last one after a prefix hit, looks like a decode: its row keeps the "
        "position and the block table of the row's last user.",
        symptom="A prompt of one letter is answered with the end of another user's conversation.",
        sources=(
            github("vllm-project/vllm", 32118, "a prompt's only token decodes on a stale state"),
            github("vllm-project/vllm", 51562, "a first chunk of one token is taken for a decode"),
        ),
        detectors=("shadow-kv", "replay", "canary"),
        inject=one_token_is_decode,
        scene=_one_letter,
    ),
    Fault(
        name="wrong-position-after-preemption",
        title="A resumed request counts its positions from 1",
        mechanism="After a preemption the request computes its tokens again, and the path that "
        "does so starts counting at the wrong place. Rotary positions are relative, so the "
        "recomputed tokens agree with each other; what is drawn after them does not.",
        symptom="Under load, and only then, replies change: fluent, and not the same as alone.",
        sources=(
            github("microsoft/onnxruntime-genai", 2354, "decode at L + 1 shifts the positions"),
            github("vllm-project/vllm-ascend", 11334, "resume takes the prompt's length"),
        ),
        detectors=("shadow-kv", "replay"),
        inject=wrong_position_after_preemption,
        scene=_crowded,
        options={"num_kv_blocks": 8},
    ),
    Fault(
        name="resumed-with-prompt-only",
        title="Preemption forgets what was generated",
        mechanism="A preempted request comes back with its prompt only. It generates its reply a "
        "second time, after the text of the first time has been sent.",
        symptom="A reply that begins again in the middle of a word.",
        sources=(
            github("vllm-project/vllm", 16832, "the output is cut when it is recomputed"),
            github("vllm-project/vllm-ascend", 11334, "resume takes the prompt's length"),
        ),
        detectors=("text-round-trip",),
        inject=resumed_with_prompt_only,
        scene=_crowded,
        options={"num_kv_blocks": 8},
    ),
    Fault(
        name="double-free-on-abort",
        title="An abort frees twice",
        mechanism="Two places clean up after a client that has left. The second one gives back "
        "blocks that are no longer its own: a prefix that it shared with a running request is "
        "free while that request still reads it, and goes to the next one who asks.",
        symptom="A user's reply changes its subject when somebody else closes a window; later the "
        "engine stops, because its books do not balance.",
        sources=(
            github("sgl-project/sglang-jax", 982, "a double free on abort"),
            github("sgl-project/sglang", 18694, "freed at its end, and freed again by preemption"),
        ),
        detectors=("pool-invariants",),
        inject=double_free_on_abort,
        scene=_one_leaves,
        options={"num_kv_blocks": 24},
    ),
    Fault(
        name="eos-ignored",
        title="The end token does not end",
        mechanism="A chat model ends its turn with a token of its own, which the model's config "
        "does not name: it stands in another file, and that file is not read.",
        symptom="After a good reply the model goes on: it invents the user's next question, and "
        "answers it, up to the length limit.",
        sources=(
            github("vllm-project/vllm", 4180, "Llama 3 ends its turn with a token of its own"),
            github("ollama/ollama", 3759, "the reply goes on after <|eot_id|>"),
        ),
        detectors=("end-token",),
        inject=end_token_ignored,
        scene=_to_the_end,
    ),
)
