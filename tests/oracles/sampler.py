"""One row's next token, and what is told of it: plain NumPy, one step after the other.

The steps and their order are those of vLLM's sampler:
    grammar mask -> raw record -> allowed mask -> bad words -> min_tokens -> bias -> custom
    -> penalties -> argmax | temperature -> min-p -> top-k -> top-p -> draw -> processed record
Logits and penalties are float32, log-probabilities float64.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tests.oracles.sampling import draw, kept_ids, truncate

GREEDY = 1e-5  # temperatures below it take the likeliest id
SMALLEST = np.finfo(np.float32).smallest_normal  # what is smaller counts as 0 on a device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """All that a row's next token depends on, but for its random bits."""

    logits: np.ndarray  # float32[V], of the model
    prompt: list[int] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed: frozenset[int] | None = None
    mask_is_raw: bool = False  # `allowed` comes from a grammar
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    hold_ids: tuple[int, ...] = ()  # end of sequence and stop ids
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    processors: tuple[Callable[[np.ndarray], np.ndarray], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY


# --- from raw to processed logits ---


def raw(row: Row) -> np.ndarray:
    """The logits that count as the model's: a grammar's mask is part of them."""
    logits = row.logits.astype(np.float32)
    return _allow(logits, row) if row.mask_is_raw else logits


def processed(row: Row) -> np.ndarray:
    """The logits that a greedy row takes the argmax of, and a random one divides."""
    logits = _allow(raw(row), row)
    logits = _ban_words(logits, row)
    if len(row.output) < row.min_tokens:
        logits = _drop(logits, row.hold_ids)
    for token, bias in row.bias.items():
        logits[token] += np.float32(bias)
    for processor in row.processors:
        logits = processor(logits)
    return _penalize(logits, row)


def _drop(logits: np.ndarray, ids: tuple[int, ...]) -> np.ndarray:
    logits = logits.copy()
    logits[list(ids)] = -np.inf
    return logits


def _allow(logits: np.ndarray, row: Row) -> np.ndarray:
    if row.allowed is None:
        return logits.copy()
    return _drop(logits, tuple(i for i in range(len(logits)) if i not in row.allowed))


def _ban_words(logits: np.ndarray, row: Row) -> np.ndarray:
    """Drops the id that would complete a word; only output tokens can begin one."""
    for *start, last in row.bad_words:
        if len(start) <= len(row.output) and row.output[len(row.output) - len(start) :] == start:
            logits = _drop(logits, (last,))
    return logits


def _penalize(logits: np.ndarray, row: Row) -> np.ndarray:
    logits = logits.copy()
    for token in {*row.prompt, *row.output}:
        if logits[token] > 0:
            logits[token] /= np.float32(row.repetition_penalty)
        else:
            logits[token] *= np.float32(row.repetition_penalty)
    for token in set(row.output):
        count = np.float32(row.output.count(token))
        logits[token] -= np.float32(row.frequency_penalty) * count
        logits[token] -= np.float32(row.presence_penalty)
    return logits


# --- from processed logits to a token ---


def relative(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities, the likeliest id's being 1, float32; without any likeliest id all are 1.

    The difference comes first: large logits over a small temperature would lose their last bits.
    """
    top = logits.max()
    lower = logits != top
    gap = (logits[lower] - top) / np.float32(temperature)
    probs = np.ones(len(logits), np.float32)
    probs[lower] = np.where(np.exp(gap) < SMALLEST, np.float32(0), np.exp(gap))
    return probs


def token(row: Row, bits: int, probs: np.ndarray | None = None) -> int:
    """The next token of a row with the 32 random bits `bits`.

    probs: what `relative` gives, up to rounding, for a caller whose `exp` rounds differently.
    Of equal logits argmax takes the lowest id, and so does top_k = 1.
    """
    logits = processed(row)
    if row.is_greedy or row.top_k == 1:
        return int(np.argmax(logits))
    probs = relative(logits, row.temperature) if probs is None else probs
    kept = kept_ids(probs, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    return draw(probs, kept, bits)


def kept(row: Row, probs: np.ndarray | None = None) -> set[int]:
    """The ids that truncation leaves; a greedy row has none. Ties at a limit all stay."""
    if row.is_greedy:
        return set(range(len(row.logits)))
    probs = relative(processed(row), row.temperature) if probs is None else probs
    return truncate(probs, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)


# --- what is told ---


class Record(NamedTuple):
    """What is told of each id, by the logprobs mode; ids that were dropped have -inf."""

    logits: np.ndarray  # float64[V]: these give ids their order
    numbers: np.ndarray  # float64[V]: their log-probabilities, or the logits themselves

    def rank(self, token: int) -> int:
        """1 + how many ids are strictly more likely."""
        return 1 + int((self.logits > self.logits[token]).sum())

    def top(self, k: int) -> list[int]:
        """The k likeliest ids, the likeliest first; of equals the lower id first."""
        return np.argsort(-self.logits, kind="stable")[:k].tolist()


def record(row: Row, mode: str, probs: np.ndarray | None = None) -> Record:
    """What is told of a row; processed log-probabilities are those of the float32 quotients.

    probs: as in `token`.
    """
    if mode.startswith("raw"):
        logits = raw(row).astype(np.float64)
    else:
        temperature = 1.0 if row.is_greedy else row.temperature
        scaled = processed(row) / np.float32(temperature)
        stays = np.isin(np.arange(len(scaled)), list(kept(row, probs)))
        logits = np.where(stays, scaled, -np.inf).astype(np.float64)
    return Record(logits, logits if mode.endswith("logits") else log_softmax(logits))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64. Equal infinities have no difference: if all are -inf, all are equally likely."""
    top = logits.max()
    gap = np.zeros(len(logits))
    gap[logits != top] = logits[logits != top] - top
    return gap - np.log(np.exp(gap).sum())
