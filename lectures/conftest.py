"""The lectures' kernels run in the environment in which they were built; other tests do not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest

from minifer.course.book.environment import lecture_environment

_FOLDER = pytest.StashKey[Path]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A notebook's kernel starts when its first cell is set up, and inherits what stands here."""
    if "MINIFER_LECTURE_ENVIRONMENT" in os.environ:  # a sabotage brings its own
        return (yield)
    with patch.dict(os.environ, lecture_environment(_folder(item.config))):
        return (yield)


def _folder(config: pytest.Config) -> Path:
    """Where the kernels' start-up files lie; removed at the end."""
    if _FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.stash[_FOLDER] = Path(folder.name)
    return config.stash[_FOLDER]
