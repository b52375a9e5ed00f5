"""What a request may ask for, and the message when it may not."""

import dataclasses
import logging
import math

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.sampling_params import NOT_SUPPORTED_YET, BeamSearchParams, SamplingParams


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
        ("logprobs", 5, "not supported yet: logprobs=5"),
        ("logprobs", -2, "logprobs must be from -1"),
    ],
)
def test_wrong_values_are_refused_by_name(field, value, said):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert said in str(caught.value)


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
        ("structured_outputs", {"json": {}}, "not supported yet: structured_outputs"),
        ("include_stop_str_in_output", True, "not supported yet: include_stop_str_in_output"),
    ],
)
def test_wrong_values_of_a_beam_search_are_refused_by_name(field, value, said):
    with pytest.raises(RequestError, match=field) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | {field: value}))
    assert said in str(caught.value)


ASKED = {
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "stop": ["\n"],
    "min_tokens": 3,
    "prompt_logprobs": 0,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "structured_outputs": {"json": {}},
    "flat_logprobs": True,
}


@pytest.mark.parametrize("field", ASKED)
def test_what_is_not_there_yet_says_so(field):
    with pytest.raises(RequestError, match=f"not supported yet: {field}"):
        SamplingParams(**{field: ASKED[field]})


def test_neutral_values_of_what_is_not_there_yet_are_taken():
    SamplingParams(**NOT_SUPPORTED_YET)
    SamplingParams(stop=[], bad_words=[], logit_bias={}, repetition_penalty=1)


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
