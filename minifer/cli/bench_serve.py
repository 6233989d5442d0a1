"""`minifer bench serve`: a server under load."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.output_files import PICTURES, check_output
from minifer.cli.parser import (
    Parser,
    add_command,
    add_engine_options,
    engine_arguments,
    engine_fields,
)
from minifer.cli.serve import KEY_VARIABLE
from minifer.config import EngineConfig

if TYPE_CHECKING:
    from minifer.perf.load.benchmark import ServeBenchmark
    from minifer.perf.load.traces import Trace
    from minifer.perf.load.workload import Workload

_CONCURRENCY = 8  # of the closed loop that is run when nothing else is asked for
_WORKLOAD: Mapping[str, Any] = {  # option → default; what a trace decides itself
    "input_len": "128",
    "output_len": "32",
    "prefix_groups": 0,
    "prefix_len": 0,
    "turns": 1,
    "think_time": "0",
    "request_rate": None,
    "burstiness": 1.0,
    "max_concurrency": None,
}
_TRACE: Mapping[str, Any] = {"trace_jitter": 0.0, "speed_up": 1.0, "max_total_len": None}


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "serve",
        run,
        summary="a server under load",
        about="Send requests to an OpenAI-compatible server and report throughput, time to first "
        "token (TTFT), time per output token (TPOT), inter-token latency (ITL) and goodput. "
        "Without --base-url a `minifer serve` is started for it and stopped afterwards. An open "
        "loop (--request-rate, --trace) sends each request when it is due, however many are in "
        "flight, and counts time from then; a closed loop (--max-concurrency) waits for a client "
        "to be free.",
        examples=[
            ("bench serve", "8 clients ask the default model 64 times"),
            ("bench serve --request-rate 2 --slo ttft=0.5 tpot=0.05", "Poisson arrivals, goodput"),
            ("bench serve --prefix-groups 4 --prefix-len 512", "prompts that share beginnings"),
            ("bench serve --endpoint chat --turns 5", "conversations, with the model's answers"),
            ("bench serve --trace trace.jsonl --speed-up 10", "replay a recorded trace"),
            ("bench serve --base-url http://host:8000 --out r.json --plot r.png", "any server"),
        ],
        code=[
            ("minifer/perf/load/workload.py", "what is sent"),
            ("minifer/perf/load/traces.py", "the trace formats"),
            ("minifer/perf/load/generator.py", "when it is sent: open and closed loop"),
            ("minifer/perf/load/metrics.py", "what each number means"),
        ],
        prog="minifer bench",
    )
    _add_server_options(parser)
    _add_workload_options(parser)
    _add_run_options(parser)
    add_engine_options(parser)


def _add_server_options(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--base-url", metavar="URL", help="a running server, such as http://127.0.0.1:8000")
    add("--api-key", metavar="KEY", help=f"for --base-url; better in {KEY_VARIABLE}")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions: prompts of token ids, exact lengths; chat: texts of about that length",
    )
    add(
        "--model",
        metavar="NAME",
        help="model to serve (default: what `minifer pull` fetched), or to ask a running server "
        "for (default: its first)",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="V",
        help="draw token ids below V (default: the ids that the server's /tokenize gives words)",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="per request (default: 600)")


def _add_workload_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "workload",
        "A session is one request, or with --turns a conversation of several. A LENGTH is N,\n"
        "uniform:MIN:MAX or lognormal:MU:SIGMA:MAX.",
    )
    add = group.add_argument
    add("--num-prompts", type=int, metavar="N", help="sessions to send (default: 64; a trace: all)")
    add("--input-len", metavar="LENGTH", help="of prompts, in tokens (default: 128)")
    add("--output-len", metavar="LENGTH", help="of answers (default: 32)")
    add("--prefix-groups", type=int, metavar="G", help="shared beginnings (default: 0)")
    add("--prefix-len", type=int, metavar="N", help="tokens of each (default: 0)")
    add("--turns", type=int, metavar="K", help="requests of a session (default: 1)")
    add("--think-time", metavar="LENGTH", help="seconds before a further turn (default: 0)")
    add("--request-rate", type=float, metavar="R", help="open loop: sessions/s; inf: all at once")
    add("--burstiness", type=float, metavar="K", help="1: Poisson; less: in bursts (default: 1)")
    add("--max-concurrency", type=int, metavar="C", help="closed loop of C clients (default: 8)")
    add("--trace", metavar="FILE", help="of minifer, Mooncake, Bailian, Azure or BurstGPT")
    add("--trace-jitter", type=float, metavar="S", help="spread equal times over S seconds")
    add("--speed-up", type=float, metavar="X", help="replay X seconds of the trace in one")
    add("--max-total-len", type=int, metavar="N", help="leave out what is longer than this in all")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the full length; a server that knows only OpenAI's fields needs "
        "--no-ignore-eos (default: yes)",
    )
    add("--extra-body", metavar="JSON", help="further fields of each request's body")


def _add_run_options(parser: Parser) -> None:
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    add("--runs", type=int, default=1, metavar="N", help="repeat with the next seeds (default: 1)")
    add("--warmup", type=int, default=1, metavar="N", help="sessions not counted (default: 1)")
    add("--slo", nargs="+", default=[], metavar="NAME=S", help="limits: ttft, tpot, e2e, max_itl")
    add(
        "--out",
        "--json",
        dest="out",
        metavar="FILE",
        help="write everything as JSON, each request too",
    )
    add("--plot", metavar="FILE", help="draw the last run (PNG, SVG or PDF)")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    _fill_in(arguments)
    bench = _benchmark(arguments)
    from minifer.perf.load.benchmark import bench_serve
    from minifer.perf.load.report import table
    from minifer.perf.load.spawn import spawned_server

    with ExitStack() as stack:
        settings: dict[str, Any] = {"trace_file": arguments.trace}
        url = arguments.base_url
        if url is None:
            options = engine_fields(arguments)
            settings["engine"] = {name: str(value) for name, value in options.items()}
            session.note("starting a server")
            url = stack.enter_context(spawned_server(engine_arguments(arguments.model, options)))
            import torch  # noqa: F401 - so that the result names the accelerator it ran on
        session.note(f"sending requests to {url}")
        result, runs = bench_serve(bench, url, settings=settings)
    print(table(result, runs, bench.slo))
    if arguments.out:
        result.write(arguments.out)
    if arguments.plot:
        from minifer.perf.load.plot import save_plot

        save_plot(arguments.plot, runs[-1], title=_title(arguments, bench), slo=bench.slo)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse before a server is started what would fail after it has run."""
    options = engine_fields(arguments)
    if arguments.base_url is None:
        if arguments.api_key is not None:
            raise ValueError("--api-key needs --base-url: a server of our own has no key")
        EngineConfig.from_kwargs(**options)
    elif options:
        flag = "--" + next(iter(options)).replace("_", "-")
        raise ValueError(f"{flag} is for a server that this command starts, not for --base-url")
    others, why = (_TRACE, "it needs --trace")
    if arguments.trace:
        others, why = _WORKLOAD, "the trace decides"
    for name in others:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no place here: {why}")
    if arguments.burstiness is not None and arguments.request_rate is None:
        raise ValueError("--burstiness needs --request-rate: a closed loop has no arrivals")
    check_output("--out", arguments.out)
    check_output("--plot", arguments.plot, PICTURES)


