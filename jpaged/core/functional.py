"""A whole generation as one pure function, for other people's `jit` and `scan`.

Composes `admit`, `step`, `decode_window` and `release`; the model is an argument. Prompts sit in
empty rows of the state and leave them at the end, so that other rows are untouched and the next
call finds this one's full blocks in the prefix cache. What can be judged from shapes raises when
the caller's program is traced; what only the device knows comes back as `status`.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.admissions import Sampling, make_admissions
from jpaged.core.batch import Forward
from jpaged.core.logits_rules import LogitsProcessor, LogitsRules, set_rules
from jpaged.core.rows import admit, release
from jpaged.core.sampling import PLAIN, Sampler
from jpaged.core.state import NULL_ROW, EngineState, Rows
from jpaged.core.step import StepInputs, StepOutput, decode_window, step
from jpaged.typing import Array, Bool, Float, Int, Params, UInt32

STATUS_NOT_SEATED = 3  # no empty rows were left, or the prompt's length is not from 1 to P

_NO_LIMIT = jnp.iinfo(jnp.int32).max


@struct.dataclass
class Generation:
    """What became of A prompts with n samples each: row a * n + i is sample i of prompt a."""

    token_ids: Int[Array, "B X"]  # the output, X = max_new_tokens; `pad_id` past its end
    logprobs: Float[Array, "B X"]  # raw log-softmax at the sampled ids; 0 past the end
    lengths: Int[Array, " B"]  # output tokens
    sequences: Int[Array, "B P+X"]  # prompt and output; `pad_id` past the end
    finish_reason: Int[Array, " B"]  # STOP_*; RUNNING if `status` kept the row from its end
    status: Int[Array, " B"]  # STATUS_*
    num_cached: Int[Array, " A"]  # prompt tokens found in the prefix cache
    state: EngineState  # the rows used are empty again


def new_weights(state: EngineState) -> EngineState:
    """The state for other weights: nothing cached so far is found by later prompts.

    Rows in the middle of a generation go on upon the KV they have.
    """
    return replace(state, weights_version=state.weights_version + 1)


def step_inputs(row_ids: Int[Array, " B"]) -> StepInputs:
    """Inputs of a `step` that runs all the tokens its budget allows, and forks nothing."""
    own = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    return StepInputs(row_ids, jnp.full_like(own, _NO_LIMIT), own, jnp.zeros_like(own))


def blocks_per_prompt(prompt_len: int, max_new_tokens: int, n: int, block_size: int) -> int:
    """Most blocks that a prompt of at most `prompt_len` tokens and its n samples hold together.

    Full blocks of the prompt are shared; the last token of an output needs no KV. What a model's
    window lets go of on the way is counted as held: such a model holds fewer.
    """
    most = 0
    for length in range(1, prompt_len + 1):
        num_full = length // block_size
        num_all = -(-(length + max_new_tokens - 1) // block_size)
        most = max(most, num_full + n * (num_all - num_full))
    return most


def _check_room(state: EngineState, prompts: Array, max_new_tokens: int, n: int) -> None:
    A, P = prompts.shape
    num_rows, num_blocks = state.rows.num_tokens.size - 1, state.pool.ref_count.size - 1
    if n < 1 or A * n > num_rows:
        raise ValueError(
            f"{A} prompts with n={n} samples (at least 1) need {A * n} rows, and the state has "
            f"{num_rows}; make it with a larger num_rows, or split the prompts"
        )
    needed = A * blocks_per_prompt(P, max_new_tokens, n, state.rows.block_size)
    if needed > num_blocks:
        raise ValueError(
            f"{A} prompts of up to {P} tokens with n={n} samples of up to {max_new_tokens} need "
            f"{needed + 1} blocks, the null block included, and the pool has {num_blocks + 1}; "
            "make the state with a larger num_blocks, or split the prompts"
        )


class _Record(NamedTuple):
    """What the steps have told so far, per row of the call."""

    logprobs: Float[Array, "B X"]
    finish_reason: Int[Array, " B"]
    status: Int[Array, " B"]


_Carry = tuple[EngineState, _Record, Bool[Array, ""]]  # the last: whether any row got on


def generate(
    params: Params,
    state: EngineState,
    prompts: Int[Array, "A P"],
    prompt_lens: Int[Array, " A"],
    keys: Array,
    *,
    forward: Forward,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    n: int = 1,
    request_root: UInt32[Array, "A 4"] | None = None,
    rules: LogitsRules | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
    num_prefill_tokens: int = 1024,
    num_decode_steps: int = 8,
    pad_id: int = 0,
) -> Generation:
    """Completes A prompts, n samples each, reading every prompt once.

    prompts: token ids in the vocabulary, padded on the right; prompt_lens: from 1 to P.
    keys, request_root: as in `make_admissions`; sample i of a prompt draws as `jpaged.LLM`'s does.
    rules: what changes each prompt's logits, see `make_rules`. processors: those of `rules`.
    num_prefill_tokens: most prompt tokens in one forward pass. num_decode_steps: decode steps
        between two looks at whether any row still runs. Neither changes a token.

    Raises ValueError if the state has too few rows, positions or blocks (`blocks_per_prompt`) for
    these shapes. Blocks that the caller's own rows hold are known on the device only: see
    `Generation.status`.
    """
    _check_room(state, prompts, max_new_tokens, n)
    row_ids = _find_seats(state.rows, prompt_lens, prompts.shape[1], n)
    admissions = make_admissions(
        state,
        row_ids[::n],
        prompts,
        prompt_lens,
        keys,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        request_root=request_root,
    )
    state, num_cached = admit(state, admissions, window=forward.window)
    sampler = PLAIN
    if rules is not None:
        state = _set_rules(state, row_ids[::n], rules)
        sampler = Sampler(has_rules=True, processors=processors)
    # One row alone would multiply vectors, which a CPU does slowly.
    row_ids = jnp.pad(row_ids, (0, max(0, 2 - row_ids.shape[0])))
    num_tokens = min(num_prefill_tokens, prompts.size)
    runs = _Runs(params, row_ids, forward, sampler)
    state, record = _read_prompts(runs, state, max_new_tokens, n, num_tokens)
    if max_new_tokens > 1:
        num_steps = min(num_decode_steps, max_new_tokens - 1)
        state, record = _decode(runs, state, record, num_steps)
    width = prompts.shape[1] + max_new_tokens
    return _collect(state, record, row_ids, num_cached, n=n, width=width, pad_id=pad_id)


class _Runs(NamedTuple):
    """What all steps of a call have in common."""

    params: Params
    row_ids: Int[Array, " B"]
    forward: Forward
    sampler: Sampler


def _set_rules(state: EngineState, row_ids: Int[Array, " A"], rules: LogitsRules) -> EngineState:
    room = state.sampling.rules
    if room is None:
        raise ValueError("this state has no room for rules; make it with rule_sizes")
    new = set_rules(room, row_ids, rules)
    return replace(state, sampling=replace(state.sampling, rules=new))


def _find_seats(
    rows: Rows, prompt_lens: Int[Array, " A"], longest: int, n: int
) -> Int[Array, " B"]:
    """n empty rows for each prompt; the null row for prompts that can not be seated."""
    is_empty = (rows.num_tokens == 0).at[NULL_ROW].set(False)
    size = prompt_lens.shape[0] * n
    ids = jnp.nonzero(is_empty, size=size, fill_value=NULL_ROW)[0].astype(jnp.int32)
    groups = ids.reshape(-1, n)
    is_seated = (groups[:, -1] != NULL_ROW) & (prompt_lens >= 1) & (prompt_lens <= longest)
    return jnp.where(is_seated[:, None], groups, NULL_ROW).reshape(-1)


def _read_prompts(
    runs: _Runs, state: EngineState, max_new_tokens: int, n: int, num_tokens: int
) -> tuple[EngineState, _Record]:
    """Runs prompts in chunks; a row that has read its prompt is forked and draws first tokens."""
    row_ids, B = runs.row_ids, runs.row_ids.shape[0]
    place = jnp.arange(B, dtype=jnp.int32)
    nothing = jnp.zeros(B, jnp.int32)

    def is_reading(rows: Rows) -> Bool[Array, " B"]:
        is_prompt = (rows.num_tokens == rows.prompt_len) & (rows.context_len < rows.num_tokens)
        return (rows.active & is_prompt)[row_ids]

    def one_step(carry: _Carry) -> _Carry:
        state, record, _ = carry
        limits = jnp.where(is_reading(state.rows), num_tokens, 0)
        inputs = StepInputs(row_ids, limits, parent=place // n * n, sample_index=place % n)
        state, output = step(
            runs.params,
            state,
            inputs,
            forward=runs.forward,
            num_tokens=num_tokens,
            num_decode_rows=0,
            sampler=runs.sampler,
        )
        told = jax.tree.map(lambda x: x[None], output)
        return state, _add(record, nothing, told), jnp.any(output.granted > 0)

    record = _Record(jnp.zeros((B, max_new_tokens), jnp.float32), nothing, nothing)
    state, record, _ = lax.while_loop(
        lambda carry: carry[2] & jnp.any(is_reading(carry[0].rows)),
        one_step,
        (state, record, jnp.array(True)),
    )
    return state, record


def _decode(
    runs: _Runs, state: EngineState, record: _Record, num_steps: int
) -> tuple[EngineState, _Record]:
    """Runs windows until every row has ended, or none can get on."""
    row_ids = runs.row_ids

    def is_ready(rows: Rows) -> Bool[Array, " B"]:
        return (rows.active & (rows.num_tokens - rows.context_len == 1))[row_ids]

    def one_window(carry: _Carry) -> _Carry:
        state, record, _ = carry
        num_before = (state.rows.num_tokens - state.rows.prompt_len)[row_ids]
        state, output = decode_window(
            runs.params,
            state,
            row_ids,
            forward=runs.forward,
            num_steps=num_steps,
            sampler=runs.sampler,
        )
        return state, _add(record, num_before, output), jnp.any(output.granted > 0)

    state, record, _ = lax.while_loop(
        lambda carry: carry[2] & jnp.any(is_ready(carry[0].rows)),
        one_window,
        (state, record, jnp.array(True)),
    )
    return state, record


def _add(record: _Record, num_before: Int[Array, " B"], output: StepOutput) -> _Record:
    """Takes in the outputs of J steps. num_before: tokens each row had put out before them."""
    (J, B), X = output.is_sampled.shape, record.logprobs.shape[1]
    place = jnp.arange(B, dtype=jnp.int32)[None]
    column = num_before[None] + jnp.arange(J, dtype=jnp.int32)[:, None]
    column = jnp.where(output.is_sampled, column, X)  # past the end: dropped
    told, has_run = jnp.max(output.status, axis=0), jnp.any(output.granted > 0, axis=0)
    return _Record(
        logprobs=record.logprobs.at[place, column].set(output.logprobs, mode="drop"),
        finish_reason=jnp.maximum(record.finish_reason, jnp.max(output.finish_reason, axis=0)),
        # A row that waited for blocks and got them is well again.
        status=jnp.where(has_run | (told > 0), told, record.status),
    )


def _collect(
    state: EngineState,
    record: _Record,
    row_ids: Int[Array, " B"],
    num_cached: Int[Array, " A"],
    *,
    n: int,
    width: int,
    pad_id: int,
) -> Generation:
    """Reads the outputs off their rows, and empties these."""
    B, X = num_cached.shape[0] * n, record.logprobs.shape[1]
    state, rows, row_ids = release(state, row_ids), state.rows, row_ids[:B]
    record = jax.tree.map(lambda x: x[:B], record)
    parent = jnp.arange(B, dtype=jnp.int32) // n * n
    is_seated = row_ids != NULL_ROW
    num_tokens = rows.num_tokens[row_ids]
    prompt_len = rows.prompt_len[row_ids[parent]]
    lengths = jnp.maximum(num_tokens - prompt_len, 0)  # a child never forked has no tokens at all

    column = jnp.arange(width, dtype=jnp.int32)[None]
    is_token = column < jnp.where(is_seated, num_tokens, 0)[:, None]
    sequences = jnp.where(is_token, rows.token_ids[row_ids, :width], pad_id)
    at = jnp.minimum(prompt_len[:, None] + column[:, :X], width - 1)
    token_ids = jnp.take_along_axis(sequences, at, axis=1)
    # A sample without a token shares what befell its prompt.
    finish_reason, status = (
        jnp.where(lengths > 0, x, x[parent]) for x in (record.finish_reason, record.status)
    )
    return Generation(
        token_ids=jnp.where(column[:, :X] < lengths[:, None], token_ids, pad_id),
        logprobs=record.logprobs,
        lengths=lengths,
        sequences=sequences,
        finish_reason=finish_reason,
        status=jnp.where(is_seated, status, STATUS_NOT_SEATED),
        num_cached=num_cached,
        state=state,
    )
