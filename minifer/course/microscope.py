"""The token microscope: step one token of one request through the engine's events.

    run = example.run()
    microscope(run, "A", position=20)                          # in a notebook
    Path("a.html").write_text(microscope_page(run, "A"))       # for a browser

For each event it shows the stage, the sentence, the statement of the engine that reported it, the
values, who holds which block at that moment, and the timeline with a cursor. All of it comes from
the events; nothing is run again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from html import escape
from string import Template
from typing import Any, Protocol

from minifer.course import example
from minifer.course.microscope_data import Life, life_frames
from minifer.course.microscope_view import summary, twin, view
from minifer.course.microscope_words import named
from minifer.course.widgets import alive, display_widget
from minifer.events import Event


class _Run(Protocol):
    """What `example.run` returns: events, and the engine that knows its block size."""

    @property
    def events(self) -> list[Event]: ...

    @property
    def engine(self) -> Any: ...


Events = Iterable[Event] | _Run


def life_of_token(
    events: Events,
    request_id: str,
    position: int | None = None,
    *,
    stage: str | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
) -> Life:
    """The frames that `microscope` shows, as plain values.

    events: of an engine, or a run of `minifer.course.example`, which knows its block size; for
    bare events it is the book's. See `life_frames` for the rest and for what is refused.
    """
    if not isinstance(events, Iterable):
        run, events = events, events.events
        block_size = block_size or run.engine.config.block_size
        num_blocks = num_blocks or run.engine.kv.pool.num_blocks
    return life_frames(
        events,
        request_id,
        position,
        block_size=block_size or example.BLOCK_SIZE,
        num_blocks=num_blocks,
        stage=stage,
    )


def microscope(
    events: Events, request_id: str, position: int | None = None, **options: Any
) -> None:
    """Show the life of a token: all its events as a folded list, then buttons that step through it.

    The list is the static twin, a plain output without scripts; a living widget hides it. options:
    stage, block_size and num_blocks, see `life_of_token`.
    """
    from IPython.display import display

    life = life_of_token(events, request_id, position, **options)
    if not life.frames:
        raise ValueError(f"stage must be one that the token passes, got {options['stage']!r}")
    mark = _mark(life)
    lines = [summary(life, index) for index in range(len(life.frames))]
    display({"text/html": twin(life, mark), "text/plain": "\n".join(lines)}, raw=True)
    try:
        box = stepper(life, mark)
    except ImportError:
        return
    display_widget(box, f"In a running notebook, buttons step through {len(life.frames)} events")


def stepper(life: Life, mark: str) -> Any:
    """The `ipywidgets.VBox`: Previous, Next, Play, a slider, and the frame they choose."""
    import ipywidgets

    last = len(life.frames) - 1
    previous = ipywidgets.Button(description="Previous", tooltip="the event before this one")
    following = ipywidgets.Button(description="Next", tooltip="the event after this one")
    play = ipywidgets.Play(min=0, max=last, interval=2500, tooltip="one event every 2.5 seconds")
    slider = ipywidgets.IntSlider(
        min=0, max=last, readout=False, description="event", layout={"width": "16em"}
    )
    shown = ipywidgets.HTML()

    def show(index: int) -> None:
        previous.disabled, following.disabled = index == 0, index == last
        shown.value = alive(mark, view(life, index, drawn=True))

    def move(by: int) -> None:
        slider.value = min(last, max(0, slider.value + by))

    previous.on_click(lambda _: move(-1))
    following.on_click(lambda _: move(1))
    slider.observe(lambda change: show(change["new"]), names="value")
    ipywidgets.link((play, "value"), (slider, "value"))
    show(0)
    return ipywidgets.VBox([ipywidgets.HBox([previous, following, slider, play]), shown])


def microscope_page(
    events: Events, request_id: str, position: int | None = None, **options: Any
) -> str:
    """A whole HTML file: the life of a token for a browser, with no kernel and no network.

    Without JavaScript it is a list to unfold; with it, buttons and the arrow keys step through.
    """
    life = life_of_token(events, request_id, position, **options)
    title = f"The life of a token: {named(life.request_id)}, position {life.position}"
    return _PAGE.substitute(
        title=escape(title), last=len(life.frames) - 1, list=twin(life, _mark(life), drawn=True)
    )


def _mark(life: Life) -> str:
    """A class name that is the same on every run."""
    stages = "".join(frame.stage[0] for frame in life.frames)
    key = f"{life.request_id} {life.position} {stages}"
    return f"microscope-{zlib.crc32(key.encode()):08x}"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font-family: DejaVu Sans, Helvetica, Arial, sans-serif; max-width: 800px; margin: 1em auto;
  padding: 0 1em; background: #FFFFFF; color: #111111; }
summary { padding: 4px 0; }
button { font-size: 15px; padding: 4px 12px; }
.stepping details:not([open]), .stepping summary { display: none; }
</style>
</head>
<body>
<h1>$title</h1>
<div id="controls" hidden>
<p><button id="previous">Previous</button> <button id="next">Next</button>
<label>event <input id="slider" type="range" min="0" max="$last" value="0"></label>
<label><input id="all" type="checkbox"> list all events</label></p>
<p>The arrow keys ← and → step as well.</p>
</div>
<main aria-live="polite">
$list
</main>
<script>
const events = [...document.querySelectorAll("details")];
const by = (id) => document.getElementById(id);
let now = 0;
function show(index) {
  now = Math.min(Math.max(index, 0), events.length - 1);
  events.forEach((event, i) => { event.open = i === now; });
  by("slider").value = now;
  by("previous").disabled = now === 0;
  by("next").disabled = now === events.length - 1;
}
by("controls").hidden = false;
document.body.classList.add("stepping");
by("previous").onclick = () => show(now - 1);
by("next").onclick = () => show(now + 1);
by("slider").oninput = () => show(Number(by("slider").value));
by("all").onchange = () => document.body.classList.toggle("stepping", !by("all").checked);
document.onkeydown = (press) => {
  if (press.target.tagName === "INPUT") return;
  if (press.key === "ArrowLeft") show(now - 1);
  if (press.key === "ArrowRight") show(now + 1);
};
show(0);
</script>
</body>
</html>
""")
