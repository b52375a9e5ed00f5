"""Prefix caching: what a hash depends on, which blocks are found, what gets published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.block_pool import reset_hashes
from jpaged.core.prefix_cache import _lower_bound, hash_root, hash_tokens, match_prefix
from jpaged.core.state import BlockPool
from tests.core.small_core import (
    BLOCK_SIZE,
    Request,
    blocks_of,
    contents,
    fragile_params,
    fresh,
    let_go,
    run,
    run_window,
    seat,
)

KEY = jnp.array([11, 12, 13, 14], jnp.uint32)
PROMPT = [(7 * i + i * i) % 48 for i in range(18)]  # four full blocks and a half
_match = jax.jit(match_prefix)


def hashes_of(tokens: list[int], key=KEY, first: int = 0) -> np.ndarray:
    positions = jnp.arange(first, first + len(tokens), dtype=jnp.int32)
    return np.asarray(hash_tokens(key, jnp.asarray(tokens, jnp.int32), positions))


class TestTokenHash:
    def test_it_depends_on_token_position_and_every_word_of_the_key(self):
        base = hashes_of([5])[0]
        others = [hashes_of([6])[0], hashes_of([5], first=1)[0]]
        others += [hashes_of([5], key=KEY.at[i].add(jnp.uint32(1)))[0] for i in range(4)]
        assert len({tuple(h) for h in [base, *others]}) == 7
        np.testing.assert_array_equal(hashes_of([5])[0], base)

    def test_position_and_token_are_not_exchangeable(self):
        assert hashes_of([5], first=6).tolist() != hashes_of([6], first=5).tolist()

    def test_it_does_not_depend_on_what_is_hashed_beside_it(self):
        alone = [hashes_of([token], first=i)[0] for i, token in enumerate(PROMPT)]
        np.testing.assert_array_equal(hashes_of(PROMPT), alone)
        grid = hash_tokens(
            KEY, jnp.asarray([PROMPT, PROMPT[::-1]]), jnp.broadcast_to(jnp.arange(18), (2, 18))
        )
        np.testing.assert_array_equal(grid[0], alone)
        np.testing.assert_array_equal(grid[1], hashes_of(PROMPT[::-1]))

    def test_all_128_bits_vary_and_no_two_of_many_are_equal(self):
        many = hashes_of([i % 1000 for i in range(20_000)])
        assert len(np.unique(many, axis=0)) == len(many)
        assert len(np.unique(many[:, :2], axis=0)) == len(many)
        assert (np.bitwise_or.reduce(many) == 2**32 - 1).all()
        assert (np.bitwise_and.reduce(many) == 0).all()
        assert not (many[:, :2] == many[:, 2:]).all(axis=1).any()


def read(state, *requests: Request, params=None):
    """Seats requests and reads their prompts to the end."""
    state, cached = seat(state, *requests)
    ids = [request.row_id for request in requests]
    while (np.asarray(state.rows.context_len - state.rows.num_tokens)[ids] < -1).any():
        state, _ = run(state, ids, params=params)
    return state, cached


def seal_prompt(tokens=PROMPT, **kwargs):
    """An engine whose cache holds one prompt, its row gone."""
    state, _ = read(fresh(), Request(1, tokens, **kwargs))
    return let_go(state, 1)


class TestWhatARowShares:
    def test_a_repeated_prompt_shares_its_full_blocks(self):
        assert seat(seal_prompt(), Request(2, PROMPT))[1] == [16]

    @pytest.mark.parametrize(
        "change",
        [{"root": (1, 0, 0, 0)}, {"root": (0, 0, 0, 1)}],
        ids=["first word", "last word"],
    )
    def test_another_root_shares_nothing(self, change):
        assert seat(seal_prompt(), Request(2, PROMPT, **change))[1] == [0]
        assert seat(seal_prompt(**change), Request(2, PROMPT))[1] == [0]
        assert seat(seal_prompt(**change), Request(2, PROMPT, **change))[1] == [16]

    def test_other_weights_share_nothing_until_the_first_come_back(self):
        state = seal_prompt()
        newer = state.replace(weights_version=state.weights_version + jnp.uint32(1))
        assert seat(newer, Request(2, PROMPT))[1] == [0]
        newer, _ = read(newer, Request(2, PROMPT))
        assert seat(newer, Request(3, PROMPT))[1] == [16]
        older = newer.replace(weights_version=state.weights_version)
        older, cached = seat(older, Request(3, PROMPT))
        assert cached == [16]
        assert not set(blocks_of(older, 3)) & set(blocks_of(newer, 2))

    def test_another_hash_key_shares_nothing(self):
        state = seal_prompt()
        assert seat(state.replace(hash_key=KEY), Request(2, PROMPT))[1] == [0]

    @pytest.mark.parametrize(
        "change",
        [
            {"row_id": 7},
            {"sample_index": 3},
            {"adapter_id": 2},
            {"prompt_len": 9},
            {"max_len": 20},
            {"seed": 5, "temperature": 1.0},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_nothing_else_matters(self, change):
        request = Request(**{"row_id": 2, "tokens": PROMPT, **change})
        assert seat(seal_prompt(), request)[1] == [16]

    def test_a_row_that_does_not_read_the_cache_still_fills_it(self):
        state = seal_prompt()
        assert seat(state, Request(2, PROMPT, reads_cache=False))[1] == [0]
        state, _ = read(fresh(), Request(1, PROMPT, reads_cache=False))
        assert seat(state, Request(2, PROMPT))[1] == [16]

    def test_the_root_separates_versions_from_requests(self):
        root = jnp.zeros((1, 4), jnp.uint32)
        roots = [hash_root(KEY, root, jnp.uint32(version)) for version in range(3)]
        assert len({tuple(r[0].tolist()) for r in roots}) == 3
        assert all(r.any() for r in roots)


class TestHitLength:
    @pytest.mark.parametrize(
        ("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)]
    )
    def test_whole_blocks_of_16_and_one_token_left_to_run(self, length, cached):
        shape = {"num_blocks": 11, "block_size": 16, "max_blocks_per_row": 11}
        tokens = [i % 50 for i in range(40)]
        state, _ = seat(fresh(**shape), Request(1, tokens, max_len=176))
        state, _ = run(state, [1], num_tokens=160)
        assert seat(state, Request(2, tokens[:length], max_len=176))[1] == [cached]

    def test_a_longer_prompt_goes_on_where_the_cached_one_ended(self):
        assert seat(seal_prompt(), Request(2, [*PROMPT[:16], *[3] * 9]))[1] == [16]

    @pytest.mark.parametrize("place", range(18))
    def test_the_run_of_hits_ends_at_the_first_differing_token(self, place):
        tokens = list(PROMPT)
        tokens[place] += 1
        cached = seat(seal_prompt(), Request(2, tokens))[1]
        assert cached == [min(place // BLOCK_SIZE * BLOCK_SIZE, 16)]

    def test_the_same_block_at_another_place_is_no_hit(self):
        assert seat(seal_prompt(), Request(2, PROMPT[4:]))[1] == [0]
        assert seat(seal_prompt(PROMPT[:4] * 3), Request(2, [*PROMPT[:4] * 2, 1]))[1] == [8]

    def test_a_hole_in_the_middle_ends_the_run(self):
        state, _ = read(fresh(), Request(1, PROMPT))
        hole = blocks_of(state, 1)[1]
        pool = state.pool.replace(block_hash=state.pool.block_hash.at[hole].set(0))
        assert seat(state.replace(pool=pool), Request(2, PROMPT))[1] == [4]

    def test_an_empty_cache_gives_no_hit(self):
        state = seal_prompt()
        assert seat(fresh(), Request(2, PROMPT))[1] == [0]
        assert seat(state.replace(pool=reset_hashes(state.pool)), Request(2, PROMPT))[1] == [0]

    def test_equal_prompts_read_side_by_side_keep_blocks_of_their_own(self):
        state, cached = read(fresh(), Request(1, PROMPT), Request(2, PROMPT))
        assert cached == [0, 0]
        first, second = blocks_of(state, 1), blocks_of(state, 2)
        assert not set(first) & set(second)
        assert contents(state, 1)["hashes"] == contents(state, 2)["hashes"]
        state, cached = seat(state, Request(3, PROMPT))
        assert cached == [16]
        assert blocks_of(state, 3) == np.minimum(first, second)[:4].tolist()
        state = let_go(state, 1, 3)
        pool = state.pool.replace(block_hash=state.pool.block_hash.at[jnp.array(first)].set(0))
        state, cached = seat(state.replace(pool=pool), Request(3, PROMPT))
        assert (cached, blocks_of(state, 3)) == ([16], second[:4])


def pool_with(block_hash: np.ndarray) -> BlockPool:
    N = len(block_hash)
    counts = [jnp.zeros(N, jnp.int32) for _ in range(2)]
    return BlockPool(counts[0], jnp.asarray(block_hash, jnp.uint32), counts[1], jnp.int32(0))


class TestMatch:
    def test_clashes_in_the_first_64_bits_never_give_a_wrong_block(self):
        block_hash = np.zeros((8, 4), np.uint32)
        block_hash[[3, 5, 6]] = [[7, 7, 1, 1], [7, 7, 2, 2], [7, 8, 1, 1]]
        queries = [[7, 7, 1, 1], [7, 7, 2, 2], [7, 7, 9, 9], [7, 8, 1, 1], [7, 6, 1, 1]]
        ids, num = _match(
            pool_with(block_hash), jnp.asarray(queries, jnp.uint32)[:, None], jnp.ones(5, jnp.int32)
        )
        hits = [int(i) if n else None for i, n in zip(ids[:, 0], num, strict=True)]
        assert hits[0] in (3, None)
        assert hits[1] in (5, None)
        assert hits[2:] == [None, 6, None]

    def test_a_hash_of_zeros_matches_no_block(self):
        ids, num = _match(
            pool_with(np.zeros((8, 4))), jnp.zeros((1, 1, 4), jnp.uint32), jnp.array([1])
        )
        assert (ids.tolist(), num.tolist()) == ([[0]], [0])

    def test_num_full_limits_the_hits_of_each_prefix(self):
        rng = np.random.default_rng(0)
        block_hash = rng.integers(1, 2**32, size=(9, 4), dtype=np.uint32)
        block_hash[0] = 0
        hashes = jnp.asarray(np.stack([block_hash[1:6]] * 4))
        ids, num = _match(pool_with(block_hash), hashes, jnp.array([0, 1, 4, 9]))
        assert num.tolist() == [0, 1, 4, 5]
        assert ids.tolist() == [[b if b <= n else 0 for b in range(1, 6)] for n in (0, 1, 4, 9)]

    @pytest.mark.parametrize("N", [1, 2, 7, 64, 65, 1000])
    def test_the_search_is_that_of_64_bit_numbers(self, N):
        rng = np.random.default_rng(N)
        words = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1], np.uint64)
        keys = np.sort((rng.choice(words, N) << np.uint64(32)) | rng.choice(words, N))
        grid = ((words[:, None] << np.uint64(32)) | words[None]).ravel()
        queries = np.concatenate([grid, rng.integers(0, 2**64, 64, dtype=np.uint64)])

        def halves(x):
            return [
                jnp.asarray(half.astype(np.uint32))
                for half in (x >> np.uint64(32), x & np.uint64(2**32 - 1))
            ]

        got = jax.jit(_lower_bound)(*halves(keys), *halves(queries.reshape(1, -1)))
        np.testing.assert_array_equal(got[0], np.searchsorted(keys, queries, side="left"))


def plain_hashes(state, tokens: list[int]) -> tuple[list, list]:
    """The running hash of all the tokens and the keys of their full blocks, by the definition."""
    root = hash_root(state.hash_key, jnp.zeros((1, 4), jnp.uint32), state.weights_version)
    running = np.bitwise_xor.accumulate(hashes_of(tokens, state.hash_key))
    return running[-1].tolist(), (running[BLOCK_SIZE - 1 :: BLOCK_SIZE] ^ np.asarray(root)).tolist()


class TestSeal:
    def test_hashes_are_the_same_however_the_tokens_came(self):
        by_one, _ = read(fresh(), Request(1, PROMPT))
        total, keys = plain_hashes(by_one, PROMPT)
        want = contents(by_one, 1)
        assert want["prefix_hash"] == total
        assert want["hashes"][:4] == keys
        assert not np.any(want["hashes"][4])
        for sizes in ([1] * 18, [3] * 6, [4, 4, 4, 4, 2], [5, 1, 7, 5], [2, 14, 2]):
            state, _ = seat(fresh(), Request(1, PROMPT))
            for size in sizes:
                state, _ = run(state, [1], limits=[size])
            assert contents(state, 1) == want

    def test_generated_tokens_are_sealed_as_if_they_had_been_the_prompt(self):
        state, _ = read(fresh(), Request(1, PROMPT[:6]))
        for _ in range(3):
            state, _ = run(state, [1])
        for num_steps in (1, 2, 5):
            state, _ = run_window(state, [1], num_steps)
        row = contents(state, 1)
        total, keys = plain_hashes(state, row["tokens"][: row["context_len"]])
        assert (row["prefix_hash"], row["hashes"][: len(keys)]) == (total, keys)
        state, cached = seat(state, Request(2, row["tokens"]))
        assert cached == [(len(row["tokens"]) - 1) // BLOCK_SIZE * BLOCK_SIZE]

    def test_rows_packed_together_seal_as_alone(self):
        prompts = {1: PROMPT, 2: PROMPT[5:], 3: PROMPT[::-1], 4: PROMPT[:3]}
        crowd, _ = seat(fresh(), *(Request(row_id, tokens) for row_id, tokens in prompts.items()))
        for limits in ([3, 5, 1, 2], [4, 2, 6, 1], [4, 4, 4, 0], [7, 2, 7, 0]):
            crowd, _ = run(crowd, [1, 2, 3, 4], limits=limits)
        for row_id, tokens in prompts.items():
            alone, _ = read(fresh(), Request(row_id, tokens))
            assert contents(crowd, row_id) == contents(alone, row_id)

    def test_a_prefix_that_was_shared_continues_the_same_hash(self):
        alone, _ = read(fresh(), Request(2, PROMPT))
        state, cached = read(seal_prompt(PROMPT[:9]), Request(2, PROMPT))
        assert cached == [8]
        assert contents(state, 2) == contents(alone, 2)

    @pytest.mark.parametrize("bad_place", [0, 3, 5, 10])
    def test_a_row_that_went_wrong_publishes_nothing_and_its_neighbours_do(self, bad_place):
        bad = list(PROMPT[:11])
        bad[bad_place] = 49
        state, _ = seat(fresh(), Request(1, PROMPT[1:6]), Request(2, bad))
        state, output = run(state, [1, 2], params=fragile_params(nan_hidden=49))
        assert output.granted[:2].tolist() == [5, 11]
        assert np.any(contents(state, 1)["hashes"][0])
        assert not np.any(contents(state, 2)["hashes"])
        assert seat(state, Request(3, bad))[1] == [0]
