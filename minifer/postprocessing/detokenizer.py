"""From token ids to text, one token at a time.

A token is a piece of bytes, not of text: 👋 takes three SmolLM2 tokens, and none of them can be
shown alone. The detokenizer holds tokens back until they end at the end of a character::

    prompt ...  | settled: released, kept as context | pending: held back | next token
                0                             num_settled          len(window)

Only this window is decoded, so the cost of a token does not grow with the reply. The context is
there because SentencePiece drops the space before the first token it is given. The window is the
idea of Hugging Face TGI and of vLLM (`detokenize_incrementally`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
PROMPT_CONTEXT = 6  # tokens of the prompt that the first output token is decoded after
MAX_PENDING = 24  # tokens held back before the part that is certain is released
MAX_CUT = 3  # a cut character has at most 3 bytes, each at worst one REPLACEMENT
MAX_CUT_TOKENS = 12  # tokens that surely cover MAX_CUT times REPLACEMENT and a character before


class IncrementalDetokenizer:
    """The text of one sequence as it grows.

    decode: token ids → text, e.g. `Tokenizer.decode`; never raises on invalid UTF-8.
    prompt_tail: the prompt, or its last few tokens. Its text is never part of the output; tokens
        at its end that stop inside a character are not used.

    The chunks of `push` and the text of `flush` join to `decode(all output ids)` (after a prompt:
    with the space a SentencePiece decoder would drop). The one exception is SentencePiece with
    bytes that are not UTF-8: it decodes a whole run of byte tokens to U+FFFD even where the run
    began with characters, which a stream has released by then.

    `copy.copy` gives an independent copy: fields are replaced, never changed in place.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_tail: Sequence[int] = ()) -> None:
        window = list(prompt_tail[-PROMPT_CONTEXT:])
        while window and decode(window).endswith(REPLACEMENT):
            window.pop()
        self._decode = decode
        self._window = window
        self._num_settled = len(window)
        self._settled_text = decode(window)  # how the text of the window begins

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose text is not (wholly) released."""
        return len(self._window) - self._num_settled

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while it ends inside a character."""
        window = [*self._window, token_id]
        text = self._new_text(window)
        if text and not text.endswith(REPLACEMENT):
            self._settle(window)
            return text
        # A skipped special token or an empty piece shows nothing. Asked of two in a row, because
        # SentencePiece shows nothing for one leading space either.
        if not self._decode([token_id, token_id]):
            return ""
        self._window = window
        if self.num_held_tokens < MAX_PENDING:
            return ""
        return self._settle_part(text)

    def flush(self) -> str:
        """At the end: what is held back, U+FFFD for a character that was cut."""
        if not self.num_held_tokens:
            return ""
        text = self._new_text(self._window)
        self._settle(self._window)
        return text

    def _new_text(self, window: list[int]) -> str:
        text = self._decode(window)
        if text.startswith(self._settled_text):
            return text[len(self._settled_text) :]
        # SentencePiece: a bad byte took the bytes before it, long released, with it.
        return self._decode(window[self._num_settled :])

    def _settle(self, window: list[int]) -> None:
        """All is released: the pending tokens become the context of the next."""
        self._window = window[self._num_settled :]
        self._num_settled = len(self._window)
        self._settled_text = self._decode(self._window)

    def _settle_part(self, text: str) -> str:
        """Release all but what later bytes could still turn into a character.

        It may end inside a token, so it is the settled text, not a number of tokens, that says
        how far it went. The window may now begin inside a character: that adds some REPLACEMENT
        at its front, on the settled side, as UTF-8 is back in step one character later.
        """
        cut = min(MAX_CUT, len(text) - len(text.rstrip(REPLACEMENT)))
        self._window = self._window[-MAX_CUT_TOKENS:]
        self._num_settled = 0
        window_text = self._decode(self._window)
        self._settled_text = window_text[: len(window_text) - cut]
        return text[: len(text) - cut]
