"""Beam search: score, choose and re-seat beams on the device, many steps without the host.

A group is the W beams of one prompt; it holds W rows, and all its live beams have equally many
tokens. A step computes each live beam's next token, ranks all continuations of the group together,
and re-seats the rows: row w becomes a copy of the parent of the w-th best beam and shares its
blocks; the first write into a shared block copies it. Nothing is computed twice: the group starts
with one live row, which reads the prompt and becomes the parent of all.

    rows before   1: The cat     2: A dog      3: The dog
    best          The cat sat    The cat is    A dog is
    parents       1              1             2            row 3's own blocks are free again

Two rules are known, see `VLLM` and `HF_*`. They differ in what a sequence's score divides by, in
which finished sequences count, and in when a search is over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.batch import Forward, make_batch
from jpaged.core.block_pool import num_free
from jpaged.core.rows import fork, leave_window, reserve, share_rows
from jpaged.core.state import NULL_ROW, EngineState, Rows
from jpaged.core.step import STATUS_BAD_NUMBERS, STATUS_NO_BLOCKS, STATUS_OK, run_forward
from jpaged.core.vocabulary import top_logprobs
from jpaged.typing import Array, Bool, Float, Int, Params

VLLM = 0
"""vLLM's rule. score = cumulative log-probability / length ** length_penalty, where the length
counts the prompt too and no final end-of-sequence token. Every beam's 2 W best tokens are looked
at; all that end a sequence finish it. A search ends with its last token, never earlier, and
sequences still live then compete by their scores."""

HF_FALSE, HF_TRUE, HF_NEVER = 1, 2, 3
"""Hugging Face's rule, by its `early_stopping`. The length counts generated tokens alone, the
end-of-sequence token among them. Only the group's W best continuations can finish. A search ends
when W sequences have finished and, False: the best live beam's score would not beat the worst of
them at its present length; "never": nor at the greatest length; True: at once."""

NONE = -jnp.inf  # the score of no sequence


@struct.dataclass
class Hypotheses:
    """Generated sequences of G groups, W each, best first. Those that do not exist score NONE."""

    token_ids: Int[Array, "G W X"]  # 0 past the length
    logprobs: Float[Array, "G W X"]  # of each token; 0 past the length
    lengths: Int[Array, "G W"]
    cum_logprob: Float[Array, "G W"]
    score: Float[Array, "G W"]


@struct.dataclass
class Beams:
    """G groups of W beams, and what they are judged by. Live beam w of a group sits in row w."""

    row_ids: Int[Array, "G W"]  # groups are padded with the null row
    live: Hypotheses
    finished: Hypotheses
    is_done: Bool[Array, " G"]
    max_len: Int[Array, " G"]  # tokens, prompt included, at which a group ends
    length_penalty: Float[Array, " G"]
    rule: Int[Array, " G"]  # VLLM or HF_*
    eos_ids: Int[Array, "G E"]  # end-of-sequence ids, padded with -1
    ignores_eos: Bool[Array, " G"]


@struct.dataclass
class BeamOutput:
    """What the host is told besides the beams."""

    num_new: Int[Array, " G"]  # tokens by which the group's contexts grew
    num_tails: Int[Array, " G"]  # different blocks that the rows would write into next
    status: Int[Array, " G"]
    num_free_blocks: Int[Array, ""]


def init_beams(
    row_ids: Int[Array, "G W"],
    prompt_lens: Int[Array, " G"],
    *,
    max_tokens: int,
    rule: int = VLLM,
    length_penalty: float = 1.0,
    eos_ids: Sequence[int] = (),
    ignores_eos: bool = False,
) -> Beams:
    """Groups at the start of their search, at most `max_tokens` tokens of output each.

    Row `row_ids[g, 0]` is seated with group g's prompt, and has or will have KV of all but its last
    token; the other rows are empty.
    """
    G, W = row_ids.shape
    ids = jnp.array([*eos_ids] or [-1], jnp.int32)
    return Beams(
        row_ids=row_ids,
        live=first_beams(G, W, max_tokens),
        finished=empty_hypotheses(G, W, max_tokens),
        is_done=jnp.zeros(G, bool),
        max_len=prompt_lens + max_tokens,
        length_penalty=jnp.full(G, length_penalty, jnp.float32),
        rule=jnp.full(G, rule, jnp.int32),
        eos_ids=jnp.broadcast_to(ids, (G, ids.shape[0])),
        ignores_eos=jnp.full(G, ignores_eos),
    )


def empty_hypotheses(num_groups: int, width: int, max_tokens: int) -> Hypotheses:
    """No sequences at all, with room for `max_tokens` each."""
    G, W, X = num_groups, width, max_tokens
    return Hypotheses(
        token_ids=jnp.zeros((G, W, X), jnp.int32),
        logprobs=jnp.zeros((G, W, X), jnp.float32),
        lengths=jnp.zeros((G, W), jnp.int32),
        cum_logprob=jnp.full((G, W), NONE, jnp.float32),
        score=jnp.full((G, W), NONE, jnp.float32),
    )


def first_beams(num_groups: int, width: int, max_tokens: int) -> Hypotheses:
    """The live beams of groups that have generated nothing: one each, the prompt's."""
    none = empty_hypotheses(num_groups, width, max_tokens)
    return replace(
        none, cum_logprob=none.cum_logprob.at[:, 0].set(0), score=none.score.at[:, 0].set(0)
    )


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
    is_single = jnp.sum(_is_live(beams), axis=1) == 1
    shared_len = jnp.where(is_single, num_tokens, context_len)
    shared_end = jnp.minimum(end, shared_len)
    grow = jnp.maximum(-(-shared_end // S) - rows.num_blocks[first], 0)
    num_tails = jnp.where(is_single, 1, _num_tails(rows, beams.row_ids))
    num_tails = jnp.where(shared_len % S == 0, 0, num_tails)
    own = W * (-(-end // S) - shared_len // S) - num_tails
    return jnp.where(is_single, grow, 0) + jnp.where(end > shared_len, own, 0)


def _is_live(beams: Beams) -> Bool[Array, "G W"]:
    return beams.live.cum_logprob > NONE


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
    is_running = (_is_live(beams) & is_on[:, None]).reshape(B)
    state, granted = reserve(state, row_ids, is_running.astype(jnp.int32), max_new=B)
    batch = make_batch(state.rows, row_ids, granted, num_tokens=B, num_decode_rows=B)
    state, hidden, is_good = run_forward(params, state, row_ids, granted, batch, forward)
    logits = forward.logits(params, hidden)
    is_good = jnp.all((is_good & ~jnp.any(jnp.isnan(logits), 1) | ~is_running).reshape(G, W), 1)

    lag = (state.rows.num_tokens - state.rows.context_len)[row_ids]
    is_choosing = is_on & is_good & ~jnp.any((is_running & (lag > 0)).reshape(G, W), axis=1)
    num_tokens = state.rows.num_tokens[beams.row_ids[:, 0]]
    choice = _choose(beams, logits.reshape(G, W, -1), num_tokens, num_candidates)
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


class _Choice(NamedTuple):
    """What a step of beam search comes to."""

    beams: Beams
    parent: Int[Array, "G W"]  # of each new live beam
    token: Int[Array, "G W"]


def _re_seat(state: EngineState, beams: Beams, choice: _Choice, is_choosing: Bool[Array, " G"]):
    """Rows become copies of their beams' parents, with one more token; dead ones are emptied."""
    row_ids, is_live = beams.row_ids, _is_live(choice.beams)
    parent = jnp.take_along_axis(row_ids, choice.parent, axis=1)
    parent = jnp.where(is_live, parent, NULL_ROW)
    parent = jnp.where(is_choosing[:, None], parent, row_ids).reshape(-1)
    row_ids = row_ids.reshape(-1)
    rows, pool = share_rows(state.rows, state.pool, parent, row_ids)
    grows = (is_choosing[:, None] & is_live).reshape(-1)
    position = jnp.where(grows, rows.num_tokens[row_ids], rows.token_ids.shape[1])
    token_ids = rows.token_ids.at[row_ids, position].set(choice.token.reshape(-1), mode="drop")
    num_tokens = rows.num_tokens.at[row_ids].add(grows.astype(jnp.int32))
    return replace(rows, token_ids=token_ids, num_tokens=num_tokens), pool


class _Candidates(NamedTuple):
    """Continuations of a group's beams, K in all, the likeliest first."""

    cum_logprob: Float[Array, "G K"]  # NONE: not to be looked at
    logprob: Float[Array, "G K"]
    token: Int[Array, "G K"]
    parent: Int[Array, "G K"]


def _choose(
    beams: Beams, logits: Float[Array, "G W V"], num_tokens: Int[Array, " G"], num_candidates: int
) -> _Choice:
    """The next beams of each group, live and finished. num_tokens: of its live rows."""
    W, is_hf = logits.shape[1], (beams.rule != VLLM)[:, None]
    found = _candidates(beams, logits, num_candidates)
    num_after = num_tokens + 1
    is_end = num_after >= beams.max_len
    is_eos = jnp.any(found.token[..., None] == beams.eos_ids[:, None], axis=-1)
    stops = (is_eos & ~beams.ignores_eos[:, None]) | (is_hf & is_end[:, None])
    is_best = (jnp.arange(found.token.shape[1]) < W)[None]
    score = _scores(beams, found, is_eos, num_after)

    is_finished = stops & (is_best | ~is_hf)
    next_live = _extend(beams.live, found, jnp.where(stops, NONE, score))
    finished = _merge(beams.finished, beams.live, found, jnp.where(is_finished, score, NONE))
    token = jnp.take_along_axis(found.token, next_live.places, axis=1)
    parent = jnp.take_along_axis(found.parent, next_live.places, axis=1)
    after = replace(beams, live=next_live.sequences, finished=finished)
    return _Choice(replace(after, is_done=_is_over(after, num_after)), parent, token)


def _candidates(beams: Beams, logits: Float[Array, "G W V"], num_candidates: int) -> _Candidates:
    (G, W, V), k = logits.shape, min(num_candidates, logits.shape[2])
    logprob, token = (x.reshape(G, W, k) for x in top_logprobs(logits.reshape(G * W, V), k))
    cum_logprob = (beams.live.cum_logprob[..., None] + logprob).reshape(G, W * k)
    cum_logprob, order = lax.top_k(cum_logprob, W * k)
    place = jnp.broadcast_to(jnp.arange(W * k, dtype=jnp.int32), order.shape)
    is_seen = jnp.where((beams.rule == VLLM)[:, None], order % k < 2 * W, place < num_candidates)
    return _Candidates(
        cum_logprob=jnp.where(is_seen, cum_logprob, NONE),
        logprob=jnp.take_along_axis(logprob.reshape(G, -1), order, axis=1),
        token=jnp.take_along_axis(token.reshape(G, -1), order, axis=1),
        parent=(order // k).astype(jnp.int32),
    )


def _scores(
    beams: Beams, found: _Candidates, is_eos: Bool[Array, "G K"], num_after: Int[Array, " G"]
) -> Float[Array, "G K"]:
    """What sequences are ranked by; see the rules. num_after: tokens, prompt included."""
    num_generated = beams.live.lengths[:, :1] + 1
    length = jnp.where(
        (beams.rule == VLLM)[:, None], num_after[:, None] - is_eos.astype(jnp.int32), num_generated
    )
    return found.cum_logprob / _power(length, beams.length_penalty[:, None])


def _power(
    length: Int[Array, "*#shape"], penalty: Float[Array, "*#shape"]
) -> Float[Array, "*#shape"]:
    return jnp.maximum(length, 1).astype(jnp.float32) ** penalty


class _Extended(NamedTuple):
    sequences: Hypotheses
    places: Int[Array, "G W"]  # among the candidates


def _extend(live: Hypotheses, found: _Candidates, score: Float[Array, "G K"]) -> _Extended:
    """The W best candidates as sequences: their parents' tokens and one more."""
    W, X = live.token_ids.shape[1:]
    score, index = lax.top_k(score, min(W, score.shape[1]))
    missing = ((0, 0), (0, W - score.shape[1]))
    score = jnp.pad(score, missing, constant_values=NONE)
    index = jnp.pad(index, missing)
    cum, logprob, token, parent = (jnp.take_along_axis(x, index, axis=1) for x in found)
    lengths = jnp.take_along_axis(live.lengths, parent, axis=1)
    is_new = jnp.arange(X)[None, None] == lengths[..., None]

    def continued(history: Array, new: Array) -> Array:
        old = jnp.take_along_axis(history, parent[..., None], axis=1)
        return jnp.where(is_new, new[..., None], old)

    sequences = Hypotheses(
        token_ids=continued(live.token_ids, token),
        logprobs=continued(live.logprobs, logprob),
        lengths=lengths + 1,
        cum_logprob=jnp.where(score > NONE, cum, NONE),
        score=score,
    )
    return _Extended(sequences, index)


def _merge(
    finished: Hypotheses, live: Hypotheses, found: _Candidates, score: Float[Array, "G K"]
) -> Hypotheses:
    """The W best of the finished sequences and those that finish now; earlier ones win ties."""
    new = _extend(live, found, score).sequences
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), finished, new)
    _, order = lax.top_k(both.score, live.lengths.shape[1])
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1),
        both,
    )


def _is_over(beams: Beams, num_after: Int[Array, " G"]) -> Bool[Array, " G"]:
    """Whether a group's search ends, by its rule."""
    is_last = (num_after >= beams.max_len) | ~jnp.any(_is_live(beams), axis=1)
    is_full = jnp.all(beams.finished.score > NONE, axis=1)
    num_generated = jnp.max(beams.live.lengths, axis=1)
    longest = num_generated + beams.max_len - num_after
    is_hopeful = (beams.rule == HF_NEVER) & (beams.length_penalty > 0)
    length = jnp.where(is_hopeful, longest, num_generated)
    best = beams.live.cum_logprob[:, 0] / _power(length, beams.length_penalty)
    is_beaten = best <= jnp.min(beams.finished.score, axis=1)
    is_settled = (beams.rule != VLLM) & is_full & (is_beaten | (beams.rule == HF_TRUE))
    return beams.is_done | is_last | is_settled
