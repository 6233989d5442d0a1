"""The ward: windows look alike, faults show behind them, and a new part cures its own fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minifer.course import clinic, example
from minifer.course.clinic_parts import PARTS
from minifer.engine import Engine
from minifer.execution.reference import reference_generate
from minifer.faults.registry import Fault

RIGHT = {
    "length": lambda position: position + 1,
    "positions": lambda start, end: list(range(start, end)),
    "resume": lambda prompt, output: prompt + output,
    "slots": lambda table, P, a, b: [table[p // P] * P + p % P for p in range(a, b)],
    "key": lambda parent, tokens, salt: repr((parent, tokens, salt)).encode(),
}


def characters(held: bytes, new: bytes) -> tuple[str, bytes]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(held + new), decoder.getstate()[0]


def release(held: str, new: str, stops: tuple[str, ...]) -> tuple[str, str]:
    whole = held + new
    cut = next(
        i for i in range(len(whole) + 1) if any(stop.startswith(whole[i:]) for stop in stops)
    )
    return whole[:cut], whole[cut:]


RIGHT |= {"characters": characters, "release": release}


def serve(window: clinic.Window) -> list[tuple[object, ...]]:
    """A day on which every fault of the menu shows."""
    P, N = window.block_size, window.num_blocks
    replies = window.ask("q" * P, "q" * (2 * P), max_tokens=4)
    replies += window.ask("h" * P + "p" * P) + window.ask("p" * P + "h" * P + "?")
    for salt in ("alice", "bob"):
        replies += window.ask("s" * (2 * P), salt=salt, max_tokens=2)
    replies += window.ask("Say: ", says="“naïve” 你好 END it.", stop=["EN it", "it."])
    replies += window.ask("One. ", "Two. ", "Three. ", max_tokens=P * N // 2)
    return [(r.text, r.tokens, r.num_cached, *(round(x, 2) for x in r.logprobs)) for r in replies]


def window(fault: str | None, part: str | None = None) -> clinic.Window:
    new = (part, RIGHT[part]) if part else None
    return clinic.window(fault, block_size=4, num_blocks=12, part=new)


@pytest.fixture(scope="module")
def healthy() -> list[tuple[object, ...]]:
    return serve(window(None))


@pytest.mark.parametrize("fault", clinic.MENU)
def test_every_fault_of_the_menu_shows_and_its_new_part_cures_it(fault, healthy) -> None:
    assert serve(window(fault)) != healthy
    assert serve(window(fault, clinic.MENU[fault])) == healthy


@pytest.mark.parametrize("part", PARTS)
def test_a_right_part_changes_nothing_in_a_healthy_engine(part, healthy) -> None:
    assert serve(window(None, part)) == healthy


def test_another_part_cures_nobody(healthy) -> None:
    assert serve(window("lost-boundary-slot", "length")) != healthy


def test_a_window_tells_what_the_engine_did() -> None:
    engine = clinic.healthy()
    prompt = "The import statement"
    (reply,) = engine.ask(prompt, max_tokens=6)
    loaded = example.tiny()
    ids = loaded.tokenizer.encode(prompt)
    assert reply.tokens == reference_generate(loaded.model, ids, 6)
    assert engine.oracle(prompt, reply.tokens) == pytest.approx(reply.logprobs, abs=1e-4)
    assert engine.ask(prompt)[0].num_cached == 16
    assert engine.ask("x", says="any text")[0].text == "any text"


def test_windows_look_alike() -> None:
    one, other = (clinic.window(fault) for fault in (None, "salt-ignored"))
    assert repr(one) == repr(other)
    assert vars(one).keys() == vars(other).keys()


def test_nothing_that_a_window_holds_leads_to_its_fault() -> None:
    """But for the frame of the generator, which the grader closes."""
    one = clinic.window("salt-ignored", part=("length", RIGHT["length"]))
    for function in (one.ask, one.oracle):
        held = [cell.cell_contents for cell in function.__closure__]
        assert not any(isinstance(thing, (Engine, Fault)) for thing in held)
        assert not any("salt-ignored" in repr(thing) for thing in held)


def test_an_error_leaves_the_window_open() -> None:
    engine = clinic.window()
    with pytest.raises(ValueError, match="max_tokens"):
        engine.ask("x", max_tokens=0)
    assert engine.ask("x")[0].tokens


def test_patients_have_four_different_parts_ill() -> None:
    parts = {clinic.MENU[clinic.fault_of(number)] for number in range(1, 5)}
    assert len(parts) == clinic.NUM_PATIENTS
    assert "patient 2" in clinic.report(2)


def test_nobody_visits_patients_during_a_test() -> None:
    with clinic.closed_ward(), pytest.raises(ValueError, match="calls no patient"):
        clinic.patient(1)
    assert clinic.patient(1).name == "patient 1"


def test_in_the_grader_every_patient_is_healthy() -> None:
    code = (
        "from minifer.course import clinic; n = clinic.window().block_size; "
        "w = clinic.patient(2); w.ask('h' * n + 'p' * n); "
        "print(w.ask('p' * n + '?')[0].num_cached, repr(clinic.report(2)))"
    )
    environment = {"MINIFER_GRADING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "0 ''\n", done.stderr


def test_a_variant_is_another_model_of_the_same_shape() -> None:
    one, other = (clinic.variant(torch.Generator().manual_seed(seed)) for seed in (1, 2))
    engines = [clinic.window(loaded=loaded) for loaded in (one, other, example.tiny())]
    said = {engine.ask("The import statement", max_tokens=24)[0].text for engine in engines}
    assert len(said) == 3


@pytest.mark.parametrize("number", [0, 5, "1"])
def test_there_are_four_patients(number) -> None:
    with pytest.raises(ValueError, match="number must be in 1 to 4"):
        clinic.patient(number)


def test_bad_calls_are_refused() -> None:
    engine = clinic.healthy()
    for prompts in ((), ("",), (3,)):
        with pytest.raises(ValueError, match="prompts must be texts"):
            engine.ask(*prompts)
    with pytest.raises(ValueError, match="part must be one of"):
        clinic.window(part=("pump", len))
