"""Tool-call loops as public issues describe them, and the conversations that look like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minifer.postprocessing.guards.tool_loop import ToolLoopDetector, canonical, tool_loop


def observe(calls: list[tuple[str, Any, Any]], **options: Any) -> list[bool]:
    detector = ToolLoopDetector(**options)
    return [detector.observe(*call) is not None for call in calls]


def test_f09_three_identical_calls_trip() -> None:
    call = ("search", '{"query": "dogs"}', "[]")
    assert observe([call] * 5) == [False, False, True, True, True]
    detector = ToolLoopDetector()
    reasons = [detector.observe(*call) for _ in range(3)]
    assert reasons[-1] == 'search was called 3 times in a row with {"query": "dogs"}'


def test_f09_the_order_of_keys_and_spaces_do_not_count() -> None:
    spellings = ['{"a": 1, "b": {"c": 2, "d": 3}}', '{"b":{"d":3,"c":2},"a":1}']
    calls = [("f", spellings[0], None), ("f", spellings[1], None)]
    assert observe([*calls, ("f", json.loads(spellings[1]), None)]) == [False, False, True]


def test_f09_a_poller_on_the_allow_list_never_trips() -> None:
    assert observe([("job_status", "{}", "running")] * 50, allow=["job_status"]) == [False] * 50
    assert observe([("job_status", "{}", "running")] * 3, allow="job_status") == [False] * 3


def test_f09_a_call_whose_result_changes_makes_progress() -> None:
    assert observe([("read", '{"n": 1}', f"line {i}") for i in range(50)]) == [False] * 50


def test_other_calls_in_between_break_the_row_but_a_poller_does_not() -> None:
    search, wait = ("search", "{}", "[]"), ("wait", "{}", "ok")
    assert observe([search, wait] * 10) == [False] * 20
    assert observe([search, wait] * 3, allow=["wait"]) == [False] * 4 + [True, False]


def test_the_name_alone_never_trips() -> None:
    words = ("dogs", "chess openings", "weather in Lyon", "prime numbers", "tea") * 4
    assert not any(observe([("search", {"query": word}, "[]") for word in words]))
    files = [("write", {"path": f"src/{word}.py", "text": word * 9}, "ok") for word in words[:5]]
    assert not any(observe(files * 3))


def test_arguments_that_vary_a_little_while_nothing_changes_trip_later() -> None:
    """superplanehq/superplane#4123: an empty result, and the model tries another spelling."""
    calls = [("list_runs", {"canvas": "deploy", "limit": 50, "page": i}, []) for i in range(8)]
    assert observe(calls) == [False] * 5 + [True] * 3
    changing = [(name, arguments, [i]) for i, (name, arguments, _) in enumerate(calls)]
    assert observe(changing) == [False] * 8


def test_an_argument_that_is_no_json_is_compared_as_text() -> None:
    assert observe([("f", '{"broken": ', None)] * 3) == [False, False, True]
    assert observe([("f", "[" * 100_000, None)] * 3) == [False, False, True]
    assert canonical(" not json ") == "not json"
    assert canonical('"1"') != canonical("1")
    assert canonical(float("nan")) == canonical("NaN")


@pytest.mark.parametrize("limit", [1, 0, -3, 2.5, True, None, "3"])
def test_a_bad_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="limit must be an integer of at least 2, got"):
        ToolLoopDetector(limit)


def test_the_limit_may_be_set() -> None:
    assert observe([("f", "{}", "x")] * 5, limit=5) == [False] * 4 + [True]


# -- a chat history


def turn(number: int, name: str, arguments: str, result: str | None) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if result is not None:
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    return messages


def history(*turns: tuple[str, str, str | None]) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "What is new?"}]
    for number, each in enumerate(turns):
        messages += turn(number, *each)
    return messages


CALL = ("search", '{"q": 1}', "[]")


def test_a_history_that_ends_in_a_loop_is_found() -> None:
    assert tool_loop(history(CALL, CALL)) is None
    assert "search was called 3 times" in (tool_loop(history(CALL, CALL, CALL)) or "")
    assert tool_loop(history(CALL, CALL, CALL), allow=["search"]) is None
    assert tool_loop(history(CALL, CALL, CALL), limit=4) is None


def test_results_are_found_by_their_id() -> None:
    changing = [("search", '{"q": 1}', f"result {i}") for i in range(6)]
    assert tool_loop(history(*changing)) is None
    lost = [("search", '{"q": 1}', None)] * 3  # the application dropped the results
    assert tool_loop(history(*lost)) is not None


def test_a_loop_that_is_over_is_no_loop() -> None:
    looping = history(CALL, CALL, CALL)
    assert tool_loop([*looping, *turn(9, "read", "{}", "text")]) is None
    assert tool_loop([*looping, {"role": "user", "content": "Stop that."}]) is None
    again = [*looping, {"role": "user", "content": "Once more."}, *turn(9, *CALL)]
    assert tool_loop(again) is None


def test_parallel_calls_of_one_message_count_one_by_one() -> None:
    calls = [c for n in range(3) for c in turn(n, *CALL)[0]["tool_calls"]]
    assert tool_loop([{"role": "assistant", "tool_calls": calls}]) is not None


def test_a_chat_without_tools_has_no_loop() -> None:
    assert tool_loop([]) is None
    assert tool_loop([{"role": "user", "content": "hi"}, {"role": "assistant"}] * 5) is None
    assert tool_loop([{"role": "assistant", "tool_calls": None}]) is None
