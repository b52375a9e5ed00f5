"""What the scheduler is told of the engine's samples: records made of host records alone."""

import sys
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.beam_group import BeamGroup
from jpaged.engine.capacity import most_blocks_taken
from jpaged.engine.dispatch import SamplerChoice
from jpaged.engine.request import Sample
from jpaged.engine.scheduler import View
from jpaged.engine.seq_view import SeqView

WIDE_TOKENS = 64  # prompt tokens that a step scores over the whole vocabulary


class ViewMaker:
    """Makes views under an engine's configuration. window: the model's."""

    def __init__(self, config: EngineConfig, window: int | None, choice: SamplerChoice) -> None:
        self._config, self._window, self._choice = config, window, choice
        self._block_size = config.cache.block_size

    def running(self, sample: Sample) -> View:
        """The view of a sample that sits in a row."""
        return self._view(sample, {})

    def waiting(self, sample: Sample, num_cached: int, num_free_hits: int = 0) -> View:
        """The view of one that takes a row now. num_cached: tokens that it finds in the cache;
        num_free_hits: blocks of them that are free."""
        found = {
            "context_len": num_cached,
            "num_blocks": num_cached // self._block_size,
            "num_free_hits": num_free_hits,
            "most_taken": most_blocks_taken(self._config, self._window, num_cached),
        }
        return self._view(sample, found)

    def is_wide(self, sample: Sample) -> bool:
        """Whether its next prompt tokens are scored over the whole vocabulary."""
        request = sample.request
        is_scored = sample.next_scored < len(request.prompt_token_ids)
        return is_scored and self._choice.is_wide(request.num_prompt_top)

    def waiting_keys(self, sample: Sample) -> list[bytes]:
        """Names of the blocks that a waiting sample can find in the cache."""
        most = min(sample.num_tokens - 1, sample.most_cached)
        return self._keys(sample)[: most // self._block_size]

    def _view(self, sample: Sample, found: dict[str, Any]) -> View:
        if isinstance(sample, BeamGroup):
            return sample.view(self._block_size, **found)
        # The last to write into a shared block has it for itself.
        is_shared = sample.is_tail_shared and any(
            other.is_tail_shared for other in sample.request.samples[sample.index + 1 :]
        )
        request = sample.request
        fields: dict[str, Any] = {
            "num_tokens": sample.num_tokens,
            "context_len": sample.context_len,
            "num_blocks": sample.num_blocks,
            "max_len": request.max_len,
            "is_tail_shared": is_shared,
            "num_forks": len(sample.forks),
            "is_scoring": request.is_scoring,
            "is_stepwise": sample.matcher is not None or self._choice.is_wide(request.num_top),
            "most_new": WIDE_TOKENS if self.is_wide(sample) else sys.maxsize,
        }
        return SeqView(**(fields | found), keys=self._keys(sample))

    def _keys(self, sample: Sample) -> list[bytes]:
        """Names of the blocks that it shares with others, if it does."""
        is_reading = sample.num_tokens - sample.context_len > 1
        if not (is_reading and self._config.cache.enable_prefix_caching):
            return []
        return sample.prefix_keys(self._block_size)
