"""The benchmark runner on a clock that the test moves: what it reports is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minifer.perf.bench import SCHEMA_VERSION, Summary, git_state, machine, run_benchmark, versions


class Workbench:
    """A clock, and arms that make it advance by given seconds, one value a call."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def arm(self, name: str, seconds: list[float]) -> Callable[[], None]:
        remaining: Iterator[float] = iter(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += next(remaining)

        return call


def test_arms_take_turns_and_warm_up_rounds_do_not_count() -> None:
    bench = Workbench()
    result = run_benchmark(
        "turns",
        {"a": bench.arm("a", [100, 1, 3, 2]), "b": bench.arm("b", [100, 2, 6, 8])},
        runs=3,
        warmup=1,
        clock=bench.clock,
    )
    assert "".join(bench.calls) == "abababab"
    assert result.arms["a"]["seconds"].values == (1, 3, 2)
    assert result.arms["b"]["seconds"].median == 6


def test_the_ratio_is_taken_within_a_round_so_drift_cancels() -> None:
    """The machine gets ten times slower; b stays twice as slow as a."""
    bench = Workbench()
    drift = [1, 2, 5, 10]
    result = run_benchmark(
        "drift",
        {
            "a": bench.arm("a", [1.0 * d for d in drift]),
            "b": bench.arm("b", [2.0 * d for d in drift]),
        },
        runs=4,
        warmup=0,
        clock=bench.clock,
    )
    ratio = result.ratios["b"]["seconds"]
    assert (ratio.median, ratio.min, ratio.max, ratio.iqr) == (2, 2, 2, 0)
    assert "a" not in result.ratios  # the baseline


def test_summary_is_the_textbooks() -> None:
    summary = Summary.of([4.0, 1.0, 2.0, 3.0, 10.0])
    assert (summary.median, summary.min, summary.max, summary.iqr) == (3, 1, 10, 2)
    assert Summary.of([7.0]).iqr == 0


def test_an_arm_may_return_a_number_or_several_by_name() -> None:
    values = iter([10.0, 20.0])
    result = run_benchmark(
        "metrics",
        {"one": lambda: next(values), "many": lambda: {"tokens_per_s": 40.0, "seconds": 0.5}},
        runs=2,
        warmup=0,
        units={"tokens_per_s": "tok/s"},
        clock=Workbench().clock,
    )
    assert result.arms["one"]["value"].values == (10, 20)
    assert result.arms["many"]["seconds"].values == (0.5, 0.5)  # its own, not the clock's 0
    assert result.ratios["many"] == {}  # seconds of "one" are 0 on a clock that stands
    assert result.to_dict()["arms"]["many"]["tokens_per_s"]["unit"] == "tok/s"


def test_the_json_says_all_that_the_schema_promises(tmp_path: Path) -> None:
    bench = Workbench()
    arms = {"slow": bench.arm("slow", [2, 2]), "fast": bench.arm("fast", [1, 1])}
    result = run_benchmark(
        "schema", arms, runs=2, warmup=0, settings={"seed": 7}, clock=bench.clock
    )
    result.write(tmp_path / "result.json")
    out = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert out["schema_version"] == SCHEMA_VERSION
    expected = (
        "schema_version name started machine versions git settings runs warmup arms ratios details"
    )
    assert set(out) == {*expected.split(), "order"}
    assert out["order"] == ["slow", "fast"]
    assert out["settings"] == {"seed": 7}
    assert out["arms"]["fast"]["seconds"] == {
        "unit": "s",
        "values": [1, 1],
        "median": 1,
        "min": 1,
        "max": 1,
        "iqr": 0,
    }
    assert out["ratios"]["fast"]["seconds"]["median"] == 0.5
    assert out["started"].endswith("+00:00")


def test_the_table_has_a_line_an_arm_and_says_where_it_ran() -> None:
    bench = Workbench()
    arms = {"eager": bench.arm("eager", [2, 2]), "compiled": bench.arm("compiled", [1, 1])}
    settings = {"model": "m", "batch": [1, 16], "engine": {"dtype": "bfloat16"}, "none": {}}
    result = run_benchmark("t", arms, runs=2, warmup=0, clock=bench.clock, settings=settings)
    columns, eager, compiled, _, *where = result.table().splitlines()
    assert columns.split()[:3] == ["arm", "metric", "median"]
    assert eager.split() == ["eager", "seconds", "2", "0", "2", "2", "s"]
    assert compiled.split()[-3:] == ["0.5×", "±", "0"]
    assert where == result.header()
    assert machine()["cpu"] in where[0]
    assert result.git is None or f"; commit {result.git['commit'][:12]}" in where[1]
    assert where[2] == "settings  model m, batch 1,16, engine dtype=bfloat16, none default"
    assert where[3] == "rounds    2, after 0 that do not count; arms in turns"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arms": {}}, "at least one arm"),
        ({"runs": 0}, "runs must be at least 1"),
        ({"warmup": -1}, "warmup at least 0"),
        ({"arms": {"a": lambda: float("nan")}}, "value of arm 'a' must be finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_benchmark("bad", **{"arms": {"a": lambda: None}, **kwargs})


def test_metrics_that_come_and_go_are_refused() -> None:
    returned = iter([{"x": 1.0}, {"y": 1.0}])
    with pytest.raises(ValueError, match="the same metrics each time, got seconds, x and then"):
        run_benchmark("bad", {"a": lambda: next(returned)}, runs=2, warmup=0)


def test_the_commit_is_that_of_the_source_tree(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*args: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["modified"]


def test_the_machine_is_described_without_importing_torch() -> None:
    code = (
        "import sys; from minifer.perf.bench import machine; "
        "assert machine()['threads'] is None; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert machine()["cores"] >= 1
    assert {"python", "minifer", "torch"} <= versions().keys()
