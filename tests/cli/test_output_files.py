"""A file that cannot be written is refused before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from minifer.cli.output_files import PICTURES, check_output, save_figure


def test_a_file_that_can_be_written_passes(tmp_path: Path) -> None:
    check_output("--plot", None, PICTURES)
    for name in ("a.png", "a.svg", "a.pdf"):
        check_output("--plot", tmp_path / name, PICTURES)
    check_output("--json", str(tmp_path / "anything"))


@pytest.mark.parametrize(
    ("file", "endings", "why"),
    [
        ("x.gif", PICTURES, r"--plot must end in \.png, \.svg or \.pdf, got x\.gif"),
        ("x.gif", (".json",), r"--plot must end in \.json, got x\.gif"),
        ("nowhere/x.png", PICTURES, "--plot: there is no folder nowhere, make it first"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    file: str, endings: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        check_output("--plot", file, endings)


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_output("--json", tmp_path / "x.json")
    with pytest.raises(ValueError, match=r'needs matplotlib: pip install "minifer\[course\]"'):
        check_output("--plot", tmp_path / "x.svg", PICTURES)


@pytest.mark.parametrize("ending", PICTURES)
def test_the_same_figure_is_the_same_bytes(tmp_path: Path, ending: str) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "same"}):
        for name in ("a", "b"):
            figure = figures.Figure(figsize=(1, 1))
            figure.add_subplot().plot([0, 1])
            save_figure(figure, tmp_path / f"{name}{ending}")
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
