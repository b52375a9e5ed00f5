"""The core at a size to drive by hand: requests as records, every function compiled once.

Nothing is donated, so that a test can keep a state and compare. The model is the counting one, made
fragile: it turns to NaN at tokens that the parameters name.
"""

import functools as ft
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.batch import Batch, Forward, KVCache
from jpaged.core.block_pool import eviction_key, num_free
from jpaged.core.rows import Admissions, admit, fork, release, reserve
from jpaged.core.sampling import SamplingState, init_sampling_state, seed_key
from jpaged.core.state import EngineState, check_invariants, init_state
from jpaged.core.step import StepInputs, StepOutput, decode_window, step
from tests.core.scripted import counting_forward, counting_kv, counting_params

NUM_ROWS, BLOCK_SIZE, BLOCKS_PER_ROW = 8, 4, 8
WIDTH, BUDGET = 4, 16  # rows and tokens of a step
NUM_STOP_IDS = 2
MAX_LEN = BLOCK_SIZE * BLOCKS_PER_ROW
FILLERS = (5, 6, 7, 8)  # rows that take the blocks a test wants gone


def _hidden(params, batch: Batch, kv: KVCache):
    hidden, kv = counting_forward.hidden(params, batch, kv)
    token = batch.token_ids[:, None]
    hidden = jnp.where(token == params["nan_hidden"], jnp.nan, hidden)
    return jnp.where(token == params["nan_logits"], -1, hidden), kv


def _logits(params, hidden):
    logits = counting_forward.logits(params, hidden)
    return jnp.where(hidden < 0, jnp.nan, logits)


fragile_forward = Forward(_hidden, _logits)


@ft.cache
def fragile_params(nan_hidden: int = -1, nan_logits: int = -1) -> dict:
    """Tokens whose hidden state or logits are NaN; -1: none."""
    bad = {"nan_hidden": jnp.int32(nan_hidden), "nan_logits": jnp.int32(nan_logits)}
    return {**counting_params(), **bad}


@dataclass
class Request:
    row_id: int
    tokens: list[int]
    max_len: int = MAX_LEN
    prompt_len: int | None = None  # None: all the tokens
    sample_index: int = 0
    adapter_id: int = 0
    root: tuple[int, int, int, int] = (0, 0, 0, 0)
    reads_cache: bool = True
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    eos_id: int = -1
    stop_ids: tuple[int, ...] = ()
    min_len: int = 0


NOBODY = Request(0, [1])


@ft.cache
def fresh(
    num_blocks: int = 1 + 4 * BLOCKS_PER_ROW,
    block_size: int = BLOCK_SIZE,
    max_blocks_per_row: int = BLOCKS_PER_ROW,
) -> EngineState:
    return init_state(
        counting_kv(num_blocks, block_size),
        num_rows=NUM_ROWS,
        max_blocks_per_row=max_blocks_per_row,
        hash_key=jnp.array([1, 2, 3, 4], jnp.uint32),
        num_stop_ids=NUM_STOP_IDS,
    )


@ft.cache
def _greedy() -> SamplingState:
    return init_sampling_state(WIDTH, NUM_STOP_IDS)


def admissions(requests: list[Request], max_tokens: int) -> Admissions:
    """The requests, padded to WIDTH with the null row."""
    requests = [*requests, *[NOBODY] * (WIDTH - len(requests))]

    def field(name: str, dtype) -> np.ndarray:
        return np.array([getattr(r, name) for r in requests], dtype)

    sampling = _greedy().replace(
        key=np.stack([seed_key(r.seed) for r in requests]),
        stop_ids=np.array([(*r.stop_ids, -1, -1)[:NUM_STOP_IDS] for r in requests], np.int32),
        **{name: field(name, np.float32) for name in ("temperature", "top_p")},
        **{name: field(name, np.int32) for name in ("top_k", "eos_id", "min_len", "max_len")},
    )
    padded = [r.tokens + [0] * (max_tokens - len(r.tokens)) for r in requests]
    prompt_lens = [len(r.tokens) if r.prompt_len is None else r.prompt_len for r in requests]
    return Admissions(
        row_ids=field("row_id", np.int32),
        token_ids=np.array(padded, np.int32),
        num_tokens=np.array([len(r.tokens) for r in requests], np.int32),
        prompt_len=np.array(prompt_lens, np.int32),
        request_root=field("root", np.uint32),
        sample_index=field("sample_index", np.int32),
        adapter_id=field("adapter_id", np.int32),
        most_cached=field("reads_cache", np.int32) * 2**20,  # as many as there are
        sampling=sampling,
    )


_admit, _fork, _release = jax.jit(admit), jax.jit(fork), jax.jit(release)
_reserve = jax.jit(reserve, static_argnames="max_new")
_step = jax.jit(
    ft.partial(step, forward=fragile_forward), static_argnames=("num_tokens", "num_decode_rows")
)
_window = jax.jit(ft.partial(decode_window, forward=fragile_forward), static_argnames="num_steps")


