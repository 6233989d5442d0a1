"""Reasoning between think tags: the stream against what `str.partition` says of the whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.reasoning import ReasoningScanner, starts_inside, writes_reasoning
from minifer.text.byte_tokenizer import byte_tokenizer


def scan(parts: list[str], **options: object) -> tuple[str, str]:
    scanner = ReasoningScanner(**options)  # type: ignore[arg-type]
    news = [*(scanner.push(part) for part in parts), scanner.finish()]
    return "".join(r for r, _ in news), "".join(c for _, c in news)


def split_whole(text: str, inside: bool) -> tuple[str, str]:
    """The rules on a finished reply."""
    begins = text.lstrip().startswith("<think>")
    if not inside and not begins:
        return "", text
    reasoning, _, content = text.replace("<think>", "", int(begins)).partition("</think>")
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", False, "\nhm\n", "\n\n42"),
        ("\n<think>hm</think>42", False, "\nhm", "42"),
        ("hm</think>42", True, "hm", "42"),
        ("<think>hm</think>42", True, "hm", "42"),  # Qwen3.5 with an older habit
        ("42", False, "", "42"),
        ("x <think>hm</think>42", False, "", "x <think>hm</think>42"),
        ("<think></think></think><think>", False, "", "</think><think>"),
        ("<think>cut off </th", False, "cut off </th", ""),
        ("cut off", True, "cut off", ""),
        ("<thin", False, "", "<thin"),
        ("  ", False, "", "  "),
        ("", True, "", ""),
        ("a < b << c </ think> <</think>x", True, "a < b << c </ think> <", "x"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_replies(text: str, inside: bool, reasoning: str, content: str, size: int) -> None:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    assert scan(parts, inside=inside) == (reasoning, content)


soup = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a", "<thi", "</"]),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(soup, st.booleans(), st.data())
def test_any_reply_in_any_chunks(text: str, inside: bool, data: st.DataObject) -> None:
    """vllm #14170: a parser lost a "<". Every character but those of the tags comes out."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert scan(parts, inside=inside) == split_whole(text, inside)
    assert scan(list(text), inside=inside) == split_whole(text, inside)


def test_nothing_but_a_possible_tag_is_held_back() -> None:
    scanner = ReasoningScanner()
    assert scanner.push("<thi") == ("", "")
    assert scanner.push("nk>a </b") == ("a </b", "")
    assert scanner.push("</thin") == ("", "")
    assert scanner.push("g </think") == ("</thing ", "")
    assert scanner.inside
    assert scanner.push(">x</thin") == ("", "x</thin")
    assert not scanner.inside
    assert ReasoningScanner().push("<b") == ("", "<b")


def test_other_tags() -> None:
    options = {"start": "[THINK]", "end": "[/THINK]"}
    assert scan(["[THI", "NK]a[/", "b[/THINK]c"], **options) == ("a[/b", "c")


def test_models_that_write_reasoning_are_known_by_their_template_or_vocabulary() -> None:
    assert not writes_reasoning(byte_tokenizer())
    thinking = byte_tokenizer()
    thinking.chat_template = "{{ messages }}<think>\n"
    assert writes_reasoning(thinking)
    both = {"<think>": 1, "</think>": 0}
    for ids, expected in [({}, False), ({"<think>": 1}, False), (both, True)]:
        tokenizer = SimpleNamespace(chat_template=None, token_to_id=ids.get)
        assert writes_reasoning(tokenizer) is expected


def test_the_default_model_writes_none(pulled_model) -> None:
    from minifer.text.tokenizer import Tokenizer

    assert not writes_reasoning(Tokenizer.from_dir(pulled_model))


def test_a_prompt_may_end_inside_the_tag() -> None:
    assert starts_inside("<|Assistant|><think>\n")
    assert not starts_inside("<|im_start|>assistant\n")
    assert not starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not starts_inside("Write <think> first.<|im_end|>\n<|im_start|>assistant\n")
    assert starts_inside("…<|im_start|>assistant\n<think>so far", "<think>so far")
    assert not starts_inside("…<think>so far</think>The", "<think>so far</think>The")
