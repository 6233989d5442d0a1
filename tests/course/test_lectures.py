"""The notebooks beside their sources. Their outputs are compared by nbval, not here."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
import nbformat

LECTURES = Path(__file__).parents[2] / "lectures"
SOURCES = sorted((LECTURES / "src").glob("*.py"))
KINDS = {"claim", "measure", "picture"}
each_lecture = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def load_builder() -> ModuleType:
    """`lectures/build.py` as a module; it is not part of the package."""
    spec = importlib.util.spec_from_file_location("build_lectures", LECTURES / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(source: Path) -> Any:
    return nbformat.read(LECTURES / f"{source.stem}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[tuple[str, Any]]:
    return [(cell.id, output) for cell in code_cells(notebook) for output in cell.outputs]


def test_every_notebook_has_a_source_and_the_first_is_there() -> None:
    names = {source.stem for source in SOURCES}
    assert {notebook.stem for notebook in LECTURES.glob("*.ipynb")} == names
    assert "L00_the_life_of_a_token" in names


@each_lecture
def test_the_notebook_is_built_from_its_source(source: Path) -> None:
    """After an edit of the source: `python lectures/build.py`."""
    expected, notebook = load_builder().notebook_of(source), built(source)

    def content(cells: Any) -> list[tuple[Any, ...]]:
        return [(c.id, c.cell_type, c.source, dict(c.metadata)) for c in cells]

    assert content(notebook.cells) == content(expected.cells)
    assert notebook.metadata == expected.metadata
    text = (LECTURES / f"{source.stem}.ipynb").read_bytes()
    assert b"\r" not in text and text.endswith(b"}\n")


def test_a_cell_of_no_kind_or_of_two_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "L99_bad.py"
    for tags in ("", ' tags=["claim", "picture"]'):
        source.write_text(f"# %%{tags}\nprint(1)\n", encoding="utf-8")
        with pytest.raises(ValueError, match="L99-c01 must have one tag"):
            load_builder().notebook_of(source)


@each_lecture
def test_every_code_cell_is_of_one_kind_and_nbval_knows_it(source: Path) -> None:
    for cell in code_cells(built(source)):
        (kind,) = KINDS & set(cell.metadata.tags)
        assert ("nbval-ignore-output" in cell.metadata.tags) == (kind == "measure"), cell.id
        assert ("nbval-check-output" in cell.metadata.tags) == (kind == "claim"), cell.id
        assert not {"raises-exception", "nbval-skip"} & set(cell.metadata.tags), cell.id


@each_lecture
def test_all_cells_have_run_in_order_and_none_failed_or_warned(source: Path) -> None:
    notebook = built(source)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell_id, output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr", cell_id


@each_lecture
def test_outputs_say_nothing_about_the_machine_and_pictures_have_alt_text(source: Path) -> None:
    notebook = built(source)
    pictures = 0
    for cell_id, output in outputs(notebook):
        text = output.get("text") or output.data.get("text/plain", "")
        assert not re.search(r"/(home|root|tmp|usr|work)/|0x[0-9a-f]{6}", text), cell_id
        if "image/png" in output.get("data", {}):
            pictures += 1
            assert output.metadata["image/png"]["alt"] == text, cell_id
            assert len(output.data["image/png"]) < 200_000, cell_id  # base64 of 150 KB
    assert pictures == sum("picture" in cell.metadata.tags for cell in code_cells(notebook))


@each_lecture
def test_the_claims_are_checked_by_something(source: Path) -> None:
    """A compared output or an assert in every section that has code, and in most claims."""
    sections: dict[str, bool] = {}
    heading = ""
    for cell in built(source).cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"(?m)^## (.+)$", cell.source) or [heading])[-1]
        else:
            checks = bool(cell.outputs) and "claim" in cell.metadata.tags
            sections[heading] = sections.get(heading, False) or checks or "assert" in cell.source
    unchecked = {heading for heading, checked in sections.items() if not checked}
    assert unchecked <= {"Where is the token now?", "The whole life of one token"}


@each_lecture
def test_links_lead_to_files_of_the_repository(source: Path) -> None:
    text = "\n".join(cell.source for cell in built(source).cells if cell.cell_type == "markdown")
    text = re.sub(r"`[^`\n]*`", "", text)
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    named = dict(re.findall(r"(?m)^\[([^\]]+)\]: (\S+)$", text))
    used = set(re.findall(r"\[([\w.]+)\](?![(:\]])", text))
    assert used <= named.keys()
    local = [link for link in [*inline, *named.values()] if not link.startswith("https://")]
    assert local
    for link in local:
        assert (LECTURES / link).is_file(), link


@each_lecture
def test_cells_are_short_and_a_sentence_stands_between_two(source: Path) -> None:
    cells = built(source).cells
    for before, cell in itertools.pairwise(cells):
        assert "markdown" in (before.cell_type, cell.cell_type), cell.id
    for cell in code_cells(built(source)):
        lines = cell.source.splitlines()
        assert len(lines) <= 30 and max(map(len, lines)) <= 88, cell.id


@each_lecture
def test_no_word_that_tells_a_learner_it_is_easy(source: Path) -> None:
    text = " ".join(cell.source for cell in built(source).cells if cell.cell_type == "markdown")
    assert not re.findall(r"(?i)\b(simply|just|obviously|of course|trivial(?:ly)?)\b", text)
