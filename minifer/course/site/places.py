"""Where a file of the repository stands on the site, and its links rewritten to lead there.

Pages keep the repository's folders, so a link between two of them works as it is. A link to a
module leads to its place in the reference; a link to a file that is no page becomes plain text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\((?P<target>[^)\s]+)\)")
_DEFINITION = re.compile(r"(?m)^\[(?P<label>[^\]]+)\]: (?P<target>\S+)$")
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>(\*\*\d+\.\*\*|\d+)')


@dataclass(frozen=True)
class Places:
    """root: the repository. modules: file → dotted name. pages: files that become pages.

    moved: file → the page that stands for it, such as a script that is also a notebook.
    """

    root: Path
    modules: dict[Path, str]
    pages: set[Path]
    moved: dict[Path, Path] = field(default_factory=dict)

    def rewrite(self, text: str, folder: Path) -> str:
        """Markdown with its links led to the site. folder: of the file, in the repository."""
        text = _LINK.sub(lambda m: self._inline(m["label"], m["target"], folder), text)
        text = _DEFINITION.sub(
            lambda m: f"[{m['label']}]: {self._target(m['target'], folder) or '#missing'}", text
        )
        return _ANCHOR.sub(r"[\2]{#\1}", text)

    def _inline(self, label: str, target: str, folder: Path) -> str:
        place = self._target(target, folder)
        return label if place is None else f"[{label}]({place})"

    def _target(self, target: str, folder: Path) -> str | None:
        """What a link's target is on the site; None when it is not there."""
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return target
        path, _, fragment = target.partition("#")
        file = Path(os.path.normpath(self.root / folder / path))
        package = file / "__init__.py"
        if file in self.modules or package in self.modules:
            return f"#{self.modules.get(file) or self.modules[package]}"
        file = self.moved.get(file, file)
        if file not in self.pages:
            return None
        if file.suffix == ".ipynb" and fragment:
            return f"#{cell_anchor(fragment)}"
        page = Path(os.path.relpath(file, self.root / folder)).as_posix()
        return f"{page}#{fragment}" if fragment else page


def cell_anchor(cell: str) -> str:
    """The name by which a notebook's cell is linked: Sphinx's labels are lower case."""
    return f"cell-{cell.lower()}"


def modules_of(root: Path, skip: Iterable[str] = ()) -> dict[Path, str]:
    """File → dotted name, of the three packages in their folders. skip: beginnings of names."""
    found = {}
    for folder, name in (("minifer", "minifer"), ("kernels", "minifer.kernels"),
                         ("parcae", "minifer.parcae")):  # fmt: skip
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            dotted = ".".join([name, *(part for part in parts if part != "__init__")])
            wanted = not any(f"{dotted}.".startswith(f"{start}.") for start in skip)
            if wanted and "__main__" not in parts and "assets" not in parts:
                found[file] = dotted
    return found
