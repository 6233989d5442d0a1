"""Tokenizers out of GGUF files: against transformers, and against a slow twin.

The slow twin is the definition: cut the text with the rule's regular expressions, then join the
best pair of neighbours again and again. It reads the file's lists itself.
"""

import itertools
import json
import unicodedata

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import add_value
from tokenizers import models, pre_tokenizers, trainers

from minifer.text.byte_tokenizer import byte_alphabet
from minifer.text.tokenizer import Tokenizer
from minifer.weights.gguf import GGUFFile
from minifer.weights.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf

transformers = pytest.importorskip("transformers")

CORPUS = [
    "Hello world, hello World! It's the year 2024 and we'll DON'T worry; they've 1234 apples.",
    "def f(x):\n    return x + 1  # comment\n\n\n\tif True:\r\n        pass\n",
    "Grüße aus Zürich, déjà-vu, naïve café – “quotes” … 你好世界 こんにちは 안녕 🙂🙃 привет мир",
    "a  b   c    d     e\t\tf  12  3 45   678  9x9  1,000,000.50  v2.0-rc1  ½ ² ٣٤ Ⅳ",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp, src/llama-vocab.cpp: each expression in turn cuts what the one before left whole.
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   ",
    "\n\n\n",
    " leading and trailing  ",
    "x  5   67\t8\n 9",
    "don't DON'T Don'T i'm I'M",
    "tab\tseparated\tvalues\r\nand windows\r\n\r\nlines",
    "line one  \n  line two\n\n   line three",
    "https://example.org/a?b=c&d=%20#frag",
    "for (int i = 0; i < n; ++i) { a[i] += 0x1F; }",
    "混合 mixed テキスト with 한국어 12個 and emoji 👩‍👩‍👧‍👦🏳️‍🌈",
    "Ωμέγα שלום مرحبا हिन्दी ไทย",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero",
    "ﬁ ligature ① ⅓ x² 10⁻³ €5 £6",
    "e\u0301 combining versus \u00e9",
    "aaaa bbbb  cccc   dddd",
    "<b>html</b> &amp; `code` **bold** ~~x~~ [link](u)",
    "\x00\x01\x7f control",
    "\U0001f600\U0010ffff",
]


def slow_split(text, expressions):
    """Apply one expression after the other; what none matches stays a piece of its own."""
    pieces = [text]
    for expression in expressions:
        cut = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(expression, piece):
                cut += [piece[end : match.start()], match.group()]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


def slow_join(symbols, rank):
    """Join the neighbours whose pair ranks first (leftmost of equals) until none is left."""
    symbols = list(symbols)
    while True:
        pairs = [rank.get(pair, len(rank)) for pair in itertools.pairwise(symbols)]
        if not pairs or min(pairs) == len(rank):
            return symbols
        at = pairs.index(min(pairs))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def slow_encode(text, tokens, merges, expressions, whole_words=False):
    """Byte-level BPE by definition: ids of a text without special tokens."""
    alphabet = byte_alphabet()
    ids = {token: i for i, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    out = []
    for word in slow_split(text, expressions):
        spelled = "".join(alphabet[byte] for byte in word.encode())
        found = [spelled] if whole_words and spelled in ids else slow_join(spelled, rank)
        out += [ids[symbol] for symbol in found]
    return out


def write_tokenizer(path, model, tokens, types, **values):
    """A GGUF file that holds a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {"model": model, "tokens": tokens, "token_type": types, **values}
    for key, value in metadata.items():
        add_value(writer, f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def bpe():
    """tokens, types and merges of a small byte-level BPE; its special tokens come last."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    trained.train_from_iterator(CORPUS * 4, trainer)
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merges = [" ".join(pair) for pair in state["merges"]]
    types = [1] * len(tokens)
    tokens += ["<|bos|>", "<|im_end|>", "<think>", "[PAD0]"]
    types += [3, 3, 4, 5]
    return {"tokens": tokens, "types": types, "merges": merges}


def write_bpe(path, bpe, pre, **values):
    size = len(bpe["tokens"])
    values = {"bos_token_id": size - 4, "eos_token_id": size - 3} | values
    if pre is not None:
        values["pre"] = pre
    return write_tokenizer(
        path, "gpt2", bpe["tokens"], bpe["types"], merges=bpe["merges"], **values
    )


def read(path) -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(path))


