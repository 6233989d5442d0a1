"""Parcae, a looped transformer kept stable by a negative-diagonal A. Imported as `minifer.parcae`.

The package stands at the top of the tree as `parcae/` and is installed below `minifer`. Read in
this order: `injection` (the linear system, and what makes it stable), `layers` (the block), `model`
(the stages), `presets` (the published sizes).

Source: Prairie, Novack, Berg-Kirkpatrick, Fu, "Parcae: Scaling Laws For Stable Looped Language
Models", https://arxiv.org/abs/2604.12946.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifer.parcae.model import Parcae
    from minifer.parcae.presets import PRESETS, create_model

__all__ = ["PRESETS", "Parcae", "create_model"]

_HOMES = {"Parcae": "model", "PRESETS": "presets", "create_model": "presets"}


def __getattr__(name: str) -> Any:
    """Import on first use: this package needs torch, its name does not."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
