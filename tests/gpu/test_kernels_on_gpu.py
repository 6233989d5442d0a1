"""Every kernel of a decode step against its reference, as it is compiled for a model."""

from __future__ import annotations

import pytest
import torch

from minifer.kernels.mega.shapes import MODELS
from minifer.perf.gpu.kernel_cases import groups
from minifer.perf.gpu.kernels import TOLERANCE, relative_errors

CPU = torch.device("cpu")
NAMES = list(groups(MODELS["minifer-tiny"], CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_reference(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """bfloat16 is held against float32, which is far finer; float32 against float64."""
    on_gpu = device.type == "cuda"
    config = MODELS["llama-1b" if on_gpu else "minifer-tiny"]
    cases = groups(config, device, context=1000 if on_gpu else 40, rows=5, dtype=dtype)[name]()
    wide, limit = torch.float32, TOLERANCE
    if dtype == torch.float32:
        wide, limit = torch.float64, 1e-5
    errors = {case.name: relative_errors(case, wide) for case in cases}
    assert errors
    assert all(error <= max(limit, own) for error, own in errors.values()), errors
