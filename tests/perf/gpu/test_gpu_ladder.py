"""The ladder without a GPU: cells, rungs that fail in every way, the file, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels.mega.shapes import MODELS
from minifer.perf.bench import Summary
from minifer.perf.costs import decode_cost
from minifer.perf.gpu import climb as climbing
from minifer.perf.gpu.bandwidth import Bandwidth
from minifer.perf.gpu.cell import (
    Cell,
    DecodeCase,
    DenseBackend,
    build_case,
    cells_by_value,
    float32_logits,
)
from minifer.perf.gpu.climb import DeviceLostError, climb
from minifer.perf.gpu.ladder import Ladder, Row, judge, table
from minifer.perf.gpu.rungs import RUNGS, Rung, Step, eager

CPU = torch.device("cpu")
CELL = Cell("minifer-tiny", 2, 37, layers=1)


@pytest.fixture(scope="module")
def case() -> DecodeCase:
    return build_case(CELL, CPU, num_probes=2)


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable:
    """A rung's build: eager, with something done to its logits and tokens."""

    def build(case: DecodeCase) -> Step:
        inner = eager(case)
        return Step(lambda: change(*inner.run()))

    return build


def fails(error: BaseException) -> Callable:
    def build(case: DecodeCase) -> Step:
        raise error

    return build


def rung(name: str, build: Callable, **options: object) -> Rung:
    return Rung(name, "a test", build, **options)  # type: ignore[arg-type]


def climbed(*others: Rung, out: Path | None = None, budget: float = 60.0) -> Ladder:
    ladder = Ladder({"seed": 0, "probes": 2}, Bandwidth(1e9, 2e9), out)
    climb(ladder, [CELL], [RUNGS["eager"], *others], CPU, budget, lambda text: None)
    return ladder


def rows(ladder: Ladder) -> dict[str, dict]:
    return {row["rung"]: row for row in ladder.cells[0]["rows"]}


# -- cells


def test_cells_come_in_the_order_of_their_value() -> None:
    cells = cells_by_value(("llama-1b", "smollm2-135m"), (1, 4), (512, 4096))
    places = [(c.model, c.batch, c.context) for c in cells]
    assert places[0] == ("llama-1b", 1, 512)
    assert set(places[1:4]) == {
        ("llama-1b", 1, 4096),
        ("llama-1b", 4, 512),
        ("smollm2-135m", 1, 512),
    }
    assert places[-1] == ("smollm2-135m", 4, 4096) and len(places) == 8


def test_a_context_that_a_model_does_not_allow_is_no_cell() -> None:
    cells = cells_by_value(("llama-1b", "smollm2-135m"), (1,), (512, 32768))
    assert Cell("llama-1b", 1, 32768) in cells
    assert {c.context for c in cells if c.model == "smollm2-135m"} == {512}


@pytest.mark.parametrize(
    ("model", "batch", "context", "layers", "named"),
    [
        ("gpt-5", 1, 16, None, "model must be"),
        ("minifer-tiny", 0, 16, None, "batch must be"),
        ("minifer-tiny", 1, 0, None, "context must be"),
        ("minifer-tiny", 1, 1020, None, "context must be 1 to 992"),
        ("minifer-tiny", 1, 16, 5, "layers must be 1 to 4"),
    ],
)
def test_cells_out_of_range_are_refused(model, batch, context, layers, named) -> None:
    with pytest.raises(ValueError, match=named):
        Cell(model, batch, context, layers)


def test_the_truth_is_the_engines_own_forward_in_float32(case: DecodeCase) -> None:
    """Through block tables and gathers, where the truth looks at one dense cache."""
    truth = float32_logits(case)
    model = case.model.float()
    try:
        for tokens, expected in zip(case.probes, truth, strict=True):
            case.batch.token_ids.copy_(tokens)
            kv = wide_copy(case)
            hidden = model(case.batch, kv, TorchBackend())
            torch.testing.assert_close(
                model.logits(hidden, TorchBackend()), expected, rtol=1e-5, atol=1e-5
            )
    finally:
        case.model.bfloat16()


def wide_copy(case: DecodeCase):
    from minifer.execution.kv_storage import KVStorage

    blocks, P, K, C = case.kv.keys[0].shape
    kv = KVStorage(len(case.kv.keys), blocks, P, K, C, torch.float32)
    for target, source in zip(
        (*kv.keys, *kv.values), (*case.kv.keys, *case.kv.values), strict=True
    ):
        target.copy_(source)
    return kv


def test_what_is_behind_the_context_is_poison(case: DecodeCase) -> None:
    case.forget()
    for cache in (*case.kv.keys, *case.kv.values):
        dense = cache.view(CELL.batch, -1, *cache.shape[2:])
        assert bool(dense[:, CELL.context - 1 :].isnan().all())
        assert bool(dense[:, : CELL.context - 1].isfinite().all())


