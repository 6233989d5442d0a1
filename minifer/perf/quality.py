"""What smaller weights cost: perplexity, KL divergence and weight errors against float32.

The text ships with the package (`assets/prose.txt`, 1,190 words, written for this and nothing a
model was trained on). It is cut into windows; every token of a window but the first is scored, by
both models, from the same tokens before it. So two numbers can be compared when windows and tokens
are equal, and with no perplexity from elsewhere.

- perplexity: exp of the mean negative log-probability of the text's next token.
- KL: the mean of Σ p · ln(p / q) over the vocabulary, p float32's distribution and q the other's,
  in nats: how many more a token costs that is coded for q. It also sees what happens to tokens
  that the text does not hold, and is far less noisy than a difference of perplexities.
- top-1: how often both find the same token likeliest, the greedy choice.

Products run as they do in a decode step: a few tokens at a time, through the packed kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from minifer.execution.backend import Weight
from minifer.execution.quantized_linear import can_pack, packed_error
from minifer.execution.reference import DenseBackend, sequence_batch
from minifer.execution.runner import Runner
from minifer.kv.step_input import StepInput
from minifer.weights.quantized import QuantizedWeight, quantized_weights, weight_bytes

WINDOW = 256  # tokens; the logits of one are 50 MB with 49,152 words
TOKENS = 1536  # of the text at most: a byte-level vocabulary makes 6,000 of it
_TOKENS_AT_ONCE = 32  # of a product, so that codes are read packed
_ROWS_AT_ONCE = 4096  # of a matrix whose error is measured

Logits = Callable[[Any, Sequence[int]], Tensor]


@dataclass(frozen=True)
class WeightError:
    """Matrices of one kind, such as all `down_proj`, against float32's.

    rms: √(Σ error² / Σ weight²). greatest: the largest error ÷ the largest weight. codes: of the
    numbers that are stored. multiplied: of those the packed kernels multiply by (the same where
    nothing is packed).
    """

    kind: str
    stored: str
    codes_rms: float
    codes_greatest: float
    multiplied_rms: float
    multiplied_greatest: float


@dataclass(frozen=True)
class Quality:
    """One way to hold the weights. kl in nats a token; nbytes of all weights."""

    label: str
    nbytes: int
    tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    top1_agreement: float
    weights: tuple[WeightError, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quality(
    loaded: Any,
    reference: Any,
    *,
    label: str = "",
    text: str | None = None,
    logits: Logits | None = None,
    max_tokens: int = TOKENS,
) -> Quality:
    """Compare two `LoadedModel`s of one checkpoint.

    reference: in float32. text: in place of the one that ships. logits: (model, token ids) →
    float32 [T, V] of `loaded`, in place of `decode_logits`: for another back end `runner_logits`.
    What it multiplies by is then taken to be what is stored.

    Raises `ValueError` for a reference that is not float32, for models of different
    configurations, and for a text of less than two tokens.
    """
    dtype = next(reference.model.parameters()).dtype
    if dtype != torch.float32:
        raise ValueError(f"reference must be in float32, got {dtype}")
    if loaded.config != reference.config:
        raise ValueError(
            "reference must be the same model as loaded, got two configurations: load both from "
            "one checkpoint"
        )
    token_ids = reference.tokenizer.encode(fixed_text() if text is None else text)[:max_tokens]
    length = min(WINDOW, reference.config.max_position_embeddings)
    windows = [token_ids[i : i + length] for i in range(0, len(token_ids), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError(f"text must have at least 2 tokens, got {len(token_ids)}")
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for window in windows:
            truth = decode_logits(reference.model, window)
            other = (logits or decode_logits)(loaded.model, window)
            sums += _compare(truth[:-1], other[:-1].float(), torch.tensor(window[1:]))
        errors = tuple(weight_errors(loaded.model, reference.model, packed=logits is None))
    count = sum(len(window) - 1 for window in windows)
    reference_loss, loss, kl, same = (sums / count).tolist()
    return Quality(
        label=label or storage(loaded.model),
        nbytes=weight_bytes(loaded.model),
        tokens=count,
        perplexity=math.exp(loss),
        reference_perplexity=math.exp(reference_loss),
        kl=kl,
        top1_agreement=same,
        weights=errors,
    )


def fixed_text() -> str:
    """The text that ships with the package."""
    file = resources.files("minifer") / "assets" / "prose.txt"
    return file.read_text(encoding="utf-8")


class _FewTokens(DenseBackend):
    """Products as in decode steps: some rows of x at a time."""

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, QuantizedWeight):
            return super().linear(x, weight, bias, residual)
        parts = x.split(_TOKENS_AT_ONCE)
        product = torch.cat([DenseBackend.linear(self, part, weight, bias) for part in parts])
        return product if residual is None else residual + product


def decode_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits float32 [T, V] of one sequence, with the products of decode steps and no KV cache."""
    backend = _FewTokens()
    device = next(model.parameters()).device
    hidden = model(sequence_batch(token_ids, device), None, backend)
    logits: Tensor = model.logits(hidden, backend)
    return logits


