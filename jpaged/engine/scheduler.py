"""Who runs next: a pure function from what the host knows to the next dispatches.

vLLM V1's rules: running sequences first, in order of arrival, each with the gap between its tokens
and its KV; then waiting ones, first come first served and never past one that does not fit. A
running sequence that finds no block preempts the youngest, and then nobody is admitted in that
step. Decoding goes in windows of J steps where the blocks suffice, else one step at a time.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SeqView:
    """A sequence as the scheduler sees it. Waiting ones have what the prefix cache would give."""

    num_tokens: int
    context_len: int
    num_blocks: int
    max_len: int
    is_tail_shared: bool = False
    num_forks: int = 0  # samples waiting to be forked off when the prompt is read
    num_free_hits: int = 0  # waiting: cached blocks that are free, and would be taken

    @property
    def gap(self) -> int:
        """Tokens without KV."""
        return self.num_tokens - self.context_len

    @property
    def is_decoding(self) -> bool:
        """Whether one more token is all it lacks, so that a window can serve it."""
        return self.gap == 1 and self.num_forks == 0

    def blocks_needed(self, num_new: int, block_size: int) -> int:
        """Blocks to take before `num_new` more tokens can be written: growth and copy on write."""
        if num_new == 0:
            return 0
        grow = -(-(self.context_len + num_new) // block_size) - self.num_blocks
        copy = self.is_tail_shared and self.context_len % block_size != 0
        return max(grow, 0) + copy


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may use."""

    block_size: int
    max_num_batched_tokens: int
    num_decode_steps: int
    free_rows: int
    free_blocks: int
    long_prefill_token_threshold: int = 0
    may_admit: bool = True


@dataclasses.dataclass(frozen=True)
class Prefill:
    """`num_new` tokens of one sequence, and how many samples to fork off behind them."""

    index: int  # into the running list; admitted sequences count on behind it
    num_new: int
    num_forks: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next dispatches: admissions, then one step of prefill, then one window of decoding.

    With `preempt` set, nothing else is: the youngest running sequence must give up its row, and
    then a new plan is made.
    """

    preempt: bool = False
    num_admitted: int = 0  # from the front of the waiting list
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()  # indices into the running list
    num_steps: int = 1


def plan(running: Sequence[SeqView], waiting: Sequence[SeqView], limits: Limits) -> Plan:
    """The next plan. Raises nothing: what does not fit waits, or is preempted."""
    left = _Left(limits)
    prefill, decode = [], []
    for index, seq in enumerate(running):
        num_new = left.share(seq.gap)
        if not left.take(seq.blocks_needed(num_new, limits.block_size)):
            return Plan(preempt=True)
        left.tokens -= num_new
        if num_new and seq.is_decoding:
            decode.append(index)
        elif num_new:
            prefill.append(_prefill(index, seq, num_new, left))

    num_admitted = 0
    for seq in waiting if limits.may_admit else ():
        num_new = left.share(seq.gap)
        if not num_new or not left.rows or not left.admit(seq, num_new):
            break
        prefill.append(_prefill(len(running) + num_admitted, seq, num_new, left))
        num_admitted += 1
    num_steps = _window([running[index] for index in decode], left, limits)
    return Plan(False, num_admitted, tuple(prefill), tuple(decode), num_steps)


@dataclasses.dataclass
class _Left:
    """What is left of the limits while a plan is made."""

    limits: Limits
    tokens: int = 0
    blocks: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.limits.max_num_batched_tokens
        self.blocks, self.rows = self.limits.free_blocks, self.limits.free_rows

    def share(self, gap: int) -> int:
        """Tokens of a gap that fit this step."""
        threshold = self.limits.long_prefill_token_threshold
        return min(gap, self.tokens, threshold or gap)

    def take(self, num_blocks: int) -> bool:
        if num_blocks > self.blocks:
            return False
        self.blocks -= num_blocks
        return True

    def admit(self, seq: SeqView, num_new: int) -> bool:
        """Seats a sequence if all its tokens fit, but takes only this step's blocks."""
        block_size = self.limits.block_size
        whole = seq.blocks_needed(seq.gap, block_size) + seq.num_free_hits
        if whole > self.blocks:
            return False
        self.take(seq.blocks_needed(num_new, block_size) + seq.num_free_hits)
        self.tokens -= num_new
        self.rows -= 1
        return True


def _prefill(index: int, seq: SeqView, num_new: int, left: _Left) -> Prefill:
    num_forks = min(seq.num_forks, left.rows) if num_new == seq.gap else 0
    left.rows -= num_forks
    return Prefill(index, num_new, num_forks)


def _window(decoding: Sequence[SeqView], left: _Left, limits: Limits) -> int:
    """J if the blocks for it are there and some row can use it, else 1."""
    J = limits.num_decode_steps
    useful = max((seq.max_len - seq.num_tokens for seq in decoding), default=1)
    extra = sum(
        seq.blocks_needed(min(J, seq.max_len - seq.num_tokens), limits.block_size)
        - seq.blocks_needed(1, limits.block_size)
        for seq in decoding
    )
    return J if useful > 1 and extra <= left.blocks else 1
