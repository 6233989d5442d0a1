"""One model for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_model import write_loop_model, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for 512 tokens."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def loop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop model."""
    return write_loop_model(tmp_path_factory.mktemp("loop-model"))
