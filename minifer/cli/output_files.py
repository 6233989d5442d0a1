"""Files that a command will write: checked before it starts, drawn the same way each time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURES = (".png", ".svg", ".pdf")


def check_output(option: str, file: Path | str | None, endings: Sequence[str] = ()) -> None:
    """Raises `ValueError` if there is no folder for it, if its name ends in none of `endings`
    (such as ".png"; none: in anything), or if it is a picture and matplotlib is missing."""
    if file is None:
        return
    file = Path(file)
    if endings and file.suffix not in endings:
        raise ValueError(f"{option} must end in {_either(endings)}, got {file}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option}: there is no folder {file.parent}, make it first")
    if file.suffix in PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f'{option} {file} needs matplotlib: pip install "minifer[course]"')


def save_figure(figure: Any, file: Path | str) -> None:
    """The same bytes for the same figure."""
    metadata = {".png": {}, ".pdf": {"CreationDate": None}}.get(Path(file).suffix, {"Date": None})
    figure.savefig(file, dpi=150, metadata=metadata)


def _either(endings: Sequence[str]) -> str:
    *others, last = endings
    return f"{', '.join(others)} or {last}" if others else last
