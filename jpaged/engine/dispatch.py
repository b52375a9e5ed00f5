"""What goes to the device: host records packed into arrays of a few fixed sizes.

Sizes come in buckets, so that few programs are compiled. Row lists are padded with the null row.
Arrays here are NumPy's; they become the device's when a program takes them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.logits_rules import LogitsRules
from jpaged.core.rows import Admissions
from jpaged.core.sampling import Sampler, SamplingState, seed_key
from jpaged.core.step import StepInputs
from jpaged.engine.request import Sample
from jpaged.engine.rules import stack_rules

TOP_WIDTHS = (8, 32, 128, 512)  # likeliest ids told, beside none and all of them
NUM_ADMISSIONS = 8  # A: sequences looked up, seated or released by one call


class Buckets(NamedTuple):
    """The sizes programs are compiled for, ascending."""

    decode_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    beam_groups: tuple[int, ...]
    beam_tokens: tuple[int, ...]

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int, max_positions: int) -> "Buckets":
        """Powers of two up to each limit; never one row, whose products a CPU computes slowly."""
        most_rows = max(max_num_seqs, 2)
        return cls(
            decode_rows=_powers(2, most_rows, 2),
            prefill_rows=_powers(NUM_ADMISSIONS, most_rows, 8),
            tokens=_powers(16, max_num_batched_tokens, 2),
            prompt_lens=_powers(256, max_positions, 4),
            beam_groups=_powers(1, most_rows, 4),
            beam_tokens=_powers(64, max_positions, 4),
        )


def _powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def fit(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in buckets if bucket >= size)


def pad_rows(row_ids: Sequence[int], size: int) -> Any:
    """Row ids i32[size], padded with the null row."""
    return _padded(row_ids, np.int32, size)


def _padded(
    values: Sequence[Any], dtype: Any, size: int = NUM_ADMISSIONS, shape: tuple[int, ...] = ()
) -> Any:
    """Values of that shape, which none at all do not tell, behind each other."""
    padded = np.zeros((size, *shape), dtype)
    if values:
        padded[: len(values)] = values
    return padded


def pack_admissions(
    samples: Sequence[Sample],
    row_ids: Sequence[int],
    *,
    width: int,
    num_stop_ids: int,
    has_cache: bool,
) -> Admissions:
    """At most A samples, to sit in the given rows with all tokens they have so far: at most
    `width`, which is one of the buckets."""
    A = NUM_ADMISSIONS
    token_lists = [sample.token_ids for sample in samples]
    token_ids: Any = np.zeros((A, width), np.int32)
    for place, tokens in enumerate(token_lists):
        token_ids[place, : len(tokens)] = tokens
    requests = [sample.request for sample in samples]
    return Admissions(
        row_ids=pad_rows(row_ids, A),
        token_ids=token_ids,
        num_tokens=_padded([len(tokens) for tokens in token_lists], np.int32),
        prompt_len=_padded([len(r.prompt_token_ids) for r in requests], np.int32),
        request_root=_padded([request.root for request in requests], np.uint32, shape=(4,)),
        sample_index=_padded([sample.index for sample in samples], np.int32),
        adapter_id=_padded([0], np.int32),
        most_cached=_padded([has_cache * sample.most_cached for sample in samples], np.int32),
        sampling=_pack_sampling(samples, num_stop_ids),
    )


def _pack_sampling(samples: Sequence[Sample], num_stop_ids: int) -> SamplingState:
    requests = [sample.request for sample in samples]
    params = [request.params for request in requests]
    stop_ids: Any = np.full((NUM_ADMISSIONS, num_stop_ids), -1, np.int32)
    for place, request in enumerate(requests):
        stop_ids[place, : len(request.stop_ids)] = request.stop_ids
    return SamplingState(
        key=_padded([seed_key(request.seed) for request in requests], np.uint32, shape=(2,)),
        temperature=_padded([p.temperature for p in params], np.float32),
        top_p=_padded([p.top_p for p in params], np.float32),
        top_k=_padded([p.top_k for p in params], np.int32),
        min_p=_padded([p.min_p for p in params], np.float32),
        eos_id=_padded([request.eos_id for request in requests], np.int32),
        stop_ids=stop_ids,
        min_len=_padded([request.min_len for request in requests], np.int32),
        max_len=_padded([request.max_len for request in requests], np.int32),
        want_logprobs=_padded([request.num_top is not None for request in requests], np.bool_),
    )


class PrefillRow(NamedTuple):
    """A row of a prefill step: a sequence's tokens, or a fork of an earlier row of the step."""

    sample: Sample
    row_id: int
    num_new: int
    parent: int | None = None  # index of the row it is forked from


