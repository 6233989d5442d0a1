"""Codes of GGUF files and of checkpoints quantised on the fly, in a model and in a folder."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import LAYERS, D, F, V, gguf_tensors, hf_state, write_gguf

from minifer import LLM, EngineConfig, SamplingParams
from minifer.execution.fingerprint import weights_digest
from minifer.execution.reference import reference_logits
from minifer.weights.convert import convert_gguf
from minifer.weights.gguf import (
    CODE_KINDS,
    GGUFFile,
    config_from_gguf,
    hf_codes,
    hf_tensors,
    load_gguf,
)
from minifer.weights.hf import load_hf, load_hf_quantized, save_hf
from minifer.weights.quantized import QuantizedWeight, quantized_weights
from minifer.weights.quantized_loading import CODES, load_quantized

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*(chr(97 + i) for i in range(V - 1)), "ab"],
    "tokenizer.ggml.token_type": [1] * V,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eot_token_id": 9,
}
MATRICES = 4 * LAYERS + 1  # qkv, o, gate_up, down; the embedding


def quantised(path, mode="file", dtype=torch.float32):
    file = GGUFFile(path)
    config = config_from_gguf(file)
    named = (hf_codes if mode == "file" else hf_tensors)(file, config)
    return load_quantized(config, dtype, named, mode)


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_codes_mean_what_the_gguf_package_says_to_the_bit(tmp_path, kind):
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", kind=kind))
    for name, tensor in file.tensors.items():
        weight = file.codes(name)
        if len(tensor.shape) == 1:
            assert weight is None
            continue
        truth = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(weight.dequantize(), truth)
        assert weight.bits == (8 if kind == "Q8_0" else 4) and weight.group_size == 32
        assert weight.scale.dtype == torch.float16


def test_a_scale_of_q4_0_too_large_for_an_eightfold_in_float16_is_kept(tmp_path):
    block = np.zeros((F, D // 32, 18), np.uint8)
    block[..., :2] = np.array([60000], np.float16).view(np.uint8)
    block[..., 2:] = 0x0F
    raw = {"blk.0.ffn_up.weight": (block.reshape(F, -1), "Q4_0")}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", raw=raw))
    weight = file.codes("blk.0.ffn_up.weight")
    tensor = file.tensors["blk.0.ffn_up.weight"]
    truth = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(weight.dequantize(), truth) and truth.abs().max() > 2**18


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", CODE_KINDS)
def test_a_model_of_codes_is_the_dequantised_model_to_the_bit(tmp_path, kind, arch):
    """Rows of q and k return to their place, and parts to theirs in the fused matrices."""
    path = write_gguf(tmp_path / "m.gguf", arch, kind)
    dense, _ = load_gguf(path)
    model, notice = quantised(path)
    assert notice is None
    codes = dict(quantized_weights(model))
    assert len(codes) == MATRICES
    for name, parameter in dense.named_parameters():
        held = codes[name].dequantize() if name in codes else model.get_parameter(name)
        assert torch.equal(held, parameter), name
    tokens = [1, 5, 40, 17, 9]
    assert torch.equal(reference_logits(model, tokens), reference_logits(dense, tokens))
    assert model.num_parameters == dense.num_parameters


def test_matrices_of_other_kinds_are_dequantised_and_named(tmp_path):
    """v as Q6_K makes the whole of qkv dense; gate as Q8_0 with up as Q4_1, gate_up."""
    tensors = gguf_tensors("llama", hf_state("llama"))
    raw = {
        name: (gguf.quantize(tensors[name], gguf.GGMLQuantizationType[kind]), kind)
        for name, kind in (("blk.0.ffn_gate.weight", "Q8_0"), ("blk.1.attn_v.weight", "Q5_1"))
    }
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1", tensors=tensors, raw=raw)
    model, notice = quantised(path)
    assert f"2 of {MATRICES} matrices" in notice and "dequantised to float32" in notice
    assert "layers.0.mlp.gate_up_proj" in notice and "layers.1.self_attn.qkv_proj" in notice
    dense, _ = load_gguf(path)
    for name in ("layers.0.mlp.gate_up_proj.weight", "layers.1.self_attn.qkv_proj.weight"):
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name))


def test_q4_0_and_q4_1_parts_make_one_weight(tmp_path):
    tensors = gguf_tensors("llama", hf_state("llama"))
    name = "blk.0.attn_v.weight"
    raw = {name: (gguf.quantize(tensors[name], gguf.GGMLQuantizationType.Q4_1), "Q4_1")}
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_0", tensors=tensors, raw=raw)
    model, notice = quantised(path)
    assert notice is None
    fused = model.layers[0].self_attn.qkv_proj.weight
    dense = load_gguf(path)[0].layers[0].self_attn.qkv_proj.weight
    assert torch.equal(fused.dequantize(), dense)


def test_a_file_without_codes_says_what_to_do(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kind="F16")
    with pytest.raises(ValueError, match=r"Q4_0, Q4_1 or Q8_0, and .*: use quantize=int8"):
        quantised(path)


@pytest.mark.parametrize(("mode", "bits"), [("int8", 8), ("int4", 4)])
def test_on_the_fly_every_matrix_is_near_the_checkpoints(tmp_path, mode, bits):
    path = write_gguf(tmp_path / "m.gguf")
    dense, _ = load_gguf(path)
    model, notice = quantised(path, mode)
    assert notice is None and len(dict(quantized_weights(model))) == MATRICES
    for name, weight in quantized_weights(model):
        expected = 8 if "embed" in name else bits
        assert weight.bits == expected
        assert weight.group_size == (32 if expected == 4 else weight.shape[1])
        error = (weight.dequantize() - dense.get_parameter(name)).abs()
        step = weight.scale.float().repeat_interleave(weight.group_size, 1)
        assert (error <= step * 0.52).all(), name  # half a step, and float16's rounding of it


def test_memory_for_the_matrices_is_never_asked_for(tmp_path, monkeypatch):
    """Only vectors are allocated on the CPU by the model itself."""
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    asked = []
    empty = torch.empty

    def watched(*size, **options):
        made = empty(*size, **options)
        if made.dim() == 2 and made.device.type == "cpu":
            asked.append(tuple(made.shape))
        return made

    monkeypatch.setattr(torch, "empty", watched)
    quantised(path)
    assert asked == []


def test_the_pulled_models_codes_are_its_weights_to_the_bit(pulled_model):
    """Q4_1 in the layers, Q8_0 for the embedding, against what was dequantised at the pull."""
    if not (pulled_model / CODES).is_file():
        pytest.skip("pulled before codes were kept: run `minifer pull` again for this test")
    model, _, notice = load_hf_quantized(pulled_model, "file", torch.float32)
    dense, _ = load_hf(pulled_model)
    assert notice is None
    held = dict(quantized_weights(model))
    assert len(held) == 4 * 30 + 1
    assert {(w.bits, w.group_size) for name, w in held.items() if "embed" not in name} == {(4, 32)}
    assert held["embed_tokens.weight"].bits == 8
    for name, weight in held.items():
        assert torch.equal(weight.dequantize(), dense.get_parameter(name)), name


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_tied_heads_copy_is_compared_as_codes(mode):
    """Same numbers are the same codes; another head is refused."""
    from fakes import tiny_config

    from minifer.models.registry import build_model

    config = tiny_config(tie_word_embeddings=True)
    source = build_model(config, torch.float32)
    source.init_weights(0)
    named = [
        (p.name, source.get_parameter(p.parameter)[p.start : p.stop]) for p in source.weight_parts()
    ]
    head = source.embed_tokens.weight.detach().clone()
    load_quantized(config, torch.float32, [*named, ("lm_head.weight", head)], "int8")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load_quantized(config, torch.float32, [*named, ("lm_head.weight", head * 1.1)], "int8")


def test_a_width_that_int4_cannot_group_is_named():
    from fakes import tiny_config

    from minifer.models.registry import build_model

    config = tiny_config(hidden_size=48)
    source = build_model(config, torch.float32)
    source.init_weights(0)
    named = [
        (p.name, source.get_parameter(p.parameter)[p.start : p.stop]) for p in source.weight_parts()
    ]
    with pytest.raises(ValueError, match=r"multiple of 32; .* has 48: use quantize=int8"):
        load_quantized(config, torch.float32, named, "int4")


def test_a_converted_folder_keeps_the_codes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1", metadata=TOKENIZER)
    convert_gguf(path, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / CODES).is_file()
    # Other engines read every file of this kind that they find beside the configuration.
    assert [f.name for f in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    model, _, notice = load_hf_quantized(tmp_path / "out", "file", torch.float32)
    direct, _ = quantised(path)
    assert notice is None and weights_digest(model) == weights_digest(direct)
    dense, _ = load_hf(tmp_path / "out")
    assert weights_digest(model) != weights_digest(dense)


def test_a_folder_without_codes_says_what_to_do(tmp_path):
    model, config = load_gguf(write_gguf(tmp_path / "m.gguf"))
    save_hf(tmp_path / "out", model, config)
    with pytest.raises(ValueError, match=r"no quantized/model\.safetensors: name the \.gguf file"):
        load_hf_quantized(tmp_path / "out", "file", torch.float32)


def test_a_torn_file_of_codes_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1", metadata=TOKENIZER)
    convert_gguf(path, tmp_path / "out", progress=False)
    whole = (tmp_path / "out" / CODES).read_bytes()
    (tmp_path / "out" / CODES).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"quantized/model\.safetensors is torn"):
        load_hf_quantized(tmp_path / "out", "file", torch.float32)


def test_a_quantised_model_is_not_saved(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    model, _ = quantised(path)
    with pytest.raises(ValueError, match="load it with quantize=none"):
        save_hf(tmp_path / "out", model, config_from_gguf(GGUFFile(path)))


def test_every_way_to_quantise_has_its_own_kv_namespace(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kind="Q4_1")
    models = [load_gguf(path)[0], *(quantised(path, mode)[0] for mode in ("file", "int8", "int4"))]
    digests = {weights_digest(model) for model in models}
    assert len(digests) == len(models)
    assert weights_digest(quantised(path)[0]) in digests
    models[1].layers[1].mlp.down_proj.weight.scale[3, 1] *= 1.5
    assert weights_digest(models[1]) not in digests


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_the_engine_answers_as_the_cacheless_twin(mode):
    """In float32 at temperature 0, whatever the chunks: the invariant of the book."""
    from minifer.execution.reference import reference_generate

    with LLM("minifer-tiny", quantize=mode, dtype="float32", max_num_batched_tokens=5) as llm:
        prompt = [7, 80, 91, 100, 3, 5, 6]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([prompt], params)
        model = llm.engine.runner.model
        assert isinstance(model.layers[0].mlp.down_proj.weight, QuantizedWeight)
        assert answer.outputs[0].token_ids == reference_generate(model, prompt, 8)


def test_auto_is_bfloat16_beside_codes(text_model):
    with LLM(str(text_model), quantize="int8") as llm:
        assert next(llm.engine.runner.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int2"}, "quantize must be one of none, file, int8, int4, got 'int2'"),
        ({"quantize": "int4", "backend": "megakernel"}, "quantize must be none with backend"),
        ({"quantize": "int4", "backend": "triton"}, "quantize must be none with backend"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


def test_loop_models_are_refused():
    for mode in ("file", "int8"):
        with pytest.raises(ValueError, match="quantize must be none for ParcaeForCausalLM"):
            LLM("parcae-tiny", quantize=mode)


def test_other_devices_are_refused(text_model):
    with pytest.raises(ValueError, match="quantize=int8 runs on a CPU only, got device=meta"):
        LLM(str(text_model), quantize="int8", device="meta")


def test_other_back_ends_refuse_a_quantised_model(text_model):
    from minifer import Engine
    from minifer.weights.resolve import load_model

    loaded = load_model(text_model, quantize="int8", dtype="float32")
    for backend in ("triton", "megakernel"):
        with pytest.raises(ValueError, match=f"must not be quantised for backend={backend}"):
            Engine.from_loaded(loaded, EngineConfig(backend=backend, num_kv_blocks=8))
