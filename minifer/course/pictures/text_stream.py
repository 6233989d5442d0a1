"""Pictures of lecture 8: bytes and text that have to wait before a reader may see them.

The first half makes plain values, which claims and tests check; the second half draws them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minifer import Engine, EngineConfig, SamplingParams
from minifer.course.example import TRIO, tiny
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    REQUEST_COLOURS,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
)
from minifer.course.pictures.sampling import piece
from minifer.events import Event
from minifer.outputs import CompletionOutput
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.guards.regex_check import RegexCheck
from minifer.postprocessing.guards.safety import SafetyCheck, SafetyHook, WordListCheck
from minifer.postprocessing.hooks import TokenHook, finish_hooks
from minifer.text.tokenizer import Tokenizer
from minifer.weights.pull import pulled_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The engine's checks stand here too, so that a notebook finds them in one place.
__all__ = [
    "REPLIES", "RegexCheck", "SafetyHook", "StreamedToken", "WordListCheck", "guarded", "held_by",
    "held_figure", "random_chunks", "scripted", "served_with", "smollm_pieces", "stream_data",
    "stream_figure", "waiting",
]  # fmt: skip

# What the requests A, B and C are made to say where a picture needs emoji and a stop string.
REPLIES: Mapping[str, str] = MappingProxyType({"A": "Hi 👋 you!", "B": "日本 ME", "C": "AN END"})


class Script:
    """Stands before the engine's runner and makes the model say given texts, token by token."""

    def __init__(self, runner: Any, replies: Mapping[str, str]) -> None:
        self.runner = runner
        self.replies = {name: tiny().tokenizer.encode(text) for name, text in replies.items()}

    def forward(self, step: Any) -> Tensor:
        logits = self.runner.forward(step).clone()
        for entry, row in step.sampled:
            request = entry.request
            token = self.replies[request.request_id][request.num_output_tokens]
            logits[row, token] = logits[row].max() + 10
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def scripted(replies: Mapping[str, str] = REPLIES) -> Callable[[Engine], None]:
    """`prepare` of the book's `run`: everything is the engine's but the words."""

    def prepare(engine: Engine) -> None:
        engine.runner = Script(engine.runner, replies)

    return prepare


@dataclass(frozen=True)
class StreamedToken:
    """One token on its way to the reader.

    byte: the token's id, of a vocabulary of bytes. released: the text that came out with it.
    held: bytes drawn so far that have not come out.
    """

    request_id: str
    step: int
    byte: int
    released: str
    held: int


def stream_data(events: Sequence[Event]) -> list[StreamedToken]:
    """One value a drawn token, from events of a byte-level model alone."""
    drawn: dict[str, list[tuple[int, int]]] = {}
    released: dict[tuple[str, int], str] = {}
    for event in events:
        name, at = event.request_id or "", event.token_range
        if event.name == "token.sampled" and at:
            drawn.setdefault(name, []).append((event.step, event.data["token_id"]))
        elif event.name == "text.released" and at:
            released[name, len(drawn[name]) - 1] = event.data["text"]
    tokens = []
    for name, draws in drawn.items():
        held = 0
        for place, (step, byte) in enumerate(draws):
            text = released.get((name, place), "")
            held += 1 - len(text.encode())
            tokens.append(StreamedToken(name, step, byte, text, held))
    return tokens


def held_by(check: SafetyCheck | None, text: str) -> list[int]:
    """Characters that one safety check holds back after each character of a text."""
    hook, released, held = SafetyHook([check] if check else []), 0, []
    for place, character in enumerate(text, start=1):
        released += len(hook.on_token(0, character).text)
        held.append(place - released)
    return held


def waiting(matcher: Any, text: str) -> tuple[str, int]:
    """Text through a stop matcher, a character at a time, up to its hit.

    matcher: has push, held and hit, as `StopStrings`. Returns what was released, and the number of
    characters held back, added up over the characters of the text.
    """
    released, held = "", 0
    for character in text:
        released += matcher.push(character)
        held += len(matcher.held)
        if matcher.hit:
            break
    return released, held


