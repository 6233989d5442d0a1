"""Folders that appear whole or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

_STALE_SECONDS = 24 * 3600


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, on the same file system; removed after the block.

    What a killed process left is removed by a later call, when it is a day old.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `target` when the block ends well.

    What was at `target` is replaced. When two processes finish at once, one of the two results
    stays, whole.
    """
    with scratch_folder(target) as temporary:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's folders are private
        _replace(temporary, target)


def _replace(new: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one: the old one steps aside first."""
    with scratch_folder(target) as aside:
        with suppress(FileNotFoundError):
            target.rename(aside / target.name)
        try:
            new.rename(target)
        except OSError as error:
            # The error itself is the evidence that another writer put its own finished folder
            # there in between: by now a third may already have moved that one aside.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
