"""Requests served in plain Python: the counting model, one token after the other, no engine.

Follows vLLM's rules for what changes logits, what is told, and what ends an output.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.sampling import random_bits, seed_key
from jpaged.sampling_params import SamplingParams
from tests.core.scripted import VOCAB_SIZE, next_logits
from tests.engine.tiny_tokenizers import SPECIAL, byte_level
from tests.oracles import sampler as oracle

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS01"]
EOS, OTHER_EOS = 1, 2


@functools.cache
def letter_tokenizer() -> Any:
    """One letter a token, behind three special ones."""
    tokenizer = byte_level([letter.encode() for letter in LETTERS])
    assert len(LETTERS) + len(SPECIAL) == VOCAB_SIZE
    return tokenizer


@dataclasses.dataclass
class Plain:
    """What a sample should be."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # with ranks
    numbers: list[np.ndarray] = dataclasses.field(default_factory=list)  # of all ids
    text: str = ""
    finish_reason: str = "length"
    stop_reason: int | str | None = None


@jax.jit
def _bits(key, sample_index, positions):
    return random_bits(key, sample_index, positions)


def bits_at(seed: int, sample_index: int, positions: Sequence[int]) -> list[int]:
    number = len(positions)
    key = jnp.tile(jnp.asarray(seed_key(seed))[None], (number, 1))
    index = jnp.full(number, sample_index, jnp.int32)
    return np.asarray(_bits(key, index, jnp.array(positions, jnp.int32))).tolist()


def spellings(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer.encode(word, add_special_tokens=False)) for word in words)


def serve(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    *,
    mode: str = "raw_logprobs",
    max_len: int = 64,
) -> Plain:
    """One sample of a request."""
    tokenizer, found = letter_tokenizer(), Plain()
    most = min(params.max_tokens or max_len, max_len - len(prompt))
    bits = bits_at(seed, sample_index, range(len(prompt), max_len))
    held = (EOS, OTHER_EOS, *(params.stop_token_ids or ()))
    for place in range(most):
        row = oracle.Row(
            logits=next_logits([*prompt, *found.token_ids]).astype(np.float32),
            prompt=prompt,
            output=list(found.token_ids),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            allowed=frozenset(params.allowed_token_ids) if params.allowed_token_ids else None,
            bad_words=spellings(tokenizer, params.bad_words or ()),
            min_tokens=params.min_tokens,
            hold_ids=held,
            bias=params.logit_bias or {},
        )
        token = oracle.token(row, bits[place])
        record = oracle.record(row, mode)
        found.logprobs.append((float(record.numbers[token]), record.rank(token)))
        found.numbers.append(record.numbers)
        found.token_ids.append(token)
        if _ends(found, token, params, most, tokenizer):
            break
    return found


def _ends(found: Plain, token: int, params: SamplingParams, most: int, tokenizer: Any) -> bool:
    """Whether the output ends with this token; writes text and reasons."""
    number, reason, by_token = len(found.token_ids), None, False
    if number >= params.min_tokens:
        if token == EOS and not params.ignore_eos:
            reason, by_token = "stop", True
        elif token in (params.stop_token_ids or ()) or (
            token == OTHER_EOS and not params.ignore_eos
        ):
            reason, by_token, found.stop_reason = "stop", True, token
    if reason is None and number >= most:
        reason = "length"
    is_long_enough = number >= params.min_tokens
    repeats = is_long_enough and _repeats(found.token_ids, params.repetition_detection)
    if reason is None and repeats:
        reason = "repetition"
    text_ids = found.token_ids[: number - by_token]
    found.text = tokenizer.decode(text_ids, skip_special_tokens=True)
    if by_token and params.include_stop_str_in_output:
        found.text = tokenizer.decode(found.token_ids, skip_special_tokens=True)
    elif not by_token and number > params.min_tokens and token >= len(SPECIAL):
        for string in params.stop or ():
            if found.text.endswith(string):
                reason, found.stop_reason = "stop", string
                if not params.include_stop_str_in_output:
                    found.text = found.text[: -len(string)]
                break
    found.finish_reason = reason or "length"
    return reason is not None


def _repeats(tokens: list[int], detection: Any) -> bool:
    if detection is None:
        return False
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        pattern = tokens[-size:]
        if len(tokens) >= size * detection.min_count and all(
            tokens[len(tokens) - size * (i + 1) : len(tokens) - size * i] == pattern
            for i in range(detection.min_count)
        ):
            return True
    return False