@pytest.mark.parametrize("pre", RULES)
def test_byte_level_rules_split_and_merge_as_defined(tmp_path, bpe, pre):
    tokenizer = read(write_bpe(tmp_path / "t.gguf", bpe, pre))
    whole = pre == "llama-bpe"
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ids == slow_encode(normal, bpe["tokens"], bpe["merges"], RULES[pre], whole), text
        assert tokenizer.decode(ids) == normal


@pytest.mark.parametrize("pre", ["gpt-2", "default", None, "llama-bpe", "qwen2", "tekken"])
def test_byte_level_rules_agree_with_transformers(tmp_path, bpe, pre):
    path = write_bpe(tmp_path / "t.gguf", bpe, pre, add_bos_token=False)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = read(path)
    for text in [*TEXTS, "a<|im_end|>b <think> c", "<|bos|>x"]:
        if pre == "qwen2":  # ours composes first, as Qwen's published tokenizer does
            text = unicodedata.normalize("NFC", text)
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_every_rule_builds_and_an_unknown_one_is_refused(tmp_path, bpe):
    for pre in PRE_TOKENIZERS:
        assert read(write_bpe(tmp_path / f"{pre}.gguf", bpe, pre)).encode("hi 12")
    with pytest.raises(ValueError, match="asks for pre-tokenizer 'falcon'; supported are gpt-2"):
        read(write_bpe(tmp_path / "t.gguf", bpe, "falcon"))


def test_llama_3_takes_a_whole_word_before_merging(tmp_path, bpe):
    """Its published tokenizer.json says ignore_merges; some words cannot be reached by merges."""
    grown = {**bpe, "tokens": [*bpe["tokens"], "zqzqz"], "types": [*bpe["types"], 1]}
    sizes = {}
    for pre in ("llama-bpe", "gpt-2"):
        path = write_bpe(tmp_path / f"{pre}.gguf", grown, pre, bos_token_id=0)
        sizes[pre] = len(read(path).encode("zqzqz", add_special_tokens=False))
    assert sizes == {"llama-bpe": 1, "gpt-2": 5}


def test_special_tokens_bos_and_template_come_from_the_file(tmp_path, bpe):
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = read(write_bpe(tmp_path / "a.gguf", bpe, "gpt-2", chat_template=template))
    bos, end = len(bpe["tokens"]) - 4, len(bpe["tokens"]) - 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, end)
    assert tokenizer.vocab_size == len(bpe["tokens"])
    assert tokenizer.encode("<|im_end|><think>") == [end, end + 1]
    # A control token leaves no text, a user-defined one does.
    assert tokenizer.decode([end, end + 1]) == "<think>"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat)[0] == bos
    assert read(write_bpe(tmp_path / "b.gguf", bpe, "llama-bpe")).encode("")[:1] == [bos]
    path = write_bpe(tmp_path / "c.gguf", bpe, "gpt-2", add_bos_token=True, add_eos_token=True)
    framed = read(path).encode("<|bos|>hi")
    assert framed.count(bos) == 1 and framed[0] == bos and framed[-1] == end


# SentencePiece ("llama"): pieces with scores, ▁ for a blank, bytes for what no piece spells.
PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
WORDS = "▁ e t a o h l w r d i n s ▁t he ll ▁a in ▁the lo wo or ▁he ▁wo llo hello ▁hello ▁world "
WORDS += "▁▁ ▁▁▁ orld ld ▁wor ing é ▁w s> > g"


