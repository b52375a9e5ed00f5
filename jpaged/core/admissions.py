"""Prompts as arrays, made into sequences to seat: for programs that have no host shell."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jpaged.core.rows import Admissions
from jpaged.core.sampling import SamplingState
from jpaged.core.state import EngineState
from jpaged.typing import Array, Int, UInt32


class Sampling(NamedTuple):
    """How to sample and when to stop: scalars for all prompts, or arrays with an entry for each.

    The meanings are those of `jpaged.SamplingParams`; a temperature of 0 is greedy.
    """

    temperature: ArrayLike = 1.0
    top_p: ArrayLike = 1.0
    top_k: ArrayLike = 0
    min_p: ArrayLike = 0.0
    eos_id: ArrayLike = -1  # -1: none
    stop_ids: ArrayLike | Sequence[int] = ()  # further ids that end an output, [X] or [A X]


def make_admissions(
    state: EngineState,
    row_ids: Int[Array, " A"],
    prompts: Int[Array, "A P"],
    prompt_lens: Int[Array, " A"],
    keys: Array,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    request_root: UInt32[Array, "A 4"] | None = None,
) -> Admissions:
    """Prompts, padded on the right, as sequences to seat in `row_ids` by `admit`.

    keys: u32[A 2] (`seed_key` of a 64-bit seed) or A threefry keys of `jax.random`, one a prompt.
    request_root: what KV depends on besides the tokens, such as a salt; zeros if None.

    Raises ValueError if the shapes do not fit each other or the state, of which only the sizes are
    read.
    """
    A, P = prompts.shape
    room, num_stop_ids = state.rows.token_ids.shape[1], state.sampling.stop_ids.shape[1]
    if max_new_tokens < 1 or P + max_new_tokens > room:
        raise ValueError(
            f"prompts of up to {P} tokens plus max_new_tokens={max_new_tokens} (at least 1) exceed "
            f"the {room} positions of a row; make the state with a larger max_model_len"
        )
    fields: dict[str, Any] = {
        name: _per_prompt(name, getattr(sampling, name), A, field.dtype)
        for name, field in vars(state.sampling).items()
        if name in ("temperature", "top_p", "top_k", "min_p", "eos_id")
    }
    return Admissions(
        row_ids=row_ids,
        token_ids=prompts,
        num_tokens=prompt_lens,
        prompt_len=prompt_lens,
        request_root=jnp.zeros((A, 4), jnp.uint32) if request_root is None else request_root,
        sample_index=jnp.zeros(A, jnp.int32),
        adapter_id=jnp.zeros(A, jnp.int32),
        most_cached=prompt_lens,
        sampling=SamplingState(
            key=_key_words(keys, A),
            stop_ids=_stop_ids(sampling.stop_ids, A, num_stop_ids),
            min_len=jnp.zeros(A, jnp.int32),
            max_len=prompt_lens + max_new_tokens,
            want_logprobs=jnp.ones(A, bool),
            **fields,
        ),
    )


def _per_prompt(name: str, value: ArrayLike, num_prompts: int, dtype: jnp.dtype) -> Array:
    array = jnp.asarray(value, dtype)
    if array.shape not in ((), (num_prompts,)):
        raise ValueError(
            f"{name} has shape {array.shape}; give a scalar, or one value for each of "
            f"{num_prompts} prompts"
        )
    return jnp.broadcast_to(array, (num_prompts,))


def _stop_ids(
    stop_ids: ArrayLike | Sequence[int], num_prompts: int, width: int
) -> Int[Array, "A X"]:
    ids = jnp.asarray(stop_ids, jnp.int32)
    if ids.ndim not in (1, 2) or ids.shape[:-1] not in ((), (num_prompts,)):
        raise ValueError(
            f"stop_ids has shape {ids.shape}; give a list of ids, or one for each of "
            f"{num_prompts} prompts"
        )
    if ids.shape[-1] > width:
        raise ValueError(
            f"{ids.shape[-1]} stop_ids exceed the {width} a row has room for; make the state with "
            "a larger num_stop_ids"
        )
    ids = jnp.pad(
        ids, (*((0, 0),) * (ids.ndim - 1), (0, width - ids.shape[-1])), constant_values=-1
    )
    return jnp.broadcast_to(ids, (num_prompts, width))


def _key_words(keys: Array, num_prompts: int) -> UInt32[Array, "A 2"]:
    is_typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(keys) if is_typed else keys
    if words.shape != (num_prompts, 2) or words.dtype != jnp.uint32:
        raise ValueError(
            f"keys must be {num_prompts} threefry keys or u32[{num_prompts}, 2], one a prompt; got "
            f"{keys.dtype}{list(keys.shape)}"
        )
    return words
