"""Long random lives of the jitted core against a plain block manager, checked after every move."""

import functools as ft
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from jpaged.core.rows import (
    Admissions,
    admit,
    fork,
    match_admissions,
    release,
    reserve,
    share_rows,
)
from jpaged.core.sampling import init_sampling_state
from jpaged.core.state import EngineState, check_invariants, init_state
from jpaged.core.step import StepInputs, decode_window, step
from jpaged.functional import new_weights
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


def _choose_beams(state: EngineState, parent, child, token_ids) -> EngineState:
    """Re-seats rows all at once, as beams are; those that live get a token each."""
    rows, pool = share_rows(state.rows, state.pool, parent, child)
    sampling = jax.tree.map(lambda x: x.at[child].set(x[parent]), state.sampling)
    num_tokens, is_live = rows.num_tokens[child], rows.active[child]
    position = jnp.where(is_live, num_tokens, MAX_TOKENS)
    num_tokens += is_live.astype(jnp.int32)
    rows = replace(
        rows,
        token_ids=rows.token_ids.at[child, position].set(token_ids, mode="drop"),
        num_tokens=rows.num_tokens.at[child].set(num_tokens),
        active=rows.active.at[child].set(is_live & (num_tokens < sampling.max_len[child])),
    )
    return replace(state, rows=rows, pool=pool, sampling=sampling)


_choose = jax.jit(_choose_beams, donate_argnums=0)
_look_up = jax.jit(match_admissions)
_new_weights = jax.jit(new_weights, donate_argnums=0)
_reserve = jax.jit(
    ft.partial(reserve, max_new=NUM_ROWS * MAX_TOKENS),
    donate_argnums=0,
)
_reset_hashes = jax.jit(reset_hashes, donate_argnums=0)


def _ids(values: list[int]) -> np.ndarray:
    """Row ids or the like, padded with the null row."""
    return np.array(values + [0] * (NUM_ROWS - len(values)), np.int32)


def _admission(row_id: int, row: Row, reads_cache: bool = True) -> Admissions:
    sampling = init_sampling_state(1, 2)
    return Admissions(
        row_ids=jnp.array([row_id], jnp.int32),
        token_ids=jnp.array([row.tokens + [0] * (MAX_TOKENS - len(row.tokens))], jnp.int32),
        num_tokens=jnp.array([len(row.tokens)], jnp.int32),
        prompt_len=jnp.array([row.prompt_len], jnp.int32),
        request_root=jnp.zeros((1, 4), jnp.uint32),
        sample_index=jnp.zeros(1, jnp.int32),
        adapter_id=jnp.zeros(1, jnp.int32),
        most_cached=jnp.array([MAX_TOKENS * reads_cache], jnp.int32),
        sampling=sampling.replace(max_len=jnp.array([row.max_len], jnp.int32)),
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

    def _seat(self, row: Row, reads_cache: bool = True) -> None:
        row_id = self._empty_row()
        self.state, num_cached = _admit(self.state, _admission(row_id, row, reads_cache))
        assert int(num_cached[0]) == self.plain.admit(row_id, row, reads_cache=reads_cache)

    _prompts = st.builds(
        lambda family, length, max_new: Row(
            [(family * 7 + i * i) % 50 for i in range(length)],
            length,
            min(length + max_new, MAX_TOKENS),
        ),
        st.integers(0, 2),
        st.integers(1, MAX_TOKENS - 1),
        st.integers(1, 10),
    )

    @precondition(_has_room)
    @rule(row=_prompts, reads_cache=st.sampled_from([True, True, False]))
    def admit_prompt(self, row: Row, reads_cache: bool):
        self._seat(row, reads_cache)

    @rule(row=_prompts)
    def look_up(self, row: Row):
        num_cached, num_free_hits = _look_up(self.state, _admission(1, row))
        hits = self.plain.match(row.tokens)
        assert int(num_cached[0]) == len(hits) * BLOCK_SIZE
        assert int(num_free_hits[0]) == len(set(hits) & set(self.plain.free))

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

    @rule(
        parents=st.lists(st.integers(0, NUM_ROWS), min_size=NUM_ROWS, max_size=NUM_ROWS),
        children=st.permutations(range(1, NUM_ROWS + 1)),
        num=st.integers(1, NUM_ROWS),
        first_token=st.integers(0, 49),
    )
    def choose_beams(self, parents: list[int], children: list[int], num: int, first_token: int):
        parents, children = parents[:num], children[:num]
        tokens = [(first_token + 7 * place) % 50 for place in range(num)]
        self.state = _choose(self.state, *map(_ids, (parents, children, tokens)))
        self.plain.reseat(dict(zip(children, parents, strict=True)))
        for row_id, token in zip(children, tokens, strict=True):
            row = self.plain.rows.get(row_id)
            if row and row.active:
                row.tokens.append(token)
                row.active = len(row.tokens) < row.max_len

    @precondition(_has_rows)
    @rule(order=_orders, num_new=st.integers(1, MAX_TOKENS))
    def reserve_ahead(self, order: list[int], num_new: int):
        """Takes blocks that nothing is written to yet: cached ones are evicted for them."""
        wanted = {
            row_id: min(num_new, MAX_TOKENS - self.plain.rows[row_id].context_len)
            for row_id in self._pick(order)
        }
        row_ids, num_wanted = _ids(list(wanted)), _ids(list(wanted.values()))
        self.state, granted = _reserve(self.state, row_ids, num_wanted)
        assert granted.tolist()[: len(wanted)] == list(self.plain.reserve(wanted).values())

    @rule(by_weights=st.booleans())
    def outdate_cache(self, by_weights: bool):
        """Other weights, upon which running rows go on; or the cache is emptied."""
        if by_weights:
            self.state = _new_weights(self.state)
            self.plain.version += 1
        else:
            self.state = self.state.replace(pool=_reset_hashes(self.state.pool))
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
        is_hashed = np.asarray(self.state.pool.block_hash).any(axis=1)
        assert np.flatnonzero(is_hashed).tolist() == sorted(self.plain.prefix_of)
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


@pytest.mark.parametrize("num_lives", [200, pytest.param(500, marks=pytest.mark.slow)])
def test_block_life(num_lives):
    run_state_machine_as_test(
        BlockLife,
        settings=settings(
            max_examples=num_lives, stateful_step_count=50, deadline=None, database=None
        ),
    )
