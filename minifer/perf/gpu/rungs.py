"""How each rung decodes: eleven ways to run one step, each a single change to the one before.

    eager               one kernel an operation, launched one by one
    compile             torch.compile: operations fused, launched one by one
    reduce-overhead     the same in a CUDA graph: one launch
    triton              our own kernels, launched one by one
    triton-graph        the same in a CUDA graph
    triton-pdl          and each kernel starts while the one before it ends
    mega-grid           one kernel: all wait for all between two operations
    mega                counters: an instruction waits for those it reads from
    mega-l2             and asks for its weights before it waits, into the L2 cache
    mega-registers      and for its first tile of weights, into registers
    mega-epoch          and no counter is zeroed between two steps

A rung is built once a cell. Building may compile for a minute; it raises where a rung cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minifer.models.transformer import Transformer
from minifer.perf.gpu.cell import DecodeCase, DenseBackend
from minifer.perf.gpu.timing import captured


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Step:
    """run: one decode step for `batch.token_ids` → logits float32 [B, V], next tokens [B]; both
    may be overwritten by the next. begin: back to the cell's position, before a probe and before a
    sample of steps. check: after those; raises when the step gave up. notes: for the row."""

    run: Callable[[], tuple[Tensor, Tensor]]
    begin: Callable[[], None] = _nothing
    check: Callable[[], None] = _nothing
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """change: what it does that the rung before did not. triton: does it run our kernels?
    seconds: about what building takes, compilation included; the interpreter compiles nothing."""

    name: str
    change: str
    build: Callable[[DecodeCase], Step]
    triton: bool = False
    graph: bool = False
    seconds: float = 5.0

    def impossible(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, None if it can."""
        if self.graph and device.type != "cuda":
            return "CUDA graphs need a GPU"
        return None

    def interpreted(self, device: torch.device) -> bool:
        """On a CPU our kernels run in Triton's interpreter, whose time says nothing."""
        return self.triton and device.type != "cuda"


def eager(case: DecodeCase) -> Step:
    backend = DenseBackend()
    return Step(lambda: case.step(backend))


