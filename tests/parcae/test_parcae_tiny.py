"""The loop model that ships with minifer: the stated file, worth what is said at every depth."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

import minifer
from minifer.parcae.checkpoint import config_from_parcae
from minifer.parcae.model import Parcae
from minifer.parcae.presets import PRESETS, create_model
from minifer.parcae.train import Recipe, train
from minifer.text.help_topics import sections, split
from minifer.text.tokenizer import Tokenizer
from minifer.weights.hf import load_hf

ASSETS = Path(minifer.__file__).parent / "assets"
FOLDER = ASSETS / "parcae-tiny"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> Parcae:
    return load_hf(FOLDER, torch.float32)[0]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The training script as a module; it is not part of the package."""
    file = ASSETS / "train_parcae_tiny.py"
    spec = importlib.util.spec_from_file_location("train_parcae_tiny", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_parcae_tiny"] = module
    spec.loader.exec_module(module)
    return module


def test_the_weights_are_the_stated_ones(report: dict[str, Any], model: Parcae) -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == report["sha256"]
    assert len(weights) < 3_000_000  # it ships in the wheel
    assert model.num_parameters == report["parameters"]


def test_it_is_the_preset_under_the_published_names() -> None:
    raw = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert raw["_class_name"] == "ParcaeConfig"
    assert config_from_parcae(raw) == PRESETS["parcae-tiny"]
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {name: file.get_tensor(name).dtype for name in names}
    assert names == {part.name for part in create_model("parcae-tiny", seed=None).weight_parts()}
    assert "transformer.core_block.0.attn.c_q.weight" in names
    float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert float32 == {"transformer.adapter.A_log", "transformer.adapter.dt_bias"}


def test_its_tokenizer_is_minifer_tinys(model: Parcae) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (FOLDER / name).read_bytes() == (ASSETS / "minifer-tiny" / name).read_bytes()
    assert Tokenizer.from_dir(FOLDER).vocab_size == model.config.vocab_size


def test_depth_is_worth_what_is_stated(
    model: Parcae, script: ModuleType, report: dict[str, Any]
) -> None:
    """Over all of the held-out text, to what two machines differ by."""
    if sys.version_info[:2] != tuple(map(int, report["python"].split(".")[:2])):
        pytest.skip("the text is that of another Python")
    _, held_out = split(sections())
    assert len(held_out) == report["held_out_tokens"]
    found = script.held_out_loss(model, script.held_out_rows(held_out), (1, 4, 8))
    stated = report["held_out_bits_per_byte_by_depth"]
    for depth in ("1", "4", "8"):
        assert found[depth] == pytest.approx(stated[depth], abs=2e-3)


def test_depth_helps_and_then_does_no_harm(report: dict[str, Any]) -> None:
    bits = {int(t): value for t, value in report["held_out_bits_per_byte_by_depth"].items()}
    assert bits[1] > bits[2] + 0.5 > bits[4] + 0.6
    assert bits[2] > bits[3] > bits[4] > bits[6] > bits[8]
    assert max(bits[12], bits[16]) < bits[8] + 0.01


def test_its_log_is_of_its_recipe(report: dict[str, Any], model: Parcae) -> None:
    recipe = Recipe(**{**report["recipe"], "betas": tuple(report["recipe"]["betas"])})
    with open(FOLDER / "training.csv", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert [int(row["step"]) for row in rows] == list(range(10, recipe.steps + 1, 10))
    for row in rows:
        expected = recipe.learning_rate_at(int(row["step"]) - 1)
        assert float(row["learning_rate"]) == pytest.approx(expected)
        assert float(row["rho"]) < 1
    assert report["spectral_radius"] == pytest.approx(model.adapter.spectral_radius(), abs=1e-4)


def test_the_script_holds_the_recipe(script: ModuleType, report: dict[str, Any]) -> None:
    stated = json.loads(json.dumps(script.report_of(script.RECIPE)))
    assert stated == {key: report[key] for key in stated}


def test_training_twice_gives_the_same_file(script: ModuleType, tmp_path: Path) -> None:
    recipe = replace(script.RECIPE, steps=1, mean_recurrence=1)
    stream = torch.arange(3000) % 256
    digests = []
    for seed in (0, 0, 1):
        model = create_model("parcae-tiny", seed=seed)
        run = replace(recipe, seed=seed)
        train(model, lambda generator: script.batch(stream, recipe, generator), run)
        digests.append(script.save(tmp_path / str(len(digests)), script.rounded(model)))
    assert digests[0] == digests[1] != digests[2]


def test_a_step_is_as_many_tokens_whatever_the_rows_length(script: ModuleType) -> None:
    stream = torch.arange(3000)
    shapes = {
        tuple(script.batch(stream, script.RECIPE, torch.Generator().manual_seed(seed)).shape)
        for seed in range(40)
    }
    assert shapes == {(8, 65), (4, 129), (2, 257), (1, 513)}
    assert max(script.LENGTHS) == PRESETS["parcae-tiny"].max_position_embeddings


def test_held_out_rows_cover_the_stream_once(script: ModuleType) -> None:
    rows = script.held_out_rows(torch.arange(20), 6)
    assert rows.tolist() == [list(range(i, i + 7)) for i in (0, 6, 12)]
