"""Which bytes each id of a tokenizer writes into a text.

Read from the vocabulary and the rules of its decoder, id by id: text alone does not show the bytes
of a token that holds a part of a character.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jpaged.errors import UnsupportedModelError

_SHIFT = 256  # where byte-level vocabularies put the bytes that are no printable Latin-1 character
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Rule = Callable[[str | bytes], str | bytes]


class TokenBytes(NamedTuple):
    """What the ids of a vocabulary write."""

    tokens: list[bytes]  # by id; empty where no token has the id
    special_ids: frozenset[int]  # ids that mark something and are no text


def token_bytes(tokenizer: Any, vocab_size: int) -> TokenBytes:
    """The bytes of the ids below vocab_size, as they are inside a text.

    tokenizer: transformers' class around a `tokenizers` one, byte-level or SentencePiece-like.

    Raises:
        UnsupportedModelError: the tokenizer is of another kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"the bytes of the tokens of a {type(tokenizer).__name__} are not known; "
            "use a tokenizer with a tokenizer.json"
        )
    rules = _rules(json.loads(backend.decoder.__getstate__()) if backend.decoder else {})
    tokens = [b""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = _spell(token, rules)
    added = backend.get_added_tokens_decoder().items()
    special = {token_id for token_id, token in added if token.special}
    special.update(tokenizer.all_special_ids)
    return TokenBytes(tokens, frozenset(i for i in special if i < vocab_size))


def _spell(token: str, rules: list[Rule]) -> bytes:
    spelled: str | bytes = token
    for rule in rules:
        spelled = rule(spelled)
    return spelled if isinstance(spelled, bytes) else spelled.encode("utf-8", "replace")


def _rules(decoder: dict[str, Any]) -> list[Rule]:
    """What the decoder does to one token inside a text.

    What it strips from the ends of a whole text is no matter of a token.
    """
    kind = decoder.get("type")
    if kind == "Sequence":
        return [rule for part in decoder["decoders"] for rule in _rules(part)]
    if kind == "ByteLevel":
        return [byte_level]
    if kind == "ByteFallback":
        return [byte_fallback]
    if kind == "Metaspace":
        return [_replacement(decoder["replacement"], " ")]
    if kind == "Replace" and "String" in decoder["pattern"]:
        return [_replacement(decoder["pattern"]["String"], decoder["content"])]
    if kind in ("Fuse", "Strip"):
        return []
    raise UnsupportedModelError(
        f"the bytes of this tokenizer's tokens are not known: its decoder is {kind}; known are "
        "ByteLevel, Metaspace and Replace with ByteFallback"
    )


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: GPT-2's table.

    A printable Latin-1 character stands for itself, the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(_SHIFT + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level(token: str | bytes) -> str | bytes:
    """The bytes of a byte-level vocabulary's token. One with any other character stands for its own
    text, as an added token may."""
    if isinstance(token, bytes) or not all(c in _ALPHABET for c in token):
        return token
    return bytes(_ALPHABET[c] for c in token)


def byte_fallback(token: str | bytes) -> str | bytes:
    """The byte that a token such as `<0xE2>` stands for; any other as it is."""
    match = _BYTE.fullmatch(token) if isinstance(token, str) else None
    return bytes([int(match[1], 16)]) if match else token


def _replacement(old: str, new: str) -> Rule:
    return lambda token: token if isinstance(token, bytes) else token.replace(old, new)