def runner_logits(runner: Runner, block_size: int) -> Logits:
    """`decode_logits` of the runner of any back end, a few tokens a step, KV in blocks 0, 1, ….

    The runner's pool must hold `WINDOW` tokens, and its model is the one it was made of.
    """

    def all_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
        table = list(range(-(-len(token_ids) // block_size)))
        parts = []
        for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
            stop = min(start + _TOKENS_AT_ONCE, len(token_ids))
            step = StepInput(
                block_size,
                token_ids=list(token_ids[start:stop]),
                positions=list(range(start, stop)),
                slot_mapping=list(range(start, stop)),  # block b holds slots b · P and on
                query_start=[0, stop - start],
                seq_lens=[stop],
                block_tables=[table],
                logits_rows=list(range(stop - start)),
            )
            logits = runner.forward(step)
            assert isinstance(logits, Tensor)  # `greedy` is not set
            parts.append(logits)
        return torch.cat(parts)

    return all_logits


def _compare(truth: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows of logits [R, V]: float32's loss, the other's, KL, equal greedy tokens."""
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    rows = torch.arange(len(targets))
    kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
    same = truth.argmax(-1) == other.argmax(-1)
    columns = (-p[rows, targets].double(), -q[rows, targets].double(), kl, same.double())
    return torch.stack([column.sum() for column in columns])


def storage(model: Any) -> str:
    """How the weights of a model are held, in a word or two."""
    bits = sorted({weight.bits for _, weight in quantized_weights(model)})
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{' and '.join(map(str, bits))} bits, {dtype}" if bits else dtype


def weight_errors(model: Any, reference: Any, packed: bool = True) -> Iterator[WeightError]:
    """Of every kind of matrix, in the model's order. packed: torch's kernels multiply."""
    coded = dict(quantized_weights(model))
    kinds: dict[str, list[tuple[Weight, Tensor]]] = {}
    for name, truth in reference.named_parameters():
        if truth.dim() == 2:
            held = coded[name] if name in coded else model.get_parameter(name)
            kinds.setdefault(name.split(".")[-2], []).append((held, truth))
    for kind, pairs in kinds.items():
        stored = sorted({_stored(held) for held, _ in pairs})
        sums = [0.0, 0.0, 0.0]  # of squares: weights, errors of codes, of what is multiplied by
        most = [0.0, 0.0, 0.0]  # the greatest of each
        packs = packed and next(model.parameters()).dtype == torch.bfloat16
        for held, truth in pairs:
            for values in _slices(held, truth, packs):
                for i, value in enumerate(values):
                    value = value.detach().double()
                    sums[i] += float(value.square().sum())
                    most[i] = max(most[i], float(value.abs().max()))
        rms = [math.sqrt(part / sums[0]) for part in sums[1:]]
        greatest = [part / most[0] for part in most[1:]]
        yield WeightError(kind, ", ".join(stored), rms[0], greatest[0], rms[1], greatest[1])


def _slices(held: Weight, truth: Tensor, packs: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows at a time: float32's weights, errors of what is stored, and of what multiplies."""
    for start in range(0, truth.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        if not isinstance(held, QuantizedWeight):
            error = held[rows].float() - truth[rows]
            yield truth[rows], error, error
            continue
        error = held.rows(rows) - truth[rows]
        part = _rows(held, rows)
        multiplied = error + packed_error(part) if packs and can_pack(held) else error
        yield truth[rows], error, multiplied


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return weight.map_rows(lambda tensor: tensor[rows])


def _stored(held: Weight) -> str:
    if not isinstance(held, QuantizedWeight):
        return str(held.dtype).removeprefix("torch.")
    row = held.group_size == held.shape[1]
    return f"{held.bits} bits, a scale {'a row' if row else f'for {held.group_size}'}"


def table(rows: Sequence[Quality]) -> str:
    """All ways as text: one line each, then the weight errors of each. rows: at least one."""
    first = rows[0]
    wide = max(len("weights"), *(len(row.label) for row in rows))
    lines = [
        f"on {first.tokens:,} tokens of a fixed text; float32's perplexity is "
        f"{first.reference_perplexity:.3f}",
        "",
        f"{'weights':{wide}} {'MB':>8} {'perplexity':>11} {'× float32':>10} {'KL, nats':>10} "
        f"{'same top-1':>11}",
    ]
    lines += [
        f"{row.label:{wide}} {row.nbytes / 1e6:8.1f} {row.perplexity:11.3f} "
        f"{row.perplexity / row.reference_perplexity:10.4f} {row.kl:10.5f} "
        f"{row.top1_agreement:10.1%}"
        for row in rows
    ]
    lines += [
        "",
        "weight errors, RMS and greatest, in % of float32's; in brackets what the packed kernels",
        "multiply by, where that differs:",
        "",
    ]
    kinds = max(len(error.kind) for row in rows for error in row.weights)
    stored = max(len(error.stored) for row in rows for error in row.weights)
    lines += [
        f"{row.label:{wide}} {error.kind:{kinds}} {error.stored:{stored}} {_percent(error)}"
        for row in rows
        for error in row.weights
    ]
    return "\n".join(line.rstrip() for line in lines)


def _percent(error: WeightError) -> str:
    shown = f"{error.codes_rms:8.3%} {error.codes_greatest:8.3%}"
    if error.multiplied_rms != error.codes_rms:
        shown += f"  ({error.multiplied_rms:.3%} {error.multiplied_greatest:.3%})"
    return shown
