"""Workers are killed and links break in mid-traffic: right answers, or clear errors."""

from __future__ import annotations

import re

import pytest
from chaos import chaos
from fleet_process import Deployment

NAMES = ("tokens", "recomputed_tokens", "corrupt", "broken", "timeouts")


def hand_overs(fleet: Deployment) -> dict[str, float]:
    """Of the decode workers that are there at the end: a killed one takes its numbers along."""
    page = fleet.http.get("/metrics").text
    pattern = r'^minifer:kv_transfer_{}_total{{.*replica="decode-\d+".*}} (\S+)$'
    return {
        name: sum(map(float, re.findall(pattern.format(name), page, re.MULTILINE)))
        for name in NAMES
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_workers_die_and_links_break(transport: str):
    faults = "drop=0.05,flip=0.05,seed=1"
    options = ("--kv-transport", transport, "--kv-link-faults", faults)
    counts = chaos(10, 300, 5, *options, engines="2:2", count=hand_overs)
    print(counts)
    assert counts["complete"] >= 0.8 * counts["requests"]
    assert counts.get("different at a gap below 1e-3", 0) <= 0.01 * counts["requests"]
    assert all(counts[name] > 0 for name in ("tokens", "recomputed_tokens", "broken"))
