"""Stop strings against a definition that looks at the whole text, character by character."""

import copy
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.detokenizer import IncrementalDetokenizer
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


# -- F-11: exhaustively, every way in which tokens can cut a stop string


def splits(raw: bytes) -> Iterator[list[bytes]]:
    """All 2^(n-1) ways to cut n bytes into tokens."""
    for borders in itertools.product((False, True), repeat=len(raw) - 1):
        places = [0, *(i for i, cut in enumerate(borders, start=1) if cut), len(raw)]
        yield [raw[a:b] for a, b in itertools.pairwise(places)]


def reply(tokens: Sequence[bytes], stops: Sequence[str]) -> tuple[str, str | None]:
    """Text and stop of a reply that comes as tokens; what each releases is checked on the way."""
    detokenizer = IncrementalDetokenizer(
        lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")
    )
    watcher, released, visible = StopStrings(stops), "", ""
    for i in range(len(tokens)):
        released += watcher.push(detokenizer.push(i))
        if watcher.hit is not None:
            return released, watcher.hit
        text = b"".join(tokens[: i + 1]).decode(errors="replace")
        visible = visible if text.endswith("�") else text  # a token may end inside a character
        assert released == visible[: len(visible) - hold_back(visible, stops)]
    return released + watcher.flush(detokenizer.flush()), watcher.hit


def expected_reply(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    found = first_stop([(text, True)], stops)
    return (text, None) if found is None else (text[: found[0] - len(found[1])], found[1])


LATIN = ["A", "AB", "ABC", "ABCD", "ABCDE", "ABCDEF", "ABCDEFG", "aabaabb", "abababa", "aaaaaaa"]
MULTIBYTE = ["aé", "é€", "€a", "👋é", "日本", "́€", "ééé"]


@pytest.mark.parametrize("stop", LATIN + MULTIBYTE)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("x", "y"), ("Aab", "ABa"), ("日é", "👋")])
def test_f11_every_split_of_a_stop_string(stop: str, before: str, after: str) -> None:
    expected = expected_reply(before + stop + after, [stop])
    assert expected[1] == stop
    for first, *rest in splits(stop.encode()):
        apart = [before.encode(), first, *rest, after.encode()]
        glued = [before.encode() + first, *rest]
        glued[-1] += after.encode()
        for tokens in (apart, glued):
            assert reply([token for token in tokens if token], [stop]) == expected


@pytest.mark.parametrize("stop", LATIN[1:] + MULTIBYTE)
def test_f11_every_split_of_a_stop_string_that_does_not_complete(stop: str) -> None:
    for text in (stop[:-1], stop[:-1] + "x", stop[:-1] + stop[0] + "x"):
        expected = expected_reply(text, [stop])
        for tokens in splits(text.encode()):
            assert reply(tokens, [stop]) == expected


@pytest.mark.parametrize(
    "stops",
    [
        ["abc", "bcd"],
        ["bcd", "abc"],
        ["abcd", "bc"],
        ["ab", "abc"],
        ["cd", "abcde"],
        ["aab", "aba"],
        ["é", "aé"],
        ["€b", "a€"],
    ],
)
@pytest.mark.parametrize("text", ["abcde", "aabcab", "ababcd", "xaéb", "a€bé"])
def test_f11_every_split_with_overlapping_stop_strings(stops: list[str], text: str) -> None:
    expected = expected_reply(text, stops)
    for tokens in splits(text.encode()):
        assert reply(tokens, stops) == expected
