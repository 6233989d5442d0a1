"""What the commands that run a model share: loading it, prompts, parameters, notes, statistics."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minifer.cli.parser import engine_fields, sampling_fields
from minifer.config import EngineConfig
from minifer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minifer.llm import LLM
    from minifer.outputs import RequestOutput

MAX_TOKENS = 256  # of an answer, unless --max-tokens says otherwise


def note(text: str) -> None:
    """Something a user should know, where it does not mix with the answer."""
    print(f"minifer: note: {text}", file=sys.stderr, flush=True)


@contextmanager
def open_llm(arguments: argparse.Namespace) -> Iterator[LLM]:
    """The model of the options, closed at the end. Bad options are refused before it is loaded."""
    options = engine_fields(arguments)
    EngineConfig.from_kwargs(**options)
    SamplingParams(**_with_defaults(sampling_fields(arguments)))
    with few_collections():
        from minifer.llm import LLM  # torch

        loaded = LLM(arguments.model, **options)
    with loaded as llm:
        if llm.notice:
            note(llm.notice)
        note_interpreter(options.get("backend", "torch"))
        yield llm


@contextmanager
def few_collections() -> Iterator[None]:
    """Around imports and loading, where hardly anything becomes garbage.

    Looking for it all the same takes a fifth of the time. What is there at the end stays for good,
    so once a process it is frozen: a collection that goes through all of torch's objects would
    pause a reply for a tenth of a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
        if enabled:
            gc.enable()


def note_interpreter(backend: str) -> None:
    """Once the back end has been made: tell a user who waits why."""
    if backend not in ("triton", "megakernel"):
        return
    from minifer.kernels.compat import INTERPRETED  # triton, which the back end has imported

    if INTERPRETED.value:
        note(
            f"--backend {backend} runs in Triton's interpreter here: to see that it is right, at "
            "seconds a token or more; --backend torch is fast"
        )


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": MAX_TOKENS} | given


def choose_params(
    arguments: argparse.Namespace, llm: LLM, num_prompt_tokens: int
) -> SamplingParams:
    """The options given, on top of the model's suggestions, at temperature 0.

    A default number of tokens that does not fit is lowered, and the user told; a number that was
    asked for is left to admission to refuse.
    """
    given = sampling_fields(arguments)
    room = llm.engine.limits.max_total_tokens - num_prompt_tokens
    if "max_tokens" not in given and 0 < room < MAX_TOKENS:
        note(f"max_tokens is {room}: the prompt takes the other {num_prompt_tokens}")
        given["max_tokens"] = room
    return SamplingParams(**llm.generation_defaults | _with_defaults(given))


def has_template(llm: LLM) -> bool:
    return llm.tokenizer.chat_template is not None


def encode_prompt(llm: LLM, text: str, *, raw: bool, system: str | None = None) -> list[int]:
    """Token ids of a prompt: as a conversation when the model knows how to write one."""
    if raw or not has_template(llm):
        if system is not None:
            why = "--raw sends the prompt as it is" if raw else "this model has no chat template"
            raise ValueError(f"--system needs a chat template, and {why}")
        return llm.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.tokenizer.apply_chat_template(messages)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--raw", action="store_true", help="send the prompt as it is, without chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="begin with this system message")


def read_prompt(text: str) -> str:
    """A prompt of the command line; "-" is standard input, without its last newline."""
    return sys.stdin.read().removesuffix("\n") if text == "-" else text


def failure(output: RequestOutput) -> str | None:
    """Why a request failed in the engine; None when it did not."""
    failed = (c.stop_reason for c in output.outputs if c.finish_reason == "error")
    return next((str(reason) for reason in failed), None)


def with_all_loops(outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The outputs of one streamed answer; of a loop model, each with all loops so far."""
    loops: list[int] = []
    for output in outputs:
        for piece in output.outputs:
            if piece.num_loops is not None:
                loops += piece.num_loops
                piece.num_loops = loops
        yield output


def print_stats(llm: LLM, output: RequestOutput) -> None:
    """A short table on standard error. Times as in `RequestMetrics`; speed is 1 / TPOT."""
    metrics = output.metrics
    reasons = ", ".join(dict.fromkeys(str(c.finish_reason) for c in output.outputs))
    rows = [
        ("prompt", f"{len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached"),
        ("answer", f"{metrics.num_output_tokens} tokens, finish_reason {reasons}"),
        ("load", f"{llm.load_seconds:.2f} s"),
    ]
    loops = [count for answer in output.outputs for count in answer.num_loops or ()]
    if loops:
        mean, most = sum(loops) / len(loops), max(loops)
        rows.append(("loops", f"{mean:.1f} a token, from {min(loops)} to {most}"))
    if (tiers := llm.engine.kv.tiers) is not None:
        found = ", ".join(f"{count} from {tier}" for tier, count in tiers.stats.hits.items())
        rows.append(("tiers", f"tokens loaded so far: {found}"))
    if (drafts := llm.engine.speculation_stats).num_drafts:
        right = f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens} right so far"
        rows.append(("drafts", f"{right}, {drafts.mean_acceptance_length:.1f} tokens a guess"))
    if llm.engine.guard_trips:
        trips = ", ".join(f"{guard} {count}" for guard, count in llm.engine.guard_trips.items())
        rows.append(("guards", f"alarms so far: {trips}"))
    if metrics.ttft is not None:
        rows.append(("TTFT", f"{metrics.ttft * 1e3:.1f} ms to the first token"))
    if metrics.tpot is not None:
        speed = f"{1 / metrics.tpot:.1f} tokens/s" if metrics.tpot else "too fast to measure"
        rows.append(("TPOT", f"{metrics.tpot * 1e3:.1f} ms a token after it, {speed}"))
    for name, value in rows:
        print(f"{name:8}{value}", file=sys.stderr)
