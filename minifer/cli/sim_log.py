"""`minifer sim record | fit | validate`: the real engine's log, and how near the simulator is."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.output_files import check_output
from minifer.cli.parser import (
    add_command,
    add_engine_options,
    add_model_option,
    engine_fields,
)
from minifer.cli.sim_traffic import (
    SIMULATED,
    add_traffic_options,
    check_traffic,
    open_trace,
    workload_at,
)

if TYPE_CHECKING:
    from minifer.simulation.calibration.fit import StepFit
    from minifer.simulation.calibration.validate import MetricErrors, Validation

_SHORT = "short"  # what a small model on a CPU can serve


def add_record(simulations: Any) -> None:
    parser = add_command(
        simulations,
        "record LOG",
        run_record,
        summary="serve traffic with the real engine, in real time, and keep its log",
        about="Requests come when they are due, whether the engine is free or not, with random "
        "tokens as prompts and answers of the length that the traffic says. The log holds every "
        "event of the five stages, and the engine's settings.",
        examples=[
            ("sim record log.jsonl", "60 short requests, one a second, to the default model"),
            ("sim record log.jsonl --rate 4 --requests 200", "more of them"),
            ("sim record log.jsonl --cpu-clock", "on a machine that is busy with something else"),
            ("sim record log.jsonl --trace t.jsonl --max-total-len 500", "a trace, as recorded"),
            ("sim record log.jsonl --model minifer-tiny --max-num-seqs 4", "a small engine"),
        ],
        code=[
            ("minifer/simulation/calibration/record.py", "who is admitted when"),
            ("minifer/events.py", "the events"),
        ],
        prog="minifer sim",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="file to write, JSON lines")
    group = parser.add_argument_group("traffic")
    add_traffic_options(group, _SHORT, count=60)
    group.add_argument("--rate", type=float, metavar="R", help="a second (default: its own)")
    group.add_argument(
        "--cpu-clock",
        action="store_true",
        help="count what this process computes, with one thread, and skip waits: on a CPU that "
        "others use too",
    )
    add_model_option(parser)
    add_engine_options(parser)


def run_record(arguments: argparse.Namespace) -> int:
    check_traffic(arguments, _SHORT)
    check_output("LOG", arguments.log)
    if arguments.requests is None and arguments.trace is None:
        arguments.requests = 60
    from minifer.config import EngineConfig

    config = EngineConfig.from_kwargs(model=arguments.model, **engine_fields(arguments))
    traffic = workload_at(arguments, arguments.rate, open_trace(arguments))
    with session.few_collections():
        import torch

        from minifer.engine import Engine
        from minifer.events import JSONLSink
        from minifer.simulation.calibration.record import BusyClock, record, warm_up
        from minifer.weights.resolve import load_model

        loaded = load_model(config.model, config.dtype, config.device, config.quantize)
    if loaded.notice:
        session.note(loaded.notice)
    clock: dict[str, Any] = {}
    if arguments.cpu_clock:
        torch.set_num_threads(1)
        clock["clock"] = busy = BusyClock()
    with Engine.from_loaded(loaded, config, **clock) as engine:
        warm_up(engine)
        sleep = busy.sleep if arguments.cpu_clock else time.sleep
        events = record(engine, traffic, seed=arguments.seed, sleep=sleep)
    with JSONLSink(arguments.log) as sink:
        for event in events:
            sink.write(event)
    ended = [event for event in events if event.name == "request.finished"]
    seconds = events[-1].time - events[1].time
    print(f"{arguments.log}: {len(ended)} requests in {seconds:.1f} s, {len(events)} events")
    return 0


def add_fit(simulations: Any) -> None:
    parser = add_command(
        simulations,
        "fit LOG",
        run_fit,
        summary="the prices of an engine's steps, from its log",
        about="Fit seconds = fixed + tokens + requests + contexts to the steps of a log, each with "
        "its price, and say how well that tells them. What the log cannot tell has no price: a "
        "log of short prompts says nothing of long ones.",
        examples=[
            ("sim fit log.jsonl", "prices, R² and error"),
            ("sim fit log.jsonl --json steps.json", "for `minifer sim run --steps steps.json`"),
        ],
        code=[
            ("minifer/simulation/calibration/fit.py", "the fit"),
            ("minifer/simulation/calibration/step_log.py", "what is read from a log"),
        ],
        prog="minifer sim",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="of `minifer sim record`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write prices and errors there")


def run_fit(arguments: argparse.Namespace) -> int:
    check_output("--json", arguments.json)
    from minifer.simulation.calibration.fit import fit_steps
    from minifer.simulation.calibration.step_log import read_log

    log = read_log(arguments.log)
    fit = fit_steps(log.steps, f"fitted to {arguments.log.name}")
    print(f"{arguments.log}: {len(log.steps)} steps, {log.num_failed} that did not end")
    print(fit_table(fit))
    if arguments.json:
        text = json.dumps(fit.to_dict(), indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def add_validate(simulations: Any) -> None:
    parser = add_command(
        simulations,
        "validate LOG",
        run_validate,
        summary="simulate what a log tells, and print the error of each metric",
        about="Fit the steps of a log, simulate its arrivals with the engine's own settings, and "
        "compare TTFT, TPOT and E2E of every request with the log. And again with prices from the "
        "first half of the steps, judged by the second. Exit status 1 if an error is above its "
        "aim: 25 % of TTFT, 15 % of E2E.",
        examples=[
            ("sim validate log.jsonl", "how near the simulator comes"),
            ("sim validate log.jsonl --max-num-seqs 8", "had the engine been another: far"),
        ],
        code=[
            ("minifer/simulation/calibration/validate.py", "the replay and the comparison"),
            ("minifer/simulation/calibration/fit.py", "the fit"),
        ],
        prog="minifer sim",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="of `minifer sim record`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    add_engine_options(parser, SIMULATED)


def run_validate(arguments: argparse.Namespace) -> int:
    check_output("--json", arguments.json)
    from minifer.config import EngineConfig
    from minifer.simulation.calibration.step_log import read_log
    from minifer.simulation.calibration.validate import AIMS, validate

    log = read_log(arguments.log)
    options = engine_fields(arguments)
    config: EngineConfig | None = None
    if options:
        given = {} if log.config is None else asdict(log.config)
        config = EngineConfig.from_kwargs(**{**given, **options})
    result = validate(log, config)
    left_out = f", {result.num_left_out} without an answer" if result.num_left_out else ""
    print(f"{arguments.log}: {result.num_requests} requests{left_out}, {len(log.steps)} steps")
    print(fit_table(result.fit))
    print(errors_table(result))
    if arguments.json:
        text = json.dumps(result.to_dict(), indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    for metric in result.missed:
        error, aim = result.errors[metric].mape, AIMS[metric]
        session.note(f"{metric.upper()} is {error:.1%} off, the aim is {aim:.0%}")
    return 1 if result.missed else 0


# -- tables


def fit_table(fit: StepFit) -> str:
    """Prices in milliseconds, and how well they tell the steps."""
    prefill, (_, decode) = fit.steps.prefill, fit.steps.decode[0]
    prices = {
        "per_token": (prefill.per_token, "a prompt token"),
        "per_square": (prefill.per_square, "a unit of end² − start² of a chunk"),
        "per_row": (decode.per_row, "a request that decodes"),
        "per_context": (decode.per_context, "a token of its context"),
    }
    rows = [f"  {prefill.fixed * 1e3:12.4g} ms  a step"]
    for name, (price, what) in prices.items():
        why = fit.left_out.get(name)
        shown = f"{'—':>12}     {what}: {why}" if why else f"{price * 1e3:12.4g} ms  {what}"
        rows.append(f"  {shown}")
    for size, seconds in fit.steps.decode_alone:
        what = "1 request decodes" if size == 1 else f"{size} requests decode"
        rows.append(f"  {seconds * 1e3:12.4g} ms  {what}, nothing else, but for its context")
    rows.append(f"  R² {fit.r2:.3f}, mean error of a step {fit.mape:.1%}")
    return "\n".join(rows)


def errors_table(result: Validation) -> str:
    """Each metric: mean in the log, simulated, and the mean error of a request."""
    header = f"  {'':24}{'log':>10}{'simulated':>11}{'MAPE':>8}{'bias':>9}  requests"
    rows = [header]
    for title, errors in (
        ("fitted to all steps", result.errors),
        ("first half on second", result.half_errors or {}),
    ):
        rows += [_error_row(f"{m.upper()}, {title}", e) for m, e in errors.items()]
    half = result.half_steps
    rows.append(f"  a step of the second half: mean error {half.mape:.1%}, R² {half.r2:.3f}")
    return "\n".join(rows)


def _error_row(name: str, error: MetricErrors) -> str:
    return (
        f"  {name:24}{error.real * 1e3:7.1f} ms{error.simulated * 1e3:8.1f} ms"
        f"{error.mape:8.1%}{error.bias:+9.1%}{error.count:10}"
    )
