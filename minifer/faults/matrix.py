"""Faults × detectors: who notices what, found out by running it.

Every fault is on during one run of `workload.py`, with all detectors attached, and during a second
one in debug mode. A detector *catches* a fault when it raises an alarm with the fault and none in
the same run without it; the first alarm is kept as the witness. One that needs debug mode must
also be needed: what the engine says without it, debug mode has not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.faults import registry, workload
from minifer.faults.probes import DETECTORS
from minifer.faults.registry import Fault
from minifer.faults.watch import Watch

Alarms = dict[str, list[str]]  # detector → what it said


@dataclass(frozen=True)
class Matrix:
    """caught[fault][detector]: the first alarm, for detectors that caught it.

    false_alarms: detector → what it said without a fault.
    """

    detectors: Mapping[str, str]  # name → title
    caught: Mapping[str, Mapping[str, str]]
    false_alarms: Mapping[str, Sequence[str]]

    @property
    def missed(self) -> list[str]:
        """Faults that nobody caught."""
        return [fault for fault, witnesses in self.caught.items() if not witnesses]

    def table(self) -> str:
        """The matrix as text: a row a fault, a column a detector.

        ● caught, · silent, ✕ of no use: it raised an alarm without a fault too.
        """
        names = list(self.detectors)
        width = max(map(len, self.caught)) + 2
        lines = [f"{i:>{width + 3}}  {name}" for i, name in enumerate(names, start=1)]
        lines.append(" " * width + "".join(f"{i:>3}" for i in range(1, len(names) + 1)))
        for fault, witnesses in self.caught.items():
            marks = ("✕" if n in self.false_alarms else "·●"[n in witnesses] for n in names)
            lines.append(f"{fault:<{width}}" + "".join(f"  {mark}" for mark in marks))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "detectors": dict(self.detectors),
            "caught": {fault: dict(found) for fault, found in self.caught.items()},
            "false_alarms": {name: list(said) for name, said in self.false_alarms.items()},
            "missed": self.missed,
        }


def build_engine(loaded: Any, **options: Any) -> Engine:
    """An engine around a `LoadedModel`; several may share the model.

    Its KV memory holds what a pool holds after a day of service: plausible numbers. (What the
    system hands out is zeros in one process and NaN in the next.) Debug mode poisons it.
    """
    engine = Engine.from_loaded(loaded, EngineConfig(**options))
    if not engine.config.debug:
        kv: Any = engine.runner.kv  # type: ignore[attr-defined]
        generator = torch.Generator(kv.keys[0].device).manual_seed(0)
        for tensor in (*kv.keys, *kv.values):
            tensor.normal_(generator=generator)
    return engine


def observe(loaded: Any, fault: Fault | None, debug: bool) -> Alarms:
    """One run of the workload. fault: None for a healthy engine."""
    kinds = [kind for kind in DETECTORS if kind.debug == debug]
    watch = Watch(build_engine(loaded, **workload.OPTIONS, debug=debug), kinds)
    with fault.inject(watch.engine) if fault else nullcontext():
        try:
            workload.serve(watch)
        except Exception:  # the detectors have been told; a server would be down
            if fault is None:
                raise
    return {detector.name: detector.alarms for detector in watch.detectors}


def demonstrate(loaded: Any, fault: Fault) -> tuple[str, str]:
    """The fault's scene on a healthy engine and on a broken one."""
    options = {"num_kv_blocks": 64, **fault.options}
    healthy = fault.scene(build_engine(loaded, **options))
    broken = build_engine(loaded, **options)
    with fault.inject(broken):
        return healthy, fault.scene(broken)


def examine(loaded: Any, fault: Fault, healthy: Alarms) -> dict[str, str]:
    """Which detectors catch a fault: name → first alarm. healthy: both runs without a fault."""
    alarms = observe(loaded, fault, debug=False) | observe(loaded, fault, debug=True)
    if alarms["finite-logits"]:
        alarms["poison"] = []
    return {name: said[0] for name, said in alarms.items() if said and not healthy[name]}


def run_matrix(
    loaded: Any, names: Iterable[str] = (), progress: Callable[[str], None] = lambda name: None
) -> Matrix:
    """Run all faults, or those named. loaded: a `LoadedModel` with a tokenizer.

    progress: told the name of each fault that is done.
    """
    healthy = observe(loaded, None, debug=False) | observe(loaded, None, debug=True)
    caught = {}
    for name in names or registry.names():
        caught[name] = examine(loaded, registry.get(name), healthy)
        progress(name)
    titles = {kind.name: kind.title for kind in DETECTORS}
    return Matrix(titles, caught, {name: said for name, said in healthy.items() if said})
