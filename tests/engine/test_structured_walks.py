"""Random walks through grammars: whatever the masks allow ends in a valid answer, always."""

import importlib.util
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jpaged.engine.structured import GrammarCompiler, Matcher
from jpaged.loading import load_tokenizer
from jpaged.output_constraints import StructuredOutputsParams as Form
from tests.engine.tiny_tokenizers import LETTERS, PIECES, all_bytes_and_pieces, sentencepiece
from tests.loading.test_real_models import PACKAGES
from tests.loading.test_scripts import import_script

EOS = (1, 2)
NUM_WALKS = 100

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "grün", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"$ref": "#/$defs/next"},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"next": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


def has_schema(value: Any) -> bool:
    """Whether a value is one of SCHEMA's, by hand."""
    next_ = value.get("next", {})
    return (
        {"name", "kind"} <= set(value) <= set(SCHEMA["properties"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ("red", "grün", None)
        and type(value.get("age", 0)) is int
        and 0 <= value.get("age", 0) <= 150
        and all(type(tag) is bool for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 3
        and type(next_) is dict
        and type(next_.get("x", 0)) in (int, float)
    )


REGEX = r"[a-zé]{2,8}@[a-z]+\.(com|org)( /\d{3})*"
LARK = """
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
%ignore / /
"""
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": SCHEMA}, lambda text: has_schema(json.loads(text))),
    "json text, no blanks": (
        {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
        lambda text: has_schema(json.loads(text)) and "\n" not in text,
    ),
    "json_object": ({"json_object": True}, lambda text: type(json.loads(text)) is dict),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": ["yes", "yes!", "n🙂"]}, lambda text: text in ("yes", "yes!", "n🙂")),
    "grammar": ({"grammar": LARK}, lambda text: type(eval(text.strip(" "))) is int),
}


def walk(matcher: Matcher, closing: list[int], rng: random.Random, late: int = 12) -> list[int]:
    """Ids drawn at random from the masks until an end of sequence.

    Ends where it may, and closes what is open, half of the time, and once it is late always.
    """
    ids = []
    while True:
        assert len(ids) < 60 * late, "the walk does not end"
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        ends = [i for i in EOS if bits[i]]
        bits[list(EOS)] = 0
        choices, closers = np.flatnonzero(bits), [i for i in closing if bits[i]]
        is_closing = len(ids) > late or rng.random() < 0.5
        if ends and (is_closing or not choices.size):
            matcher.accept(rng.choice(ends))
            assert matcher.must_end
            return ids
        ids.append(rng.choice(closers) if closers and is_closing else int(rng.choice(choices)))
        matcher.accept(ids[-1])


def check_walks(tokenizer: Any, name: str, number: int = NUM_WALKS) -> None:
    fields, is_valid = FORMS[name]
    vocab_size = len(tokenizer) + 64
    closing = tokenizer.convert_tokens_to_ids(['"', "}", "]", ")", "."])
    grammar = GrammarCompiler(tokenizer, vocab_size, EOS).compile(Form(**fields))
    anchor = tokenizer.convert_tokens_to_ids("a")
    for seed in range(number):
        ids = walk(grammar.matcher(), closing, random.Random(seed))
        text = tokenizer.decode([anchor, *ids], skip_special_tokens=True)
        assert text[0] == "a"
        assert is_valid(text[1:]), (seed, text[1:])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_every_random_walk_ends_in_a_valid_answer(name: str, kind: str):
    is_bytes = kind == "byte-level"
    check_walks(all_bytes_and_pieces() if is_bytes else sentencepiece([*PIECES, *LETTERS]), name)


@pytest.fixture(scope="module", params=PACKAGES)
def real_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{request.param} is not installed; see scripts/fetch_models.py")
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(import_script("fetch_models").fetch(request.param, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_random_walks_over_real_vocabularies(real_tokenizer: Any, name: str):
    check_walks(real_tokenizer, name)
