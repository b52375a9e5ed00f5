"""What a user gets back: vLLM's names and meanings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload


@dataclasses.dataclass
class Logprob:
    """Log-probability of one token, its rank from 1 where known, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Entry = dict[int, Logprob]  # of one position, by token id


@dataclasses.dataclass
class FlatLogprobs(Sequence[Entry | None]):
    """Entries of many positions in a few lists, so that a collector of garbage has little to walk:
    those of position i stand from start_indices[i] to end_indices[i]. Reads as a list of dicts."""

    start_indices: list[int] = dataclasses.field(default_factory=list)
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    decoded_tokens: list[str | None] = dataclasses.field(default_factory=list)

    def append(self, entry: Mapping[int, Logprob] | None) -> None:
        """Adds a position; None has no entries."""
        self.start_indices.append(len(self.token_ids))
        for token_id, found in (entry or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(found.logprob)
            self.ranks.append(found.rank)
            self.decoded_tokens.append(found.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, others: "FlatLogprobs") -> None:
        """Adds the positions of another."""
        offset = len(self.token_ids)
        self.start_indices.extend(offset + start for start in others.start_indices)
        self.end_indices.extend(offset + end for end in others.end_indices)
        self.token_ids += others.token_ids
        self.logprobs += others.logprobs
        self.ranks += others.ranks
        self.decoded_tokens += others.decoded_tokens

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "Entry | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            for place in range(*index.indices(len(self))):
                part.append(self[place])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        columns = (self.token_ids, self.logprobs, self.ranks, self.decoded_tokens)
        rows = zip(*(column[start:end] for column in columns), strict=True)
        return {token: Logprob(value, rank, text) for token, value, rank, text in rows}


Logprobs = list[Entry] | FlatLogprobs
PromptLogprobs = list[Entry | None] | FlatLogprobs  # nothing is known of the first token


@dataclasses.dataclass
class CompletionOutput:
    """One of a request's n outputs.

    text: output without the token that stopped it. token_ids: everything generated, that token
    included. logprobs: one dict per output token, where asked for. finish_reason: stop, length,
    repetition, abort or error. stop_reason: the stop string or stop token id that ended it; None
    for EOS and all else.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass
class ScoredTokens:
    """What the model thinks of a continuation. token_ids: its tokens. logprobs, ranks: of each,
    behind the prompt and the tokens before it; a rank of 1 is the likeliest."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.logprobs)


@dataclasses.dataclass
class BeamSearchSequence:
    """One of the sequences that a beam search found.

    tokens: prompt and output. text: of all of them, special ones included. cum_logprob: of the
    output. score: what the sequences are ranked by. logprobs: one dict per output token.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    logprobs: list[dict[int, Logprob]]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class BeamSearchOutput:
    """What a beam search found for a prompt: up to beam_width sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclasses.dataclass
class RequestOutput:
    """A request's prompt and outputs. num_cached_tokens: prompt tokens whose KV was cached.
    prompt_logprobs: None and then a dict for each further token, where asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: None = None


def join_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """What several outputs of a request tell together, each the news after those before it. Shares
    no list with them that a reader could change. Costs as much as they are long."""
    samples: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for completion in part.outputs:
            samples.setdefault(completion.index, []).append(completion)
    prompts = (part.prompt_logprobs for part in reversed(parts))
    return dataclasses.replace(
        parts[-1],
        outputs=[_join_completions(samples[index]) for index in sorted(samples)],
        prompt_logprobs=next((one for one in prompts if one is not None), None),
    )


def _join_completions(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    token_ids: list[int] = []
    logprobs: Any = None
    for part in parts:
        token_ids += part.token_ids
        if part.logprobs is not None:
            logprobs = type(part.logprobs)() if logprobs is None else logprobs
            logprobs.extend(part.logprobs)
    return dataclasses.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=token_ids,
        logprobs=logprobs,
    )
