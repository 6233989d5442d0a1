"""One entrance: names, folders, GGUF files and hub ids; end tokens and dtypes."""

import json
import sys

import pytest
import torch
from tiny_gguf import V, write_gguf

from minifer.config import ModelConfig
from minifer.models.transformer import Transformer
from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.weights import resolve
from minifer.weights.hf import save_hf
from minifer.weights.resolve import load_model, resolve_model


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder in bfloat16: config says end token 2, generation_config 2 and 7."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=288,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )
    model = Transformer(config, dtype=torch.bfloat16)
    model.init_weights(0)
    path = tmp_path / "model"
    save_hf(path, model, config)
    byte_tokenizer().save(path)
    generation = {"eos_token_id": [2, 7], "temperature": 0.2, "top_p": 0.9}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIFER_HOME", str(tmp_path / "home"))


@pytest.fixture
def bundled(folder, monkeypatch):
    """`folder` in the place of the model in the wheel."""
    place = folder.parent / "package" / "assets"
    place.mkdir(parents=True)
    folder.rename(place / "minifer-tiny")
    monkeypatch.setattr(resolve.resources, "files", lambda package: place.parent)
    return place / "minifer-tiny"


def test_case_095_every_end_token_counts_whoever_names_it(folder):
    loaded = load_model(folder)
    assert loaded.tokenizer.eos_token_id == 257
    assert loaded.eos_token_ids == {2, 7, 257}
    assert loaded.generation_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert loaded.path == folder and loaded.notice is None


def test_auto_is_float32_on_a_cpu_and_a_named_dtype_is_taken(folder):
    for dtype, expected in (
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ):
        assert next(load_model(folder, dtype).model.parameters()).dtype == expected
    assert load_model(folder).config.dtype == "bfloat16"  # of the checkpoint
    # Elsewhere "auto" is the checkpoint's: the meta device stands in for a GPU.
    assert next(load_model(folder, "auto", "meta").model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype must be one of auto, .*got 'int8'"):
        load_model(folder, "int8")


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_by_name(folder, device):
    with pytest.raises(ValueError, match=f"device must be .*got '{device}'"):
        load_model(folder, device=device)


@pytest.mark.parametrize("path", ["./missing", "../missing"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(resolve, "hub_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="nor a folder"):
        resolve_model(path)


def test_device_auto_takes_a_cpu_where_there_is_no_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert next(load_model(folder, device="auto").model.parameters()).device.type == "cpu"


def test_default_falls_back_to_the_bundled_model_with_a_notice(bundled, empty_cache):
    found = resolve_model("default")
    assert found.path == bundled
    assert "run `minifer pull`" in found.notice
    with pytest.raises(ValueError, match=r"'smollm2' was not pulled yet: run `minifer pull`"):
        resolve_model("smollm2")
    assert load_model("default").notice == found.notice
    for name in ("tiny", "minifer-tiny"):
        assert resolve_model(name).path == bundled and resolve_model(name).notice is None


def test_a_missing_bundled_model_is_said(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"bundled model is missing .*minifer pull"):
        resolve_model("tiny")


def test_a_gguf_file_or_a_folder_with_one_model_loads(tmp_path):
    tokenizer = {"model": "gpt2", "tokens": [chr(97 + i) for i in range(V)], "eot_token_id": 9}
    tokenizer |= {"merges": ["a b"], "token_type": [1] * V}
    tokenizer["tokens"][-1] = "ab"
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    for name in (path, str(path), tmp_path):
        loaded = load_model(name)
        assert loaded.path == path
        assert loaded.eos_token_ids == {2, 9} and loaded.generation_defaults == {}
        assert loaded.tokenizer.encode("ab") == [V - 1]
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "split" / "s.gguf", metadata=metadata, split_max_tensors=9)
    assert load_model(tmp_path / "split").tokenizer.encode("ab") == [V - 1]
    write_gguf(tmp_path / "second.gguf", metadata=metadata)
    with pytest.raises(ValueError, match="2 GGUF files"):
        resolve_model(tmp_path)


def test_what_is_no_model_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"folder .* is not a model: it holds no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a file, but not a \.gguf file"):
        resolve_model(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"absent\.gguf does not exist"):
        load_model(tmp_path / "absent.gguf")
    for name in ("smollm3", "./a/b", "/no/such/folder", "a/b/c"):
        with pytest.raises(ValueError, match=r"is neither a short name .*org/name"):
            resolve_model(name)


def test_a_hub_id_is_downloaded_unless_a_folder_has_its_name(folder, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot(repo, local_dir, allow_patterns):
        asked.append((repo, local_dir))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert resolve_model("org/some-model.v2").path == folder
    assert asked == [("org/some-model.v2", None)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder.rename(tmp_path / "org" / "mine")
    assert resolve_model("org/mine").path.name == "mine" and len(asked) == 1

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no folder 'org/x'.*ConnectionError: no route.*network"):
        resolve_model("org/x")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r'pip install "minifer\[hub\]"'):
        resolve_model("org/x")
