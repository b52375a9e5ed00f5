"""Beam search: score, choose and re-seat beams on the device, many steps without the host.

A group is the W beams of one prompt; it holds W rows, and all its live beams have equally many
tokens. A step computes each live beam's next token, ranks all continuations of the group together,
and re-seats the rows: row w becomes a copy of the parent of the w-th best beam and shares its
blocks; the first write into a shared block copies it. Nothing is computed twice: the group starts
with one live row, which reads the prompt and becomes the parent of all.

    rows before   1: The cat     2: A dog      3: The dog
    best          The cat sat    The cat is    A dog is
    parents       1              1             2            row 3's own blocks are free again

What is best, and when a search ends, `beam_rules` tells.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.batch import Forward, make_batch
from jpaged.core.beam_rules import Beams, Choice, choose, is_live
from jpaged.core.block_pool import num_free
from jpaged.core.rows import fork, leave_window, reserve, share_rows
from jpaged.core.state import NULL_ROW, EngineState, Rows
from jpaged.core.step import STATUS_BAD_NUMBERS, STATUS_NO_BLOCKS, STATUS_OK, run_forward
from jpaged.typing import Array, Bool, Int, Params


@struct.dataclass
class BeamOutput:
    """What the host is told besides the beams."""

    num_new: Int[Array, " G"]  # tokens by which the group's contexts grew
    num_tails: Int[Array, " G"]  # different blocks that the rows would write into next
    status: Int[Array, " G"]
    num_free_blocks: Int[Array, ""]


def spread(
    state: EngineState,
    parent: Int[Array, " A"],
    row_ids: Int[Array, " A"],
    token_ids: Int[Array, "A W"],
    num_tokens: Int[Array, " A"],
) -> EngineState:
    """Seats beams that were interrupted: rows that share all of `parent`'s KV, and then go on with
    tokens of their own, which begin with the parent's context. Padded with the null row."""
    state = fork(state, parent, row_ids, jnp.zeros_like(row_ids))
    target = jnp.where(row_ids == NULL_ROW, state.rows.num_tokens.shape[0], row_ids)
    width = state.rows.token_ids.shape[1] - token_ids.shape[1]
    token_ids = jnp.pad(token_ids, ((0, 0), (0, width)))
    rows = replace(
        state.rows,
        token_ids=state.rows.token_ids.at[target].set(token_ids, mode="drop"),
        num_tokens=state.rows.num_tokens.at[target].set(num_tokens, mode="drop"),
    )
    return replace(state, rows=rows)


def beam_window(
    params: Params,
    state: EngineState,
    beams: Beams,
    *,
    forward: Forward,
    num_steps: int,
    num_candidates: int,
) -> tuple[EngineState, Beams, BeamOutput]:
    """J = `num_steps` steps of beam search.

    num_candidates: the best continuations looked at, of each beam and, under Hugging Face's rule,
        of the group: (1 + number of end-of-sequence ids, at least 1) * W.
    A group takes part if the blocks it can need at most are free, counted before the first step:
    then no step can lack any, since nobody else takes blocks meanwhile. Rows that lag behind their
    tokens catch up one token a step before the group chooses again.
    """
    fits = _groups_that_fit(state, beams, num_steps)
    num_before = state.rows.context_len[beams.row_ids[:, 0]]

    def one_step(carry: tuple[EngineState, Beams, Bool[Array, " G"]], _: None):
        state, beams, is_good = carry
        is_on = fits & ~beams.is_done
        state, beams, is_good_now = _beam_step(
            params, state, beams, is_on, forward=forward, num_candidates=num_candidates
        )
        return (state, beams, is_good & is_good_now), None

    carry = (state, beams, jnp.ones_like(fits))
    (state, beams, is_good), _ = lax.scan(one_step, carry, length=num_steps)
    state = leave_window(state, beams.row_ids.reshape(-1), window=forward.window)
    status = jnp.where(is_good, STATUS_OK, STATUS_BAD_NUMBERS)
    output = BeamOutput(
        num_new=state.rows.context_len[beams.row_ids[:, 0]] - num_before,
        num_tails=_num_tails(state.rows, beams.row_ids),
        status=jnp.where(fits, status, STATUS_NO_BLOCKS),
        num_free_blocks=num_free(state.pool),
    )
    return state, beams, output


def _groups_that_fit(state: EngineState, beams: Beams, num_steps: int) -> Bool[Array, " G"]:
    wanted = jnp.where(beams.is_done, 0, blocks_wanted(state.rows, beams, num_steps))
    return jnp.cumsum(wanted, dtype=jnp.int32) <= num_free(state.pool)


