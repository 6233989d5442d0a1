"""What the pictures of the megakernel say, against counts by hand, the slow twin and the engine."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minifer.course import example
from minifer.course.pictures import megakernel_data as data
from minifer.course.pictures import megakernel_step as step
from minifer.course.pictures.megakernel import FUSED_OF
from minifer.course.pictures.megakernel_run import interleaving_figure, queues_figure
from minifer.kernels.cosim.interpreter_hooks import unsupported
from minifer.kernels.cosim.simulate import Interleaving
from minifer.kernels.mega.isa import Op
from minifer.kernels.mega.mutants import mutate
from minifer.kernels.mega.reference_vm import ScheduleError
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.perf.devices import DEVICES
from minifer.perf.timeline import decode as ways
from minifer.perf.timeline.model import tasks

TRIO = {"A": 1000, "B": 1000, "C": 4000}


def schedule(programs: int = 3, **options: object) -> Schedule:
    return assign(build(step.tiny_shape(), programs), programs, **options)  # type: ignore[arg-type]


# -- blocks on SMs


def test_uncut_attention_ends_with_the_longest_context() -> None:
    """A and B take four SMs until 1,000; C's two heads follow, alone, until 5,000."""
    dealt = data.attention(TRIO, 4, heads=2)
    assert dealt.end == 5000
    assert dealt.busy == pytest.approx(12_000 / 20_000)
    assert [(b.request, b.sm) for b in dealt.blocks] == [
        *(("A", 0), ("A", 1), ("B", 2), ("B", 3)),
        *(("C", 0), ("C", 1)),
    ]


def test_equal_parts_fill_all_waves_and_overhead_counts_as_idle() -> None:
    assert data.attention(TRIO, 4, part=1000, heads=2).busy == 1
    dealt = data.attention(TRIO, 4, part=1000, heads=2, overhead=250)
    assert dealt.end == 3 * 1250
    assert dealt.busy == pytest.approx(0.8)


def test_the_longest_first_leaves_a_shorter_tail() -> None:
    assert data.attention(TRIO, 4, heads=2, longest_first=True).end == 4000


def test_no_token_is_lost_by_a_cut() -> None:
    for part, heads in itertools.product((1, 7, 400, 4000), (1, 3)):
        dealt = data.attention({"A": 17, "B": 400}, 5, part=part, heads=heads)
        assert sum(b.end - b.start for b in dealt.blocks) == heads * 417
        assert max(b.end - b.start for b in dealt.blocks) <= part


@pytest.mark.parametrize("wrong", [{"num_sms": 0}, {"part": 0}, {"heads": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        data.attention(TRIO, **({"num_sms": 4} | wrong))  # type: ignore[arg-type]


# -- a step's time


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    shape = decode_shape(replace(MODELS["llama-1b"], num_layers=2))
    panel = ways.panel(ways.FUSED, shape, DEVICES["H100-SXM"], 128)
    time = data.step_time(panel)
    assert time.total == pytest.approx(panel.timeline.seconds * 1e6)
    assert time.launches == 1 + 2 * 6 + 2
    assert 0 < time.reading < time.total


@pytest.mark.parametrize("layers", [1, 4])
def test_a_fused_layer_does_the_work_of_the_kernels_it_replaces(layers: int) -> None:
    shape = decode_shape(replace(MODELS["minifer-tiny"], num_layers=layers), splits=2)
    plain, fused = (data.kernels(shape, fused=fused) for fused in (False, True))
    assert [part for name in fused.names for part in FUSED_OF[name]] == list(plain.names)
    assert (plain.launches, fused.launches) == (14 * layers + 4, 7 * layers + 3)
    assert plain.weight_bytes == fused.weight_bytes


def test_kv_that_comes_early_is_no_less_kv() -> None:
    shape = decode_shape(MODELS["minifer-tiny"])
    plain = tasks(ways.megakernel(shape, 8, "round_robin"), context=64)
    early = data.with_early_kv(plain)
    for before, after in zip(itertools.chain(*plain), itertools.chain(*early), strict=True):
        assert before.weights + before.other == after.weights + after.other
        assert after.other == (0 if before.name == "ATTENTION" else before.other)


def test_published_steps_come_from_fast_to_slow_with_the_floor_first() -> None:
    rows = data.published({"ours": 800.0})
    assert [row.kind for row in rows[:2]] == ["limit", "modelled"]
    assert rows[0].share == 1
    by_name = {row.name: row for row in rows}
    assert by_name["megakernel, 72 %"].share == pytest.approx(0.72)
    assert by_name["megakernel, 78 %"].microseconds == pytest.approx(946, abs=1)  # 737.8 / 0.78


def test_measured_steps_are_those_of_a_ladder_on_a_gpu(tmp_path: Path) -> None:
    assert data.measured_steps(tmp_path) == []
    rows = [
        {"rung": "graph", "status": "ok", "seconds": {"median": 1e-3}, "of_datasheet": 0.5},
        {"rung": "broken", "status": "wrong", "seconds": None, "of_datasheet": None},
    ]
    ladder = {
        "name": "decode-ladder",
        "started": "2026-12-01T10:00:00",
        "machine": {"accelerator": "NVIDIA H200"},
        "cells": [{"model": "llama-1b", "batch": 1, "context": 512, "rows": rows}],
    }
    (tmp_path / "gpu_ladder.json").write_text(json.dumps(ladder))
    (line,) = data.measured_steps(tmp_path)
    assert line == (
        "NVIDIA H200, 2026-12-01: llama-1b, batch 1, context 512, graph: 1,000 µs, 50 % of the "
        "data sheet's bandwidth"
    ).replace("50 %", "50%")


# -- the step of request A


def test_the_step_is_a_s_own() -> None:
    tokens = example.run().tokens("A")
    assert step.step_of_a().tokens[-1] == tokens[0]
    assert int(step.step_of_a().logits.argmax()) == tokens[1]


def test_any_order_of_any_schedule_leaves_the_same_bits() -> None:
    logits = [step.run_reference(schedule(policy="random", seed=i), seed=i) for i in range(2)]
    assert torch.equal(*logits)
    assert step.step_of_a().error(logits[0]) < 1e-4


def test_a_schedule_that_hangs_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        step.run_reference(mutate("target-too-high", schedule()))


@pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))
def test_a_watched_step_gives_a_s_token_and_a_missing_wait_is_seen() -> None:
    late = Interleaving("priority", starve=1)
    sound = step.watch(schedule(), late)
    assert sound.result.ok
    assert sound.error < 1e-4
    assert sound.token == example.run().tokens("A")[1]
    broken = mutate("dropped-wait", schedule())
    seen = step.watch(broken, late)
    assert seen.error > 1e-3
    (race,) = [r for r in seen.result.races if r.kind == "WAR" and r.buffer == "HIDDEN"]
    figure = interleaving_figure(seen.result, broken, race, title="DOWN reads too early")
    assert [text.get_text() for text in figure.axes[0].texts].count(Op.DOWN.name) == 1


def test_a_queue_is_drawn_with_what_each_instruction_waits_for() -> None:
    small = assign(build(replace(step.tiny_shape(), layers=1), 4), 4)
    texts = [text.get_text() for text in queues_figure(small, title="queues").axes[0].texts]
    assert len(texts) == small.num_instructions
    assert texts[0] == "embed\n–"
    assert "output\nattended ≥ 6" in texts
