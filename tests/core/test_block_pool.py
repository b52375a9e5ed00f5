"""The block pool against plain Python: which block is taken next, who holds what, what is freed."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.block_pool import CLOCK_LIMIT, eviction_key, num_free, retarget, take_blocks
from jpaged.core.state import BlockPool
from tests.core.small_core import (
    Request,
    assert_same_bits,
    blocks_of,
    free_order,
    fresh,
    let_go,
    run,
    seat,
)

N = 20
_take = jax.jit(take_blocks, static_argnames="width")
_retarget = jax.jit(retarget)


def make_pool(rng, *, ticks: int, num_held: int = 5, clock: int | None = None) -> BlockPool:
    """Some blocks held, some hashed, with ticks below `ticks`: if few, blocks share them."""
    ref_count = np.zeros(N, np.int32)
    ref_count[rng.permutation(np.arange(1, N))[:num_held]] = 1
    ref_count[0] = 1
    last_used = rng.integers(0, ticks, N).astype(np.int32)
    is_hashed = (rng.random(N) < 0.5) & (last_used > 0)
    block_hash = np.where(is_hashed[:, None], rng.integers(1, 9, (N, 4)), 0).astype(np.uint32)
    block_hash[0] = 0
    return BlockPool(
        *map(jnp.asarray, (ref_count, block_hash, last_used)),
        clock=jnp.int32(ticks if clock is None else clock),
    )


def plain_order(pool: BlockPool) -> list[int]:
    """Free blocks in their order of reuse, said in words by two sorts."""
    ref_count, last_used = np.asarray(pool.ref_count), np.asarray(pool.last_used)
    is_hashed = np.asarray(pool.block_hash).any(axis=1)
    free = [b for b in range(N) if ref_count[b] == 0]
    plain = sorted((b for b in free if not is_hashed[b]), key=lambda b: (-last_used[b], b))
    cached = sorted((b for b in free if is_hashed[b]), key=lambda b: (last_used[b], b))
    return plain + cached


@pytest.mark.parametrize("ticks", [1, 4, 1000, CLOCK_LIMIT])
def test_blocks_are_taken_in_the_order_of_reuse(ticks):
    rng = np.random.default_rng(ticks)
    for num_held in (0, 5, N - 1):
        pool = make_pool(rng, ticks=ticks, num_held=num_held)
        order = plain_order(pool)
        assert int(num_free(pool)) == len(order) == N - 1 - num_held
        for num in range(len(order) + 1):
            after, ids = _take(pool, jnp.int32(num), width=N)
            assert ids.tolist() == order[:num] + [0] * (N - num)
            block_hash = np.array(pool.block_hash)
            block_hash[order[:num]] = 0
            np.testing.assert_array_equal(after.block_hash, block_hash)
            assert_same_bits(after.replace(block_hash=pool.block_hash), pool)


def test_a_narrow_take_chooses_as_a_wide_one():
    pool = make_pool(np.random.default_rng(3), ticks=9)
    for num in range(4):
        ids = _take(pool, jnp.int32(num), width=3)[1]
        assert ids.tolist() == plain_order(pool)[:num] + [0] * (3 - num)


def plain_retarget(pool: BlockPool, old: np.ndarray, new: np.ndarray):
    """Counts and ticks after the move, one entry at a time."""
    ref_count = Counter({b: int(n) for b, n in enumerate(np.asarray(pool.ref_count))})
    last_used, clock = np.array(pool.last_used), int(pool.clock)
    ref_count.update(new[(old != new) & (new != 0)].tolist())
    for a in range(old.shape[0]):
        for w in reversed(range(old.shape[1])):
            block = int(old[a, w])
            if block == int(new[a, w]) or block == 0:
                continue
            ref_count[block] -= 1
            if ref_count[block] == 0:
                clock += 1
                last_used[block] = clock
    return [ref_count[b] for b in range(N)], last_used, clock


def random_tables(rng, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Old and new tables: rows share blocks, some entries stay, some rows are emptied."""

    def tables() -> np.ndarray:
        return np.stack([rng.permutation(np.arange(N))[:width] for _ in range(num_rows)])

    old, new = tables(), tables()
    new = np.where(rng.random(old.shape) < 0.3, old, new)
    return old, np.where(rng.random((num_rows, 1)) < 0.4, 0, new)


def pool_of(old: np.ndarray, outside: np.ndarray, clock: int = 100) -> BlockPool:
    """A pool whose blocks are held by `old` and by `outside`, tables that no call names."""
    ref_count = np.bincount(np.concatenate([old.ravel(), outside.ravel()]), minlength=N)
    ref_count[0] = 1
    rng = np.random.default_rng(clock)
    return BlockPool(
        ref_count=jnp.asarray(ref_count, jnp.int32),
        block_hash=jnp.zeros((N, 4), jnp.uint32),
        last_used=jnp.asarray(rng.permutation(N), jnp.int32),
        clock=jnp.int32(clock),
    )


@pytest.mark.parametrize("seed", range(30))
def test_references_move_from_the_old_entries_to_the_new(seed):
    rng = np.random.default_rng(seed)
    old, new = random_tables(rng, num_rows=4, width=5)
    outside = rng.integers(0, N, size=(2, 2))
    pool = pool_of(old, outside)
    after = _retarget(pool, jnp.asarray(old, jnp.int32), jnp.asarray(new, jnp.int32))
    ref_count, last_used, clock = plain_retarget(pool, old, new)
    assert after.ref_count.tolist() == ref_count
    np.testing.assert_array_equal(after.last_used, last_used)
    assert int(after.clock) == clock
    np.testing.assert_array_equal(after.block_hash, pool.block_hash)


