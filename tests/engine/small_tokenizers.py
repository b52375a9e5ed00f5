"""Tokenizers of a few hundred tokens, of each kind that models use, and what an output's text is by
definition: from whole decodes, and from bytes that are known because the tests chose them."""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIALS = ["<s>", "</s>", "<pad>"]
ADDED = ["<tool>", "\u00e9\u4f60"]  # no special tokens; the second is in no byte's alphabet
PIECES = ["a", "b", "\u2581", "\u2581\u2581", "\u2581a", "ab", "\u4f60", "\u0301", "\U0001f642", ""]
LITERAL = "\N{REPLACEMENT CHARACTER}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

_LETTERS = bytes_to_unicode()

_PLAIN = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "gemma": decoders.Sequence(_PLAIN),
    "llama": decoders.Sequence([*_PLAIN, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "no fallback": decoders.Metaspace(),
}


def byte_level(pieces: Iterable[bytes] = (), **options: Any) -> Any:
    """Tokens: every byte (its id), then `pieces`, one without text, and the added ones."""
    listed = [bytes([byte]) for byte in range(256)] + sorted({p for p in pieces if len(p) > 1})
    vocabulary = {"".join(_LETTERS[b] for b in piece): i for i, piece in enumerate([*listed, b""])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, **options)


def sentencepiece(kind: str, pieces: Iterable[str] = (), *, unigram: bool = False) -> Any:
    """Tokens: <unk>, every byte (its id less one), `PIECES`, `pieces` and the added ones."""
    tokens = list(dict.fromkeys(["<unk>", *BYTES, *PIECES, LITERAL, *pieces]))
    model = (
        models.Unigram([(t, -float(i)) for i, t in enumerate(tokens)], 0, byte_fallback=True)
        if unigram
        else models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = DECODERS[kind]
    return _finish(tokenizer)


def _finish(tokenizer: Tokenizer, **options: Any) -> Any:
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options
    )


def ids_of(tokenizer: Any, *tokens: str | bytes) -> list[int]:
    """Ids of tokens by name; bytes are byte tokens, or letters of a byte-level vocabulary."""
    ids = []
    for token in tokens:
        if isinstance(token, str):
            ids.append(tokenizer.convert_tokens_to_ids(token))
        elif is_byte_level(tokenizer):
            ids += [tokenizer.convert_tokens_to_ids(_LETTERS[byte]) for byte in token]
        else:
            ids += [tokenizer.convert_tokens_to_ids(BYTES[byte]) for byte in token]
    return ids


def is_byte_level(tokenizer: Any) -> bool:
    return "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)


def text_by_definition(
    tokenizer: Any, prompt_ids: Sequence[int], output_ids: Sequence[int], *, skip: bool
) -> str:
    """decode(prompt + output) minus decode(prompt), its unfinished last character taken off."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=skip)

    kept = [i for i in prompt_ids if decode([i]) or not tokenizer.decode([i])]
    kept = [i for i in kept if i < len(tokenizer)]
    names = tokenizer.convert_ids_to_tokens(kept)
    before = decode(kept)
    if is_byte_level(tokenizer):
        before = before[:-1] if _num_pending(b"".join(map(_spell, names))) else before
    elif "ByteFallback" in str(tokenizer.backend_tokenizer.decoder):
        run = re.search(r"(<0x..>)*$", "".join(f"{n}" if n in BYTES else "|" for n in names))
        data = bytes(int(b, 16) for b in re.findall("0x(..)", run[0] if run else ""))
        before = decode(kept[: len(kept) - _num_pending(data)])
    return decode([*prompt_ids, *output_ids])[len(before) :]


def _spell(name: str) -> bytes:
    letters = {letter: byte for byte, letter in _LETTERS.items()}
    is_plain = any(letter not in letters for letter in name)
    return name.encode() if is_plain else bytes(letters[letter] for letter in name)


def _num_pending(data: bytes) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


class CountingTokenizer:
    """Passes on to a tokenizer, and counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_decoded, self.num_calls = tokenizer, 0, 0

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        self.num_calls += 1
        return self._tokenizer.decode(token_ids, **options)
