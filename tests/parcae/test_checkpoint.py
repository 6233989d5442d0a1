"""A published checkpoint becomes a folder that every command reads, or is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from parcae_float64 import Float64Parcae
from published import (
    SIZES,
    published_config,
    published_shapes,
    published_state,
    rotary_table,
    save_published,
    save_tokenizer,
    small_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from minifer import LLM, SamplingParams
from minifer.cli import main
from minifer.execution.reference import reference_generate, reference_logits
from minifer.parcae.checkpoint import (
    config_from_parcae,
    convert_checkpoint,
    read_bin,
    read_tensors,
    read_tokenizer,
)
from minifer.parcae.model import Parcae
from minifer.parcae.presets import PRESETS
from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.weights.hf import load_hf, save_hf
from minifer.weights.loading import load_weights
from minifer.weights.resolve import load_model, read_config

WTE, HEAD, ROTARY = "transformer.wte.weight", "lm_head.weight", "freqs_cis"
Q0 = "transformer.core_block.0.attn.c_q.weight"
TOKENS = [0, 75, 104, 111, 35, 200, 75, 7, 3]


def filled_by_hand(state: dict[str, Tensor]) -> Parcae:
    """A model with the tensors of a small checkpoint, each put where it belongs."""
    model = Parcae(config_from_parcae(small_config()))
    blocks = {
        "prelude": model.prelude,
        "core_block": model.core,
        "coda": model.coda,
    }
    with torch.no_grad():
        for stack, layers in blocks.items():
            for i, block in enumerate(layers):
                at = f"transformer.{stack}.{i}."
                attn, mlp = block.attn, block.mlp
                block.norm_1.weight.copy_(state[at + "norm_1.weight"])
                block.norm_2.weight.copy_(state[at + "norm_2.weight"])
                qkv = [state[at + f"attn.c_{part}.weight"] for part in "qkv"]
                attn.qkv_proj.weight.copy_(torch.cat(qkv))
                attn.o_proj.weight.copy_(state[at + "attn.c_proj.weight"])
                mlp.up_proj.weight.copy_(state[at + "mlp.fc.weight"])
                mlp.down_proj.weight.copy_(state[at + "mlp.proj.weight"])
                if i % 2:
                    attn.ve_gate.weight.copy_(state[at + "attn.ve_gate.weight"])
        for layer in "135":
            model.value_embeds[layer].weight.copy_(state[f"value_embeds.{layer}.weight"])
        for name in ("A_log", "dt_bias", "B"):
            getattr(model.adapter, name).copy_(state[f"transformer.adapter.{name}"])
        model.wte.weight.copy_(state[WTE])
        model.readout_proj.weight.copy_(state["transformer.C.weight"])
        model.ln_prelude.weight.copy_(state["transformer.ln_prelude.weight"])
        model.ln_f.weight.copy_(state["transformer.ln_f.weight"])
    return model


def same_weights(a: Parcae, b: Parcae) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in pairs)


def written(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def refused(tmp_path: Path, match: str, **options: object) -> None:
    with pytest.raises(ValueError, match=match):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "dst").exists()
    assert written(tmp_path) == ["src"]  # no temporary folder stays


# -- names and shapes


@pytest.mark.parametrize("name", SIZES)
def test_all_tensors_of_the_published_sizes_have_their_names_and_shapes(name: str) -> None:
    width, layers, count, parameters = SIZES[name]
    published = published_shapes(published_config(width, layers))
    assert len(published) == count
    model = Parcae(PRESETS[name], device="meta")
    shapes = {
        part.name: (part.stop - part.start, *model.get_parameter(part.parameter).shape[1:])
        for part in model.weight_parts()
    }
    # One is the embedding again, the other is computed.
    assert shapes == {n: shape for n, shape in published.items() if n not in (HEAD, ROTARY)}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters


def test_the_63_names_of_the_smallest_size() -> None:
    block = ["attn.c_k", "attn.c_proj", "attn.c_q", "attn.c_v", "mlp.fc", "mlp.proj"]
    block += ["norm_1", "norm_2"]
    names = ["freqs_cis", "lm_head.weight", "transformer.C.weight", "transformer.adapter.A_log"]
    names += ["transformer.adapter.B", "transformer.adapter.dt_bias", "transformer.ln_f.weight"]
    names += ["transformer.ln_prelude.weight", "transformer.wte.weight"]
    names += [f"value_embeds.{k}.weight" for k in (1, 3, 5)]
    for stack in ("prelude", "core_block", "coda"):
        names += [f"transformer.{stack}.{i}.{part}.weight" for i in (0, 1) for part in block]
        names += [f"transformer.{stack}.1.attn.ve_gate.weight"]
    assert sorted(published_shapes(published_config())) == sorted(names) and len(names) == 63


# -- the whole way


def test_converted_and_loaded_it_computes_what_the_tensors_say(tmp_path: Path) -> None:
    state = save_published(tmp_path / "src", small_config())
    config = convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert written(tmp_path / "dst") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    stored = load_file(tmp_path / "dst" / "model.safetensors")
    assert set(stored) == set(state) - {HEAD, ROTARY}
    assert all(torch.equal(stored[name], state[name]) for name in stored)

    loaded = load_model(tmp_path / "dst")
    assert loaded.config == config and loaded.eos_token_ids == {1}
    by_hand = filled_by_hand(state)
    assert same_weights(loaded.model, by_hand)
    logits = reference_logits(loaded.model, TOKENS)
    assert torch.equal(logits, reference_logits(by_hand, TOKENS))

    weights = {n: t.double().numpy() for n, t in state.items() if n not in (HEAD, ROTARY)}
    truth = Float64Parcae(weights, (4, 4)).forward(TOKENS, 3)
    assert np.abs(truth).max() > 5
    np.testing.assert_allclose(logits.numpy(), truth, rtol=0, atol=1e-4)


def test_the_engine_generates_from_the_folder(tmp_path: Path) -> None:
    state = save_published(tmp_path / "src", small_config())
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    llm = LLM(str(tmp_path / "dst"), num_kv_blocks=16)
    (output,) = llm.generate("Hi!", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    prompt = [0, *(3 + byte for byte in b"Hi!")]
    assert output.prompt_token_ids == prompt
    by_hand = reference_generate(filled_by_hand(state), prompt, 8)
    assert output.outputs[0].token_ids == by_hand


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = filled_by_hand(published_state(small_config()))
    save_hf(tmp_path, model, model.config)
    assert written(tmp_path) == ["config.json", "model.safetensors"]
    again, config = load_hf(tmp_path)
    assert config == model.config == read_config(tmp_path)
    assert same_weights(model, again)


@pytest.mark.parametrize("layers", [(1, 1, 1), (0, 1, 0), (1, 2, 1), (2, 3, 2)], ids=str)
def test_other_layouts_come_back_too(layers: tuple[int, int, int], tmp_path: Path) -> None:
    state = save_published(tmp_path / "src", small_config(layers))
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    logits = reference_logits(load_model(tmp_path / "dst").model, TOKENS)
    weights = {n: t.double().numpy() for n, t in state.items() if n not in (HEAD, ROTARY)}
    truth = Float64Parcae(weights, (4, 4)).forward(TOKENS, 3)
    np.testing.assert_allclose(logits.numpy(), truth, rtol=0, atol=1e-4)


def test_a_folder_with_safetensors_needs_no_conversion(tmp_path: Path) -> None:
    raw = small_config()
    state = save_published(tmp_path, raw)
    (tmp_path / "pytorch_model.bin").unlink()
    save_file({n: t for n, t in state.items() if n != HEAD}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert same_weights(loaded.model, filled_by_hand(state))
    assert loaded.tokenizer.encode("a") == [0, 3 + ord("a")]
    assert loaded.eos_token_ids == {1}
    convert_checkpoint(tmp_path, tmp_path / "dst", progress=False)  # may be converted all the same
    assert same_weights(load_model(tmp_path / "dst").model, loaded.model)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_published(tmp_path / "src", small_config(), tokenizer=False)
    (tmp_path / "words").mkdir()
    save_tokenizer(tmp_path / "words")
    command = ["parcae", "convert", str(tmp_path / "src"), str(tmp_path / "dst")]
    assert main(command) == 2
    assert "no tokenizer.json in" in capsys.readouterr().err
    for _ in range(2):  # safe to run again
        assert main([*command, "--tokenizer", str(tmp_path / "words")]) == 0
        assert "2 + 2 + 2 layers of width 64, 3 loops, float32" in capsys.readouterr().out
    assert load_model(tmp_path / "dst").tokenizer.encode("") == [0]


@pytest.mark.slow
def test_a_file_of_the_size_of_parcae_140m(tmp_path: Path) -> None:
    raw = published_config()
    state = save_published(tmp_path / "src", raw)
    assert len(state) == 63
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    loaded = load_model(tmp_path / "dst")
    assert loaded.model.num_parameters == 144_323_136
    for part in loaded.model.weight_parts():
        rows = loaded.model.get_parameter(part.parameter)[part.start : part.stop]
        assert torch.equal(rows, state[part.name]), part.name
    tokens = TOKENS[:4]
    logits = reference_logits(loaded.model, tokens)
    weights = {n: t.double().numpy() for n, t in state.items() if n not in (HEAD, ROTARY)}
    truth = Float64Parcae(weights, (6, 6)).forward(tokens, 8)
    np.testing.assert_allclose(logits.numpy(), truth, rtol=0, atol=1e-5 * np.abs(truth).max())


# -- tensors


def test_every_tensor_is_needed_once_and_all_are_told(tmp_path: Path) -> None:
    raw = small_config()
    state = published_state(raw)
    twice, unknown = "transformer.ln_f.weight", "transformer.core_block.7.norm_1.weight"
    wrong = {n: t for n, t in state.items() if n != Q0} | {unknown: torch.ones(64)}
    wrong |= {f"module.{twice}": state[twice]}
    save_published(tmp_path / "src", raw, wrong)
    refused(
        tmp_path,
        rf"\(61 tensors expected\). missing: {Q0}; unknown: {unknown}; given twice: {twice}",
    )


def test_a_missing_tensor_is_an_error_whichever_it_is() -> None:
    state = published_state(small_config())
    model = filled_by_hand(state)
    for name in set(state) - {HEAD, ROTARY}:
        rest = {n: t for n, t in state.items() if n != name}
        with pytest.raises(ValueError, match=rf"missing: {name}\. Check"):
            load_weights(model, read_tensors(rest.items(), model.config))


def test_a_shape_of_another_model_is_refused(tmp_path: Path) -> None:
    raw = small_config()
    state = published_state(raw) | {Q0: torch.zeros(64, 32)}
    save_published(tmp_path / "src", raw, state)
    refused(tmp_path, rf"{Q0} must have the shape \[64, 64\], got \[64, 32\]")


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "model.module._orig_mod."]
)
def test_prefixes_of_a_trainer_are_dropped(prefix: str, tmp_path: Path) -> None:
    raw = small_config()
    state = published_state(raw)
    save_published(tmp_path / "src", raw, {prefix + n: t for n, t in state.items()})
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert same_weights(load_model(tmp_path / "dst").model, filled_by_hand(state))


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_the_weights_in_a_trainers_file_are_found(key: str, tmp_path: Path) -> None:
    raw = small_config()
    state = published_state(raw)
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
    save_published(tmp_path / "src", raw, {key: state, "optimizer": optimizer, "step": 7})
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert same_weights(load_model(tmp_path / "dst").model, filled_by_hand(state))


def test_a_head_must_be_the_embedding(tmp_path: Path) -> None:
    raw = small_config()
    state = published_state(raw)
    other = state[WTE].clone()
    other[17, 3] += 1
    save_published(tmp_path / "src", raw, state | {HEAD: other})
    refused(tmp_path, "lm_head.weight differs from transformer.wte.weight")
    wrapped = state | {HEAD: state[WTE].clone(), "module.lm_head.weight": other}
    save_published(tmp_path / "src", raw, wrapped)
    refused(tmp_path, "given twice: lm_head.weight")
    for head in ({}, {HEAD: state[WTE].clone()}):
        save_published(tmp_path / "src", raw, {n: t for n, t in state.items() if n != HEAD} | head)
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotary_table_must_be_the_one_of_the_configuration(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    raw = small_config()
    state = published_state(raw)
    settings = raw["rope_settings"]
    for base in (10_000, 40_000, 500_000):
        table = rotary_table(raw | {"rope_settings": settings | {"rope_base": base}})
        save_published(tmp_path / "src", raw, state | {ROTARY: table.to(dtype)})
        refused(tmp_path, r"freqs_cis differs by .* rope_base = 50000 of config.json")
    save_published(tmp_path / "src", raw, state | {ROTARY: state[ROTARY].flip(-1)})  # sin, cos
    refused(tmp_path, "freqs_cis differs by")
    save_published(tmp_path / "src", raw, state | {ROTARY: state[ROTARY][..., :4, :]})
    refused(tmp_path, r"freqs_cis must have the shape \[1, S, 1, 8, 2\], got \[1, 96, 1, 4, 2\]")
    save_published(tmp_path / "src", raw, state | {ROTARY: state[ROTARY].to(dtype)})
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)


def test_a_table_of_another_base_goes_with_that_base(tmp_path: Path) -> None:
    rope = {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 10000}
    raw = small_config(rope_settings=rope)
    save_published(tmp_path / "src", raw)
    assert convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).rope.theta == 1e4
    assert read_config(tmp_path / "dst").rope.theta == 1e4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_and_the_decay_is_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    raw = small_config()
    state = {n: t.to(dtype) for n, t in published_state(raw).items()}
    save_published(tmp_path / "src", raw, state)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    name = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["torch_dtype"] == name
    model, config = load_hf(tmp_path / "dst")
    assert config.dtype == name
    exact = {"adapter.A_log", "adapter.dt_bias"}
    for parameter, tensor in model.named_parameters():
        assert tensor.dtype == (torch.float32 if parameter in exact else dtype), parameter
    assert torch.equal(model.wte.weight, state[WTE])


@pytest.mark.parametrize("most", [torch.float32, torch.bfloat16])
def test_mixed_weights_are_kept_to_the_bit(most: torch.dtype, tmp_path: Path) -> None:
    """bfloat16 and float16 fit into neither of the two."""
    raw = small_config()
    state = {n: t.to(most) for n, t in published_state(raw).items()}
    state[Q0] = state[Q0].half()
    save_published(tmp_path / "src", raw, state)
    assert convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False).dtype == "float32"
    assert same_weights(load_model(tmp_path / "dst").model, filled_by_hand(state))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_what_would_lose_bits_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = small_config()
    save_published(
        tmp_path / "src", raw, published_state(raw) | {Q0: torch.zeros(64, 64).to(dtype)}
    )
    refused(tmp_path, rf"{Q0} must be one of torch.float32, .*, got {dtype}")


# -- pickled files


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def test_nothing_in_a_pickled_file_runs(tmp_path: Path) -> None:
    raw = small_config()
    save_published(tmp_path / "src", raw, {**published_state(raw), "x": Runs(tmp_path / "src/ran")})
    refused(tmp_path, "pytorch_model.bin is torn, or not a file of tensors alone")
    assert not (tmp_path / "src" / "ran").exists()
    with (tmp_path / "src" / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Runs(tmp_path / "src" / "ran"), file)
    refused(tmp_path, "not a file of tensors alone")
    assert not (tmp_path / "src" / "ran").exists()


def test_torn_and_odd_files_are_named(tmp_path: Path) -> None:
    raw = small_config()
    save_published(tmp_path / "src", raw)
    file = tmp_path / "src" / "pytorch_model.bin"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for torn in (b"", whole[:1000], whole[:-100], pointer):
        file.write_bytes(torn)
        refused(tmp_path, "pytorch_model.bin is torn, or not a file of tensors alone")
    torch.save(published_state(raw), file, _use_new_zipfile_serialization=False)
    refused(tmp_path, "not a file of tensors alone")
    for content in ([torch.ones(2)], {}, torch.ones(2)):
        torch.save(content, file)
        refused(tmp_path, "pytorch_model.bin must hold tensors by name, got")
    torch.save({"a": torch.ones(2), "step": 7}, file)
    refused(tmp_path, "must hold tensors by name, got int for 'step'")
    for odd in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        torch.save({"a": odd}, file)
        refused(tmp_path, "must hold dense tensors, got a .* one for 'a'")
    with pytest.raises(ValueError, match=r"there is no file .*absent.bin"):
        read_bin(tmp_path / "absent.bin")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_whatever_is_wrong_inside_a_pickle_is_one_kind_of_error(tmp_path: Path) -> None:
    """Every byte of the pickle wrong once: torch's reader fails in many ways, or not at all."""
    file = tmp_path / "weights.bin"
    torch.save({"a": torch.ones(2)}, file)
    with zipfile.ZipFile(file) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    (pickled,) = (name for name in parts if name.endswith("data.pkl"))
    refusals = 0
    for i, byte in enumerate(parts[pickled]):
        damaged = bytearray(parts[pickled])
        damaged[i] = (byte + 1) % 256
        with zipfile.ZipFile(file, "w") as out:
            for name, content in parts.items():
                out.writestr(name, bytes(damaged) if name == pickled else content)
        try:
            read_bin(file)
        except ValueError:
            refusals += 1
    assert refusals > len(parts[pickled]) / 4


