"""Pictures of lecture 8: distributions through the filters, and draws.

The first half makes plain values, which claims and tests check; the second half draws them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifer import Engine, SamplingParams
from minifer.course.example import TRIO, Run, run
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    REQUEST_COLOURS,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
)
from minifer.execution.logits_rules import apply_penalties
from minifer.execution.sampler import Sampler, SampleRow, scaled_logits, survivors
from minifer.outputs import RequestGroup
from minifer.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- data


def make_request(
    output: Sequence[int] = (), *, prompt: Sequence[int] = (0,), **params: Any
) -> Request:
    """A request that has drawn `output` so far, for calls of the sampler without an engine."""
    tokens = [*prompt, *output]
    group = RequestGroup("r", None)
    return Request("r", list(prompt), SamplingParams(**params), group, token_ids=tokens)


def draw(logits: Tensor, seeds: Sequence[int], **params: Any) -> list[int]:
    """One token of logits [V] for each seed, by the engine's sampler."""
    request = make_request(**params)
    rows = [SampleRow(0, request, seed) for seed in seeds]
    return [sampled.token_id for sampled in Sampler()(logits[None], rows)]


def spared_win_again(logits: Tensor, seeds: Sequence[int], **cut: Any) -> bool:
    """Does each token that wins a draw of logits [V] uncut, and that `cut` spares, win it again?

    Who is left runs the same race, whoever else was taken out.
    """
    spared = filter_stages(logits, **cut)[-1].support
    pairs = zip(draw(logits, seeds), draw(logits, seeds, **cut), strict=True)
    return all(again == winner for winner, again in pairs if winner in spared)


def logits_before(served: Run, request_id: str, output_index: int) -> Tensor:
    """The logits float32 [V] that a request's token number `output_index` was drawn from.

    Raises `ValueError` when the request has drawn no such token.
    """
    place = 0
    for step, logits in served.steps:
        for entry, row in step.sampled:
            if entry.request.request_id == request_id:
                if place == output_index:
                    return logits[row].float()
                place += 1
    raise ValueError(f"output_index must be below {place} for {request_id}, got {output_index}")


def rows_of(served: Run) -> dict[tuple[str, int], Tensor]:
    """(request, output index) → the logits [V] of every token that a run has drawn."""
    counts = {name: len(served.tokens(name)) for name in served.outputs}
    return {
        (name, place): logits_before(served, name, place)
        for name, count in counts.items()
        for place in range(count)
    }


def favourites(probabilities: Tensor, count: int = 5) -> str:
    """The likeliest tokens of a row and their probabilities, as a line of text."""
    p, tokens = probabilities.topk(count)
    pairs = zip(tokens.tolist(), p.tolist(), strict=True)
    return "  ".join(f"{piece(token)} {value:.2f}" for token, value in pairs)


def doubtful_rows(
    rows: Mapping[tuple[str, int], Tensor], temperature: float, draws: int = 50
) -> dict[tuple[str, int], int]:
    """Rows in which not every draw gives the largest logit → how many of the draws do."""
    hits = {
        key: draw(logits, range(draws), temperature=temperature).count(int(logits.argmax()))
        for key, logits in rows.items()
    }
    return {key: count for key, count in hits.items() if count < draws}


def alive(x: Tensor) -> list[int]:
    """Tokens of x [V] that are not masked, rising."""
    return x.isfinite().nonzero()[:, 0].tolist()


def penalized(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], **penalties: float
) -> list[float]:
    """What the engine's penalties make of logits, after a prompt and an output."""
    row = torch.tensor(logits, dtype=torch.float32)
    apply_penalties(row, make_request(output, prompt=prompt, **penalties))
    return row.tolist()


def in_company(params: SamplingParams, sampler: Any = None) -> dict[str, list[int]]:
    """A's tokens when it runs alone, with B and C, in short steps, and with preemptions.

    sampler: makes what stands in place of the engine's; None for the engine's own. Raises
    `RuntimeError` when the small cache preempts nobody: then it would prove nothing.
    """

    def prepare(engine: Engine) -> None:
        if sampler is not None:
            engine.sampler = sampler()

    def serve(names: str, **options: Any) -> Run:
        requests = {name: TRIO[name] for name in names}
        return run(requests, sampling=params, prepare=prepare, **options)

    small = serve("ABC", num_kv_blocks=6)
    if not any(event.name == "request.preempted" for event in small.events):
        raise RuntimeError("nobody was preempted with 6 blocks")
    runs = {
        "alone": serve("A"),
        "with B and C": serve("ABC"),
        "5 tokens a step": serve("ABC", max_num_batched_tokens=5),
        "preempted": small,
    }
    return {name: got.tokens("A") for name, got in runs.items()}


