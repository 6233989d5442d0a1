"""`minifer trace`: what every stage did to every token."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from minifer.cli import session
from minifer.cli.parser import add_command, add_model_options


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "trace PROMPT [PROMPT …]",
        run,
        summary="show what the engine did to every token",
        about="Run prompts in one batch and record every event of the five stages: admitted, "
        "scheduled, blocks found or allocated, forward pass, token sampled, text released or held "
        "back. The record is a timeline for ui.perfetto.dev, a table of one request's life, or "
        "plain JSON lines.",
        examples=[
            ('trace "Hello" --out trace.json', "open trace.json at https://ui.perfetto.dev"),
            ('trace "Hello" "Bye" --request 1', "the life of the second request as a table"),
            ('trace "Hello" --request 0 --token 3', "what happened to its token at position 3"),
            (
                'trace "Hello" --request 0 --microscope t.html',
                "its first drawn token, event by event",
            ),
            ('trace "Hello" --out t.json --max-num-batched-tokens 8', "see a prefill in chunks"),
        ],
        code=[
            ("minifer/events.py", "the events and where they go"),
            ("minifer/trace.py", "the timeline and the table"),
            ("minifer/course/microscope.py", "the page that steps through one token's events"),
            ("minifer/engine.py", "Engine.step: the five stages that report"),
        ],
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help='a text; "-" reads stdin')
    parser.add_argument("--out", metavar="FILE", help="write a Chrome trace")
    parser.add_argument("--jsonl", metavar="FILE", help="write every event as a line of JSON")
    parser.add_argument(
        "--request", type=int, metavar="N", help="print the life of request N, counted from 0"
    )
    parser.add_argument(
        "--token", type=int, metavar="P", help="only of its token at position P, counted from 0"
    )
    parser.add_argument(
        "--microscope",
        metavar="FILE",
        help="write a page that steps through the events of one token of --request: its token at "
        "--token, or the first it drew",
    )
    session.add_prompt_options(parser)
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    prompts = [session.read_prompt(prompt) for prompt in arguments.prompts]
    with session.open_llm(arguments) as llm, ExitStack() as files:
        from minifer.events import JSONLSink, ListSink
        from minifer.trace import ChromeTraceSink, life_of

        record = ListSink()
        sinks = llm.engine.events.sinks
        sinks.append(record)
        if arguments.out:
            num_blocks = llm.engine.kv.pool.num_blocks
            sinks.append(files.enter_context(ChromeTraceSink(arguments.out, num_blocks)))
        if arguments.jsonl:
            sinks.append(files.enter_context(JSONLSink(arguments.jsonl)))
        ids = [
            session.encode_prompt(llm, prompt, raw=arguments.raw, system=arguments.system)
            for prompt in prompts
        ]
        params = [session.choose_params(arguments, llm, len(one)) for one in ids]
        outputs = llm.generate(ids, params)
        pool = llm.engine.kv.pool.num_blocks, llm.engine.config.block_size
    for output in outputs:
        for answer in output.outputs:
            print(f"{output.request_id} ({answer.finish_reason}): {answer.text}")
    if arguments.request is not None:
        name = outputs[arguments.request].request_id
        print("\n" + life_of(record.events, name, arguments.token))
        if arguments.microscope:
            _write_page(arguments, record.events, name, *pool)
    if arguments.out:
        session.note(f"{arguments.out} holds {len(record.events)} events: ui.perfetto.dev opens it")
    return 0


def _write_page(
    arguments: argparse.Namespace, events: Any, name: str, num_blocks: int, block_size: int
) -> None:
    from minifer.course.microscope import microscope_page

    page = microscope_page(
        events, name, arguments.token, block_size=block_size, num_blocks=num_blocks
    )
    Path(arguments.microscope).write_text(page, encoding="utf-8")
    session.note(f"{arguments.microscope} steps through one token of {name}: open it in a browser")


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what would fail after the model has run."""
    if not (arguments.out or arguments.jsonl) and arguments.request is None:
        raise ValueError("nothing to show: add --out FILE, --jsonl FILE or --request N")
    number, count = arguments.request, len(arguments.prompts)
    if number is not None and not 0 <= number < count:
        raise ValueError(f"--request must be in [0, {count}) for {count} prompts, got {number}")
    if arguments.token is not None and number is None:
        raise ValueError("--token needs --request N, the request it belongs to")
    if arguments.microscope and number is None:
        raise ValueError("--microscope needs --request N, the request whose token it shows")
    files = {
        "--out": arguments.out,
        "--jsonl": arguments.jsonl,
        "--microscope": arguments.microscope,
    }
    for option, file in files.items():
        if file and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{option}: there is no folder {Path(file).parent}, make it first")
