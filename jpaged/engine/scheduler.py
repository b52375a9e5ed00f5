"""Who runs next: a pure function from what the host knows to the next dispatches.

vLLM V1's rules: running sequences first, in order of arrival, each with the gap between its tokens
and its KV; then waiting ones, first come first served and never past one that does not fit. A
running sequence that finds no block preempts the youngest, and then nobody is admitted in that
step. Decoding goes in windows of J steps where the blocks suffice and few prompt tokens are read
beside them, else one step at a time: while prompts wait to be read, the rows to decode together
grow in number.

Beyond vLLM: a waiting sequence is held back while a running one computes a block that both begin
with, so that prompts which arrive together compute a common prefix once. Others may pass it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jpaged.engine.seq_view import GroupView, Keys, SeqView

View = SeqView | GroupView


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A waiting sequence. keys: of the blocks it would read from the cache; none are never held
    back. look_up: asks the cache, and gives the view of a sequence that just took a row."""

    look_up: Callable[[], View]
    keys: Keys = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan may use."""

    block_size: int
    max_num_batched_tokens: int
    num_decode_steps: int
    free_rows: int
    free_blocks: int
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0  # kept free by admissions while others run
    may_admit: bool = True


@dataclasses.dataclass(frozen=True)
class Prefill:
    """`num_new` tokens of one sequence, and how many samples to fork off behind them."""

    index: int  # into the running list; admitted sequences count on behind it
    num_new: int
    num_forks: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next dispatches: admissions, one step of prefill, one window of decoding, one step of
    decoding for those that must be looked at after each token, one window of beams.

    With `preempt` set, nothing else is: the youngest running sequence must give up its row, and
    then a new plan is made.
    """

    preempt: bool = False
    admitted: tuple[int, ...] = ()  # indices into the waiting list
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[int, ...] = ()  # indices into the running list
    num_steps: int = 1
    stepwise: tuple[int, ...] = ()  # those that decode one token, beside the window
    beams: tuple[int, ...] = ()  # indices into the running list
    num_beam_steps: int = 1


def plan(running: Sequence[View], waiting: Iterable[Waiting], limits: Limits) -> Plan:
    """The next plan. Raises nothing: what does not fit waits, or is preempted."""
    left = _Left(limits)
    prefill, decode, stepwise, beams = [], [], [], []
    for index, seq in enumerate(running):
        num_new = left.share(seq)
        if not left.take(seq.blocks_needed(num_new, limits.block_size)):
            return Plan(preempt=True)
        left.tokens -= num_new
        if num_new and seq.is_decoding:
            is_group = isinstance(seq, GroupView)
            (beams if is_group else stepwise if seq.is_stepwise else decode).append(index)
        elif num_new:
            prefill.append(_prefill(index, seq, num_new, left))

    admitted = _admit(running, waiting, left, prefill) if limits.may_admit else []
    num_read = sum(one.num_new for one in prefill)
    most = 1 if 2 * num_read > limits.max_num_batched_tokens else limits.num_decode_steps
    num_steps, num_beam_steps = (
        _window([running[index] for index in rows], most, left, limits) for rows in (decode, beams)
    )
    return Plan(
        admitted=tuple(admitted),
        prefill=tuple(prefill),
        decode=tuple(decode),
        num_steps=num_steps,
        stepwise=tuple(stepwise),
        beams=tuple(beams),
        num_beam_steps=num_beam_steps,
    )


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

    def share(self, seq: View) -> int:
        """Tokens of its gap that fit this step."""
        threshold = self.limits.long_prefill_token_threshold
        most = max(threshold, seq.num_live) if threshold else seq.gap
        return seq.round_down(min(seq.gap, self.tokens, most, seq.most_new))

    def take(self, num_blocks: int) -> bool:
        if num_blocks > self.blocks:
            return False
        self.blocks -= num_blocks
        return True

    def admit(self, seq: View, num_new: int, *, is_first: bool) -> bool:
        """Seats a sequence if all its tokens fit, but takes only this step's blocks."""
        block_size = self.limits.block_size
        reserve = 0 if is_first else self.limits.watermark_blocks
        whole = seq.blocks_to_start(block_size) + seq.num_free_hits
        if whole + reserve > self.blocks:
            return False
        self.take(seq.blocks_needed(num_new, block_size) + seq.num_free_hits)
        self.tokens -= num_new
        self.rows -= seq.num_rows
        return True


def _admit(
    running: Sequence[View], waiting: Iterable[Waiting], left: _Left, prefill: list[Prefill]
) -> list[int]:
    """Admits from the waiting list what is not held back, up to the first that does not fit."""
    block_size = left.limits.block_size
    admitted: list[int] = []
    in_progress = {key for seq in running for key in seq.pending_keys(block_size)}
    for place, candidate in enumerate(waiting):
        if not left.rows or not left.tokens:
            break
        if not in_progress.isdisjoint(candidate.keys):
            continue
        seq = candidate.look_up()
        num_new = left.share(seq)
        is_first = not (running or admitted)
        # A group that starts ready to choose computes its first token in the next plan's window.
        if seq.num_rows > left.rows or not left.admit(seq, num_new, is_first=is_first):
            break
        in_progress.update(seq.pending_keys(block_size))
        index = len(running) + len(admitted)
        admitted.append(place)
        if num_new and not (isinstance(seq, GroupView) and seq.is_decoding):
            prefill.append(_prefill(index, seq, num_new, left))
    return admitted


def _prefill(index: int, seq: View, num_new: int, left: _Left) -> Prefill:
    num_forks = min(seq.num_forks, left.rows) if num_new == seq.gap else 0
    left.rows -= num_forks
    return Prefill(index, num_new, num_forks)


def _window(ready: Sequence[View], most: int, left: _Left, limits: Limits) -> int:
    """`most` steps if the blocks for them are there and some row can use them, else 1."""
    block_size = limits.block_size
    useful = max((seq.steps_left for seq in ready), default=1)
    extra = sum(
        seq.window_blocks(most, block_size) - seq.window_blocks(1, block_size) for seq in ready
    )
    return most if useful > 1 and left.take(extra) else 1
