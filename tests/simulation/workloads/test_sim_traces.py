"""Trace files as workloads: blocks by name, rates, and which public file it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from minifer.perf.load.traces import Trace, TraceRow, load_trace
from minifer.simulation.workloads import traces
from minifer.simulation.workloads.statistics import blocks_found, describe
from minifer.simulation.workloads.traces import KNOWN_TRACES, KnownTrace, recognise, trace_workload

ROWS = (  # time, prompt, output, blocks of 512 tokens
    TraceRow(0.0, 1_030, 5, (0, 7, 8)),
    TraceRow(0.0, 1_100, 9, (0, 9, 10)),
    TraceRow(3.0, 1_600, 2, (0, 7, 11, 12)),
    TraceRow(3.0, 700, 4, (1, 2)),
    TraceRow(6.0, 3, 1),
)


def test_d01_a_name_stands_for_its_block_and_all_before_it() -> None:
    workload = trace_workload(Trace("mooncake", ROWS))
    a, b, c, d, e = (row.block_names for row in workload)
    assert [len(names) for names in (a, b, c, d, e)] == [2, 2, 3, 1, 0]  # full ones only
    assert a == c[:2] and a[0] == b[0] and a[1] != b[1] and d[0] != a[0]
    assert blocks_found(workload) == [0, 1, 2, 0, 0]
    assert [row.request_id for row in workload] == ["r0", "r1", "r2", "r3", "r4"]


def test_d01_equal_contents_behind_different_ones_have_different_names() -> None:
    rows = (TraceRow(0.0, 1_024, 1, (1, 5)), TraceRow(0.0, 1_024, 1, (2, 5)))
    first, second = (row.block_names for row in trace_workload(Trace("mooncake", rows)))
    assert set(first).isdisjoint(second)


def test_d01_blocks_of_16_tokens_become_blocks_of_512() -> None:
    same, other = tuple(range(64)), (*range(63), 99)
    rows = (
        TraceRow(0.0, 1_030, 1, (*same, 77)),
        TraceRow(1.0, 1_024, 1, other),
        TraceRow(2.0, 1_030, 1, same[:40]),  # hashes end before the prompt does
    )
    workload = trace_workload(Trace("bailian", rows, hash_block=16))
    assert [len(row.block_names) for row in workload] == [2, 2, 1]
    assert blocks_found(workload) == [0, 1, 1]
    with pytest.raises(ValueError, match="blocks of 24 tokens do not divide those of 512"):
        trace_workload(Trace("x", rows, hash_block=24))


def test_a_rate_plays_the_trace_faster() -> None:
    assert [row.time for row in trace_workload(Trace("x", ROWS))] == [0, 0, 3, 3, 6]
    fast = trace_workload(Trace("x", ROWS), rate=4 / 3)
    assert [row.time for row in fast] == pytest.approx([0, 0, 1.5, 1.5, 3])
    assert describe(fast).rate == pytest.approx(4 / 3)
    alone = (TraceRow(0.0, 5, 5),)
    assert trace_workload(Trace("x", alone), rate=3.0)[0].time == 0
    with pytest.raises(ValueError, match=r"rate=3 needs .* all 2 come at the same time"):
        trace_workload(Trace("x", alone * 2), rate=3.0)
    with pytest.raises(ValueError, match="rate must be above 0, got 0"):
        trace_workload(Trace("x", ROWS), rate=0.0)


def test_d01_a_public_file_is_recognised_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [0]}\n'
    file = tmp_path / "renamed.jsonl"
    file.write_text(text)
    assert recognise(file) is None
    known = KnownTrace("invented", "nowhere", "Apache-2.0", tick=3.0)
    digest = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(traces, "KNOWN_TRACES", {digest: known})
    assert recognise(file) == known
    file.write_text(text + "\n")
    assert recognise(file) is None
    assert len(load_trace(file).rows) == 1


def test_the_four_public_files_are_listed_with_source_and_licence() -> None:
    assert len(KNOWN_TRACES) == 4
    assert all(len(digest) == 64 for digest in KNOWN_TRACES)
    assert {known.licence for known in KNOWN_TRACES.values()} == {"CC-BY-4.0", "Apache-2.0"}
    assert [known.tick for known in KNOWN_TRACES.values()] == [0, 0, 3, 0]
