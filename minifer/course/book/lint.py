"""The rules of a lecture, N1 to N22, checked on its built notebook. Running it is nbval's job.

A rule is a function of a `Lecture` that yields what is wrong with it. `RULES` lists them all.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minifer.course.book.builder import NBVAL_TAGS, Book
from minifer.course.book.ledger import load_ledger
from minifer.course.book.sabotage import load_sabotages

MAX_CELL_LINES, MAX_CELL_WIDTH, MAX_SETUP_LINES = 30, 88, 12
MAX_PNG_BYTES, MAX_NOTEBOOK_BYTES = 150_000, 1_500_000
CELLS, WORDS, MAX_CODE_LINES = (45, 80), (1800, 3000), 250
MIN_PICTURES, MIN_SABOTAGES, MAX_PRINTED_NUMBERS = 5, 3, 40
# Sections that ask nothing of the engine.
_QUIET = {"Where is the token now?", "Takeaways", "In real engines", "Exercises"}
_EASY = re.compile(r"(?i)\b(simply|just|obviously|of course|trivial(?:ly)?|clearly)\b")
# What is no prose: HTML tags and bare links (a "<" before a number is a sign), code.
_MARKUP = r"</?[A-Za-z][^>\n]*>|`[^`]*`"
# One spelling for each idea: the wrong one, and ours.
_SPELLINGS = {
    r"key[- ]value cache": "KV cache",
    r"pre-fill\w*": "prefill",
    r"\bKV-cache\b": "KV cache",
    r"\bflops?/s\b": "FLOP/s",
    r"\bdetokenis\w+": "detokenizer, …",
    r"\btokenis\w+": "tokenizer, …",
    r"\bback-end\b": "back end",
    r"\blookup\b": "look-up",
    r"\bkv page\w*": "block",
}


@dataclass(frozen=True)
class Problem:
    """A broken rule. where: a cell's id, or the lecture's name."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule:4} {self.where}: {self.what}"


@dataclass(frozen=True)
class Lecture:
    """A built notebook and the book it stands in. name: "L04"."""

    book: Book
    path: Path

    @property
    def name(self) -> str:
        return self.path.name[:3]

    @cached_property
    def cells(self) -> list[Any]:
        import nbformat

        return list(nbformat.read(self.path, as_version=4).cells)

    @property
    def code(self) -> list[Any]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def prose(self) -> list[Any]:
        return [cell for cell in self.cells if cell.cell_type == "markdown"]

    @cached_property
    def text(self) -> str:
        return "\n\n".join(cell.source for cell in self.prose)

    def outputs(self, *kinds: str) -> Iterator[tuple[str, Any]]:
        """(cell id, output) of the code cells of these kinds; all kinds without any."""
        for cell in self.code:
            if not kinds or set(kinds) & set(_tags(cell)):
                yield from ((cell.id, output) for output in cell.outputs)

    def sections(self) -> dict[str, list[Any]]:
        """Heading → the code cells below it."""
        found: dict[str, list[Any]] = {}
        heading = ""
        for cell in self.cells:
            if cell.cell_type == "markdown":
                heading = (re.findall(r"(?m)^## (.+)$", cell.source) or [heading])[-1]
            else:
                found.setdefault(heading, []).append(cell)
        return found


def lint(book: Book, name: str = "L") -> list[Problem]:
    """All problems of the lectures whose name begins so.

    Raises `ValueError` when there is no such notebook.
    """
    paths = sorted(book.lectures.glob(f"{name}*.ipynb"))
    if not paths:
        raise ValueError(f"no built notebook begins with {name!r} in {book.lectures}")
    return [problem for path in paths for problem in lint_notebook(Lecture(book, path))]


def lint_notebook(lecture: Lecture) -> list[Problem]:
    """The problems of one lecture, in the order of the rules."""
    return [Problem(rule, where, what) for rule, check in RULES for where, what in check(lecture)]


Findings = Iterable[tuple[str, str]]


