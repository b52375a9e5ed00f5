"""Paged attention against the dense oracle: lengths, block sizes, windows, caps, sinks, NaN.

The cases are the same for every form: XLA's, XLA's in deterministic mode, and the native one.
`tests/kernels/cases.py` draws their arrays, and has cases that kernels for GPUs pass as well.
"""

import functools as ft
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jpaged.ops.paged_attention as paged
from jpaged.ops.kv_cache import init_layer_kv, write_kv
from jpaged.ops.paged_attention import paged_attention
from tests.kernels import cases
from tests.kernels.cases import Case, Program
from tests.native.kernels import load_or_skip
from tests.oracles import attention as oracle

pytestmark = pytest.mark.optimized

attend = jax.jit(
    paged_attention,
    static_argnames=(
        "num_decode_rows",
        "scale",
        "window",
        "soft_cap",
        "deterministic",
        "implementation",
    ),
)
write = jax.jit(write_kv)


def make_case(
    seed,
    rows,
    *,
    num_decode_rows,
    num_tokens,
    block_size,
    table_width,
    heads=(6, 2, 24),
    dtype="float32",
):
    """Random contents for `rows` of (context_len, num_new); every slot not theirs holds NaN.

    Returns the arguments of `paged_attention` by name, and the pools as NumPy arrays. Table entries
    past a row's blocks point at the null block or at another block, both full of NaN.
    """
    program = Program(
        dtype=dtype,
        heads=heads,
        block_size=block_size,
        num_decode_rows=num_decode_rows,
        num_rows=len(rows),
        num_tokens=num_tokens,
        table_width=table_width,
        num_blocks=len(rows) * table_width + 3,
    )
    inputs = cases.draw(Case("", program, tuple(rows), seed))
    case = {
        "q": jnp.asarray(inputs.q),
        "kv": cases.layer_kv(program, inputs, is_cpu=True, implementation="xla"),
        "block_table": jnp.asarray(inputs.block_table),
        "context_lens": jnp.asarray(inputs.context_lens),
        "query_start_loc": jnp.asarray(inputs.query_start_loc),
        "num_decode_rows": num_decode_rows,
    }
    return case, [inputs.k, inputs.v]


def check(case, pools, *, form, dtype="float32", **rule):
    rule = {"scale": 0.2, "window": None, "soft_cap": None, "sinks": None} | rule
    got = attend(**case, **rule, **form)
    assert got.dtype == case["q"].dtype
    expected = oracle.paged_attention(
        np.asarray(case["q"], np.float64),
        *pools,
        *(np.asarray(case[x]) for x in ("block_table", "context_lens", "query_start_loc")),
        case["num_decode_rows"],
        **rule,
    )
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **cases.TOLERANCE[dtype])


# Around the edges of blocks, of tiles of 32 queries and of tiles of 128 keys.
EDGES = [
    (1, 1),
    (127, 1),
    (128, 1),
    (129, 1),
    (0, 1),
    (300, 31),
    (64, 33),
    (1, 1),
    (0, 0),
    (257, 3),
]
edge_case = ft.partial(make_case, rows=EDGES, num_decode_rows=5, num_tokens=80)
FORMS = {
    "xla": {},
    "deterministic": {"deterministic": True},
    "native": {"implementation": "native"},
}


@pytest.fixture(params=FORMS, scope="module")
def form(request):
    if request.param == "native":
        load_or_skip()
    return FORMS[request.param]


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 128])
def test_any_block_size(block_size, form):
    table_width = -(-300 // block_size)
    check(*edge_case(0, block_size=block_size, table_width=table_width), form=form)


@pytest.mark.parametrize("num_decode_rows", [0, 10])
def test_all_rows_on_one_path(num_decode_rows, form):
    rows = [(c, 1) for c in (1, 2, 15, 16, 17, 0, 128, 129, 250, 256)]
    case = make_case(
        1, rows, num_decode_rows=num_decode_rows, num_tokens=16, block_size=16, table_width=16
    )
    check(*case, form=form)


@pytest.mark.parametrize("heads", [(1, 1, 24), (16, 1, 64), (9, 3, 64), (4, 4, 80), (4, 2, 256)])
def test_any_group_and_head_dim(heads, form):
    case = edge_case(2, block_size=16, table_width=20, heads=heads)
    check(*case, scale=heads[2] ** -0.5, form=form)


@pytest.mark.parametrize(
    "rule",
    [
        {"window": 1},
        {"window": 40},
        {"window": 1000},
        {"soft_cap": 1.5},
        {"sinks": True},
        {"window": 130, "soft_cap": 3.0, "sinks": True},
    ],
)
def test_windows_caps_and_sinks(rule, form):
    if "sinks" in rule:
        rule = rule | {"sinks": jnp.linspace(-3.0, 3.0, 6)}
    check(*edge_case(3, block_size=16, table_width=20), **rule, form=form)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, 70])
