"""Every fault has a test that fails with it, passes without it, and ignores all others."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import pytest
from probes import PROBES, make_engine

from minifer.execution import sampler
from minifer.faults import registry
from minifer.faults.probes import DETECTORS

NAMES = registry.names()


def run(name: str, fault: str | None) -> None:
    """The probe of one fault, on an engine with another, itself, or none."""
    probe, options = PROBES[name]
    engine = make_engine(**options)
    with registry.get(fault).inject(engine) if fault else nullcontext():
        probe(engine)


def test_every_fault_has_a_probe() -> None:
    assert set(PROBES) == set(NAMES) and len(NAMES) >= 14


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_passes_without_its_fault_and_fails_with_it(name: str) -> None:
    run(name, None)
    with pytest.raises(AssertionError):
        run(name, name)
    run(name, None)  # and nothing is left of it


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_ignores_every_other_fault(name: str) -> None:
    for other in NAMES:
        if other != name:
            try:
                run(name, other)
            except Exception as error:
                pytest.fail(f"under {other}: {error!r}")


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_says_everything_that_the_book_prints(name: str) -> None:
    fault = registry.get(name)
    assert fault.name == name and fault.title and fault.mechanism and fault.symptom
    assert fault.sources and all(s.url.startswith("https://") and s.title for s in fault.sources)
    assert set(fault.detectors) <= {kind.name for kind in DETECTORS} and fault.detectors
    source = inspect.getsource(fault.inject).splitlines()
    assert len(source) <= 24, "the book prints it"


def test_an_unknown_fault_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"fault must be one of nan-row, .*, got 'x'"):
        registry.get("x")


def test_a_patch_is_undone_whatever_happens() -> None:
    class Thing:
        def method(self) -> int:
            return 1

    thing, before = Thing(), sampler.token_noise
    with (
        pytest.raises(KeyError),
        registry.patched(thing, method=lambda: 2),
        registry.patched(sampler, token_noise=None),
    ):
        assert thing.method() == 2
        raise KeyError
    assert thing.method() == 1 and "method" not in vars(thing)
    assert sampler.token_noise is before


def test_a_patch_that_hits_nothing_is_an_error() -> None:
    with pytest.raises(AttributeError), registry.patched(sampler, no_such_name=1):
        pass
