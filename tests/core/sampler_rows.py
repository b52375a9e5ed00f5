"""Rows as the sampler's oracle has them, to the arrays that the jitted sampler takes.

What must not matter is set at random: tokens past a row's last, bits of masks past the vocabulary,
the masks of rows without one, and all rules of rows whose rules are off.
"""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.logits_rules import History, LogitsProcessor, LogitsRules, RuleSizes, init_rules
from jpaged.core.sampling import (
    Sampled,
    Sampler,
    SamplingState,
    init_sampling_state,
    sample,
    seed_key,
)
from tests.oracles import sampler as oracle

HISTORY = 32  # tokens a row has room for
MAX_HOLD, MAX_BIAS, MAX_WORDS, MAX_WORD_LEN, MAX_ASKED = 4, 4, 3, 4, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A row with all that its results may depend on, and the state of what they may not."""

    row: oracle.Row
    seed: int = 0
    sample_index: int = 0
    asked: tuple[int, ...] = ()  # ids whose log-probabilities are told
    want_logprobs: bool = True
    is_sampling: bool = True
    has_rules: bool = True  # False: the row's rules are off
    noise: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.row.prompt) + len(self.row.output)


class Batch(NamedTuple):
    """What `sample` takes, as NumPy arrays."""

    rows: SamplingState
    sample_index: np.ndarray
    history: History
    logits: np.ndarray
    is_sampling: np.ndarray


def shift_every_third(logits: jax.Array, history: History, size: jax.Array) -> jax.Array:
    """A custom processor: adds to every third id."""
    is_third = jnp.arange(logits.shape[1]) % 3 == 0
    return logits + jnp.where(is_third[None], size[:, None], 0.0)


def shift_in_numpy(size: float, logits: np.ndarray) -> np.ndarray:
    """The same, for one row of the oracle's."""
    return logits + np.where(np.arange(len(logits)) % 3 == 0, np.float32(size), np.float32(0))


SHIFT = LogitsProcessor("shift", shift_every_third, np.float32(0))


def make_batch(cases: list[Case]) -> Batch:
    """One row of arrays for each case."""
    rows = [case.row for case in cases]
    off = _no_rules(len(rows[0].logits))
    rules = jax.tree.map(lambda *x: np.stack(x), *(_rules_of(case, off) for case in cases))
    state = _greedy_rows(len(cases))
    fields = {
        **{f: [getattr(r, f) for r in rows] for f in ("temperature", "top_k", "top_p", "min_p")},
        "key": [seed_key(case.seed) for case in cases],
        "min_len": [len(row.prompt) + row.min_tokens for row in rows],
        "want_logprobs": [case.want_logprobs for case in cases],
    }
    arrays = {name: np.array(x, getattr(state, name).dtype) for name, x in fields.items()}
    history = History(
        np.stack([_token_ids(case) for case in cases]),
        np.array([case.num_tokens for case in cases], np.int32),
        np.array([len(row.prompt) for row in rows], np.int32),
    )
    return Batch(
        state.replace(**arrays, rules=rules),
        np.array([case.sample_index for case in cases], np.int32),
        history,
        np.stack([row.logits for row in rows]),
        np.array([case.is_sampling for case in cases]),
    )


@functools.partial(jax.jit, static_argnames="sampler")
def run(batch: Batch, *, sampler: Sampler) -> Sampled:
    """The sampler under test."""
    *inputs, is_sampling = batch
    return sample(*inputs, is_sampling=is_sampling, sampler=sampler)


Rows = TypeVar("Rows")


def take(rows: Rows, row_ids: list[int]) -> Rows:
    """Rows of a batch or its results, in any order, any number of times."""
    return jax.tree.map(lambda x: np.asarray(x)[np.array(row_ids)], rows)


@jax.jit
def random_bits(batch: Batch) -> jax.Array:
    """Each row's 32 random bits, as `jax.random` gives them for its key, index and position."""

    def one(key: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key)
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, index), position))

    return jax.vmap(one)(batch.rows.key, batch.sample_index, batch.history.num_tokens)


@functools.cache
def _greedy_rows(num_rows: int) -> SamplingState:
    return jax.tree.map(np.asarray, init_sampling_state(num_rows, 1))


@functools.cache
def _no_rules(vocab_size: int) -> LogitsRules:
    """The rules of one row that has none."""
    sizes = RuleSizes(
        vocab_size=vocab_size,
        num_stop_ids=MAX_HOLD - 1,
        num_biases=MAX_BIAS,
        num_bad_words=MAX_WORDS,
        bad_word_len=MAX_WORD_LEN,
        num_logprob_ids=MAX_ASKED,
    )
    return jax.tree.map(lambda x: np.asarray(x)[0], init_rules(1, sizes, (SHIFT,)))


def _rules_of(case: Case, off: LogitsRules) -> LogitsRules:
    row = case.row if case.has_rules else _some_rules(case)
    words = np.full((MAX_WORDS, MAX_WORD_LEN), -1)
    for i, word in enumerate(row.bad_words):
        words[i, MAX_WORD_LEN - len(word) :] = word
    fields = {
        "is_on": case.has_rules,
        "repetition_penalty": row.repetition_penalty,
        "frequency_penalty": row.frequency_penalty,
        "presence_penalty": row.presence_penalty,
        "hold_ids": _padded(row.hold_ids, MAX_HOLD, -1),
        "has_mask": row.allowed is not None,
        "mask_is_raw": row.mask_is_raw,
        "token_mask": _mask_words(row.allowed, case),
        "bias_ids": _padded(row.bias.keys(), MAX_BIAS, -1),
        "bias": _padded(row.bias.values(), MAX_BIAS, 7),
        "bad_words": words,
        "logprob_ids": _padded(case.asked, MAX_ASKED, -1),
    }
    arrays = {name: np.array(x, getattr(off, name).dtype) for name, x in fields.items()}
    (shift,) = [processor.args[0] for processor in row.processors] or [0]  # partials of the shift
    return off.replace(**arrays, processors={"shift": np.float32(shift)})


def _some_rules(case: Case) -> oracle.Row:
    """Rules that would change everything if they were looked at."""
    return replace(
        case.row,
        repetition_penalty=3.0,
        frequency_penalty=2.0,
        presence_penalty=-2.0,
        allowed=frozenset({1}),
        mask_is_raw=True,
        bad_words=((0,),),
        hold_ids=(2,),
        min_tokens=HISTORY,
        bias={3: 50.0},
        processors=(functools.partial(shift_in_numpy, 9.0),),
    )


def _padded(values: Collection[float], size: int, padding: float) -> list[float]:
    return [*values, *[padding] * (size - len(values))]


def _token_ids(case: Case) -> np.ndarray:
    tokens = [*case.row.prompt, *case.row.output]
    beyond = _noise(case).integers(0, len(case.row.logits), HISTORY - len(tokens))
    return np.array([*tokens, *beyond], np.int32)


def _mask_words(allowed: frozenset[int] | None, case: Case) -> np.ndarray:
    vocab_size = len(case.row.logits)
    bits = _noise(case).integers(0, 2, -(-vocab_size // 32) * 32, dtype=np.uint8)
    if allowed is not None:
        bits[:vocab_size] = np.isin(np.arange(vocab_size), list(allowed))
    return np.packbits(bits, bitorder="little").view("<u4")


def _noise(case: Case) -> np.random.Generator:
    return np.random.default_rng(case.noise)
