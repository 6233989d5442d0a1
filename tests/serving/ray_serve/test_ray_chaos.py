"""Chaos under Ray: replicas and a whole node are killed while 500 requests go on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from live import Live

pytest.importorskip("ray.serve", reason='Ray is not installed: pip install "minifer[ray]"')

from ray_live import RayCluster, RayServer, all_asking, ray_cluster, ray_server, wait_for

NUM_REQUESTS = 500
SECONDS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(cluster: RayCluster) -> Iterator[RayServer]:
    with ray_server(cluster, "--replicas", "3") as server:
        yield server


def num_well(served: RayServer) -> int:
    """Replicas that can generate. What Ray says of them lags behind when one has been killed."""
    return len(served.http.get("/health_generate").json().get("replicas", ()))


@pytest.mark.slow
def test_every_request_ends_with_the_right_text_or_a_clear_error(
    cluster: RayCluster, served: RayServer, server: Live
):
    draw = random.Random(0)
    expected = server.complete("The for statement", max_tokens=60)["choices"][0]["text"]
    with all_asking(served, 4, expected, max_tokens=60) as asking:

        def num_done() -> int:
            return sum(len(one.outcomes) for one in asking)

        for i, part in enumerate(range(80, NUM_REQUESTS, 80)):
            wait_for(lambda part=part: num_done() >= part, SECONDS)
            wait_for(lambda: num_well(served) == 3, SECONDS)
            if i == 3:
                cluster.kill_a_node()
                cluster.command("add")
            else:
                draw.choice(cluster.replicas()).kill()
        wait_for(lambda: num_done() >= NUM_REQUESTS, SECONDS)
    outcomes = Counter(outcome for one in asking for outcome in one.outcomes)
    print(dict(outcomes))
    assert set(outcomes) <= {"right", "replica_lost"}
    assert outcomes["replica_lost"] <= outcomes["right"] / 20
    # Nothing is left of the requests whose replicas died: all three are there, and idle.
    wait_for(lambda: num_well(served) == 3, SECONDS)
    served.wait_until_idle()
    assert served.metric("minifer:kv_cache_usage_perc") == 0
