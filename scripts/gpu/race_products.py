"""Part `products`: rows times weights of 8 and 4 bits, beside XLA's product of bfloat16."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from gpu.measuring import Budget, Device, Effort, reason, seconds_per_call

from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_weight import QuantWeight

# (kind, inputs with one scale; 0: all, zeros)
KINDS = (("int4", 128, True), ("int4", 32, False), ("int8", 0, False), ("float8_e4m3fn", 0, False))
Pair = tuple[Any, Any]
"""[D F] and [F D]: what the one gives the other takes, so that calls follow each other."""


def products(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """The two products of an MLP without its nonlinearity, of Llama-3.1-8B's shape."""
    D, F = (128, 256) if effort.is_smoke else (4096, 14336)
    num_rows = (2,) if effort.is_smoke else (1, 16, 64, 256, 1024)
    plain = (_plain_weight(D, F), _plain_weight(F, D))
    for M in num_rows:
        x = jax.random.normal(jax.random.key(0), (M, D), jnp.bfloat16)
        flops = 4 * M * D * F
        theirs = seconds_per_call(_plain_pair, x, plain, effort=effort)
        activations = 2 * 2 * M * (D + F)
        work = {"num_bytes": 2 * 2 * D * F + activations, "num_flops": flops}
        yield {"case": f"bfloat16 by XLA, {M} rows", **device.figures(theirs, **work)}
        for kind, group, zeros in KINDS[:1] if effort.is_smoke else KINDS:
            budget.check()
            case = f"{kind}, {f'groups of {group}' if group else 'a scale per output'}, {M} rows"
            weights = tuple(random_weight(d, f, kind, group, zeros) for d, f in ((D, F), (F, D)))
            work["num_bytes"] = _num_bytes(weights) + activations
            try:
                ours = product_seconds(x, weights, effort)
            except Exception as error:  # another kind may run
                yield {"case": case, "error": reason(error)}
                continue
            yield {
                "case": case,
                **device.figures(ours, **work),
                "times_as_fast_as": {"bfloat16 by XLA": round(theirs / ours, 3)},
            }


def product_seconds(x: jax.Array, weights: Any, effort: Effort, tilings: Any = None) -> float:
    """Seconds of both products, each in its tiling or the one that is chosen for it."""
    tiling = tilings or (None, None)

    def multiply(x: jax.Array, weights: Pair) -> jax.Array:
        for weight, one in zip(weights, tiling, strict=True):
            x = quant_matmul(x, weight, tiling=one, interpret=effort.interpret)
        return x

    return seconds_per_call(multiply, x, weights, effort=effort)


def random_weight(D: int, F: int, kind: str, group: int, zeros: bool) -> QuantWeight:
    """A weight of random numbers, of which products stay about as large as the rows."""
    stored = D // 2 if kind == "int4" else D
    bits = jax.random.bits(jax.random.key(1), (F, stored), jnp.uint8)
    if kind.startswith("float8"):
        bits &= jnp.uint8(0xB7)  # neither NaN nor large
    groups = (D // group if group else 1, F)
    largest = {"int4": 8, "int8": 128}.get(kind, 2)
    return QuantWeight(
        numbers=jax.lax.bitcast_convert_type(bits, jnp.int8) if kind == "int8" else bits,
        scales=jnp.full(groups, 1.5 / largest / D**0.5, jnp.float32),
        zeros=jnp.full(groups, 8, jnp.uint8) if zeros else None,
        kind=kind,
        num_inputs=D,
        inputs_per_scale=group or D,
    )


def _plain_weight(D: int, F: int) -> jax.Array:
    return D**-0.5 * jax.random.normal(jax.random.key(1), (D, F), jnp.bfloat16)


def _plain_pair(x: jax.Array, weights: Pair) -> jax.Array:
    for weight in weights:
        x = jnp.dot(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
    return x


def _num_bytes(weights: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
