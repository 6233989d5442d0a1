"""Safety checks against definitions that look at the whole text."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.guards.regex_check import RegexCheck
from minifer.postprocessing.guards.safety import (
    Judgement,
    SafetyCheck,
    SafetyHook,
    WordListCheck,
)
from minifer.postprocessing.hooks import HookVerdict

MANY = settings(max_examples=100, deadline=None)
chunk_lists = st.lists(st.text("abA ß_\u0301", max_size=5), max_size=12)
word_lists = st.lists(st.text("abß ", min_size=1, max_size=4), min_size=1, max_size=4)


def run(checks: Sequence[SafetyCheck], chunks: Sequence[str]) -> tuple[list[str], str | None]:
    """What is released after each chunk and at the end, and which check blocked."""
    hook, released = SafetyHook(checks), []
    for chunk in chunks:
        verdict = hook.on_token(0, chunk)
        released.append(verdict.text)
        if verdict.finish_reason is not None:
            assert verdict.finish_reason == "content_filter"
            assert hook.on_finish("more") == HookVerdict("", "content_filter", verdict.stop_reason)
            return released, verdict.stop_reason
    verdict = hook.on_finish("")
    assert (verdict.finish_reason is None) == (verdict.stop_reason is None)
    return [*released, verdict.text], verdict.stop_reason


# -- words


def is_word(c: str) -> bool:
    return c.isalnum() or c in "_\u0301"


def ends_of_words(text: str, words: Sequence[str], whole: bool) -> list[tuple[int, int]]:
    """(end, begin) in the folded text of every forbidden word in it."""
    text, found = text.casefold(), []
    for word in {word.casefold() for word in words}:
        for begin in range(len(text) - len(word) + 1):
            end = begin + len(word)
            if text[begin:end] != word:
                continue
            left = begin and is_word(text[begin - 1]) and is_word(text[begin])
            right = end < len(text) and is_word(text[end]) and is_word(text[end - 1])
            if not whole or not (left or right):
                found.append((end, begin))
    return found


@MANY
@given(chunk_lists, word_lists, st.booleans())
def test_no_word_passes_and_other_text_comes_out_whole(
    chunks: list[str], words: list[str], whole: bool
) -> None:
    text = "".join(chunks)
    released, blocked_by = run([WordListCheck(words, whole_word=whole)], chunks)
    found = ends_of_words(text, words, whole)
    passed = "".join(released)
    assert text.startswith(passed)
    assert ends_of_words(passed, words, whole) == []
    if not found:
        assert (passed, blocked_by) == (text, None)
    else:
        assert blocked_by == "word list"
        # Nothing of the word that completes first, and of those the longest, has passed.
        end = min(end for end, _ in found)
        begin = min(begin for e, begin in found if e == end)
        assert len(passed.casefold()) <= begin


@MANY
@given(chunk_lists, word_lists, st.booleans())
def test_what_passes_does_not_depend_on_how_the_text_is_cut(
    chunks: list[str], words: list[str], whole: bool
) -> None:
    check = WordListCheck(words, whole_word=whole)
    released, blocked_by = run([check], chunks)
    whole_text, whole_by = run([check], ["".join(chunks)])
    assert ("".join(released), blocked_by) == ("".join(whole_text), whole_by)


@MANY
@given(chunk_lists, word_lists)
def test_exactly_the_longest_suffix_that_may_become_a_word_is_held(
    chunks: list[str], words: list[str]
) -> None:
    chunks = [chunk.replace("ß", "b").replace("A", "a") for chunk in chunks]
    words = [word.replace("ß", "b") for word in words]
    hook, text, passed = SafetyHook([WordListCheck(words, whole_word=False)]), "", ""
    for chunk in chunks:
        text += chunk
        verdict = hook.on_token(0, chunk)
        passed += verdict.text
        if verdict.finish_reason is not None:
            return
        keep = max(k for word in words for k in range(len(word)) if text.endswith(word[:k]))
        assert passed == text[: len(text) - keep]


@MANY
@given(chunk_lists, word_lists)
def test_of_whole_words_only_what_begins_at_a_border_is_held(
    chunks: list[str], words: list[str]
) -> None:
    """Held back is text that some continuation would block, and nothing else."""
    chunks = [chunk.replace("ß", "b").replace("A", "a") for chunk in chunks]
    words = [word.replace("ß", "b") for word in words]
    check = WordListCheck(words, whole_word=True)
    hook, text, passed = SafetyHook([check]), "", ""
    for chunk in chunks:
        text += chunk
        verdict = hook.on_token(0, chunk)
        passed += verdict.text
        if verdict.finish_reason is not None:
            return
        continued = [
            text + word[k:]
            for word in words
            for k in range(len(word) + 1)
            if text.endswith(word[:k])
        ]
        begins = [
            b for t in continued for e, b in ends_of_words(t, words, True) if e > len(text) - 1
        ]
        assert passed == text[: min([*begins, len(text)])]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_word_in_two_tokens_never_shows(cut: int) -> None:
    text = "My Secret: x"
    released, blocked_by = run([WordListCheck(["secret"])], [text[:cut], text[cut:]])
    assert ("".join(released), blocked_by) == ("My ", "word list")


def test_whole_words_are_told_from_parts_of_others() -> None:
    check = WordListCheck(["art", "c++", "new york"])
    for text in ("party", "smart", "artful", "art_1", "art\u0301", "newyork", "ac++", "New Yorker"):
        assert run([check], list(text))[1] is None, text
    for text in ("art", "an ART!", "(art)", "c++ is", "C++11", "in New York."):
        assert run([check], list(text))[1] == "word list", text
    assert "".join(run([WordListCheck(["art"], whole_word=False)], list("a party"))[0]) == "a p"


@pytest.mark.parametrize(
    ("word", "text", "passed"),
    [
        ("straße", "die STRASSE!", "die "),
        ("STRASSE", "die Straße!", "die "),
        ("ΟΔΟΣ", "η οδος.", "η "),  # final sigma
        ("ﬁne", "FINE.", ""),  # a ligature
        ("привет", "да, Привет", "да, "),
        ("毒药", "这是 毒药", "这是 "),
    ],
)
def test_case_is_folded_as_unicode_does(word: str, text: str, passed: str) -> None:
    for chunks in ([text], list(text)):
        released, blocked_by = run([WordListCheck([word])], chunks)
        assert ("".join(released), blocked_by) == (passed, "word list")


def test_a_character_that_folds_to_several_is_blocked_as_one() -> None:
    check = WordListCheck(["as"], whole_word=False)
    assert "".join(run([check], ["x", "a", "ß", "y"])[0]) == "x"


@pytest.mark.parametrize("words", [[], [""], ["a", ""], [1], [None], ""])
def test_bad_word_lists_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="words must be a list of non-empty strings"):
        WordListCheck(words)


# -- patterns

PATTERNS: list[tuple[str, int | None]] = [
    ("ab", None),
    ("a{2,3}b", None),
    (r"\ba\b", None),
    (r"a\B", None),
    ("a[ab]*A", 5),
    (r"\ba+\b", 4),
    ("(?i)ba|a b", None),
    (r"(?m)^a", None),
    (r"(?m)b$", None),
    ("a+?b", 3),
]


def short_matches(pattern: str, text: str, max_match: int) -> list[int]:
    """Where a match of at most `max_match` characters begins, with its neighbours in sight."""
    return [
        begin
        for begin in range(len(text))
        for end in range(begin + 1, min(begin + max_match, len(text)) + 1)
        if ending_before(pattern, len(text) - end).match(text, begin)
    ]


@functools.cache
def ending_before(pattern: str, num_left: int) -> re.Pattern[str]:
    """The pattern, if so many characters follow: also shorter matches than the greedy one."""
    flags, bare = re.fullmatch(r"(\(\?[im]\))?(.*)", pattern).groups()  # type: ignore[union-attr]
    return re.compile(rf"{flags or ''}(?:{bare})(?=[\s\S]{{{num_left}}}\Z)")


def outgrown(pattern: str, chunks: list[str], max_match: int | None) -> bool:
    """Was there a match up to the newest character that was longer than can be waited for?"""
    so_far = accumulate(chunks)
    found = (match for text in so_far for match in re.finditer(pattern, text))
    return any(
        match.end() == len(match.string) and len(match[0]) > (max_match or 4) for match in found
    )


def test_a_match_that_outgrew_its_limit_is_blocked_although_the_next_character_would_undo_it() -> (
    None
):
    check = [RegexCheck(r"\ba+\b", max_match=4, name="p")]
    released, blocked_by = run(check, ["aaaa", "A"])
    assert ("".join(released), blocked_by) == ("aaaaA", None)
    assert run(check, ["a", "aaaa", "A"])[1] == "p"


@pytest.mark.parametrize(("pattern", "max_match"), PATTERNS)
@settings(max_examples=40, deadline=None)
@given(chunks=st.lists(st.text("abA \n", max_size=4), max_size=8))
def test_no_match_passes_and_other_text_comes_out_whole(
    pattern: str, max_match: int | None, chunks: list[str]
) -> None:
    text = "".join(chunks)
    released, blocked_by = run([RegexCheck(pattern, max_match=max_match, name="p")], chunks)
    passed = "".join(released)
    assert text.startswith(passed)
    if "$" not in pattern and "\\" not in pattern:  # else the cut itself may make a match
        assert re.search(pattern, passed) is None
    if re.search(pattern, text) is None and not outgrown(pattern, chunks, max_match):
        assert (passed, blocked_by) == (text, None)
    begins = short_matches(pattern, text, max_match or 4)
    if begins:
        assert blocked_by == "p"
        assert len(passed) <= begins[0]


@MANY
@given(st.lists(st.text("ab", max_size=4), max_size=8))
def test_a_pattern_holds_back_one_less_than_its_longest_match(chunks: list[str]) -> None:
    hook, text, passed = SafetyHook([RegexCheck("[xy]{2,5}")]), "", ""
    for chunk in chunks:
        text += chunk
        passed += hook.on_token(0, chunk).text
        assert passed == text[: max(0, len(text) - 4)] or not chunk
    assert passed + hook.on_finish("").text == text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(?:\d{1,3}\.){3}\d{1,3}", "the host 10.0.0.17, port 80"),
        (r"\b\d{4}(?:[ -]\d{4}){3}\b", "card 1234 5678 9012 3456 is"),
        (re.compile(r"bearer [a-z0-9]{8}", re.IGNORECASE), "Bearer abcd1234 is"),
    ],
)
def test_what_one_would_block_is_blocked(pattern: str, text: str) -> None:
    for size in (1, 2, 5, 100):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        released, blocked_by = run([RegexCheck(pattern)], chunks)
        assert blocked_by == getattr(pattern, "pattern", pattern)
        assert "".join(released) == text[: re.search(pattern, text).start()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pattern", "options", "sentence"),
    [
        ("", {}, "pattern must not match the empty text, got ''"),
        ("a*", {"max_match": 5}, "pattern must not match the empty text"),
        (r"\b", {}, "pattern must not match the empty text"),
        ("(a", {}, "pattern must be a regular expression"),
        (5, {}, "pattern must be a regular expression"),
        (b"a", {}, "pattern must be a pattern of text, got b'a'"),
        ("a+", {}, "max_match must be given for 'a+': it can match any length"),
        ("a{2000}", {}, "max_match must be given for 'a{2000}'"),
        ("aaa", {"max_match": 2}, "max_match must be an integer in [3, 1000], got 2"),
        ("a+", {"max_match": 1001}, "max_match must be an integer in [1, 1000], got 1001"),
        ("a+", {"max_match": True}, "max_match must be an integer"),
        ("(?=a)b", {}, "pattern must not look ahead, behind or refer back"),
        ("(?<!a)b", {}, "pattern must not look ahead, behind or refer back"),
        (r"(a)\1", {}, "pattern must not look ahead, behind or refer back"),
        ("^a", {}, "pattern must not use"),
        (r"(?m)a\Z", {}, "pattern must not use"),
        ("(a+)+b", {"max_match": 50}, "ways within 50 characters"),
        ("(a|aa)+b", {"max_match": 50}, "repeat less, or lower max_match"),
        ("((((a*)*)*)*)*b", {"max_match": 1000}, "repeat less, or lower max_match"),
        (".*.*.*.*.*b", {"max_match": 100}, "repeat less, or lower max_match"),
    ],
)
def test_patterns_that_cannot_be_judged_on_a_stream_are_refused(
    pattern: object, options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        RegexCheck(pattern, **options)  # type: ignore[arg-type]


# -- the hook


@MANY
@given(st.lists(st.text("abc ", max_size=4), max_size=10))
def test_several_checks_block_what_any_of_them_blocks(chunks: list[str]) -> None:
    checks: list[SafetyCheck] = [
        WordListCheck(["ab", "cab"], name="whole"),
        WordListCheck(["bb"], whole_word=False, name="part"),
        RegexCheck("c[ab ]{0,2}c", name="regex"),
    ]
    released, blocked_by = run(checks, chunks)
    text, passed = "".join(chunks), "".join(released)
    assert text.startswith(passed)
    assert "bb" not in passed
    assert re.search("c[ab ]{0,2}c", passed) is None
    assert all(end > len(passed) for end, _ in ends_of_words(text, ["ab", "cab"], True))
    alone = [run([check], chunks)[1] for check in checks]
    assert (blocked_by is None) == (alone == [None] * 3)


def test_a_check_may_look_back_at_released_text() -> None:
    class NoEcho:
        """Blocks a character that follows itself."""

        name, context = "echo", 1

        def judge(self, text: str, start: int, final: bool) -> Judgement:
            places = (i for i in range(max(1, start), len(text)) if text[i] == text[i - 1])
            return Judgement(blocked=next(places, None))

    assert run([NoEcho()], ["abc", "", "cd"]) == (["abc", "", ""], "echo")
    assert run([NoEcho()], ["abc", "d"]) == (["abc", "d", ""], None)


def test_without_checks_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("checks", [5, ["word"], [WordListCheck]])
def test_what_is_no_check_is_refused(checks: object) -> None:
    with pytest.raises(ValueError, match="checks must be objects with name, context, judge"):
        SafetyHook(checks)  # type: ignore[arg-type]


def test_a_deep_copy_shares_the_checks_and_nothing_else() -> None:
    first = SafetyHook([WordListCheck(["secret"])])
    assert first.on_token(0, "my sec").text == "my "
    second = copy.deepcopy(first)
    assert first.on_token(0, "ret.").finish_reason == "content_filter"
    assert second.on_token(0, "tion").text == "section"
