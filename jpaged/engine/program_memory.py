"""What the largest programs need beside weights and state, by the compiler's own account."""

from typing import Any

from jpaged.config import EngineConfig
from jpaged.core.batch import Forward
from jpaged.core.state import EngineState
from jpaged.engine import compiled
from jpaged.engine.calls import shapes_of
from jpaged.engine.dispatch import Buckets, pack_step, pad_rows
from jpaged.typing import Params


def program_bytes(
    forward: Forward, params: Params, state: EngineState, config: EngineConfig
) -> int | None:
    """Bytes of the largest step or window of an engine; None if the backend does not tell.

    Compiles both, unless the persistent cache has them, and leaves them there for the engine.
    """
    programs = lower_largest(forward, params, state, config)
    found = [_own_bytes(program.compile()) for program in programs]
    return max((size for size in found if size is not None), default=None)


def lower_largest(
    forward: Forward, params: Params, state: EngineState, config: EngineConfig
) -> tuple[Any, Any]:
    """The largest step and the largest window, as an engine would call them, not yet compiled.

    params, state: only their shapes count, abstract arrays will do. config: resolved.
    """
    assert config.max_num_seqs is not None
    assert config.max_num_batched_tokens is not None
    buckets = Buckets.of(
        config.max_num_seqs, config.max_num_batched_tokens, state.rows.token_ids.shape[1]
    )
    params, state = shapes_of((params, state))
    step = compiled.run_step.lower(
        params,
        state,
        pack_step((), buckets.prefill_rows[-1]),
        forward=forward,
        num_tokens=buckets.tokens[-1],
        num_decode_rows=0,
    )
    window = compiled.run_window.lower(
        params,
        state,
        pad_rows((), buckets.decode_rows[-1]),
        forward=forward,
        num_steps=config.num_decode_steps,
    )
    return step, window


def _own_bytes(program: Any) -> int | None:
    """Temporaries, and outputs that reuse no argument's memory."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + max(outputs, 0)
