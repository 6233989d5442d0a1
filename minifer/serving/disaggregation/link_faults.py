"""Links that break, for tests: at random, before a block is sent."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from enum import Enum


class Fault(Enum):
    DROP = "drop"  # the connection is closed
    FLIP = "flip"  # one bit of the block arrives wrong
    STALL = "stall"  # nothing comes any more, and nobody says why


@dataclass
class LinkFaults:
    """drop, flip, stall: the chances that a block meets each of them. seed: of the chances.

    Raises `ValueError` for chances that are none.
    """

    drop: float = 0.0
    flip: float = 0.0
    stall: float = 0.0
    seed: int = 0
    _random: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chances = (self.drop, self.flip, self.stall)
        if not all(0 <= chance <= 1 for chance in chances) or sum(chances) > 1:
            raise ValueError(
                f"drop, flip and stall must be chances of at most 1 together, got {chances}"
            )
        self._random = random.Random(self.seed)

    @classmethod
    def of(cls, text: str) -> LinkFaults:
        """From words such as `drop=0.1,flip=0.05,seed=3`. Raises `ValueError`."""
        known = {f.name for f in fields(cls) if f.init}
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in known:
                raise ValueError(f"link faults are {', '.join(sorted(known))}, got {part!r}")
            try:
                values[name] = int(value) if name == "seed" else float(value)
            except ValueError:
                raise ValueError(f"{name} must be a number, got {value!r}") from None
        return cls(**values)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The words for `of`."""
        return f"drop={self.drop},flip={self.flip},stall={self.stall},seed={self.seed}"

    def draw(self) -> Fault | None:
        """What happens to the next block."""
        place = self._random.random()
        for fault in Fault:
            place -= getattr(self, fault.value)
            if place < 0:
                return fault
        return None

    def flip_a_bit(self, payload: bytearray) -> None:
        payload[self._random.randrange(len(payload))] ^= 1 << self._random.randrange(8)
