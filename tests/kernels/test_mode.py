"""Where kernels run is decided once, when triton is first imported: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minifer.kernels import mode


def last_line(program: str, **environment: str) -> str:
    """What a fresh process prints at last, or dies of; TRITON_INTERPRET is not inherited."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=inherited | environment,
    )
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


PREPARE = "from minifer.kernels.mode import prepare\nprepare({!r})\n"
SHOW = "from minifer.kernels.compat import INTERPRETED\nprint(INTERPRETED.value)"


def test_on_a_cpu_the_interpreter_is_switched_on():
    assert last_line(PREPARE.format("cpu") + SHOW) == "True"


def test_too_late_names_the_remedy():
    message = last_line("import triton\n" + PREPARE.format("cpu"))
    assert message.startswith("ValueError: on a CPU, kernels run in Triton's interpreter")
    assert message.endswith(mode.REMEDY)


def test_a_gpu_wants_kernels_compiled():
    message = last_line(PREPARE.format("cuda"), TRITON_INTERPRET="1")
    assert "TRITON_INTERPRET must not be 1 for kernels on a GPU, got 1: unset it" in message


def test_a_gpu_after_the_interpreter_was_chosen_says_so():
    """This process has imported triton for its interpreter, or does it now."""
    mode.prepare("cpu")
    with pytest.raises(ValueError, match="kernels on 'cuda:1' must be compiled, and triton was"):
        mode.prepare("cuda:1")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_triton_it_says_how_to_get_it(device):
    message = last_line("import sys\nsys.modules['triton'] = None\n" + PREPARE.format(device))
    assert message.startswith("ValueError: kernels need triton, which cannot be imported")
    assert message.endswith('run `pip install "triton>=3.6"`, or use backend="torch"')


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:0"])
def test_another_kind_of_device_is_refused(device):
    with pytest.raises(ValueError, match=f'run on "cpu" or "cuda", got {device!r}'):
        mode.prepare(device)


def test_elsewhere_than_on_linux_it_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="run on Linux only, this is 'darwin'"):
        mode.prepare("cpu")


@pytest.mark.parametrize(("gpus", "expected"), [([], "1"), ([__file__], None)])
def test_at_the_start_of_a_process_the_interpreter_is_for_machines_without_a_gpu(
    gpus, expected, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(mode, "_GPU_DEVICES", tuple(gpus))
    mode.interpret_without_gpu()
    assert os.environ.get("TRITON_INTERPRET") == expected


def test_what_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(mode, "_GPU_DEVICES", ())
    mode.interpret_without_gpu()
    assert os.environ["TRITON_INTERPRET"] == "0"
