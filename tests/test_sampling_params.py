"""What a request may ask for, and the message when it may not."""

import copy
import dataclasses
import logging
import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.output_constraints import RepetitionDetectionParams, StructuredOutputsParams
from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.seed, params.max_tokens, params.logprobs) == (0.0, None, 16, None)
    assert params.stop_token_ids == ()
    assert params.detokenize
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n", 0, "n must be from 1 to 16384, got 0"),
        ("n", 20_000, "got 20000"),
        ("n", 1.5, "n must be an integer, got 1.5"),
        ("temperature", -1.0, "temperature must be from 0 to 2, got -1.0"),
        ("temperature", 2.5, "got 2.5"),
        ("temperature", math.nan, "temperature must be from 0 to 2, got nan"),
        ("temperature", math.inf, "got inf"),
        ("temperature", 10**400, "temperature must be from 0 to 2"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top_p", 0.0, "top_p must be above 0"),
        ("top_p", 1.1, "top_p must be from 0 to 1, got 1.1"),
        ("top_p", math.nan, "got nan"),
        ("top_k", -2, "top_k must be from -1"),
        ("top_k", 2.0, "top_k must be an integer"),
        ("min_p", -0.1, "min_p must be from 0 to 1, got -0.1"),
        ("min_p", math.nan, "got nan"),
        ("seed", True, "seed must be an integer, got True"),
        ("seed", 2**64, "seed must be from"),
        ("seed", -(2**63) - 1, "seed must be from"),
        ("max_tokens", 0, "max_tokens must be from 1"),
        ("stop_token_ids", [3, -1], "stop_token_ids must be from 0"),
        ("stop_token_ids", [3.0], "stop_token_ids must be an integer"),
        ("stop_token_ids", "3", "stop_token_ids must be a list"),
        ("stop_token_ids", 3, "stop_token_ids must be a list"),
        ("ignore_eos", "no", "ignore_eos must be True or False, got 'no'"),
        ("detokenize", 1, "detokenize must be True or False, got 1"),
        ("spaces_between_special_tokens", None, "must be True or False, got None"),
        ("skip_special_tokens", 0, "must be True or False, got 0"),
        ("presence_penalty", 2.1, "presence_penalty must be from -2 to 2, got 2.1"),
        ("presence_penalty", None, "presence_penalty must be a number, got None"),
        ("frequency_penalty", -2.1, "frequency_penalty must be from -2 to 2, got -2.1"),
        ("frequency_penalty", math.nan, "got nan"),
        ("repetition_penalty", 0.0, "repetition_penalty must be from 1e-06 to 1e+06, got 0.0"),
        ("repetition_penalty", -1, "got -1"),
        ("repetition_penalty", math.inf, "got inf"),
        ("repetition_penalty", math.nan, "got nan"),
        ("stop", [""], "stop must not be an empty string"),
        ("stop", "", "stop must not be an empty string"),
        ("stop", [3], "stop must be a string, got 3"),
        ("stop", b"end", "stop must be a list of strings, got b'end'"),
        ("stop", {"a": 1}, "stop must be a list of strings"),
        ("stop", 5, "stop must be a list of strings"),
        ("stop", np.array("end"), "stop must be a list of strings"),
        ("stop", np.array([1, 2]), "stop must be a string"),
        ("min_tokens", -1, "min_tokens must be from 0"),
        ("min_tokens", None, "min_tokens must be an integer"),
        ("logprobs", -2, "logprobs must be from -1"),
        ("logprobs", False, "logprobs must be an integer, got False"),
        ("prompt_logprobs", -2, "prompt_logprobs must be from -1"),
        ("prompt_logprobs", 1.0, "prompt_logprobs must be an integer"),
        ("logprob_token_ids", range(129), "at most 128 ids, got 129"),
        ("logprob_token_ids", [-1], "logprob_token_ids must be from 0"),
        ("logprob_token_ids", 3, "logprob_token_ids must be a list of token ids, got 3"),
        ("flat_logprobs", 1, "must be True or False, got 1"),
        ("include_stop_str_in_output", "yes", "must be True or False, got 'yes'"),
        ("output_kind", "delta", "output_kind must be one of RequestOutputKind.CUMULATIVE, "),
        ("stream_interval", 0, "stream_interval must be from 1"),
        ("logit_bias", [5], "logit_bias must map token ids to numbers, got [5]"),
        ("logit_bias", {"a": 1.0}, "logit_bias must be an integer, got 'a'"),
        ("logit_bias", {-1: 1.0}, "logit_bias must be from 0"),
        ("logit_bias", {1: math.nan}, "logit_bias of token 1 must be a number, got nan"),
        ("logit_bias", {1: "2"}, "logit_bias of token 1 must be a number, got '2'"),
        ("allowed_token_ids", [], "allowed_token_ids must not be empty"),
        ("allowed_token_ids", [-1], "allowed_token_ids must be from 0"),
        ("allowed_token_ids", np.ones((2, 2), int), "allowed_token_ids must be an integer"),
        ("allowed_token_ids", np.ones(2), "allowed_token_ids must be an integer"),
        ("bad_words", ["a", ""], "bad_words must not be an empty string"),
        ("bad_words", [1], "bad_words must be a string, got 1"),
        ("structured_outputs", "json", "structured_outputs must be StructuredOutputsParams(...)"),
        ("structured_outputs", {}, "structured_outputs: give exactly one of json, regex"),
        (
            "structured_outputs",
            {"jsn": {}},
            "structured_outputs: StructuredOutputsParams has no field",
        ),
        ("repetition_detection", 3, "must be RepetitionDetectionParams(...), got 3"),
        ("logits_processors", [print], "logits_processors must map names of processors"),
        ("logits_processors", {1: 2}, "logits_processors must map names of processors"),
        ("skip_reading_prefix_cache", 1, "must be True or False, got 1"),
        ("extra_args", {"a": 1}, "is refused (got {'a': 1}): give logits_processors="),
        ("thinking_token_budget", 5, "is refused (got 5): there is no parser"),
        ("skip_clone", True, "is refused (got True): each request takes its own copy"),
        ("routed_experts_prompt_start", 1, "is refused (got 1): routed experts"),
    ],
)
def test_wrong_values_are_refused_by_name(field, value, said):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert said in str(caught.value)
    params = SamplingParams()
    with pytest.raises(RequestError, match=field) as caught:
        setattr(params, field, value)
    assert said in str(caught.value)
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("beam_width", 0, "beam_width must be from 1 to 1024, got 0"),
        ("beam_width", None, "beam_width must be an integer, got None"),
        ("beam_width", 2.0, "got 2.0"),
        ("max_tokens", 0, "max_tokens must be from 1"),
        ("max_tokens", None, "max_tokens must be an integer"),
        ("length_penalty", math.nan, "length_penalty must be from -100 to 100, got nan"),
        ("length_penalty", 10**400, "length_penalty must be from -100 to 100"),
        ("length_penalty", None, "length_penalty must be a number"),
        ("early_stopping", "Never", "early_stopping must be None (vLLM's rule)"),
        ("early_stopping", [], "got []"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("structured_outputs", {"json": {}}, "structured_outputs is refused"),
        ("include_stop_str_in_output", True, "include_stop_str_in_output is refused"),
        ("num_beams", 4, "it is called beam_width"),
        ("beams_width", 4, "has no field 'beams_width'; did you mean 'beam_width'?"),
    ],
)
def test_wrong_values_of_a_beam_search_are_refused_by_name(field, value, said):
    with pytest.raises(RequestError, match=field) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | {field: value}))
    assert said in str(caught.value)


