"""The default model end to end: what `minifer pull` fetched, against transformers on the same file.

Skips where nothing was pulled.
"""

from __future__ import annotations

import gguf
import pytest
import regex
import torch
from safetensors import safe_open
from test_gguf_tokenizer import GPT2, TEXTS, slow_encode

from minifer import Engine, EngineConfig, SamplingParams
from minifer.weights.gguf import GGUFFile, config_from_gguf
from minifer.weights.gguf_tokenizer import tokenizer_from_gguf
from minifer.weights.resolve import load_model

transformers = pytest.importorskip("transformers")
from transformers.initialization import no_init_weights  # noqa: E402

gguf_rules = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
gguf_tokenizers = pytest.importorskip("transformers.integrations.gguf")

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Name three primary colours.",
    "Explain in one sentence why the sky is blue.",
    "def add(a, b):",
    "Translate 'good morning' to Spanish.",
    "Give me a recipe for pancakes.",
]
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def gguf_file(pulled_gguf):
    return GGUFFile(pulled_gguf)


@pytest.fixture(scope="module")
def loaded(pulled_model):
    return load_model(pulled_model)


@pytest.fixture(scope="module")
def oracle(gguf_file):
    """transformers' model, filled by transformers' own GGUF rules from the file that is open.

    `from_pretrained(gguf_file=…)` does the same and parses the 49,152 tokens three times more.
    """
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = transformers.LlamaForCausalLM(config).eval()
    rules = gguf_rules.LlamaTensorProcessor(config=config.to_dict())
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)  # the library's
    names = {}
    for name in model.state_dict():
        stem, suffix = name.rsplit(".", 1)
        names[f"{table.get_name(stem)}.{suffix}"] = name
    state = {}
    for name, tensor in gguf_file.tensors.items():
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        state[names[name]] = torch.tensor(rules.process(weights, name).weights)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


def greedy(loaded, prompts):
    """What the engine answers to all prompts in one batch; end tokens do not end here."""
    config = EngineConfig(kv_cache_bytes=2**28, max_num_batched_tokens=100)
    engine = Engine.from_loaded(loaded, config)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    return [outputs[str(i)] for i in range(len(prompts))]


def test_configuration_is_smollm2s(loaded, gguf_file):
    config = loaded.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.max_position_embeddings) == (100000.0, 8192)
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert config == config_from_gguf(gguf_file)
    assert loaded.eos_token_ids == {2} and loaded.tokenizer.eos_token_id == 2


def test_the_converted_folder_holds_the_files_weights_to_the_bit(pulled_model, oracle):
    state = oracle.state_dict()
    del state["lm_head.weight"]  # tied
    with safe_open(pulled_model / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(state)
        for name, tensor in state.items():
            assert torch.equal(stored.get_tensor(name), tensor), name


def test_half_precision_would_round_the_weights(gguf_file):
    """Why the folder is float32: relative error of the largest kind, of fp16 and bf16."""
    weight = gguf_file.dequantize("blk.0.ffn_up.weight")
    for dtype, bound in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        error = ((weight.to(dtype).float() - weight).abs() / weight.abs().clamp_min(1e-4)).max()
        assert 0 < error <= bound


def test_greedy_tokens_equal_those_of_transformers(loaded, oracle):
    """Our tokens, read by transformers in one pass: every one is its likeliest next token.

    That is, by induction, the same as transformers' greedy decoding giving the same tokens.
    """
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [loaded.tokenizer.apply_chat_template(chat) for chat in chats]
    answers = greedy(loaded, prompts)
    for question, prompt, answer in zip(QUESTIONS, prompts, answers, strict=True):
        ids = answer.token_ids
        assert len(ids) == NEW_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids, question
        ours = [scored[token].logprob for token, scored in zip(ids, answer.logprobs, strict=True)]
        theirs = logits.log_softmax(-1)[torch.arange(NEW_TOKENS), ids]
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-4, atol=5e-4)
    assert answers[0].text.startswith("The capital of France is Paris.")


def splits_alike(text):
    """transformers takes plain GPT-2 splitting for `smollm`: numbers are not cut up. No merge has
    an ASCII digit in it, so this shows in two places only: in a run of blanks before a number,
    and in numbers written with other characters (①, ½)."""
    return not regex.search(r"\s\s\p{N}|[\p{N}--0-9]", text, flags=regex.V1)


def varied_texts():
    """Some hundred strings: those of the tokenizer tests, alone and joined in pairs."""
    texts = [text for text in TEXTS if splits_alike(text)]
    glue = ["", " ", "\n", "  ", "<|im_end|>\n<|im_start|>user\n", "<|endoftext|>", "7"]
    joined = [a + glue[(i + j) % 7] + b for i, a in enumerate(texts) for j, b in enumerate(texts)]
    return [text for text in texts + joined if splits_alike(text)]


def test_the_tokenizer_agrees_with_transformers(gguf_file, loaded):
    keys = {"tokenizer_type": "model", "pre_tokenizer_type": "pre"}
    keys |= {key: key for key in ("tokens", "token_type", "merges")}
    metadata = {name: gguf_file.require(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    theirs, _ = gguf_tokenizers.convert_gguf_tokenizer("llama", metadata)
    ours = tokenizer_from_gguf(gguf_file)
    texts = varied_texts()
    assert len(texts) > 200
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert ids == loaded.tokenizer.encode(text)  # through tokenizer.json
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, False) == text


def test_the_chat_template_agrees_with_transformers(pulled_model, loaded):
    theirs = transformers.AutoTokenizer.from_pretrained(str(pulled_model))
    chat = [{"role": "user", "content": "Hi  there"}, {"role": "assistant", "content": "Yes?"}]
    for flag in (True, False):
        rendered = theirs.apply_chat_template(chat, add_generation_prompt=flag)
        assert loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=flag) == list(
            rendered["input_ids"]
        )


def test_digits_stand_alone_as_the_makers_and_llama_cpp_have_it(gguf_file, loaded):
    """`smollm` is Digits(individual_digits) before GPT-2's rule: "  5" is "ĠĠ", "5"."""
    tokens = gguf_file.require("tokenizer.ggml.tokens")
    merges = gguf_file.require("tokenizer.ggml.merges")
    for text in ("  5", "\t\t7", "a  12 b", "x = 1\n    2", "12345", " 1 ", "① ½", *TEXTS):
        ids = loaded.tokenizer.encode(text)
        assert ids == slow_encode(text, tokens, merges, [r"\p{N}", GPT2]), text
    spelled = [loaded.tokenizer.id_to_token(i) for i in loaded.tokenizer.encode("  5")]
    assert spelled == ["ĠĠ", "5"]
