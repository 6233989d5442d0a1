"""The model of a core that stays in L2: bytes against the published sizes, times against limits."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from minifer.parcae.costs import decode_cost
from minifer.parcae.presets import PRESETS
from minifer.perf.devices import DEVICES, find_device
from minifer.perf.timeline import loop_tables
from minifer.perf.timeline.decode import Assumptions
from minifer.perf.timeline.gantt import Panel
from minifer.perf.timeline.loop_resident import (
    ARMS,
    DRAWN,
    L2_BANDWIDTH,
    LAUNCHES_PDL,
    LAUNCHES_RESIDENT,
    MEGAKERNEL,
    MODELS,
    RESIDENT,
    Cache,
    LoopStep,
    drawn_layers,
    loop_panel,
    loop_times,
    resident_layers,
    weight_bytes,
)
from minifer.perf.timeline.model import Machine, Task, simulate

LECTURES = Path(__file__).parents[3] / "lectures"
STALE = "out of date: run `minifer kernels timeline --loop-table` as the file says"
MIB = 2.0**20
H100 = DEVICES["H100-SXM"]
SMALL = LoopStep(PRESETS["parcae-140m"], 2)
TINY = LoopStep(PRESETS["parcae-tiny"], 3)


def read_from_memory(step: LoopStep, kept: int = 0) -> float:
    return weight_bytes(step, kept) / MIB


def simulated_weights(panel: Panel) -> float:
    tasks = (span.task for span in panel.timeline.spans)
    return sum(task.weights for task in tasks if not task.cached)


# -- bytes


@pytest.mark.parametrize(
    ("model", "unique", "re_read"),
    [
        ("parcae-140m", 131, 320),
        ("parcae-370m", 356, 1028),
        ("parcae-770m", 761, 2336),
        ("parcae-1.3b", 1401, 4425),
    ],
)
def test_a_token_reads_as_many_bytes_of_weights_as_its_shapes_say(model, unique, re_read) -> None:
    """Worked out by hand from the published shapes: (2 · 12 D² · L + 2 D² + V D) · 2 bytes, and
    12 D² · L · 2 more for every iteration that reads the core again."""
    config = PRESETS[model]
    assert round(read_from_memory(LoopStep(config, 1))) == unique
    assert round(read_from_memory(LoopStep(config, 8))) == re_read
    assert round(read_from_memory(LoopStep(config, 8), kept=99)) == unique
    for resident, kept in ((True, 99), (False, 0)):
        counted = decode_cost(config, 8, core_resident=resident).total().weight_bytes / MIB
        assert read_from_memory(LoopStep(config, 8), kept) == pytest.approx(counted, rel=1e-3)


def test_what_is_simulated_reads_those_bytes() -> None:
    once = read_from_memory(replace(SMALL, num_loops=1))
    for arm in ARMS:
        panel = loop_panel(arm, SMALL, H100)
        again = SMALL.core_bytes / MIB * (arm not in (LAUNCHES_RESIDENT, RESIDENT))
        assert simulated_weights(panel) / MIB == pytest.approx(once + again)
        kv = sum(span.task.other for span in panel.timeline.spans)
        assert panel.timeline.num_bytes == pytest.approx(simulated_weights(panel) + kv)
    layers = 2 * SMALL.config.num_layers - SMALL.loop.prelude - SMALL.loop.coda
    partials = 4 * 2 * 2 * 6 * 129  # a split leaves 129 float32, which the merge reads again
    slots = layers * (512 * 2 * 768 * 2 + partials)
    assert kv == pytest.approx(slots), "every layer of every iteration reads keys and values"


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("parcae-140m", [2, 2, 2, 2]),  # 27 MiB of the 30, 37.5, 37.5 and 94.5 that may be pinned
        ("parcae-370m", [1, 1, 1, 3]),  # 24 MiB a layer, 96 in all
        ("parcae-770m", [0, 1, 1, 2]),
        ("parcae-1.3b", [0, 0, 0, 1]),
    ],
)
def test_only_the_smallest_core_fits(model, kept) -> None:
    step = LoopStep(PRESETS[model], 8)
    assert [resident_layers(step, find_device(chip)) for chip in L2_BANDWIDTH] == kept
    assert resident_layers(step, H100, Cache(share=0)) == 0


# -- time


def test_a_cached_task_leaves_the_memory_to_the_others() -> None:
    """A draws 100 bytes from memory at 80/s, B as many from the cache at 20/s; both pay a second.
    C follows B from the cache, D follows A from memory, and nobody shares."""
    machine = Machine(2, 100.0, 80.0, overhead=1.0, cache_bandwidth=40, cache_program_bandwidth=20)
    queues = [
        [Task("A", weights=100), Task("D", weights=40)],
        [Task("B", weights=100, cached=True), Task("C", weights=20, cached=True)],
    ]
    timeline = simulate(queues, machine)
    ends = {span.task.name: span.end for span in timeline.spans}
    assert ends == pytest.approx({"A": 2.25, "D": 3.75, "B": 6.0, "C": 8.0})
    assert timeline.num_bytes == 140
    assert [active for _, active in timeline.streaming] == [1, 0, 1, 0]


def test_cached_tasks_share_their_own_pipe() -> None:
    """Two at 20/s of 40, three at 13⅓: 20 bytes each, and a second."""
    machine = Machine(3, 1.0, overhead=1.0, cache_bandwidth=40, cache_program_bandwidth=20)
    for count, end in ((2, 2.0), (3, 2.5)):
        queues = [[Task("X", weights=20, cached=True)] for _ in range(count)]
        assert simulate(queues, machine).seconds == pytest.approx(end)


def test_a_cache_as_fast_as_memory_changes_nothing() -> None:
    """Without prefetch no operation overlaps another, so one pipe is as good as two."""
    a = Assumptions(prefetch=0)
    same = Cache(bandwidth=H100.memory_bandwidth, latency=a.latency)
    for arms in ((MEGAKERNEL, RESIDENT), (LAUNCHES_PDL, LAUNCHES_RESIDENT)):
        times = [loop_panel(arm, SMALL, H100, a, same).timeline.seconds for arm in arms]
        assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_a_core_that_does_not_fit_is_read_again() -> None:
    times = [
        loop_panel(arm, SMALL, H100, cache=Cache(share=0)).timeline.seconds
        for arm in (MEGAKERNEL, RESIDENT)
    ]
    assert times[0] == times[1]


def test_the_ways_come_in_their_order_and_none_beats_the_bytes() -> None:
    seconds = {arm: loop_panel(arm, SMALL, H100).timeline.seconds for arm in ARMS}
    assert sorted(seconds, key=seconds.__getitem__, reverse=True) == list(ARMS)
    floor = read_from_memory(SMALL, kept=99) * MIB / H100.memory_bandwidth
    assert seconds[RESIDENT] > floor
    floor += SMALL.core_bytes / L2_BANDWIDTH["H100-SXM"]
    free = Assumptions(overhead=0, in_flight=1e9, prefetch=0)  # one after the other
    bytes_only = loop_panel(RESIDENT, replace(SMALL, context=1), H100, free).timeline.seconds
    assert floor < bytes_only < 1.05 * floor


@pytest.mark.parametrize("arm", ARMS)
def test_two_simulations_tell_every_depth(arm: str) -> None:
    step = replace(TINY, batch=3, context=700, tile=8)
    times = loop_times(arm, step, H100)
    for loops in (1, 2, 3, 7):
        simulated = loop_panel(arm, replace(step, num_loops=loops), H100).timeline.seconds
        assert times.seconds(loops) == pytest.approx(simulated, rel=1e-9)


def test_a_batch_reads_its_weights_once() -> None:
    one, four = (loop_panel(RESIDENT, replace(TINY, batch=b), H100) for b in (1, 4))
    embedded = 3 * 2 * TINY.config.hidden_size
    assert simulated_weights(four) == simulated_weights(one) + embedded
    assert four.timeline.num_bytes > one.timeline.num_bytes


def test_the_picture_shows_three_iterations() -> None:
    assert drawn_layers(LoopStep(PRESETS["parcae-140m"], 8)) == range(2, 8)
    assert drawn_layers(LoopStep(PRESETS["parcae-1.3b"], 8)) == range(8, 16)
    assert drawn_layers(LoopStep(PRESETS["parcae-140m"], 2), 9) == range(2, 6)


# -- refusals


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_loops": 0}, "num_loops must be an integer of at least 1, got 0"),
        ({"num_loops": 2.5}, "num_loops must be an integer of at least 1, got 2.5"),
        ({"batch": 17}, "batch must be at most 16 for a megakernel, got 17"),
        ({"context": 0}, "context must be an integer of at least 1, got 0"),
        ({"tile": 7}, "tile must divide the [0-9]+ rows of QKV, got 7"),
        ({"config": replace(TINY.config, loop=None)}, "loop must say how many layers"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(change, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"share": 1.1}, r"share must be in \[0, 1\], got 1.1"),
        ({"bandwidth": 0.0}, "bandwidth must be above 0, got 0"),
        ({"latency": -1.0}, "latency must be above 0, got -1"),
    ],
)
def test_a_cache_that_makes_no_sense_is_refused(change, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        Cache(**change)


def test_another_way_or_a_chip_of_which_nothing_is_assumed_is_refused() -> None:
    with pytest.raises(ValueError, match="arm must be one of launches, launches, PDL"):
        loop_panel("fused", TINY, H100)
    with pytest.raises(ValueError, match="whose L2 bandwidth is assumed, got T4"):
        loop_panel(RESIDENT, TINY, DEVICES["T4"])
    assert loop_panel(RESIDENT, TINY, DEVICES["T4"], cache=Cache(bandwidth=1e12)).timeline.spans


# -- what is committed


def committed() -> dict:
    return json.loads((LECTURES / "results" / "loop_resident.json").read_text("utf-8"))


def test_the_committed_tables_are_what_the_json_says_and_say_what_they_are() -> None:
    data = committed()
    text = (LECTURES / "results" / "loop_resident.md").read_text(encoding="utf-8")
    assert text == loop_tables.markdown(data), STALE
    assert "Modelled; nothing of this has run on a GPU." in text
    found = {(r["model"], r["device"], r["loops"], r["arm"]) for r in data["steps"]}
    assert len(found) == len(data["steps"]) == len(MODELS) * 4 * len(loop_tables.DEPTHS) * len(ARMS)
    small = data["traffic"][0]
    assert (small["unique_mib"], small["re_read_mib"]) == (131.3, 320.3)


@pytest.mark.parametrize("index", [3, 4, 12, 19, 62])
def test_cells_of_the_committed_tables_come_out_again(index: int) -> None:
    """Of Parcae-140M, on three chips; index: of a row."""
    row = committed()["steps"][index]
    step = LoopStep(PRESETS[row["model"]], row["loops"])
    again = loop_tables.cell(row["arm"], step, row["device"])
    assert again == {name: row[name] for name in again}, STALE


def test_the_committed_picture_is_small_and_says_that_it_is_a_model() -> None:
    text = (LECTURES / "figures" / "loop_resident.svg").read_text(encoding="utf-8")
    words = ["".join(e.itertext()) for e in ET.fromstring(text).iter() if e.tag.endswith("text")]
    assert len(text.encode()) <= 300_000
    assert "modelled; no GPU has run this" in words[0]
    for arm in DRAWN:
        assert any(word.startswith(f"{arm}: ") and word.endswith("modelled") for word in words)
