"""The lectures' kernels run in the environment in which they were built."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from minifer.course.book.environment import lecture_environment

if "MINIFER_LECTURE_ENVIRONMENT" not in os.environ:  # a sabotage brings its own
    _folder = tempfile.TemporaryDirectory()
    os.environ.update(lecture_environment(Path(_folder.name)))
