"""The set-up cell: seeds, warnings, and a loud end where something is missing."""

from __future__ import annotations

import random
import sys
import types
import warnings

import numpy
import pytest
import torch

from minifer.course import notebook
from minifer.course.notebook import begin, seed


@pytest.fixture(autouse=True)
def as_before():
    """Leave the process as it was."""
    threads, state = torch.get_num_threads(), random.getstate()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    torch.set_printoptions(profile="default")
    numpy.set_printoptions(precision=8, suppress=False, linewidth=75)
    random.setstate(state)


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


@pytest.fixture
def course_installed(monkeypatch):
    monkeypatch.setattr(notebook, "_NEEDS", ())


def test_a_lecture_begins_the_same_way_twice_in_silence(capsys, course_installed):
    begin("L04")
    first = draws()
    begin("L04")
    assert draws() == first
    begin("L05")
    assert draws() != first
    assert torch.get_num_threads() == 1
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_names_that_end_alike_have_seeds_of_their_own():
    seed("L04 blocks")
    first = draws()
    seed("L05 blocks")
    assert draws() != first


def test_a_warning_of_the_notebook_is_an_error_one_of_another_package_is_not(
    monkeypatch, course_installed
):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    warnings.simplefilter("ignore")
    begin("L04")
    code = "import warnings; warnings.warn('old')"
    exec(code, {"__name__": "other_package"})
    for module in ("__main__", "minifer.kv.manager"):
        with pytest.raises(UserWarning):
            exec(code, {"__name__": module})


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(notebook, "_NEEDS", ("matplotlib_that_is_not_there",))
    with pytest.raises(ImportError, match=r'not_there: run  pip install "minifer\[course\]"'):
        begin("L04")


def test_another_id_is_refused():
    with pytest.raises(ValueError, match="lecture must be an id like \"L04\", got '4'"):
        begin("4")
