"""Every fault is caught by a detector that is silent without it, on one realistic workload."""

from __future__ import annotations

from typing import Any

import pytest

from minifer.events import ListSink
from minifer.faults import registry
from minifer.faults.detectors import Detector
from minifer.faults.matrix import Matrix, build_engine, demonstrate, examine, observe, run_matrix
from minifer.faults.probes import DETECTORS, Replay, TextRoundTrip
from minifer.faults.watch import Watch
from minifer.request import SamplingParams
from minifer.weights.resolve import LoadedModel, load_model

# Reuse, memory, tenants and text: one of each, in the fast tier.
SAMPLE = ("stale-after-reuse", "salt-ignored", "held-bytes-dropped")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("minifer-tiny", "auto", "auto")


@pytest.fixture(scope="module")
def healthy(tiny: Any) -> dict[str, list[str]]:
    return observe(tiny, None, debug=False) | observe(tiny, None, debug=True)


def test_a_healthy_engine_sets_off_nothing(healthy: dict[str, list[str]]) -> None:
    assert healthy == {kind.name: [] for kind in DETECTORS}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_caught_by_whom_the_registry_names(tiny: Any, healthy: Any, name: str) -> None:
    fault = registry.get(name)
    assert set(examine(tiny, fault, healthy)) >= set(fault.detectors)


@pytest.mark.slow
def test_the_whole_matrix(tiny: Any) -> None:
    matrix = run_matrix(tiny)
    assert not matrix.missed and not matrix.false_alarms
    for name, found in matrix.caught.items():
        # Others may notice too, by chance: canaries have random salts, and one byte collides.
        assert found.keys() >= set(registry.get(name).detectors), name
    useless = matrix.detectors.keys() - {d for found in matrix.caught.values() for d in found}
    assert not useless


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_a_scene_shows_the_symptom(tiny: Any, name: str) -> None:
    without, with_fault = demonstrate(tiny, registry.get(name))
    assert without and without != with_fault
    assert demonstrate(tiny, registry.get(name))[0] == without  # nothing is left of the fault


def test_a_detector_that_cries_without_a_fault_catches_nothing() -> None:
    found = {"a": {"canary": "KL 1"}, "b": {}}
    matrix = Matrix({"canary": "…", "replay": "…"}, found, {"replay": ["request-1"]})
    assert matrix.missed == ["b"]
    *_, a, b = matrix.table().splitlines()
    assert a.split() == ["a", "●", "✕"] and b.split() == ["b", "·", "✕"]
    assert matrix.to_dict()["missed"] == ["b"]


def test_every_detector_says_what_it_does() -> None:
    names = [kind.name for kind in DETECTORS]
    assert len(set(names)) == len(names) and all(kind.title for kind in DETECTORS)


def served(tiny: Any, kind: type[Detector], prompt: str, **params: Any) -> list[str]:
    """The alarms of one detector after one healthy request."""
    watch = Watch(build_engine(tiny, num_kv_blocks=32), [kind])
    watch.add_request("a", prompt, SamplingParams(**{"max_tokens": 30, "seed": 1, **params}))
    while watch.engine.has_unfinished_requests:
        watch.step()
    watch.idle()
    return watch.detectors[0].alarms


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop": ["e", "th"]},
        {"stop": ["the", "he"], "include_stop_str_in_output": True},
        {"stop_token_ids": [101]},
        {"stop_token_ids": [101], "include_stop_str_in_output": True},
        {"n": 3, "temperature": 1.5},
        {"allowed_token_ids": [0xC3, 0xA9, 0xE4, 0xF0]},
        {"max_tokens": 1},
        {"skip_special_tokens": False, "logit_bias": {256: 9}},
    ],
    ids=str,
)
def test_no_parameter_sets_off_round_trip_or_replay(tiny: Any, params: dict[str, Any]) -> None:
    for kind in (TextRoundTrip, Replay):
        assert served(tiny, kind, "The standard types — naïve", **params) == []


def test_an_exception_is_told_and_raised(tiny: Any) -> None:
    seen: list[Exception] = []

    class Listening(Detector):
        name = title = "listening"

        def on_exception(self, error: Exception) -> None:
            seen.append(error)

    watch = Watch(build_engine(tiny, num_kv_blocks=32), [Listening])
    with pytest.raises(ValueError):
        watch.add_request("a", "x", SamplingParams(max_tokens=9999))
    assert len(seen) == 1


def test_replay_takes_one_request_in_n_and_none_that_it_cannot_repeat(tiny: Any) -> None:
    watch = Watch(build_engine(tiny, num_kv_blocks=64), [lambda e: Replay(e, every=2, keep=2)])
    for i in range(6):
        watch.add_request(f"{i}", f"{i} is", SamplingParams(temperature=0, max_tokens=3))
    watch.add_request("no seed", "it is", SamplingParams(max_tokens=3))
    while watch.engine.has_unfinished_requests:
        watch.step()
    sink = ListSink()
    watch.engine.events.sinks.append(sink)
    watch.idle()
    admitted = [event.request_id for event in sink.events if event.name == "request.admitted"]
    assert len(admitted) == 2 and watch.detectors[0].alarms == []
