"""The microscope's picture: one frame of a token's life as HTML, from values alone.

Everything is styled in place and said in words or signs as well: a page that drops the styles, or a
reader who does not see the colours, still has the whole story. No scripts, no ids, no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from minifer.course.figure_data import Span
from minifer.course.figures import PALETTE, request_colours
from minifer.course.life_map import HERE, life_map
from minifer.course.microscope_data import Frame, Life
from minifer.course.microscope_words import named
from minifer.events import STAGES

STAGE_NAMES = dict(
    zip(STAGES, ("1 scheduling", "2 KV", "3 prefill", "4 decode", "5 post-processing"), strict=True)
)
_STAGE_COLOURS = {"kv": "cached", "prefill": "prefill", "decode": "decode"}  # of PALETTE
_STEPS_SHOWN = 8  # before and after the cursor
_BLOCKS_SHOWN, _BLOCKS_A_ROW = 48, 12
_BOX = (
    "background:#FFFFFF;color:#111111;border:1px solid #999999;border-radius:8px;padding:10px;"
    "max-width:760px;font-family:DejaVu Sans,Helvetica,Arial,sans-serif;font-size:14px;"
    "line-height:1.35"
)
_CELL = "text-align:center"  # a page's own style of tables may say otherwise
_HERE = "border:3px solid #111111;font-weight:bold"


def view(life: Life, index: int, *, drawn: bool = False) -> str:
    """Frame `index` (from 0) of a token's life: stage, sentence, source, values, blocks, timeline.

    drawn: with the life map as SVG instead of in words. A pure function: equal arguments give equal
    text. Raises `ValueError` outside the frames.
    """
    if not 0 <= index < len(life.frames):
        raise ValueError(f"index must be in [0, {len(life.frames)}), got {index}")
    frame = life.frames[index]
    head = f"Event {index + 1} of {len(life.frames)} · {_when(frame)} · {_token(life)}"
    parts = [
        f"<div>{escape(head)}</div>",
        life_map(frame.stage, standalone=False) if drawn else _strip(frame),
        f'<p style="font-size:16px;margin:8px 0"><b>{escape(frame.sentence)}</b></p>',
        _source(frame),
        _values(frame),
        _blocks(life, frame),
        _timeline(life, frame),
    ]
    return f'<div role="group" aria-label="{escape(head)}" style="{_BOX}">{"".join(parts)}</div>'


def summary(life: Life, index: int) -> str:
    """One line of the list of all events: number, step, stage, what happened."""
    frame = life.frames[index]
    stage = STAGE_NAMES.get(frame.stage, "start")
    return f"{index + 1} · {_when(frame)} · {stage} · {frame.sentence}"


def twin(life: Life, mark: str, *, drawn: bool = False) -> str:
    """Every frame, folded under its line: no script, so it works wherever HTML is shown.

    mark: a class for the whole; of `details` with one name, a browser keeps one open. drawn: see
    `view`.
    """
    lines = []
    for index in range(len(life.frames)):
        opened = " open" if index == 0 else ""
        line = f"<summary>{escape(summary(life, index))}</summary>"
        lines.append(
            f'<details name="{mark}"{opened}>{line}{view(life, index, drawn=drawn)}</details>'
        )
    return f'<div class="{mark}">{"".join(lines)}</div>'


def _when(frame: Frame) -> str:
    return f"step {frame.step}" if frame.step else "before step 1"


def _token(life: Life) -> str:
    return f"{named(life.request_id)}, position {life.position}"


def _strip(frame: Frame) -> str:
    """The life map in five words; the lit one is framed, bold and says that it has the token."""
    cells = []
    for stage, name in STAGE_NAMES.items():
        if stage == frame.stage:
            colour = PALETTE[_STAGE_COLOURS[stage]] if stage in _STAGE_COLOURS else "#555555"
            style = f"border:4px solid {colour};border-radius:6px;padding:2px 6px;font-weight:bold"
            cells.append(f'<span style="{style}">▼ {name}: {HERE}</span>')
        else:
            style = "border:1px solid #999999;border-radius:6px;padding:2px 6px;color:#555555"
            cells.append(f'<span style="{style}">{name}</span>')
    style = "margin:8px 0;line-height:2.2"
    return f'<div style="{style}">{" → ".join(cells)}</div>'


def _source(frame: Frame) -> str:
    lines = [
        f"<code>{escape(str(place))}</code><br><code>{escape(place.statement)}</code>"
        for place in frame.places
    ]
    body = "<br>or ".join(lines) or "no statement of the engine"
    style = "margin:6px 0;font-size:12px;overflow-wrap:anywhere"
    return f'<div style="{style}">Event <code>{escape(frame.name)}</code>, said by {body}</div>'


def _values(frame: Frame) -> str:
    if not frame.values:
        return ""
    pairs = ", ".join(
        f"{escape(key)} = <code>{escape(value)}</code>" for key, value in frame.values
    )
    return f'<div style="margin:6px 0;overflow-wrap:anywhere">Values: {pairs}</div>'


def _blocks(life: Life, frame: Frame) -> str:
    """The pool at this moment: who holds each block, and which one is our token's."""
    shown: Sequence[int] = range(life.num_blocks)
    if life.num_blocks > _BLOCKS_SHOWN:  # those somebody holds, and the free ones that are found
        busy = {b for table in frame.pool.tables.values() for b in table} | set(frame.pool.cached)
        first = [frame.block] if frame.block is not None else []
        order = dict.fromkeys([*first, *sorted(busy), *shown])
        shown = sorted([*order][:_BLOCKS_SHOWN])
    cells = [_block(life, frame, block) for block in shown]
    rows = [cells[i : i + _BLOCKS_A_ROW] for i in range(0, len(cells), _BLOCKS_A_ROW)]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    left_out = life.num_blocks - len(cells)
    more = f"; {left_out} more are not shown" if left_out else ""
    legend = f"Blocks: holder, ✓ full and can be found, ● our token's{more}"
    return _table(legend, body)


