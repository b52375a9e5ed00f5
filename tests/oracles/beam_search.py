"""Beam search as vLLM and Hugging Face define it, one sequence at a time, in plain Python.

`logprobs_after(tokens)` gives the log-probabilities of every next token. Results are tuples
(generated tokens, cumulative log-probability, score), best first.
"""

from collections.abc import Callable, Sequence

import numpy as np

LogprobsAfter = Callable[[list[int]], np.ndarray]
Found = tuple[list[int], float, float]


def vllm_beam_search(
    logprobs_after: LogprobsAfter,
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    length_penalty: float = 1.0,
) -> list[Found]:
    """Each step resubmits every live beam and looks at its 2 * width best tokens."""

    def score(tokens: list[int], cum: float) -> float:
        length = len(prompt) + len(tokens) - (tokens[-1] in eos_ids)
        return cum / length**length_penalty

    live: list[tuple[list[int], float]] = [([], 0.0)]
    completed: list[Found] = []
    for _ in range(max_tokens):
        ongoing: list[Found] = []
        for tokens, cum in live:
            logprobs = logprobs_after(prompt + tokens)
            for token in _best(logprobs, 2 * width):
                found = [*tokens, token], cum + float(logprobs[token])
                is_end = token in eos_ids and not ignore_eos
                (completed if is_end else ongoing).append((*found, score(*found)))
        ongoing.sort(key=lambda found: -found[2])
        live = [found[:2] for found in ongoing[:width]]
        if not live:
            break
    completed += [(*found, score(*found)) for found in live]
    return sorted(completed, key=lambda found: -found[2])[:width]


def hf_beam_search(
    logprobs_after: LogprobsAfter,
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    eos_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[Found]:
    """Each step looks at the (1 + number of end-of-sequence ids) * width best of all beams."""
    num_candidates = max(2, 1 + len(eos_ids)) * width
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Found] = []
    for length in range(1, max_tokens + 1):
        candidates = []
        for tokens, cum in live:
            logprobs = logprobs_after(prompt + tokens)
            candidates += [
                ([*tokens, token], cum + float(logprobs[token]))
                for token in _best(logprobs, num_candidates)
            ]
        candidates.sort(key=lambda found: -found[1])
        live = []
        for rank, (tokens, cum) in enumerate(candidates[:num_candidates]):
            if tokens[-1] not in eos_ids and length < max_tokens:
                live.append((tokens, cum))
            elif rank < width:
                finished.append((tokens, cum, cum / length**length_penalty))
        live = live[:width]
        finished = sorted(finished, key=lambda found: -found[2])[:width]
        if not live:
            break
        is_hopeful = early_stopping == "never" and length_penalty > 0
        best = live[0][1] / (max_tokens if is_hopeful else length) ** length_penalty
        is_full = len(finished) == width
        if is_full and (early_stopping is True or best <= finished[-1][2]):
            break
    return finished


def _best(logprobs: np.ndarray, number: int) -> list[int]:
    return np.argsort(-logprobs, kind="stable")[:number].tolist()
