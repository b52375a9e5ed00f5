"""Outputs of a given form: which ids may come next, by llguidance, on the host.

Owns what a grammar is written in, the vocabulary as the library sees it, and the end of sequence,
of which the library knows nothing: it is allowed exactly where the text so far is a whole answer.
The library forces no token either: an id is allowed if and only if its bytes continue some valid
text, so what is drawn is the model's own distribution over valid texts, id by id. Knows nothing of
rows or devices.
"""

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from jpaged.errors import RequestError, UnsupportedModelError
from jpaged.loading.token_bytes import token_bytes

MAX_CACHED = 256  # grammars of one engine: some kilobytes each, more with use
_MAX_REASON_LEN = 300  # characters of the library's explanation that a user sees

_PLACE = re.compile(r"^at 1\(\d+\): (failed to compile JSON schema: )?")
"""How the library names the place in a grammar that was written here, not by the user."""

# No forced tokens: the library would then allow only its own way to cut a forced text into ids.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")


class OutputForm(Protocol):
    """What `StructuredOutputsParams` says: exactly one of the first five, and how to read JSON."""

    json: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json_object: bool | None
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None


class GrammarCompiler:
    """Makes grammars over one model's vocabulary. One per engine.

    vocab_size: of the model, V; ids that the tokenizer does not know are never allowed. The
    library's view of the vocabulary is made at the first request that has a form.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._build = functools.lru_cache(MAX_CACHED)(self._build_anew)

    def compile(self, spec: OutputForm) -> "Grammar":
        """The grammar of a form; the same object for equal forms.

        Raises RequestError, naming the field: the form is broken, asks for what the library has
        not, no text has it or none that the vocabulary can begin; the tokenizer is of a kind whose
        bytes are not known; llguidance is not installed.
        """
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs the model's tokenizer; there is none")
        field, text = _write(spec)
        return self._build(field, text)

    def _build_anew(self, field: str, text: str) -> "Grammar":
        vocabulary = self._vocabulary
        matcher = _library().LLMatcher(vocabulary.view, text + _OPTIONS, log_level=0)
        if matcher.is_error():
            raise _refusal(field, matcher.get_error())
        try:
            return Grammar(Matcher(vocabulary, matcher))
        except RuntimeError as error:
            raise _refusal(field, str(error)) from None

    @functools.cached_property
    def _vocabulary(self) -> "_Vocabulary":
        try:
            return _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        except UnsupportedModelError as error:
            raise RequestError(f"structured_outputs cannot be served: {error}") from error


class Grammar:
    """A form made ready; matchers of one grammar share what they learn of it."""

    def __init__(self, start: "Matcher"):
        self._start = start
        start.mask()  # so that a grammar no output can begin is refused before it is served

    def matcher(self) -> "Matcher":
        """A fresh matcher, for one output sequence."""
        return self._start.fork()


class Matcher:
    """Where one output stands in its grammar.

    is_complete: the text so far is a whole answer, and the end of sequence may follow.
    """

    def __init__(self, vocabulary: "_Vocabulary", matcher: Any):
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._mask: np.ndarray | None = None
        self._is_ended = False
        self.is_complete: bool = matcher.is_accepting()

    def mask(self) -> np.ndarray:
        """Which ids may come next: u32[ceil(V/32)], bit v % 32 of word v // 32 for id v; read-only.

        End-of-sequence ids are allowed exactly when the text is complete, and nothing else once one
        was taken. When `must_end`, they are all that is set, or nothing where the model has none.

        Raises RuntimeError, with the reason: the text is not complete, and no id of the vocabulary
        can continue it, or the grammar is too complex to tell. The output cannot go on.
        """
        if self._mask is None:
            self._mask = self._next_mask()
        return self._mask

    @property
    def must_end(self) -> bool:
        """Whether the text is complete and only an end of sequence may follow.

        Where the end may not be drawn (ignore_eos, min_tokens, a model without one) the engine ends
        the output here itself, with finish_reason "stop".
        """
        return not self.has_text(self.mask())

    def has_text(self, mask: np.ndarray) -> bool:
        """Whether any of the ids of such a mask has text."""
        return bool(np.any(mask & self._vocabulary.text_bits))

    def accept(self, token_id: int) -> None:
        """Takes the token that was drawn.

        Raises RuntimeError, and changes nothing, where the token was not allowed.
        """
        if not self._allows(token_id):
            token = self._vocabulary.describe(token_id)
            raise RuntimeError(f"the output's grammar does not allow {token} here")
        if token_id in self._vocabulary.eos_ids:
            self._is_ended = True
        elif self._matcher.consume_token(token_id):
            self.is_complete = self._matcher.is_accepting()
        else:
            raise RuntimeError(f"the output's grammar failed: {_reason(self._matcher.get_error())}")
        self._mask = None

    def fork(self) -> Self:
        """A matcher in the same place that goes its own way."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _allows(self, token_id: int) -> bool:
        mask = self.mask()
        word, bit = divmod(token_id, 32)
        return 0 <= word < mask.size and bool(mask[word] >> bit & 1)

    def _next_mask(self) -> np.ndarray:
        vocabulary = self._vocabulary
        mask = np.zeros_like(vocabulary.text_bits)
        if not self._is_ended:
            allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            np.bitwise_and(allowed[: mask.size], vocabulary.text_bits, out=mask)
        if self.is_complete:
            mask |= vocabulary.eos_bits
        elif not mask.any():
            reason = _reason(self._matcher.get_error()) or self._matcher.stop_reason()
            raise RuntimeError(f"no id of the vocabulary continues the output's text ({reason})")
        mask.flags.writeable = False
        return mask


