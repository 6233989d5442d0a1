"""The climb: build each rung, hold it against float32, time it alone, then all of them in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifer.perf.bench import Summary, run_benchmark
from minifer.perf.gpu.cell import (
    STEPS_PER_SAMPLE,
    Cell,
    DecodeCase,
    build_case,
    float32_logits,
)
from minifer.perf.gpu.ladder import Ladder, Row, judge, line
from minifer.perf.gpu.rungs import RUNGS, Rung, Step
from minifer.perf.gpu.timing import count_launches, seconds_per_call

BASELINE = "eager"
_SAMPLE_SECONDS = 0.01
_SAMPLES_ALONE = 3
_MAX_ROUNDS = 20


class DeviceLostError(RuntimeError):
    """A kernel broke the device's context: nothing more can run in this process."""


@torch.no_grad()
def climb(
    ladder: Ladder,
    cells: Iterable[Cell],
    rungs: Sequence[Rung],
    device: torch.device,
    budget: float,
    say: Callable[[str], None] = print,
) -> None:
    """Run all rungs of all cells that `ladder` does not hold yet.

    budget: seconds a cell; what compiles for long comes last, and a rung that is likely to need
    more than is left becomes a row that says so. settings of the ladder: its seed and its number
    of probes count here. Launches are counted in the last cell only, after its times: a profiler
    may slow down what follows it. Raises `DeviceLostError` once a kernel has broken the device:
    resume in a new process.
    """
    cells = list(cells)
    for cell in cells:
        say(str(cell))
        _forget_other_cells(device)
        _climb_cell(ladder, cell, rungs, device, budget, say, count=cell is cells[-1])


def _climb_cell(
    ladder: Ladder,
    cell: Cell,
    rungs: Sequence[Rung],
    device: torch.device,
    budget: float,
    say: Callable[[str], None],
    count: bool,
) -> None:
    """One cell; what it holds in memory ends with this call."""
    ends, entry = time.monotonic() + budget, ladder.entry(cell)
    done = {row["rung"] for row in entry["rows"]}
    todo = [rung for rung in rungs if rung.name not in done]
    if not todo:
        return
    try:
        case = build_case(cell, device, ladder.settings["seed"], ladder.settings["probes"])
        truth = float32_logits(case)
    except RuntimeError as error:  # out of memory
        entry["reason"] = f"it could not be set up: {sentence(error)}"
        ladder.flush()
        return
    again = [rung for rung in rungs if rung.name == BASELINE and rung not in todo]
    climbing = _Climb(ladder, entry, cell, case, truth, ends, say)
    climbing.run(again + sorted(todo, key=lambda rung: (rung.name != BASELINE, rung.seconds)))
    if count:
        climbing.count_launches()


