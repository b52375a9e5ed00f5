"""What the engine counts, in tokens, blocks and steps."""

import dataclasses
import time

from jpaged.engine.request import Sample


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine started.

    num_cache_queries and num_cache_hits are tokens, counted at a sample's first admission alone, as
    vLLM does; resumed ones are counted apart. num_window_tokens are those made in windows of more
    than one step. first_token_at: when the first token was there, by `time.perf_counter`.
    """

    num_preemptions: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    num_resumed_queries: int = 0
    num_resumed_hits: int = 0
    num_prefill_steps: int = 0
    num_prefill_tokens: int = 0
    num_windows: int = 0
    num_decode_tokens: int = 0
    num_window_tokens: int = 0
    num_beam_windows: int = 0
    num_beam_tokens: int = 0
    first_token_at: float | None = None

    def count_admission(self, sample: Sample, num_cached: int, *, has_cache: bool) -> None:
        """A sample took a row; `num_cached` of its tokens had their KV in the cache. Without a
        prefix cache nobody asks it."""
        if sample.request.num_cached_tokens is None:
            sample.request.num_cached_tokens = num_cached
        if not has_cache:
            return
        if sample.has_left_a_row:
            self.num_resumed_queries += sample.num_tokens
            self.num_resumed_hits += num_cached
            return
        self.num_cache_queries += sample.num_tokens
        self.num_cache_hits += num_cached

    def count_prefill(self, num_tokens: int, num_sampled: int) -> None:
        """A prefill step computed `num_tokens` tokens and made `num_sampled`."""
        self.num_prefill_steps += 1
        self.num_prefill_tokens += num_tokens
        if num_sampled and self.first_token_at is None:
            self.first_token_at = time.perf_counter()

    def count_window(self, num_steps: int, num_sampled: int) -> None:
        """A window of `num_steps` made `num_sampled` tokens."""
        self.num_windows += 1
        self.num_decode_tokens += num_sampled
        if num_steps > 1:
            self.num_window_tokens += num_sampled

    def count_beams(self, num_prompt: int, num_generated: int) -> None:
        """A window of beam search read `num_prompt` last tokens of prompts, and `num_generated`
        tokens were chosen in it, each beam's counted."""
        self.num_beam_windows += 1
        self.num_prefill_tokens += num_prompt
        self.num_beam_tokens += num_generated
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()

    @property
    def window_share(self) -> float:
        """Share of the decoded tokens that were made in windows."""
        return self.num_window_tokens / max(self.num_decode_tokens, 1)
