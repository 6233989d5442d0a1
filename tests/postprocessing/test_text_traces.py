"""Published traces: vLLM 0.32.0's detokenizer on SmolLM2's tokenizer, one token at a time.

Without stop strings our chunks are vLLM's. With them the text and the stop are vLLM's, but the
chunks are not: vLLM holds back `len(stop) - 1` characters whatever they are, we only what could
still become the stop string.
"""

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models

from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.stop_strings import StopStrings
from minifer.text.tokenizer import Tokenizer

# SmolLM2's ids and pieces for the six texts (bytes in GPT-2's printable spelling).
TEXTS: dict[str, list[tuple[int, str]]] = {
    "hi 👋🏽 there": [
        (6004, "hi"),
        (15107, "ĠðŁ"),
        (235, "ĳ"),
        (229, "ĭ"),
        (10813, "ðŁ"),
        (233, "ı"),
        (138, "½"),
        (665, "Ġthere"),
    ],
    "日本語テキスト": [
        (23274, "æĹ"),
        (115, "¥"),
        (40993, "æľ¬"),
        (179, "è"),
        (120, "ª"),
        (248, "ŀ"),
        (11100, "ãĥ"),
        (224, "Ĩ"),
        (10391, "ãĤ"),
        (251, "Ń"),
        (10391, "ãĤ"),
        (134, "¹"),
        (11100, "ãĥ"),
        (226, "Ī"),
    ],
    "ABC DEF GHI JKL": [
        (35542, "ABC"),
        (44691, "ĠDEF"),
        (20985, "ĠGH"),
        (57, "I"),
        (530, "ĠJ"),
        (59, "K"),
        (60, "L"),
    ],
    "ABC DEF GHX JKL": [
        (35542, "ABC"),
        (44691, "ĠDEF"),
        (20985, "ĠGH"),
        (72, "X"),
        (530, "ĠJ"),
        (59, "K"),
        (60, "L"),
    ],
    "one two three four": [(537, "one"), (827, "Ġtwo"), (1296, "Ġthree"), (1876, "Ġfour")],
    "xxx yyy": [(46285, "xxx"), (329, "Ġy"), (27413, "yy")],
}

Decode = Callable[[list[int]], str]


def small_tokenizer() -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer with no other pieces than these."""
    vocab = {piece: i for pieces in TEXTS.values() for i, piece in pieces}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(params=["stored pieces", "pulled model"])
def decode(request: pytest.FixtureRequest) -> Decode:
    """Once with the pieces above, once with the real tokenizer where it was pulled."""
    if request.param == "stored pieces":
        return small_tokenizer().decode
    real = Tokenizer.from_dir(request.getfixturevalue("pulled_model"))
    for text, pieces in TEXTS.items():
        assert real.encode(text, add_special_tokens=False) == [i for i, _ in pieces]
    return real.decode


def ids_of(text: str) -> list[int]:
    return [i for i, _ in TEXTS[text]]


def released(
    decode: Decode, ids: list[int], stops: list[str], include: bool = False
) -> tuple[list[str], str | None]:
    """Chunks up to the hit (or the flushed end), and the stop string that hit."""
    detokenizer, watcher = IncrementalDetokenizer(decode), StopStrings(stops, include)
    chunks = []
    for token in ids:
        chunks.append(watcher.push(detokenizer.push(token)))
        if watcher.hit is not None:
            return chunks, watcher.hit
    return [*chunks, watcher.flush(detokenizer.flush())], watcher.hit


def test_an_emoji_of_many_tokens_comes_out_whole(decode: Decode) -> None:
    text = "hi 👋🏽 there"
    chunks, _ = released(decode, ids_of(text), [])
    assert chunks == ["hi", "", "", " 👋", "", "", "🏽", " there", ""]
    assert "".join(chunks) == decode(ids_of(text)) == text


def test_case_065_a_reply_cut_inside_a_character_streams_whole_characters(decode: Decode) -> None:
    ids = ids_of("日本語テキスト")[:-1]
    chunks, _ = released(decode, ids, [])
    assert chunks[:-1] == ["", "日", "本", "", "", "語", "", "テ", "", "キ", "", "ス", ""]
    assert chunks[-1] == "\ufffd"  # vLLM drops it; decode has it
    assert "".join(chunks) == decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "include", "chunks", "hit"),
    [
        ("ABC DEF GHI JKL", ["F G"], False, ["ABC", " DE", ""], "F G"),
        ("ABC DEF GHI JKL", ["F G"], True, ["ABC", " DEF", " G"], "F G"),
        (
            "ABC DEF GHX JKL",
            ["GHI"],
            False,
            ["ABC", " DEF", " ", "GHX", " J", "K", "L", ""],
            None,
        ),
        ("one two three four", ["three", "two"], False, ["one", " "], "two"),
        ("xxx yyy", ["xyy"], False, ["xx", "x y", "yy", ""], None),
    ],
)
def test_stop_strings_across_tokens(
    decode: Decode, text: str, stops: list[str], include: bool, chunks: list[str], hit: str | None
) -> None:
    assert released(decode, ids_of(text), stops, include) == (chunks, hit)
