"""The detokenizer against `decode` of all ids, Python's UTF-8 decoder and `DecodeStream`."""

import copy
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.text.byte_tokenizer import byte_alphabet

Decode = Callable[[list[int]], str]
MANY = settings(max_examples=200, deadline=None)


# Id b < 256 is the byte b. Then pieces of several bytes, some of which begin or end inside a
# character, an empty piece, and a special token.
PIECES = [bytes([b]) for b in range(256)] + [
    b" the",
    b"\xe2\x82",
    b"\x82\xac",
    b"\xa5\xe6",
    b"\x97\xa5\xe6",
    b" \xf0\x9f",
    b"\x91\x8b\xf0\x9f",
    "日本".encode(),
    "\ufffd".encode(),
    b"",
]
END = len(PIECES)


def make_byte_level() -> Tokenizer:
    spell = byte_alphabet()
    vocab = {"".join(spell[b] for b in piece): i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


BYTE_LEVEL = make_byte_level()

# Id b < 256 is SentencePiece's byte token b, then a few pieces.
SP_PIECES = ["▁", "▁▁", "▁hello", "world", "he", "é", "<unk>"]
HELLO, WORLD, SP_END = 256 + 2, 256 + 3, 256 + len(SP_PIECES)


def make_sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    pieces = [f"<0x{b:02X}>" for b in range(256)] + SP_PIECES
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


LLAMA = make_sentencepiece(
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
)
METASPACE = make_sentencepiece(
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always"), decoders.Fuse()])
)
SENTENCEPIECE = pytest.mark.parametrize("tokenizer", [LLAMA, METASPACE], ids=["llama", "metaspace"])


def stream(decode: Decode, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """The chunks of `push`, one a token, and last the text of `flush`."""
    detokenizer = IncrementalDetokenizer(decode, prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


byte_ids = st.lists(st.integers(0, END), max_size=120)
valid_bytes = st.text(max_size=40).map(lambda text: list(text.encode()))


# ---- byte-level tokenizers


@MANY
@given(byte_ids)
def test_chunks_of_random_bytes_join_to_the_decoded_ids(ids: list[int]) -> None:
    raw = b"".join(PIECES[i] for i in ids if i != END)
    assert "".join(stream(BYTE_LEVEL.decode, ids)) == raw.decode(errors="replace")
    assert "".join(stream(BYTE_LEVEL.decode, ids)) == BYTE_LEVEL.decode(ids)


@MANY
@given(
    st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, *range(257, 266)]), max_size=120)
)
def test_chunks_of_long_runs_of_cut_characters_join_to_the_decoded_ids(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL.decode, ids)) == BYTE_LEVEL.decode(ids)


@MANY
@given(valid_bytes)
def test_text_is_released_at_the_end_of_each_character_and_never_inside_one(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL.decode)
    released = ""
    for count, token in enumerate(ids, start=1):
        released += detokenizer.push(token)
        complete = bytes(ids[:count]).decode(errors="ignore")  # leaves out a cut character
        # U+FFFD itself cannot be told from a cut character: it waits for the next one
        assert released == complete.rstrip("\ufffd") or released == complete


@MANY
@given(st.lists(st.sampled_from([*"aé€👋".encode(), *range(256, 264), END]), max_size=30))
def test_chunks_equal_those_of_the_tokenizers_library(ids: list[int]) -> None:
    text = b"".join(PIECES[i] for i in ids if i != END).decode(errors="replace")
    if "\ufffd" in text:
        return  # there the library holds back without limit, and flushes nothing
    library = decoders.DecodeStream(skip_special_tokens=True)
    expected = [library.step(BYTE_LEVEL, i) or "" for i in ids]
    assert stream(BYTE_LEVEL.decode, ids) == [*expected, ""]


@MANY
@given(byte_ids, byte_ids)
def test_text_of_the_prompt_never_leaks(prompt: list[int], ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL.decode, ids, prompt)) == BYTE_LEVEL.decode(ids)


def test_case_063_a_prompt_cut_inside_a_character_does_not_leak() -> None:
    prompt = [*b"abc", 0xE2, 0x82]
    assert stream(BYTE_LEVEL.decode, [0xAC], prompt) == ["", "\ufffd"]  # not "€", not "bc€"
    assert stream(BYTE_LEVEL.decode, [0xAC, *b"d"], prompt) == ["", "\ufffdd", ""]
    # E2 and E2 82 both decode to one U+FFFD: the output's must not be taken for the prompt's
    assert stream(BYTE_LEVEL.decode, [0x82, *b"d"], prompt[:-1]) == ["", "\ufffdd", ""]


def test_case_065_a_cut_character_is_flushed_as_a_replacement_character() -> None:
    ids = list("日本".encode())[:-1]
    chunks = stream(BYTE_LEVEL.decode, ids)
    assert chunks == ["", "", "日", "", "", "\ufffd"]
    assert "".join(chunks) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("first", [0x80, 0xAC, 0xBF, 0xFF, 258, 262])
