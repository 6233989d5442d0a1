"""`minifer book`: lectures and exercises, built from their sources and checked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.parser import add_command

if TYPE_CHECKING:
    from minifer.course.book.builder import Book


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "book ACTION",
        lambda arguments: 2,  # argparse asks for an action before this is called
        summary="build lectures and exercises from their sources, and check them",
        about="The book's notebooks are built: lectures/src/L04_*.py is executed to "
        "lectures/L04_*.ipynb, and solutions/ex04_*.py gives the exercises without their answers. "
        "Run it in a clone of minifer.",
        examples=[
            ("book build L04 ex04", "one lecture and its exercises"),
            ("book check", "all that is built is what its source says"),
            ("book lint L04", "the rules a lecture keeps"),
            ("book sabotage L04", "break the engine: the lecture must notice"),
        ],
        code=[
            ("minifer/course/book/builder.py", "what is built from what"),
            ("minifer/course/book/lint.py", "the rules"),
            ("minifer/course/book/sabotage.py", "how a lecture is put to the test"),
        ],
    )
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, prog="minifer book"
    )
    build = add_command(
        actions,
        "build",
        _build,
        summary="execute lectures, strip solutions",
        about="Writes notebooks, stubs, and the fingerprints by which the grader knows mistakes. A "
        "cell that fails or warns ends it, and so do two mistakes that no probe tells apart.",
        examples=[("book build", "the whole book")],
        code=[("minifer/course/book/builder.py", "what is built from what")],
    )
    build.add_argument("names", nargs="*", metavar="NAME", help="L04, ex04: how a name begins")
    add_command(
        actions,
        "check",
        _check,
        summary="compare what is built with its sources; look for leaked answers",
        about="Exit status 1 when a notebook or a stub is not what its source says, when part of a "
        "solution stands where learners read, when stub and solution have other parameters, or "
        "when a known mistake no longer fits. Lectures are not run: pytest does that.",
        examples=[("book check", "nothing is printed but the verdict when all is well")],
        code=[("minifer/course/book/checks.py", "what is compared")],
    )
    lint = add_command(
        actions,
        "lint",
        _lint,
        summary="the rules a lecture keeps",
        about="Exit status 1 when a rule is broken.",
        examples=[("book lint L04", "one lecture")],
        code=[("minifer/course/book/lint.py", "the rules")],
    )
    lint.add_argument("names", nargs="*", metavar="NAME", help="L04: how a name begins")
    add_command(
        actions,
        "pages",
        _pages,
        summary="write the claim ledger and the instructors' tables",
        about="CLAIMS.md comes from lectures/claims.toml and the tags of cells, the tables of "
        "INSTRUCTORS.md from the headings of lectures and exercises.",
        examples=[("book pages", "after a lecture or an exercise was built")],
        code=[
            ("minifer/course/book/ledger.py", "rows, corrections and their cells"),
            ("minifer/course/book/syllabus.py", "points and minutes"),
        ],
    )
    site = add_command(
        actions,
        "site",
        _site,
        summary="make a website of the book",
        about="Sphinx makes pages of the committed notebooks, of exercises, reference and results: "
        "nothing is run, nothing fetched, and a warning is an error. Needs the extra docs.",
        examples=[("book site", "then open lectures/site/index.html")],
        code=[("minifer/course/site/build.py", "what becomes a page")],
    )
    site.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to, a folder of its own (default: lectures/site)",
    )
    sabotage = add_command(
        actions,
        "sabotage",
        _sabotage,
        summary="break the engine, and see each lecture turn red",
        about="Runs lectures strictly on an engine that is broken in one place, in memory. Exit "
        "status 1 when one stays green: it would not notice.",
        examples=[
            ("book sabotage L04", "all of one lecture"),
            ("book sabotage --turn 3/28", "those whose turn it is"),
            ("book sabotage --out lectures/results/sabotage.md", "all, as a table"),
        ],
        code=[("minifer/course/book/sabotage.py", "how the engine is broken")],
    )
    sabotage.add_argument("names", nargs="*", metavar="NAME", help="L04: how a name begins")
    sabotage.add_argument(
        "--turn",
        type=_turn,
        metavar="K/N",
        help="every N-th sabotage, beginning with number K mod N",
    )
    sabotage.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")


def _turn(text: str) -> tuple[int, int]:
    turn, _, turns = text.partition("/")
    if not (turn.isdecimal() and turns.isdecimal() and int(turns) > 0):
        raise argparse.ArgumentTypeError(f"must look like 3/28, got {text!r}")
    return int(turn) % int(turns), int(turns)


def _find() -> Book:
    from minifer.course.book.builder import find_book

    return find_book()


def _build(arguments: argparse.Namespace) -> int:
    from minifer.course.book.builder import build_exercise, build_lecture
    from minifer.course.grading.mistakes import write_mistakes

    book = _find()
    for name in arguments.names or ("L", "ex"):
        masters = book.solution_sources(name)
        sources = book.lecture_sources(name)
        if not masters and not sources:
            raise ValueError(f"NAME must begin a lecture's or an exercise's name, got {name!r}")
        for source in sources:
            print(build_lecture(source).relative_to(book.root), flush=True)
        for master in masters:
            for path in [*build_exercise(master), write_mistakes(master)]:
                print(path.relative_to(book.root), flush=True)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from minifer.course.book.checks import check

    problems = check(_find())
    print("\n".join(problems) or "every built file is what its source says; nothing leaks")
    return 1 if problems else 0


def _lint(arguments: argparse.Namespace) -> int:
    from minifer.course.book.lint import lint

    book = _find()
    problems = [problem for name in arguments.names or ["L"] for problem in lint(book, name)]
    print("\n".join(map(str, problems)) or "every rule is kept")
    return 1 if problems else 0


def _pages(arguments: argparse.Namespace) -> int:
    from minifer.course.book import ledger_page, syllabus

    book = _find()
    for path in (ledger_page.write_page(book), syllabus.write_tables(book)):
        print(path.relative_to(book.root))
    return 0


def _site(arguments: argparse.Namespace) -> int:
    from minifer.course.site.build import build_site

    book = _find()
    out = arguments.out or book.lectures / "site"
    print(f"{build_site(book, out)} pages, begin with {out / 'index.html'}")
    return 0


def _sabotage(arguments: argparse.Namespace) -> int:
    from minifer.course.book.sabotage import load_sabotages, table, try_sabotage

    book = _find()
    stems = [path.stem[:3] for name in arguments.names or ["L"] for path in _notebooks(book, name)]
    chosen = [sabotage for stem in stems for sabotage in load_sabotages(book, stem)]
    if arguments.turn:
        turn, turns = arguments.turn
        chosen = chosen[turn::turns]
    verdicts = []
    for sabotage in chosen:
        verdicts.append(try_sabotage(book, sabotage))
        print(table(verdicts).splitlines()[-1], flush=True)
    green = [verdict for verdict in verdicts if not verdict.red]
    print(f"{len(verdicts) - len(green)} of {len(verdicts)} sabotages turn their lecture red")
    if arguments.out:
        arguments.out.write_text(table(verdicts), encoding="utf-8", newline="\n")
    return 1 if green else 0


def _notebooks(book: Book, name: str) -> list[Path]:
    found = sorted(book.lectures.glob(f"{name}*.ipynb"))
    if not found:
        raise ValueError(f"NAME must begin a lecture's name, got {name!r}")
    return found
