"""What a request keeps between steps while its tokens are in the middle of their loops."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SuspendedLoops:
    """Tokens between two iterations.

    h: [n, D], the state. term: float32 [n, D], what every iteration adds to it. loops: iterations
    each token has run. looping: which of the tokens go on (the others have left early).
    """

    h: Tensor
    term: Tensor
    loops: tuple[int, ...]
    looping: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.loops)
