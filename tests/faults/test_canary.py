"""F-04 and F-03: what the canaries see, and the limit of what they see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import tiny_config, tiny_engine, tiny_model
from probes import make_engine

from minifer.canary import FOLDER, THRESHOLD, Canary, CanaryReport
from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.faults.matrix import build_engine
from minifer.faults.registry import patched
from minifer.request import SamplingParams
from minifer.weights.resolve import LoadedModel, load_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("minifer-tiny", "auto", "auto")


@pytest.fixture(scope="module")
def smollm2(pulled_model: Any) -> LoadedModel:
    return load_model(str(pulled_model), "auto", "auto")


@contextmanager
def forward_of(engine: Engine, change: Callable[[Any], None]) -> Iterator[None]:
    """Change every step's input before the model sees it."""
    runner: Any = engine.runner
    forward = runner.forward

    def changed(step: Any) -> Any:
        change(step)
        return forward(step)

    with patched(runner, forward=changed):
        yield


def positions_one_too_high(step: Any) -> None:
    """RoPE + 1, of decodes: a shift of all positions would be none."""
    for first, end in itertools.pairwise(step.query_start):
        if end - first == 1:
            step.positions[first] += 1


def last_prompt_slot_lost(step: Any) -> None:
    for first, end in itertools.pairwise(step.query_start):
        if end - first > 1:
            step.slot_mapping[end - 1] = -1


def blocks_swapped(step: Any) -> None:
    """Every decode reads the first block of another request."""
    tables = [list(table) for table in step.block_tables]
    single = [b - a == 1 for a, b in itertools.pairwise(step.query_start)]
    for row, table in enumerate(tables):
        if single[row] and len(tables) > 1 and len(table) > 1:
            step.block_tables[row] = [tables[row - 1][0], *table[1:]]


SILENT = {"rope": positions_one_too_high, "lost slot": last_prompt_slot_lost, "swap": blocks_swapped}


def check_under(loaded: Any, change: Callable[[Any], None] | None) -> CanaryReport:
    engine = build_engine(loaded, num_kv_blocks=64)
    canary = Canary.of(engine)
    with forward_of(engine, change or (lambda step: None)):
        return canary.check(engine)


@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_f04_faults_that_leave_a_reply_fluent_are_seen(tiny: Any, change: Any) -> None:
    report = check_under(tiny, change)
    assert report.kl > 10 * THRESHOLD and report.alarms


def test_f04_rounding_is_far_below_the_threshold(tiny: Any) -> None:
    report = check_under(tiny, None)
    assert report.ok and report.kl < THRESHOLD / 100
    assert max(reading.num_cached_tokens for reading in report.readings) == 48
    assert {reading.run for reading in report.readings} == {"cold", "hit", "alone"}


@pytest.mark.slow
@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_f04_on_smollm2(smollm2: Any, change: Any) -> None:
    assert check_under(smollm2, change).kl > THRESHOLD


@pytest.mark.slow
def test_f04_on_smollm2_without_a_fault(smollm2: Any) -> None:
    assert check_under(smollm2, None).kl < THRESHOLD / 100
