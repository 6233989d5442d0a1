"""How contexts are split for a megakernel, the same for the engine, the ladder and the model of
time; and that the megakernel stays small enough to be read."""

from pathlib import Path

import pytest
from test_readme import lines_of_code

from minifer.kernels.mega.shapes import kv_splits

MEGA = Path(__file__).parents[3] / "kernels" / "mega"


@pytest.mark.parametrize(
    ("context", "splits"), [(1, 1), (256, 1), (257, 2), (512, 2), (513, 4), (4096, 16), (10**6, 32)]
)
def test_256_tokens_of_context_are_worth_a_split(context, splits):
    assert kv_splits(context, batch=1, kv_heads=8, programs=132) == splits


def test_no_more_than_four_pieces_a_program():
    for batch in range(1, 17):
        for kv_heads in (1, 3, 8):
            for programs in (1, 4, 108, 132):
                splits = kv_splits(10**6, batch, kv_heads, programs)
                pieces = splits * batch * kv_heads
                assert splits == 1 or pieces <= 4 * programs
                assert splits == 32 or 2 * pieces > 4 * programs, "as many as may be"
    assert kv_splits(32768, 16, 8, 132) == 4


def test_splits_are_a_power_of_two_and_never_fewer_for_a_longer_context():
    for batch, programs in ((1, 132), (16, 132), (3, 7)):
        found = [kv_splits(n, batch, 8, programs) for n in range(1, 20_000, 97)]
        assert found == sorted(found)
        assert {n & (n - 1) for n in found} == {0}


@pytest.mark.parametrize("name", ["context", "batch", "kv_heads", "programs"])
def test_a_number_below_one_is_refused(name):
    numbers = {"context": 1, "batch": 1, "kv_heads": 1, "programs": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        kv_splits(**numbers)


def test_the_megakernel_can_be_read():
    """All of it in 2,500 lines of code, the kernel itself in 350."""
    assert lines_of_code(MEGA) <= 2500
    assert lines_of_code(MEGA / "kernel.py") <= 350