def test_a_block_that_changes_rows_is_not_freed():
    old, new = np.array([[3, 4], [0, 0]]), np.array([[0, 4], [0, 3]])
    pool = pool_of(old, np.zeros((1, 1), int))
    after = _retarget(pool, jnp.asarray(old, jnp.int32), jnp.asarray(new, jnp.int32))
    assert_same_bits(after, pool)


def test_rows_released_together_leave_the_order_of_rows_released_in_turn():
    old = np.array([[1, 2, 3, 4], [1, 2, 5, 0], [6, 0, 0, 0], [1, 7, 8, 9]])
    none = jnp.zeros(old.shape, jnp.int32)
    start = pool_of(old, np.zeros_like(old))
    together = _retarget(start, jnp.asarray(old, jnp.int32), none)
    in_turn = start
    for row in old:
        in_turn = _retarget(in_turn, none.at[0].set(jnp.asarray(row, jnp.int32)), none)
    assert_same_bits(together, in_turn)
    assert plain_order(together)[:9] == [1, 7, 8, 9, 6, 2, 5, 3, 4]


@pytest.mark.parametrize("num_freed", [1, 2, 3])
def test_the_clock_starts_again_before_it_can_wrap_and_the_order_stays(num_freed):
    rng = np.random.default_rng(num_freed)
    last_used = rng.permutation(np.linspace(1, CLOCK_LIMIT - 2, N).astype(np.int32))
    last_used[[4, 7, 11]] = 0  # never used; 11 is held
    ref_count = np.zeros(N, np.int32)
    ref_count[[0, 1, 2, 3, 11]] = 1
    block_hash = np.where(rng.random((N, 1)) < 0.5, 5, 0).repeat(4, axis=1).astype(np.uint32)
    block_hash[[0, 4, 7]] = 0
    pool = BlockPool(
        *map(jnp.asarray, (ref_count, block_hash, last_used)), clock=jnp.int32(CLOCK_LIMIT - 2)
    )
    old = np.zeros((1, 3), np.int32)
    old[0, :num_freed] = [1, 2, 3][:num_freed]
    after = _retarget(pool, jnp.asarray(old), jnp.zeros((1, 3), jnp.int32))

    counts, ticks, clock = plain_retarget(pool, old, np.zeros_like(old))
    plain = pool.replace(ref_count=jnp.asarray(counts, jnp.int32), last_used=jnp.asarray(ticks))
    assert free_keys(after) == plain_order(plain)
    assert clock == CLOCK_LIMIT - 2 + num_freed
    assert int(after.clock) == (N if clock >= CLOCK_LIMIT else clock)
    assert after.last_used[jnp.array([4, 7, 11])].tolist() == [0, 0, 0]
    used = np.asarray(after.last_used)[np.asarray(ticks) > 0]
    assert np.argsort(used).tolist() == np.argsort(ticks[ticks > 0]).tolist()
    assert used.max() <= int(after.clock)


def free_keys(pool: BlockPool) -> list[int]:
    order = np.argsort(np.asarray(eviction_key(pool)), kind="stable")
    return order[: int(num_free(pool))].tolist()


class TestWorkedExamplesOfVLLM:
    """Eleven blocks of 16 tokens, ten of them usable; the orders that vLLM's own tests pin."""

    NUM_TOKENS = 160

    def start(self):
        return fresh(num_blocks=11, block_size=16, max_blocks_per_row=11)

    def read(self, state, row_id: int):
        state, output = run(state, [row_id], num_tokens=self.NUM_TOKENS)
        assert output.is_sampled[0]
        return state

    def test_a_shared_prefix_and_a_request_for_the_whole_pool(self):
        prefix = [i % 50 for i in range(48)]
        state, _ = seat(self.start(), Request(1, prefix + [1] * 7, max_len=176))
        state = self.read(state, 1)
        state, cached = seat(state, Request(2, prefix + [2] * 5, max_len=176))
        assert cached == [48]
        state = self.read(state, 2)
        assert (blocks_of(state, 1), blocks_of(state, 2)) == ([1, 2, 3, 4], [1, 2, 3, 5])
        assert state.pool.ref_count[:6].tolist() == [1, 2, 2, 2, 1, 1]
        assert len(free_order(state)) == 5

        in_turn = let_go(let_go(state, 1), 2)
        assert free_order(in_turn) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
        assert free_order(let_go(state, 1, 2)) == free_order(in_turn)

        state, cached = seat(in_turn, Request(3, prefix + [3] * 6, max_len=176))
        assert cached == [48]
        state = self.read(state, 3)
        assert blocks_of(state, 3) == [1, 2, 3, 5]

        state = let_go(state, 3)
        state, cached = seat(state, Request(4, [49] * 160, max_len=176))
        assert cached == [0]
        state = self.read(state, 4)
        assert blocks_of(state, 4) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    def test_two_requests_and_a_part_of_the_first_again(self):
        first = [i % 50 for i in range(87)]
        state, _ = seat(self.start(), Request(1, first, max_len=176))
        state = self.read(state, 1)
        state, _ = seat(state, Request(2, [49 - i % 50 for i in range(48)], max_len=176))
        state = self.read(state, 2)
        assert blocks_of(state, 1) == [1, 2, 3, 4, 5, 6]
        assert blocks_of(state, 2) == [7, 8, 9]

        state = let_go(state, 1)
        assert free_order(state) == [6, 10, 5, 4, 3, 2, 1]
        state = let_go(state, 2)
        assert free_order(state) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]

        state, cached = seat(state, Request(3, first[:35], max_len=176))
        assert cached == [32]
        state = self.read(state, 3)
        assert blocks_of(state, 3) == [1, 2, 6]
        assert len(free_order(state)) == 7
