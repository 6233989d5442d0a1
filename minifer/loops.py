"""What the house knows of a loop model: plain values, no tensors.

A loop model runs its middle layers, the *core*, T times with the same weights; the layers before
and after it run once. T is the *depth* or number of loops of a token. Each iteration of each core
layer makes keys and values of its own, so a KV slot is a pair (layer, iteration)::

    layer                 prelude      core                            coda
    iteration             once         0        1        …   T − 1     once
    KV slot, policy full  0 … P − 1 |  P …   |  P + R … | …          | P + T·R …
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INJECTIONS = ("diagonal", "concat", "add")
# What ends a step: the share of its requests that must be through, at least one.
LOOP_BATCHING = {"continuous": 0.0, "patient": 0.5, "lockstep": 1.0}

_POLICY = re.compile(r"full|terminal|(cyclic|first)-[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class LoopKVPolicy:
    """Which iterations of a core layer keep keys and values of their own.

    `full`: each. `first-m`: the first m; a later iteration makes none and attends to those of
    iteration m − 1. `cyclic-m`: iteration t writes slot t mod m, over what was there; `terminal`
    is cyclic-1, so that later tokens see what a token's last iteration left.

    Under `full` and `first-m` a slot is written once, and what a token sees of an earlier one
    does not depend on when either was computed. Where slots are overwritten it does: tokens of
    one pass see each other's current iteration, later ones only what was left. There a prompt
    must be computed in one pass and generated tokens one by one, and no prefix can be shared.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _POLICY.fullmatch(self.name) is None:
            raise ValueError(
                "loop_kv_policy must be full, terminal, cyclic-M or first-M with M of at least 1, "
                f"got {self.name!r}"
            )

    @property
    def kept(self) -> int | None:
        """Iterations that keep their keys and values; None: all."""
        if self.name == "full":
            return None
        return 1 if self.name == "terminal" else int(self.name.partition("-")[2])

    @property
    def overwrites(self) -> bool:
        return self.name.startswith(("terminal", "cyclic"))

    def num_slots(self, num_loops: int) -> int:
        """KV slots of one core layer, for tokens of up to `num_loops` loops."""
        return num_loops if self.kept is None else min(self.kept, num_loops)

    def slot(self, iteration: int) -> int:
        """Which of them an iteration attends to."""
        if self.kept is None:
            return iteration
        return iteration % self.kept if self.overwrites else min(iteration, self.kept - 1)

    def writes(self, iteration: int) -> bool:
        """Does an iteration make keys and values?"""
        return self.kept is None or self.overwrites or iteration < self.kept


@dataclass(frozen=True)
class LoopConfig:
    """The loop of a model, and how an engine runs it.

    prelude, core, coda: layers of the three stacks; core may not be 0. mean_recurrence: the mean
    depth it was trained with, and the default depth. mean_backprop_depth: loops that carried
    gradients. max_num_loops (0: as mean_recurrence) and kv_policy are the engine's choice: they
    decide the KV slots.
    """

    prelude: int
    core: int
    coda: int
    mean_recurrence: int = 8
    mean_backprop_depth: int = 4
    injection: str = "diagonal"
    prelude_norm: bool = True
    value_embeddings: bool = True
    max_num_loops: int = 0
    kv_policy: str = "full"

    def __post_init__(self) -> None:
        for name, least in (
            ("prelude", 0),
            ("core", 1),
            ("coda", 0),
            ("mean_recurrence", 1),
            ("mean_backprop_depth", 1),
            ("max_num_loops", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in ("prelude_norm", "value_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.injection not in INJECTIONS:
            raise ValueError(
                f"injection must be one of {', '.join(INJECTIONS)}, got {self.injection!r}"
            )
        LoopKVPolicy(self.kv_policy)

    @property
    def deepest(self) -> int:
        """The largest depth that KV is kept for. Asked, not stored: `replace(loop,
        mean_recurrence=16)` changes it too."""
        return self.max_num_loops or self.mean_recurrence

    def depth(self, asked: int | None) -> int:
        """Of a request: what it asks for, else the mean, as far as KV is kept."""
        return asked or min(self.mean_recurrence, self.deepest)

    @property
    def policy(self) -> LoopKVPolicy:
        return LoopKVPolicy(self.kv_policy)

    @property
    def num_layers(self) -> int:
        """Layers with weights of their own."""
        return self.prelude + self.core + self.coda

    @property
    def num_kv_slots(self) -> int:
        """P + S · R + C, where S is `policy.num_slots(deepest)`."""
        per_layer = self.policy.num_slots(self.deepest)
        return self.prelude + per_layer * self.core + self.coda

    def core_slot(self, iteration: int) -> int:
        """KV slot of the first core layer at an iteration; the others follow."""
        return self.prelude + self.policy.slot(iteration) * self.core

    @property
    def coda_slot(self) -> int:
        """KV slot of the first layer of the coda."""
        return self.num_kv_slots - self.coda

    def has_value_embedding(self, layer: int) -> bool:
        """Does layer 0 … P + R + C − 1 have a value embedding? Every second one, the last among
        them. The one rule for the tables and for the gates."""
        return self.value_embeddings and layer % 2 == (self.num_layers - 1) % 2
