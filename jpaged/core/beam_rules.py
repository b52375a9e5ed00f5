"""What beam search chooses: continuations of a group's beams, ranked by one of two rules.

Owns `Beams`, the state of a search; `beam` moves its rows. The rules differ in what a sequence's
score divides by, in which finished sequences count, and in when a search is over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.vocabulary import top_logprobs
from jpaged.typing import Array, Bool, Float, Int

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


def is_live(beams: Beams) -> Bool[Array, "G W"]:
    """Which live beams there are."""
    return beams.live.cum_logprob > NONE


class Choice(NamedTuple):
    """What a step of beam search comes to."""

    beams: Beams
    parent: Int[Array, "G W"]  # of each new live beam
    token: Int[Array, "G W"]


class _Candidates(NamedTuple):
    """Continuations of a group's beams, K in all, the likeliest first."""

    cum_logprob: Float[Array, "G K"]  # NONE: not to be looked at
    logprob: Float[Array, "G K"]
    token: Int[Array, "G K"]
    parent: Int[Array, "G K"]


def choose(
    beams: Beams, logits: Float[Array, "G W V"], num_tokens: Int[Array, " G"], num_candidates: int
) -> Choice:
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
    return Choice(replace(after, is_done=_is_over(after, num_after)), parent, token)


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
    return _score(found.cum_logprob, length, beams.length_penalty[:, None])


def _score(
    cum_logprob: Float[Array, "*shape"],
    length: Int[Array, "*#shape"],
    penalty: Float[Array, "*#shape"],
) -> Float[Array, "*shape"]:
    """cum_logprob / length ** penalty, which is NONE for no sequence alone, however large or small
    the power is."""
    limits = jnp.finfo(jnp.float32)
    power = jnp.maximum(length, 1).astype(jnp.float32) ** penalty
    score = cum_logprob / jnp.clip(power, limits.tiny, limits.max)
    return jnp.where(cum_logprob > NONE, jnp.maximum(score, limits.min), NONE)


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
    is_last = (num_after >= beams.max_len) | ~jnp.any(is_live(beams), axis=1)
    is_full = jnp.all(beams.finished.score > NONE, axis=1)
    num_generated = jnp.max(beams.live.lengths, axis=1)
    longest = num_generated + beams.max_len - num_after
    is_hopeful = (beams.rule == HF_NEVER) & (beams.length_penalty > 0)
    length = jnp.where(is_hopeful, longest, num_generated)
    best = _score(beams.live.cum_logprob[:, 0], length, beams.length_penalty)
    is_beaten = best <= jnp.min(beams.finished.score, axis=1)
    is_settled = (beams.rule != VLLM) & is_full & (is_beaten | (beams.rule == HF_TRUE))
    return beams.is_done | is_last | is_settled