def logprob_gap(served: Run, request_id: str) -> float:
    """The largest distance between a reply's log-probabilities and the model's own."""
    reply = served.outputs[request_id].outputs[0]
    own = [
        float(logits_before(served, request_id, place).log_softmax(-1)[token])
        for place, token in enumerate(reply.token_ids)
    ]
    return max(abs(a - b) for a, b in zip(logprobs_of(served, request_id), own, strict=True))


def logprobs_of(served: Run, request_id: str) -> list[float]:
    """The log-probability of each token of a reply that asked for `logprobs`."""
    reply = served.outputs[request_id].outputs[0]
    pairs = zip(reply.token_ids, reply.logprobs or (), strict=True)
    return [entry[token].logprob for token, entry in pairs]


@dataclass(frozen=True)
class Stage:
    """The distribution after one filter. probabilities: float64 [V], they add up to 1."""

    name: str
    probabilities: Tensor

    @property
    def support(self) -> list[int]:
        """Tokens that can still be drawn, rising."""
        return self.probabilities.nonzero()[:, 0].tolist()


def filter_stages(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[Stage]:
    """What the engine's filters leave of logits [V], one after the other, in their order."""
    chosen = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    stages = [Stage("model", logits.double().softmax(-1))]
    upto: dict[str, Any] = {}
    for name, value in chosen.items():
        upto[name] = value
        params = SamplingParams(**upto)
        x = scaled_logits(logits[None].float(), logits.float().amax()[None], [params])
        values, ids = survivors(x, [params], logits.shape[0])
        kept = torch.full_like(x, -math.inf).scatter(-1, ids, values)
        stages.append(Stage(name.replace("_", "-"), kept[0].double().softmax(-1)))
    return stages


def entropy(probabilities: Tensor) -> float:
    """Bits: 0 for a certain token, log2 of n for n equal ones."""
    p = probabilities[probabilities > 0].double()
    return float(-(p * p.log2()).sum()) + 0.0  # no -0.0


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Pearson's statistic of draws against what they should be; no probability may be 0."""
    expected = [sum(counts) * p for p in probabilities]
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def chi_square_limit(degrees: int) -> float:
    """What right draws exceed less than once in a million times (Wilson and Hilferty, 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + 4.7534 * a**0.5) ** 3


def piece(token_id: int) -> str:
    """A byte as a label: the character where it is one, else two hexadecimal digits."""
    if token_id == 32:
        return "␣"
    if token_id == 10:
        return "\\n"
    return chr(token_id) if 32 < token_id < 127 else f"{token_id:02X}"


# -- drawings


def filters_html(stages: Sequence[Stage], *, tokens: int = 12) -> str:
    """Bars of the likeliest tokens before the filters and after each: for a widget."""
    order = torch.sort(stages[0].probabilities, descending=True, stable=True).indices[:tokens]
    heads = "".join(
        f'<th style="text-align:left;padding-right:16px">{html.escape(stage.name)}<br>'
        f"<small>{len(stage.support)} left, {entropy(stage.probabilities):.1f} bits</small></th>"
        for stage in stages
    )
    lines = []
    for token in order.tolist():
        cells = []
        for stage in stages:
            p = float(stage.probabilities[token])
            width = round(160 * p)
            bar = (
                f'<span style="display:inline-block;height:11px;width:{max(width, 1)}px;'
                f'background:{SERIES[0][0]}"></span> {p:.2f}'
                if p
                else "cut"
            )
            cells.append(f'<td style="text-align:left;min-width:200px">{bar}</td>')
        label = html.escape(piece(token))
        lines.append(f'<tr><th style="text-align:left">{label}</th>{"".join(cells)}</tr>')
    return (
        '<table style="font-size:13px;border-collapse:collapse">'
        '<tr><th style="padding-right:16px">token</th>'
        f"{heads}</tr>{''.join(lines)}</table>"
    )


def filters_figure(rows: Mapping[str, Sequence[Stage]], *, tokens: int = 8, title: str) -> Figure:
    """A line of panels a distribution, a panel a filter; a cut token keeps its place, empty."""
    names = [stage.name for stage in next(iter(rows.values()))]
    figure = new_figure(2.0 * len(names) + 0.6, 2.3 * len(rows) + 0.5)
    panels = figure.subplots(len(rows), len(names), sharey="row", squeeze=False)
    for line, (label, stages) in zip(panels, rows.items(), strict=True):
        order = torch.sort(stages[0].probabilities, descending=True, stable=True).indices[:tokens]
        for axes, stage in zip(line, stages, strict=True):
            p = stage.probabilities[order].tolist()
            axes.bar(range(len(p)), p, color=SERIES[0][0])
            for x, value in enumerate(p):
                if not value:
                    axes.plot(x, 0.02, marker="x", color=SERIES[1][0], markersize=6)
            axes.set_xticks(range(len(p)), [piece(t) for t in order.tolist()])
            head = f"{stage.name}: {len(stage.support)} left"
            label_axes(axes, title=head, x="token", y="")
        line[0].set_ylabel(f"{label}\nprobability", fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def entropy_figure(rows: Mapping[str, Tensor], temperatures: Sequence[float], title: str) -> Figure:
    """Bits of uncertainty against temperature, a curve a row of logits [V]."""
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    for (label, logits), (colour, marker, line) in zip(rows.items(), SERIES, strict=False):
        bits = [entropy((logits.double() / t).softmax(-1)) for t in temperatures]
        axes.plot(temperatures, bits, color=colour, marker=marker, linestyle=line, label=label)
    size = len(next(iter(rows.values())))
    axes.axhline(math.log2(size), color=PALETTE["waiting"], linewidth=1)
    axes.text(temperatures[0], math.log2(size) - 0.1, f"{size} equal tokens", va="top", fontsize=9)
    axes.set_ylim(-0.2, math.log2(size) + 0.4)
    label_axes(axes, title=title, x="temperature", y="entropy (bits)")
    return figure


def draws_figure(
    counts: Mapping[str, Sequence[int]],
    probabilities: Sequence[float],
    labels: Sequence[str],
    title: str,
) -> Figure:
    """Counts over expected counts, a series a way of drawing, with a band of four deviations."""
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    places = range(len(labels))
    for number, (name, found) in enumerate(counts.items()):
        colour, marker, _ = SERIES[number]
        total = sum(found)
        ratio = [c / (total * p) for c, p in zip(found, probabilities, strict=True)]
        shifted = [x + 0.16 * number - 0.08 for x in places]
        axes.plot(shifted, ratio, color=colour, marker=marker, linestyle="", label=name)
    band = [4 * math.sqrt((1 - p) / (total * p)) for p in probabilities]
    for x, b in zip(places, band, strict=True):
        axes.fill_between(
            [x - 0.3, x + 0.3], 1 - b, 1 + b, color=PALETTE["waiting"], alpha=0.5,
            label=None if x else "band of four deviations",
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{t}\n{p:.3f}" for t, p in zip(labels, probabilities, strict=True)])
    label_axes(axes, title=title, x="token and its probability", y="drawn ÷ expected")
    return figure


def answers_figure(groups: Mapping[str, Mapping[str, Sequence[int]]], title: str) -> Figure:
    """Token strips, one a run, in groups; what differs from the group's first strip is hatched."""
    from matplotlib.patches import Rectangle

    strips = {f"{g}, {run}": tokens for g, runs in groups.items() for run, tokens in runs.items()}
    truths = [next(iter(runs.values())) for runs in groups.values() for _ in runs]
    width = max(map(len, strips.values()))
    figure = new_figure(0.42 * width + 3.6, 0.5 * len(strips) + 1.4)
    axes = figure.subplots()
    for y, (tokens, truth) in enumerate(zip(strips.values(), truths, strict=True)):
        for x, (token, right) in enumerate(zip(tokens, truth, strict=True)):
            same = token == right
            face, hatch = (REQUEST_COLOURS[0], "") if same else ("white", HATCHES["decode"])
            axes.add_patch(
                Rectangle((x - 0.46, y - 0.38), 0.92, 0.76, facecolor=face, hatch=hatch,
                          edgecolor="white" if same else PALETTE["decode"], linewidth=0.5)
            )  # fmt: skip
            box = None if same else {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.text(x, y, piece(token), ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_yticks(range(len(strips)), list(strips))
    axes.set_xticks(range(width))
    axes.set_xlabel("output index of A")
    legend = [
        patch("as in the first strip of its kind", REQUEST_COLOURS[0]),
        patch("another token", "white", HATCHES["decode"], PALETTE["decode"]),
    ]
    finish(figure, axes, title, legend)
    return figure
