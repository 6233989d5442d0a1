"""`minifer kernels timeline`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from minifer.cli import main
from minifer.parcae.presets import PRESETS
from minifer.perf.devices import find_device
from minifer.perf.timeline import loop_tables, tables
from minifer.perf.timeline.gantt import Panel

Capture = pytest.CaptureFixture[str]
TINY = ("--model", "minifer-tiny", "--gpu", "t4")
LOOPED = "--model parcae-140m"


def timeline(*arguments: str) -> int:
    return main(["kernels", "timeline", *arguments])


def test_prints_every_way_to_run_the_step_and_that_it_is_a_model(capsys: Capture) -> None:
    assert timeline(*TINY, "--batch", "4", "--context", "300", "--overhead", "0.8") == 0
    header, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert header == (
        "MODELLED, not measured: minifer-tiny on T4 (40 SMs, 0.32 TB/s), batch 4, context 300, "
        "tile 16, 0.8 µs an instruction"
    )
    assert columns.split() == [
        "modelled",
        "µs",
        "of",
        "peak",
        "stream",
        "overhead",
        "tail",
        "bubble",
    ]
    arms = [row.partition(":")[0] for row in rows[:7]]
    assert arms == [
        *("un-fused", "fused", "fused, PDL", "megakernel, grid barriers", "megakernel"),
        *("megakernel, prefetch", "megakernel, loads ahead"),
    ]
    us = [float(row.split()[-6].replace(",", "")) for row in rows[:7]]
    assert us[0] > us[1] > us[2] > us[4] > us[6] > 0
    for row in rows[:7]:  # the SMs' time adds up
        assert sum(float(cell.rstrip("%")) for cell in row.split()[-4:]) == pytest.approx(
            100, abs=0.3
        )


def test_writes_a_picture_and_a_trace(tmp_path: Path, capsys: Capture) -> None:
    out, trace = tmp_path / "t.svg", tmp_path / "t.json"
    assert timeline(*TINY, "--layers", "3", "--out", str(out), "--trace", str(trace)) == 0
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    words = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(word.startswith("3 layers: ") for word in words) == 5
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(e["name"] == "process_name" for e in events) == 7
    noted = capsys.readouterr().err
    assert (
        noted == f"minifer: note: {trace} holds {len(events):,} events: ui.perfetto.dev opens it\n"
    )


def test_a_loop_model_has_ways_and_a_picture_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "t.svg"
    assert timeline(*LOOPED.split(), "--loops", "2", "--out", str(out)) == 0
    header, _, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("MODELLED, not measured: parcae-140m, 2 loops on H100-SXM (132 SMs, ")
    assert [row.partition(":")[0] for row in rows[:5]] == [
        *("launches", "launches, PDL", "launches, PDL, core in L2"),
        *("megakernel", "megakernel, core in L2"),
    ]
    kept = [row for row in rows[:5] if "2 of 2 core layers kept" in row]
    assert kept == [rows[2], rows[4]]
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    words = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0].startswith("A core that stays in L2") and "no GPU has run this" in words[0]
    assert sum(word.startswith("4 layers: ") for word in words) == 3  # two iterations of two


def test_a_loop_model_runs_as_deep_as_it_was_trained(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minifer.perf.timeline import loop_resident

    depths = []
    drawn = loop_resident.loop_panel(
        loop_resident.RESIDENT,
        loop_resident.LoopStep(PRESETS["parcae-140m"], 1),
        find_device("h100"),
    )

    def fake(arm: str, step: loop_resident.LoopStep, *rest: object) -> Panel:
        depths.append(step.num_loops)
        return drawn

    monkeypatch.setattr(loop_resident, "loop_panel", fake)
    assert timeline(*LOOPED.split()) == 0
    assert depths == [8] * 5 and "parcae-140m, 8 loops on" in capsys.readouterr().out


def test_a_picture_may_be_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "t.png"
    assert timeline(*TINY, "--layers", "1", "--out", str(out)) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gpu h1000", "device must be one of a100, h100,"),
        ("--gpu groq", "--gpu must be a GPU with SMs, got Groq-LPU-v1"),
        ("--batch 17", "batch must be at most 16 for a megakernel, got 17"),
        ("--batch 0", "batch must be at least 1, got 0"),
        ("--context 0", "--context must be at least 1, got 0"),
        ("--tile 48", "hidden must be a multiple of tile=48, got 2048"),
        ("--overhead -1", "overhead must be finite and at least 0, got"),
        ("--overhead nan", "overhead must be finite and at least 0, got nan"),
        ("--gap inf", "gap must be finite and at least 0, got inf"),
        ("--prefetch -1", "prefetch must be finite and at least 0, got"),
        ("--latency 0", "in_flight and latency must be above 0, got"),
        ("--achievable 0", "achievable must be in (0, 1], got 0"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--model llama-2b", "argument --model: invalid choice: 'llama-2b'"),
        ("--policy random", "argument --policy: invalid choice: 'random'"),
        ("--out t.gif", "--out must end in .svg, .png or .pdf, got 't.gif'"),
        ("--out /no/where/t.svg", "--out: there is no folder /no/where, make it first"),
        ("--trace /no/where/t", "--trace: there is no folder /no/where, make it first"),
        ("--json t.json", "--json needs --table or --loop-table"),
        ("--table --in-flight 3", "--table has its own settings: leave out --in-flight"),
        ("--loop-table --loops 3", "--loop-table has its own settings: leave out --loops"),
        ("--table --loop-table", "--table and --loop-table are one at a time"),
        ("--loops 8", "--loops needs a loop model: parcae-140m, parcae-370m, parcae-770m,"),
        (f"{LOOPED} --loops 0", "num_loops must be an integer of at least 1, got 0"),
        (f"{LOOPED} --policy list", "--policy is not for loop models"),
        (f"{LOOPED} --tile 48 --batch 17", "batch must be at most 16 for a megakernel, got 17"),
        (f"{LOOPED} --gpu t4", "device must be one of A100-80GB-SXM, H100-SXM, H200-SXM, B200, w"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: str, sentence: str, capsys: Capture) -> None:
    assert timeline(*arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"minifer: error: {sentence}")


@pytest.mark.parametrize(
    ("flag", "module", "name"),
    [
        ("--table", tables, "modelled_bandwidth"),
        ("--loop-table", loop_tables, "loop_resident"),
    ],
)
def test_the_tables_are_written_as_markdown_and_json(
    flag: str,
    module: ModuleType,
    name: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the committed numbers: to compute them takes minutes."""
    results = Path(__file__).parents[2] / "lectures" / "results"
    data = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(module, "study", lambda *models, progress: data)
    out = tmp_path / "table.json"
    assert timeline(flag, "--json", str(out)) == 0
    assert capsys.readouterr().out == (results / f"{name}.md").read_text(encoding="utf-8")
    assert out.read_bytes() == (results / f"{name}.json").read_bytes()
