"""What the router carries from a prefill worker to a decode worker, in a header."""

from __future__ import annotations

import json
from dataclasses import dataclass

TICKET_HEADER = "x-minifer-kv-transfer"
TOKEN_HEADER = "x-minifer-kv-token"
MAX_TICKET = 16 * 1024  # characters


@dataclass(frozen=True)
class Ticket:
    """Where the blocks of a request's prompts can be had.

    host, port: of the prefill worker's sender. offers: their names there, one for each prompt; None
    for a prompt of which nothing is worth fetching.
    """

    host: str
    port: int
    offers: tuple[str | None, ...]

    def encode(self) -> str:
        """As the value of a header: printable ASCII."""
        return json.dumps([self.host, self.port, *self.offers])

    @classmethod
    def decode(cls, text: str) -> Ticket:
        """The opposite. Raises `ValueError` for a text that is none."""
        if len(text) > MAX_TICKET:
            raise ValueError(f"a ticket must have at most {MAX_TICKET} characters, got {len(text)}")
        try:
            host, port, *offers = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{TICKET_HEADER} must be a ticket, got {text!r:.60}") from None
        named = all(offer is None or isinstance(offer, str) for offer in offers)
        if not isinstance(host, str) or type(port) is not int or not named:
            raise ValueError(f"{TICKET_HEADER} must be a ticket, got {text!r:.60}")
        if not 0 < port < 65536:
            raise ValueError(f"a ticket's port must be in [1, 65536), got {port}")
        return cls(host, port, tuple(offers))
