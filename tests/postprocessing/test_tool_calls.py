"""Tool calls in a stream: what is content, what is a call, and that no cut of the text matters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.tool_calls import (
    ToolCall,
    ToolCallDelta,
    ToolCallScanner,
    check_tools,
    tool_choice_constraint,
)
from minifer.structured_output import StructuredOutput


def numbered() -> ToolCallScanner:
    numbers = itertools.count()
    return ToolCallScanner(new_id=lambda: f"id-{next(numbers)}")


def chunks(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def scan(parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of a reply that comes in these parts, joined from deltas."""
    scanner = numbered()
    content, calls = "", []
    for news, deltas in [*(scanner.push(part) for part in parts), scanner.finish()]:
        content += news
        for delta in deltas:
            if delta.name is not None:  # the first of a call
                assert delta == ToolCallDelta(len(calls), f"id-{len(calls)}", delta.name, "")
                calls.append((delta.name, ""))
            else:
                assert delta.id is None and delta.arguments and delta.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert scanner.calls == [ToolCall(f"id-{i}", *call) for i, call in enumerate(calls)]
    return content, calls


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = {
    "one": (call("f", '{"a": 1}'), "", [("f", '{"a": 1}')]),
    "text before": ("Let me see.\n" + call("f", "{}"), "Let me see.\n", [("f", "{}")]),
    "text after": (call("f", "{}") + "\nDone.", "\nDone.", [("f", "{}")]),
    "two": (
        call("f", "{}") + "\n" + call("g", '{"x": []}'),
        "",
        [("f", "{}"), ("g", '{"x": []}')],
    ),
    "three in text": (
        "a" + call("f", "{}") + "b" + call("g", "{}") + " " + call("h", "{}") + "\n\n",
        "ab",
        [("f", "{}"), ("g", "{}"), ("h", "{}")],
    ),
    "one line, tight": (
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        "",
        [("f", '{"a":1}')],
    ),
    "parameters (Llama)": (
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "arguments as a JSON string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\\\n\\"}"}</tool_call>',
        "",
        [("f", '{"a": "é\\n"}')],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"a":  [1, {}]}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a":  [1, {}]}')],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "null arguments": (
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "other keys are markup": (
        '<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}, "x": [{"y": "}"}]}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "an escaped name": (
        '<tool_call>{"n\\u0061me": "\\u0066", "arguments": {}}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "a brace and a quote in a string": (
        call("f", '{"a": "}{\\"}\\\\"}'),
        "",
        [("f", '{"a": "}{\\"}\\\\"}')],
    ),
    "the end tag is missing": ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "the last brace is missing": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok',
        "ok",
        [("f", '{"a": 1}')],
    ),
    "a brace too many": (
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>',
        "}\n</tool_call>",
        [("f", "{}")],
    ),
    "text instead of the end tag": (
        '<tool_call>{"name": "f", "arguments": {}} </tool',
        " </tool",
        [("f", "{}")],
    ),
    "cut in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": [1, "x',
        "",
        [("f", '{"a": [1, "x')],
    ),
    "cut after the arguments": (
        '<tool_call>{"name": "f", "arguments": {}, "id": 1',
        ', "id": 1',
        [("f", "{}")],
    ),
    "broken arguments end at the tag": (
        '<tool_call>{"name": "f", "arguments": {"a": [1}\n</tool_call> ok',
        " ok",
        [("f", '{"a": [1}\n')],
    ),
    "a call without its end tag, then another": (
        '<tool_call>{"name": "f", "arguments": {}}\n' + call("g", "{}"),
        "",
        [("f", "{}"), ("g", "{}")],
    ),
}
TEXTS = [
    "",
    'plain { text } with [braces] and "quotes" and a < b > c </tool_call>',
    "<tool_call",
    "<tool_call>",
    "<tool_call>\n",
    "<tool_call>\nhello\n</tool_call>",
    '<tool_call>{"name": "f", "argum',
    '<tool_call>{"name": "f", "arguments": ',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>{}</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": f, "arguments": {}}</tool_call>',
    '<tool_call>{"name" "f"}</tool_call>',
    '<tool_call>{"name": "f",}</tool_call>',
    '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    "<<tool_call>> <tool_calls> <tool _call>",
    " \n ",
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, size: int) -> None:
    text, content, calls = CASES[name]
    assert scan(chunks(text, size)) == (content, calls)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 10_000])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_is_content_to_the_last_character(text: str, size: int) -> None:
    assert scan(chunks(text, size)) == (text, [])