def _forget_other_cells(device: torch.device) -> None:
    """What they compiled would be tried first, and holds their weights and caches."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class _Climb:
    """One cell on its way through the rungs. alive: rungs that may be timed in turns."""

    ladder: Ladder
    entry: dict[str, Any]
    cell: Cell
    case: DecodeCase
    truth: Tensor
    ends: float
    say: Callable[[str], None]
    alive: dict[str, tuple[Row, Step]] = field(default_factory=dict)

    def run(self, rungs: Sequence[Rung]) -> None:
        for rung in rungs:
            row = Row(rung.name, rung.change)
            self._keep(row)
            self._climb(rung, row)
            self._keep(row)
            self.say(line(row))
            if row.status == "failed" and not _works(self.case.device):
                raise DeviceLostError(f"{rung.name} of {self.cell}: {row.reason}")
        if len(self.alive) > 1:
            self._in_turns()

    def _keep(self, row: Row) -> None:
        """Put the row in its place and write the file."""
        rows = {r["rung"]: r for r in self.entry["rows"]} | {row.rung: asdict(row)}
        order = [*RUNGS, *rows]
        self.entry["rows"][:] = sorted(rows.values(), key=lambda r: order.index(r["rung"]))
        self.ladder.flush()

    def _climb(self, rung: Rung, row: Row) -> None:
        """Build, compare, time alone. Whatever goes wrong becomes the row's reason."""
        device, left = self.case.device, self.ends - time.monotonic()
        reason = rung.impossible(device)
        likely = 0.0 if rung.interpreted(device) else rung.seconds
        if reason is None and left < likely:
            reason = f"{max(left, 0):.0f} s of the cell's time left, it takes about {likely:.0f}"
        if reason is not None:
            row.refuse("skipped", reason)
            return
        started = time.monotonic()
        try:
            step = rung.build(self.case)
            row.notes = dict(step.notes)
            self._compare(step, row)
            row.build_seconds = round(time.monotonic() - started, 3)
            if rung.interpreted(device) and row.status == "ok":
                row.reason = "in Triton's interpreter: its time says nothing"
            elif row.status == "ok":
                self._alone(step, row)
                self.alive[rung.name] = (row, step)
        except Exception as error:  # a compiler, a driver, a kernel: each is a row
            row.refuse("failed", sentence(error))

    def _compare(self, step: Step, row: Row) -> None:
        """Logits and tokens of every probe against float32's."""
        logits, tokens = [], []
        for probe in self.case.probes:
            self.case.batch.token_ids.copy_(probe)
            self.case.forget()
            step.begin()
            ours, best = step.run()
            logits.append(ours.float().clone())
            tokens.append(best.clone().view(-1))
            step.check()
        got, chosen = torch.stack(logits), torch.stack(tokens)
        if got.shape != self.truth.shape:
            row.refuse("wrong", f"logits {list(got.shape)} instead of {list(self.truth.shape)}")
        elif not bool(torch.isfinite(got).all()):
            row.refuse("wrong", "its logits hold NaN or infinity")
        else:
            delta = got - self.truth
            agreement = (chosen == self.truth.argmax(-1)).double().mean().item()
            rms = delta.double().pow(2).mean().sqrt().item()
            judge(row, delta.abs().max().item(), rms, agreement, self._eager_rms(row))
            if not bool((chosen == got.argmax(-1)).all()):
                row.refuse("wrong", "its token is not the likeliest of its own logits")

    def _eager_rms(self, row: Row) -> float | None:
        rows = [r for r in self.entry["rows"] if r["rung"] == BASELINE and r["error"]]
        return rows[0]["error"]["rms"] if rows and row.rung != BASELINE else None

    def _alone(self, step: Step, row: Row) -> None:
        repeats = self._repeats(self._sample(step, 1))
        samples = [self._sample(step, repeats) for _ in range(_SAMPLES_ALONE)]
        self._time(row, Summary.of(samples), "alone")

    def count_launches(self) -> None:
        """Of every rung alive."""
        for row, step in self.alive.values():
            try:
                step.begin()
                launches = count_launches(step.run, self.case.device)
                row.launches = None if launches is None else asdict(launches)
            except Exception as error:  # no profiler here: the times stay
                row.notes["launches"] = f"not counted: {sentence(error)}"
            self._keep(row)

    def _in_turns(self) -> None:
        """Rounds in which every rung alive runs a sample, as many as the cell's time allows."""
        samples = {
            name: (step, self._repeats(row.seconds["median"]))
            for name, (row, step) in self.alive.items()
            if row.seconds is not None
        }
        first = time.monotonic()
        for step, repeats in samples.values():
            self._sample(step, repeats)
        a_round = time.monotonic() - first
        rounds = int(max(3, min(_MAX_ROUNDS, (self.ends - first) / max(a_round, 1e-6))))
        arms = {
            name: lambda s=step, n=repeats: {"seconds": self._sample(s, n)}
            for name, (step, repeats) in samples.items()
        }
        try:
            result = run_benchmark("decode-ladder", arms, runs=rounds, warmup=0)
        except RuntimeError as error:
            self.entry["reason"] = f"the turns broke off, what was timed alone stays: {error}"
            self.ladder.flush()
            return
        for name, metrics in result.arms.items():
            row, _ = self.alive[name]
            self._time(row, metrics["seconds"], "in turns")
            self._keep(row)
        self.say(f"  {rounds} rounds in turns")

    def _sample(self, step: Step, repeats: int) -> float:
        step.begin()
        seconds = seconds_per_call(step.run, repeats, self.case.device)
        step.check()
        return seconds

    @staticmethod
    def _repeats(seconds: float) -> int:
        return max(1, min(STEPS_PER_SAMPLE, round(_SAMPLE_SECONDS / max(seconds, 1e-9))))

    def _time(self, row: Row, summary: Summary, timing: str) -> None:
        cost = self.cell.cost()
        self.ladder.time(row, summary, timing, cost.weight_bytes + cost.kv_bytes)


def sentence(error: BaseException) -> str:
    """An error on one line, at most 300 characters, its class first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _works(device: torch.device) -> bool:
    """Does the device still answer? An illegal access ends all work of a process on a GPU."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True
