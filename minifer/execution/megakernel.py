"""Decode in one launch: the runner of backend="megakernel"."""

from __future__ import annotations

from minifer.execution.runner import ModelRunner


class MegakernelRunner(ModelRunner):
    """Prefill by the ordinary path, decode of up to 16 requests by the megakernel."""
