"""A widget with a static twin: sliders over a pure function that returns HTML or a PNG."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from minifer.course.figures import PALETTE  # noqa: F401 - the views share its colours


def explore(view: Callable[..., str | bytes], /, **controls: Sequence[Any]) -> None:
    """Show `view(**first values)` and, where a front end can, a slider a control that redraws it.

    view: a pure function of the controls; returns HTML or SVG (str) or a PNG (bytes).
    controls: name → the values it may take, in order; the first is what the static twin shows.
    Displays one output that GitHub, print and screen readers see (the static view), then the
    sliders. Raises `ValueError` for a control without values; never for want of widgets.
    """
    from IPython.display import HTML, display

    for name, values in controls.items():
        if not values:
            raise ValueError(f"control {name} must have at least one value, got {values!r}")
    first = {name: values[0] for name, values in controls.items()}
    display(HTML(_html(view(**first))))
    try:
        import ipywidgets
    except ImportError:
        return
    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), description=name)
        for name, values in controls.items()
    }
    html = ipywidgets.HTML(_html(view(**first)))

    def redraw(_: Any) -> None:
        html.value = _html(view(**{name: slider.value for name, slider in sliders.items()}))

    for slider in sliders.values():
        slider.observe(redraw, names="value")
    display(ipywidgets.VBox([*sliders.values(), html]))


def _html(picture: str | bytes) -> str:
    if isinstance(picture, str):
        return picture
    return f'<img src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
