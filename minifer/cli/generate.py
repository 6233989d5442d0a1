"""`minifer generate`: one prompt in, text out as it comes."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import add_command, add_model_options, sampling_fields

if TYPE_CHECKING:
    from minifer.llm import LLM
    from minifer.outputs import CompletionOutput, RequestOutput, TokenLogprobs
    from minifer.sampling_params import SamplingParams

_ONLY_IN_JSON = ("logprobs", "prompt_logprobs")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate PROMPT",
        run,
        summary="continue a prompt",
        about="Answer a prompt and print the text as it comes. A model with a chat template gets "
        "the prompt as a user's message; --raw sends the bare text to be continued, which a chat "
        "model may end at once. The default is greedy: the same question has the same answer.",
        examples=[
            ('generate "What is the capital of France?"', "ask the default model"),
            ('generate "A haiku" --temperature 0.8 --n 3', "three different answers"),
            ("generate - --raw --stop END < story.txt", "continue a text from standard input"),
            ('generate "Hi" --json --logprobs 5 | jq .usage', "everything the engine returns"),
            ('generate "Hi" --stats --block-size 32', "how long it took, with other blocks"),
        ],
        code=[
            ("minifer/llm.py", "LLM.stream: what this command calls"),
            ("minifer/engine.py", "Engine.step: the five stages of a token"),
            ("minifer/sampling_params.py", "the sampling options and their limits"),
            ("minifer/execution/sampler.py", "how a token is drawn"),
            ("minifer/postprocessing/", "how tokens become text and where it ends"),
        ],
    )
    parser.add_argument("prompt", metavar="PROMPT", help='the text; "-" reads standard input')
    session.add_prompt_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--stats", action="store_true", help="print counts and times to stderr")
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    given = sampling_fields(arguments)
    for name in _ONLY_IN_JSON:
        if name in given and not arguments.json:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has no place in plain text: add --json")
    if not given.get("detokenize", True) and not arguments.json:
        raise ValueError("--no-detokenize leaves no text to print: add --json")
    text = session.read_prompt(arguments.prompt)
    with session.open_llm(arguments) as llm:
        ids = session.encode_prompt(llm, text, raw=arguments.raw, system=arguments.system)
        params = session.choose_params(arguments, llm, len(ids))
        if arguments.json or params.n > 1:
            (output,) = llm.generate([ids], params)
            if arguments.json:
                described = describe(llm, replace(output, prompt=text))
                print(json.dumps(described, ensure_ascii=False, allow_nan=False))
            else:
                _print_all(output)
        else:
            output = print_stream(llm, ids, params)
        if arguments.stats:
            session.print_stats(llm, output)
    if (reason := session.failure(output)) is not None:
        raise RuntimeError(f"the request failed: {reason}")
    return 0


def print_stream(llm: LLM, ids: list[int], params: SamplingParams) -> RequestOutput:
    """Print an answer as it comes, and a newline; its last output comes back."""
    ended = ""
    for output in session.with_all_loops(llm.stream(ids, params)):
        for piece in output.outputs:
            print(piece.text, end="", flush=True)
            ended = piece.text[-1:] or ended
    if ended != "\n":
        print()
    return output


def _print_all(output: RequestOutput) -> None:
    for answer in output.outputs:
        print(f"--- {answer.index + 1} of {len(output.outputs)} ({answer.finish_reason})")
        print(answer.text)


# -- JSON


def describe(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """A finished request as JSON-ready data; log-probabilities of −∞ become null."""
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(answer.token_ids) for answer in output.outputs)
    described: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_describe_answer(answer) for answer in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "cached_tokens": output.num_cached_tokens,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "metrics": output.metrics.to_dict() | {"load_time": llm.load_seconds},
    }
    if output.prompt_logprobs is not None:
        described["prompt_logprobs"] = [
            None if position is None else _describe_position(position)
            for position in output.prompt_logprobs
        ]
    return described


def _describe_answer(answer: CompletionOutput) -> dict[str, Any]:
    described: dict[str, Any] = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.num_loops is not None:
        described["num_loops"] = answer.num_loops
    if answer.logprobs is not None:
        described["cumulative_logprob"] = _finite(answer.cumulative_logprob)
        described["logprobs"] = [_describe_position(position) for position in answer.logprobs]
    return described


def _describe_position(position: TokenLogprobs) -> list[dict[str, Any]]:
    """One position's tokens, in the engine's order: the chosen one first."""
    return [
        {
            "token_id": token_id,
            "token": entry.decoded_token,
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
        }
        for token_id, entry in position.items()
    ]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
