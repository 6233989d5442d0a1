"""Settings of every test process, made before torch is imported."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from minifer.kernels.mode import interpret_without_gpu

# The models of the tests are so small that handing work to a second thread costs more than the
# work; and one thread adds numbers in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test measures time, an example on a busy machine neither.
# Kernels run in the interpreter here; tests of compiled ones start processes of their own.
interpret_without_gpu()
settings.register_profile("minifer", deadline=None)
settings.load_profile("minifer")
# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama over the byte vocabulary: a whole model in 100 kB."""
    import torch
    from fakes import tiny_config

    from minifer.models.registry import build_model
    from minifer.text.byte_tokenizer import byte_tokenizer
    from minifer.weights.hf import save_hf

    folder = tmp_path_factory.mktemp("models") / "random-bytes"
    config = tiny_config(vocab_size=288, max_position_embeddings=256, eos_token_ids=(257,))
    model = build_model(config, torch.float32)
    model.init_weights(0, 0.3)
    save_hf(folder, model, config)
    byte_tokenizer().save(folder)
    return folder