def _beginning(lecture: Lecture) -> Findings:
    title, life_map, setup = lecture.cells[:3]
    if not title.source.startswith(f"# {lecture.name} · ") or "minutes" not in title.source:
        yield title.id, f"the first cell is `# {lecture.name} · …`, objectives and minutes"
    if "](figures/life_map_" not in life_map.source:
        yield life_map.id, "the second cell shows where the token is: figures/life_map_….svg"
    lines = setup.source.splitlines()
    if setup.cell_type != "code" or "except ImportError" not in setup.source:
        yield setup.id, "the third cell sets up, and says what to do when minifer is missing"
    elif f'begin("{lecture.name}")' not in setup.source or len(lines) > MAX_SETUP_LINES:
        yield setup.id, f"the set-up calls begin and has at most {MAX_SETUP_LINES} lines"
    for cell in lecture.code:
        if re.search(r"(?m)^\s*[%!]", cell.source):
            yield cell.id, "no magics, no shell"


def _fragile_widgets(lecture: Lecture) -> Findings:
    bad = re.compile(r"\binteract(?:ive)?\(|\bOutput\(|clear_output|display_id|\btqdm\b|\binput\(")
    for cell in lecture.code:
        if found := bad.search(cell.source):
            yield cell.id, f"{found[0]} does not survive a strict comparison: use explore"
    calls = sum(len(re.findall(r"\bexplore\(", cell.source)) for cell in lecture.code)
    calls += sum(len(re.findall(r"\bmicroscope\(", cell.source)) for cell in lecture.code)
    if not calls:
        yield lecture.name, "a lecture has a widget, made by explore or microscope"


