"""A widget with a static twin: sliders over a pure function that returns a picture.

The twin is a plain output: what GitHub, a printed page and a reader without a kernel see. Where
the widget comes alive, its own style sheet hides the twin, so that nothing stands there twice: a
page cannot know whether a widget will ever come alive, but a widget that is alive can say so.
"""

from __future__ import annotations

import base64
import html
import io
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Picture = str | bytes | Figure
    View = Callable[..., Picture]

Alt = str | Callable[..., str]


def explore(
    view: View,
    /,
    *,
    alt: Alt | None = None,
    labels: Mapping[str, str] | None = None,
    **controls: Sequence[Any],
) -> None:
    """Show `view(**first values)` and, where a front end can, a slider a control that redraws it.

    view: a pure function of the controls; returns HTML or SVG (str), a PNG (bytes), or a matplotlib
    figure, which is closed. controls: name → the values it may take; the first is what the static
    twin shows and where the slider begins. Numbers lie on it from small to large, others as given.
    labels: name → what stands before its slider, with the unit; by default the name, "_" as a
    space. alt: what the picture shows, for those who do not see it; a function of the controls may
    say it for each value. A PNG or a figure must have one.

    Displays two outputs: the static twin, then the sliders. Under nbval the HTML, the alt text and
    the sliders' names are compared, the pixels of a PNG are not. Raises `ValueError` for a control
    without values, a label without its control, and a PNG without alt; never for want of widgets.
    """
    names = _labels(controls, labels or {})
    first = {name: values[0] for name, values in controls.items()}
    picture = _png_or_text(view(**first))
    words = _words(alt, first, picture)
    try:
        from IPython.display import display
    except ImportError:  # a plain Python: nothing can be shown
        return
    state = ", ".join(f"{names[name]}: {value}" for name, value in first.items())
    # The same on every run and in every process, unlike a counter or an id.
    mark = f"minifer-{zlib.crc32(f'{words}{state}{names}'.encode()):08x}"
    if isinstance(picture, bytes):
        data = {"image/png": base64.b64encode(picture).decode(), "text/plain": words}
        display(data, raw=True, metadata={"image/png": {"alt": words}})
    else:
        caption = f"<p><small>Drawn for {html.escape(state)}.</small></p>" if controls else ""
        twin = f'<div class="{mark}">{_html(picture, words)}{caption}</div>'
        display({"text/html": twin, "text/plain": words or state}, raw=True)
    if not controls:
        return
    try:
        box = sliders(view, controls, names, alt=alt, mark=mark, start=_html(picture, words))
    except ImportError:
        return
    ranges = "; ".join(
        f"{names[n]}: {', '.join(map(str, _in_order(v)))}" for n, v in controls.items()
    )
    display_widget(box, f"In a running notebook, sliders. {ranges}")


def sliders(
    view: View,
    controls: Mapping[str, Sequence[Any]],
    names: Mapping[str, str],
    *,
    alt: Alt | None,
    mark: str,
    start: str,
) -> Any:
    """The `ipywidgets.VBox`: a slider a control, then the HTML that they redraw.

    mark: class of the static twin, which is hidden while this is alive. start: the first HTML.
    """
    import ipywidgets

    boxes = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in _in_order(values)],
            value=values[0],
            description=names[name],
            tooltip=names[name],
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "min(36em, 95%)"},
        )
        for name, values in controls.items()
    }
    shown = ipywidgets.HTML(alive(mark, start))

    def redraw(_: Any) -> None:
        now = {name: box.value for name, box in boxes.items()}
        try:
            picture = _png_or_text(view(**now))
            body = _html(picture, _words(alt, now, picture))
        except Exception as error:  # in a callback it would vanish into a log
            body = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"
        shown.value = alive(mark, body)

    for box in boxes.values():
        box.observe(redraw, names="value")
    return ipywidgets.VBox([*boxes.values(), shown])


def _in_order(values: Sequence[Any]) -> list[Any]:
    if all(isinstance(value, int | float) for value in values):
        return sorted(values)
    return list(values)


def _labels(controls: Mapping[str, Sequence[Any]], labels: Mapping[str, str]) -> dict[str, str]:
    for name, values in controls.items():
        if not len(values):
            raise ValueError(f"control {name} must have at least one value, got {values!r}")
    if unknown := labels.keys() - controls.keys():
        raise ValueError(f"labels must name controls, got {', '.join(sorted(unknown))}")
    return {name: labels.get(name, name.replace("_", " ")) for name in controls}


def _words(alt: Alt | None, now: Mapping[str, Any], picture: str | bytes) -> str:
    words = alt(**now) if callable(alt) else alt or ""
    if isinstance(picture, bytes) and not words.strip():
        raise ValueError(f"alt must say what the picture shows, got {words!r}: explore(…, alt=…)")
    return words


def _png_or_text(picture: Picture) -> str | bytes:
    """A figure becomes a PNG and is closed; HTML and PNG stay as they are."""
    if isinstance(picture, str | bytes):
        return picture
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(picture)
    return buffer.getvalue()


def _html(picture: str | bytes, words: str) -> str:
    if isinstance(picture, str):
        if words and picture.lstrip().startswith("<svg"):
            return f'<div role="img" aria-label="{html.escape(words)}">{picture}</div>'
        return picture
    data = base64.b64encode(picture).decode()
    source = f"data:image/png;base64,{data}"
    return f'<img alt="{html.escape(words)}" style="max-width:100%" src="{source}">'


def alive(mark: str, body: str) -> str:
    """HTML for inside a widget. While it is alive, the static twin of that mark is not shown.

    In Jupyter the twin is the output before the widget; elsewhere a page shows one notebook, and
    the twin is found by its class.
    """
    output = ".jp-OutputArea-child"
    twin = f"{output}:has(+ {output} .{mark}-live),body:not(:has({output})) .{mark}"
    style = f"<style>{twin}{{display:none}}</style>"
    shown = f'class="{mark}-live" style="line-height:1.35" aria-live="polite"'
    return f"{style}<div {shown}>{body}</div>"


def display_widget(box: Any, words: str) -> None:
    """Display a widget. words: what a page without widgets, and nbval, see in its place."""
    from IPython.display import display

    bundle = box._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    if bundle:
        # ipywidgets would say its constructor's arguments here, the whole picture among them.
        display(dict(bundle) | {"text/plain": words}, raw=True)
