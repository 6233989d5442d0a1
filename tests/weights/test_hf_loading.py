"""A model is filled completely and once, or refused with a list of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.reference import reference_logits
from minifer.models.transformer import Transformer
from minifer.weights.hf import load_generation_defaults, load_hf, save_hf
from minifer.weights.loading import load_weights

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def tiny(tied: bool = False) -> Transformer:
    config = ModelConfig(
        "LlamaForCausalLM", 32, 16, 24, 2, 2, 1, 8, 64, tie_word_embeddings=tied,
        eos_token_ids=(2,),
    )  # fmt: skip
    model = Transformer(config)
    model.init_weights(0, std=0.2)
    return model


def save(folder: Path, tied: bool = False) -> dict[str, Tensor]:
    """A model directory, and the tensors in it."""
    model = tiny(tied)
    save_hf(folder, model, model.config)
    return load_file(folder / "model.safetensors")


def save_sharded(folder: Path) -> dict[str, str]:
    """The same model in two shards with an index; returns the index."""
    tensors = save(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for i, part in enumerate((names[:5], names[5:]), start=1):
        shard = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load_hf(folder)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = tiny()
    save_hf(tmp_path / "new" / "folder", model, model.config)
    again, config = load_hf(tmp_path / "new" / "folder")
    assert config == model.config
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert {f.name for f in (tmp_path / "new" / "folder").iterdir()} == {
        "config.json",
        "model.safetensors",
    }  # no temporary file stays


def test_a_save_that_fails_leaves_the_old_model_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path)

    def full_disk(tensors: object, file: Path, metadata: object) -> None:
        Path(file).write_bytes(b"torn")
        raise OSError("no space left on device")

    monkeypatch.setattr("minifer.weights.hf.save_file", full_disk)
    model = tiny()
    model.init_weights(9)
    with pytest.raises(OSError, match="no space"):
        save_hf(tmp_path, model, model.config)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")[Q0], before[Q0])


def test_the_dtype_asked_for_wins_over_the_files(tmp_path: Path) -> None:
    model = tiny().to(torch.bfloat16)
    save_hf(tmp_path, model, model.config)
    loaded, config = load_hf(tmp_path)
    assert loaded.embed_tokens.weight.dtype == torch.bfloat16 and config.dtype == "bfloat16"
    loaded, _ = load_hf(tmp_path, torch.float32)
    assert torch.equal(loaded.embed_tokens.weight, model.embed_tokens.weight.float())


def test_case_122_a_tied_head_may_be_absent_or_equal_but_not_different(tmp_path: Path) -> None:
    tensors = save(tmp_path, tied=True)
    assert HEAD not in tensors
    truth = reference_logits(tiny(tied=True), [1, 2, 3])
    assert torch.equal(reference_logits(load_hf(tmp_path)[0], [1, 2, 3]), truth)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    assert torch.equal(reference_logits(load_hf(tmp_path)[0], [1, 2, 3]), truth)
    save_file(tensors | {HEAD: tensors[EMBEDDING] + 1}, tmp_path / "model.safetensors")
    refused(tmp_path, "lm_head.weight differs from model.embed_tokens.weight")


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    tensors = save(tmp_path)
    del tensors[HEAD]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "missing: lm_head.weight")


def test_old_files_rotary_buffers_are_not_weights(tmp_path: Path) -> None:
    tensors = save(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | old, tmp_path / "model.safetensors")
    load_hf(tmp_path)


def test_shards_are_read_by_the_index(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    truth = reference_logits(tiny(), [1, 2, 3])
    assert torch.equal(reference_logits(load_hf(tmp_path)[0], [1, 2, 3]), truth)


def test_case_123_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "lacks model-00002-of-00002.safetensors, named in model.safetensors.index")


def test_case_123_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json is missing")
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "holds no safetensors files; download")
    refused(tmp_path / "nowhere", "there is no model directory")


def test_case_123_a_tensor_the_index_promises_but_no_shard_holds(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    tensors.pop("model.norm.weight")
    save_file(tensors, second)
    refused(tmp_path, "00002-of-00002.safetensors lacks model.norm.weight .*index")


def test_case_123_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "2 safetensors files but no model.safetensors.index.json")


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"pickled weights only \(pytorch_model.bin\).* convert with transformers")


def test_torn_files_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for torn in (b"", whole[:100], whole[:-1], pointer):
        weights.write_bytes(torn)
        refused(tmp_path, "model.safetensors is torn or not a safetensors file")
    config.write_text(config.read_text()[:-20])
    refused(tmp_path, "config.json is not valid JSON")
    config.write_text("[]")
    refused(tmp_path, "must hold a JSON object")


def test_every_tensor_is_needed_and_a_whole_list_is_told(tmp_path: Path) -> None:
    """Parts of fused parameters too: half a q_proj must not go unseen."""
    tensors = save(tmp_path)
    for name in tensors:
        rest = [(n, t) for n, t in tensors.items() if n != name]
        with pytest.raises(ValueError, match=rf"\(21 tensors expected\). missing: {name}\."):
            load_weights(tiny(), rest)
    rest = [(n, t) for n, t in tensors.items() if "layers.1" not in n]
    with pytest.raises(ValueError, match="missing: ") as error:
        load_weights(tiny(), [*rest, ("model.vision.weight", torch.ones(1)), rest[0]])
    message = str(error.value)
    assert "unknown: model.vision.weight" in message
    assert f"given twice: {rest[0][0]}" in message
    assert all(name in message for name in tensors if "layers.1" in name)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(ValueError, match=r"missing: model.embed_tokens.weight, .* and 1 more"):
        load_weights(tiny(), [])


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.ones(8, 16), rf"{Q0} must have the shape \[16, 16\], got \[8, 16\]"),
        (torch.ones(1, 16), r"must have the shape \[16, 16\], got \[1, 16\]"),  # would broadcast
        (torch.ones(16, 16, dtype=torch.int8), f"{Q0} must hold floating-point .* torch.int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tensor: Tensor, match: str, tmp_path: Path) -> None:
    tensors = save(tmp_path)
    with pytest.raises(ValueError, match=match):
        load_weights(tiny(), (tensors | {Q0: tensor}).items())


def test_case_095_end_tokens_are_the_union_with_the_generation_config_first(tmp_path: Path) -> None:
    save(tmp_path)  # config.json says 2
    assert load_generation_defaults(tmp_path) == {"eos_token_ids": (2,)}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.6, "top_k": None,
                                "top_p": 0.95, "repetition_penalty": 1.1}))  # fmt: skip
    assert load_generation_defaults(tmp_path) == {
        "eos_token_ids": (7, 2),
        "temperature": 0.6,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    assert load_hf(tmp_path)[1].eos_token_ids == (7, 2)


def test_others_may_read_what_is_saved(tmp_path: Path) -> None:
    save(tmp_path)
    assert [file.stat().st_mode & 0o044 for file in tmp_path.iterdir()] == [0o044] * 2
