"""What an import costs: `import minifer` and the pure-Python stages never load torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import minifer


def modules_after(statement: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after a statement, minus those before."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_import_minifer_loads_next_to_nothing() -> None:
    loaded = modules_after("import minifer")
    assert not loaded & {"torch", "numpy", "tokenizers", "triton", "jinja2", "tqdm"}
    assert {name for name in loaded if name.startswith("minifer")} == {"minifer"}
    assert len(loaded) <= 10  # counted, not timed: each module is a file to find and run


@pytest.mark.parametrize(
    "modules",
    [
        "minifer.config, minifer.request, minifer.outputs, minifer.events",
        "minifer.scheduling.scheduler, minifer.scheduling.admission",
        "minifer.kv.manager, minifer.kv.invariants",
        "minifer.cli",
    ],
)
def test_these_modules_load_no_torch(modules: str) -> None:
    loaded = modules_after(f"import {modules}")
    assert not loaded & {"torch", "numpy", "tokenizers", "triton", "jinja2", "tqdm"}


@pytest.mark.parametrize("name", minifer.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(minifer, name) is not None
    assert name in dir(minifer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        minifer.Llm  # noqa: B018
