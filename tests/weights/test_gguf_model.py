"""GGUF to model: transformers reads the same file, or the same weights, and must agree."""

import sys

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from tiny_gguf import HEADS, C, D, F, V, gguf_tensors, hf_state, permute, write_gguf

from minifer.execution.reference import reference_logits
from minifer.models.rope import inverse_frequencies
from minifer.weights.gguf import KINDS, GGUFFile, config_from_gguf, load_gguf, unpermute
from minifer.weights.hf_config import config_from_hf

transformers = pytest.importorskip("transformers")

TOKENS = [1, 7, 7, 40, 3, 29, 11, 0, 47, 5]
QUANTIZABLE = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # of a block of 256 weights
TINY = {"block_count": 1}


def logits_of_transformers(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def assert_same_logits(path):
    model, _ = load_gguf(path, torch.float32)
    ours = reference_logits(model, TOKENS)
    theirs = logits_of_transformers(path)
    assert theirs.std() > 0.3  # not a comparison of zeros
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", tiny_gguf.ARCHITECTURES)
def test_logits_equal_those_of_transformers(tmp_path, arch, tied):
    tensors = gguf_tensors(arch, hf_state(arch, tied=tied))
    path = write_gguf(tmp_path / "m.gguf", arch, tensors=tensors)
    assert_same_logits(path)
    assert load_gguf(path)[1].tie_word_embeddings is tied


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantised_logits_equal_those_of_transformers(tmp_path, kind):
    assert_same_logits(write_gguf(tmp_path / "m.gguf", kind=kind))


@pytest.mark.parametrize("arch", tiny_gguf.ARCHITECTURES)
def test_weights_come_back_under_their_hugging_face_names(tmp_path, arch):
    state = hf_state(arch)
    model, _ = load_gguf(write_gguf(tmp_path / "m.gguf", arch))
    for part in model.weight_parts():
        stored = model.get_parameter(part.parameter)[part.start : part.stop]
        assert torch.equal(stored, torch.tensor(state[part.name])), part.name


def test_case_129_query_rows_of_two_heads_of_four_dimensions_return_to_their_place():
    rows = np.arange(8.0)  # head 0: 0 1 2 3, head 1: 4 5 6 7
    stored = permute(rows, 2)
    assert stored.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]  # pairs (i, i + C/2) side by side
    assert unpermute(torch.tensor(stored), 2).tolist() == rows.tolist()
    weight = np.arange(24.0).reshape(8, 3)
    assert unpermute(torch.tensor(permute(weight, 2)), 2).tolist() == weight.tolist()


def test_case_129_llama_biases_are_unpermuted_and_qwens_are_not(tmp_path):
    bias = np.arange(HEADS * C, dtype=np.float32)
    for arch, stored in (("llama", permute(bias, HEADS)), ("qwen2", bias)):
        tensors = gguf_tensors(arch, hf_state("qwen2"))
        for name in list(tensors):
            if arch == "llama" and name.endswith("attn_k.bias"):
                tensors[name] = permute(tensors[name], tiny_gguf.KV_HEADS)
        tensors["blk.0.attn_q.bias"] = stored
        model, config = load_gguf(write_gguf(tmp_path / f"{arch}.gguf", arch, tensors=tensors))
        assert config.qkv_bias
        q = model.get_parameter("layers.0.self_attn.qkv_proj.bias")[: HEADS * C]
        assert q.tolist() == bias.tolist()


# One block of each kind, decoded in float64 from the format's definition (ggml-common.h and
# the reference de-quantisers in ggml-quants.c), one weight at a time.


