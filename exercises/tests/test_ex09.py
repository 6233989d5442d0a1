"""Tests of exercises 09: a learner's tests are graded by engines, repairs by a cure and a contract.

Every engine is the real one, with one fault of the registry or none; it has another model, block
size and pool each time, and all look alike from outside. What each patient has stands nowhere in
this file.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from minifer.course import clinic
from minifer.course.grading import compare, points, probe
from minifer.course.grading.plain import plain, short

ALLOWED_IMPORTS = tuple(
    f"minifer.course.clinic.{name}" for name in ("patient", "healthy", "report")
)
WORDS = (
    "The import statement",
    "A class definition",
    "Strings are immutable",
    "The for statement",
)


def demand(holds: bool, tried: str, expected: str, got: str = "") -> None:
    """For what is true or not: the message says what was wanted."""
    if not holds:
        told = f"\ngot       {got}" if got else ""
        raise AssertionError(f"tried     {tried}{told}\nexpected  {expected}")


# -- 9.1 to 9.4: the patients


def others(number: int) -> list[str]:
    """The other faults of the menu."""
    return [name for name in clinic.MENU if name != clinic.fault_of(number)]


def engines(
    faults: Sequence[str | None], rng: random.Random
) -> list[tuple[str | None, clinic.Window]]:
    """An engine for each fault, in an order that says nothing; None is healthy."""
    faults = list(faults)
    rng.shuffle(faults)
    loaded = clinic.variant(torch.Generator().manual_seed(rng.getrandbits(32)))
    return [
        (
            fault,
            clinic.window(
                fault,
                loaded=loaded,
                block_size=rng.choice((4, 6, 8)),
                num_blocks=rng.randint(12, 16),
            ),
        )
        for fault in faults
    ]


def alarm(test: Callable[[Any], Any], engine: clinic.Window) -> bool:
    """Does a learner's test fail on this engine?"""
    with clinic.closed_ward():
        try:
            test(engine)
        except AssertionError:
            return True
    return False


def judge(
    target: Any, number: int, faults: Sequence[str | None], rng: random.Random
) -> None:
    own = clinic.fault_of(number)
    test = getattr(target, f"test_{number}")
    kinds = {own: "has the patient's fault", None: "is healthy"}
    for fault, engine in engines(faults, rng):
        rang = alarm(test, engine)
        tried = f"test_{number}(engine), which {kinds.get(fault, 'has another fault')}"
        expected = "AssertionError" if fault == own else "no error"
        got = "AssertionError" if rang else "no error"
        blocks = f"{engine.num_blocks} blocks of {engine.block_size}"
        demand(rang == (fault == own), f"{tried}; {blocks}", expected, got)


def judge_sensitive(target: Any, number: int, rng: random.Random) -> None:
    own = clinic.fault_of(number)
    judge(target, number, [own, own, None, None], rng)


def judge_specific(target: Any, number: int, rng: random.Random) -> None:
    judge(target, number, [clinic.fault_of(number), None, *others(number)], rng)


def judge_name(target: Any, number: int) -> None:
    got = plain(getattr(target, f"diagnosis_{number}")())
    tried = f"diagnosis_{number}()"
    known = type(got) is str and got in clinic.MENU
    demand(known, tried, "a name of the menu", short(got))
    right = got == clinic.fault_of(number)
    demand(right, tried, "the name of another fault of the menu", short(got))


def repair_of(target: Any, number: int) -> tuple[str, Callable[..., Any]]:
    """The part and the function. Raises where the part is not the one that is broken."""
    got = plain(getattr(target, f"repair_{number}")())
    tried = f"repair_{number}()"
    pair = type(got) in (tuple, list) and len(got) == 2 and callable(got[1])
    demand(pair, tried, "a pair: the name of a part, and a function", short(got))
    name = plain(got[0])
    known = type(name) is str and name in CONTRACTS
    demand(known, tried, f"a part: one of {', '.join(CONTRACTS)}", short(name))
    ill = clinic.MENU[clinic.fault_of(number)]
    told = f"another part: the patient's {name} was healthy"
    demand(name == ill, tried, told, f"a new part {name!r}")
    return name, got[1]