TAKEN = {
    "n": (np.int32(3), 3),
    "temperature": (2, 2.0),
    "top_p": (1e-9, 1e-9),
    "top_k": (-1, 0),
    "min_p": (1, 1.0),
    "seed": (-1, None),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (np.float32(0.5), 0.5),
    "repetition_penalty": (1.2, 1.2),
    "logit_bias": ({"5": 200, 6: -math.inf}, {5: 100.0, 6: -100.0}),
    "allowed_token_ids": (np.array([4, 2, 4]), (4, 2)),
    "bad_words": (["no", "no", "never"], ("no", "never")),
    "structured_outputs": ({"regex": "a+"}, StructuredOutputsParams(regex="a+")),
    "logits_processors": ({"mine": [1.0]}, {"mine": [1.0]}),
    "max_tokens": (None, None),
    "min_tokens": (np.int64(3), 3),
    "stop": ("end", ("end",)),
    "stop_token_ids": (np.array([3, 1]), (3, 1)),
    "ignore_eos": (True, True),
    "include_stop_str_in_output": (True, True),
    "repetition_detection": (
        {"max_pattern_size": 4, "min_count": 3},
        RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    ),
    "logprobs": (True, 1),
    "prompt_logprobs": (-1, -1),
    "logprob_token_ids": (range(128), tuple(range(128))),
    "flat_logprobs": (True, True),
    "detokenize": (False, False),
    "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False),
    "output_kind": (RequestOutputKind.DELTA, RequestOutputKind.DELTA),
    "stream_interval": (5, 5),
    "skip_reading_prefix_cache": (True, True),
    "extra_args": ({}, None),
    "thinking_token_budget": (-1, None),
    "skip_clone": (False, False),
    "routed_experts_prompt_start": (0, 0),
}


