from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import Live, live


@pytest.fixture(scope="session")
def running() -> Iterator[Live]:
    """The server that most tests share."""
    with live() as server:
        yield server


@pytest.fixture
def server(running: Live) -> Iterator[Live]:
    """The shared server; afterwards it must be idle."""
    yield running
    running.wait_until_idle()