def test_half_precision(window, dtype, form):
    case = edge_case(4, block_size=16, table_width=20, dtype=dtype)
    check(*case, dtype=dtype, window=window, form=form)


def test_blocks_that_left_the_window_may_hold_nan(form):
    case, (k_pool, v_pool) = make_case(
        5, [(300, 1), (290, 20)], num_decode_rows=1, num_tokens=24, block_size=4, table_width=75
    )
    left = [np.asarray(case["block_table"])[0, :70], np.asarray(case["block_table"])[1, :62]]
    table = np.asarray(case["block_table"]).copy()
    table[0, :70] = table[1, :62] = 0
    assert not np.isnan(k_pool[np.concatenate(left)]).any()
    case = case | {"block_table": jnp.asarray(table)}
    # Positions below 280 (a decode at 299) and 250 (a first query at 270) are out of sight.
    check(case, (k_pool, np.nan_to_num(v_pool)), window=20, form=form)


LONG = [(700, 1), (0, 1), (600, 1), (900, 20)]
long_case = ft.partial(
    make_case, 7, LONG, num_decode_rows=3, num_tokens=24, block_size=16, table_width=60
)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_that_left_every_window_are_not_read(deterministic, monkeypatch):
    read, read_tile = [], paged._read_tile

    def recorded(t, *args):
        read.append(int(t))
        return read_tile(t, *args)

    def plain_loop(begin, end, body, carry):
        for t in range(int(begin), int(end)):
            carry = body(jnp.int32(t), carry)
        return carry

    monkeypatch.setattr(paged, "_read_tile", recorded)
    monkeypatch.setattr(paged, "lax", SimpleNamespace(**vars(jax.lax) | {"fori_loop": plain_loop}))
    rule = {"scale": 0.2, "window": 100, "soft_cap": None}
    paged_attention(**long_case()[0], **rule, deterministic=deterministic)
    # Decoding: positions 500 to 699, of all rows together. The prompt's: 781 to 899.
    assert read == [3, 4, 5, 6, 7]


def test_no_bit_misses_the_blocks_that_left_the_window(form):
    case, _ = long_case()
    table = np.asarray(case["block_table"]).copy()
    for row, first in enumerate([600, 0, 500, 781]):
        table[row, : first // 16] = 0
    gone = case | {"block_table": jnp.asarray(table)}
    rule = {"scale": 0.2, "window": 100, "soft_cap": None}
    kept, left = (np.asarray(attend(**c, **rule, **form)) for c in (case, gone))
    np.testing.assert_array_equal(kept, left)


def test_contexts_of_many_segments(form):
    rows = [(1500, 1), (40, 1), (1025, 1), (1300, 70), (0, 0)]
    case = make_case(8, rows, num_decode_rows=3, num_tokens=80, block_size=16, table_width=94)
    for window in (None, 600):
        check(*case, window=window, soft_cap=8.0, sinks=jnp.linspace(-1.0, 1.0, 6), form=form)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    decode=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    prefill=st.lists(
        st.tuples(st.integers(0, 230), st.integers(0, 70)), min_size=3, max_size=3
    ).filter(lambda rows: sum(n for _, n in rows) <= 124),
    window=st.sampled_from([None, 33]),
)
def test_any_mix_of_rows(form, seed, decode, prefill, window):
    rows = [(c, 1) for c in decode] + [(past + n, n) for past, n in prefill]
    case = make_case(seed, rows, num_decode_rows=4, num_tokens=128, block_size=16, table_width=19)
    check(*case, window=window, form=form)


