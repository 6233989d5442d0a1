"""`minifer parcae laws`: its parts, its verdicts, its files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from minifer import cli
from minifer.cli import parcae_laws
from minifer.parcae.lab.laws import depth_law, depth_task
from minifer.parcae.lab.laws import plots as laws_plots
from minifer.parcae.lab.laws import study as laws
from minifer.parcae.lab.laws.depth_law import DEPTHS, DepthCurve, DepthJob, fit_forms, group
from minifer.parcae.lab.laws.depth_task import TaskJob, TaskResult
from minifer.parcae.lab.laws.report import _depth_task, depth_findings, markdown
from minifer.parcae.lab.pool import run_all


@pytest.fixture(scope="module", autouse=True)
def few_validation_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth_law, "VALIDATION_ROWS", 8)
        yield


def curve(depth: str, mu: int, seed: int, losses: list[float]) -> DepthCurve:
    return DepthCurve(DepthJob(depth, mu, seed), tuple(losses), 0.0)


def decaying(mu: int, seed: int, shift: float = 0.0) -> DepthCurve:
    """z μ = 8."""
    losses = [2.2 + shift + 0.9 * math.exp(-8 * T / mu) for T in DEPTHS]
    return curve("poisson", mu, seed, losses)


def v_shaped(mu: int, seed: int) -> DepthCurve:
    return curve("constant", mu, seed, [2.2 + 0.02 * abs(math.log(T / mu)) for T in DEPTHS])


# -- the parts


def test_a_training_is_the_same_again_and_falls_with_depth() -> None:
    job = DepthJob("poisson", 4, seed=1, steps=3)
    found = depth_law.run(job)
    assert found.losses == depth_law.run(job).losses
    assert len(found.losses) == len(DEPTHS) and all(2 < loss < 5 for loss in found.losses)
    assert found.losses != depth_law.run(DepthJob("constant", 4, seed=1, steps=3)).losses


def test_each_setting_is_trained_with_each_seed() -> None:
    made = depth_law.jobs(seeds=(3, 4))
    assert len(made) == 2 * len(depth_law.SETTINGS) == len(set(made))
    assert {job.mu for job in made if job.depth == "poisson"} == {2, 4, 8, 12}
    assert {(j.depth, j.mu) for j in made} >= {("poisson-batch", 8), ("constant", 8)}


def test_forms_are_compared_beyond_the_depths_they_saw() -> None:
    fits = fit_forms(decaying(8, 0))
    assert fits["exponential"].fit.z == pytest.approx(1.0)
    assert fits["exponential"].fit.determined
    beyond = {form: found.beyond for form, found in fits.items()}
    assert beyond["exponential"] < 1e-9 < 0.01 < beyond["shifted power"] < beyond["power"]  # type: ignore[operator]
    seen = fits["power"].seen
    assert seen is not None and seen.z != fits["power"].fit.z
    assert fit_forms(decaying(2, 0))["exponential"].beyond is None  # two depths fix no curve


def test_a_curve_flat_from_two_loops_on_determines_no_rate() -> None:
    flat = curve("poisson", 4, 0, [2.3, *([2.2] * (len(DEPTHS) - 1))])
    rising = curve("poisson", 2, 0, [2.2 + 0.01 * math.log(T) for T in DEPTHS])
    for found in (flat, rising):
        assert not fit_forms(found)["exponential"].fit.determined


def test_a_group_has_the_mean_and_the_overshoot_of_its_seeds() -> None:
    found = group([decaying(8, 0), v_shaped(4, 0), decaying(8, 1, shift=0.2), v_shaped(4, 1)])
    assert [(g.depth, g.mu, g.seeds) for g in found] == [
        ("poisson", 8, (0, 1)),
        ("constant", 4, (0, 1)),
    ]
    assert found[0].mean[-1] == pytest.approx(2.3) and found[0].spread[-1] == pytest.approx(
        0.2 / 2**0.5
    )
    assert found[0].best == 24 and found[0].overshoot == 0
    assert found[1].best == 4 and found[1].overshoot == pytest.approx(0.02 * math.log(6))


def test_jobs_come_back_in_their_order() -> None:
    seen: list[int] = []
    assert run_all(lambda n: n * n, [3, 1, 2], 1, seen.append) == [9, 1, 4] and seen == [3, 1, 2]
    assert run_all(abs, [], 2) == []
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        run_all(abs, [1], 0)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one() -> None:
    jobs = depth_law.jobs((("poisson", 4), ("constant", 2)), seeds=(0,), steps=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth_law, "VALIDATION_ROWS", 256)  # what the other processes have
        alone = run_all(depth_law.run, jobs, 1)
    together = run_all(depth_law.run, jobs, 2)
    assert [found.losses for found in alone] == [found.losses for found in together]


def test_a_question_is_solved_from_where_its_answers_stay_right() -> None:
    def result(seed: int, columns: list[list[float]]) -> TaskResult:
        return TaskResult(TaskJob(seed), tuple(zip(*columns, strict=True)), 0.0)

    n = len(depth_task.DEPTHS)
    always, never = [1.0] * n, [0.2] * n
    late = [0.2, 0.2, 0.95, *([1.0] * (n - 3))]
    lost = [1.0, *([0.2] * (n - 2)), 1.0]  # what was right once does not count
    found = depth_task.summarise([result(s, [always, late, lost, never]) for s in (0, 1)])
    assert found.solved_from == (1, 3, depth_task.DEPTHS[-1], None)
    unsure = depth_task.summarise([result(0, [never]), result(1, [late])])
    assert unsure.solved_from == (3,) and unsure.mean[2] == pytest.approx((0.575,))
    text = "\n".join(_depth_task(laws.task([result(0, [always, late, lost, never])])))
    assert f"0: T = 1; 1: T = 3; 2: T = {depth_task.DEPTHS[-1]}; 3: never." in text


# -- the verdicts


def test_the_report_says_what_the_curves_say() -> None:
    curves = [decaying(8, 0), decaying(8, 1, 0.01), decaying(12, 0), v_shaped(4, 0), v_shaped(4, 1)]
    lines = depth_findings(laws.test_time(curves))
    text = "\n".join(lines)
    assert "fits all depths best in 3 of 3 curves" in text
    assert "predicts T > μ best in 3 of 3 curves" in text
    assert "μ = 8: 8.0 ± 0.0; μ = 12: 8.0." in text
    assert "constant, μ = 4: loses by looping on (more than twice its spread)" in text
    assert "Poisson, per sequence, μ = 12: stays flat" in text


def test_a_power_law_that_wins_is_not_hidden() -> None:
    losses = [2.2 + 0.9 * T**-0.5 for T in DEPTHS]
    lines = depth_findings(laws.test_time([curve("poisson", 8, 0, losses)]))
    assert "best in 0 of 1 curves" in lines[0] and "best in 0 of 1 curves" in lines[1]


def test_the_published_part_is_computed_from_the_law() -> None:
    text = markdown(laws.study(("training",)), "minifer parcae laws --part training")
    assert "| parcae-140m | 5.26e+08 | 1.07e+09 | 8.28e+08 | 1.36e+09 | 2.04 | 1.64 |" in text
    assert "0.80 by the count below, 0.86 by the public script's" in text
    assert "μ* loses to μ = 1 in 4 of 9 rows" in text
    assert "φ = 0.46 (95% interval 0.41–0.53" in text and "costs like 1B" in text
    assert "https://arxiv.org/abs/2604.21106" in text and "OpenMythos" in text
    assert "measured here)" not in text  # nothing was


# -- the command


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("laws")
    assert cli.main(["parcae", "laws", "--quick", "--out", str(folder)]) == 0
    return folder, json.loads((folder / "parcae_laws.json").read_text())


@pytest.mark.slow
def test_the_command_writes_what_it_found(smoke: tuple[Path, dict]) -> None:
    folder, data = smoke
    assert data["quick"] and data["seeds"] == [0] and data["trainings"] == 9
    assert data["versions"]["torch"] and data["seconds"] > 0
    assert len(data["test_time"]["curves"]) == 2 and len(data["isoflop"]["points"]) == 6
    text = (folder / "parcae_laws.md").read_text()
    assert text.startswith("# What more loops are worth\n\nBy `minifer parcae laws --quick`")
    assert "Quick run" in text and "±" in text


@pytest.mark.slow
def test_the_command_draws_a_figure_a_part(smoke: tuple[Path, dict]) -> None:
    folder, data = smoke
    names = sorted(path.name for path in folder.glob("*.svg"))
    assert names == [
        "parcae_laws.svg",
        "parcae_laws_isoflop.svg",
        "parcae_laws_task.svg",
        "parcae_laws_training.svg",
    ]
    axes = laws_plots.depth_figure(data["test_time"]).axes
    assert [a.get_xlabel() for a in axes] == ["T, loops when the model runs"] * 3
    assert "nats a token" in axes[0].get_ylabel() and "measured here" in axes[0].get_title()
    computed = laws_plots.training_figure(data["training"]).axes
    assert "reported" in computed[0].get_title() and "computed" in computed[1].get_title()


def test_a_part_that_trains_nothing_is_written_alone(tmp_path: Path) -> None:
    words = ["parcae", "laws", "--quick", "--part", "training", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    data = json.loads((tmp_path / "parcae_laws.json").read_text())
    assert data["trainings"] == 0 and data["versions"]["torch"]
    assert "training" in data and not {"test_time", "isoflop"} & {k for k in data if data[k]}
    text = (tmp_path / "parcae_laws.md").read_text()
    assert "By `minifer parcae laws --part training --quick`" in text
    assert (tmp_path / "parcae_laws_training.svg").exists()
    assert not (tmp_path / "parcae_laws_isoflop.svg").exists()


def test_parts_and_seeds_are_chosen() -> None:
    assert parcae_laws.PARTS == laws.PARTS  # the command names them without importing torch
    assert laws.plan(("training",), (0,), False) == []
    both = laws.plan(("isoflop", "test-time", "depth-task"), (5, 7), True)
    assert {job.seed for job in both} == {5, 7}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--seeds", "1,x"], "must be integers such as 0,1,2, got '1,x'"),
        (["--out", __file__], f"--out must be a folder, and {__file__} is a file"),
        (["--seeds", "1,1"], "seeds must be different integers, 0 to 2147483647, got [1, 1]"),
        (["--seeds=-1"], "seeds must be different integers, 0 to 2147483647, got [-1]"),
        (["--seeds", "2147483648"], "seeds must be different integers, 0 to 2147483647, got [2"),
        (["--part", "luck"], "luck"),
    ],
)
def test_bad_options_are_refused_by_name(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["parcae", "laws", *options]) == 2
    assert named in capsys.readouterr().err
