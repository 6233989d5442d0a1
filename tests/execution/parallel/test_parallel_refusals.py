"""What several ranks cannot do, before anything is started; and where ranks have their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.kv_storage import KVStorage
from minifer.execution.parallel.loading import places
from minifer.execution.runner import num_kv_blocks
from minifer.weights.resolve import load_model, read_config


def test_a_whole_model_is_refused() -> None:
    loaded = load_model("minifer-tiny")
    with pytest.raises(ValueError, match="needs a model that was loaded in 2 parts, got one whole"):
        Engine.from_loaded(loaded, EngineConfig(tensor_parallel_size=2, num_kv_blocks=8))


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [("minifer-tiny", 5, r"1, 2, 3, 6, 12 .* got 5"), ("parcae-tiny", 2, "a loop model")],
)
def test_a_model_that_cannot_be_cut_so_is_refused(model: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(model, tensor_parallel_size=size, device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "compiled"),
        ("backend", "megakernel"),
        ("quantize", "int8"),
        ("kv_dram_bytes", 1000),
        ("kv_disk_path", "blocks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* with tensor_parallel_size=2"):
        EngineConfig(tensor_parallel_size=2, **{name: value})


@pytest.mark.parametrize("name", ["tensor_parallel_size", "distributed_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1, True, "2"])
def test_values_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        EngineConfig(**{name: value})


def test_kv_bytes_are_of_each_rank_so_that_two_ranks_hold_twice_as_many_blocks() -> None:
    config = read_config("minifer-tiny")
    whole = KVStorage.bytes_per_block(4, 16, 6, 16, torch.float32)
    settings = {"kv_cache_bytes": 6 * whole, "device": "cpu"}
    counts = {
        size: num_kv_blocks(
            config, EngineConfig(tensor_parallel_size=size, **settings), torch.float32, "cpu"
        )
        for size in (1, 2, 3)
    }
    assert counts == {1: 6, 2: 12, 3: 18}


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        ("auto", 0, ["cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 3, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_its_own_gpu_or_all_share_a_device(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert places(device, 2) == expected
    if count:
        with pytest.raises(ValueError, match=f"at most {count}, the number of GPUs here, got 4"):
            places("cuda", 4)
