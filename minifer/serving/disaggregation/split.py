"""How many workers there are of each kind."""

from __future__ import annotations

from dataclasses import dataclass

from minifer.routing.policy import Role

MAX_WORKERS = 64  # of each kind


@dataclass(frozen=True)
class Split:
    """How many workers of each kind: `2:3` is two that prefill and three that decode.

    Raises `ValueError` for anything else.
    """

    prefill: int
    decode: int

    @classmethod
    def of(cls, text: str) -> Split:
        prefill, colon, decode = text.partition(":")
        if not (colon and prefill.isdecimal() and decode.isdecimal()):
            raise ValueError(f"disaggregate must be P:D such as 1:2, got {text!r}")
        return cls(int(prefill), int(decode))

    def __post_init__(self) -> None:
        if not (1 <= self.prefill <= MAX_WORKERS and 1 <= self.decode <= MAX_WORKERS):
            raise ValueError(
                f"disaggregate must be 1 to {MAX_WORKERS} workers of each kind, "
                f"got {self.prefill}:{self.decode}"
            )

    @property
    def roles(self) -> dict[str, Role]:
        """The name of each worker, and what it is for."""
        prefill = {f"prefill-{i}": Role.PREFILL for i in range(self.prefill)}
        return prefill | {f"decode-{i}": Role.DECODE for i in range(self.decode)}