def _block(life: Life, frame: Frame, block: int) -> str:
    holders, found = frame.pool.holders(block), block in frame.pool.cached
    label = "+".join(map(_short, holders)) or ("" if found else "–")
    colours = request_colours(life.requests)
    colour = colours[holders[0]] if holders else PALETTE["free"]
    style = f"{_CELL};background:{colour}"
    if len(holders) > 1:
        other = colours[holders[1]]
        style += f";background:linear-gradient(90deg,{colour} 50%,{other} 50%)"
    if found:
        style += f";border-bottom:5px solid {PALETTE['cached']}"
    ours = block == frame.block
    if ours:
        style += f";{_HERE}"
    signs = ("✓" if found else "") + ("●" if ours else "")
    return f'<td width="34" style="{style}"><small>{block}</small><br>{escape(label)}{signs}</td>'


def _short(request_id: str) -> str:
    """What fits into a cell: the end of a long id tells requests apart."""
    return request_id if len(request_id) <= 4 else f"…{request_id[-3:]}"


def _timeline(life: Life, frame: Frame) -> str:
    """Who was worked on when; the column of the frame's step is marked."""
    steps = sorted({span.step for span in life.spans})
    near = [step for step in steps if abs(step - frame.step) <= _STEPS_SHOWN]
    if not near:
        return ""
    spans = {(span.request_id, span.step): span for span in life.spans}
    rows = [r for r in life.requests if any((r, step) in spans for step in near)]
    head = "".join(_step_cell(step, here=step == frame.step) for step in near)
    body = f'<tr><th scope="row">step</th>{head}</tr>'
    for request_id in rows:
        name = f'<th scope="row">{escape(request_id)}</th>'
        cells = (_span_cell(spans.get((request_id, step)), step == frame.step) for step in near)
        body += f"<tr>{name}{''.join(cells)}</tr>"
    part = "" if len(near) == len(steps) else f", steps {near[0]} to {near[-1]} of {steps[-1]}"
    legend = (
        f"Timeline{part}: P prefill and its tokens, D decode, w waiting, + found in the cache, "
        "▼ this event's step"
    )
    return _table(legend, body)


def _step_cell(step: int, *, here: bool) -> str:
    if here:
        return f'<th width="42" style="{_CELL};{_HERE}" scope="col">▼ {step}</th>'
    return f'<th width="42" style="{_CELL}" scope="col">{step}</th>'


def _span_cell(span: Span | None, here: bool) -> str:
    style = "border-left:3px solid #111111;border-right:3px solid #111111;" if here else ""
    if span is None:
        return f'<td style="{style}"></td>' if here else "<td></td>"
    style += f"background:{PALETTE[span.kind]}"
    text = {"waiting": "w", "decode": "D"}.get(span.kind, "P")
    if span.kind == "prefill" and span.tokens:
        style += ";color:#FFFFFF"
        text += str(span.tokens[1] - span.tokens[0])
    if span.cached:
        text += f" +{span.cached}"
    return f'<td style="{_CELL};{style}">{text}</td>'


def _table(legend: str, rows: str) -> str:
    style = "text-align:left;font-size:12px;color:#333333"
    caption = f'<caption style="{style}">{escape(legend)}</caption>'
    style = (
        "border-collapse:collapse;margin:8px 0;font-size:12px;text-align:center;"
        "background:#FFFFFF;color:#111111"
    )
    table = f'<table border="1" cellpadding="3" style="{style}">'
    return f"{table}{caption}<tbody>{rows}</tbody></table>"
