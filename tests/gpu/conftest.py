"""Tests of what runs on a GPU, twice: `cuda` there, and `cpu` in Triton's interpreter, small.

The bodies are the same, so that they are known to run before a GPU is at hand. `OUT` names the
folder for what a run leaves behind.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on the device "cuda" is marked so. The interpreter's float32 is slow here: it has
    tests of its own beside every kernel."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            if "cuda" in item.name:
                item.add_marker(pytest.mark.gpu)
            elif "cpu" in item.name and "fp32" in item.name:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run. Skips what this process cannot do: triton decides once."""
    from minifer.kernels.compat import INTERPRETED

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if (request.param == "cpu") != INTERPRETED.value:
        pytest.skip("triton compiles and interprets not in one process")
    return torch.device(request.param)


@pytest.fixture(params=["cuda"])
def gpu(request: pytest.FixtureRequest) -> torch.device:
    """For what has no meaning on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """$OUT, or a folder of the test's own."""
    return Path(os.environ.get("OUT", tmp_path))


@pytest.fixture(scope="session", autouse=True)
def where_it_ran(record_testsuite_property) -> None:
    """Date, commit, versions and device in the XML report."""
    from minifer.perf.gpu.report import environment

    found = environment()
    gpu = found["gpu"]["name"] if found["gpu"] else "no GPU"
    commit = (found["git"] or {}).get("commit") or "unknown"
    record_testsuite_property("device", gpu)
    record_testsuite_property("commit", commit)
    record_testsuite_property("started", found["started"])
    for name, version in found["versions"].items():
        record_testsuite_property(name, version)
