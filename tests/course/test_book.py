"""The builder: sources become notebooks and stubs, and whatever is out of step is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("nbclient")
import nbformat

from minifer.course.book.builder import (
    Book,
    build_exercise,
    build_lecture,
    exercise_files,
    find_book,
    lecture_notebook,
)
from minifer.course.book.checks import check
from minifer.course.book.exercises import solution_blocks, stub_of
from minifer.course.book.sabotage import Sabotage, install, load_sabotages

ROOT = Path(__file__).parents[2]

MASTER = '''\
# %% [markdown]
# ### Exercise 4.2 - Sum a list

# %% tags=["exercise"]
def total(numbers: list[int], start: int = 0) -> int:
    """The sum."""
    ### BEGIN SOLUTION
    result = start
    for number in numbers:
        result += number * 1 + 0 * len(numbers)
    return result
    ### END SOLUTION


# %%
### BEGIN AUTHOR
print(total([1, 2, 3]))
### END AUTHOR
'''
MUTANTS = """\
from minifer.course.grading.mutants import Mutant

MUTANTS = [Mutant("ex04_2_m1", "4.2", "result = start", "result = 0", "start counts", "test_sum")]
"""
LECTURE = '# %% [markdown]\n# # L04 · Sums\n\n# %% tags=["claim"]\nprint(1 + 1)\n'


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """A book of one lecture and one exercise, built, with nothing out of step."""
    book = Book(tmp_path)
    for folder in ("lectures/src", "exercises/tests", "solutions/mutants"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lectures/src/L04_sums.py").write_text(LECTURE)
    (tmp_path / "solutions/ex04_sums.py").write_text(MASTER)
    (tmp_path / "solutions/mutants/ex04.py").write_text(MUTANTS)
    (tmp_path / "exercises/tests/test_ex04.py").write_text("def test_sum(target): ...\n")
    (tmp_path / "exercises/tests/mistakes").mkdir()
    known = {"4.2": [{"id": "ex04_2_m1", "diagnosis": "start counts", "fingerprint": "0"}]}
    (tmp_path / "exercises/tests/mistakes/ex04.json").write_text(json.dumps(known))
    build_exercise(tmp_path / "solutions/ex04_sums.py")
    notebook = lecture_notebook(tmp_path / "lectures/src/L04_sums.py")
    nbformat.write(notebook, tmp_path / "lectures/L04_sums.ipynb")
    return book


def test_this_book_is_built_from_its_sources_and_leaks_nothing() -> None:
    """After an edit of a source: `minifer book build NAME`."""
    assert check(Book(ROOT)) == []


def test_a_book_in_step_has_no_problems_and_is_found_from_within(book: Book) -> None:
    assert check(book) == []
    assert find_book(book.exercises / "tests") == book
    with pytest.raises(ValueError, match="no exercises/tests in"):
        find_book(Path("/"))


def test_a_stub_says_which_exercise_is_not_attempted_and_holds_no_author_cell() -> None:
    stub = stub_of(MASTER, "ex04_sums")
    assert "result" not in stub and "print" not in stub
    assert '    # YOUR CODE HERE\n    raise NotImplementedError("ex4.2")\n' in stub
    namespace: dict[str, object] = {}
    exec(compile(stub, "stub", "exec"), namespace)
    with pytest.raises(NotImplementedError, match=r"^ex4\.2$"):
        namespace["total"]([1])  # type: ignore[operator]
    assert [exercise for exercise, _ in solution_blocks(MASTER, "ex04_sums")] == ["4.2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("### BEGIN SOLUTION\n### END SOLUTION\n", "no `### Exercise"),
        ("# ### Exercise 1.1 - x\n### BEGIN SOLUTION\n", "never closed"),
        ("### END AUTHOR\n", "the open block is None"),
        ("### BEGIN AUTHOR\n### BEGIN AUTHOR\n", "a block of kind AUTHOR is open"),
        ("### BEGIN SECRET\n", "kind must be one of"),
    ],
)
def test_markers_that_do_not_fit_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        stub_of(text, "ex01_x")
    assert "ex01_x.py" in str(caught.value)


def test_two_builds_give_the_same_bytes_and_the_solution_shows_no_markers(book: Book) -> None:
    master = book.solutions / "ex04_sums.py"
    assert exercise_files(book, master) == exercise_files(book, master)
    solution = nbformat.read(book.solutions / "ex04_sums.ipynb", as_version=4)
    assert not any("### BEGIN" in cell.source for cell in solution.cells)
    assert [cell.id for cell in solution.cells] == ["ex04-c001", "ex04-c002", "ex04-c003"]
    assert all(not cell.get("outputs") for cell in solution.cells)


def test_a_cell_of_no_kind_or_of_two_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "L99_bad.py"
    for tags in ("", ' tags=["claim", "picture"]'):
        source.write_text(f"# %%{tags}\nprint(1)\n", encoding="utf-8")
        with pytest.raises(ValueError, match="L99-c001 must have one tag"):
            lecture_notebook(source)


def test_a_lecture_is_executed_without_network_and_must_not_warn(book: Book) -> None:
    source = book.lectures / "src/L04_sums.py"
    reach_out = (
        "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), timeout=1)\n"
        "except OSError as error:\n    print(error)\n"
    )
    source.write_text(LECTURE + f'\n# %% tags=["claim"]\n{reach_out}')
    notebook = nbformat.read(build_lecture(source), as_version=4)
    printed = [cell.outputs[0].text for cell in notebook.cells if cell.cell_type == "code"]
    assert printed == ["2\n", "a lecture needs no network, but connects to 192.0.2.1\n"]
    assert "version" not in notebook.metadata.language_info
    source.write_text(LECTURE + '\n# %% tags=["claim"]\nimport sys\nprint("!", file=sys.stderr)\n')
    with pytest.raises(ValueError, match="L04-c003 wrote to stderr: !"):
        build_lecture(source)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "old", "new", "problem"),
    [
        ("lectures/src/L04_sums.py", "1 + 1", "1 + 2", "L04_sums.ipynb is not what its source"),
        ("exercises/ex04_sums.py", "The sum", "A sum", "ex04_sums.py is not what ex04_sums.py"),
        ("solutions/ex04_sums.ipynb", "Sum a list", "Sum", "ex04_sums.ipynb is not what"),
        ("exercises/ex04_sums.py", "start: int = 0", "start: int", "total is (numbers"),
        ("solutions/mutants/ex04.py", "result = start", "gone", "`old` occurs 0 times"),
        ("solutions/mutants/ex04.py", "start counts", "count it", "grader knows other mistakes"),
        ("solutions/mutants/ex04.py", '"test_sum"', '"test_no"', "killed by test_no, which does"),
        (
            "exercises/tests/test_ex04.py",
            "...",
            "\n    result = start\n    for number in numbers:\n"
            "        result += number * 1 + 0 * len(numbers)",
            "test_ex04.py holds part of the solution of 4.2",
        ),
        (
            "solutions/ex04_sums.py",
            "    ### BEGIN SOLUTION",
            "    # engine: minifer.perf.costs:attended_pairs\n    ### BEGIN SOLUTION",
            "no function attended_pairs, though it is marked",
        ),
    ],
)
def test_what_is_out_of_step_is_named(
    book: Book, path: str, old: str, new: str, problem: str
) -> None:
    edit(book.root / path, old, new)
    assert any(problem in found for found in check(book)), check(book)


def test_files_without_a_source_are_named(book: Book) -> None:
    shutil.copy(book.exercises / "ex04_sums.py", book.exercises / "ex05_old.py")
    shutil.copy(book.lectures / "L04_sums.ipynb", book.lectures / "L05_old.ipynb")
    (book.exercises / "tests/test_ex06.py").write_text("")
    found = "\n".join(check(book))
    assert "exercises/ex05_old.py has no master" in found
    assert "lectures/L05_old.ipynb has no source" in found
    assert "ex06: a master and exercises/tests/test_ex06.py belong together" in found


def test_a_solution_that_claims_to_be_the_engines_must_be_it(book: Book) -> None:
    master = book.solutions / "ex04_sums.py"
    edit(master, "def total", "def kv_bytes_per_token")
    edit(
        master,
        "    ### BEGIN",
        "    # engine: minifer.perf.costs:kv_bytes_per_token\n    ### BEGIN",
    )
    problems = "\n".join(check(book))
    assert "kv_bytes_per_token differs from minifer.perf.costs:kv_bytes_per_token" in problems


def test_a_sabotage_changes_the_module_in_memory_only() -> None:
    code = (
        "from minifer.course.book.sabotage import install\n"
        "install('minifer.perf.rare_events', '\"\"\"', '\"\"\"', )\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "import minifer.perf.rare_events"],
        capture_output=True,
        text=True,
    )
    assert "the text to change occurs" in done.stderr
    code = (
        "from minifer.course.book.sabotage import install\n"
        "install('minifer.events', 'STAGES = (', 'STAGES = (\"zero\", ')\n"
        "from minifer.events import STAGES; print(STAGES[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "zero\n", done.stderr
    with pytest.raises(RuntimeError, match="imported already"):
        install("minifer.course.book.sabotage", "a", "b")


def test_a_sabotage_that_no_longer_fits_is_refused(book: Book) -> None:
    assert (
        "STAGES = (1, "
        in Sabotage("L04", "x", "minifer.events", "STAGES = (", "STAGES = (1, ").patched()
    )
    for old in ("no such text", "import"):
        with pytest.raises(ValueError, match=r"must occur once in minifer\.events"):
            Sabotage("L04", "x", "minifer.events", old, "y").patched()
    folder = book.lectures / "sabotages"
    folder.mkdir()
    (folder / "L04.toml").write_text('[[sabotage]]\nname = "x"\n')
    with pytest.raises(ValueError, match=r"L04.toml: keys must be"):
        load_sabotages(book, "L04")
    assert load_sabotages(book, "L05") == []
