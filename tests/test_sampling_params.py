"""What `SamplingParams` accepts and refuses, and how it says so."""

import math

import numpy as np
import pytest

from minifer.sampling_params import (
    MIN_TEMPERATURE,
    OutputKind,
    RepetitionDetection,
    SamplingParams,
)

nan, inf = math.nan, math.inf

# Field and value: vLLM 0.32's behaviour
REFUSED = [
    ("temperature", -0.1),
    ("temperature", inf),
    ("temperature", nan),
    ("temperature", 3.0),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("logprobs", -2),
    ("stop_token_ids", ["a"]),
    ("bad_words", [""]),
]
ACCEPTED = [
    ("temperature", 0),
    ("temperature", 2),
    ("top_k", 0),
    ("top_k", -1),
    ("min_p", 1),
    ("max_tokens", None),
    ("seed", -1),
    ("repetition_penalty", 2.5),
    ("frequency_penalty", -2),
    ("logprobs", 0),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("logit_bias", {5: 200}),
    ("allowed_token_ids", []),
]
# Field and value: minifer's own
REFUSED += [
    ("stop_token_ids", [-1]),  # vLLM accepts it
    ("allowed_token_ids", [3, -1]),
    ("repetition_detection", 5),
    ("repetition_detection", {}),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 4, "size": 1}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {"one": 1.0}),
    ("logit_bias", {"06": 1.0}),
    ("logit_bias", {"６": 1.0}),
    ("logit_bias", {"9" * 5000: 1.0}),
    ("logit_bias", {6: 1.0, "6": 2.0}),
    ("logit_bias", {1: inf}),
    ("logit_bias", {1: nan}),
    ("logit_bias", {1: 1e39}),
    ("logit_bias", {1: "2"}),
    ("logit_bias", [1, 2]),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", 1j),
    ("temperature", 10**400),
    ("top_p", nan),
    ("top_p", -0.1),
    ("min_p", -0.1),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", inf),
    ("repetition_penalty", 10**400),
    ("presence_penalty", nan),
    ("frequency_penalty", -2.1),
    ("top_k", True),
    ("top_k", None),
    ("n", None),
    ("n", "2"),
    ("min_tokens", 1.0),
    ("max_tokens", -1),
    ("max_tokens", 3.0),
    ("prompt_logprobs", -2),
    ("logprobs", True),
    ("seed", 1.0),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", True),
    ("stop", 5),
    ("stop", [5]),
    ("stop", b"a"),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [2.0]),
    ("stop_token_ids", [False]),
    ("bad_words", 0),
    ("ignore_eos", "yes"),
    ("detokenize", 1),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", "false"),
    ("priority", 0.5),
    ("cache_salt", ""),
    ("cache_salt", ["a"]),
    ("cache_salt", "\ud800"),  # has no bytes to hash
    ("output_kind", "everything"),
    ("output_kind", ["delta"]),
]
ACCEPTED += [
    ("temperature", 0.01),
    ("top_p", 1e-6),
    ("top_p", 1),
    ("repetition_penalty", 1e-3),
    ("seed", None),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("logprobs", None),
    ("stop", None),
    ("stop", "END"),
    ("stop", ("a", "b")),
    ("stop_token_ids", None),
    ("stop_token_ids", range(3)),
    ("bad_words", None),
    ("bad_words", "word"),
    ("logit_bias", {}),
    ("logit_bias", {"50": -100}),
    ("allowed_token_ids", None),
    ("cache_salt", "user 7"),
    ("priority", -5),
    ("output_kind", "delta"),
    ("ignore_eos", True),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=repr)
def test_refused_values_are_named_with_their_field_and_limit(field, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} must be ")
    # The message ends with the value, or with the element of it that is at fault.
    elements = value if isinstance(value, list | dict) else []
    elements = [*elements, *(value.values() if isinstance(value, dict) else [])]
    assert any(message.endswith(f"got {part!r}") for part in [value, *elements])
    assert len(message.removeprefix(f"{field} must be ").split(", got")[0]) > 4  # the limit


