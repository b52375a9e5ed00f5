"""A tokenizer from a GGUF file's metadata, as the model's own `tokenizer.json` would make it.

Two kinds exist in these files: byte-level BPE with its merges written out (`gpt2`), and
SentencePiece BPE, whose merges follow from the order of its pieces (`llama`). Built with the
`tokenizers` library: transformers' own reader of such files needs torch.
"""

from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading.gguf import Metadata

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How a byte-level vocabulary cuts text into words before it merges."""

    regex: str | None = None  # None: GPT-2's own rule
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say


_LLAMA3_SPLIT = _Split(_LLAMA3, whole_words=True, add_bos=True)
_QWEN2_SPLIT = _Split(_QWEN2, nfc=True)
_SPLITS = {  # by tokenizer.ggml.pre
    "gpt-2": _Split(),
    "default": _Split(),
    "smollm": _Split(single_digits=True),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _Split(_TEKKEN, whole_words=True),
}


class Vocabulary(NamedTuple):
    """The tokens of a file in the order of their ids, and what kind each one is."""

    tokens: list[str]
    types: list[int]

    def of_type(self, kind: int) -> list[str]:
        """The tokens of one kind, in order."""
        return [t for t, k in zip(self.tokens, self.types, strict=True) if k == kind]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a GGUF file describes, special tokens and beginning-of-text included.

    Raises:
        UnsupportedModelError: the tokenizer's kind or its way of splitting text is not known.
        CheckpointError: the file has no vocabulary.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.tokens; convert the model again")
    vocabulary = Vocabulary(
        tokens, metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary, metadata)
    elif kind == "llama":
        tokenizer, vocabulary = _sentencepiece(vocabulary, metadata)
        add_bos = True
    else:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer has the model {kind!r}; supported are gpt2 and llama"
        )
    _add_tokens(tokenizer, vocabulary)
    _add_ends(tokenizer, metadata, add_bos=add_bos)
    return tokenizer


def special_token(metadata: Metadata, name: str) -> str | None:
    """The text of the token whose id is under `tokenizer.ggml.NAME_token_id`."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return None if token_id is None or token_id >= len(tokens) else tokens[token_id]


def _byte_level(vocabulary: Vocabulary, metadata: Metadata) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"the GGUF file splits text by the rule {name!r} (tokenizer.ggml.pre), which is not "
            f"known; known are {', '.join(_SPLITS)}. Use the model's Hugging Face tokenizer"
        )
    split = _SPLITS[name]
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    model: Any = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words)
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.add_bos


def _sentencepiece(vocabulary: Vocabulary, metadata: Metadata) -> tuple[Tokenizer, Vocabulary]:
    # llama.cpp writes runs of spaces as they are read; the pieces themselves use visible spaces.
    tokens = [_SPACE * len(t) if len(t) > 1 and not t.strip(" ") else t for t in vocabulary.tokens]
    vocabulary = vocabulary._replace(tokens=tokens)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model: Any = models.BPE(
        vocab=vocab,
        merges=_merges(vocabulary, vocab, metadata),
        unk_token=special_token(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    start: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", _SPACE)])
    tokenizer.normalizer = normalizer
    end: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer, vocabulary


def _merges(
    vocabulary: Vocabulary, vocab: dict[str, int], metadata: Metadata
) -> list[tuple[str, str]]:
    """All ways to join two pieces into a third, in the order in which they apply.

    SentencePiece joins the pair whose result has the best score. Gemma's pieces that llama.cpp
    calls user-defined have no score of their own, but there ids are in the order of the scores.
    """
    by_id = metadata["general.architecture"].startswith("gemma")
    scores = range(0, -len(vocab), -1) if by_id else metadata["tokenizer.ggml.scores"]
    pieces = {*vocabulary.of_type(_NORMAL), *vocabulary.of_type(_USER_DEFINED)}
    merges = []
    for piece in sorted(pieces, key=lambda piece: (-scores[vocab[piece]], vocab[piece])):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(len(piece) - 1, 0, -1))
        merges += [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    return merges


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    control = vocabulary.of_type(_CONTROL)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    # A run of visible spaces is an ordinary piece: as an added token it would match only itself.
    user_defined = [t for t in vocabulary.of_type(_USER_DEFINED) if t.strip(_SPACE)]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, *, add_bos: bool) -> None:
    """Puts the beginning-of-text before and the end-of-text after a prompt, where the file asks."""
    bos, eos = (special_token(metadata, name) for name in ("bos", "eos"))
    bos = bos if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    ends = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    if not ends:
        return
    before, after = (f"{bos} " if bos else ""), (f" {eos}" if eos else "")
    template: Any = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} {before}$B{after}",
        special_tokens=list(ends.items()),
    )
    tokenizer.post_processor = template
