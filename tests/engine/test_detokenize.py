"""Incremental text against its definition, over tokenizers of every kind and over real ones."""

import functools
import importlib.util
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.detokenize import Detokenizer, whole_text
from jpaged.loading import load_tokenizer
from tests.engine.small_tokenizers import (
    DECODERS,
    LITERAL,
    CountingTokenizer,
    byte_level,
    ids_of,
    sentencepiece,
    text_by_definition,
)
from tests.loading.checkpoints import FIXTURES, LLAMA
from tests.loading.test_real_models import PACKAGES
from tests.loading.test_scripts import import_script

LETTERS = (
    "ab .\n\u00e9\u4f60\u597d\U0001f642\u0301\u0e01\u200d\u2581\N{REPLACEMENT CHARACTER}\U0001f469"
)
TEXT = st.text(LETTERS, max_size=8)
PART = st.one_of(TEXT.map(str.encode), st.binary(max_size=3))
BYTES_OF_CHARACTERS = st.sampled_from([bytes([b]) for b in "\u00e9\u20ac\U0001f642".encode()])


@functools.cache
def small(kind: str) -> Any:
    if kind == "byte-level":
        parts = [LETTERS[i:].encode()[j : j + 3] for i in range(len(LETTERS)) for j in range(3)]
        return byte_level([*parts, b" a", b"ab", b"\xa9a", b"<0x0A>"])
    return sentencepiece(kind.removesuffix(" unigram"), unigram=kind.endswith("unigram"))


KINDS = ["byte-level", *DECODERS, "llama unigram"]


@st.composite
def sequences(draw: Any, tokenizer: Any) -> list[int]:
    """Tokens of some kind each, so that bytes of a character often stand side by side."""
    names = st.sampled_from(sorted(tokenizer.get_vocab()))
    rare = st.sampled_from(["<s>", "</s>", "<tool>", "\u00e9\u4f60", "", LITERAL, "\u2581"])
    kind = st.one_of(names, rare, BYTES_OF_CHARACTERS, PART)
    ids = ids_of(tokenizer, *draw(st.lists(kind, max_size=10)))
    padding = st.just(len(tokenizer) + 7)  # an id of the model alone
    return [draw(padding) if i is None else i for i in ids]


def deltas_of(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.push([token_id]) for token_id in output] + [detokenizer.flush()]


