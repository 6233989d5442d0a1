"""The grader's exam: automatic changes, trivial answers, fingerprints, and the page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from grader_book import MASTER, MUTANTS, TESTS, make_book, server

from minifer.course.book.builder import find_book
from minifer.course.grading import matrix
from minifer.course.grading.automatic import blocks_of, changes, without_author
from minifer.course.grading.exam import Exam, examine
from minifer.course.grading.mistakes import canonical, write_mistakes
from minifer.course.grading.pick import exercises_of
from minifer.course.grading.trivial import ANSWERS, trivial

ROOT = Path(__file__).parents[2]


def test_changes_touch_the_solution_alone_and_are_named_by_what_they_replace() -> None:
    found = changes(MASTER, "91.1")
    names = [change.id for change in found]
    assert "square: `if n < 0:` → `if n <= 0:`" in names
    assert "square: `total += n` → `pass`" in names
    assert "square: `for _ in range(n):` → `for _ in range(n - 1):`" in names
    assert "square: `return total` → `return None`" in names
    assert len(names) == len(set(names)) and all(name.startswith("square: ") for name in names)
    begin, end = blocks_of(MASTER)[0][1:]
    lines = MASTER.splitlines()
    for change in found:
        changed = change.text.splitlines()
        assert changed[:begin] == lines[:begin] and changed[-(len(lines) - end) :] == lines[end:]
        ast.parse(change.text)
    assert len({ast.dump(ast.parse(change.text)) for change in found}) == len(found)


@pytest.mark.parametrize(
    ("code", "new"),
    [
        ("a // b % c", {"a / b % c", "a // b // c"}),
        ("a and not b", {"a or not b", "a and b"}),
        ("(a + b) * c", {"(a - b) * c", "(a + b) + c"}),
        ("x.clone()", {"x"}),
        ("list(x)", {"x"}),
        ("f(a, b)", {"f(b, a)"}),
        ("max(a, b)", set()),
        ("zip(a, b, strict=True)", {"zip(b, a, strict=True)"}),
        ("x[a:]", {"x[a + 1:]", "x[a - 1:]"}),
        ("a == b", {"a != b"}),
        ("a in b", {"a not in b"}),
        ("True", {"False"}),
        ("g(dim=1)", {"g(dim=2)", "g(dim=0)"}),
    ],
)
def test_what_becomes_of_an_expression(code: str, new: set[str]) -> None:
    text = (
        "# ### Exercise 1.1 - X\ndef h(a, b, c, x):\n    ### BEGIN SOLUTION\n"
        f"    y = {code}\n    ### END SOLUTION\n"
    )
    found = {
        change.text.splitlines()[3].removeprefix("    y = ") for change in changes(text, "1.1")
    }
    found = {ast.unparse(ast.parse(line)) for line in found}
    assert found == {ast.unparse(ast.parse(line)) for line in new}


def test_trivial_answers_keep_the_signatures() -> None:
    for expression in ANSWERS.values():
        for exercise in ("91.1", "91.2"):
            text = trivial(without_author(MASTER), exercise, expression)
            names = {n.name for n in ast.parse(text).body if hasattr(n, "name")}
            assert {"square", "Counter"} <= names
    assert "    return n\n" in trivial(MASTER, "91.1", ANSWERS["return the first argument"])
    assert "return _zeros_like(None)" in trivial(MASTER, "91.2", ANSWERS["return zeros like it"])


def test_fingerprints_round_and_forget_orders_that_do_not_count() -> None:
    assert canonical({"b": 1, "a": [0.1 + 0.2]}) == canonical({"a": (0.3,), "b": 1})
    assert canonical({3, 1}) == canonical({1, 3})
    assert canonical(torch.tensor([1.00001])) == canonical(torch.tensor([1.0]))
    different = [1, 1.0, True, "1", None, [1], {1}, torch.tensor([1]), torch.tensor([[1]]), 1.01]
    assert len({canonical(value) for value in different}) == len(different)


def test_probes_must_tell_mistakes_apart(tmp_path: Path) -> None:
    book = make_book(tmp_path, tests=TESTS.replace("square(-1)", "square(2)"))
    with pytest.raises(ValueError, match="ex91_1_m2_sign_not_checked does what the solution does"):
        write_mistakes(book / "solutions/ex91_small.py", server())


def exam_of(name: str, **fields: object) -> Exam:
    tests = [{"name": "test_ex91_1_squares", "points": 2, "hidden": False}]
    return Exam(name, "Square", tests, 5, **fields)  # type: ignore[arg-type]


def test_the_page_keeps_what_is_not_examined_again_and_is_the_same_text_each_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results/grader_matrix.json"
    named = {
        "id": "ex91_1_m1_one_too_few",
        "diagnosis": "it misses | a term",
        "killed_by": "test_ex91_1_squares",
        "status": "must_die",
        "note": "",
        "failing": ["test_ex91_1_squares"],
    }
    data = matrix.load(path)
    first = exam_of("91.1", named=[named], automatic=10, survivors={"f: `a` → `b`": "the same"})
    matrix.merge(data, [first, exam_of("9.1")], [{"what": "x", "says": "y", "gains": "0"}])
    matrix.write(data, path)
    page = path.with_suffix(".md").read_text()
    assert "| one too few | it misses \\| a term | `ex91_1_squares` | 2 |" in page
    assert "| f: `a` → `b` | the same |" in page and page.index("## 9.1") < page.index("## 91.1")
    assert "| [91.1 Square](#911-square) | 2 | 1 | 1 of 1 | 9 of 9 |  |" in page
    assert "| **all** | 4 | 2 | 1 of 1 | 9 of 9 |  |" in page
    again = matrix.load(path)
    matrix.merge(again, [exam_of("9.1", problems=["odd"])], [])
    matrix.write(again, path)
    changed = path.with_suffix(".md").read_text()
    assert "- odd" in changed and "one too few" in changed and "| x | y | 0 |" in changed
    assert (first.rate, exam_of("1.1", automatic=10, survivors={"a": ""}).rate) == (1.0, 0.9)


@pytest.mark.slow
def test_an_exam_finds_what_is_wrong_with_tests(tmp_path: Path) -> None:
    weak = TESTS.replace("assert target.square(0) + 0 == 0\n", "pass\n")
    weak = weak.replace("[1, 2, 3]", "[0, 2]").replace('killed_by="', 'killed_by="')
    book = find_book(make_book(tmp_path, tests=weak))
    mutants = MUTANTS.replace("test_ex91_1_refuses_what_is_below_zero", "test_ex91_1_large")
    (tmp_path / "solutions/mutants/ex91.py").write_text(mutants)
    exam, other = examine(book, exercises_of(book), [1, 2])
    assert exam.trivial["raise ValueError"] == 1 and exam.trivial["return None"] == 0
    assert any("`raise ValueError` earns 1" in problem for problem in exam.problems)
    assert any("m2_sign_not_checked passes test_ex91_1_large" in p for p in exam.problems)
    assert exam.named[0]["failing"] == ["test_ex91_1_squares", "test_ex91_1_large"]
    assert exam.automatic > 10 and other.rate == 1.0 and not other.problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem[5:] for path in (ROOT / "exercises/tests").glob("test_ex*.py"))
)
def test_the_books_tests_pass_their_exam(name: str) -> None:
    book = find_book(ROOT)
    for exam in examine(book, exercises_of(book, [name]), [0, 1]):
        assert not exam.problems, (exam.exercise, exam.problems)
