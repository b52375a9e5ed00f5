"""One step: every row's context catches up with its tokens, and rows that caught up get a token.

`step` serves prompts, chunks of prompts and decoding alike; `decode_window` runs J decode steps
without the host. Both reserve blocks first, only compute slots afterwards, and let go of blocks
that have left the model's window in the end. A row that can not be served is reported, never
raised: errors are data.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jpaged.core.batch import Batch, Forward, KVCache, make_batch
from jpaged.core.block_pool import num_free
from jpaged.core.logits_rules import History
from jpaged.core.prefix_cache import seal_blocks
from jpaged.core.prompt_scores import PromptScores, score_prompts
from jpaged.core.rows import fork, leave_window, reserve
from jpaged.core.sampling import PLAIN, Sampler, Told, finish_reasons, sample
from jpaged.core.state import NULL_ROW, BlockPool, EngineState, Rows
from jpaged.typing import Array, Bool, Float, Int, Params

STOP_ERROR = 4  # beside core.sampling's reasons to stop: the row's numbers went wrong
STATUS_OK = 0
STATUS_NO_BLOCKS = 1  # the row asked for tokens and got none: the pool is exhausted
STATUS_BAD_NUMBERS = 2  # NaN in the row's hidden state or logits
STATUS_NO_CHOICE = 4  # the row's rules left no token to draw; 3 is `functional`'s


@struct.dataclass
class StepOutput:
    """What the host is told, per row of the step (with a leading J after a window)."""

    token_ids: Int[Array, " B"]  # the sampled token where `is_sampled`
    told: Told  # of the distribution it is from, where the row asked for it
    is_sampled: Bool[Array, " B"]
    finish_reason: Int[Array, " B"]  # core.sampling's RUNNING and STOP_*, or STOP_ERROR
    granted: Int[Array, " B"]  # tokens whose KV was written
    status: Int[Array, " B"]
    num_free_blocks: Int[Array, ""]
    prompt: PromptScores | None = None  # of the step's tokens, if asked for

    @property
    def logprobs(self) -> Any:
        """Log-probabilities of the sampled tokens, [B] or [J B], where asked for; JAX's, or NumPy's
        once they are read."""
        return self.told.logprobs


@struct.dataclass
class StepInputs:
    """Which rows take part. B rows, padded with the null row."""

    row_ids: Int[Array, " B"]
    limits: Int[Array, " B"]  # most tokens to run of each row
    parent: Int[Array, " B"]  # index of the row to fork from before the first draw; own index: none
    sample_index: Int[Array, " B"]  # of forked rows
    score_from: Int[Array, " B"] | None = None  # first prompt position that `num_prompt_top` scores


def step(
    params: Params,
    state: EngineState,
    inputs: StepInputs,
    *,
    forward: Forward,
    num_tokens: int,
    num_decode_rows: int,
    sampler: Sampler = PLAIN,
    num_prompt_top: int | None = None,
) -> tuple[EngineState, StepOutput]:
    """Runs up to `num_tokens` tokens of the given rows, and samples for rows that caught up.

    num_tokens: T, the token budget (static). Rows are served in order, each with its gap clipped
        to its limit and to what is left of the budget.
    num_decode_rows: the first rows, which get one token each (static).
    num_prompt_top: score prompt tokens from `inputs.score_from` on, see `score_prompts` (static).
    Rows whose `parent` is another row of the step are forked from it once it has caught up, and
    draw their first token from its logits.
    """
    num_new = _share_budget(state.rows, inputs, num_tokens, num_decode_rows)
    state, granted = reserve(state, inputs.row_ids, num_new, max_new=num_tokens)
    batch = make_batch(
        state.rows,
        inputs.row_ids,
        granted,
        num_tokens=num_tokens,
        num_decode_rows=num_decode_rows,
    )
    state, output = _run(
        params, state, inputs, granted, batch, forward, sampler, num_prompt_top=num_prompt_top
    )
    status = jnp.where((num_new > 0) & (granted == 0), STATUS_NO_BLOCKS, output.status)
    state = leave_window(state, inputs.row_ids, window=forward.window)
    return state, replace(output, status=status, num_free_blocks=num_free(state.pool))


def decode_window(
    params: Params,
    state: EngineState,
    row_ids: Int[Array, " B"],
    num_run: Int[Array, ""] | None = None,
    *,
    forward: Forward,
    num_steps: int,
    sampler: Sampler = PLAIN,
) -> tuple[EngineState, StepOutput]:
    """J = `num_steps` decode steps of rows that lack the KV of one token.

    num_run: so many of them, 1 to J, are run; None: all. The others' outputs are zeros, but for the
        free blocks and for rows that found none. One program then serves windows of any length.
    Blocks for the whole window are reserved first, for each row what it can still use; a row that
    does not fit sits out. A row that stops inside the window pads with the null block from there.
    Returns the state and outputs with a leading J; `num_free_blocks` is the same in all.
    """
    left = state.sampling.max_len[row_ids] - state.rows.num_tokens[row_ids]
    is_ready = state.rows.active[row_ids] & (_gap(state.rows, row_ids) == 1)
    most = num_steps if num_run is None else num_run
    wanted = jnp.where(is_ready, jnp.clip(left, 1, most), 0)
    max_new = num_steps * row_ids.shape[0]
    state, reserved = reserve(state, row_ids, wanted, max_new=max_new)
    own = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    inputs = StepInputs(row_ids, reserved, own, jnp.zeros_like(own))

    def one_step(carry: tuple[Rows, BlockPool, KVCache], _):
        now = replace(state, rows=carry[0], pool=carry[1], kv=carry[2])
        granted = ((reserved > 0) & now.rows.active[row_ids]).astype(jnp.int32)
        B = row_ids.shape[0]
        batch = make_batch(now.rows, row_ids, granted, num_tokens=B, num_decode_rows=B)
        now, output = _run(params, now, inputs, granted, batch, forward, sampler, can_fork=False)
        return (now.rows, now.pool, now.kv), output

    carry = (state.rows, state.pool, state.kv)
    (rows, pool, kv), output = _repeat(one_step, carry, num_steps, num_run)
    state = replace(state, rows=rows, pool=pool, kv=kv)
    state = leave_window(state, row_ids, window=forward.window)
    status = jnp.where((wanted > 0) & (reserved == 0), STATUS_NO_BLOCKS, output.status)
    left = jnp.full_like(output.num_free_blocks, num_free(state.pool))
    return state, replace(output, status=status, num_free_blocks=left)


def _repeat(
    one: Callable[[Any, None], tuple[Any, Any]],
    carry: Any,
    length: int,
    num_run: Int[Array, ""] | None,
) -> tuple[Any, Any]:
    """`lax.scan` without inputs, of which only the first `num_run` steps may be run."""
    if num_run is None:
        return lax.scan(one, carry, length=length)
    # Traced once, and not once for the shapes and once for the loop.
    traced, (_, shapes) = jax.make_jaxpr(one, return_shape=True)(carry, None)
    run, treedef = jaxpr_as_fun(traced), jax.tree.structure((carry, shapes))
    outputs = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes)

    def body(i: Int[Array, ""], both: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, output = jax.tree.unflatten(treedef, run(*jax.tree.leaves(both[0])))
        return carry, jax.tree.map(lambda all_, x: all_.at[i].set(x), both[1], output)

    return lax.fori_loop(0, num_run, body, (carry, outputs))


def _gap(rows: Rows, row_ids: Int[Array, " B"]) -> Int[Array, " B"]:
    return rows.num_tokens[row_ids] - rows.context_len[row_ids]


def _share_budget(
    rows: Rows, inputs: StepInputs, num_tokens: int, num_decode_rows: int
) -> Int[Array, " B"]:
    """Tokens each row runs: its gap, clipped to its limit and, in order, to the token budget."""
    wanted = jnp.minimum(_gap(rows, inputs.row_ids), inputs.limits)
    wanted = jnp.where(rows.active[inputs.row_ids], jnp.maximum(wanted, 0), 0)
    is_decode = jnp.arange(wanted.shape[0]) < num_decode_rows
    prefill = jnp.where(is_decode, 0, wanted)
    before = jnp.cumsum(prefill, dtype=jnp.int32) - prefill
    left = jnp.maximum(num_tokens - num_decode_rows - before, 0)
    return jnp.where(is_decode, jnp.minimum(wanted, 1), jnp.minimum(prefill, left))


def _run(
    params: Params,
    state: EngineState,
    inputs: StepInputs,
    granted: Int[Array, " B"],
    batch: Batch,
    forward: Forward,
    sampler: Sampler,
    *,
    can_fork: bool = True,
    num_prompt_top: int | None = None,
) -> tuple[EngineState, StepOutput]:
    """Forward pass, forks, draws: what step and window share."""
    row_ids, scores = inputs.row_ids, None
    state, hidden, is_good = run_forward(params, state, row_ids, granted, batch, forward)
    if num_prompt_top is not None:
        assert inputs.score_from is not None
        at = (state.rows, row_ids, inputs.score_from)
        scores = score_prompts(params, *at, batch, hidden, forward=forward, num_top=num_prompt_top)
        is_good &= ~has_nan_tokens(scores.logprobs[:, None], batch)
    caught_up = (granted > 0) & (_gap(state.rows, row_ids) == 0)
    if can_fork:
        is_fork = (inputs.parent != jnp.arange(row_ids.shape[0])) & caught_up[inputs.parent]
        state = _fork_rows(state, inputs, is_fork)
        caught_up |= is_fork
    last_token = jnp.maximum(batch.query_start_loc[1:] - 1, 0)[inputs.parent]
    # Zeros for rows that draw nothing: products in C++ skip them at the end.
    logits = forward.logits(params, jnp.where(caught_up[:, None], hidden[last_token], 0))
    is_good = is_good[inputs.parent] & ~(caught_up & jnp.any(jnp.isnan(logits), axis=-1))
    state, output = _draw(state, row_ids, granted, logits, caught_up, is_good, sampler)
    return state, replace(output, prompt=scores)


def run_forward(
    params: Params,
    state: EngineState,
    row_ids: Int[Array, " B"],
    granted: Int[Array, " B"],
    batch: Batch,
    forward: Forward,
) -> tuple[EngineState, Float[Array, "T D"], Bool[Array, " B"]]:
    """Computes a batch and publishes the blocks it filled.

    granted: the rows' tokens in the batch, by which their contexts grow. Returns the state, the
    tokens' hidden states, and which rows are free of NaN; the others publish nothing.
    """
    hidden, kv = forward.hidden(params, batch, state.kv)
    is_good = ~has_nan_tokens(hidden, batch)
    rows = replace(state.rows, context_len=state.rows.context_len.at[row_ids].add(granted))
    pool, rows = seal_blocks(state.pool, rows, row_ids, batch, state.hash_key, is_good)
    return replace(state, rows=rows, pool=pool, kv=kv), hidden, is_good


def has_nan_tokens(hidden: Float[Array, "T D"], batch: Batch) -> Bool[Array, " B"]:
    """Rows with a NaN among what their tokens gave."""
    is_bad = jnp.any(jnp.isnan(hidden), axis=-1) & (batch.slot_mapping != 0)
    num_rows = batch.context_lens.shape[0]
    return jnp.zeros(num_rows, bool).at[batch.token_rows].max(is_bad)


def _fork_rows(state: EngineState, inputs: StepInputs, is_fork: Bool[Array, " B"]) -> EngineState:
    parent = jnp.where(is_fork, inputs.row_ids[inputs.parent], NULL_ROW)
    child = jnp.where(is_fork, inputs.row_ids, NULL_ROW)
    return lax.cond(
        jnp.any(is_fork), lambda s: fork(s, parent, child, inputs.sample_index), lambda s: s, state
    )


def _draw(
    state: EngineState,
    row_ids: Int[Array, " B"],
    granted: Int[Array, " B"],
    logits: Float[Array, "B V"],
    caught_up: Bool[Array, " B"],
    is_good: Bool[Array, " B"],
    sampler: Sampler,
) -> tuple[EngineState, StepOutput]:
    """Samples a token for rows that caught up, appends it, and decides who stops."""
    rows = state.rows
    sampling = jax.tree.map(lambda field: field[row_ids], state.sampling)
    can_draw = caught_up & is_good
    position = rows.num_tokens[row_ids]
    history = History(rows.token_ids[row_ids], position, rows.prompt_len[row_ids])
    token_ids, told, has_choice = sample(
        sampling,
        rows.sample_index[row_ids],
        history,
        logits,
        is_sampling=can_draw,
        sampler=sampler,
    )
    is_sampled = can_draw & has_choice
    num_tokens = position + is_sampled.astype(jnp.int32)
    finish = jnp.where(is_sampled, finish_reasons(sampling, token_ids, num_tokens), 0)
    is_failed = (((granted > 0) | caught_up) & ~is_good) | (can_draw & ~has_choice)
    finish = jnp.where(is_failed, STOP_ERROR, finish)
    status = jnp.where(can_draw & ~has_choice, STATUS_NO_CHOICE, STATUS_OK)

    P = rows.token_ids.shape[1]
    target = jnp.where(is_sampled, position, P)
    rows = replace(
        rows,
        token_ids=rows.token_ids.at[row_ids, target].set(token_ids, mode="drop"),
        num_tokens=rows.num_tokens.at[row_ids].set(num_tokens),
        active=rows.active.at[row_ids].min(finish == 0),
    )
    output = StepOutput(
        token_ids=token_ids,
        told=told,
        is_sampled=is_sampled,
        finish_reason=finish,
        granted=granted,
        status=jnp.where(is_good, status, STATUS_BAD_NUMBERS),
        num_free_blocks=num_free(state.pool),
    )
    return replace(state, rows=rows), output