def test_the_cases_are_all_fields():
    assert list(TAKEN) == [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("field", TAKEN)
def test_a_value_takes_its_normal_form_given_or_assigned(field):
    value, kept = TAKEN[field]
    given, assigned = SamplingParams(**{field: value}), SamplingParams()
    setattr(assigned, field, value)
    assert getattr(given, field) == getattr(assigned, field) == kept
    assert type(getattr(given, field)) is type(kept)
    assert given == assigned == given.clone()


def test_strings_and_ids_come_in_any_sequence():
    for several in (["a", "b"], ("a", "b"), np.array(["a", "b"]), iter("ab")):
        assert SamplingParams(stop=several).stop == ("a", "b")
    for several in ([7, 8], range(7, 9), np.array([7, 8]), iter([7, 8])):
        assert SamplingParams(stop_token_ids=several).stop_token_ids == (7, 8)


def test_values_that_ask_for_nothing_are_one():
    nothing = SamplingParams(stop=[], bad_words=[], logit_bias={}, stop_token_ids=None)
    assert nothing == SamplingParams(logits_processors={}, logprob_token_ids=[], extra_args=None)
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()) == nothing
    assert SamplingParams(presence_penalty=0, repetition_penalty=1) == nothing
    assert not nothing.has_rules


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 0}},
        {"allowed_token_ids": [0]},
        {"bad_words": ["a"]},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
        {"logits_processors": {"mine": None}},
        {"logprob_token_ids": [0]},
    ],
)
def test_rules_are_seen(fields):
    assert SamplingParams(**fields).has_rules


def test_what_is_no_rule():
    params = SamplingParams(
        temperature=0.5, top_p=0.5, top_k=2, min_p=0.1, seed=1, stop="a", stop_token_ids=[1]
    )
    assert not params.has_rules


STRANGE = [
    None, True, -1, 0.5, 10**400, -math.inf, math.nan, "", "a", "\ud800", b"a", [], [None], [[1]],
    {}, {"a": None}, {None: 1}, {1: 10**400}, (1, "a"), object(), int, print, range(3), iter([1]),
    np.array(3), np.array("a"), np.array([0.5]), np.ones((2, 2)), np.float32("nan"), jnp.ones(2),
]  # fmt: skip