class Pool:
    """Rows of random keys, values and queries, asked for in any batches."""

    def __init__(self, dtype, heads, block_size, lens, seed=0):
        rng = np.random.default_rng(seed)
        H, K, C = heads
        width = -(-max(lens) // block_size)
        N = 1 + len(lens) * width
        self.lens = lens
        self.table = 1 + rng.permutation(N - 1).reshape(len(lens), width).astype(np.int32)
        # NumPy's: each slice of a device's array would be a program.
        self.queries = (3 * rng.normal(size=(len(lens), max(lens), H, C))).astype(jnp.dtype(dtype))
        slots = jnp.arange(N * block_size)
        k, v = rng.normal(size=(2, N * block_size, K, C)).astype(jnp.dtype(dtype))
        self.kv = write(init_layer_kv(N, block_size, K, C, dtype, True), k, v, slots)

    def run(self, ranges, *, num_decode_rows, num_rows, num_tokens, **rule):
        """Bits of the queries of each (row, start, stop), as {(row, position): bytes}."""
        table = np.zeros((num_rows, self.table.shape[1]), np.int32)
        context_lens, num_new = np.zeros((2, num_rows), np.int32)
        num_new[:num_decode_rows] = 1
        q = np.zeros((num_tokens, *self.queries.shape[2:]), self.queries.dtype)
        places, at = {}, 0
        for b, (row, start, stop) in enumerate(ranges):
            assert b >= num_decode_rows or stop == start + 1
            table[b], context_lens[b], num_new[b] = self.table[row], stop, stop - start
            q[at : at + stop - start] = self.queries[row, start:stop]
            places |= {(row, start + i): at + i for i in range(stop - start)}
            at += stop - start
        out = attend(
            jnp.asarray(q),
            self.kv,
            block_table=jnp.asarray(table),
            context_lens=jnp.asarray(context_lens),
            query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(num_new)]), jnp.int32),
            num_decode_rows=num_decode_rows,
            **{"scale": 0.3, "window": None, "soft_cap": None} | rule,
        )
        out = np.asarray(out)
        return {place: out[i].tobytes() for place, i in places.items()}


def all_the_ways(pool, rng, **rule):
    """The same queries decoded and prefilled in many company: lists of {(row, position): bits}."""
    rows = range(len(pool.lens))

    def decode(num_rows):
        ranges = [(r, p, p + 1) for r in rows for p in [int(rng.integers(pool.lens[r]))]]
        ranges = [ranges[i] for i in rng.permutation(len(ranges))][:num_rows]
        return pool.run(
            ranges, num_decode_rows=num_rows, num_rows=num_rows, num_tokens=num_rows, **rule
        )

    def chunk():
        ranges, left = [], 96
        for r in rng.permutation(len(rows))[:4]:
            start = int(rng.integers(pool.lens[r]))
            stop = int(min(start + rng.integers(1, 40), pool.lens[r], start + left))
            left -= stop - start
            ranges.append((int(r), start, stop))
        return pool.run(ranges, num_decode_rows=0, num_rows=4, num_tokens=96, **rule)

    def mixed():
        singles = [(r, p, p + 1) for r in rows for p in [int(rng.integers(pool.lens[r]))]][:6]
        start = int(rng.integers(pool.lens[7]))
        ranges = [*singles, (7, start, min(start + 25, pool.lens[7]))]
        return pool.run(ranges, num_decode_rows=6, num_rows=8, num_tokens=96, **rule)

    return [decode(2), decode(8), decode(32), chunk(), mixed()]


LENS = [300, 1, 17, 128, 129, 255, 256, 290, 33, 64, 200, 5]


PLAIN, WINDOW, CAP = {}, {"window": 50}, {"soft_cap": 4.0, "sinks": True}


@pytest.mark.parametrize(
    ("dtype", "heads", "rule"),
    [
        ("float32", (9, 3, 64), PLAIN),
        ("float32", (2, 2, 24), WINDOW),
        ("float32", (8, 1, 80), CAP),
        ("bfloat16", (9, 3, 64), WINDOW),
        ("bfloat16", (2, 2, 24), CAP),
        ("bfloat16", (8, 1, 80), PLAIN),
    ],
)
@pytest.mark.parametrize("name", ["deterministic", "native"])
def test_deterministic_bits_depend_on_the_query_alone(name, dtype, heads, rule):
    if name == "native":
        load_or_skip()
    rule = rule | FORMS[name]
    pool = Pool(dtype, heads, 16, LENS)
    if "sinks" in rule:
        rule = rule | {"sinks": jnp.linspace(-1.0, 2.0, heads[0])}
    whole = {}
    for r in range(len(LENS)):
        whole |= pool.run([(r, 0, LENS[r])], num_decode_rows=0, num_rows=1, num_tokens=300, **rule)
    rng = np.random.default_rng(1)
    for _ in range(8):
        for bits in all_the_ways(pool, rng, **rule):
            assert bits == {place: whole[place] for place in bits}


def test_without_the_mode_bits_depend_on_the_company():
    """The control: the test above can fail."""
    pool = Pool("float32", (2, 2, 24), 16, LENS)
    alone = pool.run([(0, 299, 300)], num_decode_rows=2, num_rows=2, num_tokens=2)
    whole = pool.run([(0, 0, 300)], num_decode_rows=0, num_rows=1, num_tokens=300)
    assert alone[0, 299] != whole[0, 299]
