"""The decode step that torch.compile gets: a Llama's, as transformers computes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minifer.perf.speed import worker
from minifer.perf.speed.cells import Cell
from minifer.perf.speed.engines import Elsewhere
from minifer.perf.speed.measures import Task
from minifer.perf.speed.peers import torch_compile_peer, torch_compile_step
from minifer.perf.speed.peers.torch_compile_step import Decoder, Product, read_config, read_weights
from minifer.weights.quantized import quantize
from minifer.weights.resolve import resolve_model

PROMPTS = [[(7 * i + 3 * j) % 250 for i in range(20)] for j in range(3)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("minifer-tiny").path


def replies_of_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    for _ in range(count):  # the whole context anew for each token
        with torch.inference_mode():
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, len(prompts[0]) :].tolist()


@pytest.mark.parametrize("few", [0, 9])
def test_the_step_answers_as_transformers_does(
    folder: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both forms of attention."""
    monkeypatch.setattr(torch_compile_step, "FEW", few)
    decoder = Decoder(folder, torch.float32)
    # What an earlier answer left behind the prompt must not be seen.
    keys, values = ([t.fill_(9.0) for t in decoder.cache(3, 64)] for _ in "kv")
    with torch.inference_mode():
        token = decoder.prompts(torch.tensor(PROMPTS), keys, values)
        tokens = [token]
        for position in range(20, 27):
            tokens.append(token := decoder(token, torch.tensor([position]), keys, values))
    ours = torch.stack(tokens, 1).tolist()
    assert ours == replies_of_transformers(folder, PROMPTS, 8)


@pytest.mark.slow
def test_its_graphs_answer_so_too_in_a_process_of_their_own(folder: Path) -> None:
    """Two shapes, two graphs: the tokens of transformers, and the time that compiling took."""
    cells = [Cell("decode", 2, 20, 6), Cell("decode", 1, 70, 6)]
    own = [Task(str(cell), "decode", tuple(cell.asks(250, 1))) for cell in cells]
    options = {"max_autotune": False}  # what is fastest does not matter here
    job = {"model": str(folder), "dtype": "float32", "options": options}
    peer = Elsewhere("torch-compile", {**job, "threads": 1, "warmup_tokens": 2}, timeout=600)
    answers = peer(lambda turn: own)
    for task in own:
        prompts = [list(ask.prompt) for ask in task.asks]
        assert answers.runs[task.name].tokens == replies_of_transformers(folder, prompts, 6)
        stamps = answers.runs[task.name].stamps
        assert stamps[0] == stamps[-1] == sorted(stamps[0]) and len(set(stamps[0])) == 6
    about = answers.about
    assert 0 < about["compile_seconds"] < about["load_seconds"]
    assert about["config"]["graphs"] == ["1 x 128", "2 x 64"] and about["dtype"] == "float32"


@pytest.mark.parametrize(("bits", "error"), [(4, 0.01), (8, 0.02)])
def test_codes_multiply_as_the_matrices_they_stand_for(bits: int, error: float) -> None:
    generator = torch.Generator().manual_seed(bits)
    coded = [quantize(torch.randn(n, 64, generator=generator), bits, 32) for n in (32, 16)]
    weights = {
        f"{i}.{name}": tensor
        for i, weight in enumerate(coded)
        for name, tensor in weight.named_buffers()
    }
    x = torch.randn(3, 64, generator=generator).bfloat16()
    expected = x.float() @ torch.cat([weight.dequantize() for weight in coded]).t()
    out = Product(weights, torch.bfloat16, "0", "1")(x).float()
    assert (out - expected).norm() < error * expected.norm()
    with pytest.raises(ValueError, match=r"codes in bfloat16, got torch\.float32"):
        Product(weights, torch.float32, "0", "1")
    del weights["1.codes"]
    with pytest.raises(ValueError, match="of all matrices that are one, 1 has none"):
        Product(weights, torch.bfloat16, "0", "1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen3"}, "model_type must be 'llama', got 'qwen3'"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling must be None"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    folder: Path, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=named):
        read_config(tmp_path)


def test_codes_are_read_from_where_they_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert set(read_weights(tmp_path, "none")) == {"a"}
    with pytest.raises(ValueError, match=r"there is no .*model\.safetensors: minifer pull"):
        read_weights(tmp_path, "file")
    with pytest.raises(ValueError, match="must be none or file, got 'int4'"):
        read_weights(tmp_path, "int4")
    (tmp_path / "quantized").mkdir()
    save_file({"a.codes": torch.zeros(2)}, tmp_path / "quantized" / "model.safetensors")
    assert set(read_weights(tmp_path, "file")) == {"a", "a.codes"}


def test_without_a_compiler_it_is_missing_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    command = worker.command_for("torch-compile", sys.executable)
    with pytest.raises(worker.MissingError, match="a C\\+\\+ compiler, and /no/such/compiler is"):
        worker.ask(command, {"probe": True}, timeout=120)


def test_a_graph_is_for_requests_of_one_length() -> None:
    requests = [{"prompt": [1, 2, 3], "max_tokens": 4}] * 2
    assert torch_compile_peer.shape(requests) == (2, 7)
    with pytest.raises(ValueError, match="requests of one length, got several"):
        torch_compile_peer.shape([*requests, {"prompt": [1, 2], "max_tokens": 5}])


def test_the_cache_on_disk_begins_empty_or_is_the_one_that_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os

    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)
    with torch_compile_peer.an_empty_cache():
        own = Path(os.environ[name])
        assert list(own.iterdir()) == []
        (own / "left").touch()
    assert name not in os.environ and not own.exists()
    monkeypatch.setenv(name, str(tmp_path))
    with torch_compile_peer.an_empty_cache():
        assert os.environ[name] == str(tmp_path)
    assert tmp_path.exists()
