"""Rules that change a row's logits before it draws: masks, bias, penalties, own processors.

Owns `LogitsRules`, what rows have been told of them. Order of operations, as vLLM's sampler has it:
    allowed ids -> bad words -> ids held back until min_len -> bias -> processors -> penalties
Penalties need no counts of their own: they are a function of the row's tokens, so that forks,
preemption and resumption have nothing to keep in step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike

from jpaged.errors import ConfigError
from jpaged.typing import Array, Bool, Float, Int, UInt32

CHUNK = 128  # columns of the rows' tokens that are counted together


class History(NamedTuple):
    """What rows have so far."""

    token_ids: Int[Array, "B P"]  # prompt, then output; anything past `num_tokens`
    num_tokens: Int[Array, " B"]
    prompt_len: Int[Array, " B"]


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A rule of one's own, registered when an engine is made and compiled into its steps.

    name: what requests call it by. apply: (logits f32[B V], History, params) -> f32[B V], pure, a
    row's result a function of that row alone. default: the parameters of a row that does not ask
    for it, a pytree of arrays (or numbers), not empty, that leave logits as they are; requests give
    others of the same shapes. Rows find their parameters stacked, with a leading B.

    Raises ConfigError if the default is empty: rows that do not ask could not be told apart.
    """

    name: str
    apply: Callable[[Array, History, Any], Array]
    default: Any

    def __post_init__(self) -> None:
        if not jax.tree.leaves(self.default):
            raise ConfigError(
                f"logits processor {self.name!r} has default={self.default!r}, without any "
                "parameter; give one at which it leaves logits as they are, such as a switch"
            )


class RuleSizes(NamedTuple):
    """The fixed sizes of `LogitsRules`: the most that one request may ask for."""

    vocab_size: int
    num_stop_ids: int = 16
    num_biases: int = 300
    num_bad_words: int = 64
    bad_word_len: int = 8
    num_logprob_ids: int = 128


@struct.dataclass
class LogitsRules:
    """Each row's rules. One entry per row, -1 pads ids."""

    is_on: Bool[Array, " R"]  # rows without it are left as they are, whatever stands below
    repetition_penalty: Float[Array, " R"]  # 1: off
    frequency_penalty: Float[Array, " R"]  # 0: off
    presence_penalty: Float[Array, " R"]  # 0: off
    hold_ids: Int[Array, "R Y"]  # not drawn below min_len
    has_mask: Bool[Array, " R"]
    mask_is_raw: Bool[Array, " R"]  # a grammar's: it counts for raw log-probabilities too
    token_mask: UInt32[Array, "R W"]  # bit v % 32 of word v // 32: id v may be drawn
    bias_ids: Int[Array, "R E"]
    bias: Float[Array, "R E"]
    bad_words: Int[Array, "R N L"]  # aligned on the right
    logprob_ids: Int[Array, "R Q"]  # log-probabilities to be told
    processors: dict[str, Any]  # parameters, by the processor's name

    @property
    def sizes(self) -> RuleSizes:
        """The room there is, from the shapes; the vocabulary up to a multiple of 32."""
        return RuleSizes(
            vocab_size=self.token_mask.shape[1] * 32,
            num_stop_ids=self.hold_ids.shape[1] - 1,
            num_biases=self.bias_ids.shape[1],
            num_bad_words=self.bad_words.shape[1],
            bad_word_len=self.bad_words.shape[2],
            num_logprob_ids=self.logprob_ids.shape[1],
        )


