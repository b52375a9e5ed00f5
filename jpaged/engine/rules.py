"""A request's rules as the device has them: `LogitsRules` without the leading R, NumPy's.

Judges here what only the engine can: sizes, the vocabulary, the registered processors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.logits_rules import (
    History,
    LogitsProcessor,
    LogitsRules,
    RuleSizes,
    init_rules,
)
from jpaged.errors import ConfigError, RequestError
from jpaged.sampling_params import SamplingParams


class RuleMaker:
    """Makes rules for an engine with room for `sizes`, and these processors.

    Raises ConfigError for a processor that does not take logits and give as many.
    """

    def __init__(
        self, sizes: RuleSizes, processors: Sequence[LogitsProcessor], tokenizer: Any
    ) -> None:
        self.sizes, self.processors = sizes, tuple(processors)
        for processor in processors:
            _check_processor(processor, sizes.vocab_size)
        self._tokenizer = tokenizer

    def make(
        self, params: SamplingParams, hold_ids: Sequence[int], barred_ids: Sequence[int] = ()
    ) -> LogitsRules:
        """The rules of a request. hold_ids: what min_tokens holds back. barred_ids: what its
        grammar may not use.

        Raises RequestError, naming the field, its value and its limit.
        """
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        self._check_known("logit_bias", bias)
        _check_fits("logit_bias", len(bias), "max_logit_bias", self.sizes.num_biases)
        self._check_known("allowed_token_ids", allowed or ())
        self._check_known("logprob_token_ids", params.logprob_token_ids or ())
        return LogitsRules(
            is_on=_value(True, np.bool_),
            repetition_penalty=_value(params.repetition_penalty, np.float32),
            frequency_penalty=_value(params.frequency_penalty, np.float32),
            presence_penalty=_value(params.presence_penalty, np.float32),
            hold_ids=_padded(hold_ids, self.sizes.num_stop_ids + 1),
            has_mask=_value(bool(allowed or params.structured_outputs), np.bool_),
            mask_is_raw=_value(params.structured_outputs is not None, np.bool_),
            token_mask=mask_of(allowed, self.sizes.vocab_size)
            & ~mask_of(barred_ids, self.sizes.vocab_size),
            bias_ids=_padded(list(bias), self.sizes.num_biases),
            bias=_padded(list(bias.values()), self.sizes.num_biases, 0, np.float32),
            bad_words=self._bad_words(params.bad_words or ()),
            logprob_ids=_padded(params.logprob_token_ids or (), self.sizes.num_logprob_ids),
            processors=self._processor_params(params.logits_processors or {}),
        )

    def _check_known(self, name: str, ids: Iterable[int]) -> None:
        vocab_size = self.sizes.vocab_size
        if bad := [token for token in ids if token >= vocab_size]:
            raise RequestError(
                f"{name} has token id {bad[0]}, outside the vocabulary, 0 to {vocab_size - 1}"
            )

    def _bad_words(self, words: Sequence[str]) -> Any:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            found |= dict.fromkeys(self._spellings(word))
        number, length = self.sizes.num_bad_words, self.sizes.bad_word_len
        _check_fits("bad_words", len(found), "max_bad_words", number, "spellings in tokens")
        table = np.full((number, length), -1, np.int32)
        for place, ids in enumerate(found):
            _check_fits("a bad word", len(ids), "max_bad_word_len", length, "tokens")
            table[place, length - len(ids) :] = ids
        return table

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens without a space before it, and with one if that is another first token
        of as many: vLLM's rule."""
        if self._tokenizer is None:
            raise RequestError(
                "bad_words need a tokenizer, and this engine has none; give logit_bias"
            )
        bare = word.lstrip()
        plain, spaced = (
            tuple(self._tokenizer.encode(text, add_special_tokens=False))
            for text in (bare, f" {bare}")
        )
        if not plain:
            raise RequestError(f"bad_words has {word!r}, which is no token at all")
        self._check_known("bad_words", (*plain, *spaced))
        is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if is_other else [plain]

    def _processor_params(self, given: dict[str, Any] | Any) -> dict[str, Any]:
        known = {processor.name: processor.default for processor in self.processors}
        if unknown := sorted(set(given) - set(known)):
            raise RequestError(
                f"logits_processors names {unknown[0]!r}; this engine was made with "
                f"{sorted(known) or 'none'}"
            )
        return {
            name: _like(name, given.get(name, default), default) for name, default in known.items()
        }


def rule_sizes(config: EngineConfig, vocab_size: int) -> RuleSizes:
    """What rules a request may have."""
    return RuleSizes(
        vocab_size=vocab_size,
        num_stop_ids=config.max_stop_ids,
        num_biases=config.max_logit_bias,
        num_bad_words=config.max_bad_words,
        bad_word_len=config.max_bad_word_len,
    )


def _check_processor(processor: LogitsProcessor, vocab_size: int) -> None:
    """Traces it on two rows, so that what is wrong shows before the first request."""
    num_rows = 2
    logits: Any = jax.ShapeDtypeStruct((num_rows, vocab_size), np.float32)
    token_ids: Any = jax.ShapeDtypeStruct((num_rows, 8), np.int32)
    lengths: Any = jax.ShapeDtypeStruct((num_rows,), np.int32)
    history = History(token_ids, lengths, lengths)
    params = jax.eval_shape(lambda: init_rules(num_rows, RuleSizes(vocab_size), (processor,)))
    name = f"logits processor {processor.name!r}"
    try:
        found = jax.eval_shape(processor.apply, logits, history, params.processors[processor.name])
    except Exception as error:
        raise ConfigError(f"{name} can not be traced: {error}") from error
    if getattr(found, "shape", None) != logits.shape:
        raise ConfigError(f"{name} must give logits [B V] as it takes them, it gives {found}")


def mask_of(allowed: Sequence[int] | None, vocab_size: int) -> Any:
    """u32[W]: bit v % 32 of word v // 32 is set for the allowed ids; None: for all."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_allowed[slice(None) if allowed is None else list(allowed)] = True
    return np.packbits(is_allowed, bitorder="little").view("<u4").astype(np.uint32)


def stack_rules(rules: Sequence[LogitsRules], size: int) -> LogitsRules:
    """Rules of several rows, with a leading axis, padded to `size` with the first."""
    padded = [*rules, *[rules[0]] * (size - len(rules))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *padded)


def _check_fits(what: str, number: int, option: str, limit: int, unit: str = "entries") -> None:
    if number > limit:
        raise RequestError(
            f"{what} has {number} {unit}, and {option}={limit}; start the engine with more"
        )


def _like(name: str, given: Any, default: Any) -> Any:
    """Parameters as arrays of the default's shapes and types."""
    try:
        return jax.tree.map(_leaf_like, default, given)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logits_processors: parameters of {name!r} are not like its default: {error}"
        ) from None


def _leaf_like(default: Any, given: Any) -> Any:
    expected = np.asarray(default)
    array = np.asarray(given)
    if array.shape != expected.shape:
        raise ValueError(f"shape {array.shape}, not {expected.shape}")
    dtype = jax.dtypes.canonicalize_dtype(expected.dtype)
    cast = array.astype(dtype, casting="same_kind")
    if array.dtype.kind in "iu" and cast.dtype.kind in "iu" and np.any(cast != array):
        raise ValueError(f"{given!r:.80} does not fit {dtype}")
    return cast


def _value(value: Any, dtype: Any) -> Any:
    return np.asarray(value, dtype)


def _padded(values: Sequence[Any], size: int, fill: Any = -1, dtype: Any = np.int32) -> Any:
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded
