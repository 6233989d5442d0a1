"""Replicas are killed in mid-traffic: everybody gets the right answer, or a clear error."""

from __future__ import annotations

import pytest
from chaos import chaos


@pytest.mark.slow
def test_a_replica_dies_every_twenty_seconds():
    counts = chaos(20, 500, 4)
    print(counts)
    assert counts["complete"] >= 0.8 * counts["requests"]
    assert counts.get("different at a gap below 1e-3", 0) <= 0.01 * counts["requests"]


@pytest.mark.slow
def test_a_replica_dies_every_six_seconds():
    """Hardly has one come back when the next one goes."""
    counts = chaos(6, 200, 8, "--router", "round_robin")
    print(counts)
    assert counts["complete"] >= 0.6 * counts["requests"]
