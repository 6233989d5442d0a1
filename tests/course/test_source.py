"""Two functions side by side: what differs is said, docstrings are not."""

from __future__ import annotations

import pytest

from minifer.course.source import diff_lines, place_of, show_diff, show_source, source_of
from minifer.kv.step_input import StepInput


def slot(table, position):
    """Ours."""
    return table[position // 8] * 8 + position % 8


def other(table, position):
    """Theirs,
    longer."""

    return table[position // 8] * 8 + position % 4


def test_a_diff_marks_whose_line_it_is():
    lines = diff_lines(slot, other)
    assert [line for line in lines if line[0] == "-"] == [
        "-def slot(table, position):",
        "-    return table[position // 8] * 8 + position % 8",
    ]
    assert [line for line in lines if line[0] == "+"] == [
        "+def other(table, position):",
        "+    return table[position // 8] * 8 + position % 4",
    ]


def test_equal_functions_have_no_marks():
    assert all(line[0] == " " for line in diff_lines(slot, slot))


def test_docstrings_go_and_methods_stand_at_the_margin():
    text = source_of(StepInput)
    assert text.startswith("@dataclass") and '"""' not in text
    assert '"""' in source_of(StepInput, docstring=True)
    assert place_of(StepInput) == "minifer.kv.step_input:StepInput"


def test_what_has_no_source_is_refused():
    with pytest.raises(ValueError, match="function must have a source, got <built-in"):
        source_of(len)


def test_both_are_shown_as_html_and_as_text(monkeypatch):
    pytest.importorskip("IPython")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    show_source(slot)
    show_diff(slot, other)
    assert "<details><summary>" in shown[0]["text/html"]
    assert "table[position // 8]" in shown[0]["text/plain"]
    assert "− " in shown[1]["text/html"] and "+ " in shown[1]["text/html"]
