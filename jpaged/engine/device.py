"""The device's side of an engine: weights, the state, and the compiled calls that replace it.

Every call donates the state and keeps the one it returns. Nothing is read back here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.core.batch import Forward
from jpaged.core.beam import BeamOutput
from jpaged.core.beam_rules import Beams
from jpaged.core.logits_rules import LogitsRules
from jpaged.core.state import EngineState
from jpaged.core.step import StepOutput
from jpaged.core.usage import Usage
from jpaged.engine import compiled
from jpaged.engine.beam_group import BeamGroup, pack_beams, pack_spread
from jpaged.engine.calls import Calls, NamedCall, shapes_of
from jpaged.engine.dispatch import (
    NUM_ADMISSIONS,
    Buckets,
    PrefillRow,
    SamplerChoice,
    fit,
    pack_masks,
    pack_rules,
    pack_step,
    pad_rows,
)
from jpaged.engine.request import Sample
from jpaged.errors import EngineClosedError
from jpaged.typing import Array, Params

MakeState = Callable[[], EngineState]


class Device:
    """Runs what the engine plans. Raises what the device raises, and EngineClosedError."""

    def __init__(
        self,
        forward: Forward,
        params: Params,
        config: EngineConfig,
        make_state: MakeState,
        vocab_size: int,
    ) -> None:
        self.params = params
        self._config, self._make_state = config, make_state
        self._weights_version = 0
        self._is_closed = False
        self._state: EngineState | None = None  # to be made when next needed
        self.num_blocks = self.state.pool.ref_count.shape[0]
        self.choice = SamplerChoice(config, vocab_size)
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None, "not a resolved config"
        self._buckets = Buckets.of(
            config.max_num_seqs, config.max_num_batched_tokens, self.state.rows.token_ids.shape[1]
        )
        self._calls = Calls(forward, config, self._buckets)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def state(self) -> EngineState:
        """The state; a new one if the last was lost."""
        self.check_open()
        if self._state is None:
            version = jnp.uint32(self._weights_version)
            self._state = replace(self._make_state(), weights_version=version)
        return self._state

    @property
    def is_state_lost(self) -> bool:
        """Whether a call that failed had been given the state."""
        return self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))

    def check_open(self) -> None:
        """Raises EngineClosedError if it was closed."""
        if self._is_closed:
            raise EngineClosedError("this engine was closed; make a new one")

    def give_up_state(self) -> None:
        """Drops the state. A new one is made when next needed, and not here: what may take long
        would invite a second interrupt."""
        lost, self._state = self._state, None
        # The traceback of what went wrong may hold the old pool, and there is no room for two.
        for array in jax.tree.leaves(lost):
            array.delete()

    def update_params(self, params: Params) -> None:
        """Takes new weights: no block filled with the old ones is found any more."""
        self.params = params
        self._weights_version += 1
        version = jnp.uint32(self._weights_version)
        self._state = replace(self.state, weights_version=version)

    def close(self) -> None:
        """Frees state and weights."""
        self._state, self.params, self._is_closed = None, {}, True

    def calls_ahead(self) -> Iterator[NamedCall]:
        """The calls that plain requests lead to, by name, of abstract arrays: another thread may
        compile them while this one replaces the state."""
        params, state = shapes_of((self.params, self.state))
        return self._calls.of_plain_requests(params, state, self.choice)

    # --- compiled calls ---

    def match(self, samples: Sequence[Sample]) -> tuple[Array, Array]:
        """What the prefix cache has for at most NUM_ADMISSIONS samples, see `match_admissions`."""
        # Any row but the null row will do: nothing is seated.
        asked = self._pack(samples, [1] * len(samples))
        return self._calls.match(self.state, asked)()

    def admit(self, samples: Sequence[Sample]) -> Array:
        """Seats samples, one or more, in the rows they were given. Returns the free blocks."""
        num_free: Any = None
        for start in range(0, len(samples), NUM_ADMISSIONS):
            group = samples[start : start + NUM_ADMISSIONS]
            admissions = self._pack(group, [sample.row_id for sample in group])
            self._state, num_free = self._calls.admit(self.state, admissions)()
            if ruled := [sample for sample in group if sample.request.rules is not None]:
                self._set_rules(compiled.set_rules, *pack_rules(ruled, [s.row_id for s in ruled]))
        return num_free

    def set_masks(self, samples: Sequence[Sample]) -> None:
        """Tells rows that follow grammars what they may draw next."""
        for start in range(0, len(samples), NUM_ADMISSIONS):
            group = samples[start : start + NUM_ADMISSIONS]
            self._set_rules(compiled.set_masks, *pack_masks(group))

    def _set_rules(self, program: Callable[..., LogitsRules], row_ids: Any, new: Any) -> None:
        state = self.state
        sampling = state.sampling
        rules = program(sampling.rules, row_ids, new)
        self._state = replace(state, sampling=replace(sampling, rules=rules))

    def _pack(self, samples: Sequence[Sample], row_ids: Sequence[int]):
        width = fit(max(len(sample.token_ids) for sample in samples), self._buckets.prompt_lens)
        return self._calls.pack(samples, row_ids, width)

    def spread(self, group: BeamGroup) -> None:
        """Forks a beam group's leader into rows for all its live beams."""
        width = fit(max(len(tokens) for tokens in group.sequences), self._buckets.prompt_lens)
        self._state = compiled.spread(self.state, **pack_spread(group, width))

    def step(self, rows: Sequence[PrefillRow]) -> StepOutput:
        """A step of prefill."""
        inputs = pack_step(rows, fit(len(rows), self._buckets.prefill_rows))
        num_tokens = fit(sum(row.num_new for row in rows), self._buckets.tokens)
        samples = [row.sample for row in rows]
        self._state, output = self._calls.step(
            self.params,
            self.state,
            inputs,
            num_tokens=num_tokens,
            sampler=self.choice.sampler(samples),
            num_prompt_top=self.choice.num_prompt_top(samples),
        )()
        return output

    def window(self, samples: Sequence[Sample], num_steps: int) -> StepOutput:
        """A window of decoding."""
        row_ids = [sample.row_id for sample in samples]
        size = fit(len(samples), self._buckets.decode_rows)
        self._state, output = self._calls.window(
            self.params,
            self.state,
            pad_rows(row_ids, size),
            num_steps=num_steps,
            sampler=self.choice.sampler(samples),
        )()
        return output

    def beam_window(self, groups: Sequence[BeamGroup], num_steps: int) -> tuple[Beams, BeamOutput]:
        """A window of beam search, of groups of one width."""
        width = groups[0].width
        # One row alone would multiply vectors, which a CPU does slowly.
        num_groups = fit(max(len(groups), 2 if width == 1 else 1), self._buckets.beam_groups)
        max_tokens = max(group.max_tokens for group in groups)
        num_eos_ids = max(len(group.eos_ids) for group in groups)
        max_tokens = fit(max_tokens, self._buckets.beam_tokens)
        beams = pack_beams(groups, num_groups, max_tokens, self._config.max_stop_ids + 1)
        self._state, beams, output = compiled.run_beams(
            self.params,
            self.state,
            beams,
            forward=self._calls.forward,
            num_steps=num_steps,
            num_candidates=(1 + max(num_eos_ids, 1)) * width,
        )
        return beams, output

    def release(self, row_ids: Sequence[int]) -> Array:
        """Empties at most NUM_ADMISSIONS rows. Returns the number of free blocks."""
        self._state, num_free = self._calls.release(self.state, row_ids)()
        return num_free

    def usage(self) -> Usage:
        """How the pool is used now."""
        return compiled.read_usage(self.state)

    def reset_hashes(self) -> None:
        """Forgets all cached prefixes."""
        state = self.state
        self._state = replace(state, pool=compiled.reset_hashes(state.pool))
