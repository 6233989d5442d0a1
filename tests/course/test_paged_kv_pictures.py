"""What the pictures of paged KV say is what the engine held; the model of reservations adds up."""

from __future__ import annotations

import random

import pytest
import torch

from minifer.course import example
from minifer.course.pictures import paged_kv
from minifer.course.pictures.paged_kv_data import (
    LONGEST,
    _first_gap,
    _Running,
    draw_lengths,
    empty_slots,
    pool_states,
    random_requests,
    reservations,
    scattered_step,
)


@pytest.fixture(scope="module")
def run():
    return example.run()


def test_states_show_the_tables_and_lengths_the_model_was_given(run):
    states = pool_states(run)
    assert [state.step for state in states] == list(range(1, len(run.steps) + 1))
    for state, (step, _) in zip(states, run.steps, strict=True):
        for entry, table, length in zip(
            step.scheduled, step.block_tables, step.seq_lens, strict=True
        ):
            name = entry.request.request_id
            # a request's table is one list that grows: what it was is its beginning
            assert list(state.tables[name]) == table[: len(state.tables[name])]
            assert len(state.text[name]) == length <= len(state.tables[name]) * 8
            slots = [state.slot(name, p) for p in range(entry.start, entry.end)]
            assert set(slots) <= state.written
    assert states[3].slots()[35] == "e" and "A has 22 tokens in blocks 0, 1, 2" in states[3].words


def test_the_text_of_a_state_is_the_prompt_then_dots(run):
    for state in pool_states(run):
        for name, text in state.text.items():
            prompt = example.TRIO[name][0].replace(" ", "␣")
            assert text == (prompt + "•" * 20)[: len(text)]
    first = pool_states(run)[1]
    assert first.holders(0) == ("A", "B") and first.holders(11) == ()


def test_empty_slots_are_those_that_tables_hold_beyond_the_tokens():
    log = example.run(random_requests(4), enable_prefix_caching=False, num_kv_blocks=64)
    empty = [
        -(-length // 8) * 8 - length
        for state in pool_states(log)
        for length in map(len, state.text.values())
    ]
    assert empty_slots(log) == sum(empty) / len(empty) > 0


def test_reservations_of_equal_lengths_can_be_done_by_hand():
    """40 slots: two reservations of 16 (8 + 8 tokens) leave a gap of 8; four blocks of 4 a request.

    A request has 8 … 15 tokens over its 8 steps, 11.5 on average.
    """
    lengths = [(8, 8)]
    known = reservations(lengths, capacity=40, block_size=4, headroom=0, steps=900, warm_up=100)
    longest, power, exact, blocks = known
    assert (longest.running, longest.gaps) == (0, 1)  # 40 slots are not enough for the longest
    for share in (power, exact):
        assert share.running == 2 and share.never == 0
        assert (share.stored, share.gaps) == (pytest.approx(2 * 11.5 / 40), pytest.approx(0.2))
    assert blocks.running > 2 and blocks.stored > exact.stored and blocks.recomputed > 0


def test_a_reservation_takes_the_first_stretch_that_is_long_enough():
    held = [_Running(8, 4, 0, 0), _Running(0, 4, 0, 0)]  # [0, 4) and [8, 12)
    assert [_first_gap(held, size, 17) for size in (1, 4, 5, 6)] == [4, 4, 12, None]
    assert _first_gap([], 17, 17) == 0


@pytest.mark.parametrize("block_size", [1, 16])
def test_shares_of_a_full_cache_add_up(block_size):
    for share in reservations(draw_lengths(300), capacity=4 * LONGEST, block_size=block_size):
        parts = (share.stored, share.later, share.never, share.gaps)
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0
        if share.policy == "blocks":
            assert share.later + share.never < block_size * share.running / (4 * LONGEST)
            assert 0 <= share.recomputed < 0.5


def test_a_scattered_step_has_nan_wherever_no_token_lies():
    rng = random.Random(0)
    for _ in range(20):
        step = scattered_step(rng)
        tokens = sum(length for _, length, _ in step.requests)
        tables = [block for table, _, _ in step.requests for block in table]
        assert len(set(tables)) == len(tables)
        assert int((~step.keys.isnan()).sum()) == int((~step.values.isnan()).sum())
        assert int((~step.keys[:, :, 0, 0].isnan()).sum()) == tokens
        for table, length, rows in step.requests:
            assert len(table) == -(-length // step.block_size) and rows.stop - rows.start <= length
            assert not step.keys[table].flatten(0, 1)[:length].isnan().any()
        assert not step.query.isnan().any() and step.query.dtype == torch.float64


def test_times_have_a_number_for_each_context_and_the_bytes_they_should_move():
    times = paged_kv.time_attention((8, 20), (4,), kv_heads=2, head_dim=4, rounds=1)
    assert list(times.arms) == ["dense", "blocks of 4"]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.arms.values())
    assert times.num_bytes == (2 * 8 * 2 * 4 * 4, 2 * 20 * 2 * 4 * 4)
    labels = figure_texts(paged_kv.times_figure(times, (1e9, 2e9)))
    assert "predicted: KV moved three times" in labels and "measured: dense" in labels


def test_the_pool_is_drawn_with_its_tokens_and_its_blocks(run):
    figure = paged_kv.pool_figure(pool_states(run)[3])
    texts = figure_texts(figure)
    assert {"block 0: A + B", "block 7: C", "block 11", "A", "B", "C"} <= set(texts)
    assert texts.count("•") == 2 * 3  # two of A, one of B, above and below


def test_a_reservation_that_does_not_fit_is_not_drawn(run):
    finals = {"A": 31, "B": 37, "C": 23}
    texts = figure_texts(paged_kv.reservation_figure(pool_states(run)[7], finals, 64))
    assert texts.count("A+B") == 2  # blocks
    # A alone among the longest, all three where lengths are known, blocks of their own below
    assert [texts.count(name) for name in "ABC"] == [2 + 2, 1 + 3, 1 + 3]


def figure_texts(figure):
    """All that is written in the plot, its legend included."""
    (axes,) = figure.axes
    legend = axes.get_legend()
    entries = [text.get_text() for text in legend.get_texts()] if legend else []
    return [text.get_text() for text in axes.texts] + entries