def sentencepiece(**values):
    pieces = WORDS.split()
    tokens = [*PIECES, *pieces, "[INST]"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * len(PIECES) + [-float(i) for i in range(len(pieces))] + [0.0]
    # Single characters are the least likely, longer pieces by length: joins then happen.
    for i, piece in enumerate(pieces, start=len(PIECES)):
        scores[i] = -100.0 - i if len(piece) == 1 else -10.0 / len(piece) - i / 1000
    return {"tokens": tokens, "types": types, "scores": scores, **values}


def slow_sentencepiece(text, tokens, scores, prefix=True):
    """llm_tokenizer_spm: join the neighbours whose union scores highest; bytes for the rest."""
    ids = {token: i for i, token in enumerate(tokens)}
    spelled = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    symbols = list(spelled)
    while True:
        unions = [a + b for a, b in itertools.pairwise(symbols)]
        best = max((scores[ids[u]] for u in unions if u in ids), default=None)
        if best is None:
            break
        at = next(i for i, u in enumerate(unions) if u in ids and scores[ids[u]] == best)
        symbols[at : at + 2] = [unions[at]]
    out = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return out


SPM_TEXTS = [
    "hello world",
    "the hello  world",
    "he",
    "x",
    "",
    "é€🙂",
    "wo  wo   wo",
    "hello\nhe",
    "s>",
]


def test_sentencepiece_joins_by_score_as_defined(tmp_path):
    spm = sentencepiece()
    tokenizer = read(write_tokenizer(tmp_path / "t.gguf", "llama", **spm))
    plain = read(write_tokenizer(tmp_path / "u.gguf", "llama", **spm, add_space_prefix=False))
    for text in [*SPM_TEXTS, " hello", "  the"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == slow_sentencepiece(text, spm["tokens"], spm["scores"]), text
        assert tokenizer.decode(ids) == text
        ids = plain.encode(text, add_special_tokens=False)
        assert ids == slow_sentencepiece(text, spm["tokens"], spm["scores"], prefix=False)
        assert plain.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="helowrdtas é\n🙂", max_size=12))
def test_any_text_survives_sentencepiece(spm_tokenizer, text):
    assert spm_tokenizer.decode(spm_tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "t.gguf"
    return read(write_tokenizer(path, "llama", **sentencepiece()))


def test_sentencepiece_agrees_with_transformers(tmp_path):
    path = write_tokenizer(tmp_path / "t.gguf", "llama", **sentencepiece(bos_token_id=1))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = read(path)
    for text in SPM_TEXTS:  # transformers puts no blank before one that is already there
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("hello")[0] == ours.bos_token_id == 1
    assert ours.eos_token_id == 2  # llama.cpp's default where the file names none


def test_each_stretch_between_special_tokens_gets_its_blank(tmp_path):
    """llama.cpp's rule, and that of Llama 2's published tokenizer."""
    tokenizer = read(write_tokenizer(tmp_path / "t.gguf", "llama", **sentencepiece()))
    hello = tokenizer.encode("hello", add_special_tokens=False)
    inst = len(PIECES) + len(WORDS.split())
    assert tokenizer.encode("<s>hello</s>hello[INST]hello") == [1, *hello, 2, *hello, inst, *hello]


def test_unknown_models_and_torn_vocabularies_are_refused(tmp_path, bpe):
    with pytest.raises(ValueError, match="model 'bert'; supported are gpt2 and llama"):
        read(write_tokenizer(tmp_path / "a.gguf", "bert", ["a"], [1]))
    torn = {**bpe, "merges": [*bpe["merges"], "zz qq"]}
    with pytest.raises(ValueError, match="holds a torn tokenizer"):
        read(write_bpe(tmp_path / "b.gguf", torn, "gpt-2"))
    with pytest.raises(ValueError, match=r"no metadata key 'tokenizer.ggml.scores'"):
        read(write_tokenizer(tmp_path / "c.gguf", "llama", ["<unk>", "a"], [2, 1]))
