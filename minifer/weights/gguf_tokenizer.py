"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

A file holds the vocabulary, the merges or scores, and a name for the rule that splits text before
merging. The rules are those of llama.cpp (src/llama-vocab.cpp) and of the `tokenizer.json` that
the model's makers published:

- `gpt2`: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) with one splitting rule a family;
- `llama`: SentencePiece BPE (Llama 2, Mistral), merged by score, with byte fallback.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from minifer.text.tokenizer import Tokenizer
from minifer.weights.gguf import GGUFFile

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPM_DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # of llama.cpp

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_GPT2_RULES = ("gpt-2", "default")  # files older than the key say nothing: default
PRE_TOKENIZERS = (*_GPT2_RULES, "smollm", *_SPLITS)
# Llama 3: BOS unless the file says no. It and Tekken take a whole word that is in the
# vocabulary before any merge.
_BOS_RULES = ("llama-bpe", "llama-v3", "llama3")
_WHOLE_WORD_RULES = (*_BOS_RULES, "tekken")


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer and chat template of a GGUF file.

    Raises `ValueError` naming the tokenizer model or splitting rule that is not supported.
    """
    model = file.require("tokenizer.ggml.model")
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if model == "gpt2":
        rule = file.get("tokenizer.ggml.pre", "default")
        backend = _byte_level(file, tokens, rule)
        add_bos = rule in _BOS_RULES
    elif model == "llama":
        backend = _sentencepiece(file, tokens, types)
        add_bos = True
    else:
        raise ValueError(
            f"{file.path} holds a tokenizer of model {model!r}; supported are gpt2 and llama"
        )
    # The text of control tokens (<|im_end|>) and user-defined ones (<think>) is never cut up;
    # only the former are left out of decoded text.
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        whole = [token for token, k in zip(tokens, types, strict=True) if k == kind]
        backend.add_tokens([AddedToken(t, normalized=False, special=special) for t in whole])
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(file, tokens, _SPM_DEFAULTS if model == "llama" else {}),
        chat_template=file.get("tokenizer.chat_template"),
        add_bos_token=file.get("tokenizer.ggml.add_bos_token", add_bos),
        add_eos_token=file.get("tokenizer.ggml.add_eos_token", False),
    )


def _special_tokens(file: GGUFFile, tokens: list[str], defaults: dict[str, int]) -> dict[str, str]:
    named = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = file.get(f"tokenizer.ggml.{key}", defaults.get(name))
        if token_id is not None and token_id < len(tokens):
            named[name] = tokens[token_id]
    return named


def _bpe(file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], **kind: Any) -> Any:
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, merges, **kind)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{file.path} holds a torn tokenizer ({error}); download it again"
        ) from error


def _byte_level(file: GGUFFile, tokens: list[str], rule: str) -> tokenizers.Tokenizer:
    """GPT-2's scheme: bytes written as printable characters, merged in the order of a list."""
    pairs = [merge.split(" ", 1) for merge in file.require("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        _bpe(file, tokens, [(a, b) for a, b in pairs], ignore_merges=rule in _WHOLE_WORD_RULES)
    )
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()  # as Qwen publishes it
    backend.pre_tokenizer = _pre_tokenizer(file, rule)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(file: GGUFFile, rule: str) -> PreTokenizer:
    """How text is cut into words, inside which merges happen."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _GPT2_RULES:
        return gpt2
    if rule == "smollm":  # every digit on its own, then GPT-2's rule on what lies between
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if rule in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ValueError(
        f"{file.path} asks for pre-tokenizer {rule!r}; supported are {', '.join(PRE_TOKENIZERS)}"
    )


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: blanks are ▁, unknown characters are bytes <0x..>.

    add_space_prefix puts a blank before each stretch of text between special tokens, as llama.cpp
    does and as Llama 2's published tokenizer.json does.
    """
    merges = file.get("tokenizer.ggml.merges")
    if merges is not None:
        pairs = [(a, b) for a, b in (merge.split(" ", 1) for merge in merges)]
    else:
        pairs = _merges_by_score(tokens, types, file.require("tokenizer.ggml.scores"))
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", _SPM_DEFAULTS["unk_token"])]
    backend = tokenizers.Tokenizer(
        _bpe(file, tokens, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    blanks: list[Any] = [normalizers.Replace(" ", "▁")]
    texts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend("▁"))
        texts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(blanks)
    backend.decoder = decoders.Sequence(texts)
    return backend


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges a SentencePiece vocabulary implies: any two pieces that make a third, best first.

    SentencePiece joins, again and again, the two neighbours whose union scores highest.
    """
    score = {
        token: scores[i] for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED)
    }
    rank = {token: i for i, token in enumerate(tokens)}
    merges = [
        (left, right)
        for token in score
        for cut in range(1, len(token))
        if (left := token[:cut]) in score and (right := token[cut:]) in score
    ]
    return sorted(merges, key=lambda m: (-score[m[0] + m[1]], rank[m[0]], rank[m[1]]))