def check(tokenizer: Any, prompt: list[int], output: list[int], other: list[int], skip: bool):
    expected = text_by_definition(tokenizer, prompt, output, skip=skip)
    whole = whole_text(tokenizer, prompt, output, skip_special_tokens=skip)
    assert whole == expected
    deltas = deltas_of(tokenizer, prompt, output, skip=skip)
    assert "".join(deltas) == expected
    # What is out stands, whatever comes next.
    for turned_to in (other, []):
        changed = text_by_definition(tokenizer, prompt, output + turned_to, skip=skip)
        assert changed.startswith("".join(deltas[:-1]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_deltas_are_the_whole_text_and_certain(kind, data, skip):
    tokenizer = small(kind)
    prompt, output, other = (data.draw(sequences(tokenizer)) for _ in range(3))
    check(tokenizer, prompt, output, other, skip)


@settings(max_examples=60)
@given(st.data(), st.lists(st.binary(min_size=2, max_size=4), max_size=12), st.booleans())
def test_random_byte_level_vocabularies(data, pieces, skip):
    tokenizer = byte_level(pieces)
    prompt, output, other = (data.draw(sequences(tokenizer)) for _ in range(3))
    check(tokenizer, prompt, output, other, skip)


@settings(max_examples=60)
@given(st.data(), st.lists(TEXT, max_size=12), st.sampled_from([*DECODERS]), st.booleans())
def test_random_sentencepiece_vocabularies(data, pieces, kind, skip):
    tokenizer = sentencepiece(kind, pieces)
    prompt, output, other = (data.draw(sequences(tokenizer)) for _ in range(3))
    check(tokenizer, prompt, output, other, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(st.data())
def test_a_text_is_out_with_its_last_token(kind, data):
    """Nothing waits that need not: after a letter that is no byte token all is certain."""
    tokenizer = small(kind)
    prompt, output = (data.draw(sequences(tokenizer)) for _ in range(2))
    output += ids_of(tokenizer, "b")
    deltas = deltas_of(tokenizer, prompt, output, skip=True)
    assert deltas[-1] == ""
    assert deltas[-2].endswith("b")


def deltas_of_names(kind: str, prompt: list[Any], output: list[Any]) -> list[str]:
    tokenizer = small(kind)
    ids = (ids_of(tokenizer, *names) for names in (prompt, output))
    return deltas_of(tokenizer, *ids, skip=True)


EURO = "\u20ac".encode()


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "deltas"),
    [
        ("byte-level", [], [EURO], ["", "", "\u20ac", ""]),
        ("byte-level", [EURO[:1]], [EURO[1:]], ["", "\u20ac", ""]),
        ("byte-level", [], [EURO[:2]], ["", "", LITERAL]),
        ("byte-level", [], [EURO[:1], "<s>", EURO[1:]], ["", "", "", "\u20ac", ""]),
        # A bad byte is certain at once, and so is the character U+FFFD.
        ("byte-level", [], [b"\xff\xffa"], [LITERAL, LITERAL, "a", ""]),
        ("byte-level", ["a", LITERAL.encode()], [b"a"], ["a", ""]),
        ("byte-level", [b"a\xff"], [LITERAL.encode()], ["", "", LITERAL, ""]),
        ("byte-level", [b"a\xf0\x9f"], [b"a"], [LITERAL + "a", ""]),
        ("gemma", ["a", LITERAL], ["b", LITERAL], ["b", LITERAL, ""]),
        # A run of byte tokens waits for its end: its last byte may spoil it.
        ("gemma", [], [EURO, "a"], ["", "", "", "\u20aca", ""]),
        ("gemma", [], [EURO + b"\xff", "a"], ["", "", "", "", 4 * LITERAL + "a", ""]),
        ("gemma", [EURO + EURO[:1]], [EURO[1:], "a"], ["", "", "\u20aca", ""]),
        ("gemma", ["a", b"A\xe2"], ["b"], [LITERAL + "b", ""]),
        # The space in front of a text goes only where nothing precedes it.
        ("llama", [], ["\u2581a", "\u2581a"], ["a", " a", ""]),
        ("llama", ["<s>"], ["\u2581a", "\u2581a"], ["a", " a", ""]),
        ("llama", ["b"], ["\u2581a", "\u2581", "</s>", "\u2581a"], [" a", " ", "", " a", ""]),
        ("llama", [], ["\u2581", "\u2581", "a"], ["", " ", "a", ""]),
        ("gemma", ["<s>"], ["\u2581a"], [" a", ""]),
        ("metaspace", ["", "b"], ["\u2581", "a"], [" ", "a", ""]),
    ],
)
def test_examples(kind, prompt, output, deltas):
    assert deltas_of_names(kind, prompt, output) == deltas


def test_tentative_text_is_what_would_stand():
    tokenizer = small("llama")
    detokenizer = Detokenizer(tokenizer, ids_of(tokenizer, b"a"), skip_special_tokens=True)
    seen = []
    for token_id in ids_of(tokenizer, b"\n" + EURO + b"\xff", "b"):
        detokenizer.push([token_id])
        seen.append(detokenizer.tentative)
    assert seen == ["\n", "\n", "\n", "\n\u20ac", "", ""]
    at_start = Detokenizer(tokenizer, [], skip_special_tokens=True)
    at_start.push(ids_of(tokenizer, b"  \xe2"))
    assert at_start.tentative == " "


NUM = 100


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("kind", "first", "repeated"),
    [
        (kind, first, repeated)
        for kind in ("byte-level", "gemma", "llama", "metaspace")
        for first in (["a"], ["a", b"\xe2"], ["a", EURO, "\u2581"], ["a", b"z" * NUM])
        for repeated in (
            ["a"],
            ["a", "b"],
            ["<s>"],
            ["<s>", "</s>", "<pad>"],
            [""],
            ["\u2581"],
            [LITERAL],
            [LITERAL.encode()],
            [b"\xff"],
            [b"\xf0\x9f"],
            [EURO],
            [EURO[:2], "<s>"],
            [b"z" * 20, "\u2581", "", "<s>"],
        )
    ],
)
def test_costs_grow_with_the_number_of_tokens(kind, first, repeated, skip):
    tokenizer = small(kind)
    output = [i for i in ids_of(tokenizer, *first, *NUM * repeated) if i is not None]
    counting = CountingTokenizer(tokenizer)
    joined = "".join(deltas_of(counting, ids_of(tokenizer, "a"), output, skip=skip))
    assert joined == text_by_definition(tokenizer, ids_of(tokenizer, "a"), output, skip=skip)
    assert counting.num_decoded <= 20 * len(output) + 100
    assert counting.num_calls <= 2 * len(output) + 50


def test_a_long_prompt_costs_no_more_than_its_end():
    counting = CountingTokenizer(small("llama"))
    prompt = ids_of(small("llama"), *["a"] * 1000)
    assert whole_text(counting, prompt, prompt[:3], skip_special_tokens=True) == "aaa"
    Detokenizer(counting, prompt, skip_special_tokens=True)
    assert counting.num_decoded < 50


def test_spaces_are_not_cleaned_up():
    tokenizer = sentencepiece("gemma", unigram=True)
    tokenizer.clean_up_tokenization_spaces = True
    output = ids_of(tokenizer, "a", "\u2581", b".", "b")
    assert whole_text(tokenizer, [], output, skip_special_tokens=True) == "a .b"
    assert "".join(deltas_of(tokenizer, [], output, skip=True)) == "a .b"


# ---- Tokenizers of models ----


def check_real(tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    some_text = st.text(st.one_of(st.sampled_from(LETTERS), st.characters(codec="utf-8")))
    ids = st.one_of(
        some_text.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.lists(st.integers(0, len(tokenizer) + 3), max_size=12),
        st.lists(st.sampled_from(tokenizer.all_special_ids), max_size=2),
        PART.map(lambda part: [i for i in ids_of(tokenizer, part) if i is not None]),
    )
    parts = st.lists(ids, max_size=4).map(lambda lists: list(itertools.chain(*lists)))
    prompt, output, other = (data.draw(parts) for _ in range(3))
    check(tokenizer, prompt, output, other, skip)
    cut = data.draw(st.integers(0, len(output)))
    check(tokenizer, prompt + output[:cut], output[cut:], other, skip)


@pytest.mark.parametrize("path", [LLAMA, FIXTURES / "formats" / "gguf_q4_1"], ids=["hf", "gguf"])
@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_recorded_tokenizers(path, data, skip):
    check_real(_loaded(path), data, skip)


_loaded = functools.cache(load_tokenizer)


@pytest.fixture(scope="module", params=PACKAGES)
def real_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{request.param} is not installed; see scripts/fetch_models.py")
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(import_script("fetch_models").fetch(request.param, folder))


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_real_tokenizers(real_tokenizer, data, skip):
    check_real(real_tokenizer, data, skip)
