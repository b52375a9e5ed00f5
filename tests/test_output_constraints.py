"""Forms of an output: what may be asked for, and the message when it may not."""

import math
from typing import Any

import pytest

from jpaged.errors import RequestError
from jpaged.output_constraints import RepetitionDetectionParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Model:
    """As pydantic's classes: they hold a schema, but are none."""

    @staticmethod
    def model_json_schema():
        return SCHEMA


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("json", SCHEMA, SCHEMA),
        ("json", '{"type": "object"}', '{"type": "object"}'),
        ("regex", "[ab]+", "[ab]+"),
        ("choice", ["yes", "no", "yes"], ("yes", "no")),
        ("grammar", 'start: "a"', 'start: "a"'),
        ("json_object", True, True),
    ],
)
def test_each_kind(kind: str, value: Any, kept: Any):
    form = StructuredOutputsParams(**{kind: value})
    assert (form.kind, getattr(form, kind)) == (kind, kept)
    assert form == form.clone()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "give exactly one of json, regex, choice, grammar, json_object, structural_tag"),
        ({"json_object": False}, "got none"),
        ({"disable_any_whitespace": True}, "got none"),
        ({"json": SCHEMA, "regex": "a"}, "got json and regex"),
        ({"json": "{"}, "json is no JSON schema: Expecting"),
        ({"json": {"a": object()}}, "json is no JSON schema: Object of type object"),
        ({"json": {"maximum": math.inf}}, "json is no JSON schema: Out of range"),
        ({"json": [1]}, "json must be a JSON schema, a dict or JSON text, got [1]"),
        ({"json": Model}, "give its model_json_schema()"),
        ({"regex": ""}, "regex must not be an empty string"),
        ({"regex": 3}, "regex must be a string, got 3"),
        ({"choice": "yes"}, "choice must be a list of strings, got 'yes'"),
        ({"choice": []}, "choice must hold at least one string"),
        ({"choice": ["a", ""]}, "choice must not be an empty string"),
        ({"choice": ["a", 3]}, "choice must be a string, got 3"),
        ({"grammar": b"start"}, "grammar must be a string"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json": SCHEMA, "disable_any_whitespace": 1}, "disable_any_whitespace must be True"),
        ({"json": SCHEMA, "disable_additional_properties": None}, "must be True or False"),
        ({"json": SCHEMA, "whitespace_pattern": 3}, "whitespace_pattern must be a string"),
        ({"structural_tag": "{}"}, "structural_tag is refused (got '{}'): "),
        ({"schema": SCHEMA}, "StructuredOutputsParams has no field 'schema'; there are json, "),
        ({"choices": ["a"]}, "did you mean 'choice'?"),
    ],
)
def test_wrong_forms_are_told(fields: dict[str, Any], said: str):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert said in str(caught.value)


def test_a_form_is_changed_in_one_step_or_judged_when_used():
    form = StructuredOutputsParams(regex="a")
    form.json_object = True
    with pytest.raises(RequestError, match="got regex and json_object"):
        form.clone()
    form.regex = None
    assert form.clone() == StructuredOutputsParams(json_object=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_pattern_size": 3}, "min_count must be at least 2, got 0"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be at least 2, got 1"),
        ({"min_pattern_size": 1}, "min_pattern_size=1 exceeds max_pattern_size=0"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "exceeds"),
        ({"max_pattern_size": -1}, "max_pattern_size must be from 0"),
        ({"max_pattern_size": 2.0}, "max_pattern_size must be an integer"),
        ({"max_size": 2}, "RepetitionDetectionParams has no field 'max_size'"),
    ],
)
def test_wrong_repetitions_are_told(fields: dict[str, Any], said: str):
    with pytest.raises(RequestError) as caught:
        RepetitionDetectionParams(**fields)
    assert said in str(caught.value)


def test_repetitions_may_be_given_by_place_as_in_vllm():
    given = RepetitionDetectionParams(5, 1, 3)
    assert (given.max_pattern_size, given.min_pattern_size, given.min_count) == (5, 1, 3)
    assert RepetitionDetectionParams(min_count=7).max_pattern_size == 0