def half(block, at):
    return float(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def decode_q8_0(b):
    return [half(b, 0) * int(np.int8(b[2 + i])) for i in range(32)]


def nibble(quants, i):
    """Weight i of 32: the low halves of 16 bytes, then the high halves."""
    return int(quants[i % 16]) >> (4 * (i // 16)) & 15


def decode_q4_0(b):
    return [half(b, 0) * (nibble(b[2:], i) - 8) for i in range(32)]


def decode_q4_1(b):
    return [half(b, 0) * nibble(b[4:], i) + half(b, 2) for i in range(32)]


def fifth_bit(b, i):
    return int.from_bytes(b.tobytes(), "little") >> i & 1


def decode_q5_0(b):
    return [half(b, 0) * ((nibble(b[6:], i) | fifth_bit(b[2:6], i) << 4) - 16) for i in range(32)]


def decode_q5_1(b):
    return [
        half(b, 0) * (nibble(b[8:], i) | fifth_bit(b[4:8], i) << 4) + half(b, 2) for i in range(32)
    ]


def k_scale(packed, j):
    """Scale and minimum of group j, six bits each, out of 12 bytes."""
    p = [int(x) for x in packed]
    if j < 4:
        return p[j] & 63, p[j + 4] & 63
    return (p[j + 4] & 15) | (p[j - 4] >> 6) << 4, (p[j + 4] >> 4) | (p[j] >> 6) << 4


def decode_q4_k(b):
    d, dmin, out = half(b, 0), half(b, 2), []
    for j in range(8):
        scale, minimum = k_scale(b[4:16], j)
        quants = b[16 + 32 * (j // 2) :][:32]
        out += [d * scale * (int(q) >> 4 * (j % 2) & 15) - dmin * minimum for q in quants]
    return out


def decode_q5_k(b):
    d, dmin, out = half(b, 0), half(b, 2), []
    for j in range(8):
        scale, minimum = k_scale(b[4:16], j)
        quants = b[48 + 32 * (j // 2) :][:32]
        for q, high in zip(quants, b[16:48], strict=True):
            value = int(q) >> 4 * (j % 2) & 15 | (int(high) >> j & 1) << 4
            out.append(d * scale * value - dmin * minimum)
    return out


def decode_q6_k(b):
    low, high, scales, d = b[:128], b[128:192], b[192:208].view(np.int8), half(b, 208)
    out = []
    for i in range(256):
        part, rest = divmod(i, 128)  # two halves of 128 weights
        quarter, at = divmod(rest, 32)
        four = int(low[64 * part + 32 * (quarter % 2) + at]) >> 4 * (quarter // 2) & 15
        two = int(high[32 * part + at]) >> 2 * quarter & 3
        out.append(d * int(scales[i // 16]) * ((four | two << 4) - 32))
    return out


DECODERS = {
    "Q8_0": (34, decode_q8_0),
    "Q4_0": (18, decode_q4_0),
    "Q4_1": (20, decode_q4_1),
    "Q5_0": (22, decode_q5_0),
    "Q5_1": (24, decode_q5_1),
    "Q4_K": (K_BYTES["Q4_K"], decode_q4_k),
    "Q5_K": (K_BYTES["Q5_K"], decode_q5_k),
    "Q6_K": (K_BYTES["Q6_K"], decode_q6_k),
}


def random_blocks(kind, rows, blocks, seed=0):
    """Packed rows: random bytes, with scales that are small finite numbers."""
    size, _ = DECODERS[kind]
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = rng.uniform(0.001, 0.01, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    at = size - 2 if kind == "Q6_K" else 0
    width = {"Q8_0": 2, "Q4_0": 2, "Q5_0": 2, "Q6_K": 2}.get(kind, 4)
    packed[..., at : at + width] = halves[..., :width]
    return packed.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", DECODERS)
def test_blocks_decode_as_the_format_defines(tmp_path, kind):
    size, decode = DECODERS[kind]
    weights = 256 if kind.endswith("_K") else 32
    packed = random_blocks(kind, rows=3, blocks=F // weights)
    path = write_gguf(tmp_path / "m.gguf", raw={"blk.0.ffn_down.weight": (packed, kind)})
    got = GGUFFile(path).dequantize("blk.0.ffn_down.weight")
    expected = [[x for block in row.reshape(-1, size) for x in decode(block)] for row in packed]
    assert got.shape == (3, F) and got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("kind", K_BYTES)
def test_a_model_of_k_quants_computes_what_transformers_computes(tmp_path, kind):
    shapes = {"ffn_down": (D, F), "attn_q": (HEADS * C, D), "ffn_up": (F, D)}
    raw = {
        f"blk.0.{name}.weight": (random_blocks(kind, rows, columns // 256), kind)
        for name, (rows, columns) in shapes.items()
    }
    assert_same_logits(write_gguf(tmp_path / "m.gguf", raw=raw))


def test_every_supported_kind_is_tested_above():
    assert {*DECODERS, *QUANTIZABLE, "F32"} == set(KINDS)


def test_the_checkpoint_dtype_is_the_files_half_or_float32(tmp_path):
    expected = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "float32"}
    for kind, dtype in expected.items():
        path = write_gguf(tmp_path / f"{kind}.gguf", kind=kind)
        model, config = load_gguf(path)
        assert config.dtype == dtype
        assert next(model.parameters()).dtype == getattr(torch, dtype)
        assert next(load_gguf(path, torch.bfloat16)[0].parameters()).dtype == torch.bfloat16


def rope_of(path, **metadata):
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return config_from_gguf(GGUFFile(write_gguf(path / "rope.gguf", metadata=keys))).rope


def rope_of_hf(**scaling):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "rope_scaling": scaling,
    }
    return config_from_hf(raw).rope


def test_rope_scaling_reads_as_the_hugging_face_spelling_of_it(tmp_path):
    assert rope_of(tmp_path) == rope_of_hf()
    assert rope_of(tmp_path, rope__freq_base=500000.0).theta == 500000.0
    linear = rope_of_hf(rope_type="linear", factor=4.0)
    none = {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}
    typed = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert rope_of(tmp_path, **typed) == linear
    assert rope_of(tmp_path, rope__scaling__factor=4.0) == linear  # llama.cpp's default type
    assert rope_of(tmp_path, rope__scale_linear=4.0) == linear  # the key of old files
    assert rope_of(tmp_path, **none) == rope_of_hf()
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    }
    hf_yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert rope_of(tmp_path, **yarn) == rope_of_hf(**hf_yarn)
    betas = {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0}
    assert rope_of(tmp_path, **yarn, **betas) == rope_of_hf(**hf_yarn, beta_fast=16, beta_slow=2)
    # In llama.cpp attn_factor multiplies 0.1 ln(factor) + 1 = 1.13863; in HF it is the product.
    scaled = rope_of(tmp_path, **yarn, rope__scaling__attn_factor=0.5)
    assert scaled.attention_factor == pytest.approx(0.5 * 1.138629, abs=1e-6)


def test_rope_freqs_stretch_llama_3_as_transformers_does(tmp_path):
    """`generate_extra_tensors` of convert_hf_to_gguf.py writes these divisors for Llama 3.1."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(
        hidden_size=D, num_attention_heads=HEADS, head_dim=C, rope_parameters=rope
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, C, 2).double() / C)
    factors = (plain / expected.double()).float()
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    tensors = gguf_tensors("llama", hf_state("llama"))
    tensors["rope_freqs.weight"] = factors.numpy()
    model, config = load_gguf(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert len(config.rope.freq_factors) == C // 2
    torch.testing.assert_close(inverse_frequencies(config.rope, C), expected, rtol=1e-6, atol=0)
    plain_model, _ = load_gguf(write_gguf(tmp_path / "plain.gguf"))
    assert not torch.allclose(
        reference_logits(model, TOKENS), reference_logits(plain_model, TOKENS)
    )


def test_end_tokens_of_text_turn_and_message_each_count_once(tmp_path):
    ends = {f"tokenizer.ggml.{n}_token_id": i for n, i in (("eos", 2), ("eot", 5), ("eom", 2))}
    config = config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=ends)))
    assert config.eos_token_ids == (2, 5) and config.bos_token_id == 1


def split_in_three(tmp_path):
    write_gguf(tmp_path / "m.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


def test_a_split_model_loads_from_any_of_its_parts(tmp_path):
    whole, _ = load_gguf(write_gguf(tmp_path / "whole.gguf"))
    (tmp_path / "s").mkdir()
    for part in split_in_three(tmp_path / "s"):
        model, _ = load_gguf(part)
        assert torch.equal(reference_logits(model, TOKENS), reference_logits(whole, TOKENS))


def test_a_missing_or_renamed_part_is_named(tmp_path):
    parts = split_in_three(tmp_path)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf does not exist"):
        load_gguf(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"split model of 20 tensors, but 9 .*keep all parts"):
        load_gguf(tmp_path / "renamed.gguf")


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("gemma2", {}, "architecture 'gemma2'; supported are llama, qwen2, qwen3"),
        ("qwen2moe", {}, "mixture-of-experts"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale=0.5"),
        ("llama", {"attention.head_count_kv": [2, 1]}, r"head_count_kv=\[2, 1\]; one number"),
        ("llama", {"rope.dimension_count": 32}, "rope.dimension_count=32; only .* 64"),
        ("llama", {"attention.value_length": 32}, "attention.value_length=32"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'; supported are none, linear"),
        ("llama", {"rope.scaling.type": "yarn"}, "no metadata key .*original_context_length"),
        ("llama", {"context_length": None}, "no metadata key 'llama.context_length'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, arch, metadata, said):
    tensors = gguf_tensors("llama", hf_state("llama"))
    path = write_gguf(tmp_path / "m.gguf", arch, tensors=tensors, metadata=metadata)
    with pytest.raises(ValueError, match=said):
        load_gguf(path)


def test_unknown_kinds_and_tensors_are_refused_by_name(tmp_path):
    packed = np.zeros((D, F // 256 * 84), np.uint8)
    raw = {"blk.0.ffn_down.weight": (packed, "Q2_K")}
    with pytest.raises(ValueError, match=r"ffn_down.weight .* as Q2_K; .* Q4_K, Q5_K, Q6_K"):
        load_gguf(write_gguf(tmp_path / "kind.gguf", raw=raw))
    tensors = gguf_tensors("llama", hf_state("llama"))
    extra = tensors | {"blk.0.ssm_out.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"'blk.0.ssm_out.weight' is not part of a dense"):
        load_gguf(write_gguf(tmp_path / "extra.gguf", tensors=extra))
    del tensors["blk.1.attn_v.weight"]
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.v_proj.weight"):
        load_gguf(write_gguf(tmp_path / "less.gguf", tensors=tensors))


def test_torn_and_foreign_files_are_refused(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 10, 100, 700, 2000, len(whole) // 2, len(whole) - 1):
        torn = tmp_path / "torn.gguf"
        torn.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"torn\.gguf is not a readable GGUF file"):
            load_gguf(torn)
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + b"x" * 100)
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        load_gguf(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="does not exist"):
        load_gguf(tmp_path / "absent.gguf")


def test_without_the_gguf_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r'pip install "minifer\[gguf\]"'):
        load_gguf(path)


def test_our_name_table_agrees_with_the_librarys():
    for arch in tiny_gguf.ARCHITECTURES:
        kind = {name: arch_id for arch_id, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
        written = set(gguf_tensors(arch, hf_state(arch, tied=False)))
        known = {gguf.TENSOR_NAMES[t].replace("{bid}", "0") for t in gguf.MODEL_TENSORS[kind]}
        assert {name.rsplit(".", 1)[0] for name in written if "blk.1" not in name} <= known
