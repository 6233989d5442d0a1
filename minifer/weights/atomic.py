"""Folders that appear whole or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

_STALE_SECONDS = 24 * 3600


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well.

    What was at `target` is replaced. When two processes finish at once, one of the two results
    stays, whole. After an error nothing is left; what a killed process left goes a day later.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    temporary = _temporary(target)
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's folders are private
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(target: Path) -> Path:
    return Path(mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))


def _replace(new: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one: the old one steps aside first."""
    aside = _temporary(target)
    try:
        with suppress(FileNotFoundError):
            target.rename(aside / target.name)
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Another process put its own finished folder there in between.
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
