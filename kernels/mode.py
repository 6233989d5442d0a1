"""Where Triton kernels run: compiled on a GPU, or in Triton's interpreter on a CPU.

Triton decides once, when it is first imported, from the environment variable TRITON_INTERPRET.
Importing this module imports no triton.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

REMEDY = (
    "set TRITON_INTERPRET=1 in the environment before Python starts (the `minifer` command does), "
    'or call minifer.kernels.mode.prepare("cpu") before anything imports triton'
)


_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows' Linux


def interpret_without_gpu() -> None:
    """At the start of a process: where there is no GPU, kernels will run in the interpreter."""
    if not any(Path(device).exists() for device in _GPU_DEVICES):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def prepare(device: str) -> None:
    """Make this process ready to run kernels on `device` ("cpu", "cuda", "cuda:1", …).

    On a CPU it switches the interpreter on if that is still possible. Raises `ValueError` where
    kernels cannot run on the device, saying what to do.
    """
    if sys.platform != "linux":
        raise ValueError(
            f'Triton kernels run on Linux only, this is {sys.platform!r}: use backend="torch"'
        )
    on_cpu = device.startswith("cpu")
    if not on_cpu and not device.startswith("cuda"):
        raise ValueError(
            f'Triton kernels run on "cpu" or "cuda", got {device!r}: use backend="torch"'
        )
    if "triton" not in sys.modules:
        if on_cpu:
            os.environ["TRITON_INTERPRET"] = "1"
        elif os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError("TRITON_INTERPRET must not be 1 for kernels on a GPU, got 1: unset it")
    try:
        from minifer.kernels.compat import INTERPRETED
    except ImportError as error:
        raise ValueError(
            f"kernels need triton, which cannot be imported ({error}): run `pip install "
            '"triton>=3.6"`, or use backend="torch"'
        ) from error

    if on_cpu and not INTERPRETED.value:
        raise ValueError(
            "on a CPU, kernels run in Triton's interpreter, and triton was imported without it: "
            + REMEDY
        )
    if not on_cpu and INTERPRETED.value:
        raise ValueError(
            f"kernels on {device!r} must be compiled, and triton was imported with "
            "TRITON_INTERPRET=1: unset it and start Python again"
        )