def init_rules(
    num_rows: int, sizes: RuleSizes, processors: tuple[LogitsProcessor, ...] = ()
) -> LogitsRules:
    """No rules for any row."""
    R = num_rows

    def full(shape: tuple[int, ...], value: float, dtype: Any) -> Array:
        return jnp.full((R, *shape), value, dtype)

    def stacked(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        return jnp.tile(leaf[None], (R, *(1,) * leaf.ndim))

    return LogitsRules(
        is_on=full((), False, jnp.bool_),
        repetition_penalty=full((), 1, jnp.float32),
        frequency_penalty=full((), 0, jnp.float32),
        presence_penalty=full((), 0, jnp.float32),
        hold_ids=full((sizes.num_stop_ids + 1,), -1, jnp.int32),
        has_mask=full((), False, jnp.bool_),
        mask_is_raw=full((), False, jnp.bool_),
        token_mask=full((-(-sizes.vocab_size // 32),), 0, jnp.uint32),
        bias_ids=full((sizes.num_biases,), -1, jnp.int32),
        bias=full((sizes.num_biases,), 0, jnp.float32),
        bad_words=full((sizes.num_bad_words, sizes.bad_word_len), -1, jnp.int32),
        logprob_ids=full((sizes.num_logprob_ids,), -1, jnp.int32),
        processors={p.name: jax.tree.map(stacked, p.default) for p in processors},
    )


def make_rules(
    num_prompts: int,
    sizes: RuleSizes,
    *,
    processors: tuple[LogitsProcessor, ...] = (),
    processor_params: Mapping[str, Any] | None = None,
    is_allowed: Bool[Array, "A V"] | None = None,
    **fields: ArrayLike | Sequence[Any],
) -> LogitsRules:
    """Rules for A prompts, for `jpaged.functional.generate`.

    sizes, processors: those that the state was made with. processor_params: by name, with a leading
    A, or one value for all. is_allowed: the ids that each may draw. fields: of `LogitsRules`, such
    as repetition_penalty; a value for all prompts, or one each. Lists of ids, and biases, may be
    shorter than there is room for.

    Raises ValueError for a name that is no field or no processor, or a shape that does not fit.
    """
    rules = init_rules(num_prompts, sizes, processors)
    known = vars(rules)
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"{unknown[0]!r} is no field of LogitsRules; there are {sorted(known)}")
    changes: dict[str, Any] = {"is_on": jnp.ones(num_prompts, bool)}
    changes |= {name: _filled(name, value, known[name]) for name, value in fields.items()}
    if is_allowed is not None:
        if is_allowed.shape != (num_prompts, sizes.vocab_size):
            raise ValueError(
                f"is_allowed has shape {is_allowed.shape}, not {(num_prompts, sizes.vocab_size)}: "
                "a row for each prompt, an entry for each id"
            )
        padding = rules.token_mask.shape[1] * 32 - is_allowed.shape[1]
        bits = jnp.pad(is_allowed, ((0, 0), (0, padding))).reshape(num_prompts, -1, 32)
        weights = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
        mask = jnp.sum(jnp.where(bits, weights[None, None], 0), axis=2, dtype=jnp.uint32)
        changes |= {"token_mask": mask, "has_mask": jnp.ones(num_prompts, bool)}
    params = dict(rules.processors)
    for name, given in (processor_params or {}).items():
        if name not in params:
            raise ValueError(f"{name!r} is none of the processors {sorted(params)}")
        fill = functools.partial(_broadcast, f"a parameter of {name!r}")
        params[name] = jax.tree.map(fill, params[name], given)
    return replace(rules, processors=params, **changes)


def _filled(name: str, value: ArrayLike | Sequence[Any], like: Array) -> Array:
    """A field's values for all prompts; lists with room left are filled with what means nothing."""
    array = jnp.asarray(value, like.dtype)
    if like.ndim == 2:  # not repeated: a bias would be added as often
        array = jnp.atleast_1d(array)
        room = max(like.shape[1] - array.shape[-1], 0)
        nothing = -1 if name.endswith("_ids") else 0
        widths = (*((0, 0),) * (array.ndim - 1), (0, room))
        array = jnp.pad(array, widths, constant_values=nothing)
    return _broadcast(name, like, array)


def _broadcast(name: str, like: Array, value: ArrayLike | Sequence[Any]) -> Array:
    array = jnp.asarray(value, like.dtype)
    try:
        return jnp.broadcast_to(array, like.shape)
    except ValueError:
        raise ValueError(f"{name} has shape {array.shape}, and {like.shape} is needed") from None


def set_rules(rules: LogitsRules, row_ids: Int[Array, " A"], new: LogitsRules) -> LogitsRules:
    """Gives rows new rules, one entry of `new` each. Row 0 pads `row_ids` and never has any."""
    rules = jax.tree.map(lambda x, x_new: x.at[row_ids].set(x_new), rules, new)
    return replace(rules, is_on=rules.is_on.at[0].set(False))


def clear_rules(rules: LogitsRules, row_ids: Int[Array, " A"]) -> LogitsRules:
    """Takes all rules off rows."""
    return replace(rules, is_on=rules.is_on.at[row_ids].set(False))


def set_masks(
    rules: LogitsRules, row_ids: Int[Array, " A"], masks: UInt32[Array, "A W"]
) -> LogitsRules:
    """Changes the ids that rows may draw next; row 0 pads `row_ids`."""
    return replace(rules, token_mask=rules.token_mask.at[row_ids].set(masks))


def mask_raw(rules: LogitsRules, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The logits that raw log-probabilities are made of: under the masks of grammars."""
    return _mask_ids(rules, rules.is_on & rules.has_mask & rules.mask_is_raw, logits)


def apply_rules(
    rules: LogitsRules,
    history: History,
    min_len: Int[Array, " B"],
    logits: Float[Array, "B V"],
    processors: tuple[LogitsProcessor, ...],
) -> Float[Array, "B V"]:
    """The logits that rows draw from. Each rule costs something only where a row has it."""
    is_on = rules.is_on
    logits = _mask_ids(rules, is_on & rules.has_mask, logits)
    has_words = is_on & jnp.any(rules.bad_words[:, :, -1] >= 0, axis=1)
    logits = _where_any(has_words, lambda x: _forbid(x, _bad_word_ends(rules, history)), logits)
    is_held = is_on & (history.num_tokens < min_len)
    logits = _where_any(is_held, lambda x: _forbid(x, rules.hold_ids), logits)
    has_bias = is_on & jnp.any(rules.bias_ids >= 0, axis=1)
    logits = _where_any(has_bias, lambda x: _add_bias(rules, x), logits)
    for processor in processors:
        params = rules.processors[processor.name]
        logits = _where_any(is_on, lambda x, p=processor, w=params: p.apply(x, history, w), logits)
    return _penalize(rules, history, logits)


def _where_any(
    is_on: Bool[Array, " B"],
    change: Callable[[Float[Array, "B V"]], Float[Array, "B V"]],
    logits: Float[Array, "B V"],
) -> Float[Array, "B V"]:
    """Changes the logits of some rows, at no cost if there are none."""
    return lax.cond(
        jnp.any(is_on), lambda x: jnp.where(is_on[:, None], change(x), x), lambda x: x, logits
    )


def _at_ids(ids: Int[Array, "B K"], vocab_size: int) -> tuple[Int[Array, "B 1"], Int[Array, "B K"]]:
    """Indices of ids in [B V]; padding lies past the end."""
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return row, jnp.where(ids < 0, vocab_size, ids)


def _forbid(logits: Float[Array, "B V"], ids: Int[Array, "B K"]) -> Float[Array, "B V"]:
    return logits.at[_at_ids(ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def _mask_ids(
    rules: LogitsRules, is_on: Bool[Array, " B"], logits: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    def change(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        B, V = logits.shape
        bit = jnp.arange(32, dtype=jnp.uint32)
        is_allowed = (rules.token_mask[:, :, None] >> bit[None, None]) & 1 == 1
        return jnp.where(is_allowed.reshape(B, -1)[:, :V], logits, -jnp.inf)

    return _where_any(is_on, change, logits)


def _bad_word_ends(rules: LogitsRules, history: History) -> Int[Array, "B N"]:
    """The ids that would complete a bad word behind each row's output; -1 elsewhere.

    A word [a, b, c] stands as [-1, a, b, c] where L is 4: -1 is before its beginning.
    """
    B, _, L = rules.bad_words.shape
    place = history.num_tokens[:, None] - jnp.arange(L - 1, 0, -1, dtype=jnp.int32)[None]
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    tail = history.token_ids[row, jnp.maximum(place, 0)]
    tail = jnp.where(place >= history.prompt_len[:, None], tail, -2)  # as vLLM: output alone
    begin = rules.bad_words[:, :, :-1]
    is_met = jnp.all((begin < 0) | (begin == tail[:, None]), axis=2)
    return jnp.where(is_met, rules.bad_words[:, :, -1], -1)


def _add_bias(rules: LogitsRules, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return logits.at[_at_ids(rules.bias_ids, logits.shape[1])].add(rules.bias, mode="drop")


def _penalize(
    rules: LogitsRules, history: History, logits: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """Repetition, over prompt and output, then frequency and presence, over the output."""
    is_repeating = rules.is_on & (rules.repetition_penalty != 1)
    is_counting = rules.is_on & ((rules.frequency_penalty != 0) | (rules.presence_penalty != 0))

    def change(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        begin, end = history.prompt_len, history.num_tokens
        begin, end = (jnp.where(is_repeating | is_counting, x, 0) for x in (begin, end))
        in_output = _count(history.token_ids, begin, end, logits.shape[1])
        nobody = jnp.zeros_like(begin)
        in_prompt = _count(
            history.token_ids, nobody, jnp.where(is_repeating, begin, 0), logits.shape[1]
        )
        factor = jnp.where(is_repeating, rules.repetition_penalty, 1.0)[:, None]
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(in_prompt + in_output > 0, repeated, logits)
        # Without the barriers a product and a sum may be rounded once or twice, by the program.
        frequency = jnp.where(is_counting, rules.frequency_penalty, 0.0)[:, None]
        presence = jnp.where(is_counting, rules.presence_penalty, 0.0)[:, None]
        counted = lax.optimization_barrier(frequency * in_output.astype(jnp.float32))
        logits = lax.optimization_barrier(logits - counted)
        return logits - jnp.where(in_output > 0, presence, 0.0)

    return _where_any(is_repeating | is_counting, change, logits)


def _count(
    token_ids: Int[Array, "B P"],
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    vocab_size: int,
) -> Int[Array, "B V"]:
    """How often each id stands in each row from `begin` to `end`; work goes with their distance."""
    B, P = token_ids.shape
    row = jnp.arange(B, dtype=jnp.int32)[:, None]

    def add(chunk: Array, counts: Int[Array, "B V"]) -> Int[Array, "B V"]:
        column = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None]
        ids = token_ids.at[row, column].get(mode="clip")
        is_in = (column >= begin[:, None]) & (column < jnp.minimum(end, P)[:, None])
        return counts.at[row, jnp.where(is_in, ids, vocab_size)].add(1, mode="drop")

    has_any = end > begin
    first = jnp.min(jnp.where(has_any, begin, P)) // CHUNK
    last = -(-jnp.max(jnp.where(has_any, end, 0)) // CHUNK)
    return lax.fori_loop(first, last, add, jnp.zeros((B, vocab_size), jnp.int32))
