"""What the pictures of kernels say, against counts by hand, and who finds which wrong kernel."""

from __future__ import annotations

import pytest
import torch

from minifer.course import kernel_examples as engine
from minifer.course.block_program import ENGINE, simulate, tl, triton
from minifer.course.kernel_mistakes import (
    KERNEL,
    MISTAKES,
    SUITES,
    attention,
    exact,
    source,
    verdicts,
)
from minifer.course.pictures import block_programs as pictures
from minifer.course.pictures import kernel_speed
from minifer.course.shapes import LLAMA_1B
from minifer.kernels import flash_attention as flash
from minifer.kernels import paged_decode as paged
from minifer.kernels.gemv import gemv
from minifer.kernels.products import Tiles
from minifer.perf.devices import DEVICES


@triton.jit
def copy(X, OUT, n, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at * step, mask=at < n, other=0.0)
    tl.store(OUT + at, x, mask=at < n)


def test_sixteen_mistakes_and_the_right_kernel() -> None:
    found = verdicts()
    assert not any(found[0].found)
    assert [verdict.mistake for verdict in found[1:]] == list(MISTAKES)
    assert len(MISTAKES) == 16
    assert all(verdict.first for verdict in found[1:])  # the record finds what is left
    for verdict in found:  # a suite asks all that the one before it asks
        assert sorted(verdict.found) == list(verdict.found)
    accepted = {verdict.mistake for verdict in found[1:] if not verdict.found[0]}
    assert {"last ragged tile dropped", "no maximum subtracted", "mask without other"} <= accepted
    assert next(v for v in found if v.mistake == "products in TF32").first == SUITES[-1]


def test_a_mistake_changes_one_place() -> None:
    for name in MISTAKES:
        assert source(name) != KERNEL
    with pytest.raises(ValueError, match="mistake must be one of"):
        source("none")


def test_the_kernel_of_the_table_is_attention() -> None:
    q, k, v = (torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for causal in (False, True):
        got = attention(strict=True)(q, k, v, causal)
        assert torch.allclose(got.double(), exact(q, k, v, causal), atol=1e-5)
        truth = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=causal
        )
        assert torch.allclose(exact(q, k, v, causal), truth)


def test_the_map_of_attention_counts_tiles() -> None:
    S, table = 40, [2, 0, 1, 4, 3]
    keys = torch.randn(5, 8, 1, 16)
    done = simulate(
        flash.flash_attention, torch.randn(S, 1, 16), keys, keys.clone(), torch.tensor([table]),
        torch.tensor([0, S]), torch.tensor([S]), 0.25, max_query=S,
        tiles=flash.Tiles(16, 16, 1, 1),
    )  # fmt: skip
    grid = pictures.attention_map(done.trace, "KEY_CACHE", table, S, 16)
    used = sum(row.count("used") for row in grid)
    computed = used + sum(row.count("hidden") for row in grid)
    assert used == S * (S + 1) // 2
    assert computed == 16 * 16 + 16 * 32 + 8 * 40
    figure = pictures.attention_figure(grid, 16, title="a title")
    assert figure.axes[0].get_title(loc="left") == "a title"


def test_blocks_read_are_the_tables() -> None:
    tables, lengths = torch.tensor([[3, 1, 0], [3, 2, 0]]), torch.tensor([20, 9])
    pool = torch.randn(5, 8, 2, 16)
    done = simulate(
        paged.paged_decode, torch.randn(2, 4, 16), pool, pool.clone(), tables, lengths, 0.25,
        num_splits=2, tiles=paged.Tiles(16, 16, 1, 1),
    )  # fmt: skip
    read = pictures.blocks_read(done.launches[0], "KEY_CACHE")
    assert read == {(0, 0): {1: 8, 3: 8}, (0, 1): {0: 4}, (1, 0): {2: 1, 3: 8}}
    colours = {"A": "#56B4E9", "B": "#E69F00"}
    figure = pictures.blocks_figure(read, ["A", "B"], colours, 5, title="t")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["A, part 0", "A, part 1", "B, part 0"]


def test_sectors_of_a_row_and_of_a_column() -> None:
    matrix, out = torch.randn(32, 32), torch.empty(32)
    asked = {}
    for name, step in (("row", 1), ("column", 32), ("every second", 2)):
        trace = simulate(lambda step=step: copy[(1,)](matrix, out, 32, step, BLOCK=32)).trace
        asked[name] = next(trace.select("X"))
    assert [access.sectors for access in asked.values()] == [4, 32, 8]
    assert len(pictures.sectors_figure(asked, title="t").axes) == 3


def test_pictures_of_lanes_and_tiles_draw_what_the_record_says() -> None:
    x, out = torch.arange(6.0), torch.empty(6)
    trace = simulate(lambda: copy[(2,)](x, out, 6, 1, BLOCK=4)).trace
    figure = pictures.lanes_figure(trace, "X", title="t")
    assert len(figure.axes[0].patches) == 8  # lanes of two programs, masked ones too
    product = simulate(gemv, torch.randn(20), torch.randn(10, 20), tiles=Tiles(4, 8, 1, 1)).trace
    assert len(pictures.tile_accesses(product, "W", 1)) == 3
    figure = pictures.step_figure(product, "W", 2, 2)
    words = pictures.step_alt(product, "W", 2, 2)
    assert "rows 8 to 9, columns 16 to 19; 8 weights are read, 24 lanes are masked" in words
    assert len(figure.axes[0].patches) == 200 + 32


def test_a_forecast_is_bytes_over_bandwidth_and_one_gap() -> None:
    rows = kernel_speed.forecasts(LLAMA_1B, DEVICES["H200-SXM"], gap=1e-6)
    head = rows[-1]
    assert head.bytes == 2 * (128_256 * 2048 + 2048 + 128_256)
    assert head.seconds == pytest.approx(1e-6 + head.bytes / 4.8e12)
    assert rows[0].share < 0.01 < 0.95 < head.share
    assert kernel_speed.forecast_figure(rows, title="t").axes
    assert kernel_speed.verdict_figure(verdicts()[1:3], title="t").axes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_nothing_is_measured() -> None:
    assert kernel_speed.measured_here() == [
        "no GPU here: nothing is measured, the bars above are a model"
    ]


def test_warm_and_cold_say_a_line_a_size() -> None:
    lines = kernel_speed.warm_and_cold((1, 2))
    assert ["   1 MB, read 2 times" in lines[0], "   2 MB, read 2 times" in lines[1]] == [True] * 2


@pytest.mark.skipif(ENGINE == "record", reason="there is no Triton here")
def test_the_engines_examples_are_right_and_their_mistakes_are_not() -> None:
    assert engine.rope_append([5, -1, 0]).errors.max() < 1e-5
    assert engine.flash_attention([1, 0, 2]).error < 1e-5
    assert engine.flash_attention([1, 0, 2], factor=100).error < 1e-4
    where = [[0, 1], [2]], [9, 4], 4, 8
    for splits in (1, 2):
        done = engine.paged_decode(*where, num_splits=splits)
        assert done.error < 1e-5
        read = done.record.bytes("KEY_CACHE") + done.record.bytes("VALUE_CACHE")
        assert read == done.cost.kv_bytes
    assert engine.paged_decode(*where, extra=1).errors.isinf().all()
    soft = engine.paged_decode(*where, extra=1, fill=0.0).errors
    assert soft.isfinite().all() and (soft > 1e-3).all()
