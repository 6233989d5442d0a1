"""The names people use for published models: what each leads to, or what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifer import LLM
from minifer.parcae import create_model
from minifer.parcae.model import Parcae
from minifer.parcae.presets import PRESETS
from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.weights import resolve
from minifer.weights.hf import save_hf
from minifer.weights.published import PARCAE_OTHER_NAMES, PARCAE_REPOSITORIES
from minifer.weights.pull import PullError
from minifer.weights.resolve import load_model, read_config, resolve_model

AUTHORS = {
    "parcae-small-140m": "parcae-140m",
    "parcae-medium-370m": "parcae-370m",
    "parcae-large-770m": "parcae-770m",
    "parcae-xlarge-1_3b": "parcae-1.3b",
}


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A parcae-tiny in the place of the wheel's."""
    folder = tmp_path / "minifer" / "assets" / "parcae-tiny"
    model = create_model("parcae-tiny")
    save_hf(folder, model, model.config)
    byte_tokenizer().save(folder)
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path / "minifer")
    return folder


@pytest.fixture
def asked_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repositories that would be downloaded; none is."""
    asked: list[str] = []

    def download(repo: str) -> Path:
        asked.append(repo)
        raise PullError("not here")

    monkeypatch.setattr(resolve, "hub_download", download)
    return asked


def test_the_tables_know_every_preset() -> None:
    assert AUTHORS == PARCAE_OTHER_NAMES
    assert set(PARCAE_REPOSITORIES) == set(PRESETS) - {"parcae-tiny"} == set(AUTHORS.values())


def test_parcae_tiny_is_bundled(bundled: Path) -> None:
    found = resolve_model("parcae-tiny")
    assert found.path == bundled and found.notice is None
    loaded = load_model("parcae-tiny")
    assert isinstance(loaded.model, Parcae)
    assert loaded.eos_token_ids == {257, 259}
    assert read_config("parcae-tiny").loop == PRESETS["parcae-tiny"].loop


def test_the_bundled_model_is_the_preset() -> None:
    assert read_config("parcae-tiny") == PRESETS["parcae-tiny"]


def test_a_missing_bundled_model_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"bundled model is missing from .*parcae-tiny"):
        resolve_model("parcae-tiny")


@pytest.mark.parametrize("name", AUTHORS)
@pytest.mark.parametrize("organisation", ["", "SandyResearch/", "sandyresearch/"])
def test_the_authors_other_names_are_explained(
    name: str, organisation: str, asked_hub: list[str]
) -> None:
    preset = AUTHORS[name]
    advice = (
        rf"model '{organisation}{name}' is the authors' name of {preset}: download the "
        rf"repositories SandyResearch/{preset} and SandyResearch/parcae-tokenizer, run "
        "`minifer parcae convert SRC DST`"
    )
    for load in (resolve_model, read_config, LLM):
        with pytest.raises(ValueError, match=advice):
            load(organisation + name)
    assert asked_hub == []


@pytest.mark.parametrize("name", PARCAE_REPOSITORIES)
def test_a_published_size_says_where_its_weights_are(name: str, asked_hub: list[str]) -> None:
    for spelling in (name, name.upper()):
        with pytest.raises(ValueError, match=rf"is not bundled: download .* SandyResearch/{name} "):
            resolve_model(spelling)
    assert asked_hub == []


@pytest.mark.parametrize("name", ["SandyResearch/parcae-140m", "someone/parcae-small-140m"])
def test_repositories_are_asked_for_as_they_are_called(name: str, asked_hub: list[str]) -> None:
    with pytest.raises(ValueError, match="as a hub model: not here"):
        resolve_model(name)
    assert asked_hub == [name]


def test_a_folder_of_any_name_wins(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled.rename(tmp_path / "parcae-140m")
    assert resolve_model("parcae-140m").path == Path("parcae-140m")


@pytest.mark.parametrize("name", AUTHORS)
def test_create_model_knows_them_too(name: str) -> None:
    message = rf"name must be one of parcae-tiny, parcae-140m, .*authors' name of {AUTHORS[name]}$"
    for spelling in (name, f"SandyResearch/{name}"):
        with pytest.raises(ValueError, match=message):
            create_model(spelling)


@pytest.mark.parametrize("name", ["parcae", "parcae-1_3b", "gpt-small-140m", "", None, 140, []])
def test_other_names_are_refused_with_those_there_are(name: object) -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*parcae-1\.3b, got .{0,20}$"):
        create_model(name)  # type: ignore[arg-type]


def test_the_megakernel_refuses_a_loop_model_before_its_weights_are_read(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundled / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no instruction for the core of a loop model: use"):
        LLM("parcae-tiny", backend="megakernel", device="cpu")
