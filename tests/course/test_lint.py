"""Every lecture keeps the rules, and every rule is broken by something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupytext")
import nbformat

from minifer.course.book.builder import Book
from minifer.course.book.lint import RULES, Lecture, lint, lint_notebook
from minifer.course.book.sabotage import load_sabotages, try_sabotage

ROOT = Path(__file__).parents[2]
SPECIMEN = sorted((ROOT / "lectures").glob("L00*.ipynb"))[0]
SABOTAGES = [
    sabotage
    for path in sorted((ROOT / "lectures").glob("L*.ipynb"))
    for sabotage in load_sabotages(Book(ROOT), path.name[:3])
]


@pytest.mark.parametrize("path", sorted((ROOT / "lectures").glob("L*.ipynb")), ids=lambda p: p.stem)
def test_a_lecture_keeps_the_rules(path: Path) -> None:
    assert [str(problem) for problem in lint(Book(ROOT), path.stem)] == []


def code(notebook: Any, kind: str = "claim", number: int = 3) -> Any:
    found = [c for c in notebook.cells if c.cell_type == "code" and kind in c.metadata.tags]
    return found[number]


def prose(notebook: Any) -> Any:
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"][4]


def append(text: str, kind: str = "claim") -> Callable[[Any], None]:
    def change(notebook: Any) -> None:
        cell = code(notebook, kind, 3 if kind == "claim" else 0)
        cell.source = f"{cell.source}\n{text}"

    return change


def say(text: str) -> Callable[[Any], None]:
    def change(notebook: Any) -> None:
        prose(notebook).source += f"\n\n{text}"

    return change


def printed(text: str) -> Callable[[Any], None]:
    def change(notebook: Any) -> None:
        output = nbformat.v4.new_output("stream", text=text)
        code(notebook).outputs = [output]

    return change


def no_alt(notebook: Any) -> None:
    for output in code(notebook, "picture", 0).outputs:
        output["metadata"] = {}


def no_widget(notebook: Any) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("explore(", "view(").replace("microscope(", "view(")


def warned(notebook: Any) -> None:
    output = nbformat.v4.new_output("stream", name="stderr", text="a warning")
    code(notebook).outputs.append(output)


def untitled(notebook: Any) -> None:
    notebook.cells[0].source = "# Life"


def two_kinds(notebook: Any) -> None:
    code(notebook).metadata.tags.append("measure")


def not_compared(notebook: Any) -> None:
    code(notebook).metadata.tags.append("nbval-ignore-output")


def claims_nothing(notebook: Any) -> None:
    notebook.cells += [
        nbformat.v4.new_markdown_cell("## A section that shows"),
        nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["measure", "nbval-ignore-output"]}),
        nbformat.v4.new_markdown_cell("Seen."),
    ]


def two_in_a_row(notebook: Any) -> None:
    index = notebook.cells.index(code(notebook))
    notebook.cells.insert(index, nbformat.v4.new_code_cell("x = 1"))


def run_twice(notebook: Any) -> None:
    code(notebook).execution_count += 1


def skipped(notebook: Any) -> None:
    code(notebook).metadata.tags.append("nbval-skip")


def too_many_words(notebook: Any) -> None:
    prose(notebook).source += " word" * 4000


def too_many_words_between_signs(notebook: Any) -> None:
    """No tag: what stands between the two signs is prose."""
    prose(notebook).source += " ρ < 1" + " word" * 4000 + " so ρ > 0"


def tagged(notebook: Any) -> None:
    prose(notebook).metadata = {"tags": ["row-99"]}


def no_exercises(notebook: Any) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("0.1", "0.9")


def no_takeaways(notebook: Any) -> None:
    for cell in notebook.cells:
        cell.source = cell.source.replace("## Takeaways", "## Thoughts")


BROKEN: list[tuple[str, Callable[[Any], None]]] = [
    ("N1", untitled),
    ("N1", append("%timeit 1")),
    ("N2", append("from ipywidgets import Output; Output()")),
    ("N2", no_widget),
    ("N3", two_kinds),
    ("N4", not_compared),
    ("N5", claims_nothing),
    ("N6", append("assert [].clear")),
    ("N6", append("assert isinstance(1, int)")),
    ("N7", warned),
    ("N8", printed("/home/me/x")),
    ("N8", printed("built 2026-01-31")),
    ("N9", no_alt),
    ("N10", append("x = '" + "x" * 90 + "'")),
    ("N10", append("\n".join(["x = 1"] * 31))),
    ("N10", two_in_a_row),
    ("N11", run_twice),
    ("N12", skipped),
    ("N13", too_many_words),
    ("N13", too_many_words_between_signs),
    ("N14", say("[here](nowhere.py)")),
    ("N15", append("print({1, 2})")),
    ("N15", printed("tensor([" + ", ".join("0.1" for _ in range(50)) + "])")),
    ("N16", say("It is simply a queue.")),
    ("N16", say("The key-value cache.")),
    ("N17", no_exercises),
    ("N18", append("colour = '#ff0000'")),
    ("N19", append("import urllib.request")),
    ("N21", no_takeaways),
    ("N22", tagged),
]


def specimen(tmp_path: Path, change: Callable[[Any], None]) -> Lecture:
    """The first lecture, changed, in a book that otherwise is this one."""
    notebook = nbformat.read(SPECIMEN, as_version=4)
    change(notebook)
    tmp_path.mkdir()
    for name in ("solutions", "exercises", "minifer", "kernels", "parcae"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "lectures").mkdir()
    for name in ("figures", "results", "sabotages", "claims.toml"):
        (tmp_path / "lectures" / name).symlink_to(ROOT / "lectures" / name)
    for path in (ROOT / "lectures").glob("L*.ipynb"):
        (tmp_path / "lectures" / path.name).symlink_to(path)
    (tmp_path / "lectures" / SPECIMEN.name).unlink()
    nbformat.write(notebook, tmp_path / "lectures" / SPECIMEN.name)
    return Lecture(Book(tmp_path), tmp_path / "lectures" / SPECIMEN.name)


@pytest.mark.parametrize(("rule", "change"), BROKEN)
def test_a_broken_rule_is_found(tmp_path: Path, rule: str, change: Callable[[Any], None]) -> None:
    before = {str(problem) for problem in lint_notebook(specimen(tmp_path / "a", lambda _: None))}
    after = lint_notebook(specimen(tmp_path / "b", change))
    assert rule in {problem.rule for problem in after if str(problem) not in before}


def test_every_rule_is_tried() -> None:
    assert {rule for rule, _ in RULES} - {"N20"} == {rule for rule, _ in BROKEN}


def test_each_sabotage_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    lecture = specimen(tmp_path / "a", lambda _: None)
    folder = lecture.book.lectures / "sabotages"
    folder.unlink()
    folder.mkdir()
    entry = '[[sabotage]]\nname = "{}"\nmodule = "minifer.events"\nold = "{}"\nnew = ""\n'
    texts = {"first": "no such text", "fits": "class EventBus", "second": "import"}
    (folder / "L00.toml").write_text("".join(entry.format(*item) for item in texts.items()))
    found = [problem.what for problem in lint_notebook(lecture) if problem.rule == "N20"]
    assert [what.split("'")[1] for what in found] == ["first", "second"]


def test_no_notebook_of_that_name() -> None:
    with pytest.raises(ValueError, match="no built notebook begins with 'L77'"):
        lint(Book(ROOT), "L77")


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda s: f"{s.lecture}-{s.name}")
def test_a_lecture_notices_that_the_engine_is_broken(sabotage: Any) -> None:
    assert try_sabotage(Book(ROOT), sabotage).red
