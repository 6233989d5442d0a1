"""Log-probabilities in OpenAI's two shapes, and vLLM's for prompts.

JSON has no −∞: a token that could not be drawn has −9999.0, as at OpenAI and vLLM.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import decoders

from minifer.outputs import Logprob, TokenLogprobs
from minifer.text.byte_tokenizer import byte_alphabet
from minifer.text.tokenizer import Tokenizer

LOWEST = -9999.0
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def number(logprob: float) -> float:
    return max(logprob, LOWEST)


class TokenBytes:
    """The bytes of single tokens: pieces of characters have bytes, but no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend_tokenizer
        self._tokenizer = tokenizer
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special}
        self._alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}
        decoder = backend.decoder
        self._byte_level = isinstance(decoder, decoders.ByteLevel) or "ByteLevel" in str(decoder)

    def __call__(self, token_id: int) -> bytes:
        """b"" for an id beyond the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return bytes(self._alphabet[char] for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece's blank

    def is_special(self, token_id: int) -> bool:
        """Is it a token that `skip_special_tokens` leaves out?"""
        return token_id in self._special


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], k: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """The chat shape: one entry a token, with the k likeliest under `top_logprobs`."""

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": one.decoded_token or "",
            "logprob": number(one.logprob),
            "bytes": list(token_bytes(token_id)),
        }

    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        top = [entry(i, one) for i, one in _likeliest(position, k)]
        content.append(entry(token_id, position[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _likeliest(position: TokenLogprobs, k: int) -> list[tuple[int, Logprob]]:
    """The k likeliest of one position; the sampled token may be there and not among them."""
    return sorted(position.items(), key=lambda item: (item[1].rank, item[0]))[:k]


class CompletionLogprobs:
    """The completions shape, for one choice, piece by piece.

    text_offset: where a token's text begins in the choice's text, in characters. Of a character
    made of several tokens all begin where it begins. Bytes that are no character show as U+FFFD,
    one for each piece that could have begun one, and take as much room.
    start: where the first token begins; negative where the text lacks it (BOS).
    """

    def __init__(self, token_bytes: TokenBytes, start: int = 0) -> None:
        self._bytes = token_bytes
        self._num_characters = start  # whole ones so far
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[TokenLogprobs | None],
        skip_special_tokens: bool = False,
    ) -> dict[str, Any]:
        """The shape for some more tokens.

        logprobs: None for a token that nothing predicts, the very first of a prompt.
        skip_special_tokens: the text does not show them, so they take no room in it.
        """
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets = []
        for token_id, position in zip(token_ids, logprobs, strict=True):
            offsets.append(self._advance(token_id, skip_special_tokens))
            if position is None:
                tokens.append(self._bytes(token_id).decode(errors="replace"))
                chosen.append(None)
                top.append(None)
            else:
                tokens.append(position[token_id].decoded_token or "")
                chosen.append(number(position[token_id].logprob))
                top.append(_by_text(position))
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _advance(self, token_id: int, skip_special_tokens: bool) -> int:
        if skip_special_tokens and self._bytes.is_special(token_id):
            return max(0, self._num_characters)
        piece = self._bytes(token_id)
        held = bool(self._decoder.getstate()[0])  # bytes of a character that is not whole
        first, rest = self._decoder.decode(piece[:1]), self._decoder.decode(piece[1:])
        goes_on = piece[:1] and piece[0] & 0xC0 == 0x80 and len(first) < 2  # UTF-8: 10xxxxxx
        broken = held and piece and not goes_on  # what was held is a U+FFFD before this token
        offset = self._num_characters + bool(broken)
        self._num_characters += len(first) + len(rest)
        return max(0, offset)


def _by_text(position: TokenLogprobs) -> dict[str, float]:
    """Text → log-probability; of two tokens with one text (pieces of bytes) the likelier."""
    best: dict[str, float] = {}
    for _, one in _likeliest(position, len(position)):
        best.setdefault(one.decoded_token or "", number(one.logprob))
    return best


def prompt_logprobs(
    scored: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's shape: for each prompt token, token id → logprob, rank, decoded_token."""
    if scored is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": number(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in position.items()
        }
        for position in scored
    ]
