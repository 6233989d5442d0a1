"""The command line: `minifer pull | generate | chat | trace | serve | bench | …`.

Each command is a file with `add` (its options and help) and a function that runs it. Nothing here
imports torch before a command needs it: `minifer --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from minifer.cli import (
    bench,
    book,
    chat,
    claims,
    faults,
    generate,
    grade,
    kernels,
    parcae,
    pull,
    serve,
    sim,
    trace,
)
from minifer.cli.parser import Parser
from minifer.kernels.mode import interpret_without_gpu

DESCRIPTION = """\
An inference textbook whose examples are a real engine. A prompt becomes text in five stages,
one package each: scheduling, KV look-up, prefill, decode, post-processing.
"""
EPILOG = """\
first contact:
  minifer pull                                          fetch a small chat model, once
  minifer generate "What is the capital of France?"     ask it
  minifer chat                                          talk to it
  minifer trace "Hello" --request 0                     see what the engine did to every token
  minifer serve                                         answer browsers and OpenAI clients

`minifer COMMAND --help` explains a command and names the code behind it. Exit status: 0, 1 for a
failure, 2 for bad usage, 130 when interrupted, 143 when told to end. MINIFER_DEBUG=1 shows the
traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, as the help's last lines list them.

    argv: arguments without the program's name. None: those of this process, which is then ours to
    set up.
    """
    if argv is None:
        _start_process()
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        arguments = parser.parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe shows up here, not in the interpreter's last breath
        return status
    except SystemExit as end:  # argparse has printed a help text or the version; or SIGTERM
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1
    except Exception as error:
        if os.environ.get("MINIFER_DEBUG") == "1":
            traceback.print_exc()
        print(f"minifer: error: {_sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="minifer", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        pull,
        generate,
        chat,
        trace,
        serve,
        bench,
        faults,
        kernels,
        parcae,
        sim,
        claims,
        book,
        grade,
    ):
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for: that costs as much as all the rest."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from minifer import __version__

        print(f"minifer {__version__}")
        parser.exit()


def _start_process() -> None:
    interpret_without_gpu()
    # By default SIGTERM ends this process alone, on the spot: those it started would run on, and
    # temporary files stay. `serve` waits for open requests instead.
    signal.signal(signal.SIGTERM, _end)
    # Torch's threads spin while they wait for each other. With another program on one of the
    # cores that costs a factor of 20; sleeping at once costs a fifth on an idle machine. So spin
    # briefly, then sleep. Read by the OpenMP library (libgomp) when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # never die of an emoji
    warnings.showwarning = _show_warning


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)  # a shell's way to say which signal it was


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"minifer: warning: {message}", file=sys.stderr)


def _sentence(error: Exception) -> str:
    """An error in one line. Ours say what to do; a stranger is named."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if text and isinstance(error, (ValueError, RuntimeError)):
        return text
    named = ": ".join(part for part in (type(error).__name__, text) if part)
    return f"{named} (MINIFER_DEBUG=1 shows where)"


def _discard_output() -> None:
    """The reader has left: what is still buffered goes nowhere, in silence (Python's docs)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