def compiled(case: DecodeCase, mode: str | None = None) -> Step:
    """torch.compile of the whole step, without a graph break."""
    backend = DenseBackend()
    # A graph replays addresses: tensors that stay where they are need not be copied before it.
    batch = case.batch
    lasting = (*case.kv.keys, *case.kv.values, batch.token_ids, batch.positions, batch.slot_mapping)
    for tensor in lasting:
        torch._dynamo.mark_static_address(tensor)
    step = torch.compile(lambda: case.step(backend), dynamic=False, fullgraph=True, mode=mode)
    skips = _graph_skips()

    def run() -> tuple[Tensor, Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        out: tuple[Tensor, Tensor] = step()
        return out

    for _ in range(3):  # compile, record, replay
        run()
    if _graph_skips() > skips:
        raise RuntimeError("torch.compile took no CUDA graph (its counter cudagraph_skips rose)")
    return Step(run)


def _graph_skips() -> int:
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def triton(case: DecodeCase, graph: bool = False, pdl: bool = False) -> Step:
    """The same model on `TritonBackend`."""
    from minifer.execution.backends.triton_backend import TritonBackend

    options: dict[str, Any] = {"pdl": True} if pdl else {}
    backend = TritonBackend(str(case.device), **options)
    if not graph:
        return Step(lambda: case.step(backend))
    replay, outputs = captured(lambda: case.step(backend))

    def run() -> tuple[Tensor, Tensor]:
        replay()
        return outputs

    return Step(run)


def mega(case: DecodeCase, sync: str = "counters", **options: Any) -> Step:
    """One launch a step, captured in a CUDA graph where the driver lets it be.

    options: of `MegakernelOptions`; prefetches are off unless named.
    """
    from minifer.execution.backends.megakernel import weights_of
    from minifer.kernels.mega.launch import Megakernel, MegakernelOptions, resident_programs
    from minifer.kernels.mega.schedule import assign, build
    from minifer.kernels.mega.shapes import decode_shape, kv_splits

    cell, batch = case.cell, case.batch
    programs = resident_programs(case.device)
    splits = kv_splits(cell.context, cell.batch, cell.config.num_kv_heads, programs)
    shape = decode_shape(cell.config, cell.batch, splits)
    switched_off = {"prefetch_bytes": 0, "prefetch_registers": False}
    machine = Megakernel(
        cell.config,
        weights_of(case.model),
        case.kv.keys,
        case.kv.values,
        mega_rope(case.model, cell.config.max_position_embeddings),
        batch=cell.batch,
        splits=shape.splits,
        max_blocks=batch.block_tables.shape[1],
        schedule=assign(build(shape, programs), programs, sync=sync),
        options=MegakernelOptions(**{**switched_off, **options}),
    )
    machine.set_step(
        batch.token_ids.tolist(), batch.positions.tolist(), batch.block_tables.tolist()
    )
    token = machine.kernel_args()["TOKEN"]
    launch: Callable[[], object] = machine.launch
    notes: dict[str, Any] = {
        "programs": machine.num_programs,
        "instructions": machine.schedule.num_instructions,
        "splits": shape.splits,
    }
    if case.device.type == "cuda":
        machine.launch()
        machine.check()  # before anything else is launched: it may have given up
        try:
            launch, _ = captured(machine.launch)
            notes["graph"] = "captured"
        except RuntimeError as error:
            notes["graph"] = f"not captured: {error}"

    def run() -> tuple[Tensor, Tensor]:
        launch()
        return machine.logits, machine.tokens

    return Step(run, lambda: token.copy_(batch.token_ids[:, None]), machine.check, notes)


def mega_rope(model: Transformer, positions: int) -> Tensor:
    """float32 [positions, C]: cos, then sin."""
    return torch.cat(model.rotary(torch.arange(positions, device=model.norm.weight.device)), -1)


_L2: Mapping[str, Any] = {"prefetch_bytes": 65536}
_REGISTERS: Mapping[str, Any] = {"prefetch_registers": True}

RUNGS: Mapping[str, Rung] = MappingProxyType(
    {
        rung.name: rung
        for rung in (
            Rung("eager", "PyTorch, one kernel an operation", eager, seconds=1),
            Rung("compile", "torch.compile fuses operations", compiled, seconds=45),
            Rung(
                "reduce-overhead",
                "torch.compile with CUDA graphs: one launch",
                lambda case: compiled(case, "reduce-overhead"),
                graph=True,
                seconds=45,
            ),
            Rung("triton", "our kernels, launched one by one", triton, triton=True, seconds=20),
            Rung(
                "triton-graph",
                "the same in a CUDA graph",
                lambda case: triton(case, graph=True),
                triton=True,
                graph=True,
            ),
            Rung(
                "triton-pdl",
                "programmatic dependent launch: a kernel starts while the last one ends",
                lambda case: triton(case, graph=True, pdl=True),
                triton=True,
                graph=True,
                seconds=20,
            ),
            Rung(
                "mega-grid",
                "one kernel, a barrier of all programs between operations",
                lambda case: mega(case, sync="grid"),
                triton=True,
                seconds=10,
            ),
            Rung("mega", "counters instead of barriers", mega, triton=True, seconds=10),
            Rung(
                "mega-l2",
                "weights into the L2 cache before the wait",
                lambda case: mega(case, **_L2),
                triton=True,
                seconds=10,
            ),
            Rung(
                "mega-registers",
                "the first weight tile into registers before the wait",
                lambda case: mega(case, **_L2, **_REGISTERS),
                triton=True,
                seconds=10,
            ),
            Rung(
                "mega-epoch",
                "counters that count on: no memset between steps",
                lambda case: mega(case, **_L2, **_REGISTERS, epochs=True),
                triton=True,
                seconds=10,
            ),
        )
    }
)
