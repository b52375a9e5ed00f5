"""Long random lives of the jitted core against a plain block manager, checked after every move."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.core.block_pool import eviction_key, reset_hashes
from jpaged.core.rows import Admissions, admit, fork, release
from jpaged.core.sampling import init_sampling_state
from jpaged.core.state import check_invariants, init_state
from jpaged.core.step import StepInputs, decode_window, step
from tests.core.scripted import (
    counting_forward,
    counting_kv,
    counting_params,
    greedy_continuation,
)
from tests.oracles.block_manager import BlockManager, Row

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, BLOCKS_PER_ROW = 5, 16, 4, 6
MAX_TOKENS = BLOCK_SIZE * BLOCKS_PER_ROW
BUDGET, WINDOW = 8, 3

_admit = jax.jit(admit, donate_argnums=0)
_fork = jax.jit(fork, donate_argnums=0)
_release = jax.jit(release, donate_argnums=0)
_step = jax.jit(
    ft.partial(step, forward=counting_forward, num_tokens=BUDGET, num_decode_rows=0),
    donate_argnums=1,
)
_window = jax.jit(
    ft.partial(decode_window, forward=counting_forward, num_steps=WINDOW), donate_argnums=1
)


def _admission(row_id: int, tokens: list[int], prompt_len: int, max_len: int) -> Admissions:
    sampling = init_sampling_state(1, 2)
    return Admissions(
        row_ids=jnp.array([row_id], jnp.int32),
        token_ids=jnp.array([tokens + [0] * (MAX_TOKENS - len(tokens))], jnp.int32),
        num_tokens=jnp.array([len(tokens)], jnp.int32),
        prompt_len=jnp.array([prompt_len], jnp.int32),
        request_root=jnp.zeros((1, 4), jnp.uint32),
        sample_index=jnp.zeros(1, jnp.int32),
        adapter_id=jnp.zeros(1, jnp.int32),
        reads_cache=jnp.ones(1, bool),
        sampling=sampling.replace(max_len=jnp.array([max_len], jnp.int32)),
    )


class BlockLife(RuleBasedStateMachine):
    """Every move is made on the device and in the block manager; they must agree on everything."""

    def __init__(self):
        super().__init__()
        self.state = init_state(
            counting_kv(NUM_BLOCKS, BLOCK_SIZE),
            num_rows=NUM_ROWS,
            max_blocks_per_row=BLOCKS_PER_ROW,
            hash_key=jnp.array([1, 2, 3, 4], jnp.uint32),
            num_stop_ids=2,
        )
        self.plain = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.params = counting_params()
        self.preempted: list[Row] = []

    def _empty_row(self) -> int:
        return min(set(range(1, NUM_ROWS + 1)) - set(self.plain.rows))

    def _has_room(self) -> bool:
        return len(self.plain.rows) < NUM_ROWS

    def _has_rows(self) -> bool:
        return bool(self.plain.rows)

    def _seat(self, row: Row) -> None:
        row_id = self._empty_row()
        admission = _admission(row_id, row.tokens, row.prompt_len, row.max_len)
        self.state, num_cached = _admit(self.state, admission)
        assert int(num_cached[0]) == self.plain.admit(row_id, row)

    @precondition(_has_room)
    @rule(
        family=st.integers(0, 2),
        prompt_len=st.integers(1, MAX_TOKENS - 1),
        max_new=st.integers(1, 10),
    )
    def admit_prompt(self, family: int, prompt_len: int, max_new: int):
        tokens = [(family * 7 + i * i) % 50 for i in range(prompt_len)]
        self._seat(Row(tokens, prompt_len, min(prompt_len + max_new, MAX_TOKENS)))

    @precondition(lambda self: self._has_room() and self.preempted)
    @rule(place=st.integers(0, 9))
    def resume(self, place: int):
        row = self.preempted.pop(place % len(self.preempted))
        self._seat(Row(row.tokens, row.prompt_len, row.max_len))

    def _pick(self, order: list[int]) -> list[int]:
        return [row_id for row_id in dict.fromkeys(order) if row_id in self.plain.rows]

    _orders = st.lists(st.integers(1, NUM_ROWS), min_size=1, max_size=NUM_ROWS)

    @precondition(_has_rows)
    @rule(order=_orders, limit=st.integers(1, BUDGET))
    def run_step(self, order: list[int], limit: int):
        chosen = self._pick(order)
        row_ids = chosen + [0] * (NUM_ROWS - len(chosen))
        inputs = StepInputs(
            row_ids=jnp.array(row_ids, jnp.int32),
            limits=jnp.full(NUM_ROWS, limit, jnp.int32),
            parent=jnp.arange(NUM_ROWS, dtype=jnp.int32),
            sample_index=jnp.zeros(NUM_ROWS, jnp.int32),
        )
        self.state, output = _step(self.params, self.state, inputs)
        wanted, left = {}, BUDGET
        for row_id in chosen:
            row = self.plain.rows[row_id]
            wanted[row_id] = min(row.gap, limit, left) if row.active else 0
            left -= wanted[row_id]
        granted = self.plain.reserve(wanted)
        assert output.granted.tolist()[: len(chosen)] == list(granted.values())
        for row_id in chosen:
            self.plain.write(row_id, granted[row_id])
            if granted[row_id] and self.plain.rows[row_id].gap == 0:
                self._append_next(row_id)
        self._check_outputs(output, chosen)

    @precondition(_has_rows)
    @rule(order=_orders)
    def run_window(self, order: list[int]):
        chosen = self._pick(order)
        row_ids = jnp.array(chosen + [0] * (NUM_ROWS - len(chosen)), jnp.int32)
        self.state, output = _window(self.params, self.state, row_ids)
        rows = {row_id: self.plain.rows[row_id] for row_id in chosen}
        wanted = {
            row_id: min(row.max_len - len(row.tokens), WINDOW) if row.active and row.gap == 1 else 0
            for row_id, row in rows.items()
        }
        granted = self.plain.reserve(wanted)
        for row_id, num_new in granted.items():
            for _ in range(num_new):
                self.plain.write(row_id, 1)
                self._append_next(row_id)
        assert output.granted.sum(0).tolist()[: len(chosen)] == list(granted.values())

    def _append_next(self, row_id: int) -> None:
        row = self.plain.rows[row_id]
        row.tokens.append(greedy_continuation(row.tokens, 1)[0])
        row.active = len(row.tokens) < row.max_len

    def _check_outputs(self, output, chosen: list[int]) -> None:
        assert int(output.num_free_blocks) == len(self.plain.free)
        for index, row_id in enumerate(chosen):
            if output.is_sampled[index]:
                assert int(output.token_ids[index]) == self.plain.rows[row_id].tokens[-1]

    @precondition(lambda self: self._has_rows() and self._has_room())
    @rule(parent=st.integers(0, NUM_ROWS))
    def fork_row(self, parent: int):
        parent_id = sorted(self.plain.rows)[parent % len(self.plain.rows)]
        child_id = self._empty_row()
        pair = [jnp.array([i], jnp.int32) for i in (parent_id, child_id, 0)]
        self.state = _fork(self.state, *pair)
        self.plain.fork(parent_id, child_id)

    @precondition(_has_rows)
    @rule(order=_orders, comes_back=st.booleans())
    def release_rows(self, order: list[int], comes_back: bool):
        chosen = self._pick(order)[:2]
        self.state = _release(self.state, jnp.array([*chosen, 0, 0][:2], jnp.int32))
        for row_id in chosen:
            row = self.plain.release(row_id)
            if comes_back and row.active:
                self.preempted.append(row)

    @rule()
    def forget_cache(self):
        self.state = self.state.replace(pool=jax.jit(reset_hashes)(self.state.pool))
        self.plain.forget_prefixes()

    @invariant()
    def states_agree(self):
        check_invariants(self.state)
        rows, plain = jax.device_get(self.state.rows), self.plain
        for row_id in range(1, NUM_ROWS + 1):
            blocks = rows.block_table[row_id, : rows.num_blocks[row_id]].tolist()
            if row_id not in plain.rows:
                assert blocks == []
                assert not rows.active[row_id]
                continue
            row = plain.rows[row_id]
            assert blocks == row.blocks
            assert rows.token_ids[row_id, : rows.num_tokens[row_id]].tolist() == row.tokens
            assert (rows.context_len[row_id], rows.active[row_id]) == (row.context_len, row.active)

    @invariant()
    def pools_agree(self):
        key = np.asarray(eviction_key(self.state.pool))
        order = np.argsort(key, kind="stable")[: len(self.plain.free)]
        assert order.tolist() == self.plain.free

    @invariant()
    def pages_hold_their_tokens(self):
        pages = np.asarray(self.state.kv[0].k).reshape(-1, 2)
        for row in self.plain.rows.values():
            for position in range(row.context_len):
                slot = row.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert tuple(pages[slot]) == (row.tokens[position], position)


def test_block_life():
    run_state_machine_as_test(
        BlockLife,
        settings=settings(max_examples=200, stateful_step_count=50, deadline=None, database=None),
    )
