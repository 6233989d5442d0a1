"""Step times: against the published formulas, against `perf.costs`, and from files."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.devices import DEVICES
from minifer.simulation.steps.named import MODELS, find_steps
from minifer.simulation.steps.published import PUBLISHED_STEPS
from minifer.simulation.steps.roofline import RooflineSteps
from minifer.simulation.steps.times import (
    Chunk,
    DecodePrices,
    FittedSteps,
    FixedSteps,
    PrefillPrices,
)

OPT = PUBLISHED_STEPS["distserve-opt-13b-a100-tp1"]
STEPS = FittedSteps(
    PrefillPrices(5.0, 0.5, 0.25), ((0, DecodePrices(3.0, 0.125, 0.0625)),), "by hand"
)


def test_a_step_by_hand() -> None:
    assert STEPS.seconds([(4, 4)]) == 5 + 0.5 * 4 + 0.25 * 16
    assert STEPS.seconds([(2, 6)]) == 5 + 0.5 * 2 + 0.25 * (36 - 16)  # the end of a chunked one
    assert STEPS.seconds([(1, 8), (1, 24)]) == 3 + 0.125 * 2 + 0.0625 * 32
    mixed = [(1, 8), (4, 4), (1, 24)]
    assert STEPS.seconds(mixed) == 5 + 0.5 * 4 + 0.25 * 16 + 0.125 * 2 + 0.0625 * 32


def test_a_prompt_in_chunks_costs_a_fixed_part_more_a_chunk_and_nothing_else() -> None:
    whole = STEPS.seconds([(100, 100)])
    pieces = sum(STEPS.seconds([(20, end)]) for end in range(20, 101, 20))
    assert pieces - whole == pytest.approx(4 * 5.0)


def test_distserve_has_its_published_formula_on_both_sides_of_95_requests() -> None:
    n = 1_000
    assert OPT.seconds([(n, n)]) * 1e3 == pytest.approx(
        18.10 + 0.1019 * n + 7.12e-6 * n * n, rel=1e-3
    )
    for batch, (fixed, context, row) in {
        94: (19.93, 6.27e-4, 0.0385),
        95: (7.17, 5.80e-4, 0.158),
    }.items():
        expected = fixed + context * batch * 500 + row * batch
        assert OPT.seconds([(1, 500)] * batch) * 1e3 == pytest.approx(expected, rel=1e-3)


def test_splitwise_decodes_in_the_published_time() -> None:
    steps = PUBLISHED_STEPS["splitwise-llama2-70b-h100-tp8"]
    # Its rows of 1 and of 64 prompts of 512 tokens: refitted elsewhere to 29.91 + 0.2229 B.
    assert steps.seconds([(1, 1)]) * 1e3 == pytest.approx(29.9 + 0.22, rel=0.02)
    prefill = steps.seconds([(2_048, 2_048)]) * 1e3
    assert prefill == pytest.approx(5.7 + 0.0899 * 2_048 + 1.46e-6 * 2_048**2, rel=1e-3)


def test_the_cold_warm_study_has_its_base_case() -> None:
    """30 ms + 1/40,000 s a token + 4e-10 s a (query, key) pair: cold 4.1 s alone, warm 0.2 s."""
    steps = PUBLISHED_STEPS["cold-warm"]
    for new, cached in ((84_000, 8_000), (3_000, 84_000)):
        expected = 0.030 + new / 40_000 + 4e-10 * new * (cached + new / 2)
        assert steps.seconds([(new, cached + new)]) == pytest.approx(expected, rel=1e-12)
    assert steps.seconds([(1, 500)]) == pytest.approx(0.030 + 1 / 40_000, rel=1e-3)


def test_decoding_alone_lies_on_no_line() -> None:
    steps = replace(STEPS, decode_alone=((2, 7.0), (4, 5.0)))
    seconds = {n: steps.seconds([(1, 8)] * n) - 0.0625 * 8 * n for n in range(1, 7)}
    assert seconds == {1: 6.875, 2: 7.0, 3: 6.0, 4: 5.0, 5: 5.125, 6: 5.25}
    mixed, prompt = [(1, 8), (1, 8), (4, 4)], [(4, 4)]
    assert steps.seconds(mixed) == STEPS.seconds(mixed)
    assert steps.seconds(prompt) == STEPS.seconds(prompt)
    assert FittedSteps.from_dict(json.loads(json.dumps(steps.to_dict()))) == steps


@pytest.mark.parametrize("sizes", [((0, 1.0),), ((3, 1.0), (2, 1.0)), ((2, -1.0),)])
def test_sizes_of_decoding_alone_rise_and_take_time(sizes: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="decode_alone"):
        replace(STEPS, decode_alone=sizes)


def random_batch(rng: random.Random) -> list[Chunk]:
    batch = []
    for _ in range(rng.randint(1, 20)):
        end = rng.randint(1, 3_000)
        batch.append((1 if rng.random() < 0.6 else rng.randint(1, end), end))
    return batch


@pytest.mark.parametrize("model", list(MODELS))
def test_the_roofline_is_that_of_the_costs(model: str) -> None:
    device, element = DEVICES["H100-SXM"], ElementBytes(weight=0.625, kv=1.0)
    steps = RooflineSteps(MODELS[model], device, element=element)
    rng = random.Random(model)
    for _ in range(30):
        batch = random_batch(rng)
        cost = step_cost(MODELS[model], batch, element=element).total()
        floor = device.seconds(cost.flops, cost.weight_bytes + cost.kv_bytes)
        assert steps.seconds(batch) == pytest.approx(floor, rel=1e-9)


def test_the_roofline_knows_the_published_floors() -> None:
    """Weights ÷ bandwidth: 4.79 ms for 8B on an H100, 5.26 ms for 70B on eight of them."""
    one = find_steps("roofline:llama-8b:h100")
    assert one.seconds([(1, 1)]) * 1e3 == pytest.approx(4.79 * 7.5 / 8.03, rel=0.01)  # no embedding
    eight = find_steps("roofline:llama-70b:h100:1:8")
    assert eight.seconds([(1, 1)]) * 1e3 == pytest.approx(5.26, rel=0.02)


def test_efficiency_devices_and_a_fixed_part_scale_the_roofline() -> None:
    device, config = DEVICES["H100-SXM"], MODELS["llama-8b"]
    batch = [(512, 512), (1, 900)]
    floor = RooflineSteps(config, device).seconds(batch)
    assert RooflineSteps(config, device, 0.5, 0.5).seconds(batch) == pytest.approx(2 * floor)
    assert RooflineSteps(config, device, num_devices=2).seconds(batch) == pytest.approx(floor / 2)
    assert RooflineSteps(config, device, fixed=0.25).seconds(batch) == pytest.approx(0.25 + floor)
    decode, prefill = [(1, 900)], [(4_096, 4_096)]
    slow = RooflineSteps(config, device, memory_efficiency=0.5)
    assert slow.seconds(decode) == pytest.approx(2 * RooflineSteps(config, device).seconds(decode))
    assert slow.seconds(prefill) == RooflineSteps(config, device).seconds(prefill)


def test_prices_go_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({**OPT.to_dict(), "mape": 0.1}))
    assert find_steps(str(file)) == OPT
    for steps in (OPT, find_steps("fixed:0.5"), find_steps("roofline:llama-1b:h200:.5")):
        assert pickle.loads(pickle.dumps(steps)).seconds([(3, 7), (1, 5)]) == steps.seconds(
            [(3, 7), (1, 5)]
        )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fast", "steps must be a file, fixed:SECONDS, roofline:MODEL:DEVICE or one of"),
        ("fixed:soon", "steps must be a number, got 'soon'"),
        ("fixed:-1", "step must be at least 0 seconds, got -1"),
        ("roofline:gpt-9:h100", "a model of llama-1b, llama-8b, llama-70b, got roofline:gpt-9"),
        ("roofline:llama-8b", "roofline:MODEL:DEVICE"),
        ("roofline:llama-8b:abacus", "device must be one of"),
        ("roofline:llama-8b:h100:2", r"compute_efficiency must be in \(0, 1\], got 2"),
        ("roofline:llama-8b:h100:.5:0", "num_devices must be at least 1"),
        ("roofline:llama-8b:h100:x", "the efficiency of steps must be a number"),
    ],
)
def test_names_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_steps(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "no step times"),
        ("{", "holds no step times"),
        ('{"prefill": {"fixed": 1}}', "no fitted step times"),
        ('{"prefill": {"fixed": 1, "per_token": "2"}}', "per_token must be a number of seconds"),
        ('{"prefill": {"fixed": 1, "per_token": -2}}', "per_token must be at least 0 seconds"),
        (
            '{"prefill": {"fixed": 1, "per_token": 2}, "decode": [{"from_batch": 5, "fixed": 1, '
            '"per_row": 1}]}',
            r"must rise from 0, got \[5\]",
        ),
    ],
)
def test_files_that_hold_none_are_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "steps.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=why):
        find_steps(str(file))


def test_a_fixed_step_is_fixed() -> None:
    assert FixedSteps(0.5).seconds([]) == FixedSteps(0.5).seconds([(1, 1)] * 9) == 0.5


def test_the_roofline_refuses_what_it_cannot_price() -> None:
    windowed = replace(MODELS["llama-1b"], sliding_windows=(4_096, *[None] * 15))
    with pytest.raises(ValueError, match="sliding_windows"):
        RooflineSteps(windowed, DEVICES["H100-SXM"])
