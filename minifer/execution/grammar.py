"""Structured output: before each draw, mask every token after which the reply cannot be completed.

llguidance compiles what was asked for (a JSON schema, a regular expression, a grammar) into an
automaton over bytes, and walks the vocabulary's prefix tree to find the tokens that it allows
(Moskal, Nori et al.; https://guidance-ai.github.io/llguidance/llg-go-brrr)::

    GrammarCompiler   one an engine: the vocabulary's tree, and grammars that were compiled
    GrammarState      one a sequence: where in its grammar it is; copied when the sequence forks

llguidance gets a vocabulary with one token more than the model has: the end. It is allowed where
the reply may end, so the model's own end tokens are, and no others. Where it is the only one the
reply is complete, whatever the model would like to add.

How it meets the other wishes of a request:

- `ignore_eos` and `min_tokens` take the end tokens away; a reply that may go on then does, and one
  that is complete ends all the same, with `stop`;
- `stop` and `stop_token_ids` end a reply at once, complete or not, as they always do;
- `allowed_token_ids`, `bad_words` and `logit_bias` act on top. When all of them together leave no
  token, the request fails, and no other;
- max_tokens cuts a reply off, which is then not complete (`length`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
import torch
from torch import Tensor

from minifer.structured_output import JSON_WHITESPACE, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from minifer.text.tokenizer import Tokenizer

_END = "<|minifer: end of structured output|>"  # no text of any vocabulary
_NUM_CACHED = 64  # compiled grammars that an engine keeps
# A tenth of llguidance's default: schemas of hundreds of fields need less, and a hostile pattern
# such as (a{1000}){1000} fails its request after 0.1 s instead of 1.5.
_COMPILE_FUEL = 100_000


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    tokenizer: whose tokens the model writes; None: every request for structure is refused.
    vocab_size: V of the model's logits; its tokens that the tokenizer does not know are masked.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary = lru_cache(maxsize=1)(self._load_vocabulary)
        self._start = lru_cache(maxsize=_NUM_CACHED)(self._compile)

    def compile(self, structured: StructuredOutput) -> GrammarState:
        """The state of a sequence that has written nothing yet.

        Safe to call from any thread: a server can compile before the engine's thread admits the
        request, which then finds it done.

        Raises `ValueError` with llguidance's message for what does not compile, and one that says
        what to do when there is no tokenizer or no llguidance.
        """
        return self._start(structured).copy()

    def _compile(self, structured: StructuredOutput) -> GrammarState:
        vocabulary, end = self._vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=_COMPILE_FUEL, verbose_errors=False)
        field = f"structured.{structured.kind}"
        matcher = LLMatcher(vocabulary, _source(structured), log_level=0, limits=limits)
        return GrammarState(matcher, end, self._vocab_size, field)

    def _load_vocabulary(self) -> tuple[LLTokenizer, int]:
        """The prefix tree of the vocabulary, and the id of the end token."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(
                'structured output needs llguidance: pip install "minifer[grammar]"'
            ) from error
        if self._tokenizer is None:
            raise ValueError("structured output needs a tokenizer, this engine has none")
        backend = tokenizers.Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.add_special_tokens([_END])
        end = backend.get_vocab()[_END]
        size = max(self._vocab_size, end + 1)
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=end), end


class GrammarState:
    """Where one sequence is in its grammar.

    The mask of the next token is computed when a token is accepted, once.

    complete: the reply is finished, nothing may follow. may_end: it is a whole reply as it is.
    """

    def __init__(self, matcher: LLMatcher, end: int, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._field = field
        self._look_ahead()

    def copy(self) -> GrammarState:
        """An independent state at the same place, for a sequence that forks."""
        new = object.__new__(GrammarState)
        new.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy())
        return new

    def accept(self, token_id: int) -> None:
        """Move on by one token that `mask` allows; raises `ValueError` for another."""
        self._matcher.consume_token(token_id)
        self._look_ahead()

    def after(self, token_ids: Iterable[int]) -> GrammarState | None:
        """A copy that has moved on by these tokens; None where one of them is not allowed."""
        new = self.copy()
        for token in token_ids:
            if not new.mask()[token]:
                return None
            new.accept(token)
        return new

    def mask(self, end_token_ids: Iterable[int] = ()) -> Tensor:
        """bool [V], True where a token is allowed; end_token_ids are where the reply may end."""
        bits = np.frombuffer(self._bits, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._end : self._end + 1] = False  # the model's V may reach beyond the tokenizer's
        if self.may_end:
            allowed[[token for token in end_token_ids if token < self._vocab_size]] = True
        return torch.from_numpy(allowed)

    def _look_ahead(self) -> None:
        """Which tokens may come next, one bit a token, the lowest bit of a byte first."""
        self._bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask says "the end" then
            raise ValueError(_refusal(self._field, self._matcher.get_error()))
        allowed = int.from_bytes(self._bits, "little")
        self.may_end = bool(allowed >> self._end)  # the end is the last token
        self.complete = allowed == 1 << self._end


def _source(structured: StructuredOutput) -> str:
    """What llguidance compiles."""
    from llguidance import LLMatcher

    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    if structured.choice is not None:
        texts = (json.dumps(text) for text in structured.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    schema = '{"type": "object"}' if structured.json is None else str(structured.json)
    whitespace: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=whitespace)
    except ValueError as error:
        raise ValueError(_refusal("structured.json", str(error))) from error


def _refusal(field: str, message: str) -> str:
    """One line, without the pointers that llguidance draws below the text and the text again."""
    lines = message.removesuffix("<non-verbose/>").splitlines()
    said = [line for line in lines if not re.match(r"\s*(\^+\s*$|\d+ \| )", line)]
    return f"{field}: {' '.join(' '.join(said).split())[:400]}"
