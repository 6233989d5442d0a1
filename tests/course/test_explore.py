"""The widget: a static twin always, sliders where they can be, and the same words on every run."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ipywidgets")

from minifer.course import explore
from minifer.course.figures import new_figure
from minifer.course.widgets import sliders

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, instead of displaying it."""
    outputs: list[dict[str, Any]] = []

    def keep(data: dict[str, Any], *, raw: bool = False, metadata: Any = None) -> None:
        assert raw
        outputs.append(data)

    monkeypatch.setattr("IPython.display.display", keep)
    return outputs


def table(batch: int, context: int = 8) -> str:
    return f"<b>{batch} × {context}</b>"


def test_the_twin_shows_the_first_values_and_the_sliders_name_all(shown):
    explore(table, labels={"context": "context (tokens)"}, batch=[2, 4], context=(16, 32))
    twin, widget = shown
    assert "<b>2 × 16</b>" in twin["text/html"]
    assert twin["text/plain"] == "batch: 2, context (tokens): 16"
    told = "In a running notebook, sliders. batch: 2, 4; context (tokens): 16, 32"
    assert widget["text/plain"] == told
    assert "application/vnd.jupyter.widget-view+json" in widget


def test_two_runs_say_the_same(shown):
    for _ in range(2):
        explore(table, batch=[2, 4])
    first, second = shown[::2]
    assert first == second
    assert shown[1]["text/plain"] == shown[3]["text/plain"]


def test_moving_a_slider_redraws_and_the_living_widget_hides_its_twin(shown):
    explore(table, batch=[2, 4])
    mark = shown[0]["text/html"].split('class="')[1].split('"')[0]
    names = {"batch": "batch (requests)"}
    box = sliders(table, {"batch": [2, 4]}, names, alt=None, mark=mark, start=table(2))
    slider, picture = box.children
    assert slider.description == "batch (requests)"
    assert f".{mark}-live" in picture.value and "display:none" in picture.value
    assert "<b>2 × 8</b>" in picture.value
    slider.value = 4
    assert "<b>4 × 8</b>" in picture.value and "<b>2" not in picture.value


def test_numbers_lie_in_order_and_the_slider_begins_at_the_first(shown):
    explore(table, batch=[4, 2, 8])
    assert "<b>4 × 8</b>" in shown[0]["text/html"]
    assert shown[1]["text/plain"].endswith("batch: 2, 4, 8")
    controls = {"batch": [4, 2, 8], "context": ["long", "short", "all"]}
    names = {name: name for name in controls}
    box = sliders(table, controls, names, alt=None, mark="m", start="")
    batch, context = (slider for slider in box.children[:2])
    assert (batch.value, [value for _, value in batch.options]) == (4, [2, 4, 8])
    assert (context.value, context.options[1][1]) == ("long", "short")


def test_a_view_that_fails_says_so_in_the_widget():
    def fails(batch: int) -> str:
        raise ValueError(f"no picture of <{batch}>")

    box = sliders(fails, {"batch": [2, 4]}, {"batch": "b"}, alt=None, mark="m", start="")
    box.children[0].value = 4
    assert "ValueError: no picture of &lt;4&gt;" in box.children[1].value


def test_a_figure_is_drawn_as_png_with_its_alt_text(shown):
    def view(batch: int) -> Any:
        return new_figure(1, 1)

    explore(view, alt=lambda batch: f"A square for {batch}", batch=[2, 4])
    assert shown[0]["text/plain"] == "A square for 2" and shown[0]["image/png"]
    explore(lambda: PNG, alt="A picture")
    assert shown[2]["text/plain"] == "A picture"
    assert len(shown) == 3  # no control, no widget
    with pytest.raises(ValueError, match="alt must say what the picture shows"):
        explore(view, batch=[2, 4])


def test_pyplot_forgets_a_figure(shown):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    explore(lambda: pyplot.figure(), alt="Empty")
    assert not pyplot.get_fignums()


def test_without_widgets_the_twin_stands_alone(shown, monkeypatch):
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("ipywidgets"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    explore(table, batch=[2, 4])
    assert len(shown) == 1


def test_bad_controls_are_refused(shown):
    with pytest.raises(ValueError, match="control batch must have at least one value"):
        explore(table, batch=[])
    with pytest.raises(ValueError, match="labels must name controls, got contxt"):
        explore(table, labels={"contxt": "tokens"}, batch=[1])
    assert not shown


def test_every_public_name_is_what_it_says_in_a_new_process():
    """A module of the same name beside them would take its place."""
    code = "from minifer.course import begin, check, explore, show; " + "; ".join(
        f"assert callable({name})" for name in ("begin", "check", "explore", "show")
    )
    subprocess.run([sys.executable, "-c", code], check=True)
