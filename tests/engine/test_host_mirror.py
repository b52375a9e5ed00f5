"""Random lives of the whole engine: the host's records must say what the device has, always.

The scheduler plans with `context_len`, `num_blocks` and shared tails that the host works out for
itself. If one drifts from the device, a plan asks for blocks that are not there, and a request
waits for ever or preempts in vain. Tokens are checked one by one against plain Python.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jpaged.core import sampling
from jpaged.core.logits_rules import History
from jpaged.core.state import check_invariants
from jpaged.engine.beam_group import BeamGroup
from jpaged.engine.dispatch import _pack_sampling
from jpaged.errors import RequestError, RequestTooLongError
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.core.scripted import counting_params, next_logits
from tests.engine.counting import make_counting_engine
from tests.engine.test_beam_search import assert_found

POOLS = {
    "roomy": {"num_blocks": 64, "num_decode_steps": 3},
    "tight": {"num_blocks": 9, "num_decode_steps": 3},
    "chunks": {"num_blocks": 9, "num_decode_steps": 1, "long_prefill_token_threshold": 3},
    "one row": {"num_blocks": 9, "num_decode_steps": 8, "max_num_seqs": 1},
    "one token": {
        "num_blocks": 9,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "num_decode_steps": 256,
    },
    "small blocks": {"num_blocks": 33, "block_size": 1, "num_decode_steps": 3},
    "no cache": {"num_blocks": 9, "num_decode_steps": 3, "enable_prefix_caching": False},
}
MOST_STEPS = 2000


@jax.jit
def _sample(rows, index, history, logits):
    return sampling.sample(rows, index, history, logits, is_sampling=jnp.ones(8, bool)).tokens


def next_token(sample, tokens: list[int], shift: int) -> int:
    """The token that follows `tokens`, drawn with nobody else around."""
    rows = _pack_sampling([sample], 16)
    logits = np.zeros((8, 50), np.float32)
    logits[0] = next_logits(tokens, shift)
    index, position = (np.full(8, x, np.int32) for x in (sample.index, len(tokens)))
    history = History(position[:, None], position, position)
    return int(_sample(rows, index, history, logits)[0])


def _rows_in_use(sample) -> list[int]:
    """The rows that hold something: of a group, those of its live beams."""
    if isinstance(sample, BeamGroup):
        return sample.row_ids[: sample.num_live if sample.is_spread else 1]
    return sample.row_ids


def _tail(rows, sample, row: int | None = None) -> int:
    """The partly filled block that a sample's row ends in; 0: none."""
    row, S = row or sample.row_id, rows.block_size
    full = sample.context_len % S == 0
    return 0 if full else int(rows.block_table[row, sample.context_len // S])


class EngineLife(RuleBasedStateMachine):
    """Requests come, run, are aborted; weights change, the state is lost; nothing may show."""

    options: ClassVar[dict[str, Any]]

    def __init__(self):
        super().__init__()
        self.engine, self.intake = make_counting_engine(**self.options)
        self.live, self.shift, self.checked = [], 0, {}
        self.shift_of = {}  # of each beam search, when it came

    @rule(
        family=st.integers(0, 2),
        prompt_len=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 4),
        temperature=st.sampled_from([0.0, 1.0]),
        salt=st.sampled_from([None, None, "a"]),
        stops=st.booleans(),
        skips=st.sampled_from([None, True]),
    )
    def add(self, family, prompt_len, max_tokens, n, temperature, salt, stops, skips):
        prompt = {"prompt_token_ids": [(family * 11 + j * j) % 50 for j in range(prompt_len)]}
        params = SamplingParams(
            temperature=temperature,
            n=n if temperature else 1,
            max_tokens=max_tokens,
            seed=family,
            stop_token_ids=list(range(0, 50, 7)) if stops else None,
            skip_reading_prefix_cache=skips,
        )
        try:
            (request,) = self.intake.accept(prompt | ({"cache_salt": salt} if salt else {}), params)
        except RequestTooLongError:
            return
        self.engine.add(request)
        self.live.append(request)

    @rule(
        family=st.integers(0, 2),
        prompt_len=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        early_stopping=st.sampled_from([None, True, "never"]),
    )
    def search(self, family, prompt_len, max_tokens, early_stopping):
        prompt = [(family * 11 + j * j) % 50 for j in range(prompt_len)]
        params = BeamSearchParams(
            beam_width=min(3, self.options.get("max_num_seqs", 3)),
            max_tokens=max_tokens,
            early_stopping=early_stopping,
        )
        try:
            (request,) = self.intake.accept_beams(prompt, params)
        except RequestError:
            return
        self.engine.add(request)
        self.live.append(request)
        self.shift_of[request] = self.shift

    @rule(num=st.integers(1, 4))
    def run(self, num: int):
        for _ in range(num):
            ended = self.engine.step()
            self._check_mirror()
            finished = [request for request in self.live if request.is_finished]
            assert set(finished) <= set(ended)
            for request in finished:
                self.live.remove(request)
                # A search that saw weights change is of no known kind.
                if self.shift_of.get(request) == self.shift:
                    assert_found(self.intake, request, self.shift)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 9))
    def abort(self, place: int):
        request = self.live.pop(place % len(self.live))
        self.engine.abort([request])
        assert request.is_finished
        self._check_mirror()

    @rule()
    def change_weights(self):
        self.shift += 3
        self.engine.update_params(counting_params(self.shift))
        self._check_mirror()

    @rule()
    def lose_state(self):
        self.engine.restart()
        self._check_mirror()

    @rule()
    def forget_prefixes(self):
        self.engine.reset_prefix_cache()
        self._check_mirror()

    def teardown(self):
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished:
                break
            self.run(1)
        assert not self.engine.has_unfinished
        assert not self.live
        assert self.engine.num_free_blocks == self.engine.num_blocks - 1

    def _check_mirror(self) -> None:
        engine, state = self.engine, self.engine._device.state
        check_invariants(state)
        rows, ref_count = jax.device_get((state.rows, state.pool.ref_count))
        assert engine.num_free_blocks == int((ref_count == 0).sum())
        running = engine.roster.running
        seated = [row_id for sample in running for row_id in sample.row_ids]
        assert sorted([*seated, *engine.roster._free_rows]) == list(range(1, rows.num_tokens.size))
        assert np.flatnonzero(rows.num_blocks).tolist() == sorted(
            row_id for sample in running if sample.num_blocks for row_id in _rows_in_use(sample)
        )
        for sample in running:
            if isinstance(sample, BeamGroup):
                self._check_group(sample, rows)
            else:
                self._check_row(sample, rows, ref_count)
        for request in self.live:
            for sample in request.samples if request.beam_params is None else ():
                self._check_tokens(sample)

    def _check_group(self, group, rows) -> None:
        sequences = group.sequences if group.is_spread else [group.token_ids]
        tails = set()
        for row, tokens in zip(_rows_in_use(group), sequences, strict=True):
            assert rows.token_ids[row, : rows.num_tokens[row]].tolist() == tokens
            assert rows.context_len[row] == group.context_len
            assert rows.num_blocks[row] == group.num_blocks
            tails.add(_tail(rows, group, row))
        if group.context_len % rows.block_size:
            assert len(tails) == (group.num_tails if group.is_spread else 1)

    def _check_row(self, sample, rows, ref_count) -> None:
        row = sample.row_id
        assert sample.finish_reason is None
        assert rows.active[row]
        assert rows.token_ids[row, : rows.num_tokens[row]].tolist() == sample.token_ids
        assert rows.context_len[row] == sample.context_len
        assert rows.num_blocks[row] == sample.num_blocks
        tail = _tail(rows, sample)
        running = self.engine.roster.running
        later = running[running.index(sample) + 1 :]
        # The last to write into a shared block does not copy it.
        must_copy = tail != 0 and tail in [_tail(rows, other) for other in later]
        assert (tail != 0 and ref_count[tail] > 1) or not must_copy
        assert self.engine._views.running(sample).is_tail_shared == must_copy

    def _check_tokens(self, sample) -> None:
        """Each token that is new since the last look, with the weights there are now."""
        prompt_len, stops = len(sample.request.prompt_token_ids), sample.request.stop_ids
        tokens, done = sample.token_ids, self.checked.get(sample, 0)
        for end in range(prompt_len + done, len(tokens)):
            assert tokens[end] == next_token(sample, tokens[:end], self.shift)
            is_last = tokens[end] in stops or end + 1 == sample.request.max_len
            assert is_last == (end + 1 == len(tokens) and sample.finish_reason is not None)
        self.checked[sample] = len(tokens) - prompt_len


@pytest.mark.parametrize(
    "pool",
    [name if name == "tight" else pytest.param(name, marks=pytest.mark.slow) for name in POOLS],
)
def test_the_hosts_records_are_the_devices(pool):
    life = type("Life", (EngineLife,), {"options": POOLS[pool]})
    run_state_machine_as_test(
        life,
        settings=settings(max_examples=8, stateful_step_count=20, deadline=None, database=None),
    )
