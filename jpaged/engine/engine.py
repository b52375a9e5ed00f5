"""The engine: plans, dispatches compiled steps, and reads their results in one place.

Owns the device state and the queues. Everything here is host code; what changes on the device is
`EngineState`, replaced by each call. If a call fails after its state was donated, the state is made
anew from the host's records: tokens are never lost, only their KV is computed again.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.batch import Forward
from jpaged.core.state import EngineState
from jpaged.core.step import StepOutput
from jpaged.engine import compiled
from jpaged.engine.dispatch import (
    NUM_ADMISSIONS,
    Buckets,
    PrefillRow,
    fit,
    pack_admissions,
    pack_step,
    pad_rows,
)
from jpaged.engine.request import Request, Sample
from jpaged.engine.results import take_prefill, take_window
from jpaged.engine.scheduler import Limits, Plan, SeqView, plan
from jpaged.engine.stats import EngineStats
from jpaged.errors import EngineClosedError
from jpaged.typing import Params

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # device errors after which the engine stops trying

MakeState = Callable[[], EngineState]


class Engine:
    """Runs requests to their end, many at a time.

    forward: the model. params: its serving tree. config: resolved. make_state: gives a fresh,
    empty state; called at the start and after a device error.
    """

    def __init__(
        self, forward: Forward, params: Params, config: EngineConfig, make_state: MakeState
    ) -> None:
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None, "not a resolved config"
        self.config, self.stats = config, EngineStats()
        self._forward, self._make_state = forward, make_state
        self._params = jax.block_until_ready(params)
        self._waiting: deque[Sample] = deque()
        self._running: list[Sample] = []
        self._weights_version = self._num_failures = 0
        self._is_closed = False
        self._state: EngineState | None = None  # to be made when next needed
        state = self._live_state
        self._buckets = Buckets.of(
            config.max_num_seqs, config.max_num_batched_tokens, state.rows.token_ids.shape[1]
        )
        self.num_blocks = state.pool.ref_count.shape[0]
        self._num_free: int | jax.Array = self.num_blocks - 1
        self._free_rows = self._all_rows()
        self._leaving: list[int] = []

    # --- what callers use ---

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queues a request. It has been judged: its longest sample fits the pool."""
        self._live_state  # noqa: B018 - raises when closed
        first, *others = request.samples
        first.forks = others
        self._waiting.append(first)

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests where they are; their rows and blocks are free again."""
        gone = {id(sample) for request in requests for sample in request.samples}
        for sample in [s for s in self._running if id(s) in gone]:
            self._leave(sample)
        self._waiting = deque(s for s in self._waiting if id(s) not in gone)
        for request in requests:
            for sample in request.samples:
                if sample.finish_reason is None:
                    sample.finish("abort")
        self._release_rows()

    def step(self) -> list[Request]:
        """Plans and runs the next dispatches. Returns the requests that finished.

        Raises what the device raised if it fails MAX_FAILURES times with no window between, or
        before any state was given away; the requests then still wait.
        """
        try:
            finished = self._step()
        except Exception as error:
            is_state_lost = self._is_state_lost()
            self.restart()
            if not is_state_lost:
                raise
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._num_failures = 0
                raise
            logger.warning("a device call failed, its rows are computed again: %s", error)
            return []
        return finished

    def abort_and_restart(self, requests: Iterable[Request]) -> None:
        """Ends requests after an interrupt or error that may have struck anywhere."""
        if self._is_closed:
            return
        self.restart()
        self.abort(requests)

    def restart(self) -> None:
        """Gives up the device state. Running requests wait again, with the tokens they have.

        A new state is made when next needed, and not here: what may take long would invite a
        second interrupt.
        """
        lost, self._state = self._state, None
        for sample in self._running:
            sample.leave_row()
        unfinished = [sample for sample in self._running if sample.finish_reason is None]
        self._waiting, self._running = deque([*unfinished, *self._waiting]), []
        self._free_rows, self._leaving = self._all_rows(), []
        self._num_free = self.num_blocks - 1
        # The traceback of what went wrong may hold the old pool, and there is no room for two.
        for array in jax.tree.leaves(lost):
            array.delete()

    def update_params(self, params: Params) -> None:
        """Takes new weights of the same shapes. Nothing computed with the old ones is used again:
        running requests keep their tokens and compute their KV anew."""
        self._live_state  # noqa: B018 - raises when closed
        for sample in self._running[::-1]:
            self._leave(sample)
            self._waiting.appendleft(sample)
        self._release_rows()
        self._params = params
        self._weights_version += 1
        version = jnp.uint32(self._weights_version)
        self._state = replace(self._live_state, weights_version=version)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing done, while requests run (as vLLM)."""
        if self._running:
            return False
        state = self._live_state
        self._state = replace(state, pool=compiled.reset_hashes(state.pool))
        return True

    def close(self) -> None:
        """Frees the device memory: state and weights. Further use raises EngineClosedError."""
        self._state, self._params, self._num_free, self._is_closed = None, {}, 0, True
        self._waiting.clear()
        self._running.clear()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no row holds, cached ones included."""
        if not isinstance(self._num_free, int):
            self._num_free = int(jax.device_get(self._num_free))
        return self._num_free

    # --- one step ---

    def _step(self) -> list[Request]:
        chosen, candidates = self._plan()
        self._admit(candidates[: chosen.num_admitted])
        prefill, decoding = self._rows_of(chosen)
        outputs: list[StepOutput | None] = [None, None]
        if prefill:
            outputs[0] = self._run_prefill(prefill)
        if decoding:
            outputs[1] = self._run_window(decoding, chosen.num_steps)
        read: list[Any] = jax.device_get(outputs)
        if read[0] is not None:
            self._take_prefill(prefill, read[0])
        if read[1] is not None:
            self._take_window(decoding, read[1], chosen.num_steps)
        finished = self._retire()
        if not self.has_unfinished:
            self._num_failures = 0
        return finished

    def _plan(self) -> tuple[Plan, list[tuple[Sample, SeqView]]]:
        """The next plan, after the preemptions it asked for."""
        may_admit = True
        while True:
            candidates = self._look_up_waiting() if may_admit else []
            limits = self._limits(may_admit)
            views = [self._view(sample) for sample in self._running]
            chosen = plan(views, [view for _, view in candidates], limits)
            if not chosen.preempt:
                return chosen, candidates
            self._preempt_youngest()
            may_admit = False

    def _limits(self, may_admit: bool) -> Limits:
        config = self.config
        return Limits(
            block_size=config.cache.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            num_decode_steps=config.num_decode_steps,
            free_rows=len(self._free_rows),
            free_blocks=self.num_free_blocks,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            may_admit=may_admit,
        )

    def _view(self, sample: Sample) -> SeqView:
        # The last to hold a shared block has it for itself.
        is_shared = sample.is_tail_shared and any(
            other.is_tail_shared for other in sample.request.samples if other is not sample
        )
        return SeqView(
            num_tokens=sample.num_tokens,
            context_len=sample.context_len,
            num_blocks=sample.num_blocks,
            max_len=sample.request.max_len,
            is_tail_shared=is_shared,
            num_forks=len(sample.forks),
        )

    def _look_up_waiting(self) -> list[tuple[Sample, SeqView]]:
        """Waiting samples that may be admitted now, with what the prefix cache has for them."""
        most = min(len(self._waiting), len(self._free_rows))
        budget = self.config.max_num_batched_tokens or 0
        found: list[tuple[Sample, SeqView]] = []
        while len(found) < most and budget > 0:
            group = [self._waiting[i] for i in range(len(found), most)][:NUM_ADMISSIONS]
            num_cached, num_free_hits = self._look_up(group)
            for sample, cached, free in zip(group, num_cached, num_free_hits, strict=False):
                view = SeqView(
                    num_tokens=sample.num_tokens,
                    context_len=int(cached),
                    num_blocks=int(cached) // self.config.cache.block_size,
                    max_len=sample.request.max_len,
                    num_forks=len(sample.forks),
                    num_free_hits=int(free),
                )
                found.append((sample, view))
                budget -= view.gap
        return found

    def _look_up(self, group: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        if not self.config.cache.enable_prefix_caching:
            return np.zeros(len(group), np.int32), np.zeros(len(group), np.int32)
        # Any row but the null row will do: nothing is seated.
        admissions = self._pack(group, [1] * len(group))
        return jax.device_get(compiled.match_admissions(self._live_state, admissions))

    def _pack(self, group: Sequence[Sample], row_ids: Sequence[int]):
        return pack_admissions(
            group,
            row_ids,
            prompt_lens=self._buckets.prompt_lens,
            num_stop_ids=self.config.max_stop_ids,
            reads_cache=self.config.cache.enable_prefix_caching,
        )

    def _admit(self, chosen: Sequence[tuple[Sample, SeqView]]) -> None:
        """Seats the samples from the front of the waiting list."""
        for start in range(0, len(chosen), NUM_ADMISSIONS):
            group = chosen[start : start + NUM_ADMISSIONS]
            row_ids = [heapq.heappop(self._free_rows) for _ in group]
            admissions = self._pack([sample for sample, _ in group], row_ids)
            self._state, _ = compiled.admit(self._live_state, admissions)
            for (sample, view), row_id in zip(group, row_ids, strict=True):
                self._waiting.popleft()
                sample.row_id = row_id
                sample.context_len, sample.num_blocks = view.context_len, view.num_blocks
                self._running.append(sample)
                self.stats.count_admission(sample, view.context_len)

    def _rows_of(self, chosen: Plan) -> tuple[list[PrefillRow], list[Sample]]:
        """The plan's rows, forks behind all others. Admitted samples have joined the running."""
        decoding = [self._running[index] for index in chosen.decode]
        rows = [
            PrefillRow(self._running[p.index], self._running[p.index].row_id or 0, p.num_new)
            for p in chosen.prefill
        ]
        for place, p in enumerate(chosen.prefill):
            for child in rows[place].sample.forks[: p.num_forks]:
                rows.append(PrefillRow(child, heapq.heappop(self._free_rows), 0, parent=place))
        return rows, decoding

    def _run_prefill(self, rows: Sequence[PrefillRow]) -> StepOutput:
        inputs = pack_step(rows, fit(len(rows), self._buckets.prefill_rows))
        num_tokens = fit(sum(row.num_new for row in rows), self._buckets.tokens)
        self._state, output = compiled.run_step(
            self._params,
            self._live_state,
            inputs,
            forward=self._forward,
            num_tokens=num_tokens,
            num_decode_rows=0,
        )
        return output

    def _run_window(self, samples: Sequence[Sample], num_steps: int) -> StepOutput:
        row_ids = [sample.row_id or 0 for sample in samples]
        size = fit(len(samples), self._buckets.decode_rows)
        self._state, output = compiled.run_window(
            self._params,
            self._live_state,
            pad_rows(row_ids, size),
            forward=self._forward,
            num_steps=num_steps,
        )
        return output

    # --- what came back ---

    def _take_prefill(self, rows: Sequence[PrefillRow], output: StepOutput) -> None:
        result = take_prefill(rows, output, block_size=self.config.cache.block_size)
        self._running.extend(result.seated)
        self._waiting.extendleft(reversed(result.unseated))
        for row_id in result.unused_rows:
            heapq.heappush(self._free_rows, row_id)
        self._num_free = int(output.num_free_blocks)
        self.stats.count_prefill(int(output.granted.sum()), int(output.is_sampled.sum()))

    def _take_window(self, samples: Sequence[Sample], output: StepOutput, num_steps: int) -> None:
        block_size = self.config.cache.block_size
        num_sampled = take_window(samples, output, num_steps, block_size=block_size)
        self._num_free = int(output.num_free_blocks[-1])
        # Prefill may go well between windows that fail, so it proves nothing.
        self._num_failures = 0
        self.stats.count_window(num_steps, num_sampled)

    def _retire(self) -> list[Request]:
        """Empties the rows of samples that ended. Returns requests that are complete."""
        ended = [sample for sample in self._running if sample.finish_reason]
        for sample in ended:
            self._leave(sample)
        self._release_rows()
        requests = dict.fromkeys(sample.request for sample in ended)
        return [request for request in requests if request.is_finished]

    # --- rows and state ---

    def _leave(self, sample: Sample) -> None:
        assert sample.row_id is not None
        self._running.remove(sample)
        self._leaving.append(sample.row_id)
        sample.leave_row()

    def _release_rows(self) -> None:
        while self._leaving:
            group = self._leaving[:NUM_ADMISSIONS]
            self._state, self._num_free = compiled.release(
                self._live_state, pad_rows(group, NUM_ADMISSIONS)
            )
            del self._leaving[: len(group)]
            for row_id in group:
                heapq.heappush(self._free_rows, row_id)

    def _preempt_youngest(self) -> None:
        sample = self._running[-1]
        self._leave(sample)
        self._release_rows()
        self._waiting.appendleft(sample)
        self.stats.num_preemptions += 1

    def _all_rows(self) -> list[int]:
        return list(range(1, (self.config.max_num_seqs or 0) + 1))

    def _is_state_lost(self) -> bool:
        return self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))

    @property
    def _live_state(self) -> EngineState:
        if self._is_closed:
            raise EngineClosedError("this engine was closed; make a new one")
        if self._state is None:
            version = jnp.uint32(self._weights_version)
            self._state = replace(self._make_state(), weights_version=version)
        return self._state
