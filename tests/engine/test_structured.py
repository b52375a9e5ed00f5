"""Grammars: masks against a count of all texts, ends, forks, forms and their refusals."""

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jpaged.engine.structured import GrammarCompiler, Matcher
from jpaged.errors import RequestError
from jpaged.output_constraints import StructuredOutputsParams as Form
from tests.engine.tiny_tokenizers import (
    BYTES,
    LETTERS,
    PIECES,
    SPECIAL,
    all_bytes_and_pieces,
    byte_level,
    sentencepiece,
)

EOS = (1, 2)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
}


def allowed(matcher: Matcher, vocab_size: int) -> set[int]:
    """The ids of the mask's bits; there are none behind the last id."""
    mask = matcher.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab_size // 32),)
    ids = {v for v in range(mask.size * 32) if mask[v // 32] >> (v % 32) & 1}
    assert max(ids, default=0) < vocab_size
    return ids


# ---- Masks against all texts of a finite language ----


def check_every_mask(matcher: Matcher, texts: set[bytes], tokens: dict[int, bytes], size: int):
    """Follows every way to write every text, and holds each mask against the texts that remain."""
    todo = [(matcher, b"")]
    while todo:
        at, prefix = todo.pop()
        expected = {
            token_id
            for token_id, token in tokens.items()
            if any(text.startswith(prefix + token) for text in texts)
        }
        ends = {i for i in EOS if i < size} if prefix in texts else set()
        assert at.is_complete == (prefix in texts)
        if not expected and not at.is_complete:
            with pytest.raises(RuntimeError, match="no id of the vocabulary continues"):
                at.mask()
            continue
        assert allowed(at, size) == expected | ends, prefix
        assert at.must_end == (not expected)
        for token_id in expected:
            fork = at.fork()
            fork.accept(token_id)
            todo.append((fork, prefix + tokens[token_id]))


SIGNS = 'ab é日🙂"\\/\n'
some_texts = st.lists(st.text(SIGNS, min_size=1, max_size=4), min_size=1, max_size=4, unique=True)
some_tokens = st.lists(
    st.text(SIGNS, min_size=1, max_size=3).map(str.encode)
    | st.binary(min_size=1, max_size=2)
    | st.sampled_from([bytes([byte]) for byte in SIGNS.encode()]),
    max_size=30,
    unique=True,
)


@given(some_texts, some_tokens, st.integers(-4, 40))
@settings(max_examples=60)
def test_an_id_is_allowed_if_and_only_if_its_bytes_continue_a_choice(
    texts: list[str], tokens: list[bytes], extra: int
):
    """Over any vocabulary, cut anywhere or with ids that the tokenizer does not know."""
    size = max(len(SPECIAL) + len(tokens) + extra, 2)
    known = {i: token for i, token in enumerate(tokens, len(SPECIAL)) if i < size}
    compiler = GrammarCompiler(byte_level(tokens), size, [i for i in EOS if i < size])
    wanted = {text.encode() for text in texts}
    if not any(text.startswith(token) for text in wanted for token in known.values()):
        with pytest.raises(RequestError, match=r"choice .* no id of the vocabulary"):
            compiler.compile(Form(choice=texts))
        return
    grammar = compiler.compile(Form(choice=texts))
    check_every_mask(grammar.matcher(), wanted, known, size)


ENUM = {"enum": ["ab", "é", 12, None, {"a": [True]}]}
FINITE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "regex": ({"regex": r"a?(bc){0,2}|[é日]/?"}, {"", "a", "bc", "abc", "bcbc", "abcbc"}),
    "json": (
        {"json": ENUM, "disable_any_whitespace": True},
        {'"ab"', '"é"', "12", "null", '{"a":[true]}'},
    ),
    "json with blanks": (
        {"json": {"enum": [[1, 2]]}, "whitespace_pattern": " ?"},
        {
            f"[{a}1{b},{c}2{d}]"
            for a in ("", " ")
            for b in ("", " ")
            for c in ("", " ")
            for d in ("", " ")
        },
    ),
    "lark": ({"grammar": 'start: "a" b | "日"\nb: "b"? "c"'}, {"ac", "abc", "日"}),
    "gbnf": ({"grammar": 'root ::= "a" x? | [\\u00e9x]\nx ::= "\\u0062c"'}, {"a", "abc", "é", "x"}),
}
FINITE["regex"][1].update({"é", "日", "é/", "日/"})


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_masks_of_each_kind_of_form(name: str, kind: str):
    fields, texts = FINITE[name]
    if kind == "byte-level":
        tokens = [*BYTES, *(piece.encode() for piece in PIECES), "日".encode()[:2]]
        tokenizer = byte_level(tokens)
    else:
        tokens = [*BYTES, *(piece.encode() for piece in (*PIECES, *LETTERS))]
        tokenizer = sentencepiece([*PIECES, *LETTERS])
    size = len(SPECIAL) + len(tokens) + 7
    matcher = GrammarCompiler(tokenizer, size, EOS).compile(Form(**fields)).matcher()
    known = dict(enumerate(tokens, len(SPECIAL)))
    check_every_mask(matcher, {text.encode() for text in texts}, known, size)


def test_special_tokens_are_no_text():
    tokenizer = all_bytes_and_pieces()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [1])
    matcher = compiler.compile(Form(regex=r"(.|\n)*")).matcher()
    assert allowed(matcher, len(tokenizer)) & {0, 1, 2} == {1}
    matcher = compiler.compile(Form(choice=SPECIAL)).matcher()
    assert allowed(matcher, len(tokenizer)) == {3 + ord("<")}


