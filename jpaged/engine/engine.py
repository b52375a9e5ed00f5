"""The engine: plans, dispatches compiled steps, and reads their results in one place.

Owns the queues and the device state. Everything here is host code; what changes on the device is
`EngineState`, replaced by each call. If a call fails after its state was donated, the state is made
anew from the host's records: tokens are never lost, only their KV is computed again.
"""

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jpaged.config import EngineConfig
from jpaged.core.batch import Forward
from jpaged.core.beam import BeamOutput
from jpaged.core.beam_rules import Beams
from jpaged.core.step import StepOutput
from jpaged.core.usage import Usage
from jpaged.engine.beam_group import BeamGroup, take_beams
from jpaged.engine.device import Device, MakeState
from jpaged.engine.dispatch import NUM_ADMISSIONS, PrefillRow
from jpaged.engine.lookups import Lookups
from jpaged.engine.request import Request, Sample
from jpaged.engine.results import take_prefill, take_window
from jpaged.engine.roster import Roster
from jpaged.engine.scheduler import Limits, Plan, Prefill, View, plan
from jpaged.engine.stats import EngineStats
from jpaged.engine.usage import CacheUsage, Snapshot, UsageMeter
from jpaged.engine.views import ViewMaker
from jpaged.engine.warm_up import WarmUp
from jpaged.models.prepare import param_bytes
from jpaged.typing import Params

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # device errors after which the engine stops trying


class _Dispatch(NamedTuple):
    """What a program returned, and the pool's use right after it, if someone meters."""

    output: Any
    usage: Usage | None


