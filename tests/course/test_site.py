"""The site: a small book becomes pages without a warning, and what a page needs is there."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path

import nbformat
import pytest

from minifer.course.book.builder import Book
from minifer.course.site.build import NEEDS, build_site
from minifer.course.site.places import Places, modules_of
from minifer.course.site.reference import imported, to_rst

ROOT = Path(__file__).parents[2]
# myst-parser asks Sphinx for something that will be gone in two versions.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS),
    reason='needs the extra docs: pip install -e ".[docs]" -c constraints.txt',
)
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LECTURE = """\
# L04 · Sums

See [events.py](../minifer/events.py), the [folder](../minifer), a [test](../tests/test_x.py),
the [exercises](../exercises/ex04_sums.py), and [block_pool.py].

![A picture](figures/life.svg)

$$\\frac{B\\,\\beta}{W}$$

<details><summary>Answer</summary>

Two.

</details>

[block_pool.py]: ../minifer/kv/block_pool.py
"""
CLAIMS = (
    '# The claim ledger\n\n<a id="row-1"></a>**1.** Says. [L04-c002](L04_sums.ipynb#L04-c002)\n\n'
    '| | it |\n|---|---|\n| <a id="correction-1"></a>1 | [1](#row-1), see [1](#correction-1) |\n'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("book")
    for folder in ("lectures/figures", "lectures/results", "exercises/tests", "minifer/kv"):
        (root / folder).mkdir(parents=True)
    for name in ("events.py", "kv/__init__.py", "kv/block_pool.py"):
        (root / "minifer" / name).write_text((ROOT / "minifer" / name).read_text())
    (root / "minifer/__init__.py").write_text('"""Python."""\n')
    lecture = nbformat.v4.new_notebook()
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": PIXEL, "text/plain": "words"},
        metadata={"image/png": {"alt": "One dark pixel"}},
    )  # fmt: skip
    widget = nbformat.v4.new_output(
        "display_data",
        {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "In a notebook, <sliders>"},
    )
    twin = nbformat.v4.new_output("display_data", {"text/html": "<p>The static twin</p>"})
    lecture.cells = [
        nbformat.v4.new_markdown_cell(LECTURE),
        nbformat.v4.new_code_cell(
            "from minifer.kv import block_pool", metadata={"tags": ["picture", "row-1"]},
            outputs=[picture, twin, widget], execution_count=1,
        ),
    ]  # fmt: skip
    lecture.cells[1].id = "L04-c002"
    nbformat.write(lecture, root / "lectures/L04_sums.ipynb")
    exercise = nbformat.v4.new_notebook()
    exercise.cells = [
        nbformat.v4.new_markdown_cell("# Exercises 04 · Sums"),
        nbformat.v4.new_markdown_cell("### Exercise 4.1 - Add\n\n4 points"),
    ]
    nbformat.write(exercise, root / "exercises/ex04_sums.ipynb")
    (root / "lectures/CLAIMS.md").write_text(CLAIMS)
    (root / "lectures/figures/life.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (root / "lectures/results/speed.md").write_text("# Speed\n\nFast.\n")
    (root / "lectures/results/speed.json").write_text(
        '{"command": "minifer bench", "started": "2026-11-30T08:00:00", "machine": {"cpu": "X"}}'
    )
    build_site(Book(root), root / "site")
    return root / "site"


@needs_sphinx
def test_a_lecture_keeps_its_pictures_words_links_and_formulas(site: Path) -> None:
    text = (site / "lectures/L04_sums.html").read_text()
    assert 'alt="One dark pixel"' in text and base64.b64decode(PIXEL) in {
        path.read_bytes() for path in (site / "_images").glob("*.png")
    }
    assert "<p>The static twin</p>" in text
    assert '<p class="still">In a notebook, &lt;sliders&gt;</p>' in text
    assert 'href="../reference/minifer.html#module-minifer.events"' in text
    assert 'href="../reference/minifer.kv.html#module-minifer.kv.block_pool"' in text
    assert 'href="../exercises/ex04_sums.html"' in text
    assert "a test," in text and "test_x.py" not in text
    assert "<mfrac>" in text and "MathJax" not in text
    assert 'alt="A picture"' in text and "<details><summary>Answer</summary>" in text
    assert 'id="cell-l04-c002"' in text and "tag_picture" in text


@needs_sphinx
def test_the_ledger_leads_to_cells_and_rows(site: Path) -> None:
    text = (site / "lectures/CLAIMS.html").read_text()
    assert 'href="L04_sums.html#cell-l04-c002"' in text
    assert 'id="row-1"' in text and 'href="#row-1"' in text and 'href="#correction-1"' in text


@needs_sphinx
def test_the_reference_names_the_lectures_that_use_a_module(site: Path) -> None:
    text = (site / "reference/minifer.kv.html").read_text()
    assert 'href="../lectures/L04_sums.html"' in text and "BlockPool" in text
    assert (site / "_modules/minifer/kv/block_pool.html").is_file()


@needs_sphinx
def test_results_have_a_date_and_a_machine_and_nothing_is_fetched(site: Path) -> None:
    text = (site / "numbers.html").read_text()
    assert ">bench<" in text and "<td><p>2026-11-30</p></td>" in text
    assert "H100-SXM" in text and "PagedAttention" not in text
    for path in site.rglob("*.html"):
        for tag in ('<script src="http', '<link rel="stylesheet" href="http', "@import"):
            assert tag not in path.read_text(), path
    assert (site / "searchindex.js").read_text().startswith("Search.setIndex")


@needs_sphinx
def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="--out must be empty or an earlier site"):
        build_site(Book(ROOT), tmp_path)


def test_docstrings_become_restructured_text() -> None:
    plain = ["Two *stars*, `code`s and a_ name.", "", "- one", "  more", "- two", "", "So::", "",
             "    x = 1", "", "| a | b |", "", "Raises:", "    ValueError"]  # fmt: skip
    text = "\n".join(to_rst(plain))
    assert text.startswith("\\ Two \\*stars\\*, \\ ``code``\\ s and a\\_ name.")
    assert "\n- \\ one more\n- \\ two\n" in text
    assert "\\ So\\:" in text and "::\n\n       x = 1" in text and "::\n\n   | a | b |" in text


def test_names_that_a_package_passes_on_count_for_their_own_module() -> None:
    assert imported("from minifer import LLM\nimport minifer.events") == [
        "minifer.llm", "minifer.events",
    ]  # fmt: skip
    assert imported("from minifer.kv import block_pool") == ["minifer.kv.block_pool"]


def test_modules_are_named_as_they_are_imported() -> None:
    names = set(modules_of(ROOT, ["minifer.cli"]).values())
    assert {"minifer", "minifer.engine", "minifer.kernels.mega.isa", "minifer.parcae"} <= names
    assert not any(name.startswith("minifer.cli") for name in names)


def test_a_link_to_what_is_no_page_becomes_plain_text() -> None:
    places = Places(Path("/r"), {Path("/r/minifer/x.py"): "minifer.x"}, {Path("/r/a/b.md")})
    text = (
        "[x `y`](../minifer/x.py#L3), [b](b.md#head), [no](../z.md), ![p](no.png), [w](https://w)"
    )
    assert places.rewrite(text, Path("a")) == (
        "[x `y`](#minifer.x), [b](b.md#head), no, ![p](no.png), [w](https://w)"
    )
