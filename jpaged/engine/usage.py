"""What the pool's memory is used for, at a moment and over a run."""

import dataclasses
from collections.abc import Sequence

from jpaged.engine.stats import EngineStats


@dataclasses.dataclass(frozen=True)
class CacheUsage:
    """The block pool at a moment. The null block counts for nothing.

    num_blocks: all there are. num_free: those that no row holds, `num_cached` of which are kept for
    requests that begin alike. num_held: those that rows hold, `num_shared` of which are held by
    more than one. num_entries: entries of block tables, so the blocks there would be if none were
    shared. num_kv_tokens: slots of held blocks that hold KV.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_held: int
    num_cached: int
    num_shared: int
    num_entries: int
    num_kv_tokens: int

    @property
    def waste(self) -> float:
        """Share of the held slots without KV: reserved, or at the end of a row's last block."""
        return 1 - self.num_kv_tokens / (self.num_held * self.block_size) if self.num_held else 0.0

    @property
    def sharing(self) -> float:
        """Share of the blocks that sharing saves: 1 - physical / logical blocks."""
        return 1 - self.num_held / self.num_entries if self.num_entries else 0.0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The engine at a moment: who runs, how the pool is used, and the counts so far.

    implementation: of products and attention, the one that runs. attention_implementation: of
    attention; another where "native" leaves that over KV of 8 bits to XLA. quantization: of the
    matrices. kv_cache_dtype: of keys and values. weight_bytes: of all weights as they are served.
    """

    num_running: int
    num_waiting: int
    cache: CacheUsage
    stats: EngineStats
    implementation: str
    attention_implementation: str
    quantization: str | None
    kv_cache_dtype: str
    weight_bytes: int


class UsageMeter:
    """Averages over the forward passes of a run, each with the blocks that were held while it ran.

    A window's blocks are reserved before its first pass and let go after its last; its KV grows by
    a token a row. Where blocks come and go meanwhile, in a window of beams or behind the window of
    a model, all its passes count as it ends.
    """

    def __init__(self) -> None:
        self.num_passes = self.peak_held = 0
        self._waste = self._sharing = 0.0

    @property
    def waste(self) -> float:
        """The average of `CacheUsage.waste`."""
        return self._waste / max(self.num_passes, 1)

    @property
    def sharing(self) -> float:
        """The average of `CacheUsage.sharing`."""
        return self._sharing / max(self.num_passes, 1)

    def record(self, end: CacheUsage, num_new: Sequence[int]) -> None:
        """Takes in a dispatch.

        end: the pool after it, before any row is let go. num_new: the tokens by which the KV grew
        in each of its passes, or zeros to count them all as it ends.
        """
        for num_tokens in reversed(num_new):
            self._add(end)
            end = dataclasses.replace(end, num_kv_tokens=end.num_kv_tokens - num_tokens)

    def _add(self, usage: CacheUsage) -> None:
        self.num_passes += 1
        self._waste += usage.waste
        self._sharing += usage.sharing
        self.peak_held = max(self.peak_held, usage.num_held)
