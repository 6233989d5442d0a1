"""The strip of the life map: the files are what the function draws, and say where the token is."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minifer.course.life_map import HERE, PLACES, life_map

FIGURES = Path(__file__).parents[2] / "lectures" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("place", PLACES)
def test_the_files_are_what_the_function_draws(place):
    file = FIGURES / f"life_map_{place}.svg"
    assert file.read_text(encoding="utf-8") == life_map(place) + "\n"


@pytest.mark.parametrize("place", PLACES)
def test_the_lit_place_is_said_in_words_and_drawn_apart_from_its_colour(place):
    root = ElementTree.fromstring(life_map(place))
    assert root.get("role") == "img" and root.find(f"{SVG}title").text
    assert "The token is here" in root.find(f"{SVG}desc").text
    bold = [text.text for text in root.iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert HERE in bold
    names = {"start": "request", "kv": "2 KV", "postprocessing": "processing"}
    assert any(names.get(place, place) in text for text in bold)
    thick = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke-width") == "5"]
    assert len(thick) == 1
    # The wedge points into the thick frame.
    wedge = next(p.get("d") for p in root.iter(f"{SVG}path") if re.search(r" 33L", p.get("d")))
    tip = float(re.match(r"M([\d.]+) ", wedge)[1])
    left, width = float(thick[0].get("x")), float(thick[0].get("width"))
    assert left < tip < left + width


def test_letters_stay_legible_on_a_narrow_page():
    root = ElementTree.fromstring(life_map("kv"))
    width = float(root.get("viewBox").split()[2])
    sizes = [float(text.get("font-size")) for text in root.iter(f"{SVG}text")]
    assert min(sizes) * 700 / width >= 10  # px on a page 700 px wide


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match="place must be one of start, scheduling"):
        life_map("sampling")
