"""Settings of every test process, made before torch is imported."""

import os
from pathlib import Path

import pytest

# The models of the tests are so small that handing work to a second thread costs more than the
# work; and one thread adds numbers in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pulled_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where it was not pulled."""
    from minifer.weights import pull

    folder = pull.pulled_model()
    if folder is None:
        pytest.skip(f"SmolLM2 is not in {pull.model_path()}: run `minifer pull` for this test")
    return folder


@pytest.fixture(scope="session")
def pulled_gguf(pulled_model: Path) -> Path:
    """The GGUF file that `pulled_model` was converted from; skips where it was not pulled."""
    from minifer.weights import pull

    if not pull.gguf_path().is_file():
        pytest.skip(f"no {pull.gguf_path()}: run `minifer pull` for this test")
    return pull.gguf_path()
