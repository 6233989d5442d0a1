"""Training: what a step does, which optimiser moves what, and a run that was interrupted."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop_models import VOCAB, dense_logits, loop_model
from torch import Tensor

from minifer.parcae import train as train_module
from minifer.parcae.lab.data import help_topics, sample_rows
from minifer.parcae.lab.models import lab_model
from minifer.parcae.model import Parcae
from minifer.parcae.optim import Optimizer
from minifer.parcae.train import Recipe, StepRecord, generators, train
from minifer.parcae.train_cli import main
from minifer.weights.hf import load_hf

TINY = Recipe(steps=6, rows=3, length=8, mean_recurrence=3, warmup=2)
IDS = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(9))


def batches(generator: torch.Generator) -> Tensor:
    return sample_rows(IDS, TINY.rows, TINY.length, generator)


def small_model(seed: int = 0, **options: Any) -> Parcae:
    options = {"width": 16, "layers": (1, 1, 1), "length": 8, "mean_recurrence": 3, **options}
    return lab_model(VOCAB, seed=seed, **options)


def parameters(model: Parcae) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- a run


def test_the_text_is_learnt() -> None:
    corpus = help_topics(40)
    model = lab_model(corpus.num_symbols, layers=(0, 1, 0), length=16, mean_recurrence=2)
    recipe = replace(TINY, steps=40, mean_recurrence=2, learning_rate=2e-2)
    records = train(model, lambda g: sample_rows(corpus.train, 8, 16, g), recipe)
    last = sum(record.loss for record in records[-10:]) / 10
    assert records[0].loss > math.log(40) - 0.3 and last < records[0].loss - 0.5


def test_a_steps_record_is_of_the_model_before_it() -> None:
    """One depth for all, no noise: the loss of the model run so deep."""
    model = small_model(zero_out=False)
    recipe = replace(TINY, steps=1, depth="constant", noise=False)
    rows = batches(generators(recipe.seed, 0)[0])
    logits = dense_logits(model, *rows[:, :-1].tolist(), num_loops=3)
    expected = float(F.cross_entropy(logits, rows[:, 1:].flatten()))
    rho = model.adapter.spectral_radius()
    (record,) = train(model, batches, recipe)
    assert record.loss == pytest.approx(expected, rel=1e-5)
    assert (record.step, record.mean_depth, record.rho) == (1, 3.0, rho)
    assert model.adapter.spectral_radius() != rho


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(steps=10, learning_rate=1.0, warmup=4, cooldown=0.5)
    rates = [recipe.learning_rate_at(step) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert replace(recipe, cooldown=0.0, warmup=0).learning_rate_at(0) == 1.0
    assert [r.learning_rate for r in train(small_model(), batches, TINY)][:3] == pytest.approx(
        [5e-3, 1e-2, 1e-2]
    )


def test_gradients_are_cut_to_their_norm() -> None:
    """AdamW does not see a gradient's length, so this looks at the gradients themselves."""
    model = small_model()
    records = train(model, batches, replace(TINY, steps=1, clip=1e-3))
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert records[0].gradient_norm > 0.1 and float(norms.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_targets_that_do_not_count_change_nothing() -> None:
    """Inputs and targets apart: only the second token of a row counts."""

    def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = batches(generator)
        targets = torch.full_like(rows[:, 1:], -100)
        targets[:, 1] = rows[:, 2]
        return rows[:, :-1], targets

    def later_tokens_differ(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = pair(generator)
        return torch.cat([inputs[:, :2], (inputs[:, 2:] + 1) % VOCAB], 1), targets

    one, other = small_model(), small_model()
    first = train(one, pair, replace(TINY, noise=False))
    second = train(other, later_tokens_differ, replace(TINY, noise=False))
    assert [r.loss for r in first] == pytest.approx([r.loss for r in second], rel=1e-4)
    assert [r.loss for r in first] != [r.loss for r in train(small_model(), batches, TINY)]


# -- reproducible, resumable


def test_draws_depend_on_the_seed_and_the_step_alone() -> None:
    draws = {
        (seed, step, i): int(torch.randint(2**62, (), generator=g))
        for seed in (0, 1)
        for step in (0, 1, 2)
        for i, g in enumerate(generators(seed, step))
    }
    assert len(set(draws.values())) == len(draws)
    again = int(torch.randint(2**62, (), generator=generators(1, 2)[0]))
    assert again == draws[1, 2, 0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_to_the_last_digit(optimizer: str, tmp_path: Path) -> None:
    recipe = replace(TINY, optimizer=optimizer, cooldown=0.5, weight_decay=0.1)
    whole = small_model()
    expected = train(whole, batches, recipe, log=tmp_path / "whole.csv")

    class KilledError(Exception):
        pass

    def kill(record: StepRecord) -> None:
        if record.step == 5:  # one step after the last checkpoint
            raise KilledError

    options: dict[str, Any] = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 2}
    with pytest.raises(KilledError):
        train(small_model(), batches, recipe, on_step=kill, log=tmp_path / "run.csv", **options)
    resumed = small_model(seed=5)  # its weights are the checkpoint's
    seen: list[int] = []
    records = train(
        resumed,
        batches,
        recipe,
        resume=True,
        on_step=lambda record: seen.append(record.step),
        log=tmp_path / "run.csv",
        **options,
    )
    assert seen == [5, 6]
    assert records == expected and same(parameters(resumed), parameters(whole))
    assert (tmp_path / "run.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert [file.name for file in tmp_path.glob("*.tmp")] == []


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    model = small_model()
    records = train(model, batches, TINY, checkpoint=file)
    again = small_model(seed=1)
    assert train(again, batches, TINY, checkpoint=file, resume=True) == records
    assert same(parameters(again), parameters(model))


def test_the_log_has_a_row_a_step(tmp_path: Path) -> None:
    records = train(small_model(), batches, TINY, log=tmp_path / "log.csv")
    with open(tmp_path / "log.csv", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert [{k: float(v) for k, v in row.items()} for row in rows] == [asdict(r) for r in records]
    assert list(rows[0]) == [field.name for field in fields(StepRecord)]


def test_a_run_resumes_with_its_own_recipe_and_model_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    with pytest.raises(ValueError, match=r"resume needs a checkpoint, and there is no file '.*run"):
        train(small_model(), batches, TINY, checkpoint=file, resume=True)
    train(small_model(), batches, TINY, checkpoint=file)
    other = replace(TINY, betas=(0.8, 0.95))
    with pytest.raises(ValueError, match=r"trained with betas=\(0.9, 0.95\), not \(0.8, 0.95\)"):
        train(small_model(), batches, other, checkpoint=file, resume=True)
    with pytest.raises(ValueError, match=r"run.pt is of another model"):
        train(small_model(width=8), batches, TINY, checkpoint=file, resume=True)
    file.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"run.pt is no checkpoint"):
        train(small_model(), batches, TINY, checkpoint=file, resume=True)


# -- optimisers


@pytest.mark.parametrize("key", ["recipe", "model", "optimizer", "records"])
@pytest.mark.parametrize("value", [None, 3, "x", [3], ...], ids=str)
def test_a_damaged_checkpoint_is_one_kind_of_error(key: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    train(small_model(), batches, TINY, checkpoint=file)
    whole = torch.load(file, weights_only=True)
    rest = {name: part for name, part in whole.items() if name != key}
    torch.save(rest if value is ... else {**rest, key: value}, file)
    with pytest.raises(ValueError, match=r"checkpoint.pt is (no checkpoint|of another model)"):
        train(small_model(), batches, TINY, checkpoint=file, resume=True)


def test_muon_moves_the_blocks_matrices_and_adamw_the_rest() -> None:
    model = loop_model((1, 2, 1))
    optimizer = Optimizer(model, "muon", 1e-2, (0.9, 0.95), 0.0)
    adamw, muon = optimizer.parts
    by_id = {id(p): name for name, p in model.named_parameters()}
    rest = {by_id[id(p)] for group in adamw.param_groups for p in group["params"]}
    matrices = {
        name for name in by_id.values() if name.split(".")[0] in ("prelude", "core", "coda")
    }
    matrices = {name for name in matrices if "norm" not in name and "ve_gate" not in name}
    assert rest == set(by_id.values()) - matrices
    assert {"wte.weight", "adapter.B", "adapter.A_log", "readout_proj.weight"} < rest
    assert {"value_embeds.1.weight", "core.0.attn.ve_gate.weight", "core.1.norm_1.weight"} < rest
    leaves = muon.param_groups[0]["params"]
    assert len(leaves) == 4 * 6  # q, k, v, o, up, down of each layer
    assert sum(p.numel() for p in leaves) == sum(model.get_parameter(n).numel() for n in matrices)


def test_muon_sees_q_k_and_v_one_by_one() -> None:
    """Each as torch's Muon would step it alone."""
    model, rate = loop_model((0, 1, 0)), 0.02
    before = parameters(model)["core.0.attn.qkv_proj.weight"]
    optimizer = Optimizer(model, "muon", rate, (0.9, 0.95), 0.0)
    logits = model.logits(torch.randn(5, 36), _Linear())
    qkv = model.get_parameter("core.0.attn.qkv_proj.weight")
    loss = logits.mean() + (qkv * torch.randn(qkv.shape)).sum()
    optimizer.step(loss, rate, clip=1e9)
    assert qkv.grad is not None
    heads = (4 * 8, 2 * 8, 2 * 8)
    expected = []
    for weight, gradient in zip(before.split(heads), qkv.grad.split(heads), strict=True):
        alone = torch.nn.Parameter(weight.clone())
        alone.grad = gradient.clone()
        torch.optim.Muon([alone], lr=rate, weight_decay=0.0).step()
        expected.append(alone.detach())
    torch.testing.assert_close(qkv.detach(), torch.cat(expected))
    together = torch.nn.Parameter(before.clone())
    together.grad = qkv.grad.clone()
    torch.optim.Muon([together], lr=rate, weight_decay=0.0).step()
    assert not torch.allclose(qkv, together, atol=1e-3)


class _Linear:
    def linear(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return F.linear(x, weight)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_is_the_blocks_matrices_alone(kind: str) -> None:
    """With a loss that asks for nothing, only what decays moves."""
    model = loop_model((1, 1, 1))
    before = parameters(model)
    loss = sum(p.sum() for p in model.parameters()) * 0.0
    Optimizer(model, kind, 0.1, (0.9, 0.95), weight_decay=0.5).step(loss, 0.1, clip=1.0)
    for name, after in parameters(model).items():
        block = "_proj." in name and not name.startswith("readout")
        factor = 0.95 if block else 1.0
        torch.testing.assert_close(after, factor * before[name], msg=name)


# -- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"rows": 2.5}, "rows must be an integer of at least 1, got 2.5"),
        ({"warmup": -1}, "warmup must be an integer of at least 0, got -1"),
        ({"mean_backprop_depth": 0}, "mean_backprop_depth must be an integer of at least 1, got 0"),
        ({"mean_backprop_depth": 1.5}, "mean_backprop_depth must be an integer .* got 1.5"),
        ({"learning_rate": "1"}, "learning_rate must be a number, got '1'"),
        ({"clip": None}, "clip must be a number, got None"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63, got 9223372036854775808"),
        ({"betas": (0.9,)}, r"betas must be a tuple of two numbers, got \(0.9,\)"),
        ({"noise": 1}, "noise must be True or False, got 1"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0 and finite, got nan"),
        ({"clip": 0.0}, "clip must be above 0 and finite, got 0.0"),
        ({"cooldown": 1.5}, "cooldown must lie between 0 and 1, got 1.5"),
        ({"betas": (0.9, 1.0)}, "betas must lie between 0 and 1, got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"depth": "uniform"}, "depth must be one of poisson, .*, got 'uniform'"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, muon, got 'sgd'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_batches_of_the_wrong_shape_are_refused() -> None:
    for bad in (IDS, IDS.view(2, 200)[:, :1], (IDS.view(2, 200), IDS.view(4, 100))):
        with pytest.raises(ValueError, match="a batch must be"):
            train(small_model(), lambda _, bad=bad: bad, TINY)
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        train(small_model(), batches, TINY, checkpoint_every=0)


def test_text_and_models_that_cannot_be_are_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"length 1 to 399 .*got rows=2 and length=400"):
        sample_rows(IDS, 2, 400, generator)
    assert sample_rows(IDS, 2, 399, generator).tolist() == [IDS.tolist()] * 2
    with pytest.raises(ValueError, match="num_symbols must be at least 2, got 1"):
        help_topics(1)
    with pytest.raises(ValueError, match=r"multiple of heads, got width=32, heads=3"):
        lab_model(5, heads=3)


def test_the_laboratorys_text_is_the_topics_and_ends_with_the_validation() -> None:
    corpus = help_topics()
    assert corpus.num_symbols == 95 and len(corpus.validation) * 9 == pytest.approx(
        len(corpus.train), abs=10
    )
    text = "".join(corpus.symbols[i] for i in [*corpus.train.tolist(), *corpus.validation.tolist()])
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    plain = "\n".join(topics[name] for name in sorted(topics))
    assert text == "".join(c for c in plain if c in corpus.symbols)
    assert len(text) > 0.999 * len(plain)


# -- the command


def command(folder: Path, *options: str) -> int:
    small = ["--steps", "4", "--rows", "2", "--length", "8", "--width", "16", "--layers", "0,1,0"]
    return main(["--out", str(folder), "--checkpoint-every", "2", *small, *options])


def test_the_command_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert command(run) == 0
    assert "T=1: " in capsys.readouterr().out
    assert len((run / "log.csv").read_text().splitlines()) == 5
    model, config = load_hf(run)
    assert config.loop is not None and config.loop.core == 1
    assert model.num_parameters == lab_model(95, width=16, layers=(0, 1, 0)).num_parameters
    log = (run / "log.csv").read_bytes()
    assert command(run, "--resume") == 0
    assert (run / "log.csv").read_bytes() == log


@pytest.mark.parametrize("options", [["--model", "parcae-tiny"], ["--mean-backprop-depth", "3"]])
def test_what_is_saved_runs_as_deep_as_it_was_trained(options: list[str], tmp_path: Path) -> None:
    assert command(tmp_path, "--mean-recurrence", "5", *options) == 0
    _, config = load_hf(tmp_path)
    assert config.loop is not None
    assert (config.loop.mean_recurrence, config.loop.mean_backprop_depth) == (5, 3)


def test_an_interrupted_command_says_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = train_module.train_step, 0

    def stopped(*arguments: Any) -> StepRecord:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(train_module, "train_step", stopped)
    assert command(tmp_path) == 130
    assert "interrupted; there is no checkpoint yet" in capsys.readouterr().err
    left = 2
    assert command(tmp_path) == 130
    assert "interrupted; --resume goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert command(tmp_path, "--resume") == 0


def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for options, message in [
        (["--out", str(file)], f"out must be a folder, and {file} is a file"),
        (["--out", str(file / "run")], "Not a directory"),
        (["--resume"], "resume needs a checkpoint"),
        (["--clip", "0"], "clip must be above 0"),
        (["--length", "4000000"], "length must be at most"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--heads", "3"], "width must be a multiple of heads"),
    ]:
        assert command(tmp_path / "run", *options) == 2
        assert message in capsys.readouterr().err
    assert command(tmp_path / "run") == 0
    capsys.readouterr()
    assert command(tmp_path / "run") == 2
    assert "holds a run: go on with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(tmp_path / "run", "--layers", "1,2")
