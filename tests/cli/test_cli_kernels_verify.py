"""`minifer kernels verify`: a proof, a rejection, and what is refused."""

from __future__ import annotations

import pytest

from minifer.cli import main
from minifer.kernels.mega.mutants import MUTANTS

Capture = pytest.CaptureFixture[str]
TINY = ["kernels", "verify", "--model", "minifer-tiny", "--programs", "4", "--batch", "2"]


def test_a_schedule_is_proved(capsys: Capture) -> None:
    assert main([*TINY, "--splits", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "minifer-tiny, batch 2, splits 2, tile 16, on 4 programs by policy list, with counters\n"
    )
    # 4 layers of 2 requests, 6 KV heads, 2 splits; 4 pieces of every product.
    for line in ("96 ATTENTION", "48 MERGE", "16 QKV", "16 DOWN", "4 HEAD", "1 PICK"):
        assert f" {line}\n" in out
    assert "PROVED in " in out
    assert "REJECTED" not in out


@pytest.mark.parametrize("sync", ["counters", "grid"])
@pytest.mark.parametrize("policy", ["round_robin", "zig_zag", "list", "random"])
def test_every_policy_is_proved(policy: str, sync: str, capsys: Capture) -> None:
    assert main([*TINY, "--policy", policy, "--sync", sync, "--seed", "7"]) == 0
    assert "PROVED" in capsys.readouterr().out


def test_a_fault_is_rejected_with_reason_effect_and_source(capsys: Capture) -> None:
    assert main([*TINY, "--mutant", "split-count-mismatch"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    places = [
        "REJECTED",
        "deadlock: MERGE of layer 0, request 0, KV head 0",
        "on a GPU: A merge waits for a split that was never dispatched: the kernel hangs.",
        "resembles: https://github.com/ROCm/fleet-chiplet-megakernel/pull/6",
    ]
    found = [out.index(place) for place in places]
    assert found == sorted(found)


def test_every_fault_in_a_line(capsys: Capture) -> None:
    assert main([*TINY, "--mutants"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MUTANTS)
    assert all(len(line) <= 100 for line in lines)
    assert "ACCEPTED" not in "".join(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mutant", "x"], "mutant must be one of dropped-wait, "),
        (["--batch", "17"], "batch must be at most 16 for a megakernel, got 17"),
        (["--splits", "3"], "splits must be a power of two, got 3"),
        (["--programs", "0"], "num_programs must be at least 1, got 0"),
        (["--mutant", "row-reused", "--batch", "1"], "'row-reused' needs an instruction"),
        (["--policy", "best"], "invalid choice: 'best'"),
    ],
)
def test_what_is_refused(options: list[str], message: str, capsys: Capture) -> None:
    assert main([*TINY, *options]) == 2
    assert message in capsys.readouterr().err
