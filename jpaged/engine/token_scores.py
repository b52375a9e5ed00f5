"""Log-probabilities of a sequence's tokens: as the host keeps them, and as users get them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jpaged.core.prompt_scores import PromptScores
from jpaged.core.sampling import Told
from jpaged.engine.output import Entry, Logprob

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_PIECES = 3  # tokens before the last that a character may consist of


@dataclasses.dataclass
class TokenScores:
    """One entry per token: its own score and rank, the scores of the likeliest ids (all of them in
    the order of ids where they are the whole vocabulary), and those of ids asked for."""

    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int] = dataclasses.field(default_factory=list)
    top_ids: list[Any] = dataclasses.field(default_factory=list)
    top_logprobs: list[Any] = dataclasses.field(default_factory=list)
    asked_logprobs: list[Any] = dataclasses.field(default_factory=list)
    cumulative: float = 0.0  # sum of the log-probabilities, in their order

    def __len__(self) -> int:
        return len(self.logprobs)

    def add(self, told: Told | PromptScores, at: tuple[int, ...]) -> None:
        """Takes the entry of a step's or window's results (NumPy's) at an index."""
        self.logprobs.append(float(told.logprobs[at]))
        self.cumulative += self.logprobs[-1]
        self.ranks.append(int(told.ranks[at]))
        # Copies: a view would keep the whole window's results.
        self.top_ids.append(np.array(told.top_ids[at]))
        self.top_logprobs.append(np.array(told.top_logprobs[at]))
        if isinstance(told, Told):
            self.asked_logprobs.append(np.array(told.asked_logprobs[at]))


class TokenTexts:
    """The text of single tokens, each decoded once. A tokenizer of None has no texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def of(self, token_id: int, before: Sequence[int]) -> str | None:
        """What a token reads as behind others: a character in pieces belongs to its last piece, and
        its other pieces are empty."""
        if self._tokenizer is None:
            return None
        if token_id not in self._alone:
            self._alone[token_id] = self._decode([token_id])
        text = self._alone[token_id]
        if not text.endswith(UNFINISHED):
            return text
        for number in range(1, min(MAX_PIECES, len(before)) + 1):
            pieces = list(before[-number:])
            whole = self._decode([*pieces, token_id])
            if not whole.endswith(UNFINISHED):
                return whole[len(self._decode(pieces).rstrip(UNFINISHED)) :]
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def entries(
    scores: TokenScores,
    token_ids: Sequence[int],
    start: int,
    texts: TokenTexts,
    *,
    num_top: int,
    asked_ids: Sequence[int] = (),
    first: int = 0,
) -> Iterator[Entry]:
    """vLLM's dicts for the scored tokens from the `first` on: the token itself, then the `num_top`
    likeliest ids, then those asked for, whose ranks are not known. `token_ids` are a sequence, or
    its last ones, whose position `start` has that first token."""
    for at, place in enumerate(range(first, len(scores)), start):
        before, token_id = token_ids[max(at - MAX_PIECES, 0) : at], token_ids[at]
        logprob, rank = scores.logprobs[place], scores.ranks[place]
        entry = {token_id: Logprob(logprob, rank, texts.of(token_id, before))}
        top = _sorted_top(scores.top_ids[place], scores.top_logprobs[place], num_top)
        for rank, (other, value) in enumerate(top, start=1):
            if other != token_id:
                entry[other] = Logprob(value, rank, texts.of(other, before))
        if asked_ids:
            asked = scores.asked_logprobs[place][: len(asked_ids)].tolist()
            for other, value in zip(asked_ids, asked, strict=True):
                if other not in entry:
                    entry[other] = Logprob(value, None, texts.of(other, before))
        yield entry


def _sorted_top(ids: Any, logprobs: Any, num_top: int) -> Iterator[tuple[int, float]]:
    order = np.argsort(-logprobs, kind="stable")[:num_top]
    return zip(ids[order].tolist(), logprobs[order].tolist(), strict=True)
