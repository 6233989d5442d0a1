"""The table of chips: figures that check each other."""

from __future__ import annotations

import re

import pytest

from minifer.perf.devices import ALIASES, DEVICES, find_device

# FLOPs a byte, worked out by hand from the data sheets.
RIDGE = {
    "A100-80GB-SXM": 153,
    "H100-SXM": 295,
    "H200-SXM": 206,
    "B200": 292,
    "T4": 203,
    "Groq-LPU-v1": 2.35,
    "Cerebras-WSE-3": 5.95,
}


def test_ridge_points_are_those_of_the_data_sheets() -> None:
    assert {name: d.ridge_point for name, d in DEVICES.items()} == pytest.approx(RIDGE, rel=0.005)


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_has_a_source_and_a_date(name: str) -> None:
    device = DEVICES[name]
    assert device.name == name
    assert re.search(r"datasheet|brief|press release", device.source)
    assert re.fullmatch(r"20\d\d-\d\d", device.date)
    assert device.on_chip_bytes <= device.memory_bytes


def test_weights_of_llama_8b_take_3_35_ms_to_read_on_an_h200() -> None:
    """16.06 GB at 4.8 TB/s; the arithmetic of one token hides behind it."""
    h200 = DEVICES["H200-SXM"]
    assert h200.seconds(2 * 8.03e9, 16.06e9) == pytest.approx(3.35e-3, rel=0.005)


def test_at_the_ridge_arithmetic_and_traffic_take_the_same_time() -> None:
    for device in DEVICES.values():
        flops = device.ridge_point * 1e9
        assert flops / device.peak_flops == pytest.approx(1e9 / device.memory_bandwidth)
        assert device.seconds(2 * flops, 1e9) == pytest.approx(2 * device.seconds(flops, 1e9))
        assert device.seconds(flops / 2, 1e9) == device.seconds(flops / 4, 1e9)


# NVIDIA's architecture white papers; a chip that is no GPU has no SMs.
SMS = {"A100-80GB-SXM": 108, "H100-SXM": 132, "H200-SXM": 132, "B200": 148, "T4": 40}


def test_streaming_multiprocessors_are_those_of_the_white_papers() -> None:
    assert {name: d.num_sms for name, d in DEVICES.items() if d.num_sms is not None} == SMS
    assert all("SMs: " in DEVICES[name].note for name in SMS)


@pytest.mark.parametrize("name", [*DEVICES, *ALIASES])
def test_a_chip_is_found_by_any_of_its_names_in_any_case(name: str) -> None:
    found = find_device(name)
    assert found is find_device(name.upper()) is find_device(name.lower())
    assert found.name == ALIASES.get(name, name)


def test_an_unknown_chip_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"device must be one of a100, .*, got 'h1000'"):
        find_device("h1000")