def _kinds(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        if len(kinds := set(NBVAL_TAGS) & set(_tags(cell))) != 1:
            yield cell.id, f"a code cell is of one kind, got {sorted(kinds)}"


def _nbval_tags(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        tags = set(_tags(cell))
        for kind, extra in NBVAL_TAGS.items():
            if kind in tags and not set(extra) <= tags:
                yield cell.id, f"a {kind} needs {extra}"
        if "measure" not in tags and "nbval-ignore-output" in tags:
            yield cell.id, "only a measure is not compared"


def _claims(lecture: Lecture) -> Findings:
    for heading, cells in lecture.sections().items():
        checked = [c for c in cells if "claim" in _tags(c) and (c.outputs or "assert" in c.source)]
        if not checked and heading not in _QUIET:
            yield cells[0].id, f"section {heading!r} has code and claims nothing"


def _asserts(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        try:
            tree = ast.parse(cell.source)
        except SyntaxError:  # a magic; N1 says so
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assert):
                continue
            test = node.test
            call = isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
            if isinstance(test, ast.Attribute | ast.Constant):
                yield cell.id, f"`{ast.unparse(node)}` can hardly fail: a call is missing?"
            elif call and test.func.id == "isinstance":  # type: ignore[attr-defined]
                yield cell.id, f"`{ast.unparse(node)}` checks a type, not a value"


def _clean(lecture: Lecture) -> Findings:
    for where, output in lecture.outputs():
        if output.output_type == "error" or output.get("name") == "stderr":
            yield where, "the stored output holds an error or a warning"


def _of_this_machine(lecture: Lecture) -> Findings:
    bad = re.compile(
        r"/(?:home|root|tmp|usr|work|Users)/|0x[0-9a-f]{6}|\b\d{4}-\d\d-\d\d\b|\btorch \d"
    )
    for where, output in lecture.outputs("claim", "picture"):
        if found := bad.search(_text_of(output)):
            yield where, f"the output names this machine or this day: {found[0]}"


def _sizes(lecture: Lecture) -> Findings:
    pictures = 0
    for where, output in lecture.outputs():
        data = output.get("data", {})
        if "image/png" in data:
            pictures += 1
            if len(data["image/png"]) * 3 / 4 > MAX_PNG_BYTES:
                yield where, f"a picture above {MAX_PNG_BYTES} bytes"
            if not output.metadata.get("image/png", {}).get("alt", "").strip():
                yield where, "a picture without alt text: use show(figure, alt=…)"
        if re.search(r"<img(?![^>]*\balt=\"[^\"]+\")", _text_of(output, "text/html")):
            yield where, "an <img> without alt text"
    pictures += len(re.findall(r"!\[[^\]]+\]\(figures/", lecture.text))
    pictures += sum("picture" in _tags(c) and "show(" not in c.source for c in lecture.code)
    if re.search(r"!\[\s*\]\(", lecture.text):
        yield lecture.name, "an image in the text without alt text"
    if pictures < MIN_PICTURES:
        yield lecture.name, f"{pictures} figures, at least {MIN_PICTURES} are wanted"
    if lecture.path.stat().st_size > MAX_NOTEBOOK_BYTES:
        yield lecture.name, f"the notebook is larger than {MAX_NOTEBOOK_BYTES} bytes"


def _short_cells(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        lines = cell.source.splitlines()
        if len(lines) > MAX_CELL_LINES or max(map(len, lines)) > MAX_CELL_WIDTH:
            yield cell.id, f"at most {MAX_CELL_LINES} lines of {MAX_CELL_WIDTH} characters"
        if "import *" in cell.source:
            yield cell.id, "no star imports"
    for before, cell in itertools.pairwise(lecture.cells):
        if "markdown" not in (before.cell_type, cell.cell_type):
            yield cell.id, "a sentence stands between two code cells"
    if lecture.cells[-1].cell_type == "code":
        yield lecture.cells[-1].id, "the last word is a sentence"


def _in_order(lecture: Lecture) -> Findings:
    for number, cell in enumerate(lecture.code, start=1):
        if cell.execution_count != number:
            yield cell.id, f"run as number {cell.execution_count}, it is the {number}th code cell"
            return


def _no_skips(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        if skipped := {"nbval-skip", "raises-exception"} & set(_tags(cell)):
            yield cell.id, f"tagged {sorted(skipped)}"


def _budget(lecture: Lecture) -> Findings:
    prose = re.sub(rf"\([^)\s]+\)|{_MARKUP}", "", lecture.text)
    words = len(re.findall(r"\w[\w'-]*", prose))
    lines = sum(bool(line.strip()) for cell in lecture.code for line in cell.source.splitlines())
    if not CELLS[0] <= len(lecture.cells) <= CELLS[1]:
        yield lecture.name, f"{len(lecture.cells)} cells, wanted {CELLS[0]} to {CELLS[1]}"
    if not WORDS[0] <= words <= WORDS[1]:
        yield lecture.name, f"{words} words, wanted {WORDS[0]} to {WORDS[1]}"
    if lines > MAX_CODE_LINES:
        yield lecture.name, f"{lines} lines of code, at most {MAX_CODE_LINES}"


def _links(lecture: Lecture) -> Findings:
    text = re.sub(r"`[^`\n]*`", "", lecture.text)
    named = dict(re.findall(r"(?m)^\[([^\]]+)\]: (\S+)$", text))
    used = set(re.findall(r"\[([\w.]+)\](?![(:\[\]])", text))
    for name in sorted(used - named.keys()):
        if "." in name or "_" in name:
            yield lecture.name, f"link [{name}] leads nowhere"
    for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *named.values()]:
        path = link.split("#")[0]
        outside = link.startswith(("https://", "http://"))
        if path and not outside and not (lecture.path.parent / path).is_file():
            yield lecture.name, f"link {link} leads to no file"


def _printing(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        if re.search(r"print\((?:set\(|\{[^:}]*\}\))", cell.source):
            yield cell.id, "a set is printed: its order is not fixed"
    for where, output in lecture.outputs("claim"):
        text = _text_of(output)
        for tensor in re.findall(r"tensor\([^)]*\)|array\([^)]*\)", text):
            if len(re.findall(r"-?\d+\.?\d*", tensor)) > MAX_PRINTED_NUMBERS:
                yield where, f"a tensor of more than {MAX_PRINTED_NUMBERS} numbers is printed"


def _words(lecture: Lecture) -> Findings:
    for cell in lecture.prose:
        text = re.sub(rf"\]\([^)]*\)|{_MARKUP}", "", cell.source)
        for found in _EASY.findall(text):
            yield cell.id, f"{found!r} tells a learner that it is easy"
        for wrong, right in _SPELLINGS.items():
            if found := re.search(wrong, text):
                yield cell.id, f"{found[0]!r} is spelled {right!r} in this book"


def _exercises(lecture: Lecture) -> Findings:
    number = int(lecture.name[1:])
    masters = lecture.book.solution_sources(f"ex{number:02d}")
    if not masters:
        yield lecture.name, f"there is no solutions/ex{number:02d}_….py"
        return
    ids = set(re.findall(r"(?m)^# ### Exercise (\d+\.\d+)", masters[0].read_text(encoding="utf-8")))
    named = set(re.findall(rf"\b({number}\.\d+)\b(?=[^\n]*\|)", _section(lecture, "Exercises")))
    if named != ids:
        yield lecture.name, f"the table names {sorted(named)}, {masters[0].name} has {sorted(ids)}"


def _palette(lecture: Lecture) -> Findings:
    bad = re.compile(
        r"[\"']#[0-9A-Fa-f]{3,8}[\"']|\bcolor=[\"']\w|\bcmap=|facecolor=[\"'](?!white)"
    )
    for cell in lecture.code:
        if found := bad.search(cell.source):
            yield cell.id, f"{found[0]}: colours come from minifer.course.figures"


def _network(lecture: Lecture) -> Findings:
    for cell in lecture.code:
        if re.search(r"\bimport (?:requests|urllib|httpx|socket)\b|\burlopen\(", cell.source):
            yield cell.id, "a lecture needs no network"


def _sabotages(lecture: Lecture) -> Findings:
    try:
        found = load_sabotages(lecture.book, lecture.name)
    except ValueError as error:
        yield lecture.name, str(error)
        return
    for sabotage in found:
        try:
            sabotage.patched()
        except ValueError as error:  # each of them: one edit of the engine can move several
            yield lecture.name, str(error)
    if len(found) < MIN_SABOTAGES:
        yield lecture.name, f"{len(found)} sabotages, at least {MIN_SABOTAGES} are wanted"


def _ending(lecture: Lecture) -> Findings:
    for heading in ("Takeaways", "Questions", "In real engines", "Exercises", "Where to read on"):
        if not re.search(rf"(?m)^## {heading}", lecture.text):
            yield lecture.name, f"the section `## {heading}` is missing"
    if (folded := lecture.text.count("<details>")) < 5:
        yield lecture.name, f"{folded} folded answers, 5 questions are wanted"


def _tags_known(lecture: Lecture) -> Findings:
    known = {
        *NBVAL_TAGS,
        *itertools.chain(*NBVAL_TAGS.values()),
        *load_ledger(lecture.book).entries,
    }
    known |= {"nbval-skip", "raises-exception"}  # N12 speaks of these
    for cell in lecture.cells:
        if unknown := set(_tags(cell)) - known:
            yield cell.id, f"tagged {sorted(unknown)}: neither a kind nor in claims.toml"


RULES: tuple[tuple[str, Callable[[Lecture], Findings]], ...] = (
    ("N1", _beginning),
    ("N2", _fragile_widgets),
    ("N3", _kinds),
    ("N4", _nbval_tags),
    ("N5", _claims),
    ("N6", _asserts),
    ("N7", _clean),
    ("N8", _of_this_machine),
    ("N9", _sizes),
    ("N10", _short_cells),
    ("N11", _in_order),
    ("N12", _no_skips),
    ("N13", _budget),
    ("N14", _links),
    ("N15", _printing),
    ("N16", _words),
    ("N17", _exercises),
    ("N18", _palette),
    ("N19", _network),
    ("N20", _sabotages),
    ("N21", _ending),
    ("N22", _tags_known),
)


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _text_of(output: Any, *formats: str) -> str:
    data = output.get("data", {})
    chosen = [data.get(name, "") for name in formats or ("text/plain", "text/html")]
    return "\n".join([output.get("text", ""), *map(str, chosen)])


def _section(lecture: Lecture, heading: str) -> str:
    found = re.search(rf"(?ms)^## {heading}$(.*?)(?=^## |\Z)", lecture.text)
    return found[1] if found else ""