class Engine:
    """Runs requests to their end, many at a time.

    forward: the model. params: its serving tree. config: resolved. make_state: gives a fresh,
    empty state; called at the start and after a device error. vocab_size: V.
    """

    def __init__(
        self,
        forward: Forward,
        params: Params,
        config: EngineConfig,
        make_state: MakeState,
        vocab_size: int,
    ) -> None:
        assert config.max_num_seqs is not None
        self.config, self.stats = config, EngineStats()
        self._window = forward.window
        self._device = Device(
            forward, jax.block_until_ready(params), config, make_state, vocab_size
        )
        self._views = ViewMaker(config, forward.window, self._device.choice)
        self.roster = Roster(config.max_num_seqs)
        self._num_failures = 0
        self._ended: list[Request] = []  # of which a sample ended, not yet told
        self.meter: UsageMeter | None = None  # set one to have each forward pass weighed
        self.num_blocks = self._device.num_blocks
        self._num_free: int | jax.Array = self.num_blocks - 1
        self._warm_up: WarmUp | None = None

    # --- what callers use ---

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.roster.waiting or self.roster.running)

    def warm_up(self, when: Literal["before", "background"]) -> None:
        """Compiles ahead what plain requests need: all of it now, or beside the first requests, in
        a thread that ends with the engine. What goes wrong is logged. Again does nothing."""
        if self._warm_up is not None or self._device.is_closed:
            return
        self._warm_up = WarmUp(self._device.calls_ahead())
        if when == "before":
            self._warm_up.run()
            return
        self._warm_up.start()
        weakref.finalize(self, self._warm_up.stop).atexit = False

    def add(self, request: Request) -> None:
        """Queues a request. It has been judged: its longest sample fits the pool."""
        self._device.check_open()
        first, *others = request.samples
        first.forks = others
        self.roster.waiting.append(first)

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests where they are; their rows and blocks are free again."""
        samples = [sample for request in requests for sample in request.samples]
        self.roster.drop(samples)
        for sample in samples:
            if sample.finish_reason is None:
                sample.finish("abort")
        self._release_rows()

    def step(self) -> list[Request]:
        """Plans and runs the next dispatches. Returns the requests of which a sample ended.

        Raises what the device raised if it fails MAX_FAILURES times with no window between, or
        before any state was given away; the requests then still wait.
        """
        try:
            self._step()
        except Exception as error:
            is_state_lost = self._device.is_state_lost
            self.restart()
            if not is_state_lost:
                raise
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._num_failures = 0
                raise
            logger.warning("a device call failed, its rows are computed again: %s", error)
        ended, self._ended = self._ended, []
        return ended

    def abort_and_restart(self, requests: Iterable[Request]) -> None:
        """Ends requests after an interrupt or error that may have struck anywhere."""
        if self._device.is_closed:
            return
        self.restart()
        self._ended.clear()
        self.abort(requests)

    def restart(self) -> None:
        """Gives up the device state. Running requests wait again, with the tokens they have."""
        self.roster.restart()
        self._num_free = self.num_blocks - 1
        self._device.give_up_state()

    def update_params(self, params: Params) -> None:
        """Takes new weights of the same shapes. Nothing computed with the old ones is used again:
        running requests keep their tokens and compute their KV anew."""
        self._device.check_open()
        for sample in self.roster.running[::-1]:
            self.roster.preempt(sample)
        for sample in self.roster.waiting:
            sample.forget_weights()
        self._release_rows()
        self._device.update_params(params)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing done, while requests run (as vLLM)."""
        if self.roster.running:
            return False
        self._device.reset_hashes()
        return True

    def close(self) -> None:
        """Frees the device memory: state and weights. Further use raises EngineClosedError."""
        if self._warm_up is not None:
            self._warm_up.stop()
        self._device.close()
        self._num_free = 0
        self.roster = Roster(0)
        if self._warm_up is not None:
            self._warm_up.join()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no row holds, cached ones included."""
        if not isinstance(self._num_free, int):
            self._num_free = int(jax.device_get(self._num_free))
        return self._num_free

    def snapshot(self) -> Snapshot:
        """Who runs, how the pool is used, and the counts so far. Reads the device."""
        return Snapshot(
            num_running=len(self.roster.running),
            num_waiting=len(self.roster.waiting),
            cache=self._cache_usage(jax.device_get(self._device.usage())),
            stats=dataclasses.replace(self.stats),
            implementation=self.config.implementation,
            attention_implementation=self.config.attention_implementation,
            kv_cache_dtype=self.config.cache.kv_cache_dtype,
            quantization=self.config.quantization,
            weight_bytes=param_bytes(self._device.params),
        )

    def _cache_usage(self, usage: Usage) -> CacheUsage:
        return CacheUsage(
            block_size=self.config.cache.block_size,
            num_blocks=self.num_blocks - 1,
            **{name: int(count) for name, count in vars(usage).items()},
        )

    def _weighed(self, output: Any) -> _Dispatch:
        return _Dispatch(output, None if self.meter is None else self._device.usage())

    def _record(self, dispatch: _Dispatch, num_new: Sequence[int]) -> None:
        if self.meter is not None and dispatch.usage is not None:
            self.meter.record(self._cache_usage(dispatch.usage), num_new)

    def _growth(self, output: StepOutput) -> list[int]:
        """What each pass of a window that ran anything is to be recorded with."""
        num_new = [num for num in output.granted.sum(axis=1).tolist() if num]
        return num_new if self._window is None else [0] * len(num_new)

    # --- one step ---

    def _step(self) -> None:
        chosen, waiting, lookups = self._plan()
        self._admit(
            [waiting[place] for place in chosen.admitted],
            [lookups.view(place) for place in chosen.admitted],
        )
        prefills, beams = self._prefills(chosen), self._beams(chosen)
        windows = self._windows(chosen)
        self._device.set_masks([s for samples, _ in windows for s in samples if s.matcher])
        dispatches = (
            [self._weighed(self._device.step(rows)) for rows in prefills],
            [self._weighed(self._device.window(*window)) for window in windows],
            [self._weighed(self._device.beam_window(g, chosen.num_beam_steps)) for g in beams],
        )
        prefilled, decoded, searched = jax.device_get(dispatches)
        for rows, one in zip(prefills, prefilled, strict=True):
            self._record(one, [0])
            self._take_prefill(rows, one.output)
        for (samples, num_steps), one in zip(windows, decoded, strict=True):
            self._record(one, self._growth(one.output))
            self._take_window(samples, one.output, num_steps)
        for groups, one in zip(beams, searched, strict=True):
            self._record(one, [0] * chosen.num_beam_steps)
            self._take_beams(groups, *one.output)
        self._retire()
        if not self.has_unfinished:
            self._num_failures = 0

    def _plan(self) -> tuple[Plan, list[Sample], Lookups]:
        """The next plan, after the preemptions it asked for, and the waiting list it is about."""
        for sample in self.roster.running:
            if isinstance(sample, BeamGroup) and sample.must_spread:
                self._device.spread(sample)
                sample.is_spread = True
        may_admit = True
        while True:
            waiting = list(self.roster.waiting) if may_admit else []
            lookups = Lookups(waiting, self._look_up, self._views.waiting_keys)
            views = [self._views.running(sample) for sample in self.roster.running]
            chosen = plan(views, lookups, self._limits(may_admit))
            if not chosen.preempt:
                return chosen, waiting, lookups
            self._preempt_youngest()
            may_admit = False

    def _limits(self, may_admit: bool) -> Limits:
        config = self.config
        return Limits(
            block_size=config.cache.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            num_decode_steps=config.num_decode_steps,
            free_rows=self.roster.num_free_rows,
            free_blocks=self.num_free_blocks,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            watermark_blocks=int(config.cache.watermark * self.num_blocks),
            may_admit=may_admit,
        )

    def _look_up(self, samples: Sequence[Sample]) -> list[View]:
        """Views of at most NUM_ADMISSIONS waiting samples, with what the prefix cache has."""
        if not self.config.cache.enable_prefix_caching:
            return [self._views.waiting(sample, 0) for sample in samples]
        num_cached, num_free_hits = jax.device_get(self._device.match(samples))
        return [
            self._views.waiting(sample, int(num_cached[i]), int(num_free_hits[i]))
            for i, sample in enumerate(samples)
        ]

    def _admit(self, samples: Sequence[Sample], views: Sequence[View]) -> None:
        """Seats waiting samples."""
        if not samples:
            return
        self.roster.seat(samples)
        self._num_free = self._device.admit(samples)
        for sample, view in zip(samples, views, strict=True):
            sample.context_len, sample.num_blocks = view.context_len, view.num_blocks
            has_cache = self.config.cache.enable_prefix_caching
            self.stats.count_admission(sample, view.context_len, has_cache=has_cache)

    def _prefills(self, chosen: Plan) -> list[list[PrefillRow]]:
        """The plan's prefill, admitted samples included, as the rows of one step, forks behind all
        others. What is scored over the whole vocabulary has a step to itself, for the memory."""
        together: list[Prefill] = []
        alone: list[list[Prefill]] = []
        for p in chosen.prefill:
            is_wide = self._views.is_wide(self.roster.running[p.index])
            alone.append([p]) if is_wide else together.append(p)
        steps = [together, *alone] if together else alone
        return [self._prefill_rows(step) for step in steps]

    def _prefill_rows(self, prefills: Sequence[Prefill]) -> list[PrefillRow]:
        rows, forks = [], []
        for p in prefills:
            sample = self.roster.running[p.index]
            for child in sample.forks[: p.num_forks]:
                forks.append(PrefillRow(child, self.roster.take_rows(1)[0], 0, parent=len(rows)))
            num_rows = sample.num_live if isinstance(sample, BeamGroup) and sample.is_spread else 1
            rows += [
                PrefillRow(sample, row_id, p.num_new // num_rows)
                for row_id in sample.row_ids[:num_rows]
            ]
        return rows + forks

    def _windows(self, chosen: Plan) -> list[tuple[list[Sample], int]]:
        """Who decodes, and how many steps: in a window, and beside it one step at a time."""
        running = self.roster.running
        windows = [(chosen.decode, chosen.num_steps), (chosen.stepwise, 1)]
        return [([running[index] for index in at], steps) for at, steps in windows if at]

    def _beams(self, chosen: Plan) -> list[list[BeamGroup]]:
        """The plan's beam groups, by width."""
        groups: dict[int, list[BeamGroup]] = {}
        for index in chosen.beams:
            group = self.roster.running[index]
            assert isinstance(group, BeamGroup)
            groups.setdefault(group.width, []).append(group)
        return list(groups.values())

    # --- what came back ---

    def _take_prefill(self, rows: Sequence[PrefillRow], output: StepOutput) -> None:
        result = take_prefill(rows, output, block_size=self.config.cache.block_size)
        self.roster.running.extend(result.seated)
        self.roster.waiting.extendleft(reversed(result.unseated))
        self.roster.give_back(result.unused_rows)
        self._num_free = int(output.num_free_blocks)
        self.stats.count_prefill(int(output.granted.sum()), int(output.is_sampled.sum()))

    def _take_window(self, samples: Sequence[Sample], output: StepOutput, num_steps: int) -> None:
        block_size = self.config.cache.block_size
        num_sampled = take_window(samples, output, num_steps, block_size=block_size)
        self._num_free = int(output.num_free_blocks[-1])
        # Prefill may go well between windows that fail, so it proves nothing.
        self._num_failures = 0
        self.stats.count_window(num_steps, num_sampled)

    def _take_beams(self, groups: Sequence[BeamGroup], beams: Beams, output: BeamOutput) -> None:
        self.stats.count_beams(*take_beams(groups, beams, output, self.config.cache.block_size))
        self._num_free = int(output.num_free_blocks)
        self._num_failures = 0

    def _retire(self) -> None:
        """Empties the rows of samples that ended."""
        ended = [sample for sample in self.roster.running if sample.finish_reason]
        # First, so that a release that fails does not lose them.
        self._ended.extend(dict.fromkeys(sample.request for sample in ended))
        for sample in ended:
            self.roster.leave(sample)
        self._release_rows()

    def _release_rows(self) -> None:
        leaving = self.roster.leaving
        while leaving:
            group = leaving[:NUM_ADMISSIONS]
            self._num_free = self._device.release(group)
            del leaving[: len(group)]
            self.roster.give_back(group)

    def _preempt_youngest(self) -> None:
        self.roster.preempt(self.roster.running[-1])
        self._release_rows()
        self.stats.num_preemptions += 1
