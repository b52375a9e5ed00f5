"""The heads of attention on their way from their projection to attention itself."""

import jax.numpy as jnp
from flax import struct

from jpaged.ops.norm import RMSNorm
from jpaged.ops.rope import Angles, apply_rope
from jpaged.typing import Array, Float

Parts = tuple[Float[Array, "T H C"], Float[Array, "T K C"], Float[Array, "T K C"]]


@struct.dataclass
class Heads:
    """What T tokens' projections give: H queries, K keys and K values each, side by side.

    Queries and keys are yet to be normalized, where there are norms, and then to be turned, where
    there are angles. A kernel may do both while it writes keys and values.
    """

    packed: Float[Array, "T H+2*K C"]
    num_kv_heads: int = struct.field(pytree_node=False)
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    angles: Angles | None = None

    def norms(self) -> list[RMSNorm]:
        """Those there are."""
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]

    def normalized(self) -> Parts:
        """Queries, keys and values, yet to be turned."""
        K = self.num_kv_heads
        H = self.packed.shape[1] - 2 * K
        q, k, v = jnp.split(self.packed, (H, H + K), axis=1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return q, k, v

    def turned(self) -> Parts:
        """Queries, keys and values as attention takes them."""
        q, k, v = self.normalized()
        if self.angles is None:
            return q, k, v
        return apply_rope(q, *self.angles), apply_rope(k, *self.angles), v
