"""Requests as the host keeps them: what was asked, and how far each sample has come.

Knows nothing of the device. The engine keeps `context_len`, `num_blocks` and the tokens in step
with what its programs report.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jpaged.core.logits_rules import LogitsRules
from jpaged.engine.output_text import OutputText
from jpaged.engine.prefix_keys import extend_keys
from jpaged.engine.structured import Grammar, Matcher
from jpaged.engine.token_scores import TokenScores
from jpaged.sampling_params import BeamSearchParams, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt with its parameters and its n samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_len: int  # tokens, prompt included, at which a sample ends
    stop_ids: tuple[int, ...]
    eos_id: int  # -1: none, or ignored
    seed: int
    root: tuple[int, int, int, int]  # what KV depends on besides tokens and weights
    rules: LogitsRules | None = None  # NumPy's, of one row; None: it has none
    grammar: Grammar | None = None  # that its outputs follow
    make_text: Callable[[], OutputText] | None = None  # for each sample, if it must be looked at
    num_top: int | None = None  # likeliest ids told of each output token; None: nothing is told
    num_prompt_top: int | None = None  # of each prompt token from `score_from` on
    score_from: int = 1
    is_scoring: bool = False  # wants the prompt's scores, and no output
    beam_params: BeamSearchParams | None = None
    samples: list["Sample"] = dataclasses.field(default_factory=list)  # one of a beam search
    num_cached_tokens: int | None = None  # of the first admission
    error: Exception | None = None  # a tokenizer's, which who asked is to meet

    def __post_init__(self) -> None:
        if self.beam_params is None:
            self.samples = [Sample(self, index) for index in range(self.params.n)]

    @property
    def min_len(self) -> int:
        """Tokens, prompt included, below which no token ends a sample."""
        return len(self.prompt_token_ids) + self.params.min_tokens

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason for sample in self.samples)


@dataclasses.dataclass(eq=False)
class Sample:
    """One of a request's n outputs: a sequence that sits in a row, waits for one, or has ended."""

    request: Request
    index: int
    output_ids: list[int] = dataclasses.field(default_factory=list)
    scores: TokenScores = dataclasses.field(default_factory=TokenScores)
    prompt_scores: TokenScores = dataclasses.field(default_factory=TokenScores)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_ended_by_token: bool = False  # its last token is an end of sequence or a stop id

    row_ids: list[int] = dataclasses.field(default_factory=list)  # empty while it waits
    context_len: int = 0
    num_blocks: int = 0
    forks: list["Sample"] = dataclasses.field(default_factory=list)  # wait for this one's prompt
    is_tail_shared: bool = False  # its partly filled block may be shared with other samples
    has_left_a_row: bool = False  # so that the next one resumes it
    text: OutputText | None = None
    matcher: Matcher | None = None
    num_told: int = 0  # output tokens that the reader of a stream was told of
    is_end_told: bool = False
    _keys: list[bytes] = dataclasses.field(default_factory=list)

    num_rows = 1

    def __post_init__(self) -> None:
        request = self.request
        self.text = request.make_text() if request.make_text else None
        self.matcher = request.grammar.matcher() if request.grammar else None

    @property
    def row_id(self) -> int:
        """The row it sits in; the null row while it waits."""
        return self.row_ids[0] if self.row_ids else 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.request.prompt_token_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    @property
    def must_end(self) -> bool:
        """Whether its text is whole by its grammar, and no text may follow that it may draw.

        Raises RuntimeError as `Matcher.mask`.
        """
        request, matcher = self.request, self.matcher
        if matcher is None or request.rules is None:
            return False
        can_go_on = matcher.has_text(matcher.mask() & request.rules.token_mask)
        return matcher.is_complete and not can_go_on

    @property
    def can_end_itself(self) -> bool:
        """Whether it may draw an end of sequence next, where its grammar allows nothing else."""
        request, matcher = self.request, self.matcher
        if request.eos_id < 0 or len(self.output_ids) < request.params.min_tokens:
            return False
        if matcher is None or request.rules is None:
            return True
        return bool(np.any(matcher.mask() & request.rules.token_mask))

    @property
    def has_news(self) -> bool:
        """Whether the reader of a stream is to be told of it now: at once of its first token and of
        its end, else every `stream_interval` tokens."""
        if self.finish_reason is not None and not self.is_end_told:
            return True
        interval = self.request.params.stream_interval if self.num_told else None
        return len(self.output_ids) - self.num_told >= (interval or 1)

    @property
    def next_scored(self) -> int:
        """The first prompt position whose score is wanted and not yet there; the prompt's length
        if there is none."""
        request = self.request
        if request.num_prompt_top is None or self.index > 0:
            return len(request.prompt_token_ids)
        return request.score_from + len(self.prompt_scores)

    @property
    def most_cached(self) -> int:
        """Tokens that the prefix cache may give it: what a score is made of must be computed."""
        if self.request.params.skip_reading_prefix_cache:
            return 0
        if self.next_scored < len(self.request.prompt_token_ids):
            return self.next_scored - 1
        return self.num_tokens

    def prefix_keys(self, block_size: int) -> list[bytes]:
        """Names of its full blocks; none if it does not read the prefix cache."""
        is_short = len(self._keys) < self.num_tokens // block_size
        if is_short and self.most_cached:
            extend_keys(self._keys, self.token_ids, self.request.root, block_size)
        return self._keys

    def output_tail(self, first: int, num_before: int) -> tuple[list[int], int]:
        """Its output from token `first` on behind up to `num_before` tokens that precede it, and
        how many those are. Copies nothing else."""
        tail = self.output_ids[max(first - num_before, 0) :]
        if missing := max(num_before - first, 0):
            tail = self.request.prompt_token_ids[-missing:] + tail
        return tail, len(tail) - len(self.output_ids) + first

    def leave_row(self) -> None:
        """Forgets everything about the row it sat in."""
        self.row_ids, self.context_len, self.num_blocks = [], 0, 0
        self.is_tail_shared, self.has_left_a_row = False, True

    def forget_weights(self) -> None:
        """Drops the prompt's scores unless all are there: the others will be of new weights."""
        if self.next_scored < len(self.request.prompt_token_ids):
            self.prompt_scores = TokenScores()

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the sample."""
        self.finish_reason, self.stop_reason = reason, stop_reason


def derived_seed(engine_seed: int, ordinal: int) -> int:
    """The 64-bit seed of a request that brought none: a function of engine seed and ordinal."""
    data = struct.pack("<QQ", engine_seed % 2**64, ordinal)
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def cache_root(
    *, cache_salt: str | None, rope_len: int, adapter: str | None = None
) -> tuple[int, int, int, int]:
    """128 bits that tell apart KV of equal tokens: the request's salt, its adapter's load identity,
    and the prompt length where rope scaling depends on it (0: it does not). Fields are
    length-delimited, so none can pass for another."""
    # A salt may be any text that Python holds, half a surrogate pair too.
    salt, name = (
        b"" if text is None else b"\x01" + text.encode(errors="surrogatepass")
        for text in (cache_salt, adapter)
    )
    data = struct.pack("<QQQ", len(salt), len(name), rope_len) + salt + name
    words: Any = struct.unpack("<4I", hashlib.sha256(data).digest()[:16])
    return words
