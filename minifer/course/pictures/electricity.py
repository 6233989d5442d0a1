"""The figures of lecture 01, and what they show: one model, one chip, and this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from minifer.config import ModelConfig
from minifer.course import example
from minifer.course.pictures.roofline import (
    Point,
    attainable,
    batch_rows,
    limit_figure,
    lines,
    powers_of_two,
    roofline,
)
from minifer.perf.costs import ElementBytes, decode_cost, num_parameters, prefill_cost, step_cost
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minifer.perf.steps import StepGroup
    from minifer.weights.resolve import LoadedModel

MIB = 2**20
ROWS = (1, 16, 64, 256, 512, 4096)
CONTEXTS = (1024, 8192, 32768)
CACHE_MIB = (0.125, 0.5, 2, 8, 32, 128, 512)
DECODES = ((1, 64), (2, 64), (3, 64), (4, 64), (16, 64), (2, 512))  # (requests, context)
CHUNKS = (16, 64, 256)
ALT: Mapping[str, str] = MappingProxyType(
    {
        "products": "Roofline of an H100, both axes logarithmic. The roof rises to the ridge at "
        "295 FLOPs a byte and is flat beyond. Products of 1, 16, 64 and 256 rows stand on the "
        "slope, of 512 and 4096 rows on the flat part.",
        "intensity": "Intensity over tokens in a step, 16 to 4096. The MLP product and the "
        "attention of a prompt rise and cross the H100's ridge of 295; the attention of decoding "
        "requests stays at 4.",
        "throughput": "Tokens a second over batch size on an H100, three contexts. All rise; the "
        "curve of 1,024 tokens flattens slowly, those of 8,192 and 32,768 early and end where "
        "80 GB are full.",
        "caches": "Bytes a second over the size of a buffer that is read again and again, 0.125 "
        "to 512 MiB, measured on this machine; the sizes of two models are marked.",
        "here": "Left: this machine's roofline, the model's operations on it, the engine's steps "
        "below. Right: nine steps, predicted and measured seconds: decode of 1, 2, 3, 4 and 16 "
        "requests of 64 tokens and 2 of 512, prefill of 16, 64 and 256 tokens.",
    }
)


def draw_products(config: ModelConfig, device: Device) -> Figure:
    """The widest product of a layer under the roof, by rows of its input."""
    points = []
    for rows in ROWS:
        cost = step_cost(config, [(rows, rows)])["gate_up"]
        points.append(
            Point(str(rows), cost.intensity, attainable(device, cost.intensity), "decode")
        )
    labels = {str(rows): f"{rows} row{'s' * (rows > 1)}" for rows in ROWS}
    unused = 1 - points[0].rate / device.peak_flops
    title = f"One row leaves {unused:.1%} of an H100's arithmetic unused"
    return roofline(device, points, labels=labels, title=title)


def draw_intensity(config: ModelConfig, device: Device) -> Figure:
    """What a larger step does to a product, to a prompt's attention, and to decode's."""
    sizes = powers_of_two(16, 4096)
    decodes = [decode_cost(config, size, 4096) for size in sizes]
    prompts = [prefill_cost(config, size) for size in sizes]
    return lines(
        {
            "MLP product, B requests decode": (sizes, [c["gate_up"].intensity for c in decodes]),
            "attention, a prompt of S tokens": (
                sizes,
                [c["attention_scores"].intensity for c in prompts],
            ),
            "attention, B requests decode": (
                sizes,
                [c["attention_scores"].intensity for c in decodes],
            ),
        },
        title="A batch feeds the products; decode's attention stays hungry",
        x="tokens in the step (B or S)",
        y="FLOPs a byte",
        levels={device.ridge_point: "ridge of the H100"},
    )


def throughput(
    config: ModelConfig, device: Device, contexts: Iterable[int] = CONTEXTS
) -> dict[int, tuple[list[int], list[float]]]:
    """context → (batches that fit, 1, 2, 4, … 1024; tokens/s of all together, at best)."""
    curves = {}
    for context in contexts:
        rows = batch_rows(config, device, powers_of_two(1, 1024), context)
        fitting = [row for row in rows if row.fits]
        curves[context] = (
            [row.batch for row in fitting],
            [row.tokens_per_second for row in fitting],
        )
    return curves


def draw_throughput(curves: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """`throughput`, a line a context."""
    return lines(
        {f"context {context:,}": curve for context, curve in curves.items()},
        title="Long contexts take the gain of a batch, then the room for it",
        x="requests in the batch",
        y="tokens/s of all together, at best",
    )


def medium_model() -> LoadedModel:
    """A model that no ordinary cache holds, 145 MiB in float32, with random weights."""
    from minifer.perf.steps import random_model

    config = replace(
        example.tiny().config,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=6,
        num_kv_heads=4,
        head_dim=64,
    )
    return random_model(config)


def weight_mib(config: ModelConfig) -> float:
    """MiB of a model's weights in float32."""
    return 4 * num_parameters(config) / MIB


def read_rates(seconds: float = 0.05) -> dict[float, float]:
    """MiB of a buffer → bytes/s at which this CPU reads it again and again."""
    from minifer.perf.limit import read_bandwidth

    return {
        size: read_bandwidth(int(size * MIB), seconds=seconds, device="cpu") for size in CACHE_MIB
    }


def draw_caches(rates: Mapping[float, float], models: Mapping[str, ModelConfig]) -> Figure:
    """`read_rates` as a curve, with the sizes of models marked."""
    return lines(
        {"read again and again": (list(rates), [rate / 1e9 for rate in rates.values()])},
        title="What fits a cache comes faster than memory delivers",
        x="buffer (MiB)",
        y="rate of reading (GB/s)",
        log="x",
        marks={weight_mib(config): name for name, config in models.items()},
    )


def measure_steps(model: LoadedModel) -> list[StepGroup]:
    """The engine's own times of `DECODES` and `CHUNKS`, on a clock that neighbours do not touch."""
    from minifer.perf.steps import busy_clock, decoding, group, prefilling

    groups = []
    for batch, context in DECODES:
        taken = decoding(model, batch, context, steps=5, clock=busy_clock).take(5)
        groups.append(group(model, f"decode {batch} × {context}", taken))
    for chunk in CHUNKS:
        taken = prefilling(model, chunk, clock=busy_clock).take(2)
        groups.append(group(model, f"prefill {chunk}", taken))
    return groups


def draw_here(here: Device, groups: Sequence[StepGroup], config: ModelConfig) -> Figure:
    """Predicted and measured on this machine, float32."""
    element = ElementBytes(4, 4, 4)
    operations = {
        "decode": decode_cost(config, 1, 64, element=element).ops,
        "prefill": prefill_cost(config, 256, element=element).ops,
    }
    return limit_figure(here, groups, operations)