@pytest.mark.parametrize(("field", "value"), ACCEPTED, ids=repr)
def test_accepted_values(field, value):
    SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 5"),
        ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0 .*, got n=2"),
        ({"stop": "a", "detokenize": False}, "stop strings need detokenize=True, got .*False"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_fields_that_only_look_contradictory_are_accepted():
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=50, max_tokens=None)
    SamplingParams(n=2, temperature=0.01)
    SamplingParams(stop=[], detokenize=False)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)


def test_case_071_small_temperatures_are_raised_with_a_warning_and_zero_is_greedy():
    with pytest.warns(UserWarning, match=r"0\.0001 is raised to 0\.01"):
        params = SamplingParams(temperature=1e-4)
    assert params.temperature == MIN_TEMPERATURE == 0.01
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy


@pytest.mark.filterwarnings("error")
def test_ordinary_temperatures_do_not_warn():
    for temperature in (0, 0.01, 1):
        assert SamplingParams(temperature=temperature).temperature == temperature


def test_numpys_numbers_are_taken_and_become_pythons():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int64(7),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=np.array([], dtype=np.int64),
        logit_bias={np.int64(4): np.float16(1.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=2**64 - 1,
        max_tokens=7,
        stop_token_ids=(1, 2),
        allowed_token_ids=(),
        logit_bias={4: 1.5},
    )
    for value in (params.temperature, *params.logit_bias.values()):
        assert type(value) is float
    for value in (params.top_k, params.seed, params.max_tokens, *params.stop_token_ids):
        assert type(value) is int
    for bad in (np.bool_(True), np.float64(nan), np.array(1.0)):
        with pytest.raises(ValueError, match="temperature must be"):
            SamplingParams(temperature=bad)


def test_values_are_normalised_and_copied():
    bias, stops = {"7": 1}, ["a", "b"]
    params = SamplingParams(logit_bias=bias, stop=stops, output_kind="final_only")
    bias["8"], stops[0] = 2, "changed"
    assert params.logit_bias == {7: 1.0}
    assert params.stop == ("a", "b")
    assert params.output_kind is OutputKind.FINAL_ONLY
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop="END").stop == ("END",)


def test_a_changed_copy_is_checked_again():
    params = SamplingParams(temperature=0.5, n=2)
    assert params.with_(top_k=4).top_k == 4
    with pytest.raises(ValueError, match="n must be 1"):
        params.with_(temperature=0)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n) == (16, 0, 1)
    assert params.seed is None and params.logprobs is None
    assert params.output_kind is OutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_pattern_size": 0}, r"max_pattern_size must be an integer in \[1, 1024\], got 0"),
        (
            {"max_pattern_size": 1025},
            r"max_pattern_size must be an integer in \[1, 1024\], got 1025",
        ),
        ({"max_pattern_size": "4"}, r"max_pattern_size must be an integer in \[1, 1024\], got '4'"),
        ({"min_count": 1}, "min_count must be an integer of at least 2, got 1"),
        ({"min_count": True}, "min_count must be an integer of at least 2, got True"),
        ({"min_pattern_size": -1}, r"from 0 to max_pattern_size \(8\), got -1"),
        ({"min_pattern_size": 9}, r"from 0 to max_pattern_size \(8\), got 9"),
    ],
)
def test_limits_of_repetition_are_checked(fields, sentence):
    with pytest.raises(ValueError, match=rf"repetition_detection\..*{sentence}"):
        RepetitionDetection(**{"max_pattern_size": 8, "min_count": 4, **fields})
    with pytest.raises(ValueError, match=rf"repetition_detection\..*{sentence}"):
        mapping = {"max_pattern_size": 8, "min_count": 4, **fields}
        SamplingParams(repetition_detection=mapping)


def test_limits_of_repetition_may_come_as_a_mapping():
    mapping = {"max_pattern_size": 8, "min_count": 4, "min_pattern_size": 0}
    params = SamplingParams(repetition_detection=mapping)
    assert params.repetition_detection == RepetitionDetection(8, 4, 1)  # 0 stands for 1, as in vLLM
    assert params.with_(seed=1).repetition_detection == params.repetition_detection
