"""Array aliases and the dimension key of the whole project.

Letters used in every shape annotation, and nowhere else for anything else:

    T tokens in the step    R rows of the state     B rows in this step (a bucket)
    N blocks in the pool    S slots per block       M blocks per row
    L layers                D hidden size           F mlp size
    V vocabulary            H query heads           K KV heads
    G = H // K              C head dim              X small fixed lists
    J steps in a window     P = M * S positions     A admissions in one call
    W blocks taken in one call
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxtyping import Array, Bool, Float, Int, Integer, Shaped, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "Integer", "Params", "Shaped", "UInt32"]

Params: TypeAlias = Mapping[str, Any]
"""A pytree of arrays, as `nnx.split` gives it: nested dicts keyed by the checkpoint's names."""