def test_the_pickled_file_is_found_or_asked_for(tmp_path: Path) -> None:
    raw = small_config()
    save_published(tmp_path / "src", raw)
    source = tmp_path / "src"
    (source / "pytorch_model.bin").rename(source / "step_1.pth")
    convert_checkpoint(source, tmp_path / "one", progress=False)
    (source / "step_2.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"one pickled file or .*, got step_1.pth, step_2"):
        convert_checkpoint(source, tmp_path / "two", progress=False)
    (source / "step_1.pth").rename(source / "pytorch_model.bin")  # beside step_2.pth
    convert_checkpoint(source, tmp_path / "two", progress=False)
    for file in source.glob("*.[bp]*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"holds no safetensors files. Parcae is publi"):
        convert_checkpoint(source, tmp_path / "three", progress=False)


def test_the_loader_does_not_unpickle_and_says_what_to_do(tmp_path: Path) -> None:
    save_published(tmp_path, small_config())
    advice = r"pickled weights only \(pytorch_model.bin\)\..*run `minifer parcae convert SRC DST`"
    for load in (load_hf, load_model, LLM):
        with pytest.raises(ValueError, match=advice):
            load(str(tmp_path))


# -- the tokenizer


def test_special_tokens_are_found_by_name_and_texts_begin_with_bos(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ("<|eos|>", "<|other|>", "<|bos|>", "<|pad|>"))
    words = read_tokenizer(tmp_path)
    assert (words.bos_token_id, words.eos_token_id) == (2, 0)
    assert words.special_tokens["pad_token"] == "<|pad|>"
    assert words.encode("hé") == [2, 4 + ord("h"), 4 + 0xC3, 4 + 0xA9]
    assert words.encode("<|bos|>h") == [2, 4 + ord("h")]  # not twice
    assert words.encode("h", add_special_tokens=False) == [4 + ord("h")]
    assert words.decode(words.encode("hé")) == "hé"


def test_a_tokenizer_that_names_its_tokens_is_left_as_it_is(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    words = read_tokenizer(tmp_path)
    assert words.encode("a") == [ord("a")] and words.bos_token_id == 256


def test_a_tokenizer_without_these_tokens_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ("<|bos|>", "<s>"))
    with pytest.raises(ValueError, match=r"lacks <\|eos\|>, <\|pad\|>; .*parcae-tokenizer"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_published(tmp_path / "src", small_config(vocab_size=256, padded_vocab_size=256))
    refused(tmp_path, "the tokenizer must have at most vocab_size = 256 tokens, got 259")


# -- where it is written


def test_a_conversion_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    raw = small_config()
    state = save_published(tmp_path / "src", raw)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    save_published(tmp_path / "src", raw, {n: t for n, t in state.items() if n != Q0})
    with pytest.raises(ValueError, match="missing"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert same_weights(load_model(tmp_path / "dst").model, filled_by_hand(state))
    other = save_published(tmp_path / "src", raw, published_state(raw, seed=1))
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert same_weights(load_model(tmp_path / "dst").model, filled_by_hand(other))
    assert written(tmp_path) == ["dst", "src"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_published(tmp_path / "src", small_config())

    def full_disk(tensors: object, file: Path, metadata: object) -> None:
        Path(file).write_bytes(b"torn")
        raise OSError("no space left on device")

    monkeypatch.setattr("minifer.weights.hf.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", progress=False)
    assert written(tmp_path) == ["src"]


def test_nobodys_files_are_replaced(tmp_path: Path) -> None:
    save_published(tmp_path / "src", small_config())
    (tmp_path / "mine").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file", "src", "."):
        with pytest.raises(ValueError, match="target must"):
            convert_checkpoint(tmp_path / "src", tmp_path / name, progress=False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    convert_checkpoint(tmp_path / "src", tmp_path / "empty", progress=False)
    convert_checkpoint(tmp_path / "src", tmp_path / "src" / "inside", progress=False)


def test_other_families_need_no_conversion(tmp_path: Path, text_model: Path) -> None:
    with pytest.raises(ValueError, match="holds a LlamaForCausalLM, which needs no conversion"):
        convert_checkpoint(text_model, tmp_path / "dst")