@pytest.mark.parametrize("field", TAKEN)
def test_strange_values_are_taken_or_refused_by_name(field):
    num_refused = 0
    for value in STRANGE:
        params, told = SamplingParams(), None
        try:
            setattr(params, field, value)
        except RequestError as error:
            told = str(error)
        assert told is None or field in told
        assert params.clone() == params
        num_refused += told is not None
    assert num_refused >= 5


def test_fields_that_contradict_each_other():
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens=2, got 3"):
        SamplingParams(max_tokens=2, min_tokens=3)
    with pytest.raises(RequestError, match=r"stop=\['a'\] needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_assigned_values_are_judged_together_when_cloned():
    params = SamplingParams(temperature=0.0)
    params.n = 4
    with pytest.raises(RequestError, match="n must be 1 when greedy"):
        params.clone()
    params.temperature = 0.7
    assert params.clone() == SamplingParams(n=4, temperature=0.7)


def test_a_walk_over_temperatures_keeps_the_truncation():
    params = SamplingParams(top_p=0.9, temperature=0.7)
    params.temperature = 0
    assert params.clone().top_p == 1.0
    params.temperature = 0.7
    assert params.clone().top_p == 0.9


def test_a_clone_is_its_own():
    params = SamplingParams(logit_bias={1: 2.0}, structured_outputs={"choice": ["a", "b"]})
    mine = params.clone()
    params.max_tokens, params.logit_bias[1] = 5, 3.0
    params.structured_outputs.choice = ["c"]
    assert (mine.max_tokens, mine.logit_bias) == (16, {1: 2.0})
    assert mine.structured_outputs.choice == ("a", "b")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_token", "has no field 'max_token'; did you mean 'max_tokens'?"),
        ("use_beam_search", "call LLM.beam_search with BeamSearchParams"),
        ("max_new_tokens", "it is called max_tokens"),
        ("qqq", "has no field 'qqq'; there are n, temperature, "),
    ],
)
def test_unknown_names_are_told(name, said):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: 1})
    assert said in str(caught.value)
    with pytest.raises(RequestError, match=name):
        setattr(SamplingParams(), name, 1)


def test_records_travel():
    params = SamplingParams(stop="a", structured_outputs={"json": {"type": "object"}})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_greedy_resets_truncation_and_allows_one_sample():
    params = SamplingParams(temperature=1e-6, top_k=5, top_p=0.3, min_p=0.2)
    assert params.is_greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    with pytest.raises(RequestError, match="n must be 1 when greedy"):
        SamplingParams(temperature=0, n=2)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.003).temperature == 0.01
    assert "0.003" in caplog.text
    assert SamplingParams(temperature=0.01).temperature == 0.01


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, None), (-1, None), (0, 0), (-7, -7), (2**40, 2**40), (2**63, 2**63)],
)
def test_seeds(given, kept):
    assert SamplingParams(seed=given).seed == kept


def test_one_spelling_for_each_meaning():
    assert SamplingParams(top_k=-1, stop_token_ids=[4, 5]) == SamplingParams(
        top_k=0, stop_token_ids=(4, 5)
    )
    again = dataclasses.replace(SamplingParams(temperature=0.5, max_tokens=None), seed=3)
    assert (again.temperature, again.max_tokens, again.seed) == (0.5, None, 3)


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(9))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 9)


def test_numpys_integers_become_pythons():
    """int32 would overflow when a prompt's length is added, and int64 holds no seed of 64 bits."""
    params = SamplingParams(
        n=np.int64(2),
        top_k=np.int16(5),
        seed=np.int64(-7),
        max_tokens=np.int32(2**31 - 1),
        stop_token_ids=[np.int32(3)],
    )
    values = (params.n, params.top_k, params.seed, params.max_tokens, *params.stop_token_ids)
    assert values == (2, 5, -7, 2**31 - 1, 3)
    assert {type(value) for value in values} == {int}
