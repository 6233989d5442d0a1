"""Stop strings against a definition that looks at the whole text, character by character."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.stop_strings import StopStrings

MANY = settings(max_examples=400, deadline=None)
Chunk = tuple[str, bool]  # text, armed

letters = st.text("abc", max_size=6)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
chunk_lists = st.lists(st.tuples(letters, st.booleans()), max_size=10)
armed_chunk_lists = st.lists(st.tuples(letters, st.just(True)), max_size=10)


def first_stop(chunks: Sequence[Chunk], stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that completes first within an armed chunk."""
    text = "".join(chunk for chunk, _ in chunks)
    armed = [flag for chunk, flag in chunks for _ in chunk]
    for end in range(1, len(text) + 1):
        for stop in stops:
            if armed[end - 1] and text[:end].endswith(stop):
                return end, stop
    return None


def hold_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix that is the beginning, but not the whole, of a stop string."""
    return max(
        (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0
    )


def run(
    chunks: Sequence[Chunk], stops: Sequence[str], include: bool = False
) -> tuple[list[str], str | None]:
    """What every push released, then what flush did; and the stop string that hit."""
    watcher = StopStrings(stops, include)
    released = [watcher.push(text, armed=armed) for text, armed in chunks]
    return [*released, watcher.flush()], watcher.hit


@MANY
@given(chunk_lists, stop_lists, st.booleans())
def test_text_and_stop_are_those_of_the_definition_however_the_text_is_cut(
    chunks: list[Chunk], stops: list[str], include: bool
) -> None:
    released, hit = run(chunks, stops, include)
    found = first_stop(chunks, stops)
    text = "".join(chunk for chunk, _ in chunks)
    if found is None:
        assert ("".join(released), hit) == (text, None)
    else:
        end, stop = found
        assert hit == stop
        assert "".join(released) == text[: end if include else end - len(stop)]


@MANY
@given(chunk_lists, stop_lists)
def test_exactly_the_longest_possible_beginning_is_held_back(
    chunks: list[Chunk], stops: list[str]
) -> None:
    watcher = StopStrings(stops)
    seen = released = ""
    for chunk, armed in chunks:
        seen += chunk
        released += watcher.push(chunk, armed=armed)
        if watcher.hit is not None:
            assert watcher.held == ""
            break
        keep = hold_back(seen, stops)
        assert released == seen[: len(seen) - keep]
        assert watcher.held == seen[len(seen) - keep :]


@MANY
@given(armed_chunk_lists, stop_lists)
def test_including_the_stop_string_holds_nothing_back(
    chunks: list[Chunk], stops: list[str]
) -> None:
    watcher = StopStrings(stops, include=True)
    for chunk, _ in chunks:
        released = watcher.push(chunk)
        if watcher.hit is not None:
            break
        assert released == chunk


def test_nothing_is_released_after_a_hit() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.push("xaby") == "x"
    assert watcher.push("more") == ""
    assert watcher.flush("and more") == ""
    assert watcher.hit == "ab"


def test_case_057_the_beginning_of_a_stop_string_waits_until_it_cannot_complete() -> None:
    released, hit = run([(c, True) for c in "xxx yyy"], ["xyy"])
    assert released == ["", "x", "x", "x ", "y", "y", "y", ""]
    assert hit is None


@pytest.mark.parametrize("cut", range(1, 7))
def test_case_057_no_part_of_a_stop_string_in_two_chunks_is_sent(cut: int) -> None:
    released, hit = run([("abDEFGH"[:cut], True), ("abDEFGH"[cut:], True)], ["DEFG"])
    assert ("".join(released), hit) == ("ab", "DEFG")


def test_case_058_what_is_held_when_the_reply_ends_is_flushed() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("the EN") == "the "
    assert watcher.held == "EN"
    assert watcher.flush() == "EN"
    assert watcher.hit is None and watcher.held == ""


def test_the_last_text_of_the_detokenizer_can_complete_a_stop_string() -> None:
    watcher = StopStrings(["a\ufffd"])
    assert watcher.push("xa") == "x"
    assert watcher.flush("\ufffd") == ""
    assert watcher.hit == "a\ufffd"


def test_case_059_the_stop_that_completes_first_wins_and_ties_go_by_list_order() -> None:
    released, hit = run([("aaa", False), ("b", True)], ["ab", "aa"])
    assert ("".join(released), hit) == ("aa", "ab")
    released, hit = run([("xyz", True)], ["xyz", "yz"])
    assert ("".join(released), hit) == ("", "xyz")
    released, hit = run([("xyz", True)], ["yz", "xyz"])
    assert ("".join(released), hit) == ("x", "yz")
    released, hit = run([("xyz", True)], ["yz", "xyz", "yz"])
    assert ("".join(released), hit) == ("x", "yz")
    released, hit = run([("abcd", True)], ["abcd", "bc"])  # "bc" is complete one character before
    assert ("".join(released), hit) == ("a", "bc")


def test_case_062_a_stop_before_min_tokens_is_ignored() -> None:
    chunks = [("a", False), ("\n", False), ("b", False), ("c", False), ("d\n", True)]
    released, hit = run(chunks, ["\n"])
    assert released == ["a", "\n", "b", "c", "d", ""]
    assert hit == "\n"


def test_case_062_an_ignored_stop_is_not_held_back() -> None:
    released, hit = run([("xab", False), ("b", False)], ["ab", "b"])
    assert (released, hit) == (["xab", "b", ""], None)


def test_case_062_a_stop_begun_before_min_tokens_can_complete_after_it() -> None:
    released, hit = run([("xEN", False), ("D", True)], ["END"])
    assert (released, hit) == (["x", "", ""], "END")


def test_many_overlapping_stops_in_a_long_text() -> None:
    text = "ab" * 2_000 + "b"
    released, hit = run([(c, True) for c in text], ["ab" * 1_000 + "c", "ba" * 900 + "d", "bb"])
    assert ("".join(released), hit) == (text[:-2], "bb")


def test_without_stop_strings_all_text_passes() -> None:
    assert run([("ab", True), ("", True), ("c", False)], []) == (["ab", "", "c", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop must hold non-empty strings, got \['a', ''\]"):
        StopStrings(["a", ""])


@MANY
@given(letters, armed_chunk_lists, armed_chunk_lists, stop_lists)
def test_a_copy_goes_its_own_way(
    common: str, left: list[Chunk], right: list[Chunk], stops: list[str]
) -> None:
    first = StopStrings(stops)
    start = first.push(common)
    second = copy.copy(first)
    for watcher, chunks in ((first, left), (second, right)):
        text = start + "".join(watcher.push(t) for t, _ in chunks) + watcher.flush()
        released, hit = run([(common, True), *chunks], stops)
        assert (text, watcher.hit) == ("".join(released), hit)