@pytest.mark.parametrize("text", TEXTS)
def test_a_call_after_what_is_none_is_found(text: str) -> None:
    """Also where the quotes of the broken one would have swallowed it."""
    if text.count('"') % 2 == 0 or "argum" in text:
        content, calls = scan(chunks(text + "x" + call("f", "{}"), 3))
        assert (content, calls) == (text + "x", [("f", "{}")])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_case_119_tags_and_braces_inside_strings_and_text_end_nothing(size: int) -> None:
    """vllm #21544, #10395, #45167, #45310: a shell command, and a document that holds the tag."""
    first = '{"command": "mkdir -p test/{test1,test2"}'
    second = '{"text": "<tool_call>\\n{\\"name\\": \\"g\\"}\\n</tool_call> \\\\", "n": {"m": [{}]}}'
    text = "Use {x}: " + call("sh", first) + "\n" + call("write", second) + " {done}"
    assert scan(chunks(text, size)) == ("Use {x}:  {done}", [("sh", first), ("write", second)])
    assert json.loads(second)["text"].endswith("</tool_call> \\")


def test_nothing_but_a_possible_tag_is_held_back() -> None:
    scanner = numbered()
    for piece, content in [
        ("a <", "a "),
        ("b", "<b"),
        (" <tool_c", " "),
        ("all", ""),
        ("s> <tool_call", "<tool_calls> "),
        ("<", "<tool_call"),
        ("<<", "<<"),
        ("x", "<x"),
    ]:
        assert scanner.push(piece) == (content, [])
    assert scanner.finish() == ("", [])


def test_arguments_are_streamed_as_they_come() -> None:
    scanner = numbered()
    assert scanner.push('<tool_call>\n{"name": "f", "arguments":') == ("", [])
    first = ToolCallDelta(0, "id-0", "f", "")
    assert scanner.push(' {"a') == ("", [first, ToolCallDelta(0, None, None, '{"a')])
    assert scanner.push('": "<') == ("", [ToolCallDelta(0, None, None, '": "<')])
    assert scanner.push('/tool_call>"}') == ("", [ToolCallDelta(0, None, None, '/tool_call>"}')])
    assert scanner.calls == []
    assert scanner.push("}") == ("", [])
    assert scanner.calls == [ToolCall("id-0", "f", '{"a": "</tool_call>"}')]


def test_ids_are_unique_by_default() -> None:
    scanner = ToolCallScanner()
    scanner.push(call("f", "{}") * 50)
    ids = {c.id for c in scanner.calls}
    assert len(ids) == 50 and all(i.startswith("call_") for i in ids)


names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
tricky = st.lists(
    st.sampled_from(["</tool_call>", "<tool_call>", "{", "}", '"', "\\", "\n", "é", "🙂", "a", "<"])
).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(tricky, values, max_size=3)