class _Vocabulary:
    """The model's ids as the library sees them, with an end of sequence that no id has."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]):
        self.eos_ids = eos_ids
        tokens, special = token_bytes(tokenizer, vocab_size)
        # The byte 0xFF, by which the library marks special tokens, is in no text.
        tokens = [b"" if b"\xff" in token else token for token in tokens]
        self.tokens = [*tokens, b"<end of sequence>"]
        self.eos_token_id, self.bos_token_id = vocab_size, None
        self.special_token_ids = sorted({*special, *eos_ids, vocab_size})
        self.eos_bits = _pack(np.isin(np.arange(vocab_size), list(eos_ids)))
        self.text_bits = ~self.eos_bits & _pack(np.array([bool(token) for token in tokens]))
        library = _library()
        self.view = library.LLTokenizer(library.TokenizerWrapper(self))

    def __call__(self, text: str | bytes) -> list[int]:
        """The library's way to cut forced text into ids, of which there is none."""
        raise NotImplementedError("grammars force no text")

    def describe(self, token_id: int) -> str:
        if not 0 <= token_id < len(self.tokens) - 1:
            return f"the id {token_id}, outside of the vocabulary,"
        return f"the id {token_id} ({self.tokens[token_id]!r:.60})"


def _pack(is_set: np.ndarray) -> np.ndarray:
    """Bit v % 32 of word v // 32 for each element v."""
    padded = np.pad(is_set, (0, -is_set.size % 32))
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed: pip install llguidance"
        ) from error
    return llguidance


def _write(spec: OutputForm) -> tuple[str, str]:
    """The field that gives the form, and its grammar in the library's Lark dialect."""
    if spec.json is not None:
        return "json", _write_json(spec.json, spec)
    if spec.json_object:
        return "json_object", _write_json({"type": "object"}, spec)
    if spec.regex is not None:
        # Digits are 0 to 9: of Unicode's, the library knows more than Python's own `re` does.
        regex = _library().regex_to_lark(spec.regex, use_ascii="d")
        return "regex", f"start: /{regex}/"
    if spec.choice is not None:
        return "choice", "start: " + " | ".join(json.dumps(text) for text in spec.choice)
    assert spec.grammar is not None
    return "grammar", _write_grammar(spec.grammar)


def _write_json(schema: str | Mapping[str, Any], spec: OutputForm) -> str:
    if spec.disable_any_whitespace and spec.whitespace_pattern is not None:
        raise RequestError(
            f"whitespace_pattern={spec.whitespace_pattern!r} contradicts "
            "disable_any_whitespace=True; give one of them"
        )
    try:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
    except (ValueError, RecursionError) as error:
        raise _refusal("json", str(error)) from None
    if read is True:
        read = {}
    if not isinstance(read, dict):
        raise _refusal("json", f"a schema is an object, got {schema!r:.80}")
    if spec.disable_additional_properties:
        read = _closed(read)
    options = dict(read.get("x-guidance", {}))
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = spec.whitespace_pattern
    return "start: %json " + json.dumps({**read, "x-guidance": options})


def _closed(schema: Any) -> Any:
    """The schema whose objects have no properties that it does not name.

    vLLM's rule: of objects with properties or patternProperties that leave it open.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        elif isinstance(value, list) and key in (*_SCHEMA_LISTS, "items"):
            closed[key] = [_closed(inner) for inner in value]
        elif key in _SCHEMAS or key == "additionalProperties":
            closed[key] = _closed(value)
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _write_grammar(text: str) -> str:
    """Lark as it is; GBNF, whose start is `root ::=`, translated."""
    try:
        return _library().grammar_from("grammar", _plain_escapes(text))
    except ValueError as error:
        raise _refusal("grammar", str(error)) from None


def _plain_escapes(text: str) -> str:
    r"""Writes \uXXXX and \UXXXXXXXX out: the library's translation drops their zeros."""

    def plain(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or "0", 16)
        return chr(code) if 0x80 <= code < 0x110000 else f"\\x{code:02x}" if code else match[0]

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", plain, text)


_WAYS = {
    "json": "see llguidance's documentation for the parts of JSON Schema it has",
    "json_object": "check whitespace_pattern",
    "regex": "no look-around, no backreferences; the whole output matches it",
    "choice": "the tokenizer must be able to write each of them",
    "grammar": "write Lark with a rule `start: ...` or GBNF with a rule `root ::= ...`",
}


def _refusal(field: str, reason: str) -> RequestError:
    why = _reason(reason)
    if field != "grammar":
        why = _PLACE.sub("", why)
    return RequestError(f"structured_outputs.{field} cannot be used: {why}; {_WAYS[field]}")


def _reason(message: str) -> str:
    """The line of the library's message that says why, without the excerpts around it."""
    lines = message.splitlines() or [""]
    errors = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(errors, lines[0]).strip()[:_MAX_REASON_LEN]
