"""A file is read tensor by tensor, and what was read is let go."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minifer.weights.mapped import mapped_tensors

MIB = 2**20


@pytest.fixture
def file(tmp_path):
    """16 tensors of 2 MiB."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i:02}": torch.randn(MIB // 2, generator=generator) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("limit", [1, 3 * MIB, 2**40])
def test_tensors_come_in_the_order_asked_for_whatever_is_mapped_at_once(file, limit):
    path, tensors = file
    names = sorted(tensors, reverse=True)[:-1]
    found = list(mapped_tensors(path, names, limit))  # all of them held: each must stay valid
    assert [name for name, _ in found] == names
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found)
    assert list(mapped_tensors(path, [], limit)) == []


def file_pages() -> int:
    """Bytes of files that this process has mapped and read."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory is mapped")
def test_what_was_read_does_not_stay_in_memory(file):
    path, tensors = file

    def most(limit: int) -> int:
        before, peak = file_pages(), 0
        for _, tensor in mapped_tensors(path, list(tensors), limit):
            tensor.sum()
            peak = max(peak, file_pages() - before)
        return peak

    assert most(2**40) > 24 * MIB  # the measurement sees them
    assert most(4 * MIB) < 12 * MIB
