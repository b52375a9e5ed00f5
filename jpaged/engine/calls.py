"""The compiled calls that an engine makes, each a program together with all of its arguments.

A call is made as it is, or compiled ahead of its time with abstract arrays in the place of weights
and state. Both go through here, so that what is compiled ahead is what is called later.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.batch import Forward
from jpaged.core.rows import Admissions
from jpaged.core.sampling import Sampler
from jpaged.core.state import EngineState
from jpaged.core.step import StepInputs
from jpaged.engine import compiled
from jpaged.engine.dispatch import (
    NUM_ADMISSIONS,
    TOP_WIDTHS,
    Buckets,
    SamplerChoice,
    pack_admissions,
    pack_step,
    pad_rows,
)
from jpaged.engine.request import Sample
from jpaged.typing import Params

Call = functools.partial[Any]
"""Made by calling it; see `compile_ahead` for the other use."""

NamedCall = tuple[str, Call]


class Calls(NamedTuple):
    """The calls of one engine. config: resolved."""

    forward: Forward
    config: EngineConfig
    buckets: Buckets

    def match(self, state: EngineState, asked: Admissions) -> Call:
        """What the prefix cache has, see `match_admissions`."""
        return Call(compiled.match_admissions, state, asked, window=self.forward.window)

    def admit(self, state: EngineState, admissions: Admissions) -> Call:
        """Seats sequences."""
        return Call(compiled.admit, state, admissions, window=self.forward.window)

    def release(self, state: EngineState, row_ids: Sequence[int]) -> Call:
        """Empties at most NUM_ADMISSIONS rows."""
        return Call(compiled.release, state, pad_rows(row_ids, NUM_ADMISSIONS))

    def step(
        self,
        params: Params,
        state: EngineState,
        inputs: StepInputs,
        *,
        num_tokens: int,
        sampler: Sampler,
        num_prompt_top: int | None,
    ) -> Call:
        """A step of prefill; num_tokens: a bucket."""
        return Call(
            compiled.run_step,
            params,
            state,
            inputs,
            forward=self.forward,
            num_tokens=num_tokens,
            num_decode_rows=0,
            sampler=sampler,
            num_prompt_top=num_prompt_top,
        )

    def window(
        self, params: Params, state: EngineState, row_ids: Any, *, num_steps: int, sampler: Sampler
    ) -> Call:
        """A window of decoding; row_ids: i32[a bucket's size]."""
        arguments, length = (params, state, row_ids), num_steps
        if self._is_flexible(sampler):
            arguments, length = (*arguments, np.int32(num_steps)), self.config.num_decode_steps
        return Call(
            compiled.run_window,
            *arguments,
            forward=self.forward,
            num_steps=length,
            sampler=sampler,
        )

    def _is_flexible(self, sampler: Sampler) -> bool:
        """Whether one program serves windows of any length, as programs take much memory on a CPU.

        Not on a GPU, which would ask the host after each step whether there is another; and not
        where a whole vocabulary is told, for results have room for the longest window.
        """
        is_narrow = sampler.num_top <= TOP_WIDTHS[-1]
        return self.config.num_decode_steps > 1 and is_narrow and jax.default_backend() == "cpu"

    def pack(self, samples: Sequence[Sample], row_ids: Sequence[int], width: int) -> Admissions:
        """At most NUM_ADMISSIONS samples for the given rows; width: most tokens, a bucket."""
        return pack_admissions(
            samples,
            row_ids,
            width=width,
            num_stop_ids=self.config.max_stop_ids,
            has_cache=self.config.cache.enable_prefix_caching,
        )

    def of_plain_requests(
        self, params: Params, state: EngineState, choice: SamplerChoice
    ) -> Iterator[NamedCall]:
        """Every call that requests can lead to which ask for nothing but tokens; those that come
        first, or most often, first.

        params, state: abstract arrays will do.
        """
        sampler, J = choice.sampler(()), self.config.num_decode_steps
        fewest_rows, *more_rows = self.buckets.prefill_rows
        shortest, *longer = self.buckets.prompt_lens
        yield from self._seatings(state, shortest)
        yield "release of rows", self.release(state, ())
        yield from self._prefills(params, state, sampler, fewest_rows)
        yield from self._windows(params, state, sampler, J)
        for width in longer:
            yield from self._seatings(state, width)
        if J > 1 and not self._is_flexible(sampler):
            yield from self._windows(params, state, sampler, 1)
        for num_rows in more_rows:
            yield from self._prefills(params, state, sampler, num_rows)

    def _seatings(self, state: EngineState, width: int) -> Iterator[NamedCall]:
        nobody = self.pack((), (), width)
        if self.config.cache.enable_prefix_caching:
            yield f"look-up of {width} tokens", self.match(state, nobody)
        yield f"admission of {width} tokens", self.admit(state, nobody)

    def _prefills(
        self, params: Params, state: EngineState, sampler: Sampler, num_rows: int
    ) -> Iterator[NamedCall]:
        for num_tokens in self.buckets.tokens:
            call = self.step(
                params,
                state,
                pack_step((), num_rows),
                num_tokens=num_tokens,
                sampler=sampler,
                num_prompt_top=None,
            )
            yield f"prefill of {num_tokens} tokens in {num_rows} rows", call

    def _windows(
        self, params: Params, state: EngineState, sampler: Sampler, num_steps: int
    ) -> Iterator[NamedCall]:
        for num_rows in self.buckets.decode_rows:
            nobody: Any = pad_rows((), num_rows)
            call = self.window(params, state, nobody, num_steps=num_steps, sampler=sampler)
            yield f"{num_steps} decode steps of {num_rows} rows", call


def shapes_of(tree: Any) -> Any:
    """Abstract arrays in the place of a tree's arrays, which may be deleted ones."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def compile_ahead(call: Call) -> None:
    """Compiles a call's program, or fetches it from the persistent cache, and makes no call.

    JAX keeps one executable for a program and its arguments' shapes, whether it was lowered or
    called first (tests/engine/test_warm_up.py sees to it), so that a later call compiles nothing.
    """
    program: Any = call.func
    program.lower(*call.args, **call.keywords).compile()
