"""What a loop model's depth, early exit and KV policies cost: measured through the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loop_fakes import loop_model, loop_model_config

from minifer import cli
from minifer.config import EngineConfig
from minifer.execution.reference import DenseBackend, sequence_batch
from minifer.loops import LOOP_BATCHING
from minifer.parcae.costs import kv_bytes_per_token, parameters
from minifer.parcae.lab.depth_batching import edge_of
from minifer.parcae.lab.tradeoff import kv_quality, losses, study, teacher_forcing
from minifer.parcae.lab.tradeoff.kv_quality import Exit, Row
from minifer.parcae.lab.tradeoff.serving_speed import Setting
from minifer.parcae.lab.tradeoff.teacher_forcing import Forced, force
from minifer.parcae.presets import PRESETS
from minifer.perf.bench import BenchmarkResult, Summary
from minifer.text.byte_tokenizer import byte_tokenizer

DEPTH = 8


def loaded_model(**changes) -> SimpleNamespace:
    """As `load_model` gives it."""
    config = loop_model_config(**changes)
    return SimpleNamespace(
        model=loop_model(config),
        config=config,
        tokenizer=byte_tokenizer(),
        eos_token_ids=frozenset(),
        generation_defaults={},
    )


LOADED = loaded_model()


def some_rows(count: int = 3, length: int = 8) -> torch.Tensor:
    return torch.randint(0, 40, (count, length + 1), generator=torch.Generator().manual_seed(1))


ROWS = some_rows()


def row_losses(depth: int) -> torch.Tensor:
    """Each row on its own, without cache or batch: float64 [B, S]."""
    losses = []
    for row in ROWS:
        backend = DenseBackend()
        hidden = LOADED.model(sequence_batch(row[:-1].tolist()), None, backend, depth)
        scores = LOADED.model.logits(hidden, backend).double().log_softmax(-1)
        losses.append(-scores[range(len(row) - 1), row[1:]])
    return torch.stack(losses).detach()


# -- teacher forcing


@pytest.mark.parametrize(
    ("prompt_len", "batching"), [(1, "patient"), (1, "continuous"), (5, "lockstep")]
)
def test_the_engine_reads_a_text_as_the_dense_model_does(prompt_len: int, batching: str) -> None:
    forced = force(LOADED, ROWS, prompt_len=prompt_len, loop_batching=batching)
    expected = row_losses(DEPTH)[:, prompt_len - 1 :]
    torch.testing.assert_close(forced.losses, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        kv_quality.dense_losses(LOADED.model, ROWS), row_losses(DEPTH), atol=1e-4, rtol=0
    )
    assert forced.loss == pytest.approx(float(expected.mean()), abs=1e-4)


@pytest.mark.parametrize(("prompt_len", "exit_threshold"), [(5, None), (1, 0.02), (5, 0.02)])
def test_loops_add_up_to_what_the_runner_counts(
    prompt_len: int, exit_threshold: float | None
) -> None:
    forced = force(LOADED, ROWS, prompt_len=prompt_len, exit_threshold=exit_threshold)
    before = (prompt_len - 1) * len(ROWS) * DEPTH  # the prompt's other tokens
    assert forced.token_loops == int(forced.loops.sum()) + before
    assert forced.prompt_tokens == prompt_len * len(ROWS)
    assert forced.core_applications <= forced.token_loops
    if exit_threshold is not None:
        assert 2 <= forced.mean_loops < DEPTH  # the first iteration has none before it
        assert set(forced.loops[:, 0].tolist()) == {DEPTH}  # read at the prompt's end
    else:
        assert forced.mean_loops == DEPTH


def test_a_row_needs_a_token_to_score() -> None:
    with pytest.raises(ValueError, match=r"prompt_len must be in \[1, 9\)"):
        force(LOADED, ROWS, prompt_len=9)


def test_differences_are_of_the_same_rows() -> None:
    def forced(losses: list[list[float]], top: list[list[int]]) -> Forced:
        scored = torch.tensor(losses, dtype=torch.float64)
        return Forced(scored, torch.tensor(top), torch.ones_like(scored).long(), 0, 0, 0)

    one = forced([[1.0, 2.0], [3.0, 4.0]], [[1, 2], [3, 4]])
    other = forced([[0.0, 1.0], [0.0, 1.0]], [[1, 2], [3, 5]])
    mean, error = one.excess(other)
    # Rows differ by 1 and 3: mean 2, deviation √2, its error √2 / √2.
    assert (mean, error) == (pytest.approx(2.0), pytest.approx(1.0))
    assert one.same_top(other) == 0.75


# -- depth, exit, policies


def test_depths_are_those_of_the_dense_model() -> None:
    table = kv_quality.depth_table(LOADED, ROWS, (1, 3, 8, 12))
    for depth, row in zip((1, 3, 8, 12), table, strict=True):
        assert row.loss == pytest.approx(float(row_losses(depth).mean()), abs=1e-4)
        assert row.mean_loops == depth
        assert row.token_loops == depth * ROWS[:, :-1].numel()
        assert row.kv_bytes == kv_bytes_per_token(LOADED.config, depth)
    assert table[2].excess == 0 and table[2].same_top == 1
    assert table[0].excess == pytest.approx(table[0].loss - table[2].loss)


def test_policies_that_keep_everything_are_full_and_others_are_not() -> None:
    names = ("full", "first-8", "cyclic-8", "first-1", "cyclic-2", "terminal")
    table = {row.name: row for row in kv_quality.policy_table(LOADED, ROWS, names)}
    full = float(row_losses(DEPTH).mean())
    for name in names[:3]:
        assert table[name].loss == pytest.approx(full, abs=1e-4)
        assert table[name].kv_bytes == kv_bytes_per_token(LOADED.config)
    for name in names[3:]:
        assert abs(table[name].loss - full) > 1e-3
        assert table[name].kv_bytes < table["full"].kv_bytes
    assert {row.mean_loops for row in table.values()} == {DEPTH}


def test_threshold_0_is_full_depth() -> None:
    (entry,) = kv_quality.exit_table(LOADED, ROWS, (0.0,))
    for row in (entry.engine, entry.exact):
        assert row.mean_loops == DEPTH
        assert row.loss == pytest.approx(float(row_losses(DEPTH).mean()), abs=1e-4)
        assert row.same_top == 1
    assert abs(entry.approximation) < 1e-5


def test_exits_with_exact_kv_are_read_from_states_of_full_depth() -> None:
    """Threshold 1 lets every token but the prompt's leave after loop 2: then each row is a dense
    pass whose readout takes the state of loop 2, and of loop 8 at its first token."""
    (forced,) = kv_quality.exact_exits(LOADED.model, ROWS, (1.0,))
    model = LOADED.model
    assert (forced.loops[:, 0] == DEPTH).all()
    leaves = forced.loops == 2
    assert leaves[:, 1:].float().mean() > 0.9  # where the state does not turn by a right angle
    for b, row in enumerate(ROWS):
        batch, backend = sequence_batch(row[:-1].tolist()), DenseBackend()
        with torch.inference_mode():
            e, p = model.encode(batch, None, backend)
            h, states = model.initial_state(e), []
            for t in range(DEPTH):
                h = model.step(h, model.input_term(e), model.core_pass(p, batch, t))
                states.append(h)
            read = torch.stack([states[n - 1][s] for s, n in enumerate(forced.loops[b].tolist())])
            logits = model.logits(model.finish(read, model.coda_pass(p, batch)), backend)
        scores = logits.double().log_softmax(-1)
        expected = -scores[range(len(row) - 1), row[1:]]
        torch.testing.assert_close(forced.losses[b], expected, atol=1e-4, rtol=0)


def test_the_first_exit_is_exact_in_the_engine_and_later_ones_are_not() -> None:
    """A row's second token sees the first alone, which has run to the end. Later ones see what
    others left behind, if they run deeper than those."""
    engine = force(LOADED, ROWS, exit_threshold=0.03)
    (exact,) = kv_quality.exact_exits(LOADED.model, ROWS, (0.03,))
    assert (engine.loops[:, 1] < DEPTH).any()
    assert (engine.loops[:, 2:] > engine.loops[:, 1:2]).any()
    assert torch.equal(engine.loops[:, :2], exact.loops[:, :2])
    torch.testing.assert_close(engine.losses[:, :2], exact.losses[:, :2], atol=1e-4, rtol=0)
    assert (engine.losses[:, 2:] - exact.losses[:, 2:]).abs().max() > 1e-3


def test_a_policy_that_overwrites_computes_shared_prompts_again() -> None:
    prefix, tails = list(range(32)), [[1, 2], [3, 4, 5], [6]]
    full, terminal = (
        kv_quality.shared_prompt(LOADED, prefix, tails, policy) for policy in ("full", "terminal")
    )
    assert full.prompt_tokens == terminal.prompt_tokens == 34 + 35 + 33
    assert full.computed_tokens == 34 + 3 + 1  # two blocks of 16 are found
    assert terminal.computed_tokens == 34 + 35 + 33


# -- the study


def an_exit(threshold: float, excess: float) -> Exit:
    row = Row("", 1.0, excess, 0.0, 1.0, 8.0, 0, 0, 0.0)
    return Exit(threshold, row, row, 0.0, 0.0)


def test_the_chosen_threshold_is_the_largest_that_is_cheap() -> None:
    exits = [an_exit(0.0, 0.0), an_exit(1e-3, 0.004), an_exit(1e-2, 0.009), an_exit(0.1, 0.2)]
    assert study.chosen_threshold(exits) == 1e-2
    assert study.chosen_threshold(exits[3:]) == 0.1
    assert study.chosen_threshold([exits[0], an_exit(0.1, 0.2), an_exit(0.2, 0.3)]) == 0.1


def test_mixed_depths_and_early_exit_are_served_in_every_way() -> None:
    exits = [an_exit(0.0, 0.0), an_exit(1e-3, 0.004), an_exit(1e-2, 0.009), an_exit(0.1, 0.2)]
    plan = study.Plan(speed_depths=(8, 1))
    alone = study.fixed_settings(plan, exits, 8)
    names = ["depth 8", "depth 1", "exit 0.001", "exit 0.01", "exit 0.1"]
    assert [setting.name for setting in alone] == names
    together = [*alone, *study.batching_settings(plan, 0.01, 8)]
    ways = {(s.workload, s.batching): s for s in together}
    assert len(ways) == len(together) == len({setting.name for setting in together})
    for workload, depths, threshold in (("mixed", plan.mixed, None), ("exit 0.01", (8,), 0.01)):
        for way in LOOP_BATCHING:
            setting = ways[workload, way]
            assert (setting.depths, setting.exit_threshold) == (depths, threshold)
            usual = way == EngineConfig.loop_batching
            assert setting.name == (workload if usual else f"{workload}, {way}")


# Steps and core applications of 2 requests of 5 tokens, and tokens a second in two rounds.
COUNTED = {
    "continuous": (20, 40, (10.0, 30.0)),
    "patient": (15, 50, (12.0, 12.0)),
    "lockstep": (10, 80, (10.0, 10.0)),
}
MIXED = [Setting("mixed", (1, 8), batching=way) for way in COUNTED]


def counted() -> BenchmarkResult:
    arms = {}
    for setting, (steps, applications, speeds) in zip(MIXED, COUNTED.values(), strict=True):
        metrics = {"steps": (steps,) * 2, "core_applications": (applications,) * 2}
        metrics |= {"tokens_per_second": speeds, "tokens_per_cpu_second": speeds}
        arms[setting.name] = {metric: Summary.of(values) for metric, values in metrics.items()}
    settings = {"requests": 2, "max_tokens": 5, "concurrency": 2}
    return BenchmarkResult("", "", {}, {}, None, settings, 2, 0, {}, arms)


def test_weight_bytes_follow_from_the_counts_and_speeds_are_compared_in_their_round() -> None:
    alone = Setting("depth 8", (8,))  # served in one way only: nothing to compare
    table = study.batching(LOADED.config, [alone, *MIXED], counted())
    assert [entry["batching"] for entry in table] == list(LOOP_BATCHING)
    sizes = {name: p.numel() for name, p in LOADED.model.named_parameters()}
    core = sum(size for name, size in sizes.items() if name.startswith("core."))
    looked_up = ("core.", "value_embeds.", "ln_")  # and the vectors of norms
    rest = sum(size for name, size in sizes.items() if not name.startswith(looked_up))
    for entry, (steps, applications, _) in zip(table, COUNTED.values(), strict=True):
        assert (entry["steps"], entry["core_applications"]) == (steps, applications)
        expected = 2 * (applications * core + steps * rest) / 10
        assert entry["weight_bytes"]["own"] == pytest.approx(expected)
    ratios = [entry["ratios"]["second"]["values"] for entry in table]
    assert ratios == [(1.0, 3.0), (1.2, 1.2), (1.0, 1.0)]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """`minifer parcae tradeoff --quick --out FOLDER` on a model of random weights."""
    folder = tmp_path_factory.mktemp("tradeoff")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "minifer.weights.resolve.load_model", lambda name: loaded_model(vocab_size=288)
        )
        status = cli.main(["parcae", "tradeoff", "--quick", "--out", str(folder)])
    assert status == 0
    return folder, json.loads((folder / "parcae_tradeoff.json").read_text())


def test_the_command_measures_through_engine_and_server(smoke: tuple[Path, dict]) -> None:
    _, data = smoke
    assert data["engine_against_dense"] < 1e-4
    by_name = {entry["name"]: entry for entry in data["tradeoff"]}
    assert next(iter(by_name)) == "depth 8"
    for name, depth in (("depth 8", 8), ("depth 1", 1)):
        found = by_name[name]["concurrent"]
        assert found["tokens_per_second"] > 0 and found["mean_loops"] == depth
    assert by_name["depth 1"]["single"]["core_applications"] == 1
    depths = study.QUICK.mixed
    for setting in MIXED:
        mean = data["speed"]["concurrent"]["arms"][setting.name]["mean_loops"]["median"]
        assert mean == pytest.approx(sum(depths) / len(depths))
    mixed = {e["batching"]: e for e in data["batching"] if e["workload"] == "mixed"}
    assert list(mixed) == list(LOOP_BATCHING)
    assert mixed["continuous"]["core_applications"] < mixed["lockstep"]["core_applications"]
    assert mixed["continuous"]["steps"] > mixed["lockstep"]["steps"]


def test_the_report_says_what_the_data_say(smoke: tuple[Path, dict]) -> None:
    folder, data = smoke
    text = (folder / "parcae_tradeoff.md").read_text()
    for row in (*data["policies"], *data["depths"]):
        assert f"{abs(row['excess']):.4f} ± {row['error']:.4f}" in text
    for entry in data["exits"]:
        assert f"{abs(entry['approximation']):.4f} ± {entry['error']:.4f}" in text
    for entry in (*data["batching"], *data["simulated"]):
        assert f"{entry['core_applications']:.0f} | {entry['steps']:.0f} |" in text
    assert data["started"] in text and data["machine"]["cpu"] in text
    assert not re.search(r"nan|inf\b|None|-0\.0000", text)


def test_longer_runs_of_the_mixed_workload_are_simulated() -> None:
    """Three seats, a wave of three requests each: a wave in lockstep takes 5 tokens of 8 loops."""
    plan = study.Plan(requests=(1, 3), concurrency=3, answer_len=5, longer=(1, 2))
    table = study.simulated(LOADED.config, plan)
    found = [(e["requests"], e["core_applications"], e["steps"]) for e in table]
    assert found[2] == (3, 40, 5) and found[5] == (6, 80, 10)
    assert [e["batching"] for e in table] == [*LOOP_BATCHING] * 2
    for entry in table:
        cores = entry["core_applications"] + edge_of(LOADED.config) * entry["steps"]
        core = 2 * parameters(LOADED.config).core
        tokens = entry["requests"] * 5
        assert entry["weight_bytes"]["own"] == pytest.approx(cores * core / tokens)


def test_the_report_says_who_reads_least_and_who_is_fastest(smoke: tuple[Path, dict]) -> None:
    alone = Setting("depth 8", (8,))  # served in one way only: nothing to compare
    table = study.batching(LOADED.config, [alone, *MIXED], counted())
    *_, found, _ = losses.sentences({**smoke[1], "batching": table})
    assert "continuous applies the core 0.50 times as often and takes 2.00 times" in found
    assert "tokens/s measured here 2.00× (1.00 to 3.00)" in found
    assert "patient applies the core 0.62 times as often and takes 1.50 times" in found
    # 40 cores and 20 edges against 50 and 15: an edge is 1.3 cores here, and 2 would be even.
    assert edge_of(LOADED.config) < 2 < edge_of(PRESETS[study.SCALED])
    assert "The fewest weight bytes: continuous here, patient with the layers of" in found
    assert "Python's time: continuous." in found


def test_the_figures_are_drawn(smoke: tuple[Path, dict]) -> None:
    folder, _ = smoke
    names = sorted(path.name for path in folder.glob("*.svg"))
    assert names == [f"parcae_tradeoff{part}.svg" for part in ("", "_batching", "_exit", "_kv")]
    assert all("<svg" in (folder / name).read_text() for name in names)


def test_held_out_rows_are_spread_and_whole() -> None:
    rows = study.held_out_rows(loaded_model(vocab_size=288), 4, 24)
    assert rows.shape == (4, 25) and len({tuple(row.tolist()) for row in rows}) == 4
    with pytest.raises(ValueError, match="got 10000 rows of 25"):
        study.held_out_rows(loaded_model(vocab_size=288), 10000, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (1, 2, 4)}, r"mean depth 8 .* without \[8\]"),
        ({"depths": (8,), "speed_depths": (8, 2)}, r"without \[2\]"),
        ({"thresholds": (0.0,)}, "thresholds must hold one above 0"),
    ],
)
def test_a_plan_that_lacks_what_it_needs_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.study(LOADED, study.Plan(**changes))
    assert DEPTH in study.Plan().depths


def test_a_model_without_a_loop_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parcae", "tradeoff", "--model", "minifer-tiny"]) == 2
    assert "loop model such as parcae-tiny" in capsys.readouterr().err


def test_a_file_for_a_folder_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parcae", "tradeoff", "--out", __file__]) == 2
    assert f"--out must be a folder, and {__file__} is a file" in capsys.readouterr().err


def test_a_request_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of what was read so far would look like one."""

    def broken(self, logits, rows):
        raise RuntimeError("no")

    monkeypatch.setattr(teacher_forcing.Teacher, "__call__", broken)
    with pytest.raises(RuntimeError, match="ended early"):
        force(LOADED, ROWS)
