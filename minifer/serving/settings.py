"""What whoever runs the server decides; checked when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

KEY_VARIABLE = "MINIFER_API_KEY"


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server. Raises `ValueError` naming the setting, value and limit.

    served_model_name: what `/v1/models` lists and the `model` of a request must be; None: the
        engine's model.
    api_key: what `Authorization: Bearer …` must carry on every route but `/` and `/health`.
    max_queue: prompts that may be open (running or waiting) before a request gets a 429.
    max_body_bytes: of one request. body_timeout: seconds it may take to arrive.
    max_prompts: prompts of one completions request.
    max_logprobs: largest `logprobs`, `top_logprobs` and `prompt_logprobs`; -1: no limit.
    max_subscribers: clients that may watch `/events` at once.
    shutdown_timeout: seconds open requests may go on after the first SIGTERM or SIGINT.
    """

    served_model_name: str | None = None
    api_key: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 4 * 1024**2
    body_timeout: float = 30.0
    max_prompts: int = 64
    max_logprobs: int = 20
    max_subscribers: int = 16
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_bytes", "max_prompts", "max_subscribers"):
            check_number(name, getattr(self, name), int, 1, "an integer of at least 1")
        check_number("max_logprobs", self.max_logprobs, int, -1, "an integer of at least -1")
        for name in ("body_timeout", "shutdown_timeout"):
            check_number(name, getattr(self, name), (int, float), 0, "at least 0 seconds")
        if self.api_key is not None and not _is_key(self.api_key):
            raise ValueError(
                "api_key must be printable ASCII, not empty, and not begin or end with a blank"
            )
        if self.served_model_name == "":
            raise ValueError("served_model_name must not be empty")


def _is_key(key: str) -> bool:
    """Could it be sent? A header holds neither line ends nor blanks at its ends."""
    return key.isascii() and key.isprintable() and 0 < len(key) == len(key.strip())


def check_number(name: str, value: Any, kind: Any, low: float, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value < math.inf:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
