"""Reasoning in a stream of text: what stands between think tags, apart from the answer.

Qwen3 opens the tag itself; templates of DeepSeek-R1 and Qwen3.5 end the prompt inside it::

    <think>              I need …   </think>     The answer is …
    ^ reply begins       reasoning               content
                         ^ or here: inside=True

- The start tag counts only where the reply begins, after white space at most; later it is text.
- The first end tag ends the reasoning; all that follows is content, whatever it holds.
- A reply that never ends its reasoning is all reasoning, as in vLLM's `Qwen3ReasoningParser`
  (`vllm/reasoning/qwen3_reasoning_parser.py`): it was cut off while the model was thinking.

Every character comes out but those of the tags (vllm-project/vllm#14170 is about a parser that
lost a `<`).
"""

from __future__ import annotations

from typing import Protocol

START, END = "<think>", "</think>"


class ReasoningTokenizer(Protocol):
    """The part of a tokenizer that tells whether its model writes its reasoning down."""

    chat_template: str | None

    def token_to_id(self, token: str) -> int | None: ...


class ReasoningScanner:
    """Splits one reply into reasoning and content; see the rules at the top of the file.

    inside: the prompt has opened the tag (`starts_inside`); a start tag that the model writes
    nevertheless is left out. However the text is cut into chunks, the pieces join to the same two
    texts.
    """

    def __init__(self, inside: bool = False, start: str = START, end: str = END) -> None:
        self._inside = inside
        self._start, self._end = start, end
        self._begun = False  # the place for a start tag is behind
        self._text = ""  # not judged yet

    @property
    def inside(self) -> bool:
        """Is what comes now reasoning?"""
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; returns the reasoning and the content to release now."""
        self._text += text
        if not self._begun and not self._read_start():
            return "", ""
        reasoning = self._read_reasoning() if self._inside else ""
        if self._inside:
            return reasoning, ""
        content, self._text = self._text, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The reply has ended: what was held back was text."""
        rest, self._text = self._text, ""
        return (rest, "") if self._inside else ("", rest)

    def _read_start(self) -> bool:
        """Is it known whether the reply begins with the start tag? White space stays."""
        text = self._text.lstrip()
        if len(text) < len(self._start) and self._start.startswith(text):
            return False
        self._begun = True
        if text.startswith(self._start):
            self._inside = True
            self._text = self._text.replace(self._start, "", 1)
        return True

    def _read_reasoning(self) -> str:
        reasoning, tag, rest = self._text.partition(self._end)
        if tag:
            self._inside, self._text = False, rest
            return reasoning
        split = len(reasoning) - held_back(reasoning, self._end)
        self._text = reasoning[split:]
        return reasoning[:split]


def held_back(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag, but is not all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)


def writes_reasoning(tokenizer: ReasoningTokenizer) -> bool:
    """Does the model write think tags? Its chat template speaks of them, or they are tokens."""
    if START in (tokenizer.chat_template or "") or END in (tokenizer.chat_template or ""):
        return True
    return tokenizer.token_to_id(START) is not None and tokenizer.token_to_id(END) is not None


def starts_inside(prompt_text: str, final_message: str = "") -> bool:
    """Does the reply begin inside the tag: is the start tag the last thing in the prompt?

    final_message: the assistant's own text that the reply continues; there the tag may be open
    since further back. Elsewhere a user could have written it.
    """
    opened, closed = final_message.rfind(START), final_message.rfind(END)
    return prompt_text.rstrip().endswith(START) or opened > closed