def test_case_066_a_start_inside_a_character_is_text_and_not_an_error(first: int) -> None:
    chunks = stream(BYTE_LEVEL.decode, [first, *b"ok"])
    assert "".join(chunks) == BYTE_LEVEL.decode([first, *b"ok"])
    assert chunks[-2:] == ["k", ""]  # the stream goes on


@pytest.mark.parametrize(
    "pattern",
    [[END], [265], [0xFF], [0xE2, 0x82], [0xE2, END], [260], [264], [*b"a", END], [262]],
    ids=["special", "empty", "invalid", "cut", "cut+special", "astride", "literal", "text", "4+2"],
)
def test_case_067_work_is_linear_whatever_the_tokens_decode_to(pattern: list[int]) -> None:
    def work(num_tokens: int) -> int:
        decoded = 0

        def decode(ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return BYTE_LEVEL.decode(ids)

        ids = (pattern * num_tokens)[:num_tokens]
        assert "".join(stream(decode, ids, list(b"prompt"))) == BYTE_LEVEL.decode(ids)
        return decoded

    assert work(2_000) <= 60 * 2_000
    assert work(2_000) <= 2.1 * work(1_000)


@pytest.mark.parametrize("invisible", [END, 265], ids=["special", "empty"])
def test_case_067_tokens_that_show_nothing_are_not_kept(invisible: int) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL.decode)
    assert [detokenizer.push(invisible) for _ in range(100)] == [""] * 100
    assert detokenizer.num_held_tokens == 0
    # not even inside a character, which 100 of them do not break
    ids = [0xE2, 0x82, *[invisible] * 100, 0xAC]
    assert stream(BYTE_LEVEL.decode, ids) == [""] * 102 + ["€", ""]


def test_case_067_invalid_bytes_are_released_after_a_bound() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL.decode)
    held = []
    for count in range(1, 200):
        detokenizer.push(0xFF)
        held.append(detokenizer.num_held_tokens)
        assert detokenizer.num_held_tokens <= 24, count
    assert min(held[24:]) < 24


def test_case_061_the_text_of_a_special_token_is_skipped_unless_asked_for() -> None:
    assert stream(BYTE_LEVEL.decode, [*b"hi", END]) == ["h", "i", "", ""]
    keep = lambda ids: BYTE_LEVEL.decode(ids, skip_special_tokens=False)  # noqa: E731
    assert stream(keep, [*b"hi", END]) == ["h", "i", "<end>", ""]


@MANY
@given(byte_ids, byte_ids, byte_ids)
def test_a_copy_goes_its_own_way(common: list[int], left: list[int], right: list[int]) -> None:
    first = IncrementalDetokenizer(BYTE_LEVEL.decode)
    start = "".join(first.push(i) for i in common)
    second = copy.copy(first)
    for detokenizer, ids in ((first, left), (second, right)):
        text = start + "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert text == BYTE_LEVEL.decode(common + ids)


# ---- SentencePiece: the first space of a text is dropped, byte tokens stand for rare characters

sp_tokens = st.one_of(
    st.integers(256, SP_END).map(lambda i: [i]),
    st.characters(exclude_categories=["Cs"], exclude_characters=" ▁").map(
        lambda c: list(c.encode())
    ),
)
sp_ids = st.lists(sp_tokens, max_size=30).map(lambda parts: list(chain(*parts)))


@SENTENCEPIECE
@MANY
@given(ids=sp_ids, cut=st.sampled_from([[], [WORLD, 0xE2, 0x82], [WORLD, 0xF0, 0x9F, 0x91]]))
def test_sentencepiece_chunks_join_to_the_decoded_ids(
    tokenizer: Tokenizer, ids: list[int], cut: list[int]
) -> None:
    assert "".join(stream(tokenizer.decode, ids + cut)) == tokenizer.decode(ids + cut)


@SENTENCEPIECE
@MANY
@given(ids=sp_ids)
def test_sentencepiece_keeps_the_first_space_after_a_prompt(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    whole = tokenizer.decode([HELLO, *ids])
    assert "hello" + "".join(stream(tokenizer.decode, ids, [HELLO])) == whole


@SENTENCEPIECE
def test_the_first_space_survives_a_prompt_cut_inside_a_character(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer.decode, [HELLO], [WORLD, 0xE2, 0x82]) == [" hello", ""]
    assert stream(tokenizer.decode, [HELLO]) == ["hello", ""]


@SENTENCEPIECE
def test_a_bad_byte_does_not_take_back_released_characters(tokenizer: Tokenizer) -> None:
    ids = [*"é€".encode(), 0xFF, HELLO]
    assert tokenizer.decode(ids) == "\ufffd" * 6 + " hello"  # what the decoder makes of it all
    assert "".join(stream(tokenizer.decode, ids)) == "é€\ufffd hello"


@SENTENCEPIECE
@MANY
@given(ids=st.lists(st.sampled_from([*range(0x80, 0x100), HELLO, WORLD]), max_size=150))
def test_case_066_invalid_byte_tokens_never_raise_and_lose_no_text_around_them(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    def ascii_only(text: str) -> str:
        return "".join(c for c in text if c.isascii())

    assert ascii_only("".join(stream(tokenizer.decode, ids))) == ascii_only(tokenizer.decode(ids))
