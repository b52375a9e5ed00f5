"""A paged-attention inference engine for language models, as pure functions in JAX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.config import CacheConfig, EngineConfig, ModelConfig
    from jpaged.core.logits_rules import LogitsProcessor
    from jpaged.engine.async_engine import AsyncEngine
    from jpaged.engine.llm import LLM
    from jpaged.engine.output import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
        ScoredTokens,
    )
    from jpaged.output_constraints import RepetitionDetectionParams, StructuredOutputsParams
    from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_WHERE = {
    "AsyncEngine": "jpaged.engine.async_engine",
    "LLM": "jpaged.engine.llm",
    "SamplingParams": "jpaged.sampling_params",
    "BeamSearchParams": "jpaged.sampling_params",
    "RequestOutputKind": "jpaged.sampling_params",
    "StructuredOutputsParams": "jpaged.output_constraints",
    "RepetitionDetectionParams": "jpaged.output_constraints",
    "EngineConfig": "jpaged.config",
    "CacheConfig": "jpaged.config",
    "ModelConfig": "jpaged.config",
    "LogitsProcessor": "jpaged.core.logits_rules",
    "RequestOutput": "jpaged.engine.output",
    "ScoredTokens": "jpaged.engine.output",
    "CompletionOutput": "jpaged.engine.output",
    "BeamSearchOutput": "jpaged.engine.output",
    "BeamSearchSequence": "jpaged.engine.output",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "LogitsProcessor",
    "ModelConfig",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoredTokens",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for: `import jpaged` alone stays quick."""
    import importlib

    if name == "functional":
        return importlib.import_module("jpaged.functional")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
