"""An engine in a process of its own: a job in, an answer out, and a reason when there is none.

`peers/__main__.py` says what job and answer look like. A fresh process for every turn: nothing that
one turn left behind, a warm cache or a fragmented heap, helps or hinders the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINES = ("minifer", "transformers", "llamacpp", "vllm", "torch-compile")
FOLDER = Path(__file__).parent / "peers"
# What our own command line sets for itself (minifer/cli/__init__.py) is not for others.
_OURS = {"GOMP_SPINCOUNT": "1000", "TRITON_INTERPRET": "1"}
_LAST_WORDS = 300  # characters of what a process said before it failed


class WorkerError(RuntimeError):
    """A process gave no answer. The text says which, and why, in one sentence."""


class MissingError(WorkerError):
    """The engine is not installed in that interpreter."""


def command_for(engine: str, python: str | Path | None = None) -> list[str]:
    """The process that runs `engine`. python: an interpreter; None: this one."""
    return [str(python or sys.executable), str(FOLDER), engine]


def environment_for(engine: str, threads: int) -> dict[str, str]:
    """As this process's, with `threads` threads, and for others without our own settings."""
    environment = dict(os.environ)
    for name, value in _OURS.items():
        if engine != "minifer" and environment.get(name) == value:
            del environment[name]
    environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def ask(
    command: Sequence[str],
    job: Mapping[str, Any],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `command` with the job on its standard input; the answer of its standard output.

    timeout: seconds. Raises `MissingError`, or `WorkerError` for a process that cannot be started,
    takes too long, fails, or answers with something else than a JSON object.
    """
    name = Path(command[0]).name + " " + command[-1]
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=timeout,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{name} took longer than {timeout:g} s (--timeout)") from None
        except OSError as error:
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from None
        log.seek(0)
        said = log.read().decode(errors="replace").split()
    words = " ".join(said)[-_LAST_WORDS:] or "it said nothing"
    if done.returncode != 0:
        raise WorkerError(f"{name} ended with status {done.returncode}: {words}")
    try:
        answer = json.loads(done.stdout.decode(errors="replace").strip().rpartition("\n")[2])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise WorkerError(f"{name} must answer with a JSON object, got {done.stdout[-80:]!r}")
    if "missing" in answer:
        raise MissingError(f"not installed ({answer['missing']})")
    return answer


def cells_of(answer: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cells of an answer by name, checked against the job: each request with all its tokens.

    Raises `WorkerError` for an answer that is not complete.
    """
    engine = answer.get("engine", "the process")
    try:
        found = {cell["name"]: cell for cell in answer["cells"]}
        for cell in job["cells"]:
            stamps = found[cell["name"]]["stamps"]
            float(found[cell["name"]]["started"])
            wanted = [request["max_tokens"] for request in cell["requests"]]
            got = [len(own) for own in stamps]
            if got != wanted:
                raise WorkerError(
                    f"{engine} must answer {cell['name']} with {sum(wanted)} tokens, got {sum(got)}"
                )
    except (KeyError, TypeError, ValueError) as error:
        raise WorkerError(f"{engine}'s answer is not complete: {error!r}") from None
    return found
