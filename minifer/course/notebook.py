"""The set-up cell of a lecture: what must hold before its first line runs."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import warnings
import zlib

from minifer.kernels.mode import interpret_without_gpu

_NEEDS = ("IPython", "matplotlib", "ipywidgets")


def begin(lecture: str) -> None:
    """Make a notebook repeatable: seeds, one thread, short numbers, warnings as errors.

    lecture: its id, "L04"; a seed of its own. Prints nothing and may run twice. A warning that the
    notebook or minifer cause becomes an error; one inside another package is shown as usual, so
    that a newer version of it does not end the lecture. Raises `ImportError` with the command that
    helps when a package of the extra `course` is missing, `ValueError` for another id.
    """
    if not re.fullmatch(r"L\d\d", lecture):
        raise ValueError(f'lecture must be an id like "L04", got {lecture!r}')
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'{lecture} needs {", ".join(missing)}: run  pip install "minifer[course]"  (in a '
            'clone  pip install -e ".[course]"), restart the kernel and run this cell again'
        )
    interpret_without_gpu()  # before anything imports triton
    import numpy
    import torch

    seed(lecture)
    torch.set_num_threads(1)  # one thread adds numbers in one order
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=88)
    numpy.set_printoptions(precision=4, suppress=True, linewidth=88)
    if "ipykernel" in sys.modules:  # Jupyter, VS Code, Colab: cells are the module __main__
        warnings.filterwarnings("error", module=r"(__main__|minifer)(\.|$)")


def seed(name: str) -> None:
    """Seed Python's, numpy's and torch's generators from a name: "L04", or a section of it."""
    import numpy
    import torch

    number = zlib.crc32(name.encode())
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