@st.composite
def replies(draw) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Chunks of a reply, and the content and calls it was made from."""
    text, content, calls = "", "", []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            words = draw(st.text('ab{}[]"\\<>/ \n', max_size=12))
            words = words.strip() and words  # white space alone after a call is layout
            text, content = text + words, content + words
        else:
            ascii_ = draw(st.booleans())
            separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
            json_text = json.dumps(draw(arguments), ensure_ascii=ascii_, separators=separators)
            name = draw(names)
            text += call(name, json_text)
            calls.append((name, json_text))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    return parts, content, calls


@settings(deadline=None)
@given(replies())
def test_any_reply_in_any_chunks_gives_back_what_it_was_made_from(reply) -> None:
    parts, content, calls = reply
    assert scan(parts) == (content, calls)


pieces = ["<tool_call>", "</tool_call>", "{", "}", '"', "\\", '"name": "f"', '"arguments": ', ", "]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*pieces, "{}", "x", "\n", "<"]), max_size=25))
def test_any_soup_of_tags_means_the_same_in_any_chunks(soup: list[str]) -> None:
    text = "".join(soup)
    whole = scan([text])
    for size in (1, 2, 3, 7):
        assert scan(chunks(text, size)) == whole
    if "<tool_call>" not in text:
        assert whole == (text, [])


def test_a_long_reply_is_read_in_one_pass() -> None:
    """Nothing is looked at again and again: 300,000 characters in chunks of one are no problem."""
    big = json.dumps({"text": "x</tool_call>" * 10_000})
    reply = call("f", big) + "<tool_call>" * 10_000 + "{" * 50_000
    assert scan(list(reply)) == (reply.removeprefix(call("f", big)), [("f", big)])


def test_deeply_nested_json_is_no_recursion() -> None:
    deep = '{"a":' * 20_000 + "1" + "}" * 20_000
    assert scan([call("f", deep)]) == ("", [("f", deep)])
    text = '<tool_call>{"x": ' + deep + "}</tool_call>"  # held, and too deep for a parser
    assert scan([text]) == (text, [])


# -- the tools of a request


def tool(name: str = "f", **function: object) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def test_good_tools_pass() -> None:
    tools = [tool("a", description="d", parameters={"type": "object"}), tool("b-_9" + "x" * 60)]
    assert check_tools(tools) == tools
    assert check_tools(None) == check_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ("x", "tools must be a list of tools, got 'x'"),
        ({}, "tools must be a list of tools, got {}"),
        ([tool(), 5], 'tools[1] must be an object of type "function"'),
        ([{"type": "retrieval"}], 'tools[0] must be an object of type "function"'),
        ([{"type": "function"}], "tools[0].function must be an object, got None"),
        ([tool("x" * 65)], "tools[0].function.name must be 1 to 64 of"),
        ([tool("")], "tools[0].function.name must be 1 to 64 of"),
        ([tool("a b")], "tools[0].function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got"),
        ([tool("é")], "tools[0].function.name must be"),
        ([tool(None)], "tools[0].function.name must be"),
        ([tool("a"), tool("b"), tool("a")], "tools[2].function.name must be unique, 'a' is there"),
        ([tool(description=5)], "tools[0].function.description must be a string, got 5"),
        ([tool(parameters=[])], "tools[0].function.parameters must be a JSON schema"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters must be a JSON"),
    ],
)
def test_bad_tools_are_refused_by_path(tools: object, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        check_tools(tools)
    assert sentence in str(error.value)


def test_a_free_choice_constrains_nothing() -> None:
    for choice in (None, "none", "auto"):
        assert tool_choice_constraint([tool()], choice) is None
        assert tool_choice_constraint(None, choice) is None


def test_a_form_of_the_reply_stays_where_nothing_can_be_called() -> None:
    reply = StructuredOutput(regex="a+")
    assert tool_choice_constraint([tool()], "none", True, reply) is reply
    assert tool_choice_constraint(None, "auto", True, reply) is reply
    assert tool_choice_constraint([tool()], "auto", True, reply) is reply
    with pytest.raises(ValueError, match="tool_choice makes the model call"):
        tool_choice_constraint([tool()], "required", True, reply)


@pytest.mark.parametrize(
    ("tools", "choice", "sentence"),
    [
        ([tool()], "any", 'tool_choice must be "none", "auto", "required" or'),
        ([tool()], 5, "tool_choice must be"),
        ([tool()], {"type": "function"}, "tool_choice must be"),
        ([tool()], {"type": "function", "function": {"name": 5}}, "tool_choice must be"),
        ([tool()], {"function": {"name": "f"}}, "tool_choice must be"),
        ([tool()], tool("g"), "tool_choice must name one of tools, got 'g'"),
        ([], "required", 'tool_choice "required" needs tools, got none'),
        ([tool(5)], "auto", "tools[0].function.name must be"),
    ],
)
def test_a_bad_choice_is_refused(tools: object, choice: object, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        tool_choice_constraint(tools, choice)
    assert sentence in str(error.value)
