"""F-01: what the primitives do with NaN, infinity and slots that should not be there.

Facts about torch, not about minifer: the reasons why the engine checks, zeroes and poisons.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.text.tokenizer import Tokenizer

NAN, INF = torch.nan, torch.inf


def test_f01_argmax_takes_nan_for_the_largest() -> None:
    assert int(torch.tensor([1.0, 5.0, NAN, 9.0]).argmax()) == 2
    assert int(torch.full((4,), NAN).argmax()) == 0


def test_f01_multinomial_refuses_nan_and_the_exponential_race_does_not() -> None:
    p = torch.full((1, 4), NAN)
    with pytest.raises(RuntimeError):
        torch.multinomial(p, 1)
    race = p / torch.ones(4).exponential_(generator=torch.Generator().manual_seed(0))
    assert int(race.argmax()) == 0  # in silence


def test_f01_softmax_spreads_one_nan_and_makes_nan_of_nothing() -> None:
    assert bool(torch.tensor([1.0, NAN, 2.0]).softmax(-1).isnan().all())
    assert bool(torch.full((3,), -INF).softmax(-1).isnan().all())


def test_f01_a_masked_value_of_nan_still_counts() -> None:
    """0 · NaN is NaN, so attention must zero the values it masks; keys are safe if masked late."""
    weights = torch.tensor([0.5, 0.5, 0.0])
    assert bool((weights @ torch.tensor([1.0, 2.0, NAN])).isnan())
    scores = torch.tensor([1.0, 2.0, NAN])  # of a key of NaN
    hidden = torch.tensor([False, False, True])
    assert bool(scores.masked_fill(hidden, -INF).softmax(-1).isfinite().all())
    for penalty in (-1e30, -INF):
        assert bool((scores + hidden.float().where(~hidden, penalty)).softmax(-1).isnan().all())


def test_f01_one_scale_for_all_rows_gives_every_row_the_nan_of_one() -> None:
    x = torch.ones(3, 4)
    x[2] = NAN  # a padding row
    assert bool((x / x.abs().amax()).isnan().all())
    per_row = x / x.abs().amax(-1, keepdim=True)
    assert per_row.isnan().any(-1).tolist() == [False, False, True]


def test_f01_one_slot_too_many_is_nearly_invisible_until_it_is_large() -> None:
    """The relative error that one more slot makes in the output of attention over 128."""
    g = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(*shape, generator=g) for shape in ((64,), (129, 64), (129, 64)))

    def output(extra: float | None) -> torch.Tensor:
        k, v = keys[:128], values[:128]
        if extra is not None:
            k = torch.cat((k, q[None] * 0.3 * extra))  # a key that happens to point our way
            v = torch.cat((v, values[128:] * extra))
        return (k @ q / 8).softmax(0) @ v

    right = output(None)
    errors = [float((output(x) - right).norm() / right.norm()) for x in (0.0, 1.0, 4.0, 16.0)]
    assert errors[0] < 0.1 and errors[1] < 1.0 < errors[2] < errors[3]


def test_f01_torch_can_poison_fresh_memory_itself() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(1000).isnan().all())
        assert bool((torch.empty(1000, dtype=torch.int32) == 2**31 - 1).all())
    finally:
        torch.use_deterministic_algorithms(False)


def test_f01_token_0_of_a_byte_vocabulary_does_not_print() -> None:
    assert byte_tokenizer().decode([0]) == "\0"


def test_f01_token_0_of_smollm2_ends_the_text(pulled_model: Path) -> None:
    """There NaN is not "!!!!" but a silent, empty reply: tests must look at the logits."""
    tokenizer = Tokenizer.from_dir(pulled_model)
    assert tokenizer.id_to_token(0) == "<|endoftext|>"
    assert tokenizer.decode([0] * 9) == ""
