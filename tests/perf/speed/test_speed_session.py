"""minifer in this process and in another: the same tokens, all stamped; prefix-cache hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifer.llm import LLM
from minifer.perf.speed.cells import Ask, Cell
from minifer.perf.speed.engines import Elsewhere, Here
from minifer.perf.speed.measures import Task
from minifer.perf.speed.prefix import HIT, MISS, TAIL, measure_prefix
from minifer.perf.speed.session import STAGES, Session
from minifer.request import SamplingParams
from minifer.weights.resolve import resolve_model

OPTIONS = {"num_kv_blocks": 60, "max_num_seqs": 4, "device": "cpu"}
ASKS = [Ask((65, 66, 67, 68), 5), Ask((70, 71), 5)]


@pytest.fixture(scope="module")
def session():
    session = Session("minifer-tiny", OPTIONS)
    yield session
    session.close()


def test_every_token_has_a_stamp_and_is_the_engines(session: Session) -> None:
    run = session.run(ASKS)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM("minifer-tiny", **OPTIONS) as llm:
        outputs = llm.generate([list(a.prompt) for a in ASKS], params)
    assert run.tokens == [o.outputs[0].token_ids for o in outputs]
    for stamps in run.stamps:
        assert len(stamps) == 5 and stamps == sorted(stamps) and stamps[0] > run.started
    assert run.speculation == {}


def test_each_step_has_its_laps_and_nothing_else_listens(session: Session) -> None:
    run = session.run(ASKS)
    assert [step.ended for step in run.steps] == run.stamps[0] == run.stamps[1]
    for before, step in zip([run.started, *run.stamps[0]], run.steps, strict=False):
        assert len(step.seconds) == len(STAGES)
        assert 0 < step.preparation < step.whole <= step.ended - before
    assert {event.name.partition(".")[0] for event in session._sink.events} == {"step"}


def test_a_request_that_fails_is_an_error(session: Session, monkeypatch) -> None:
    def broken(step):
        raise OSError("no device")

    monkeypatch.setattr(session.engine.runner, "forward", broken)
    with pytest.raises(RuntimeError, match="a request failed: OSError: no device"):
        session.run(ASKS)


def test_here_and_elsewhere_agree_on_tokens_and_bytes() -> None:
    def tasks(turn: int) -> list[Task]:
        return [Task("c", "decode", tuple(Cell("decode", 2, 20, 4).asks(200, turn)))]

    here = Here("minifer-tiny", OPTIONS)
    job = {"model": "minifer-tiny", "options": OPTIONS, "threads": 1, "warmup_tokens": 2}
    elsewhere = Elsewhere("minifer", job, timeout=120)
    assert set(elsewhere.probe()) == {"minifer", "torch"}
    ours, theirs = here(tasks), elsewhere(tasks)
    assert ours.runs["c"].tokens == theirs.runs["c"].tokens
    assert ours.traffic == theirs.traffic is not None
    assert ours.about["dtype"] == theirs.about["dtype"] == "float32"
    assert ours.about["config"]["kv_bytes"] == theirs.about["config"]["kv_bytes"]
    assert theirs.about["load_seconds"] > 0 and theirs.about["peak_rss_bytes"] > 1e7
    assert [s.ended for s in theirs.runs["c"].steps] == theirs.runs["c"].stamps[0]
    again = here(tasks)  # another turn asks for other tokens
    assert again.runs["c"].tokens != ours.runs["c"].tokens


def test_a_known_beginning_is_found_and_a_new_one_is_not() -> None:
    session = Session("minifer-tiny", {"num_kv_blocks": 40, "block_size": 8, "device": "cpu"})
    result = measure_prefix(session, 40, 200, seed=3, runs=2, settings={})
    session.close()
    assert result.details["cached_tokens"] == {HIT: 40, MISS: 0}
    sooner = result.ratios[MISS]["first_token_seconds"].values
    hit, miss = (result.arms[arm]["first_token_seconds"].values for arm in (HIT, MISS))
    assert sooner == tuple(b / a for a, b in zip(hit, miss, strict=True))
    assert (result.settings["shared_prefix"], result.settings["tail"]) == (40, TAIL)


def test_drafts_are_counted_where_the_engine_makes_them(tmp_path: Path) -> None:
    options = {**OPTIONS, "speculative_method": "ngram"}
    session = Session("minifer-tiny", options)
    plain = Session("minifer-tiny", OPTIONS)
    asks = [Ask((65, 66, 67, 68) * 5, 24)]
    run = session.run(asks)
    assert run.tokens == plain.run(asks).tokens
    drafted, accepted = run.speculation["drafted"], run.speculation["accepted"]
    assert 0 <= accepted <= drafted and drafted > 0
    assert session.traffic() == plain.traffic()  # looking up a prompt reads no weights
    again = session.run(asks).speculation  # of this run alone
    assert again["drafted"] <= 2 * drafted
    for one in (session, plain):
        one.close()


@pytest.mark.slow
def test_transformers_answers_the_same_tokens_one_step_after_the_other() -> None:
    """In float32 two engines that compute the same model agree; 2 requests are one batch."""

    def tasks(turn: int) -> list[Task]:
        return [Task("c", "decode", tuple(Cell("decode", 2, 20, 6).asks(200, 1)))]

    model = str(resolve_model("minifer-tiny").path)
    job = {"model": model, "dtype": "float32", "options": {}, "threads": 1, "warmup_tokens": 2}
    theirs = Elsewhere("transformers", job, timeout=300)(tasks)
    ours = Here("minifer-tiny", OPTIONS)(tasks)
    assert theirs.runs["c"].tokens == ours.runs["c"].tokens
    assert theirs.about["dtype"] == "float32" and theirs.traffic is None
    first, second = theirs.runs["c"].stamps
    assert first == second == sorted(first) and len(set(first)) == 6
