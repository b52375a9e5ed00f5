"""Log-probabilities of a sequence's tokens: as the host keeps them, and as users get them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jpaged.core.prompt_scores import PromptScores
from jpaged.core.sampling import Told
from jpaged.engine.detokenize import REPLACEMENT, whole_text
from jpaged.engine.output import Entry, Logprob

MAX_PIECES = 3  # tokens before the last that a character may consist of


@dataclasses.dataclass
class TokenScores:
    """One entry per token: its own score and rank, the scores of the likeliest ids, the likeliest
    first, and those of ids asked for. No more of them than the request wants."""

    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int] = dataclasses.field(default_factory=list)
    top_ids: list[Any] = dataclasses.field(default_factory=list)
    top_logprobs: list[Any] = dataclasses.field(default_factory=list)
    asked_logprobs: list[Any] = dataclasses.field(default_factory=list)
    cumulative: float = 0.0  # sum of the log-probabilities, in their order

    def __len__(self) -> int:
        return len(self.logprobs)

    def add(
        self, told: Told | PromptScores, at: tuple[int, ...], *, num_top: int, num_asked: int = 0
    ) -> None:
        """Takes the entry of a step's or window's results (NumPy's) at an index. Others in the step
        may have asked for more, up to the whole vocabulary, which comes in the order of ids."""
        self.logprobs.append(float(told.logprobs[at]))
        self.cumulative += self.logprobs[-1]
        self.ranks.append(int(told.ranks[at]))
        # Copies: a view would keep the whole window's results.
        order = np.argsort(-told.top_logprobs[at], kind="stable")[:num_top]
        self.top_ids.append(told.top_ids[at][order])
        self.top_logprobs.append(told.top_logprobs[at][order])
        if isinstance(told, Told):
            self.asked_logprobs.append(told.asked_logprobs[at][:num_asked].copy())


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
            self._alone[token_id] = self._behind((), token_id)
        text = self._alone[token_id]
        if not text.endswith(REPLACEMENT):
            return text
        text = self._behind(before, token_id)
        return "" if text.endswith(REPLACEMENT) else text

    def _behind(self, before: Sequence[int], token_id: int) -> str:
        return whole_text(self._tokenizer, before, [token_id], skip_special_tokens=False)


def entries(
    scores: TokenScores,
    token_ids: Sequence[int],
    start: int,
    texts: TokenTexts,
    *,
    asked_ids: Sequence[int] = (),
    first: int = 0,
) -> Iterator[Entry]:
    """vLLM's dicts for the scored tokens from the `first` on: the token itself, then the likeliest
    ids, then those asked for, whose ranks are not known. `token_ids` are a sequence, or its last
    ones, whose position `start` has that first token."""
    for at, place in enumerate(range(first, len(scores)), start):
        before, token_id = token_ids[max(at - MAX_PIECES, 0) : at], token_ids[at]
        logprob, rank = scores.logprobs[place], scores.ranks[place]
        entry = {token_id: Logprob(logprob, rank, texts.of(token_id, before))}
        top = zip(scores.top_ids[place].tolist(), scores.top_logprobs[place].tolist(), strict=True)
        for rank, (other, value) in enumerate(top, start=1):
            if other != token_id:
                entry[other] = Logprob(value, rank, texts.of(other, before))
        if asked_ids:
            for other, value in zip(asked_ids, scores.asked_logprobs[place].tolist(), strict=True):
                if other not in entry:
                    entry[other] = Logprob(value, None, texts.of(other, before))
        yield entry
