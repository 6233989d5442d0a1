"""The text that the small models of this package are trained on: Python's own help topics.

`pydoc_data.topics` comes with every Python, so whoever trains has it, and no two machines with the
same Python differ. It is the one thing here that depends on the Python that runs.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from minifer.text.byte_tokenizer import BOS, EOS, IM_END, byte_tokenizer

TABLE_LINE = re.compile(r"^ *(\+[-=+]+\+|\|.*\|) *\n", re.MULTILINE)
HEADING = re.compile(r"(?:^|\n\n)([^\n ][^\n]*)\n[=*\-]{3,}\n\n")


def topics() -> dict[str, str]:
    """Every topic's name and text, as they come."""
    import pydoc_data.topics

    return pydoc_data.topics.topics


def sections() -> list[tuple[str, str]]:
    """(title, body) of every section of the topics, once: topics repeat each other."""
    found: dict[tuple[str, str], None] = {}
    for topic in topics().values():
        parts = HEADING.split(without_layout(topic))
        found |= dict.fromkeys(zip(parts[1::2], (p.strip() for p in parts[2::2]), strict=True))
    return list(found)


def without_layout(text: str) -> str:
    """Tables dropped, long runs of spaces cut: a small greedy model falls into them for good."""
    text = TABLE_LINE.sub("", text)
    text = re.sub(r"^ {9,}", " " * 8, text, flags=re.MULTILINE)
    return re.sub(r"(?<=\S) {3,}", "  ", text)


def token_stream(texts: list[tuple[str, str]]) -> Tensor:
    """int64 [tokens]: every section as a document and as a chat, one after the other.

    In the chat the user asks for the title and the answer is the section's beginning.
    """
    tokenizer = byte_tokenizer()
    tokens: list[int] = []
    for title, body in texts:
        tokens += tokenizer.encode(f"{BOS}{title}\n{'*' * len(title)}\n\n{body}\n{EOS}")
        question = [{"role": "user", "content": title}]
        tokens += tokenizer.apply_chat_template(question, add_generation_prompt=True)
        tokens += tokenizer.encode(beginning(body) + IM_END + "\n")
    return torch.tensor(tokens)


def beginning(body: str, limit: int = 400) -> str:
    """Whole paragraphs, up to `limit` characters but at least one."""
    paragraphs = body.split("\n\n")
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) + 2 > limit:
            break
        kept += "\n\n" + paragraph
    return kept


def held_out(texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Every sixteenth section: what nobody trains on."""
    return texts[7::16]


def split(texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token streams to train on and to test on."""
    unseen = held_out(texts)
    return token_stream([t for t in texts if t not in unseen]), token_stream(unseen)
