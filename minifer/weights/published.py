"""Published models that people ask for by name, and that minifer cannot fetch by that name."""

from __future__ import annotations

PARCAE_TOKENIZER = "SandyResearch/parcae-tokenizer"

# Preset of `minifer.parcae` → its repository on the Hugging Face hub.
PARCAE_REPOSITORIES = {
    "parcae-140m": "SandyResearch/parcae-140m",
    "parcae-370m": "SandyResearch/parcae-370m",
    "parcae-770m": "SandyResearch/parcae-770m",
    "parcae-1.3b": "SandyResearch/parcae-1.3b",
}

# What the authors' configurations and hub cards call them → preset. No repository is called so.
PARCAE_OTHER_NAMES = {
    "parcae-small-140m": "parcae-140m",
    "parcae-medium-370m": "parcae-370m",
    "parcae-large-770m": "parcae-770m",
    "parcae-xlarge-1_3b": "parcae-1.3b",
}


def preset_called(name: str) -> str | None:
    """The preset that another of its names stands for, with or without the authors' organisation;
    None for any other name. Case does not matter."""
    return PARCAE_OTHER_NAMES.get(name.lower().removeprefix("sandyresearch/"))


def published_elsewhere(name: str) -> str | None:
    """What to do about the name of a published model that cannot be loaded by it; None if it can.

    A name with an organisation is left to the hub, unless no such repository exists.
    """
    preset = preset_called(name)
    if preset is not None:
        begin = f"model {name!r} is the authors' name of {preset}"
    elif name.lower() in PARCAE_REPOSITORIES:
        preset = name.lower()
        begin = f"model {name!r} is not bundled"
    else:
        return None
    return (
        f"{begin}: download the repositories {PARCAE_REPOSITORIES[preset]} and {PARCAE_TOKENIZER}, "
        "run `minifer parcae convert SRC DST`, and give DST as the model"
    )
