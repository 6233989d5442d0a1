"""The lines that only a GPU reaches, against a stand-in for torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from minifer.perf.costs import OpCost
from minifer.perf.gpu import kernels, timing
from minifer.perf.gpu.kernels import KernelCase, run_case
from minifer.perf.gpu.timing import Launches, captured, count_launches, seconds_per_call

GPU = torch.device("cuda")


class FakeCuda:
    """Each call to `work` takes 2 ms on its clock, eager or replayed."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []
        self.recording: list[Callable[[], object]] | None = None

    def work(self) -> str:
        if self.recording is not None:
            self.recording.append(self._run)
        else:
            self._run()
        return "result"

    def _run(self) -> None:
        self.now += 2.0
        self.log.append("work")

    # -- torch.cuda

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def synchronize(self, device: object = None) -> None:
        assert self.recording is None, "a capture must not wait for the device"

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"))

    def graph_object(self) -> SimpleNamespace:
        recorded: list[Callable[[], object]] = []
        return SimpleNamespace(
            recorded=recorded, replay=lambda: [call() for call in recorded] and None
        )

    @contextlib.contextmanager
    def graph(self, graph: SimpleNamespace):
        self.recording = graph.recorded
        yield
        self.recording = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, stand_in in {
        "Event": fake.event,
        "synchronize": fake.synchronize,
        "Stream": fake.stream,
        "current_stream": fake.stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": fake.graph_object,
        "graph": fake.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return fake


def test_time_is_read_from_events_and_shared_by_the_calls(cuda: FakeCuda) -> None:
    assert seconds_per_call(cuda.work, 5, GPU) == pytest.approx(0.002)
    assert cuda.log == ["work"] * 5


def test_a_capture_warms_up_beside_it_and_runs_nothing(cuda: FakeCuda) -> None:
    replay, outputs = captured(cuda.work, warmup=2)
    assert cuda.log == ["wait", "work", "work", "wait"] and outputs == "result"
    assert seconds_per_call(replay, 3, GPU) == pytest.approx(0.002)
    assert cuda.log.count("work") == 5


def test_a_kernel_is_timed_over_copies_that_no_cache_holds(cuda: FakeCuda, monkeypatch) -> None:
    made: list[torch.Tensor] = []

    def make() -> tuple[torch.Tensor]:
        made.append(torch.ones(4))
        return (made[-1],)

    def call(x: torch.Tensor) -> torch.Tensor:
        cuda.work()
        return x * 2

    monkeypatch.setattr(kernels, "_COLD_BYTES", 1000)
    case = KernelCase("double", make, call, lambda x: x * 2, OpCost("double", 4, 200))
    row = run_case(case, GPU, copy=200 / 0.002 * 2, peak=200 / 0.002 * 4)
    assert row.status == "ok" and len(made) == 1 + 5  # 1000 ÷ 200 bytes, after the comparison
    assert row.seconds is not None and row.seconds["median"] == pytest.approx(0.002)
    assert row.of_copy == pytest.approx(0.5) and row.of_datasheet == pytest.approx(0.25)
    assert row.flops_per_second == pytest.approx(4 / 0.002)


def test_launches_are_counted_by_the_profiler(cuda: FakeCuda, monkeypatch) -> None:
    events = [("cuLaunchKernel", "CPU"), ("gemv_kernel", "CUDA"), ("Memset (Device)", "CUDA")]

    @contextlib.contextmanager
    def profile(activities: list):
        listed = [
            SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind))
            for name, kind in events * 3
        ]
        yield SimpleNamespace(events=lambda: listed)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert count_launches(cuda.work, GPU, calls=3) == Launches(host=1, kernels=1, other=1)
    assert timing.count_launches(cuda.work, torch.device("cpu")) is None
    assert cuda.log == ["work"] * 4  # one to warm up
