"""`minifer book site`: lay the pages out in a folder, and let Sphinx make HTML of them."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minifer.course.book.builder import Book
from minifer.course.site import numbers, reference
from minifer.course.site.notebooks import page_of
from minifer.course.site.places import Places, modules_of

NEEDS = ("sphinx", "myst_nb", "furo", "latex2mathml")
# Packages that a reference page can do without: they are extras, and large.
_OPTIONAL = ("ray", "vllm", "xllamacpp", "starlette", "uvicorn", "httpx", "llguidance", "gguf",
             "huggingface_hub", "prometheus_client", "transformers", "ipywidgets", "IPython",
             "jupyter_client", "nbclient", "pytest")  # fmt: skip
_SKIPPED = ("minifer.cli",)  # commands; `minifer --help` documents them
_PAGES = ("README.md", "CONTRIBUTING.md", "lectures/CLAIMS.md", "lectures/GLOSSARY.md",
          "lectures/INSTRUCTORS.md", "exercises/README.md")  # fmt: skip


_WELCOME = """\
# minifer

**An inference textbook whose examples are a real engine.** You follow one token from request to
text through five stages; each stage is a small module that you build, and then find in the engine.
Begin with the first lecture; a word you do not know may be in the glossary.

In a lecture, a cell with a green edge is a *claim*: its output is compared whenever the tests run.
A grey edge is a *measurement* of the machine on which the page was made, a blue edge a *picture*.
To move sliders and to change code, open the notebook itself.
"""


def build_site(book: Book, out: Path) -> int:
    """Make the site in a folder, which is emptied before; returns the number of its pages.

    Raises `ValueError` when a package of the extra `docs` is missing, `RuntimeError` with every
    warning that Sphinx had.
    """
    if absent := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f'the site needs {", ".join(absent)}: pip install "minifer[docs]", or in a clone '
            'pip install -e ".[docs]" -c constraints.txt'
        )
    if out.exists() and any(out.iterdir()) and not (out / "searchindex.js").is_file():
        raise ValueError(f"--out must be empty or an earlier site, for it is emptied, got {out}")
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source"
        lay_out(book, source)
        warnings = _sphinx(source, Path(work) / "html", Path(work) / "doctrees")
        if warnings:
            raise RuntimeError(f"the site has warnings:\n{warnings}")
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(Path(work) / "html", out)
    return len(list(out.rglob("*.html")))


def lay_out(book: Book, source: Path) -> None:
    """Write the site's sources: notebooks, Markdown pages, the reference, pictures."""
    root = book.root
    lectures = sorted(book.lectures.glob("L*.ipynb"))
    exercises = sorted(book.exercises.glob("ex*.ipynb"))
    results = sorted((book.lectures / "results").glob("*.md"))
    texts = [root / name for name in _PAGES if (root / name).is_file()]
    modules = modules_of(root, _SKIPPED)
    places = Places(
        root, modules, {*lectures, *exercises, *results, *texts},
        {path.with_suffix(".py"): path for path in exercises},
    )  # fmt: skip
    for path in (*lectures, *exercises):
        _write(source / path.relative_to(root), _text(page_of(path, places)))
    for path in (*results, *texts):
        text = path.read_text(encoding="utf-8")
        if path.name == "GLOSSARY.md":
            text = _with_links(text, lectures)
        text = places.rewrite(text, path.parent.relative_to(root))
        _write(source / path.relative_to(root), text)
    if (book.lectures / "figures").is_dir():
        shutil.copytree(book.lectures / "figures", source / "lectures" / "figures")
    read = {path.relative_to(root).with_suffix("").as_posix(): _read(path) for path in lectures}
    uses = reference.uses_of(read, modules, root)
    for name, text in reference.pages(modules, uses).items():
        _write(source / "reference" / f"{name}.rst", text)
    _write(source / "numbers.md", numbers.numbers_page(book, read))
    _write(source / "index.md", _index(root, lectures, exercises, results, texts))
    shutil.copytree(Path(__file__).parent / "static", source / "_static")


def _with_links(text: str, lectures: Iterable[Path]) -> str:
    """The glossary names lectures by their number."""
    names = {path.name[:3]: path.name for path in lectures}
    return re.sub(
        r"\bL\d\d\b", lambda m: f"[{m[0]}]({names[m[0]]})" if m[0] in names else m[0], text
    )


def _index(
    root: Path, lectures: list[Path], exercises: list[Path], results: list[Path], texts: list[Path]
) -> str:
    def there(*names: str) -> list[Path]:
        return [root / name for name in names if root / name in texts]

    sections = {
        "The book": lectures,
        "Exercises": [*there("exercises/README.md"), *exercises],
        "To look up": [*there("lectures/GLOSSARY.md", "lectures/CLAIMS.md"), root / "numbers.md"],
        "Results": results,
        "The engine": [*there("README.md"), root / "reference/index.rst",
                       *there("CONTRIBUTING.md")],
        "Teaching": there("lectures/INSTRUCTORS.md"),
    }  # fmt: skip
    lines = [_WELCOME]
    for caption, pages in sections.items():
        listed = [page.relative_to(root).with_suffix("").as_posix() for page in pages]
        head = ["```{toctree}", f":caption: {caption}", ":maxdepth: 1", ""]
        lines += [*head, *listed, "```", ""] if listed else []
    return "\n".join(lines)


def _sphinx(source: Path, out: Path, doctrees: Path) -> str:
    """Build; returns the warnings, as text."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    from minifer.kernels.mode import interpret_without_gpu

    interpret_without_gpu()  # before autodoc imports triton
    warnings = io.StringIO()
    with patch_docutils(None), docutils_namespace():
        app = Sphinx(
            srcdir=source, confdir=None, outdir=out, doctreedir=doctrees, buildername="html",
            confoverrides=dict(_settings()), status=None, warning=warnings, freshenv=True,
        )  # fmt: skip
        app.build()
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue()).replace(f"{source}/", "").strip()


def _settings() -> dict[str, Any]:
    absent = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    return {
        "project": "minifer",
        "author": "The minifer authors",
        "copyright": "The minifer authors, Apache-2.0",
        "extensions": ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode",
                       "minifer.course.site.extension"],
        "html_theme": "furo",
        "html_title": "minifer",
        "html_static_path": ["_static"],
        "html_css_files": ["site.css"],
        "html_math_renderer": "mathml",
        "html_copy_source": False,
        "html_show_sphinx": False,
        "html_last_updated_fmt": None,
        "nb_execution_mode": "off",
        "nb_merge_streams": True,
        "myst_enable_extensions": ["dollarmath", "attrs_inline"],
        "myst_heading_anchors": 4,
        "autodoc_mock_imports": absent,
        "autodoc_typehints": "signature",
        "autodoc_member_order": "bysource",
        "autodoc_default_options": {"ignore-module-all": True},
        "autodoc_preserve_defaults": True,
        "add_module_names": False,
        "toc_object_entries": False,
    }  # fmt: skip


def _read(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def _text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
