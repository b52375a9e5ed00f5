"""Dense causal attention over paged keys and values, one query and one head at a time, float64."""

import numpy as np


def dense_row(q, k, v, *, scale, window, soft_cap, sinks):
    """The last len(q) of len(k) tokens attend to what they may see. q [n H C], k and v [P K C]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = len(k) - len(q) + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            seen_k = k[first : position + 1, h // group]
            seen_v = v[first : position + 1, h // group]
            scores = seen_k @ q[i, h] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            extra = [] if sinks is None else [float(sinks[h])]
            peak = max([*scores, *extra])
            weights = np.exp(scores - peak)
            total = weights.sum() + sum(np.exp(x - peak) for x in extra)
            out[i, h] = weights @ seen_v / total
    return out


def paged_attention(
    q,
    k_pool,
    v_pool,
    block_table,
    context_lens,
    query_start_loc,
    num_decode_rows,
    *,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
):
    """Each row's tokens in the order of its block table, then `dense_row`; zeros elsewhere."""
    out = np.zeros(q.shape, np.float64)
    for b, context_len in enumerate(context_lens):
        if b < num_decode_rows:
            start, end = b, b + 1
        else:
            start, end = query_start_loc[b], query_start_loc[b + 1]
        if context_len == 0 or start == end:
            continue
        held = block_table[b][: -(-context_len // k_pool.shape[1])]  # what follows may name nothing
        k, v = (
            np.concatenate([pool[block] for block in held])[:context_len]
            for pool in (k_pool, v_pool)
        )
        out[start:end] = dense_row(
            q[start:end], k, v, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
        )
    return out
