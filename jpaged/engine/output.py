"""What a user gets back: vLLM's names and meanings."""

import dataclasses


@dataclasses.dataclass
class Logprob:
    """Log-probability of one token, its rank from 1 where known, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One of a request's n outputs.

    text: output without the token that stopped it. token_ids: everything generated, that token
    included. logprobs: one dict per output token, where asked for. finish_reason: stop, length,
    abort or error. stop_reason: the stop token id that ended it; None for EOS and length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None


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
    """A request's prompt and outputs. num_cached_tokens: prompt tokens whose KV was cached."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: None = None
    metrics: None = None