# ---- Ends ----


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = all_bytes_and_pieces()
    return GrammarCompiler(tokenizer, len(tokenizer), EOS)


def feed(matcher: Matcher, text: str) -> None:
    for byte in text.encode():
        matcher.accept(len(SPECIAL) + byte)


def test_the_end_is_allowed_where_the_text_is_whole_and_there_alone(compiler: GrammarCompiler):
    matcher = compiler.compile(Form(regex="ab+")).matcher()
    size = len(all_bytes_and_pieces())
    for text, is_whole in (("", False), ("a", False), ("ab", True), ("abb", True)):
        fork = matcher.fork()
        feed(fork, text)
        assert fork.is_complete == is_whole
        assert (set(EOS) <= allowed(fork, size)) == is_whole
        assert not fork.must_end
    for end in EOS:
        fork = matcher.fork()
        with pytest.raises(RuntimeError, match=rf"does not allow the id {end} "):
            fork.accept(end)
        feed(fork, "ab")  # what was refused has left no trace
        fork.accept(end)
        assert fork.must_end
        assert fork.is_complete
        assert allowed(fork, size) == set(EOS)
        with pytest.raises(RuntimeError, match="does not allow the id"):
            feed(fork, "b")


@pytest.mark.parametrize("eos_ids", [[], [1], [2, 1], [0, 1, 2]])
def test_a_finished_text_allows_nothing_but_the_ends_that_there_are(eos_ids: list[int]):
    tokenizer = all_bytes_and_pieces()
    matcher = GrammarCompiler(tokenizer, 333, eos_ids).compile(Form(choice=["ab"])).matcher()
    feed(matcher, "ab")
    assert matcher.must_end
    assert allowed(matcher, 333) == set(eos_ids)


def test_an_end_that_the_tokenizer_does_not_know_or_that_spells_text():
    tokenizer = byte_level([*BYTES, b"stop"])
    text_id, unknown_id = len(tokenizer) - 1, len(tokenizer) + 30
    compiler = GrammarCompiler(tokenizer, unknown_id + 1, [text_id, unknown_id])
    matcher = compiler.compile(Form(regex="(stop)*x")).matcher()
    assert allowed(matcher, unknown_id + 1) == {len(SPECIAL) + ord(c) for c in "sx"}
    feed(matcher, "stopx")
    assert allowed(matcher, unknown_id + 1) == {text_id, unknown_id}


def test_matchers_and_forks_go_their_own_ways(compiler: GrammarCompiler):
    grammar = compiler.compile(Form(choice=["ab", "cd"]))
    first, second = grammar.matcher(), grammar.matcher()
    feed(first, "a")
    fork = first.fork()
    feed(fork, "b")
    feed(second, "cd")
    assert (first.is_complete, fork.is_complete, second.is_complete) == (False, True, True)
    feed(first, "b")
    assert first.must_end


@pytest.mark.parametrize("token_id", [0, 3 + ord("x"), 10**6, -1, -300])
def test_a_refused_token_is_named(compiler: GrammarCompiler, token_id: int):
    matcher = compiler.compile(Form(choice=["ab"])).matcher()
    with pytest.raises(
        RuntimeError, match=rf"the output's grammar does not allow the id {token_id}"
    ):
        matcher.accept(token_id)


def test_a_mask_cannot_be_written_to(compiler: GrammarCompiler):
    with pytest.raises(ValueError, match="read-only"):
        compiler.compile(Form(choice=["ab"])).matcher().mask()[0] = 1


# ---- Forms ----


def test_equal_forms_are_compiled_once(compiler: GrammarCompiler):
    grammar = compiler.compile(Form(json=SCHEMA))
    assert compiler.compile(Form(json=dict(SCHEMA))) is grammar
    assert compiler.compile(Form(json=json.dumps(SCHEMA))) is grammar
    assert compiler.compile(Form(json=SCHEMA, disable_any_whitespace=True)) is not grammar
    # The order of properties is the order in which they are written.
    properties = dict(reversed(SCHEMA["properties"].items()))
    assert compiler.compile(Form(json={**SCHEMA, "properties": properties})) is not grammar


