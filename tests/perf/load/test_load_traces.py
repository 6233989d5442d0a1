"""Trace files: rows of our own in the public schemas, and everything that can be wrong with one."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from minifer.perf.load.traces import Trace, TraceRow, load_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 10:00:00.1250000,300,12
2023-11-16 10:00:00.6250000,41,80
2023-11-16 10:00:02.1250000,900,7
2023-11-16 10:01:00.1250000,1200,1
2023-11-16 10:01:00.1250000,15,33
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 8]}
{"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [0, 9]}
{"timestamp": 6000, "input_length": 512, "output_length": 2, "hash_ids": [0]}
{"timestamp": 6000, "input_length": 700, "output_length": 4, "hash_ids": [1, 2]}
{"timestamp": 9000, "input_length": 3, "output_length": 1}
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,40,18,58,Conversation log
5,b,0,GPT-4,100,0,100,API log
17.5,a,3,ChatGPT,60,25,85,Conversation log
"""
BAILIAN = """\
{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 40, "output_length": 9, \
"type": "text", "turn": 1, "hash_ids": [3, 4, 5]}
{"chat_id": 2, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 16, "output_length": 3, \
"type": "search", "turn": 1, "hash_ids": [3]}
{"chat_id": 3, "parent_chat_id": 1, "timestamp": 61.114, "input_length": 65, "output_length": 7, \
"type": "text", "turn": 2, "hash_ids": [3, 4, 6, 7, 8]}
"""
OURS = """\
{"time": 1.0, "input_len": 10, "output_len": 2}

{"time": 0.5, "input_len": 11, "output_len": 3}
{"time": 2.5, "input_len": 12, "output_len": 4, "note": "further fields are not read"}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str) -> Trace:
        (tmp_path / "trace").write_text(text, encoding="utf-8")
        return load_trace(tmp_path / "trace")

    return load


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [(row.time, row.input_len, row.output_len) for row in trace.rows]


def test_d01_azure(load) -> None:
    trace = load(AZURE)
    assert trace.format == "azure"
    assert rows(trace) == [(0, 300, 12), (0.5, 41, 80), (2, 900, 7), (60, 1200, 1), (60, 15, 33)]
    with_zone = AZURE.replace("0000,", "0000+00:00,")
    assert rows(load("\ufeff" + with_zone)) == rows(trace)


def test_d01_mooncake_blocks_are_512_tokens_and_equal_ids_are_equal_tokens(load) -> None:
    trace = load(MOONCAKE)
    assert (trace.format, trace.rows[0].hash_ids) == ("mooncake", (0, 7, 8))
    assert [time for time, _, _ in rows(trace)] == [0, 0, 3, 3, 6]
    a, b, c, d, e = (session.turns[0].pieces for session in trace.sessions(range(1000), seed=3))
    assert [len(prompt) for prompt in (a, b, c, d, e)] == [1030, 600, 512, 700, 3]
    assert a[:512] == b[:512] == c != d[:512]
    assert a[512:600] != b[512:600]


def test_d01_bailian_counts_seconds_and_its_blocks_are_16_tokens(load) -> None:
    trace = load(BAILIAN)
    assert (trace.format, trace.hash_block) == ("bailian", 16)
    assert [row.hash_ids for row in trace.rows] == [(3, 4, 5), (3,), (3, 4, 6, 7, 8)]
    assert [time for time, _, _ in rows(trace)] == pytest.approx([0, 0.1, 0.114])
    a, b, c = (session.turns[0].pieces for session in trace.sessions(range(1000), seed=3))
    assert [len(prompt) for prompt in (a, b, c)] == [40, 16, 65]
    assert a[:16] == b and a[:32] == c[:32] and a[32:40] != c[32:40]


def test_d01_a_compressed_file_is_the_same_trace(load, tmp_path: Path) -> None:
    plain = load(MOONCAKE)
    (tmp_path / "trace.gz").write_bytes(gzip.compress(MOONCAKE.encode()))
    assert load_trace(tmp_path / "trace.gz") == plain


def test_d01_burstgpt_leaves_failed_requests_out(load) -> None:
    trace = load(BURSTGPT)
    assert (trace.format, trace.num_failed) == ("burstgpt", 1)
    assert rows(trace) == [(0, 40, 18), (12.5, 60, 25)]
    without_sessions = "Timestamp,Model,Request tokens,Response tokens\n0,GPT-4,3,4\n"
    assert rows(load(without_sessions)) == [(0, 3, 4)]


def test_d01_ours_and_rows_out_of_order_are_sorted_and_counted(load) -> None:
    trace = load(OURS)
    assert (trace.format, trace.num_unsorted) == ("minifer", 1)
    assert rows(trace) == [(0, 11, 3), (0.5, 10, 2), (2, 12, 4)]


def test_d01_ties_are_spread_within_their_tick(load) -> None:
    trace = load(MOONCAKE)
    spread = trace.spread(3.0, seed=1)
    assert spread == trace.spread(3.0, seed=1) != trace.spread(3.0, seed=2)
    times = [row.time for row in spread.rows]
    assert times == sorted(times) and len(set(times)) == 5 and times[0] == 0
    ticks = [row.input_len for row in spread.rows]
    assert (set(ticks[:2]), set(ticks[2:4]), ticks[4]) == ({1030, 600}, {512, 700}, 3)
    assert trace.spread(0.0, seed=1) == trace
    with pytest.raises(ValueError, match="trace_jitter must be at least 0 seconds, got -1"):
        trace.spread(-1.0, seed=1)


def test_speed_up_divides_time_and_a_selection_says_what_it_left_out(load) -> None:
    trace = load(AZURE)
    arrivals = [session.arrival for session in trace.sessions(range(9), 0, speed_up=4.0)]
    assert arrivals == [0, 0.125, 0.5, 15, 15]
    short = trace.select(limit=2, max_total_len=311)
    assert rows(short) == [(0, 41, 80), (59.5, 15, 33)]
    assert short.num_too_long == 3
    with pytest.raises(ValueError, match="max_total_len=10 leaves none of 5 rows"):
        trace.select(max_total_len=10)
    with pytest.raises(ValueError, match="speed_up must be above 0, got 0"):
        trace.sessions(range(9), 0, speed_up=0.0)


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MIXED = "2023-11-16 10:00:00,1,1\n2023-11-16 10:00:00+00:00,1,1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace is empty"),
        ("\n", "is no known trace: its columns are nothing"),
        ("a,b\n1,2\n", "its columns are a, b; known are minifer: "),
        (AZURE_HEADER, "holds no requests but 0 failed ones"),
        (AZURE_HEADER + "yesterday,1,1\n", "line 2: TIMESTAMP must be a date and"),
        (AZURE_HEADER + "2023-11-16 10:00:00,many,1\n", "line 2: ContextTokens must be a number"),
        (AZURE_HEADER + "2023-11-16 10:00:00,1\n", "line 2: GeneratedTokens is missing"),
        (AZURE_HEADER + "2023-11-16 10:00:00,0,1\n", "input length must be at least 1, got 0"),
        (AZURE_HEADER + "2023-11-16 10:00:00,1,0\n", "output length must be at least 1, got 0"),
        (AZURE_HEADER + "2023-11-16 10:00:00,1,-2\n", "output length must not be negative, got -2"),
        (AZURE_HEADER + "2023-11-16 10:00:00,1.5,2\n", "ContextTokens must be a whole number"),
        (BURSTGPT.splitlines()[0] + "\n5,a,0,m,1,0,1,x\n", "holds no requests but 1 failed ones"),
        ('{"time": 0}\n', "its columns are time; known are"),
        (
            '{"time": 0, "input_len": 1, "output_len": 2}\n{"time": 1}\n',
            "line 2: input_len is missing",
        ),
        ('{"time": 0, "input_len": 1, "output_len": 2}\n{broken\n', "line 2: not JSON"),
        ('{"time": 0, "input_len": 1, "output_len": 2}\n[3]\n', "line 2: must be a JSON object"),
        ('{"time": "NaN", "input_len": 1, "output_len": 2}\n', "time must be finite, got nan"),
        (
            '{"time": 0, "input_len": 1e999, "output_len": 2}\n',
            "line 1: input_len must be a whole number",
        ),
        (
            '{"time": 0, "input_len": true, "output_len": 2}\n',
            "input_len must be a number, got True",
        ),
        ('{"time": 0, "input_len": null, "output_len": 2}\n', "line 1: input_len is missing"),
        (
            MOONCAKE.replace("[0, 7, 8]", "[0, 7.5]"),
            "line 1: hash_ids must be a list of whole numbers",
        ),
        (BAILIAN.replace("61.114", '"soon"'), "line 3: timestamp must be a number, got 'soon'"),
    ],
)
def test_d01_faults_are_named_with_their_line(load, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(text)


def test_d01_azure_times_with_and_without_a_zone_are_both_utc(load) -> None:
    assert load(AZURE_HEADER + MIXED).rows == (TraceRow(0, 1, 1), TraceRow(0, 1, 1))