def test_a_step_needs_no_old_value_of_its_own_slot(case: DecodeCase) -> None:
    case.forget()
    logits, tokens = case.step(DenseBackend())
    assert bool(logits.isfinite().all())
    assert tokens.tolist() == logits.argmax(-1).tolist()


# -- rungs that fail


@pytest.mark.parametrize("rms", [torch.nan, torch.inf])
def test_an_error_that_is_no_number_is_wrong(rms: float) -> None:
    """A truth that overflowed proves nothing; and JSON has no word for it."""
    row = Row("mega", "")
    judge(row, maximum=rms, rms=rms, agreement=1.0, eager=1.0)
    assert (row.status, row.error) == ("wrong", None)
    assert row.reason == "its error against float32 is not a finite number"


def test_every_rung_is_a_row_with_its_reason() -> None:
    def nan(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(logits, torch.nan), tokens

    found = rows(
        climbed(
            rung("crashes", fails(RuntimeError("no such\n  kernel"))),
            rung("refuses", fails(ValueError("batch must be at most 16"))),
            rung("not a number", changed(nan)),
            rung("off", changed(lambda logits, tokens: (logits + 1.0, tokens))),
            rung("misshapen", changed(lambda logits, tokens: (logits[:, :-1], tokens))),
            rung("own token", changed(lambda logits, tokens: (logits, (tokens + 1) % 288))),
            rung("graph", eager, graph=True),
            rung("kernels", eager, triton=True),
            rung("right", eager),
        )
    )
    assert {name: row["status"] for name, row in found.items()} == {
        "eager": "ok",
        "crashes": "failed",
        "refuses": "failed",
        "not a number": "wrong",
        "off": "wrong",
        "misshapen": "wrong",
        "own token": "wrong",
        "graph": "skipped",
        "kernels": "ok",
        "right": "ok",
    }
    assert found["crashes"]["reason"] == "RuntimeError: no such kernel"
    assert "at most 16" in found["refuses"]["reason"]
    assert "NaN" in found["not a number"]["reason"]
    assert "times eager's" in found["off"]["reason"]
    assert "need a GPU" in found["graph"]["reason"]
    assert "interpreter" in found["kernels"]["reason"]
    timed = {name for name, row in found.items() if row["seconds"]}
    assert timed == {"eager", "right"}  # no speed without its correctness, none interpreted
    assert {found[name]["timing"] for name in timed} == {"in turns"}


def test_an_error_beside_eagers_is_what_float32_says() -> None:
    def nudged(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.clone()
        logits[0, 0] += 0.25
        return logits, logits.argmax(-1)

    found = rows(climbed(rung("same", eager), rung("nudged", changed(nudged))))
    assert found["same"]["error"]["ratio"] == 1.0 and found["same"]["error"]["fidelity"]
    assert found["eager"]["error"]["ratio"] is None
    assert found["nudged"]["error"]["max"] == pytest.approx(0.25, abs=0.01)
    assert found["nudged"]["error"]["fidelity"] is False


@pytest.mark.parametrize(
    ("rms", "status", "fidelity"),
    [
        (0.5, "ok", True),
        (1.004, "ok", True),
        (1.006, "ok", False),
        (3.9, "ok", False),
        (4.1, "wrong", False),
    ],
)
def test_the_fidelity_gate_is_eagers_error(rms: float, status: str, fidelity: bool) -> None:
    row = Row("mega", "a test")
    judge(row, maximum=9.0, rms=rms, agreement=1.0, eager=1.0)
    assert row.error is not None
    assert (row.status, row.error["fidelity"], row.error["ratio"]) == (status, fidelity, rms)


def test_a_step_that_gives_up_is_a_failed_row() -> None:
    def gave_up() -> None:
        raise RuntimeError("program 3 gave up")

    def build(case: DecodeCase) -> Step:
        return Step(eager(case).run, check=gave_up)

    found = rows(climbed(rung("mega", build)))
    assert found["mega"]["status"] == "failed" and "program 3" in found["mega"]["reason"]


def test_a_cell_without_time_skips_with_the_reason() -> None:
    found = rows(climbed(rung("right", eager), budget=0.0))
    assert {row["status"] for row in found.values()} == {"skipped"}
    assert "0 s of the cell's time left" in found["right"]["reason"]


def test_a_cell_that_does_not_fit_is_named(monkeypatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(climbing, "build_case", no_memory)
    ladder = climbed()
    assert ladder.cells[0]["rows"] == []
    assert "20 GiB" in ladder.cells[0]["reason"] and "20 GiB" in table(ladder)


# -- the file


def test_a_kill_at_any_moment_leaves_a_valid_file(tmp_path: Path) -> None:
    out = tmp_path / "ladder.json"

    def killed(case: DecodeCase) -> Step:
        content = json.loads(out.read_text())
        states.append([(row["rung"], row["status"]) for row in content["cells"][0]["rows"]])
        raise KeyboardInterrupt

    states: list = []
    with pytest.raises(KeyboardInterrupt):
        climbed(rung("hangs", killed), rung("right", eager), out=out)
    assert states == [[("eager", "ok"), ("hangs", "running")]]
    assert [p.name for p in tmp_path.iterdir()] == ["ladder.json"]

    ladder = Ladder({"seed": 0, "probes": 2}, Bandwidth(1e9, 2e9), out)
    ladder.resume()
    built: list[str] = []

    def noted(case: DecodeCase) -> Step:
        built.append("right")
        return eager(case)

    todo = [RUNGS["eager"], rung("hangs", killed), rung("right", noted)]
    climb(ladder, [CELL], todo, CPU, 60.0, lambda text: None)
    found = rows(ladder)
    assert found["hangs"]["status"] == "failed" and "process ended" in found["hangs"]["reason"]
    assert built == ["right"] and found["right"]["error"]["ratio"] == 1.0
    climb(ladder, [CELL], todo, CPU, 60.0, lambda text: None)
    assert built == ["right"]  # all of it is there


def test_a_device_that_is_lost_ends_the_process_after_its_row(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "ladder.json"
    monkeypatch.setattr(climbing, "_works", lambda device: False)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        climbed(
            rung("mega", fails(RuntimeError("CUDA error: an illegal memory access"))),
            rung("right", eager),
            out=out,
        )
    content = json.loads(out.read_text())
    assert [row["rung"] for row in content["cells"][0]["rows"]] == ["eager", "mega"]


def test_only_a_ladder_of_this_machine_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    climbed(out=out)
    content = json.loads(out.read_text())
    content["machine"]["accelerator"] = "NVIDIA H200"
    out.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="cannot be resumed"):
        Ladder({}, Bandwidth(1.0, 1.0), out).resume()


def test_the_schema() -> None:
    content = json.loads(json.dumps(climbed(rung("right", eager)).to_dict(), allow_nan=False))
    assert set(content) == {
        "schema_version", "name", "started", "machine", "versions", "git", "settings",
        "bandwidth", "cells",
    }  # fmt: skip
    row = content["cells"][0]["rows"][0]
    assert set(row) == set(Row.__dataclass_fields__)
    assert set(row["seconds"]) == {"values", "median", "min", "max", "iqr"}


def test_bytes_a_second_are_weights_and_kv_over_the_median() -> None:
    ladder = Ladder({}, Bandwidth(copy=4e12, read=5e12))
    ladder.datasheet = 4.8e12
    cell, row = Cell("llama-1b", 1, 512), Row("mega", "a test")
    entry = ladder.entry(cell)
    cost = decode_cost(MODELS["llama-1b"], 1, 512).total()
    assert entry["weight_bytes"] + entry["kv_bytes"] == cost.weight_bytes + cost.kv_bytes
    assert 2.47e9 < entry["weight_bytes"] < 2.48e9  # Llama-3.2-1B's 1.236e9 parameters
    summary = Summary.of([0.002, 0.001, 0.001])
    ladder.time(row, summary, "in turns", 3e9)
    assert (row.bytes_per_second, row.of_copy) == (3e12, 0.75)
    assert (row.of_read, row.of_datasheet) == (0.6, 0.625)


def test_the_table_has_a_line_for_every_rung() -> None:
    ladder = climbed(rung("right", eager), rung("crashes", fails(RuntimeError("boom"))))
    text = table(ladder)
    assert "minifer-tiny, batch 2, context 37, 1 layer only" in text
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["eager", "right", "crashes"]
    assert "failed; RuntimeError: boom" in text and "copy 1 GB/s, read 2 GB/s" in text


def test_the_rungs_are_the_ladder() -> None:
    assert list(RUNGS) == [
        "eager", "compile", "reduce-overhead", "triton", "triton-graph", "triton-pdl",
        "mega-grid", "mega", "mega-l2", "mega-registers", "mega-epoch",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, rung in RUNGS.items() if rung.triton])
def test_our_rungs_are_right_in_the_interpreter(name: str) -> None:
    if RUNGS[name].impossible(CPU):
        pytest.skip("needs CUDA graphs")
    ladder = Ladder({"seed": 0, "probes": 1}, Bandwidth(1e9, 1e9))
    cell = Cell("minifer-tiny", 1, 20, layers=1)
    climb(ladder, [cell], [RUNGS["eager"], RUNGS[name]], CPU, 60.0, lambda text: None)
    row = rows(ladder)[name]
    assert row["status"] == "ok", row["reason"]
    assert row["error"]["fidelity"] and row["seconds"] is None


@pytest.mark.slow
def test_a_compiled_step_decodes_what_eager_decodes() -> None:
    row = rows(climbed(RUNGS["compile"]))["compile"]
    assert row["status"] == "ok", row["reason"]
    assert row["error"]["ratio"] < 1.5 and row["seconds"]
