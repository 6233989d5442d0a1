"""The strip of the life map: five stages in a row, and the one in which the token is now.

Every lecture opens with it, and the microscope moves the light from event to event. The pictures
`lectures/figures/life_map_STAGE.svg` are what `life_map` returns; `write_life_maps` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from minifer.course.figures import PALETTE
from minifer.events import STAGES

START = "start"  # before the first stage: a request with its text
PLACES = (START, *STAGES)
HERE = "the token is here"


@dataclass(frozen=True)
class _Box:
    """One place of the strip. lines: what the stage decides; colour of its frame when lit."""

    title: tuple[str, ...]
    lines: tuple[str, ...]
    colour: str
    pale: str


_BOXES = {
    "scheduling": _Box(
        ("1 scheduling",), ("who gets how", "many tokens", "this step"), "#555555", "#EEEEEE"
    ),
    "kv": _Box(
        ("2 KV",),
        ("where keys and", "values lie, what", "exists already"),
        PALETTE["cached"],
        "#D9F2EA",
    ),
    "prefill": _Box(
        ("3 prefill",),
        ("many tokens", "at once, those", "we were given"),
        PALETTE["prefill"],
        "#D6E9F6",
    ),
    "decode": _Box(
        ("4 decode",),
        ("one token", "a step, drawn", "from its logits"),
        PALETTE["decode"],
        "#FBE3D3",
    ),
    "postprocessing": _Box(
        ("5 post-", "processing"), ("text, stops,", "streaming"), "#555555", "#EEEEEE"
    ),
}
_WIDTH, _HEIGHT = 776, 172
_LEFT, _SIDE, _GAP = 92, 106, 22  # of the first box, of a box, between boxes
_TOP, _BOTTOM = 36, 124


def life_map(place: str, *, standalone: bool = True) -> str:
    """The strip as SVG text with one place lit.

    place: "start" or one of `minifer.events.STAGES`. standalone: with the attributes a file needs;
    without, to stand inside HTML. The lit place has a thick frame, a bold text, a colour and the
    words "the token is here". Raises `ValueError` for any other place.
    """
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
    parts = [
        f"<title>{escape(_name(place))}</title>",
        "<desc>A request passes scheduling, KV look-up, prefill, decode and post-processing; "
        f"the steps repeat until the text is whole. {escape(_here(place))}</desc>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#FFFFFF"/>',
        *_ends(place),
    ]
    for number, stage in enumerate(STAGES):
        parts += _box(_BOXES[stage], _left(number), lit=stage == place)
    parts += _loop()
    xmlns = 'xmlns="http://www.w3.org/2000/svg" ' if standalone else ""
    size = "" if standalone else f'width="{_WIDTH}" style="max-width:100%;height:auto" '
    return (
        f'<svg {xmlns}viewBox="0 0 {_WIDTH} {_HEIGHT}" {size}role="img" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">\n' + "\n".join(parts) + "\n</svg>"
    )


def write_life_maps(folder: Path) -> list[Path]:
    """Write `life_map_STAGE.svg` for every place into a folder, and return the paths."""
    paths = []
    for place in PLACES:
        path = folder / f"life_map_{place}.svg"
        path.write_text(life_map(place) + "\n", encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


def _name(place: str) -> str:
    return "Life map: the token enters" if place == START else f"Life map: {place}"


def _here(place: str) -> str:
    if place == START:
        return "The token is here: with the request, before the first stage."
    return f"The token is here: stage {''.join(_BOXES[place].title)}."


def _left(number: int) -> int:
    return _LEFT + number * (_SIDE + _GAP)


def _text(x: float, y: float, text: str, size: int, *, bold: bool, fill: str = "#111111") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle" fill="{fill}"{weight}>'
        f"{escape(text)}</text>"
    )


def _arrow(x: float, y: float) -> list[str]:
    """A short arrow to the right that ends at x."""
    return [
        f'<path d="M{x - _GAP + 4:g} {y:g}H{x - 8:g}" stroke="#444444" stroke-width="2"/>',
        f'<path d="M{x - 3:g} {y:g}L{x - 10:g} {y - 5:g}V{y + 5:g}z" fill="#444444"/>',
    ]


def _marker(x: float, colour: str, *, anchor: str = "middle") -> list[str]:
    """The words above a lit place, and a wedge that points down to it."""
    where = 4 if anchor == "start" else x
    return [
        f'<text x="{where:g}" y="16" font-size="13" text-anchor="{anchor}" fill="#111111" '
        f'font-weight="bold">{HERE}</text>',
        f'<path d="M{x:g} 33L{x - 8:g} 21H{x + 8:g}z" fill="{colour}"/>',
    ]


def _ends(place: str) -> list[str]:
    """The request on the left, the text on the right."""
    middle, lit = (_TOP + _BOTTOM) / 2, place == START
    x = (_LEFT - _GAP) / 2 + 1
    last = _left(len(STAGES)) - _GAP  # where the last box ends
    parts = []
    if lit:
        parts += _marker(x, "#555555", anchor="start")
        parts.append(
            f'<rect x="4" y="{middle - 20:g}" width="{_LEFT - _GAP - 6}" height="40" rx="8" '
            'fill="#EEEEEE" stroke="#555555" stroke-width="5"/>'
        )
    parts.append(_text(x, middle + 4, "request", 12, bold=lit))
    parts += _arrow(_LEFT, middle)
    parts += _arrow(last + _GAP, middle)
    parts.append(_text((last + _GAP + _WIDTH) / 2 - 1, middle + 4, "text", 12, bold=False))
    return parts


def _box(box: _Box, left: int, *, lit: bool) -> list[str]:
    """One stage: a frame, its name, what it decides."""
    x, fill = left + _SIDE / 2, "#111111" if lit else "#444444"
    frame = (
        f'fill="{box.pale}" stroke="{box.colour}" stroke-width="5"'
        if lit
        else 'fill="#FFFFFF" stroke="#999999" stroke-width="1.5"'
    )
    parts = _marker(x, box.colour) if lit else []
    parts.append(
        f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_BOTTOM - _TOP}" rx="8" {frame}/>'
    )
    y = _TOP + 20
    for line in box.title:
        parts.append(_text(x, y, line, 13, bold=lit, fill=fill))
        y += 15
    y += 4 if len(box.title) == 1 else 1
    for line in box.lines:
        parts.append(_text(x, y, line, 12, bold=False, fill=fill))
        y += 15
    return [*parts, *(_arrow(left, (_TOP + _BOTTOM) / 2) if left > _LEFT else [])]


def _loop() -> list[str]:
    """The way back: a step ends, the next one begins."""
    begin, end = _left(len(STAGES) - 1) + _SIDE / 2, _LEFT + _SIDE / 2
    low = _BOTTOM + 20
    words = "not finished: the next step, one token more"
    return [
        f'<path d="M{begin:g} {_BOTTOM + 4}V{low}H{end:g}V{_BOTTOM + 10}" fill="none" '
        'stroke="#444444" stroke-width="2" stroke-dasharray="6 4"/>',
        f'<path d="M{end:g} {_BOTTOM + 3}L{end - 5:g} {_BOTTOM + 12}H{end + 5:g}z" '
        'fill="#444444"/>',
        _text((begin + end) / 2, low + 17, words, 12, bold=False, fill="#333333"),
    ]
