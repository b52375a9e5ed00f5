"""Sequences and beam groups as the scheduler sees them: what they lack, and what blocks that takes.

The counts are the device's own, see `core.rows.reserve` and `core.beam.blocks_wanted`.
"""

import dataclasses
import sys
from collections.abc import Sequence

Keys = Sequence[bytes]  # names of a sequence's full blocks, see `prefix_keys`


@dataclasses.dataclass(frozen=True)
class SeqView:
    """A sequence. A waiting one has what the prefix cache would give it."""

    num_tokens: int
    context_len: int
    num_blocks: int
    max_len: int
    is_tail_shared: bool = False  # its next write copies a block
    num_forks: int = 0  # samples waiting to be forked off when the prompt is read
    num_free_hits: int = 0  # waiting: cached blocks that are free, and would be taken
    most_taken: int = sys.maxsize  # waiting: blocks that it holds beyond cached ones at a time
    keys: Keys = ()
    is_scoring: bool = False  # draws nothing, and needs no KV of its last token
    is_stepwise: bool = False  # the host must look at each token before the next is drawn
    most_new: int = sys.maxsize  # tokens that a step may run of it

    num_rows = num_live = 1

    @property
    def gap(self) -> int:
        """Tokens without KV that need one."""
        return self.num_tokens - self.context_len - self.is_scoring

    @property
    def is_decoding(self) -> bool:
        """Whether one more token is all it lacks, so that a window can serve it."""
        return self.gap == 1 and self.num_forks == 0 and not self.is_scoring

    @property
    def steps_left(self) -> int:
        """Steps of a window that it can use."""
        return self.max_len - self.num_tokens

    def round_down(self, num_new: int) -> int:
        """The most tokens up to `num_new` that it can run at once: any number."""
        return num_new

    def blocks_needed(self, num_new: int, block_size: int) -> int:
        """Blocks to take before `num_new` more tokens can be written: growth and copy on write."""
        if num_new == 0:
            return 0
        grow = -(-(self.context_len + num_new) // block_size) - self.num_blocks
        copy = self.is_tail_shared and self.context_len % block_size != 0
        return max(grow, 0) + copy

    def blocks_to_start(self, block_size: int) -> int:
        """Blocks that must be free to admit it: for all its tokens, as far as it holds their blocks
        at the same time."""
        return min(self.blocks_needed(self.gap, block_size), self.most_taken)

    def window_blocks(self, num_steps: int, block_size: int) -> int:
        """Blocks to take before a window of `num_steps`, as far as it can use one."""
        return self.blocks_needed(max(min(num_steps, self.steps_left), 1), block_size)

    def pending_keys(self, block_size: int) -> Keys:
        """Names of the blocks it computes from tokens it knows."""
        return () if self.is_decoding else self.keys[self.context_len // block_size :]


@dataclasses.dataclass(frozen=True)
class GroupView:
    """A beam group: W rows that are seated, run and preempted together.

    First one row, the leader, reads what all beams begin with, but for the last token; then all
    live beams' rows, if there are more, catch up; then windows choose.
    """

    num_tokens: int  # of each live beam; of the leader while it reads
    context_len: int
    num_blocks: int  # of the leader
    max_len: int
    num_rows: int  # W
    num_live: int = 1  # rows that hold beams now
    num_tails: int = 1  # different blocks among the live rows' partly filled ones
    num_beams: int = 1  # waiting: beams there will be once the leader has read
    beam_len: int = 0  # waiting: tokens of each
    num_free_hits: int = 0
    most_taken: int = sys.maxsize
    keys: Keys = ()

    num_forks = 0
    most_new = sys.maxsize

    @property
    def _lag(self) -> int:
        return self.num_tokens - 1 - self.context_len

    @property
    def gap(self) -> int:
        """Tokens it can run now: of all live rows."""
        return max(self._lag, 1) * self.num_live

    @property
    def is_decoding(self) -> bool:
        """Whether its rows lack one token each, so that a beam window can serve them."""
        return self._lag == 0

    @property
    def steps_left(self) -> int:
        """Steps of a window that it can use."""
        return self.max_len - self.num_tokens

    def round_down(self, num_new: int) -> int:
        """Live rows run equally many tokens."""
        return num_new - num_new % self.num_live

    def blocks_needed(self, num_new: int, block_size: int) -> int:
        """Blocks to take before it can run `num_new` tokens, or a window of one step."""
        if num_new == 0:
            return 0
        if self.is_decoding:
            return self.window_blocks(1, block_size)
        end = self.context_len + num_new // self.num_live
        if self.num_live == 1:
            return max(-(-end // block_size) - self.num_blocks, 0)
        return self._own_blocks(self.num_live, self.context_len, end, self.num_tails, block_size)

    def blocks_to_start(self, block_size: int) -> int:
        """Blocks that must be free to admit it: for the leader's tokens, all that the other beams
        know besides, and one step of a window, so that it is not admitted only to give up."""
        num_blocks = max(-(-(self.num_tokens - 1) // block_size), self.num_blocks)
        needed = num_blocks - self.num_blocks
        now = dataclasses.replace(
            self, context_len=self.num_tokens - 1, num_blocks=num_blocks, num_tails=1
        )
        if self.num_beams > 1:
            now = dataclasses.replace(now, num_tokens=self.beam_len, num_live=self.num_beams)
        if not now.is_decoding:
            needed += now.blocks_needed(now.gap, block_size)
            now = dataclasses.replace(now, context_len=self.beam_len - 1, num_tails=self.num_beams)
        needed += now.window_blocks(1, block_size)
        return min(needed, self.num_beams * self.most_taken)

    def window_blocks(self, num_steps: int, block_size: int) -> int:
        """Blocks to take before a window of `num_steps`, at worst."""
        end = min(self.context_len + num_steps, self.max_len - 1)
        if self.num_live > 1:
            return self._own_blocks(
                self.num_rows, self.context_len, end, self.num_tails, block_size
            )
        # What the one live row knows will be shared by all.
        shared_end = min(end, self.num_tokens)
        grow = max(-(-shared_end // block_size) - self.num_blocks, 0)
        return grow + self._own_blocks(self.num_rows, self.num_tokens, end, 1, block_size)

    @staticmethod
    def _own_blocks(num_rows: int, shared: int, end: int, num_tails: int, block_size: int) -> int:
        """A block for each row in each column from `shared` tokens to `end`, but for the tails."""
        if end <= shared:
            return 0
        tails = num_tails if shared % block_size else 0
        return num_rows * (-(-end // block_size) - shared // block_size) - tails

    def pending_keys(self, block_size: int) -> Keys:
        """Names of the blocks it computes from tokens it knows."""
        return () if self.is_decoding else self.keys[self.context_len // block_size :]