def random_chunks(rng: random.Random, letters: str, count: int) -> list[str]:
    """A text of these letters in `count` chunks of one to four."""
    return ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(count)]


def smollm_pieces(text: str) -> list[str] | None:
    """What each token of SmolLM2 releases on a stream; None where it was not pulled."""
    folder = pulled_model()
    if folder is None:
        return None
    tokenizer = Tokenizer.from_dir(folder)
    stream = IncrementalDetokenizer(tokenizer.decode)
    return [stream.push(token) for token in tokenizer.encode(text)]


def served_with(hooks: Sequence[TokenHook], *, max_tokens: int = 12) -> CompletionOutput:
    """The engine's greedy answer to A's prompt with hooks on its text."""
    config = EngineConfig(num_kv_blocks=16)
    with Engine.from_loaded(tiny(), config) as engine:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        engine.add_request("A", TRIO["A"][0], params, hooks=hooks)
        while engine.has_unfinished_requests:
            outputs = engine.step()
    return outputs[0].outputs[0]


def guarded(hook: TokenHook, chunks: Sequence[str]) -> tuple[str, str | None]:
    """Chunks of text through one hook: what is released, and the finish reason it gives."""
    text = ""
    for chunk in chunks:
        verdict = hook.on_token(0, chunk)
        text += verdict.text
        if verdict.finish_reason:
            return text, verdict.finish_reason
    last = finish_hooks([hook], "")
    return text + last.text, last.finish_reason


# -- drawings


def stream_figure(events: Sequence[Event], title: str) -> Figure:
    """A row a request, a column a step: each byte drawn, hatched while it waits, and the text
    that left with it below."""
    from matplotlib.patches import Rectangle

    tokens = stream_data(events)
    names = sorted({token.request_id for token in tokens})
    last = max(token.step for token in tokens)
    figure = new_figure(0.62 * last + 1.0, 0.95 * len(names) + 1.2)
    axes = figure.subplots()
    for token in tokens:
        row = names.index(token.request_id)
        waits = not token.released
        axes.add_patch(
            Rectangle((token.step - 0.46, row - 0.42), 0.92, 0.42,
                      facecolor=PALETTE["waiting"] if waits else REQUEST_COLOURS[row],
                      hatch=HATCHES["waiting"] if waits else "", edgecolor="white", linewidth=1)
        )  # fmt: skip
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1} if waits else None
        axes.text(
            token.step,
            row - 0.21,
            piece(token.byte),
            ha="center",
            va="center",
            fontsize=9,
            bbox=box,
        )
        if token.released:
            # The plain font has no emoji: one is named.
            text = "".join(c if ord(c) < 0x2000 else f"U+{ord(c):X}" for c in token.released)
            axes.text(token.step, row + 0.17, f"'{text}'", ha="center", va="center", fontsize=9)
    axes.set_xlim(min(token.step for token in tokens) - 0.6, last + 0.6)
    axes.set_ylim(len(names) - 0.55, -0.55)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(min(token.step for token in tokens), last + 1))
    axes.set_xlabel("engine step (the byte drawn; below it, the text that left)")
    legend = [patch(f"{n}, text leaves", REQUEST_COLOURS[i]) for i, n in enumerate(names)]
    legend.append(patch("held back", PALETTE["waiting"], HATCHES["waiting"]))
    finish(figure, axes, title, legend)
    return figure


def held_figure(series: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Characters held back after each character of a text, a curve a check."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    for (label, held), (colour, _, line) in zip(series.items(), SERIES, strict=False):
        places = range(1, len(held) + 1)
        axes.step(places, held, where="post", color=colour, linestyle=line, label=label)
    label_axes(axes, title=title, x="characters of the reply", y="characters held back")
    return figure