def pack_step(rows: Sequence[PrefillRow], size: int) -> StepInputs:
    """Prefill rows as the inputs of `step`."""
    parent: Any = np.arange(size, dtype=np.int32)
    for place, row in enumerate(rows):
        parent[place] = place if row.parent is None else row.parent
    return StepInputs(
        row_ids=pad_rows([row.row_id for row in rows], size),
        limits=_padded([row.num_new for row in rows], np.int32, size),
        parent=parent,
        sample_index=_padded([row.sample.index for row in rows], np.int32, size),
        score_from=_padded([row.sample.next_scored for row in rows], np.int32, size),
    )


def pack_rules(samples: Sequence[Sample], row_ids: Sequence[int]) -> tuple[Any, LogitsRules]:
    """At most A row ids, and the rules of the samples in them as they are now."""
    rules = []
    for sample in samples:
        assert sample.request.rules is not None
        own = sample.request.rules
        rules.append(replace(own, token_mask=next_mask(sample)) if sample.matcher else own)
    return pad_rows(row_ids, NUM_ADMISSIONS), stack_rules(rules, NUM_ADMISSIONS)


def pack_masks(samples: Sequence[Sample]) -> tuple[Any, Any]:
    """At most A row ids, one or more, and the ids that the samples in them may draw next."""
    masks = [next_mask(sample) for sample in samples]
    shape = np.shape(masks[0])
    return pad_rows([s.row_id for s in samples], NUM_ADMISSIONS), _padded(
        masks, np.uint32, shape=shape
    )


def next_mask(sample: Sample) -> Any:
    """What a sample's grammar and its request's own list let it draw."""
    assert sample.matcher is not None
    assert sample.request.rules is not None
    return sample.matcher.mask() & sample.request.rules.token_mask


class SamplerChoice:
    """Which of the few compiled samplers serves some samples.

    vocab_size: wider than any other list of likeliest ids.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        widths = [width for width in TOP_WIDTHS if width < vocab_size]
        self._widths = (*widths, vocab_size)
        self._mode: Any = config.logprobs_mode
        self._processors = tuple(config.logits_processors)

    def sampler(self, samples: Sequence[Sample]) -> Sampler:
        """The plain one, or, if any of these samples asks for more, the full one, which costs
        little where nothing is asked: two programs, as long as few likeliest ids are told."""
        requests = [sample.request for sample in samples]
        num_top = max((request.num_top or 0 for request in requests), default=0)
        if not num_top and all(request.rules is None for request in requests):
            return Sampler(logprobs_mode=self._mode)
        return Sampler(True, fit(num_top, self._widths), self._mode, self._processors)

    def num_prompt_top(self, samples: Sequence[Sample]) -> int | None:
        """How many likeliest ids a step tells of prompt tokens; None: it scores none."""
        asked = [
            sample.request.num_prompt_top or 0
            for sample in samples
            if sample.next_scored < len(sample.request.prompt_token_ids)
        ]
        return fit(max(asked), self._widths) if asked else None

    def is_wide(self, num_top: int | None) -> bool:
        """Whether so many likeliest ids take the width of the vocabulary."""
        return num_top is not None and fit(num_top, self._widths) == self._widths[-1]
