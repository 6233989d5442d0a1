"""`minifer serve`: the engine behind HTTP, for OpenAI's clients and for a browser."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import serve_disaggregated, serve_ray, serve_replicas, session
from minifer.cli.output_files import check_output
from minifer.cli.parser import add_command, add_engine_options, add_model_option, engine_fields
from minifer.config import EngineConfig
from minifer.serving.settings import KEY_VARIABLE, ServerSettings

if TYPE_CHECKING:
    from minifer.async_llm import AsyncLLM
    from minifer.serving.disaggregation.worker import KVWorker

LIMITS = {  # fields of `ServerSettings` that are options: what stands for a value, and its help
    "max_queue": ("N", "prompts that may be open before a client gets a 429"),
    "max_prompts": ("N", "prompts of one request"),
    "max_body_bytes": ("N", "bytes of one request"),
    "max_logprobs": ("N", "largest logprobs a request may ask for; -1: no limit"),
    "shutdown_timeout": ("S", "seconds that open requests may go on at the end"),
}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        summary="serve a model over HTTP, as OpenAI's API",
        about="Load a model once and answer many clients in one batch. Routes: "
        "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, "
        "/health_generate, /metrics (Prometheus), /version, /events (what the engine does to a "
        "request, live), and a chat page at /. A field that is not implemented is an error, "
        "never ignored. SIGTERM or Ctrl-C finishes what is running, a second one cuts it short.",
        examples=[
            ("serve", "open http://127.0.0.1:8000 in a browser and chat"),
            ("serve --model minifer-tiny --port 0", "the bundled model, on any free port"),
            ("serve --host 0.0.0.0", f"for other machines; put a key into {KEY_VARIABLE} first"),
            ("serve --max-num-seqs 16 --num-kv-blocks 512", "a small engine, to see it queue"),
            ("serve --replicas 2", "two engines, and a router that knows what each has cached"),
            ("serve --disaggregate 1:1", "one engine computes prompts, another answers"),
            ("serve --ray --min-replicas 1 --max-replicas 4", "as many as the load asks for"),
        ],
        code=[
            ("minifer/serving/app.py", "the routes"),
            ("minifer/serving/fields.py", "what a request may say"),
            ("minifer/serving/streaming.py", "tokens on their way, and clients that leave"),
            ("minifer/async_llm.py", "one engine thread, any number of callers"),
            ("minifer/serving/replicas/", "several engines, and the router before them"),
            ("minifer/serving/disaggregation/", "prompts here, answers there"),
            ("minifer/serving/ray_serve/", "the same on the nodes of a Ray cluster"),
        ],
    )
    add_model_option(parser)
    group = parser.add_argument_group("server")
    add_option = group.add_argument
    add_option("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add_option("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add_option(
        "--api-key",
        metavar="KEY",
        help=f"clients must send it; better in {KEY_VARIABLE}, where other users do not see it",
    )
    add_option("--served-model-name", metavar="NAME", help="what clients call the model")
    for name, (metavar, text) in LIMITS.items():
        default = getattr(ServerSettings, name)
        add_option(
            "--" + name.replace("_", "-"),
            metavar=metavar,
            type=type(default),
            default=argparse.SUPPRESS,
            help=f"{text} (default: {default:.10g})",
        )
    add_option(
        "--events",
        type=Path,
        metavar="FILE",
        help="write down what the engine does, for `minifer sim fit` and `validate`: JSON lines",
    )
    add_option(
        "--exit-with-stdin",
        action="store_true",
        help="end when standard input is closed: for whoever starts servers, and may die",
    )
    serve_replicas.add_options(parser)
    serve_ray.add_options(parser)
    serve_disaggregated.add_options(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = EngineConfig.from_kwargs(model=arguments.model, **engine_fields(arguments))
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be in [0, 65536), got {arguments.port}")
    check_output("--events", arguments.events)
    serve_replicas.check(arguments)
    serve_ray.check(arguments)
    config = serve_disaggregated.check(arguments, config)
    try:
        from minifer.serving.run import bind, end_with_stdin, is_public, listen, url_of
        from minifer.serving.run import run as serve
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f'`minifer serve` needs {str(error.name).split(".")[0]}: pip install "minifer[server]"'
        ) from error
    given = {f.name: getattr(arguments, f.name, None) for f in fields(ServerSettings)}
    if arguments.api_key is None:  # an empty one is refused: it was meant to be a key
        given["api_key"] = os.environ.get(KEY_VARIABLE)
    settings = ServerSettings(**{name: value for name, value in given.items() if value is not None})
    if is_public(arguments.host) and settings.api_key is None:
        print(
            f"minifer: warning: {arguments.host} is reachable from other machines and there is no "
            f"API key: anybody may use this server (--api-key or {KEY_VARIABLE})",
            file=sys.stderr,
        )
    if arguments.exit_with_stdin:
        end_with_stdin(settings.shutdown_timeout)
    if arguments.ray:
        return serve_ray.run(arguments, config, settings)
    if arguments.replicas is not None:
        return serve_replicas.run(arguments, config, settings)
    if arguments.disaggregate is not None:
        return serve_disaggregated.run(arguments, config, settings)
    with bind(arguments.host, arguments.port) as listener:
        llm, settings, worker = _load(arguments, config, settings)
        with _event_log(llm, arguments.events), llm:
            listen(listener)
            print_welcome(url_of(listener), settings)
            serve(llm, settings, listener, worker)
    return 0


def _load(
    arguments: argparse.Namespace, config: EngineConfig, settings: ServerSettings
) -> tuple[AsyncLLM, ServerSettings, KVWorker | None]:
    """The engine, settings that name its model, and its part in disaggregation."""
    with session.few_collections():
        from minifer.assembly import load
        from minifer.async_llm import AsyncLLM
        from minifer.engine import Engine

        loaded = load(config)
        llm = AsyncLLM(engine=Engine.from_loaded(loaded, config))
    if loaded.notice:
        session.note(loaded.notice)
    session.note_interpreter(config.backend)
    try:
        worker = serve_disaggregated.make_worker(arguments, llm, loaded)
    except BaseException:
        llm.close()
        raise
    return llm, with_model_name(settings, config, loaded.path), worker


@contextmanager
def _event_log(llm: AsyncLLM, file: Path | None) -> Iterator[None]:
    """While the engine runs, what it does goes into a file that begins with its settings."""
    if file is None:
        yield
        return
    from minifer.events import JSONLSink
    from minifer.simulation.calibration.record import config_event

    with JSONLSink(file) as sink:
        sink.write(config_event(llm.engine))
        llm.post(lambda engine: engine.events.sinks.append(sink))
        yield


def with_model_name(settings: ServerSettings, config: EngineConfig, path: Path) -> ServerSettings:
    """Settings that name the model: as it was asked for, else by its folder."""
    from minifer.weights.resolve import model_label

    if settings.served_model_name is not None:
        return settings
    return replace(settings, served_model_name=model_label(config.model, path))


def print_welcome(url: str, settings: ServerSettings) -> None:
    key = "-H 'Authorization: Bearer KEY' " if settings.api_key else ""
    # Greedy: at OpenAI's default temperature of 1 a small model writes nonsense.
    question = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"temperature": 0, "messages": [{question}]}}'
    print(
        f"minifer serves {settings.served_model_name} at {url}\n"
        f"  browser  {url}/\n"
        f'  openai   OpenAI(base_url="{url}/v1", api_key="…")\n'
        f"  curl     curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d '{body}'",
        flush=True,
    )
