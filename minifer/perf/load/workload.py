"""What is sent: sessions of one or more turns, made from a seed alone.

A prompt is a tuple of pieces. Pieces are token ids, for exact lengths, or words, where a server
takes text; nothing here asks which. Lengths, contents and arrivals draw from streams of their
own: another rate sends the same prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minifer.perf.load.arrivals import arrival_times

Pieces = tuple[int, ...] | tuple[str, ...]
Vocabulary = Sequence[int] | Sequence[str]

# Common words: most tokenizers have a token for each.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class Distribution:
    """Of lengths in pieces, or of seconds. Text form: see `parse`."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """ "128", "uniform:64:256", or "lognormal:MU:SIGMA:MAX" (of the natural logarithm).

        Raises `ValueError` for anything else.
        """
        kind, *rest = text.split(":") if ":" in text else ("constant", text)
        try:
            numbers = tuple(float(part) for part in rest)
        except ValueError:
            numbers = ()
        wanted = {"constant": 1, "uniform": 2, "lognormal": 3}.get(kind)
        if len(numbers) != wanted or not all(0 <= x < math.inf for x in numbers):
            raise ValueError(
                "a length must be N, uniform:MIN:MAX or lognormal:MU:SIGMA:MAX with numbers of at "
                f"least 0, got {text!r}"
            )
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise ValueError(f"the MIN of uniform:MIN:MAX must not be above its MAX, got {text!r}")
        return cls(kind, numbers)

    def draw(self, rng: random.Random) -> float:
        if self.kind == "constant":
            return self.parameters[0]
        if self.kind == "uniform":
            return rng.uniform(*self.parameters)
        mu, sigma, limit = self.parameters
        return min(rng.lognormvariate(mu, sigma), limit)

    def draw_length(self, rng: random.Random) -> int:
        """A whole number, at least 1; uniform over the integers MIN … MAX."""
        if self.kind == "uniform":
            low, high = self.parameters
            return max(1, rng.randint(math.ceil(low), math.floor(high)))
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True)
class Turn:
    """One request of a session: what its user adds to all that was said before.

    output_len: tokens asked for. think_time: seconds from the previous answer's end.
    """

    pieces: Pieces
    output_len: int
    think_time: float = 0.0


@dataclass(frozen=True)
class Session:
    """Turns that follow each other. arrival: seconds after the start; None: when there is room."""

    turns: tuple[Turn, ...]
    arrival: float | None = None


@dataclass(frozen=True)
class Workload:
    """How sessions look.

    num_groups, prefix_len: each session begins with the prefix of one of the groups, drawn evenly;
    0 for none. turns: requests of a session; more than one make a conversation.

    Raises `ValueError` when the numbers make no sense.
    """

    num_prompts: int
    input_len: Distribution
    output_len: Distribution
    num_groups: int = 0
    prefix_len: int = 0
    turns: int = 1
    think_time: Distribution = Distribution("constant", (0.0,))

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("num_groups", 0), ("prefix_len", 0), ("turns", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if bool(self.num_groups) != bool(self.prefix_len):
            raise ValueError(
                "prefix_groups and prefix_len belong together, got "
                f"{self.num_groups} and {self.prefix_len}"
            )

    def sessions(self, vocabulary: Vocabulary, seed: int) -> list[Session]:
        """Without arrivals; the same seed gives the same sessions."""
        lengths, contents = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/contents")
        prefixes = [draw(contents, vocabulary, self.prefix_len) for _ in range(self.num_groups)]
        sessions = []
        for _ in range(self.num_prompts):
            head: Pieces = prefixes[lengths.randrange(self.num_groups)] if prefixes else ()
            turns = []
            for k in range(self.turns):
                own = draw(contents, vocabulary, self.input_len.draw_length(lengths))
                turns.append(
                    Turn(
                        join(head, own) if k == 0 else own,
                        self.output_len.draw_length(lengths),
                        self.think_time.draw(lengths) if k else 0.0,
                    )
                )
            sessions.append(Session(tuple(turns)))
        return sessions


def draw(rng: random.Random, vocabulary: Vocabulary, count: int) -> Pieces:
    """`count` pieces, each as likely as the others."""
    return tuple(rng.choices(vocabulary, k=count))  # type: ignore[return-value]


def join(head: Pieces, tail: Pieces) -> Pieces:
    return (*head, *tail)


def with_arrivals(
    sessions: Sequence[Session], rate: float, burstiness: float, seed: int
) -> list[Session]:
    """The same sessions, arriving as `arrival_times` says."""
    times = arrival_times(len(sessions), rate, burstiness, seed)
    return [replace(s, arrival=t) for s, t in zip(sessions, times, strict=True)]