def takes(compiler: GrammarCompiler, text: str, **fields: Any) -> bool:
    matcher = compiler.compile(Form(**fields)).matcher()
    try:
        feed(matcher, text)
    except RuntimeError:
        return False
    return matcher.is_complete


def test_objects_are_closed_on_demand_and_only_there(compiler: GrammarCompiler):
    inner = {"properties": {"properties": {"type": "integer"}}, "type": "object"}
    schema = {
        "type": "object",
        "properties": {"x": {"anyOf": [inner, {"type": "null"}]}, "open": {"type": "object"}},
    }
    texts = {
        '{"x": {"properties": 1}}': (True, True),
        '{"x": {"properties": 1, "b": 2}}': (True, False),
        '{"x": null, "b": 2}': (True, False),
        '{"open": {"b": 2}}': (True, True),  # it names no properties
    }
    for text, expected in texts.items():
        given = [
            takes(compiler, text, json=schema, disable_additional_properties=closed)
            for closed in (False, True)
        ]
        assert tuple(given) == expected, text


def test_blanks_in_json(compiler: GrammarCompiler):
    for fields in ({"json": {"type": "object"}}, {"json_object": True}):
        assert takes(compiler, '{"a": 1,\n  "b": []}', **fields)
        assert not takes(compiler, '{"a": 1}', disable_any_whitespace=True, **fields)
        assert takes(compiler, '{"a":1}', disable_any_whitespace=True, **fields)
        assert takes(compiler, '{"a": 1}', whitespace_pattern=" ?", **fields)
        assert not takes(compiler, '{"a":  1}', whitespace_pattern=" ?", **fields)


def test_a_digit_is_one_of_ten(compiler: GrammarCompiler):
    for regex in (r"\d", r"[\d_]"):
        assert takes(compiler, "3", regex=regex)
        assert not takes(compiler, "٣", regex=regex)
    assert takes(compiler, "_", regex=r"[\d_]")


BROKEN = [
    ({"json": {"type": "wat"}}, "json cannot be used: Invalid type: wat"),
    ({"json": {"$ref": "#/nowhere"}}, "json .*'/nowhere' does not exist"),
    ({"json": {"uniqueItems": True}}, "json .*uniqueItems.*parts of JSON Schema"),
    ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, r"json .*minimum \(5\)"),
    ({"json": {"pattern": "a(b", "type": "string"}}, "json .*unclosed group"),
    ({"json": "[1]"}, r"json .*a schema is an object, got '\[1\]'"),
    ({"json": "false"}, "json .*a schema is an object, got 'false'"),
    ({"regex": "a(b"}, "regex cannot be used: unclosed group"),
    ({"regex": r"(?=a)b"}, "regex .*look-ahead"),
    ({"regex": r"(a)\1"}, "regex .*backreferences"),
    ({"regex": "(" * 9999}, "regex "),
    ({"regex": r"[^\x00-\U0010ffff]"}, "regex .*no id of the vocabulary"),
    ({"grammar": "start: foo"}, 'grammar .*unknown name: "foo".*root ::='),
    ({"grammar": "start ="}, "grammar "),
    ({"grammar": "root ::= foo"}, "grammar .*'foo' not found"),
    ({"grammar": 'root ::= "a'}, "grammar .*Unexpected end of input"),
    ({"grammar": 'x ::= "a"'}, "grammar .*No 'root' rule"),
    ({"json_object": True, "whitespace_pattern": "["}, "json_object .*unclosed"),
    (
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "whitespace_pattern=' ' contradicts",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BROKEN, ids=lambda x: str(x)[:40])
def test_a_broken_form_is_refused_by_name(
    compiler: GrammarCompiler, fields: dict[str, Any], message: str
):
    for _ in range(2):  # a refusal is not cached as a success
        with pytest.raises(RequestError, match=message) as caught:
            compiler.compile(Form(**fields))
        assert len(str(caught.value)) < 600
    assert takes(compiler, "ok", choice=["ok"])


def test_no_tokenizer_or_one_of_an_unknown_kind():
    form = Form(choice=["ab"])
    with pytest.raises(RequestError, match="needs the model's tokenizer"):
        GrammarCompiler(None, 10, EOS).compile(form)
    tokenizer = byte_level(BYTES)
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="its decoder is WordPiece"):
        GrammarCompiler(tokenizer, 10, EOS).compile(form)
    with pytest.raises(RequestError, match="the tokens of a object"):
        GrammarCompiler(object(), 10, EOS).compile(form)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        GrammarCompiler(byte_level(BYTES), 300, EOS).compile(Form(choice=["ab"]))