def blocks_wanted(rows: Rows, beams: Beams, num_steps: int) -> Int[Array, " G"]:
    """Most blocks that J steps can take: a row's own in each column past what all rows share.

                   shared           own, at worst
    row 0   [ block ][ block ][ . .  |  ][ . . . ]
    row 1   [   ''  ][   ''  ][ . .  |  ][ . . . ]     last block of the shared part: partly filled,
    row 2   [   ''  ][   ''  ][ . .  |  ][ . . . ]     the rows have `num_tails` of it already
    """
    S, W = rows.block_size, beams.row_ids.shape[1]
    first = beams.row_ids[:, 0]
    context_len, num_tokens = rows.context_len[first], rows.num_tokens[first]
    end = jnp.minimum(context_len + num_steps, beams.max_len - 1)
    is_single = jnp.sum(is_live(beams), axis=1) == 1
    shared_len = jnp.where(is_single, num_tokens, context_len)
    shared_end = jnp.minimum(end, shared_len)
    grow = jnp.maximum(-(-shared_end // S) - rows.num_blocks[first], 0)
    num_tails = jnp.where(is_single, 1, _num_tails(rows, beams.row_ids))
    num_tails = jnp.where(shared_len % S == 0, 0, num_tails)
    own = W * (-(-end // S) - shared_len // S) - num_tails
    return jnp.where(is_single, grow, 0) + jnp.where(end > shared_len, own, 0)


def _num_tails(rows: Rows, row_ids: Int[Array, "G W"]) -> Int[Array, " G"]:
    """How many different partly filled blocks the rows of a group end in."""
    (M, W), context_len = (rows.block_table.shape[1], row_ids.shape[1]), rows.context_len[row_ids]
    column = jnp.minimum(context_len // rows.block_size, M - 1)
    tail = rows.block_table[row_ids, column]
    tail = jnp.where(context_len % rows.block_size == 0, 0, tail)
    is_same = (tail[:, :, None] == tail[:, None, :]) & jnp.tri(W, k=-1, dtype=bool)[None]
    return jnp.sum((tail != 0) & ~jnp.any(is_same, axis=2), axis=1, dtype=jnp.int32)


def _beam_step(
    params: Params,
    state: EngineState,
    beams: Beams,
    is_on: Bool[Array, " G"],
    *,
    forward: Forward,
    num_candidates: int,
) -> tuple[EngineState, Beams, Bool[Array, " G"]]:
    """One forward pass of the live rows, and a choice in groups that have caught up."""
    (G, W), row_ids = beams.row_ids.shape, beams.row_ids.reshape(-1)
    B = G * W
    is_running = (is_live(beams) & is_on[:, None]).reshape(B)
    state, granted = reserve(state, row_ids, is_running.astype(jnp.int32), max_new=B)
    batch = make_batch(state.rows, row_ids, granted, num_tokens=B, num_decode_rows=B)
    state, hidden, is_good = run_forward(params, state, row_ids, granted, batch, forward)
    logits = forward.logits(params, hidden)
    is_good = jnp.all((is_good & ~jnp.any(jnp.isnan(logits), 1) | ~is_running).reshape(G, W), 1)

    lag = (state.rows.num_tokens - state.rows.context_len)[row_ids]
    is_choosing = is_on & is_good & ~jnp.any((is_running & (lag > 0)).reshape(G, W), axis=1)
    num_tokens = state.rows.num_tokens[beams.row_ids[:, 0]]
    choice = choose(beams, logits.reshape(G, W, -1), num_tokens, num_candidates)
    rows, pool = _re_seat(state, beams, choice, is_choosing)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(is_choosing.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    beams = replace(
        beams,
        live=jax.tree.map(chosen, choice.beams.live, beams.live),
        finished=jax.tree.map(chosen, choice.beams.finished, beams.finished),
        is_done=chosen(choice.beams.is_done, beams.is_done),
    )
    beams = replace(beams, is_done=beams.is_done | (is_on & ~is_good))
    return replace(state, rows=rows, pool=pool), beams, is_good


def _re_seat(state: EngineState, beams: Beams, choice: Choice, is_choosing: Bool[Array, " G"]):
    """Rows become copies of their beams' parents, with one more token; dead ones are emptied."""
    row_ids, lives = beams.row_ids, is_live(choice.beams)
    parent = jnp.take_along_axis(row_ids, choice.parent, axis=1)
    parent = jnp.where(lives, parent, NULL_ROW)
    parent = jnp.where(is_choosing[:, None], parent, row_ids).reshape(-1)
    row_ids = row_ids.reshape(-1)
    rows, pool = share_rows(state.rows, state.pool, parent, row_ids)
    grows = (is_choosing[:, None] & lives).reshape(-1)
    position = jnp.where(grows, rows.num_tokens[row_ids], rows.token_ids.shape[1])
    token_ids = rows.token_ids.at[row_ids, position].set(choice.token.reshape(-1), mode="drop")
    num_tokens = rows.num_tokens.at[row_ids].add(grows.astype(jnp.int32))
    return replace(rows, token_ids=token_ids, num_tokens=num_tokens), pool