def treat(window: clinic.Window) -> list[clinic.Reply]:
    """Enough of everything for any fault of the menu to show."""
    P, N = window.block_size, window.num_blocks
    replies = window.ask(*("q" * n for n in (P, 2 * P)), max_tokens=4)
    replies += window.ask("h" * P + "p" * P) + window.ask("p" * P + "h" * P + "?")
    replies += window.ask(*("s" * (2 * P) for _ in "ab"), salt="other", max_tokens=2)
    replies += window.ask("Say: ", says="“naïve” 你好 👋.", stop=("ok", "好 no"))
    return replies + window.ask(*(f"{n}: " for n in "abc"), max_tokens=P * N // 2)


def judge_cure(target: Any, number: int, rng: random.Random) -> None:
    part = repair_of(target, number)
    loaded = clinic.variant(torch.Generator().manual_seed(rng.getrandbits(32)))
    shape = {"block_size": rng.choice((4, 8)), "num_blocks": rng.randint(12, 16)}
    truth = treat(clinic.window(loaded=loaded, **shape))
    fault = clinic.fault_of(number)
    tried = f"the patient with the new part {part[0]!r}"
    try:
        got = treat(clinic.window(fault, loaded=loaded, part=part, **shape))
    except NotImplementedError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"tried     {tried}\ngot       {said}\nexpected  replies"
        ) from None
    for ours, theirs in zip(got, truth, strict=True):
        for name in ("text", "tokens", "num_cached"):
            compare(getattr(ours, name), getattr(theirs, name), f"{name} of {tried}")


# What each part must do: a reference, and arguments to try.


def key_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    tokens = [tuple(rng.randrange(256) for _ in range(4)) for _ in range(6)]
    tokens += [(1, 2, 3, 4), (4, 3, 2, 1), (12, 3, 4, 0), (1, 23, 4, 0)]
    parents = [None, *(bytes(rng.randrange(256) for _ in range(32)) for _ in range(9))]
    salts = [None, "", "a", "b", "None", "alice", "bob", "1", "(1, 2, 3, 4)", "tenant"]
    cases = list(itertools.product(parents, tokens, salts))
    rng.shuffle(cases)
    return cases


def check_key(function: Callable[..., Any], rng: random.Random) -> None:
    seen: dict[bytes, tuple[Any, ...]] = {}
    for arguments in key_cases(rng):
        tried = f"key{arguments}"
        got = plain(function(*arguments))
        demand(type(got) is bytes, tried, "bytes", short(got))
        again = plain(function(*arguments))
        demand(again == got, tried, "the same name when asked again", short(again))
        twin = f"another name than key{seen.get(got)}"
        demand(got not in seen, tried, twin, short(got))
        seen[got] = arguments


def right_characters(held: bytes, new: bytes) -> tuple[str, bytes]:
    whole = held + new
    for size in range(min(3, len(whole)), 0, -1):
        tail = whole[len(whole) - size :]
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return whole[: len(whole) - size].decode("utf-8", "replace"), tail
    return whole.decode("utf-8", "replace"), b""


def characters_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    text = "“a é 你 👋. ñ" + "".join(rng.choice("aé你👋 ") for _ in range(12))
    cases, held = [], b""
    for byte in text.encode():
        cases.append((held, bytes([byte])))
        held = right_characters(held, bytes([byte]))[1]
    cases += [(b"", text.encode()), (b"\xe4\xbd", b"\xa0"), (b"", b"\xf0\x9f\x91")]
    cases += [(b"\xe4", b"x"), (b"", b"\xff"), (b"", b"a\xffb"), (b"\xf0\x9f", b"\xe4")]
    return [*cases, (b"", b""), (b"\xc3", b""), (b"", b"\x80\x80")]


def slots_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    cases = []
    for P in (1, 4, 5, 16):
        table = rng.sample(range(50), 4)
        start = rng.randrange(2 * P)
        spans = [(0, 4 * P), (start, start + 1), (start, 3 * P), (P, P), (P - 1, P)]
        cases += [(list(table), P, a, b) for a, b in spans]
    return cases


def resume_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    prompt = [rng.randrange(256) for _ in range(5)]
    return [(list(prompt), [7, 8, 7]), (list(prompt), []), ([3], [3, 3, 4]), ([1], [2])]


