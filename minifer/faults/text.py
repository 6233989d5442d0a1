"""Faults between logits and text: noise, detokenizing, stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minifer.engine import Engine
from minifer.execution import noise, sampler
from minifer.faults.registry import Fault, Source, github, patched
from minifer.faults.scenes import QUESTIONS, ask, written
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.stop_strings import StopStrings


@contextmanager
def shared_rng(engine: Engine) -> Iterator[None]:
    """One generator for everybody: a draw depends on who drew before."""
    generator = torch.Generator().manual_seed(0)

    def vocabulary_noise(
        seeds: Sequence[int], indices: Sequence[int], vocab_size: int, device: object = "cpu"
    ) -> Tensor:
        words = torch.randint(2**32, (len(seeds), vocab_size), generator=generator)
        return noise.exponential(words)

    def token_noise(seeds: Sequence[int], indices: Sequence[int], token_ids: Tensor) -> Tensor:
        return vocabulary_noise(seeds, indices, token_ids.shape[1])

    with patched(sampler, vocabulary_noise=vocabulary_noise, token_noise=token_noise):
        yield


@contextmanager
def held_bytes_dropped(engine: Engine) -> Iterator[None]:
    """A token that ends inside a character is forgotten instead of held back."""
    push = IncrementalDetokenizer.push

    def faulty(self: IncrementalDetokenizer, token_id: int) -> str:
        window = self._window
        text = push(self, token_id)
        if not text:
            self._window = window
        return text

    with patched(IncrementalDetokenizer, push=faulty):
        yield


@contextmanager
def stop_string_leaks(engine: Engine) -> Iterator[None]:
    """What may be the beginning of a stop string is sent before that is known."""
    push = StopStrings.push

    def faulty(self: StopStrings, text: str, *, armed: bool = True) -> str:
        released = push(self, text, armed=armed) + self.held
        self.held = ""
        return released

    with patched(StopStrings, push=faulty):
        yield


def _alone_and_not(engine: Engine) -> str:
    """The same request, with the same seed, alone and beside another."""
    alone = ask(engine, QUESTIONS[0], temperature=0.8, seed=7)[0]
    beside = ask(engine, QUESTIONS[0], QUESTIONS[1], temperature=0.8, seed=7)[0]
    return f"{written(alone)}\n{written(beside)}"


def _characters_of_three_bytes(engine: Engine) -> str:
    return written(ask(engine, QUESTIONS[2], temperature=0.8, seed=1)[0])


def _stop_string(engine: Engine) -> str:
    return written(ask(engine, QUESTIONS[1], stop=["expression list"])[0])


FAULTS = (
    Fault(
        name="shared-rng",
        title="One random generator for everybody",
        mechanism="Noise comes from one generator, in the order in which requests ask. What a "
        "request draws depends on how many others were in its batch.",
        symptom="The same prompt with the same seed gives another reply whenever the server is "
        "busy: no report can be reproduced.",
        sources=(
            github("vllm-project/vllm", 2514, "a generator of its own for every seeded request"),
            Source(
                "Thinking Machines: Defeating Nondeterminism in LLM Inference (2025)",
                "https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/",
            ),
        ),
        detectors=("replay",),
        inject=shared_rng,
        scene=_alone_and_not,
    ),
    Fault(
        name="held-bytes-dropped",
        title="Bytes of half a character are dropped",
        mechanism="A token may end inside of a character, whose bytes must be kept until the rest "
        "comes. Forgotten instead, they are missing, and the rest of the character means nothing.",
        symptom="Emoji, Chinese and curly quotation marks vanish or become �; English is perfect.",
        sources=(
            github("ai-dynamo/dynamo", 12630, "5 to 13 syllables lost of every Korean reply"),
            github("antonellof/ferrox", 124, "a character of two tokens becomes two U+FFFD"),
        ),
        detectors=("text-round-trip",),
        inject=held_bytes_dropped,
        scene=_characters_of_three_bytes,
    ),
    Fault(
        name="stop-string-leaks",
        title="The beginning of a stop string is sent",
        mechanism="A stop string comes token by token. What has been sent cannot be taken back, "
        "so everything that may still become the stop string must wait. Here it does not.",
        symptom="Replies end with a piece of the stop string; a tool's parser chokes on it.",
        sources=(
            github("vllm-project/vllm", 3574, "a prefix of the stop string is emitted"),
            github("vllm-project/vllm", 3672, "hold text back while it may be a stop string"),
            github("vllm-project/vllm", 2577, "a stop string in two tokens"),
        ),
        detectors=("text-round-trip",),
        inject=stop_string_leaks,
        scene=_stop_string,
    ),
)
