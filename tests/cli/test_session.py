"""What the commands share, apart from any command."""

from __future__ import annotations

import gc

import pytest

from minifer.cli.session import few_collections


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_looked_for_meanwhile_and_afterwards_as_before(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(KeyError), few_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def test_what_is_there_is_frozen_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time would keep the garbage of whatever ran in between for good."""
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    for _ in range(3):
        with few_collections():
            pass
    assert len(frozen) == 1
