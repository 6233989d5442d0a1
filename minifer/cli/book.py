"""`minifer book`: lectures and exercises, built from their sources and checked."""

from __future__ import annotations

import argparse
from typing import Any

from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "book",
        run,
        summary="build lectures and exercises from their sources",
        about="The book's notebooks are built: lectures/src/L04_*.py is executed to "
        "lectures/L04_*.ipynb, and solutions/ex04_*.py gives the exercise without its answers.",
        examples=[
            ("book build L04 ex04", "one lecture and its exercises"),
            ("book build", "all of them"),
        ],
        code=[("minifer/course/book/builder.py", "what is built from what")],
    )
    parser.add_argument("action", choices=("build",), help="what to do")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="L04, ex04: what the name begins with"
    )


def run(arguments: argparse.Namespace) -> int:
    from minifer.course.book.builder import build_exercise, build_lecture, find_book

    book = find_book()
    for name in arguments.names or ("L", "ex"):
        sources = book.lecture_sources(name) + book.solution_sources(name)
        if not sources:
            raise ValueError(f"NAME must begin a lecture's or an exercise's name, got {name!r}")
        for source in sources:
            if source.parent == book.solutions:
                for path in build_exercise(source):
                    print(path.relative_to(book.root))
            else:
                print(build_lecture(source).relative_to(book.root))
    return 0
