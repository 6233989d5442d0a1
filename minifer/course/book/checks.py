"""`minifer book check`: what is built is what its source says, and no answer leaks.

Outputs of lectures are not compared here: nbval does that by running them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minifer.course.book import ledger_page, syllabus
from minifer.course.book.builder import Book, exercise_files, lecture_notebook
from minifer.course.book.exercises import solution_blocks, stub_of
from minifer.course.grading.mistakes import mistakes_file
from minifer.course.grading.mutants import load_mutants

_NGRAM = 16  # tokens of a solution in a row that no exercise may hold
_ENGINE = re.compile(r"^\s*# engine: (?P<module>[\w.]+):(?P<function>[\w.]+)\s*$", re.MULTILINE)


def check(book: Book) -> list[str]:
    """Everything that is out of step, a sentence each; an empty list when all is well."""
    return [
        *_lectures(book),
        *_exercises(book),
        *_strangers(book),
        *_leaks(book),
        *_signatures(book),
        *_promoted(book),
        *_mutants(book),
        *ledger_page.problems(book),
        *syllabus.problems(book),
    ]


def _lectures(book: Book) -> Iterator[str]:
    import nbformat

    for source in book.lecture_sources():
        path = book.lectures / f"{source.stem}.ipynb"
        if not path.is_file():
            yield f"{path.name} is not built: minifer book build {source.name[:3]}"
            continue
        built, expected = nbformat.read(path, as_version=4), lecture_notebook(source)
        same = _content(built.cells) == _content(expected.cells)
        if not same or built.metadata != expected.metadata:
            yield f"{path.name} is not what its source says: minifer book build {source.name[:3]}"
        if b"\r" in path.read_bytes():
            yield f"{path.name} has Windows line ends"


def _content(cells: Any) -> list[tuple[Any, ...]]:
    return [(c.id, c.cell_type, c.source, dict(c.metadata)) for c in cells]


def _exercises(book: Book) -> Iterator[str]:
    for master in book.solution_sources():
        build = f"minifer book build {master.name[:4]}"
        for path, text in exercise_files(book, master).items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                yield f"{path.name} is not what {master.name} says: {build}"


def _strangers(book: Book) -> Iterator[str]:
    """Built files without a source, and tests or mutants without a master."""
    lectures = {source.stem for source in book.lecture_sources()}
    masters = {source.stem for source in book.solution_sources()}
    numbers = {stem[:4] for stem in masters}
    for path in book.lectures.glob("*.ipynb"):
        if path.stem not in lectures:
            yield f"lectures/{path.name} has no source in lectures/src"
    for folder in (book.exercises, book.solutions):
        for path in [*folder.glob("ex*.py"), *folder.glob("ex*.ipynb")]:
            if path.stem not in masters:
                yield f"{folder.name}/{path.name} has no master in solutions"
    for path in book.exercises.glob("mutants*"):
        yield f"{path.name}: mutants live in solutions/mutants"
    tests = {path.stem[5:] for path in (book.exercises / "tests").glob("test_ex*.py")}
    for number in sorted(tests ^ numbers):
        yield f"{number}: a master and exercises/tests/test_{number}.py belong together"


def _leaks(book: Book) -> Iterator[str]:
    """Runs of a solution's tokens in anything that is handed out."""
    handed_out = [*book.exercises.rglob("*.py"), *book.exercises.rglob("*.ipynb")]
    texts = {path: _words(path.read_text(encoding="utf-8")) for path in handed_out}
    shown = {path: _words(path.read_text(encoding="utf-8")) for path in book.lecture_sources()}
    for master in book.solution_sources():
        public = _grams(_words(stub_of(master.read_text(encoding="utf-8"), master.stem)))
        for exercise, block in solution_blocks(master.read_text(encoding="utf-8"), master.stem):
            secret = _grams(_words(block)) - public
            for path, words in (texts | shown).items():
                if found := secret & _grams(words):
                    line = " ".join(min(found))
                    yield f"{path.name} holds part of the solution of {exercise}: {line}"


def _words(code: str) -> list[str]:
    """Names, numbers and operators of a text, comments and layout left out."""
    return re.findall(r"\w+|[^\w\s]", re.sub(r"#[^\n]*", "", code.replace('\\"', '"')))


def _grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)}


def _signatures(book: Book) -> Iterator[str]:
    """Stub and solution agree in every public name, parameter, default and annotation."""
    for master in book.solution_sources():
        stub = book.exercises / master.name
        if not stub.is_file():
            continue
        ours, theirs = _interface(master), _interface(stub)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield f"{master.name}: {name} is {ours.get(name)}, in the stub {theirs.get(name)}"


def _interface(path: Path) -> dict[str, str]:
    """Qualified name → parameters, of what a file defines at its top and in its classes."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef) and not _private(node.name):
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                found[prefix + node.name] = f"({ast.unparse(node.args)}){returns}"
            elif isinstance(node, ast.ClassDef) and not _private(node.name):
                found[prefix + node.name] = ", ".join(map(ast.unparse, node.bases))
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def _promoted(book: Book) -> Iterator[str]:
    """Functions that a master says are the engine's own: `# engine: minifer.module:function`."""
    for master in book.solution_sources():
        text = master.read_text(encoding="utf-8")
        functions = {
            node.name: node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
        }
        for mark in _ENGINE.finditer(text):
            name = mark["function"].split(".")[-1]
            if name not in functions:
                yield f"{master.name}: no function {name}, though it is marked as the engine's"
                continue
            owner: Any = importlib.import_module(mark["module"])
            for part in mark["function"].split("."):
                owner = getattr(owner, part)
            engine = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
            if _bare(functions[name]) != _bare(engine):
                yield f"{master.name}: {name} differs from {mark['module']}:{mark['function']}"


def _bare(node: ast.stmt) -> str:
    """A function's parameters and body, without docstring, annotations and decorators."""
    assert isinstance(node, ast.FunctionDef)
    body = node.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    names = [argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
    return "\n".join([", ".join(names), *map(ast.unparse, body)])


def _mutants(book: Book) -> Iterator[str]:
    """Every known mistake still fits its master; ids are unique; the killing test exists; the
    grader knows each by its fingerprint."""
    seen: set[str] = set()
    for master in book.solution_sources():
        number = master.name[:4]
        tests = book.exercises / "tests" / f"test_{number}.py"
        names = tests.read_text(encoding="utf-8") if tests.is_file() else ""
        text = master.read_text(encoding="utf-8")
        mutants = load_mutants(book.solutions / "mutants" / f"{number}.py")
        told = {mutant.id: mutant.diagnosis for mutant in mutants if mutant.status == "must_die"}
        if told != _fingerprinted(mistakes_file(tests)):
            yield f"{number}: the grader knows other mistakes: minifer book build {number}"
        for mutant in mutants:
            try:
                mutant.apply(text)
            except ValueError as error:
                yield f"{number}: {error}"
            if mutant.id in seen:
                yield f"{number}: {mutant.id} occurs twice"
            seen.add(mutant.id)
            if mutant.killed_by and f"def {mutant.killed_by}(" not in names:
                yield f"{number}: {mutant.id} is killed by {mutant.killed_by}, which does not exist"
            if mutant.status == "equivalent" and not mutant.note:
                yield f"{number}: {mutant.id} is equivalent without a reason"


def _fingerprinted(path: Path) -> dict[str, str]:
    """Id → diagnosis of the mistakes in a built file."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {entry["id"]: entry["diagnosis"] for listed in entries.values() for entry in listed}