def release_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    stops = ("xyy", "END", "\n\n")
    texts = [("", "abc"), ("", "ax"), ("x", "y"), ("xy", "x"), ("xy", "z"), ("E", "N")]
    texts += [("EN", "\n"), ("", "END"[:2]), ("\n", "a"), ("", ""), ("x", "xE")]
    return [(held, new, stops) for held, new in texts]


def right_release(held: str, new: str, stops: Sequence[str]) -> tuple[str, str]:
    whole = held + new
    size = next(
        size
        for size in range(len(whole), -1, -1)
        if any(stop.startswith(whole[len(whole) - size :]) for stop in stops)
    )
    return whole[: len(whole) - size], whole[len(whole) - size :]


def by_reference(
    name: str,
    reference: Callable[..., Any],
    cases: Callable[[random.Random], list[tuple[Any, ...]]],
) -> Callable[[Callable[..., Any], random.Random], None]:
    def check(function: Callable[..., Any], rng: random.Random) -> None:
        for arguments in cases(rng):
            expected = reference(*arguments)
            tried = f"{name}({', '.join(map(repr, arguments))})"
            before = repr(arguments)
            got = function(*arguments)
            compare(got, expected, tried)
            demand(repr(arguments) == before, tried, "the inputs as they were")

    return check


CONTRACTS: dict[str, Callable[[Callable[..., Any], random.Random], None]] = {
    "characters": by_reference("characters", right_characters, characters_cases),
    "key": check_key,
    "length": by_reference(
        "length", lambda p: p + 1, lambda rng: [(rng.randrange(99),) for _ in range(9)]
    ),
    "positions": by_reference(
        "positions",
        lambda start, end: list(range(start, end)),
        lambda rng: [(0, 5), (3, 4), (7, 7), (rng.randrange(9), 12)],
    ),
    "release": by_reference("release", right_release, release_cases),
    "resume": by_reference("resume", lambda a, b: a + b, resume_cases),
    "slots": by_reference(
        "slots",
        lambda table, P, a, b: [table[p // P] * P + p % P for p in range(a, b)],
        slots_cases,
    ),
}


def judge_contract(target: Any, number: int, rng: random.Random) -> None:
    name, function = repair_of(target, number)
    CONTRACTS[name](function, rng)


# Two parts must be right before a cure means anything; so each exercise has its own functions.


@points("9.1", 2, hidden=True)
def test_ex09_1_the_fault_has_its_name(target):
    judge_name(target, 1)


@points("9.1", 2)
def test_ex09_1_fails_with_the_fault_and_passes_without(target, rng):
    judge_sensitive(target, 1, rng)


@points("9.1", 2)
def test_ex09_1_fails_with_this_fault_and_no_other(target, rng):
    judge_specific(target, 1, rng)


@points("9.1", 1)
def test_ex09_1_the_new_part_does_what_the_table_says(target, rng):
    judge_contract(target, 1, rng)


@points("9.1", 1)
def test_ex09_1_the_patient_recovers(target, rng):
    judge_cure(target, 1, rng)


@points("9.2", 2, hidden=True)
def test_ex09_2_the_fault_has_its_name(target):
    judge_name(target, 2)


@points("9.2", 2)
def test_ex09_2_fails_with_the_fault_and_passes_without(target, rng):
    judge_sensitive(target, 2, rng)


@points("9.2", 2)
def test_ex09_2_fails_with_this_fault_and_no_other(target, rng):
    judge_specific(target, 2, rng)


@points("9.2", 1)
def test_ex09_2_the_new_part_does_what_the_table_says(target, rng):
    judge_contract(target, 2, rng)


@points("9.2", 1)
def test_ex09_2_the_patient_recovers(target, rng):
    judge_cure(target, 2, rng)


@points("9.3", 2, hidden=True)
def test_ex09_3_the_fault_has_its_name(target):
    judge_name(target, 3)


@points("9.3", 2)
def test_ex09_3_fails_with_the_fault_and_passes_without(target, rng):
    judge_sensitive(target, 3, rng)


@points("9.3", 2)
def test_ex09_3_fails_with_this_fault_and_no_other(target, rng):
    judge_specific(target, 3, rng)


@points("9.3", 1)
def test_ex09_3_the_new_part_does_what_the_table_says(target, rng):
    judge_contract(target, 3, rng)


@points("9.3", 1)
def test_ex09_3_the_patient_recovers(target, rng):
    judge_cure(target, 3, rng)


@points("9.4", 2, hidden=True)
def test_ex09_4_the_fault_has_its_name(target):
    judge_name(target, 4)


@points("9.4", 2)
def test_ex09_4_fails_with_the_fault_and_passes_without(target, rng):
    judge_sensitive(target, 4, rng)


@points("9.4", 2)
def test_ex09_4_fails_with_this_fault_and_no_other(target, rng):
    judge_specific(target, 4, rng)


@points("9.4", 1)
def test_ex09_4_the_new_part_does_what_the_table_says(target, rng):
    judge_contract(target, 4, rng)


@points("9.4", 1)
def test_ex09_4_the_patient_recovers(target, rng):
    judge_cure(target, 4, rng)


# -- 9.5: the loop guard


def is_layout(passage: str) -> bool:
    numbers = set(passage) <= set("0123456789 \t\n,;.()[]{}+-")
    return set(passage) <= set(" \t\n|-=_*#.:+~") or (
        numbers and any(c.isdigit() for c in passage)
    )


def trips(
    tokens: Sequence[int],
    texts: Sequence[str],
    max_period: int = 64,
    min_count: int = 4,
    min_tokens: int = 48,
    max_layout: int = 512,
) -> int | None:
    """Index of the token at which it is a loop, by the definition."""
    runs = [0] * (max_period + 1)
    for place, token in enumerate(tokens):
        for p in range(1, min(max_period, place) + 1):
            runs[p] = runs[p] + 1 if tokens[place - p] == token else 0
            tail = p + runs[p]
            if runs[p] == 0 or tail < min_count * p:
                continue
            layout = is_layout("".join(texts[place + 1 - p : place + 1]))
            if tail >= (max_layout if layout else min_tokens):
                return place
    return None


def check_guard(
    target: Any, tokens: Sequence[int], texts: Sequence[str], what: str, **limits: int
) -> None:
    guard = target.LoopGuard(**limits)
    expected = trips(tokens, texts, **limits)
    said = ", ".join(f"{name}={value}" for name, value in limits.items())
    for place, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        loop = expected is not None and place >= expected
        tried = f"LoopGuard({said}), push number {place + 1} of {what}"
        compare(guard.push(token, text), loop, tried)


def of_text(text: str) -> tuple[list[int], list[str]]:
    return list(text.encode()), [chr(byte) for byte in text.encode("ascii")]


SMALL = {"max_period": 8, "min_count": 3, "min_tokens": 6, "max_layout": 12}


@points("9.5", 2)
def test_ex09_5_loops_are_found_when_they_are_loops(target, rng):
    check_guard(target, [1, 2] * 4, ["a", "b"] * 4, "1 2 1 2 …", **SMALL)
    check_guard(target, [5] * 9, ["z"] * 9, "5 5 5 …", **SMALL)
    check_guard(target, [1, 2, 3, 4] * 4, list("abcd") * 4, "1 2 3 4 1 …", **SMALL)
    one = SMALL | {"max_period": 1}
    check_guard(target, [7] * 9, ["w"] * 9, "7 7 7 …", **one)
    once = SMALL | {"min_count": 1}  # no token is there twice: no period counts
    check_guard(target, [*range(20)], ["w"] * 20, "0 1 2 3 …", **once)
    late = {"max_period": 2, "min_count": 4, "min_tokens": 6, "max_layout": 12}
    check_guard(target, [7] * 14, list("----a---------"), "7 7 … as ----a----", **late)
    for period in (1, 2, 3, 7, 8, 9):
        start = [rng.randrange(50, 90) for _ in range(rng.randint(0, 9))]
        tokens = start + [rng.randrange(3) for _ in range(period)] * 5
        tokens += [rng.randrange(90, 99) for _ in range(3)]
        check_guard(target, tokens, ["w"] * len(tokens), str(tokens), **SMALL)
    for count, least in ((1, 5), (2, 1), (2, 7), (4, 9), (3, 20)):
        limits = {"max_period": 6, "min_count": count, "min_tokens": least}
        tokens = [rng.randrange(2) for _ in range(60)]
        check_guard(target, tokens, ["w"] * 60, str(tokens), max_layout=99, **limits)


@points("9.5", 1)
def test_ex09_5_the_defaults_find_a_doom_loop(target, rng):
    word = "".join(rng.choice("abcdefgh") for _ in range(9))
    for passage in ("I will try again. ", "ha ", f"{word} and ", "x" * 70 + "y"):
        text = "So: " + passage * 30
        check_guard(target, *of_text(text), f"'So: ' and 30 times {passage!r}")


TABLE = "| a | b |\n" + "| --- " * 8 + "|\n" + "| 1 | 2 |\n| 3 | 4 |\n"
ZEROS = "x = [" + "0, " * 60 + "0]\n"
RULER = "Title\n" + "=" * 70 + "\nText below it.\n"
CODE = "".join(f"    case {c}: return {i};\n" for i, c in enumerate("abcdefgh"))
DEEP = "if a:\n" + " " * 80 + "return b\n"


@points("9.5", 1)
def test_ex09_5_tables_rulers_and_code_pass_and_nothing_runs_for_ever(target):
    for text in (TABLE, ZEROS, RULER, CODE, DEEP):
        demand(trips(*of_text(text)) is None, text, "no loop by the definition")
        check_guard(target, *of_text(text), repr(text[:30]) + " …")
    for text in ("- " * 300, "0, " * 200, "=" * 520):
        check_guard(target, *of_text(text), repr(text[:9]) + " …")
    check_guard(target, [7] * 20, ["-"] * 20, "7 7 7 … with the text '-'", **SMALL)
    mixed = ["a", "-"] * 12  # the passage decides, not the newest token
    check_guard(target, [1, 2] * 12, mixed, "1 2 1 2 … with 'a' and '-'", **SMALL)


class Counted(int):
    """A token that counts the comparisons it is in."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def kept(value: Any) -> int:
    """How many values an object holds, however deep they lie in it."""
    inside = list(getattr(value, "__dict__", {}).values())
    inside += [getattr(value, n, 0) for n in getattr(type(value), "__slots__", ())]
    if isinstance(value, dict):
        inside += [*value, *value.values()]
    elif isinstance(value, (str, bytes, bytearray, torch.Tensor)):
        return len(value)
    elif hasattr(value, "__iter__") and hasattr(value, "__len__"):
        inside += list(value)
    return 1 + sum(map(kept, inside))


@points("9.5", 1)
def test_ex09_5_a_push_costs_no_more_late_than_early(target, rng):
    guard = target.LoopGuard(16, 4, 40, 80)
    for place in range(600):
        Counted.count = 0
        loop = guard.push(Counted(rng.randrange(40)), "w")
        tried = f"push number {place + 1} with max_period=16"
        most = f"at most 16 comparisons, it were {Counted.count}"
        demand(Counted.count <= 16, tried, most)
        compare(loop, False, tried)
    held = kept(guard)
    told = f"a guard that keeps at most some multiples of 16 values, it keeps {held}"
    demand(held <= 16 * 20, "600 pushes with max_period=16", told)


# -- 9.6: the tool-loop breaker


def call(tool: str = "search", arguments: str = '{"q": "a"}', result: str = "[]"):
    return (tool, arguments, result)


def check_loop(target: Any, calls: Sequence[Any], expected: int | None, **more: Any):
    extra = "".join(f", {name}={value!r}" for name, value in more.items())
    tried = f"find_loop({calls!r}{extra})"
    before = repr(calls)
    compare(target.find_loop(calls, **more), expected, tried)
    demand(repr(calls) == before, tried, "the input as it was")


@points("9.6", 1)
def test_ex09_6_equal_calls_in_a_row_are_a_loop(target, rng):
    check_loop(target, [], None)
    check_loop(target, [call()] * 2, None)
    check_loop(target, [call()] * 3, 2)
    check_loop(target, [call()] * 9, 2)
    check_loop(target, [call("other"), *[call()] * 5], 3)
    check_loop(target, [call(), call(), call("other"), call(), call()], None)
    check_loop(target, [call(arguments=f'{{"q": {i}}}') for i in range(9)], None)
    check_loop(target, [call(tool) for tool in "abcabcabc"], None)
    for limit in (2, 4, 5):
        prefix = [call(str(i)) for i in range(rng.randrange(4))]
        check_loop(target, prefix + [call()] * 6, len(prefix) + limit - 1, limit=limit)


@points("9.6", 1)
def test_ex09_6_spelling_does_not_count(target, rng):
    values = {"q": "ü", "n": 1, "deep": {"b": [1, 2], "a": None}}
    pairs = list(values.items())
    spellings = []
    for indent in (None, 1, 4):
        rng.shuffle(pairs)
        spellings.append(json.dumps(dict(pairs), indent=indent))
    check_loop(target, [call(arguments=s) for s in spellings], 2)
    results = ['{"a": 1, "b": 2}', '{"b":2,"a":1}', ' {"a":1,\n"b":2}']
    check_loop(target, [call(result=s) for s in results], 2)
    check_loop(target, [call(arguments=s) for s in ("[1,2]", "[2,1]", "[1,2]")], None)
    check_loop(target, [call(arguments=s) for s in ("1", "1.0", "true")], None)
    check_loop(target, [call(arguments=s) for s in ('"a"', "a", '"a"')], None)
    nan = ('{"q": NaN}', '{"q":NaN}', ' {"q" : NaN}')
    check_loop(target, [call(arguments=s) for s in nan], 2)
    deep = ('{"n": [1]}', '{"n": [1.0]}', '{"n": [true]}')
    check_loop(target, [call(arguments=s) for s in deep], None)
    check_loop(target, [call(arguments=s) for s in ("ls -l", " ls -l", "ls -l\n")], 2)
    check_loop(target, [call(arguments=s) for s in ("ls -l", "ls  -l", "ls -l")], None)
    check_loop(
        target, [call(arguments=s) for s in ('{"q": 1', '{"q":1', '{"q": 1')], None
    )


@points("9.6", 1)
def test_ex09_6_progress_and_allowed_tools_are_no_loop(target):
    polls = [call("poll", "{}", f'{{"percent": {n}}}') for n in range(9)]
    check_loop(target, polls, None)
    waits = [call("wait", "{}", "not yet")] * 6
    check_loop(target, waits, 2)
    check_loop(target, waits, None, allow=("wait",))
    between = [call(), waits[0], call(), waits[0], call()]
    check_loop(target, between, None)
    check_loop(target, between, 4, allow=["wait"])
    check_loop(target, [call(result="x"), call(result="y"), call(result="x")], None)


# -- probes: what an answer does, where known mistakes differ


def told(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"raises {type(error).__name__}"


def look(target: Any, number: int) -> list[Any]:
    """Diagnosis, the verdicts of the test on engines in a fixed order, the part on some inputs."""
    rng = random.Random(number)
    faults: list[str | None] = [clinic.fault_of(number), None, *others(number)]
    test = getattr(target, f"test_{number}")
    verdicts = [
        told(lambda engine=engine: alarm(test, engine))
        for _, engine in engines(faults, rng)
    ]
    repair = told(lambda: repair_of(target, number))
    part: Any = repair
    if isinstance(repair, tuple):
        name, function = repair
        cases = PROBED[name](random.Random(0))
        asked = repr(cases)
        part = [
            name,
            [told(lambda a=a: function(*a)) for a in cases],
            asked == repr(cases),
        ]
        if name == "key":
            part = [name, key_facts(function)]
    return [told(getattr(target, f"diagnosis_{number}")), verdicts, part]


def key_facts(function: Callable[..., Any]) -> list[Any]:
    """Which arguments a key takes notice of, whatever the key itself is."""
    base = (b"parent", (1, 2, 3, 4), "salt")
    changed = [
        (b"other", (1, 2, 3, 4), "salt"),
        (b"parent", (1, 2, 3, 5), "salt"),
        (b"parent", (4, 3, 2, 1), "salt"),
        (b"parent", (1, 2, 3, 4), "pepper"),
        (b"parent", (1, 2, 3, 4), None),
        (None, (1, 2, 3, 4), "salt"),
    ]
    same = told(lambda: function(*base) == function(*base))
    size = told(lambda: len(function(*base)))
    kind = told(lambda: type(function(*base)).__name__)
    differs = [told(lambda a=a: function(*a) != function(*base)) for a in changed]
    apart = told(
        lambda: function(None, (12, 3, 4), None) != function(None, (1, 23, 4), None)
    )
    return [same, size, kind, differs, apart]


PROBED: dict[str, Callable[[random.Random], list[tuple[Any, ...]]]] = {
    "characters": characters_cases,
    "key": lambda rng: [],
    "length": lambda rng: [(n,) for n in range(5)],
    "positions": lambda rng: [(0, 5), (3, 4)],
    "release": release_cases,
    "resume": resume_cases,
    "slots": slots_cases,
}


@probe("9.1")
def probe_1(target):
    return look(target, 1)


@probe("9.2")
def probe_2(target):
    return look(target, 2)


@probe("9.3")
def probe_3(target):
    return look(target, 3)


@probe("9.4")
def probe_4(target):
    return look(target, 4)


@probe("9.5")
def probe_5(target):
    rng = random.Random(5)
    cases = [([1, 2] * 8, list("ab") * 8, SMALL), ([7] * 20, ["-"] * 20, SMALL)]
    cases += [([1, 2] * 12, ["a", "-"] * 12, SMALL), ([9] * 9, ["z"] * 9, SMALL)]
    cases += [([rng.randrange(2) for _ in range(60)], ["w"] * 60, SMALL)]
    cases += [([1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4], ["w"] * 11, SMALL)]
    cases += [
        ([*range(9)] * 5, ["w"] * 45, SMALL),
        ([*range(8)] * 5, ["w"] * 40, SMALL),
    ]
    cases += [
        (*of_text(t), {}) for t in (TABLE, ZEROS, RULER, "- " * 300, "Go on. " * 20)
    ]
    cases += [([*range(20)], ["w"] * 20, SMALL | {"min_count": 1})]

    def run(tokens: list[int], texts: list[str], limits: dict[str, int]) -> Any:
        guard = target.LoopGuard(**limits)
        seen = [guard.push(t, s) for t, s in zip(tokens, texts, strict=True)]
        return seen if len(seen) < 100 else (seen.index(True) if True in seen else None)

    counted = told(lambda: comparisons(target))
    return [[told(lambda c=c: run(*c)) for c in cases], counted]


def comparisons(target: Any) -> int:
    """Of the push after 200 others, all different."""
    guard = target.LoopGuard(16, 4, 40, 80)
    for n in range(201):
        Counted.count = 0
        guard.push(Counted(n), "w")
    return Counted.count


@probe("9.6")
def probe_6(target):
    wait = call("wait", "{}", "not yet")
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([call()] * 5, {}),
        ([call()] * 5, {"limit": 4}),
        ([call(), call(), call("other"), call(), call()], {}),
        ([call(arguments=a) for a in ('{"a":1,"b":2}', '{"b":2,"a":1}')] * 2, {}),
        ([call(arguments=a) for a in ("[1, 2]", "[1,2]", "[1,2 ]")], {}),
        ([call(result=r) for r in ("1", " 1", "1 ")], {}),
        ([call(result=r) for r in ('{"a":1,"b":2}', '{"b":2,"a":1}')] * 2, {}),
        ([call(result=r) for r in "xyx"], {}),
        ([call(arguments=a) for a in ("ls", " ls", "ls ")], {}),
        ([call(arguments=a) for a in ("1", "1.0", "true")], {}),
        ([call(arguments=a) for a in ('"a"', "a", '"a"')], {}),
        ([call(arguments=a) for a in ('{"q":NaN}', '{"q": NaN}', '{"q" :NaN}')], {}),
        ([call(tool) for tool in "abc"], {}),
        ([wait] * 4, {"allow": ("wait",)}),
        ([call(), wait, call(), wait, call()], {"allow": ["wait"]}),
    ]
    return [told(lambda c=c: target.find_loop(c[0], **c[1])) for c in cases]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