def check(state: EngineState) -> EngineState:
    """The state, if it keeps its rules and every row finds its own tokens in its blocks."""
    check_invariants(state)
    rows, pages = jax.device_get((state.rows, state.kv[0].k))
    for row_id in range(1, rows.num_tokens.size):
        position = np.arange(rows.context_len[row_id])
        block = rows.block_table[row_id, position // rows.block_size]
        want = np.stack([rows.token_ids[row_id, position], position], axis=1)
        np.testing.assert_array_equal(pages[block, position % rows.block_size, 0], want)
    return state


def _padded(values: list[int]) -> np.ndarray:
    return np.array(values + [0] * (WIDTH - len(values)), np.int32)


def seat(state: EngineState, *requests: Request) -> tuple[EngineState, list[int]]:
    """Admits requests; returns the state and the cached tokens of each."""
    max_tokens = state.rows.token_ids.shape[1]
    state, num_cached = _admit(state, admissions(list(requests), max_tokens))
    return check(state), num_cached.tolist()[: len(requests)]


def run(
    state: EngineState,
    row_ids: list[int],
    *,
    limits: list[int] | None = None,
    parent: list[int] | None = None,
    sample_index: list[int] | None = None,
    params: dict | None = None,
    num_tokens: int = BUDGET,
    num_decode_rows: int = 0,
) -> tuple[EngineState, StepOutput]:
    """One step. `parent` and `sample_index` as in `StepInputs`."""
    own = list(range(WIDTH))
    inputs = StepInputs(
        row_ids=_padded(row_ids),
        limits=_padded(limits or [num_tokens] * WIDTH),
        parent=np.array([*(parent or []), *own[len(parent or []) :]], np.int32),
        sample_index=_padded(sample_index or []),
    )
    state, output = _step(
        params or fragile_params(),
        state,
        inputs,
        num_tokens=num_tokens,
        num_decode_rows=num_decode_rows,
    )
    return check(state), jax.device_get(output)


def run_window(
    state: EngineState,
    row_ids: list[int],
    num_steps: int,
    *,
    num_run: int | None = None,
    params: dict | None = None,
) -> tuple[EngineState, StepOutput]:
    asked = None if num_run is None else np.int32(num_run)
    state, output = _window(
        params or fragile_params(), state, _padded(row_ids), asked, num_steps=num_steps
    )
    return check(state), jax.device_get(output)


def hold(
    state: EngineState, row_ids: list[int], num_new: list[int]
) -> tuple[EngineState, list[int]]:
    """Reserves; returns the state and what was granted."""
    P = state.rows.token_ids.shape[1]
    state, granted = _reserve(state, _padded(row_ids), _padded(num_new), max_new=WIDTH * P)
    return check(state), granted.tolist()[: len(row_ids)]


def split(state: EngineState, parent: int, *children: int) -> EngineState:
    """Forks one row; each child draws as the sample of its place, the first as sample 1."""
    n = len(children)
    return reseat(state, [parent] * n, list(children), list(range(1, n + 1)))


def leave_free(state, num: int):
    """The state with `num` free blocks: the fillers take the others."""
    for row_id in FILLERS:
        taken = min(int(num_free(state.pool)) - num, MAX_LEN // BLOCK_SIZE)
        state, _ = seat(state, Request(row_id, [row_id]))
        state, granted = hold(state, [row_id], [taken * BLOCK_SIZE])
        assert granted == [taken * BLOCK_SIZE]
    assert int(num_free(state.pool)) == num
    return state


def reseat(
    state: EngineState, parents: list[int], children: list[int], sample_index: list[int]
) -> EngineState:
    """Forks pairs of rows in one call."""
    return check(_fork(state, *map(_padded, (parents, children, sample_index))))


def let_go(state: EngineState, *row_ids: int) -> EngineState:
    return check(_release(state, _padded(list(row_ids))))


def finish(
    state: EngineState, row_ids: list[int], *, params: dict | None = None, limits=None
) -> EngineState:
    """Steps until every row has stopped."""
    while np.asarray(state.rows.active)[row_ids].any():
        state, output = run(state, row_ids, params=params, limits=limits)
        assert output.granted.any(), "no row gets on"
    return state


def tokens_of(state: EngineState, row_id: int) -> list[int]:
    token_ids, num_tokens = map(np.asarray, (state.rows.token_ids, state.rows.num_tokens))
    return token_ids[row_id, : num_tokens[row_id]].tolist()


def blocks_of(state: EngineState, row_id: int) -> list[int]:
    table, num_blocks = map(np.asarray, (state.rows.block_table, state.rows.num_blocks))
    return table[row_id, : num_blocks[row_id]].tolist()


def free_order(state: EngineState) -> list[int]:
    """Free blocks, the next to be taken first."""
    key = np.asarray(eviction_key(state.pool))
    return np.argsort(key, kind="stable")[: int(num_free(state.pool))].tolist()


def contents(state: EngineState, row_id: int) -> dict:
    """All that a row is and holds, whichever blocks hold it."""
    state, S = jax.device_get(state), state.rows.block_size
    context_len = state.rows.context_len[row_id]
    blocks = state.rows.block_table[row_id, : -(-context_len // S)]
    pages = state.kv[0].k[blocks].reshape(-1, 2)[:context_len]
    names = ("context_len", "prompt_len", "root", "prefix_hash", "sample_index", "active")
    return {
        "tokens": tokens_of(state, row_id),
        "kv": pages.tolist(),
        "hashes": state.pool.block_hash[blocks].tolist(),
        **{name: getattr(state.rows, name)[row_id].tolist() for name in names},
        "sampling": [x[row_id].tolist() for x in jax.tree.leaves(state.sampling)],
    }


def assert_same_bits(got, want) -> None:
    """Two pytrees are equal to the bit, leaf by leaf."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
