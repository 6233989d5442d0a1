"""Mistakes that were made with this model before, and the test that would notice each here.

They are those of the first public code (https://github.com/sandyresearch/parcae, commit dee8363),
some mended upstream since. `DEFECTS` says what went wrong and which tests look for it: a name alone
is a test of this file, `file::name` one elsewhere in the tests.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes import run_engine
from loop_models import dense_logits, loop_engine, loop_model, some_tokens

import minifer
import minifer.cli
import minifer.parcae
from minifer import SamplingParams
from minifer.execution.reference import reference_generate
from minifer.loops import LoopConfig
from minifer.parcae.monitor import loss_by_depth
from minifer.text.tokenizer import Tokenizer

ROOT = Path(minifer.__file__).parents[1]
TESTS = Path(__file__).parents[1]

DEFECTS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "the wheel on the package index holds no code",
        (
            "test_packaging.py::test_every_folder_with_python_files_is_a_listed_package",
            "test_packaging.py::test_the_wheel_holds_every_tracked_file_of_the_packages",
        ),
    ),
    2: (
        "a forward pass without a depth draws one at random, in evaluation too",
        ("test_a_forward_pass_draws_no_depth",),
    ),
    3: ("the training script's first import fails", ("test_every_module_can_be_imported",)),
    4: (
        "the README runs a script that is not there",
        ("test_help_runs_what_exists_and_names_code_that_exists",),
    ),
    5: (
        "tables and gates of value embeddings follow two rules, which differ for odd layouts",
        (
            "parcae/test_model.py::test_every_second_layer_has_a_value_embedding_and_its_gate",
            "parcae/test_model.py::test_tables_and_gates_that_disagree_are_noticed",
            "parcae/test_checkpoint.py::test_other_layouts_come_back_too",
        ),
    ),
    6: (
        "a KV sharing rule divides the flat slot index and so merges different layers",
        ("test_no_policy_merges_two_layers",),
    ),
    7: (
        "the attention mask is accepted and ignored: padded batches are wrong in silence",
        (
            "test_prompts_of_different_lengths_answer_as_alone",
            "parcae/test_model.py::test_each_sequence_of_a_mixed_batch_is_as_alone",
        ),
    ),
    8: (
        "past the context a reshape fails in the middle of generation",
        ("test_the_context_is_checked_at_admission",),
    ),
    9: (
        "a string option that is always true picks a GPU kernel for the loss, for some widths only",
        (
            "test_the_loss_needs_no_gpu_and_takes_any_width",
            "parcae/test_published_config.py::"
            "test_a_value_that_is_not_implemented_is_refused_by_name",
        ),
    ),
    10: (
        "loading reads pickles only, passes over missing tensors and drops the rope settings",
        (
            "parcae/test_checkpoint.py::test_a_folder_with_safetensors_needs_no_conversion",
            "parcae/test_checkpoint.py::test_a_missing_tensor_is_an_error_whichever_it_is",
            "parcae/test_checkpoint.py::test_a_table_of_another_base_goes_with_that_base",
            "parcae/test_published_config.py::test_the_rope_base_decides_the_angles",
        ),
    ),
    11: (
        "the tokenizer class has two methods of one name; the second hides the first",
        ("test_no_class_defines_a_name_twice", "test_the_tokenizer_has_one_way_in"),
    ),
    12: (
        "changing the mean depth of a configuration leaves what was derived from it",
        ("parcae/test_presets.py::test_a_configuration_does_not_change_under_a_model",),
    ),
    13: (
        "the hub cards load repositories that do not exist",
        (
            "parcae/test_published_names.py::test_the_authors_other_names_are_explained",
            "parcae/test_published_names.py::test_create_model_knows_them_too",
        ),
    ),
    14: (
        "the README says that pip will work soon, and to use pip",
        ("test_what_pip_is_told_to_install_can_be_installed",),
    ),
}


def test_every_defect_has_tests_that_exist() -> None:
    assert sorted(DEFECTS) == list(range(1, 15))
    for number, (_, names) in DEFECTS.items():
        assert names, number
        for name in names:
            place, _, function = name.rpartition("::")
            file = TESTS / place if place else Path(__file__)
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
            assert function in found, f"{number}: {name}"


def test_a_forward_pass_draws_no_depth() -> None:
    model, tokens = loop_model(mean_recurrence=5), some_tokens(9)
    expected = dense_logits(model, tokens, num_loops=5)
    try:
        for mode in (model.train, model.eval):
            mode()
            for seed in range(3):
                torch.manual_seed(seed)
                assert torch.equal(dense_logits(model, tokens), expected)
    finally:
        model.train()
    assert not torch.equal(dense_logits(model, tokens, num_loops=4), expected)


def python_modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(minifer.parcae.__path__, "minifer.parcae."):
        yield module.name
    for module in pkgutil.iter_modules(minifer.cli.__path__, "minifer.cli."):
        if module.name.startswith("minifer.cli.parcae"):
            yield module.name


def test_every_module_can_be_imported() -> None:
    names = list(python_modules())
    assert {"minifer.parcae.train", "minifer.parcae.checkpoint"} <= set(names)
    for name in names:
        importlib.import_module(name)


def experiments() -> list[str]:
    names = (name.rpartition("parcae")[2] for name in python_modules() if ".cli." in name)
    return ["", *(name.removeprefix("_") for name in names if name)]


@pytest.mark.parametrize("experiment", experiments())
def test_help_runs_what_exists_and_names_code_that_exists(
    experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert minifer.cli.main(["parcae", *([experiment] if experiment else []), "--help"]) == 0
    text = capsys.readouterr().out
    examples, _, code = text.partition("examples:\n")[2].partition("in the code:\n")
    places = [line.split()[0] for line in code.splitlines() if line.strip()]
    assert places and all((ROOT / place).exists() for place in places), places
    commands = re.findall(r"^  minifer (.+)$", examples, re.MULTILINE)
    assert commands
    for command in commands:
        if "--help" not in command:
            minifer.cli._parser().parse_args(shlex.split(command))


@pytest.mark.parametrize(
    "policy", ["full", "terminal", "cyclic-2", "cyclic-3", "first-1", "first-2"]
)
def test_no_policy_merges_two_layers(policy: str) -> None:
    loop = LoopConfig(prelude=2, core=3, coda=2, max_num_loops=7, kv_policy=policy)
    owner = {slot: ("prelude", slot) for slot in range(loop.prelude)}
    for t in range(loop.deepest):
        for layer in range(loop.core):
            slot = loop.core_slot(t) + layer
            assert owner.setdefault(slot, ("core", layer)) == ("core", layer)
    for layer in range(loop.coda):
        assert owner.setdefault(loop.coda_slot + layer, ("coda", layer)) == ("coda", layer)
    assert sorted(owner) == list(range(loop.num_kv_slots))


def test_prompts_of_different_lengths_answer_as_alone() -> None:
    model = loop_model()
    prompts = {str(n): some_tokens(n, seed=n) for n in (1, 4, 9, 17)}
    engine = loop_engine(model)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=6))
    outputs = run_engine(engine)
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == reference_generate(model, prompt, 6), name


def test_the_context_is_checked_at_admission() -> None:
    engine = loop_engine(loop_model())  # 128 positions
    greedy = SamplingParams(temperature=0, max_tokens=None)
    with pytest.raises(ValueError, match=r"prompt has 128 tokens, the limit is 127"):
        engine.add_request("long", some_tokens(128), greedy)
    with pytest.raises(ValueError, match=r"the model's limit is 128"):
        engine.add_request("wide", some_tokens(100), SamplingParams(max_tokens=29))
    prompt = some_tokens(124)
    engine.add_request("last", prompt, greedy)
    (output,) = run_engine(engine).values()
    answer = output.outputs[0]
    assert answer.finish_reason == "length" and len(answer.token_ids) == 4
    assert answer.token_ids == reference_generate(loop_model(), prompt, 4)


def test_the_loss_needs_no_gpu_and_takes_any_width() -> None:
    model = loop_model()  # 36 wide, 29 tokens: no multiples of anything
    rows = torch.tensor([some_tokens(9, seed=1), some_tokens(9, seed=2)])
    losses = loss_by_depth(model, rows, [1, 3])
    for depth, loss in losses.items():
        logits = dense_logits(model, *rows[:, :-1].tolist(), num_loops=depth).double()
        picked = logits.log_softmax(-1).gather(1, rows[:, 1:].reshape(-1, 1))
        assert loss == pytest.approx(float(-picked.mean()), rel=1e-5)


def test_no_class_defines_a_name_twice() -> None:
    twice = []
    for folder in ("parcae", "minifer/text", "minifer/weights"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.Module):
                    names = [n.name for n in node.body if isinstance(n, FUNCTIONS) and plain(n)]
                    twice += [f"{file}: {name}" for name in names if names.count(name) > 1]
    assert twice == []


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def plain(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A property is defined once to get and once to set, an overload as often as it likes."""
    return not any(re.search("setter|overload", ast.unparse(d)) for d in function.decorator_list)


def test_the_tokenizer_has_one_way_in() -> None:
    assert [name for name in vars(Tokenizer) if name.startswith("from_")] == ["from_dir"]


def test_what_pip_is_told_to_install_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    seen = 0
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"coming soon|\bsoon on PyPI", text, re.IGNORECASE)
        for what, extras in re.findall(r'pip install (?:-e )?"?(\.|minifer)\[([\w,]+)\]', text):
            seen += 1
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), what
    assert seen
