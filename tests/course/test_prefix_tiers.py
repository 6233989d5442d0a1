"""The values behind the pictures of lecture 5, against an engine and against counting by hand."""

from __future__ import annotations

import random

import pytest

from minifer.course.pictures import prefix_tiers as tiers
from minifer.events import Event
from minifer.kv.tiers.block_file import BlockFormat


def event(name, request_id=None, token_range=None, stage="kv", **data):
    return Event(0.0, 1, request_id, stage, name, token_range, data)


def test_the_tree_forks_where_prompts_part():
    run = tiers.serve_visits((("A", 2), ("B", 2), ("C", 2)), num_kv_blocks=16, prefix_index="radix")
    tree = tiers.tree_data(run.engine.kv.pool.index, run.events)
    seen = [(b.row, b.place, b.above, b.owner, b.found_by, bytes(b.tokens)) for b in tree]
    assert seen == [
        (0, 0, None, "A", ("B",), b"The impo"),
        (0, 1, 0, "A", ("B",), b"rt state"),
        (0, 2, 0, "B", (), b"ment exe"),
        (1, 0, None, "C", (), b"A class "),
        (1, 1, 1, "C", (), b"definiti"),
    ]


def test_visits_find_what_is_left_in_each_tier(tmp_path):
    run = tiers.serve_visits(folder=tmp_path, dram_blocks=9)
    found = {v.name: tuple(v.found.values()) for v in run.visits if any(v.found.values())}
    assert found == {
        "B": (16, 0, 0),
        "chat 2": (24, 0, 0),
        "C again": (0, 16, 0),
        "A again": (0, 8, 8),
    }
    last = run.visits[-1].shelves
    assert len(last.device) == 8 and not any(last.in_use)
    assert last.dram[-3:] == ("A2", "A1", "A0") and len(last.dram) == 9
    assert set(last.dram) <= set(last.disk) and len(last.disk) == 13
    columns = tiers.occupancy_data(run.events, 9)
    assert [column.dram for column in columns] == [dram for dram, _ in run.held]
    assert [c.number for c in columns] == list(range(1, len(columns) + 1))
    assert all(c.in_use + c.cached <= 8 for c in columns)
    assert [(c.request, c.hits["DRAM"], c.hits["disk"]) for c in columns if c.hits["DRAM"]] == [
        ("C again", 16, 0),
        ("A again", 8, 8),
    ]
    run.engine.close()


def test_occupancy_counts_tables_and_what_is_free():
    columns = tiers.occupancy_data(
        [
            event("kv.block_allocated", "A", blocks=[0, 1]),
            event("kv.block_published", "A", blocks=[0]),
            event("request.scheduled", "A", (0, 9), stage="scheduling"),
            event("kv.block_stored", blocks=1),
            event("step.postprocessed", stage="postprocessing"),
            event("kv.block_freed", "A", blocks=[1, 0]),
            event("kv.prefix_hit", "B", (0, 8), blocks=[0]),
            event("kv.prefetch_done", asked=3, blocks=3),
            event("kv.tier_hit", "B", (8, 24), dram=8, disk=8),
            event("request.scheduled", "B", (8, 9), stage="scheduling"),
            event("step.postprocessed", stage="postprocessing"),
            event("kv.block_freed", "B", blocks=[0]),
            event("kv.block_evicted", blocks=[0]),
            event("request.scheduled", "C", (0, 1), stage="scheduling"),
            event("step.postprocessed", stage="postprocessing"),
        ],
        dram_blocks=3,
    )
    assert [(c.request, c.in_use, c.cached, c.dram) for c in columns] == [
        ("A", 2, 0, 1),
        ("B", 1, 0, 3),
        ("C", 0, 0, 3),
    ]
    assert columns[1].hits == {"device": 8, "DRAM": 8, "disk": 8}


def test_an_eviction_of_a_block_in_use_is_counted():
    allocated = event("kv.block_allocated", "A", blocks=[0, 1])
    freed = event("kv.block_freed", "A", blocks=[1])
    evicted = event("kv.block_evicted", blocks=[0, 1])
    assert tiers.evictions([allocated, freed, evicted]) == (2, 1)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_replay_with_room_for_all_finds_every_beginning(index):
    prompts = tiers.random_prompts(random.Random(1), 60)
    seen: set[tuple[int, ...]] = set()
    expected = []
    for tokens in prompts:
        ends = range(8, len(tokens) + 1, 8)
        expected.append(sum(tuple(tokens[:end]) in seen for end in ends))
        seen |= {tuple(tokens[:end]) for end in ends}
    keys = [tiers.keys_of(tokens) for tokens in prompts]
    assert tiers.replay(keys, 1000, index) == expected
    assert {beginning for _, beginning in tiers.names_of(prompts)} == seen


def test_a_circle_finds_nothing_until_it_fits():
    circle = tiers.workload("circle", random.Random(1), count=36)
    assert tiers.hit_rate(circle, 132) == 0
    assert tiers.hit_rate(circle, 138) == pytest.approx(24 / 36 * 6 / 12)  # leaves go first
    assert tiers.hit_rate(circle, 144) == 24 / 36
    assert tiers.hit_rate(tiers.workload("new", random.Random(1), count=9), 200) == 0
    with pytest.raises(ValueError, match="kind"):
        tiers.workload("old", random.Random(1))


def test_a_name_is_that_of_the_ids_whether_they_come_as_bytes_or_as_a_list():
    text = b"sixteen letters."
    assert tiers.names_of([text]) == tiers.names_of([list(text)])


def test_equal_tokens_after_another_beginning_agree_in_the_first_layer_only():
    apart = tiers.block_differences("Red car is fast and", "Old dog is fast and")
    for layers in apart.values():
        assert layers[0] < 1e-6 and min(layers[1:]) > 0.1


def test_predictions_are_bytes_over_rates():
    device = tiers.Device("x", 1e9, 2e9, 1, 1, 1, "here", "2026-01")
    got = tiers.predict_reload((16, 32), device, 1e6, {"net": 2e6})
    assert got["from disk"] == [2 * tiers.BLOCK_BYTES / 1e6, 4 * tiers.BLOCK_BYTES / 1e6]
    assert got["net"] == [seconds / 2 for seconds in got["from disk"]]
    assert got["from DRAM"] == [seconds / 1e3 for seconds in got["from disk"]]
    assert got["recompute"][1] > 1.9 * got["recompute"][0]


def test_times_are_taken_of_every_length(tmp_path):
    times = tiers.time_reload(tmp_path, (8, 24), repeats=1)
    assert times.num_tokens == (8, 24)
    for seconds in (times.recompute, times.dram, times.disk):
        assert len(seconds) == 2 and min(seconds) > 0
    assert tiers.file_read_rate(tmp_path, 1 << 20) > 0
    assert not (tmp_path / "large").exists()


def test_a_broken_hash_finds_nothing_and_a_file_is_named_by_all_it_depends_on():
    assert tiers.found_under_one_name(b"Red car ", b"Old dog ") == [1, 0]
    assert tiers.found_under_one_name(b"Red car ", b"Red car ") == [1, 1]
    layout = BlockFormat((("weights", "ours"),), "F32", (8, 8, 6, 16))
    assert tiers.names_of_file(layout, tiers.keys_of(b"Red car ")[0]) == 4
