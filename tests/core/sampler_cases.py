"""Random rows for the sampler, of every kind and with any mix of parameters."""

import functools

import numpy as np
from hypothesis import strategies as st

from tests.core.sampler_rows import (
    HISTORY,
    MAX_ASKED,
    MAX_BIAS,
    MAX_HOLD,
    MAX_WORD_LEN,
    MAX_WORDS,
    Case,
    shift_in_numpy,
)
from tests.oracles import sampler as oracle

Strategy = st.SearchStrategy
FEW = 6  # ids that histories repeat, rules meet, and logits favour
SEEDS = st.integers(0, 999)
EIGHTHS = st.integers(-16, 16).map(lambda x: x / 8)  # exact, so that ties stay ties
PENALTIES = st.one_of(EIGHTHS, st.sampled_from([-2.0, 2.0]), st.floats(-2, 2, width=32))


@functools.cache
def cases(vocab_size: int) -> Strategy[Case]:
    """A row over ids 0 to vocab_size - 1."""
    has_rules = {"rules": rules(vocab_size), "asked": _ids(vocab_size, MAX_ASKED)}
    return st.builds(
        _make_case,
        logits=logits(vocab_size),
        tokens=histories(vocab_size),
        sampling=samplings(vocab_size),
        told=st.one_of(st.just({}), st.fixed_dictionaries(has_rules)),
        seed=st.integers(-(2**63), 2**64 - 1),
        sample_index=st.integers(0, 100),
        want_logprobs=st.integers(0, 5).map(bool),
        is_sampling=st.integers(0, 9).map(bool),
        noise=SEEDS,
    )


def _make_case(*, logits, tokens, sampling, told, **others) -> Case:
    prompt, output = tokens
    rules = dict(told.get("rules", {}))
    if "min_tokens" in rules:
        rules["min_tokens"] = max(0, len(output) + rules["min_tokens"])
    if "bad_words" in rules:  # those that begin with a number are to begin with the row's tail
        tail = [*prompt, *output]
        rules["bad_words"] = tuple(
            (*(tail[len(tail) - start :] if isinstance(start, int) else start), last)
            for start, last in rules["bad_words"]
        )
    row = oracle.Row(logits=logits, prompt=prompt, output=output, **sampling, **rules)
    return Case(row=row, has_rules=bool(told), asked=told.get("asked", ()), **others)


def logits(vocab_size: int) -> Strategy[np.ndarray]:
    """Narrow to wide ones, with ties, ids that can not be, huge and tiny numbers; without NaN."""
    kinds = st.sampled_from(["normal", "normal", "rounded", "extreme", "sparse", "nothing"])

    def make(kind: str, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        spread = rng.choice([0.1, 2.0, 15.0])
        logits = rng.normal(size=vocab_size) * spread
        logits[:FEW] += rng.choice([0.0, 2.0]) * spread
        if kind == "rounded":
            logits = np.round(logits)
        elif kind == "extreme":
            some = [-np.inf, -1e30, -7.0, -1e-30, 0.0, 1e-30, 1e-3, 2.0, 1e30]
            logits = rng.choice(some[: rng.integers(4, 10)], vocab_size)
        elif kind == "sparse":
            logits[rng.random(vocab_size) < 0.9] = -np.inf
        elif kind == "nothing":
            logits[:] = -np.inf
        return logits.astype(np.float32)

    return st.builds(make, kinds, SEEDS)


def histories(vocab_size: int) -> Strategy[tuple[list[int], list[int]]]:
    """Prompts and outputs, mostly of few ids; many outputs are shorter than a bad word."""

    def make(seed: int, prompt_len: int, output_len: int) -> tuple[list[int], list[int]]:
        rng, size = np.random.default_rng(seed), prompt_len + output_len
        some, few = rng.integers(0, vocab_size, size), rng.integers(0, FEW, size)
        tokens = np.where(rng.random(size) < 0.8, few, some).tolist()
        return tokens[:prompt_len], tokens[prompt_len:]

    half, short = st.integers(0, HISTORY // 2), st.integers(0, MAX_WORD_LEN - 2)
    return st.builds(make, SEEDS, half, st.one_of(short, half))


def samplings(vocab_size: int) -> Strategy[dict]:
    """Temperature and truncation, at their limits as often as not."""
    top_k = st.sampled_from([0, 1, 2, 5, 20, vocab_size - 1, vocab_size, vocab_size + 1, 2**30])
    return st.fixed_dictionaries(
        {"temperature": st.one_of(st.sampled_from([0.0, 9e-6, 0.01]), st.floats(0.01, 2))},
        optional={
            "top_k": top_k,
            "top_p": st.one_of(st.sampled_from([1e-9, 0.5, 1.0]), st.floats(1e-6, 1)),
            "min_p": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
        },
    )


def rules(vocab_size: int) -> Strategy[dict]:
    """Any rules, for a row that is not known yet: bad words may begin with a number, which stands
    for so many of its last tokens, and min_tokens counts from its output on."""
    ids = _id(vocab_size)
    starts = st.one_of(st.integers(1, MAX_WORD_LEN - 1), _ids(vocab_size, MAX_WORD_LEN - 1))
    biases = st.one_of(EIGHTHS, st.floats(-100, 100))
    return st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.one_of(st.sampled_from([0.01, 0.5, 2.0]), st.floats(0.1, 10)),
            "frequency_penalty": PENALTIES,
            "presence_penalty": PENALTIES,
            "allowed": _masks(vocab_size),
            "mask_is_raw": st.booleans(),
            "bad_words": st.lists(st.tuples(starts, ids), min_size=1, max_size=MAX_WORDS),
            "min_tokens": st.integers(-1, 2),  # so many more than there are
            "hold_ids": _ids(vocab_size, MAX_HOLD),
            "bias": st.dictionaries(ids, biases, min_size=1, max_size=MAX_BIAS),
            "processors": EIGHTHS.map(lambda size: (functools.partial(shift_in_numpy, size),)),
        },
    )


def _id(vocab_size: int) -> Strategy[int]:
    return st.one_of(st.integers(0, FEW - 1), st.integers(0, vocab_size - 1))


def _ids(vocab_size: int, max_size: int) -> Strategy[tuple[int, ...]]:
    return st.lists(_id(vocab_size), max_size=max_size).map(tuple)


def _masks(vocab_size: int) -> Strategy[frozenset[int]]:
    """One id, and others with some probability."""

    def make(one: int, share: float, seed: int) -> frozenset[int]:
        chosen = np.random.default_rng(seed).random(vocab_size) < share
        return frozenset([one, *np.flatnonzero(chosen).tolist()])

    return st.builds(make, _id(vocab_size), st.sampled_from([0.0, 0.2, 0.9]), SEEDS)
