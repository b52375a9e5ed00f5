"""Tokenizers made of given tokens: byte-level and SentencePiece-like, without a model."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<s>", "</s>", "<|end|>")
LETTERS = tuple('ab. "{}[]()')  # of a SentencePiece-like vocabulary; each is a byte as well
BYTES = [bytes([byte]) for byte in range(256)]
PIECES = ("ab", "abc", "bc", '":', '{"', '"}', "true", "  ", " a", "12", "é", "日本", "🙂")


def byte_level(tokens: Sequence[bytes]) -> Any:
    """Special tokens at 0, 1, 2, then the given ones, whatever bytes they hold."""
    alphabet = bytes_to_unicode()
    return _wrap(["".join(alphabet[b] for b in token) for token in tokens], decoders.ByteLevel())


def sentencepiece(pieces: Sequence[str]) -> Any:
    """Special tokens at 0, 1, 2, then the 256 bytes, then the pieces with visible spaces."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    return _wrap([*fallback, *(piece.replace(" ", "▁") for piece in pieces)], decoder)


def _wrap(tokens: Sequence[str], decoder: Any) -> Any:
    vocab = {token: token_id for token_id, token in enumerate([*SPECIAL, *tokens])}
    model: Any = models.BPE(vocab=vocab, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def all_bytes_and_pieces() -> Any:
    """A byte-level tokenizer that can write any text, some of it in several ways."""
    return byte_level([*BYTES, *(piece.encode() for piece in PIECES), "日".encode()[:2]])
