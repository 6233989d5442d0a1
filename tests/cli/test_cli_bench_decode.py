"""`minifer bench decode` and `bench kernels` between the command line and the measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minifer.cli import main
from minifer.perf.gpu import bandwidth, climb, kernels
from minifer.perf.gpu.bandwidth import Bandwidth
from minifer.perf.gpu.cell import Cell
from minifer.perf.gpu.rungs import RUNGS

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch):
    """Run the command until the climb begins: what it is given."""
    seen: dict[str, Any] = {}

    def climbing(ladder, cells, rungs, device, budget, say) -> None:
        seen.update(ladder=ladder, cells=cells, rungs=rungs, device=device, budget=budget)

    monkeypatch.setattr(climb, "climb", climbing)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda device: Bandwidth(1e9, 1e9))

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        seen.clear()
        assert main(["bench", "decode", "--ladder", *arguments]) == status
        return dict(seen)

    return run


def test_without_a_gpu_a_tiny_model_climbs_all_rungs(begun) -> None:
    seen = begun("--device", "cpu")
    assert seen["cells"] == [Cell("minifer-tiny", 1, 64)]
    assert [rung.name for rung in seen["rungs"]] == list(RUNGS)
    assert (seen["budget"], seen["device"]) == (120.0, torch.device("cpu"))
    assert seen["ladder"].settings["probes"] == 8 and seen["ladder"].out is None


def test_every_option_arrives(begun, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    options = """--model smollm2-135m,llama-1b --batch 4,1 --context 4096,512 --layers 2
        --rungs eager,mega --budget 7.5 --probes 3 --seed 9 --device cpu --out"""
    seen = begun(*options.split(), str(out))
    assert seen["cells"][0] == Cell("smollm2-135m", 4, 4096, layers=2)
    assert len(seen["cells"]) == 8
    assert [rung.name for rung in seen["rungs"]] == ["eager", "mega"]
    assert seen["budget"] == 7.5 and seen["ladder"].out == out
    settings = seen["ladder"].settings
    assert (settings["seed"], settings["probes"], settings["budget"]) == (9, 3, 7.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--rungs eager,warp", "'warp'"),
        ("--budget 0", "--budget must be above 0"),
        ("--probes -1", "--probes must be above 0"),
        ("--resume", "--resume needs --json"),
        ("--out no/such/r.json", "there is no folder no/such"),
        ("--batch one", "must be numbers"),
        ("--model gpt-5", "model must be one of"),
        ("--context 5000 --model minifer-tiny", "--context must fit the model"),
        ("--layers 9", "layers must be 1 to 4"),
        ("--batch 0", "batch must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    begun, capsys: Capture, options: str, named: str
) -> None:
    assert begun("--device", "cpu", *options.split(), status=2) == {}
    assert named in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", ["decode --ladder", "kernels"])
def test_a_gpu_that_is_not_there_is_refused(capsys: Capture, benchmark: str) -> None:
    assert main(["bench", *benchmark.split(), "--device", "cuda"]) == 2
    assert "torch finds none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--rungs eager", "--rungs needs --ladder"),
        ("--budget 3", "--budget needs --ladder"),
        ("--resume", "--resume needs --ladder"),
        ("--ladder --vs vllm", "--vs has no place beside --ladder"),
        ("--ladder --tokens 9", "--tokens has no place beside --ladder"),
    ],
)
def test_the_ladder_is_a_measurement_of_its_own(options: str, named: str, capsys: Capture) -> None:
    assert main(["bench", "decode", *options.split()]) == 2
    assert named in capsys.readouterr().err


def test_a_lost_device_has_a_status_of_its_own(monkeypatch, begun, capsys: Capture) -> None:
    def lost(*_: object) -> None:
        raise climb.DeviceLostError("mega: illegal memory access")

    monkeypatch.setattr(climb, "climb", lost)
    begun("--device", "cpu", status=3)
    assert "--resume" in capsys.readouterr().err


def test_a_cell_from_end_to_end_and_again(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r.json"
    command = ["bench", "decode", "--ladder", "--device", "cpu", "--layers", "1", "--context", "9"]
    command += ["--probes", "1", "--out", str(out)]
    assert main([*command, "--rungs", "eager,reduce-overhead"]) == 0
    printed = capsys.readouterr().out
    assert "minifer-tiny, batch 1, context 9" in printed and "CUDA graphs need a GPU" in printed
    assert main([*command, "--rungs", "eager,reduce-overhead,mega", "--resume"]) == 0
    rows = json.loads(out.read_text())["cells"][0]["rows"]
    assert [(row["rung"], row["status"]) for row in rows] == [
        ("eager", "ok"),
        ("reduce-overhead", "skipped"),
        ("mega", "ok"),
    ]


# -- kernels


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `bench_kernels` is given; its rows say that one kernel is wrong."""
    seen: dict[str, Any] = {"rows": []}

    def bench_kernels(groups, device, measured, settings, out, say) -> dict[str, Any]:
        seen.update(groups=groups, device=device, settings=settings, out=out)
        return {"rows": seen["rows"], "bandwidth": {"copy": 1e9}}

    monkeypatch.setattr(kernels, "bench_kernels", bench_kernels)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda device: Bandwidth(1e9, 1e9))
    return seen


def test_kernels_of_the_tiny_model_without_a_gpu(benched, tmp_path: Path) -> None:
    out = str(tmp_path / "k.json")
    assert main(["bench", "kernels", "--device", "cpu", "--out", out]) == 0
    assert benched["settings"] == {"model": "minifer-tiny", "context": 100, "device": "cpu"}
    assert {"gemv", "paged_decode"} <= set(benched["groups"]) and str(benched["out"]) == out


def test_a_wrong_kernel_is_named_and_is_the_status(benched, capsys: Capture) -> None:
    benched["rows"] += [vars(kernels.KernelRow("gemv head", "wrong", "off by 3"))]
    assert main(["bench", "kernels", "--device", "cpu"]) == 1
    assert "not right: gemv head" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--model gpt-5", "--context -1", "--out no/such/k.json"])
def test_kernels_refuses_in_a_sentence(benched, options: str, capsys: Capture) -> None:
    assert main(["bench", "kernels", "--device", "cpu", *options.split()]) == 2
    assert options.split()[0] in capsys.readouterr().err
