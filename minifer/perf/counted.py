"""The bytes a forward pass really touches, counted while it runs: what a cost model is checked by.

A `TorchDispatchMode` sees every operation torch performs. An operation that makes a view moves
nothing, and neither does one whose result is empty. Any other reads its arguments and writes its
result; whose memory an argument lies in, a parameter's or the KV cache's, says what kind of traffic
it is. What is handed to numpy is read there once; what numpy writes is not seen.

What `perf.costs` says of weights and KV is exact for `TorchBackend` where nothing is padded:

- weights: each matrix whole, once a step; of the embedding one row a token, tied or not. With
  codes for matrices it is not exact: unpacking reads and writes them on its way.
- KV read: the context of every request once, K and V. Decode rows of unequal contexts are padded
  to the longest, so B requests read B · longest instead of the sum (`padded_kv_read`);
- KV written: one token's K and V for each token of the step.

Activations are not exact, and larger: the cost model counts what operations must exchange, while
torch's are smaller ones (a norm is five), and gathered keys and values are written and read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minifer.config import ModelConfig
from minifer.perf.costs import kv_bytes_per_token
from minifer.weights.quantized import weight_tensors


@dataclass(frozen=True)
class CountedBytes:
    """One forward pass. activations: everything that is neither a parameter nor the KV cache."""

    weights: int
    kv_read: int
    kv_written: int
    activations: int

    @property
    def kv(self) -> int:
        return self.kv_read + self.kv_written


class ByteCounter(TorchDispatchMode):
    """Counts while it is entered; `result` says what.

    weights, kv: tensors whose memory counts as such, views of it included.
    """

    def __init__(self, weights: Iterable[Tensor], kv: Iterable[Tensor]) -> None:
        super().__init__()
        self._owner = {_memory(tensor): "weights" for tensor in weights}
        self._owner |= {_memory(tensor): "kv" for tensor in kv}
        self._read = {"weights": 0, "kv": 0, "activations": 0}
        self._written = dict(self._read)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes two seconds, to switch it off

    def result(self) -> CountedBytes:
        read, written = self._read, self._written
        weights = read["weights"] + written["weights"]
        activations = read["activations"] + written["activations"]
        return CountedBytes(weights, read["kv"], written["kv"], activations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        empty = isinstance(out, Tensor) and out.numel() == 0
        if not (empty or name in _NO_TRAFFIC or _is_view(func, args, out)):
            self._count(name, [*_tensors(args), *_tensors((kwargs or {}).values())], out)
        return out

    def count_read(self, tensor: Tensor) -> None:
        """Somebody else than torch reads all of it."""
        self._read[self._kind(tensor)] += tensor.nbytes

    def _count(self, name: str, read: list[Tensor], out: Any) -> None:
        if name in _IN_PLACE:  # the first is written, in part: as much as the others bring
            target, *read = read
            brought = target if name == "fill_" else read[-1]
            self._written[self._kind(target)] += brought.nbytes
        elif name in _SELECTS:  # of the first only what comes out is read
            source, *read = read
            self._read[self._kind(source)] += out.nbytes
        for tensor in read:
            self._read[self._kind(tensor)] += tensor.nbytes
        if name not in _IN_PLACE:
            for tensor in _tensors(out if isinstance(out, tuple | list) else [out]):
                self._written[self._kind(tensor)] += tensor.nbytes

    def _kind(self, tensor: Tensor) -> str:
        return self._owner.get(_memory(tensor), "activations")


class _ToNumpy(TorchFunctionMode):
    """`Tensor.numpy` is no operation, so the other mode does not see it."""

    def __init__(self, counter: ByteCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.numpy:
            self._counter.count_read(args[0])
        return func(*args, **(kwargs or {}))


_SELECTS = ("embedding", "gather", "index", "index_select")
_IN_PLACE = ("copy_", "index_put_", "_index_put_impl_", "fill_", "masked_fill_")
_NO_TRAFFIC = ("empty", "empty_like", "lift_fresh", "detach", "detach_")


def _is_view(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Does the result lie in an argument's memory, unwritten? `to` may return its argument."""
    results = func._schema.returns
    if not results or any(r.alias_info is None or r.alias_info.is_write for r in results):
        return False
    first = next(iter(_tensors(out if isinstance(out, tuple | list) else [out])), None)
    return first is not None and any(_memory(first) == _memory(a) for a in _tensors(args))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among arguments, and in the lists among them (of `cat`, of an index)."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class CountedStep:
    """batch: its (query, context) pairs. num_logits: rows of the head, both as `perf.costs` wants
    them. seen: what it touched."""

    batch: tuple[tuple[int, int], ...]
    num_logits: int
    seen: CountedBytes


class CountingRunner:
    """Stands before an engine's runner and counts every forward pass.

    steps: one `CountedStep` each.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[CountedStep] = []

    def forward(self, step: Any) -> Tensor:
        kv = (*self.runner.kv.keys, *self.runner.kv.values)
        logits, counted = count_bytes(
            lambda: self.runner.forward(step), weight_tensors(self.runner.model), kv
        )
        self.steps.append(CountedStep(batch_of(step), len(step.logits_rows), counted))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def count_bytes(
    call: Callable[[], Any], weights: Iterable[Tensor], kv: Iterable[Tensor]
) -> tuple[Any, CountedBytes]:
    """Run `call`; returns its result and what it touched."""
    with torch.inference_mode(), ByteCounter(weights, kv) as counter, _ToNumpy(counter):
        result = call()
    return result, counter.result()


def batch_of(step: Any) -> tuple[tuple[int, int], ...]:
    """The (query, context) pairs of a step's input."""
    starts = step.query_start
    queries = [end - start for start, end in pairwise(starts)]
    return tuple(zip(queries, step.seq_lens, strict=True))


def padded_kv_read(
    config: ModelConfig, batch: Sequence[tuple[int, int]], element_bytes: float
) -> float:
    """Bytes `paged_attention` reads: requests with one query are padded to the longest of them."""
    single = [context for query, context in batch if query == 1]
    several = sum(context for query, context in batch if query > 1)
    tokens = several + len(single) * max(single, default=0)
    return tokens * kv_bytes_per_token(config, element_bytes)
