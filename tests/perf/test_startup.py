"""A start is split into stages that add up, and its memory is weights and KV, not twice that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import minifer
from minifer.perf import startup
from minifer.perf.startup import STAGES, drop_from_page_cache, files_of, measure_startup, table

TINY = Path(minifer.__file__).parent / "assets" / "minifer-tiny"


def start(model: Path, **options) -> dict[str, float]:
    return startup._arm(model, "The for statement", {"backend": "torch", **options})()


def test_the_stages_of_a_start_add_up_to_the_whole():
    found = start(TINY, num_kv_blocks=8)
    stages = [found[name] for name, _ in STAGES if name != "seconds"]
    assert min(stages) >= 0
    assert sum(stages) == pytest.approx(found["seconds"])
    assert found["imports"] > found["interpreter"] > 0
    assert found["cpu_seconds"] > 0
    # 4 layers, keys and values, 16 tokens a block, 6 heads of 16, float32
    assert found["kv_pool_bytes"] == 8 * (4 * 2 * 16 * 6 * 16 * 4)
    # the embedding, 4 layers (q, k, v, o; gate, up, down; two norms) and the last norm
    layer = 192 * (192 + 96 + 96 + 192 + 3 * 384) + 2 * 192
    assert found["weight_bytes"] == 4 * (288 * 192 + 4 * layer + 192)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process its peak")
def test_peak_memory_is_little_more_than_weights_and_kv(pulled_model):
    found = start(pulled_model)
    assert found["memory_ratio"] <= 1.3
    assert found["peak_bytes"] >= 0.9 * found["weight_bytes"]  # the peak really is above them


def test_a_start_that_fails_says_why():
    with pytest.raises(RuntimeError, match="block_size"):
        start(TINY, block_size=-1)


def test_the_command_itself_is_an_arm(tmp_path):
    result = measure_startup(TINY, prompt="The for statement", runs=1)
    assert list(result.arms) == ["torch", "torch, command"]
    command = result.arms["torch, command"]
    assert 0 < command["first_byte"].median <= command["exit"].median
    printed = table(result)
    assert all(what in printed for _, what in STAGES)
    assert "first byte of the answer" in printed


def test_a_back_end_that_compiles_starts_with_and_without_its_compiled_step(monkeypatch):
    """Which arms there are, and that each start without it has an empty folder of its own."""
    arms, homes = {}, []

    def run(command, env, **_):
        homes.append(env.get("MINIFER_HOME"))
        if command[-1].endswith("}"):
            raise RuntimeError("far enough")

    def keep(name, found, **_):
        arms.update(found)
        for arm in ("compiled", "compiled, empty compile cache", "compiled, empty compile cache"):
            with pytest.raises(RuntimeError, match="far enough"):
                found[arm]()
        assert [list(Path(home).iterdir()) for home in homes[1:]] == [[], []]

    monkeypatch.setenv("MINIFER_HOME", "kept")
    monkeypatch.setattr(startup.subprocess, "run", run)
    monkeypatch.setattr(startup, "run_benchmark", keep)
    measure_startup(TINY, prompt="x", backends=["torch", "compiled"], cold=True, runs=1)
    assert list(arms) == [
        "torch",
        "torch, files out of the page cache",
        "torch, command",
        "compiled",
        "compiled, empty compile cache",
        "compiled, files out of the page cache",
        "compiled, command",
    ]
    assert homes[0] == "kept"
    assert len({*homes}) == 3


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no such call here")
def test_files_can_be_given_up_and_are_whole_afterwards(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x" * 100_000)
    assert drop_from_page_cache([tmp_path / "model.bin"]) == {}
    assert (tmp_path / "model.bin").read_bytes() == b"x" * 100_000
    names = [file.name for file in files_of(tmp_path)]
    assert "model.bin" in names
    assert any(name.startswith("libtorch") for name in names)