def _fill_in(arguments: argparse.Namespace) -> None:
    """Defaults of what was not given; with a loop of some kind asked for, no other."""
    for name, default in {**_WORKLOAD, **_TRACE}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.request_rate is None and not arguments.trace and arguments.max_concurrency is None:
        arguments.max_concurrency = _CONCURRENCY


def _benchmark(arguments: argparse.Namespace) -> ServeBenchmark:
    try:
        import httpx  # noqa: F401 - one sentence instead of a traceback
    except ImportError:
        raise RuntimeError('a load test needs httpx: pip install "minifer[server]"') from None
    from minifer.perf.load.benchmark import ServeBenchmark
    from minifer.perf.load.metrics import parse_slo

    extra = {"temperature": 0.0} | ({"ignore_eos": True} if arguments.ignore_eos else {})
    return ServeBenchmark(
        _trace(arguments) if arguments.trace else _workload(arguments),
        endpoint=arguments.endpoint,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        speed_up=arguments.speed_up,
        seed=arguments.seed,
        runs=arguments.runs,
        warmup=arguments.warmup,
        model=arguments.model if arguments.base_url else None,
        api_key=arguments.api_key or (os.environ.get(KEY_VARIABLE) if arguments.base_url else None),
        vocab_size=arguments.vocab_size,
        timeout=arguments.timeout,
        slo=parse_slo(arguments.slo),
        extra=extra | _json_object(arguments.extra_body),
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    from minifer.perf.load.workload import Distribution, Workload

    return Workload(
        64 if arguments.num_prompts is None else arguments.num_prompts,
        Distribution.parse(arguments.input_len),
        Distribution.parse(arguments.output_len),
        arguments.prefix_groups,
        arguments.prefix_len,
        arguments.turns,
        Distribution.parse(arguments.think_time),
    )


def _trace(arguments: argparse.Namespace) -> Trace:
    from minifer.perf.load.traces import load_trace

    trace = load_trace(arguments.trace).select(arguments.num_prompts, arguments.max_total_len)
    if arguments.trace_jitter:
        trace = trace.spread(arguments.trace_jitter, arguments.seed)
    for count, what in (
        (trace.num_failed, "are failed requests and left out"),
        (trace.num_unsorted, "stood behind a later one; they are sorted"),
        (trace.num_too_long, f"are longer than {arguments.max_total_len} and left out"),
    ):
        if count:
            session.note(f"{count} rows of {arguments.trace} {what}")
    return trace


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"--extra-body must be a JSON object, got {text!r}")
    return fields


def _title(arguments: argparse.Namespace, bench: ServeBenchmark) -> str:
    what = arguments.model or arguments.base_url or "the default model"
    if arguments.trace:
        load = f"{Path(arguments.trace).name} at {bench.speed_up:g}× its speed"
    elif bench.request_rate is not None:
        load = f"open loop, {bench.request_rate:g} requests/s, burstiness {bench.burstiness:g}"
    else:
        load = f"closed loop, {bench.max_concurrency} clients"
    lengths = "" if arguments.trace else f", {arguments.input_len} → {arguments.output_len} tokens"
    return f"{what}: {load}{lengths}, seed {bench.seed}"
