"""What matrices and KV caches of 16, 8 and 4 bits lose against float32, on real text.

    python -m benchmarks.quantization_error --model HF_DIRECTORY_OR_GGUF_FILE --num-chunks 32

The text is Python's own reference (`pydoc_data.topics`) or a file, cut into chunks of 512 tokens.
Every variant gives each token its log-probability; the first serves as reference. Prints one line
of JSON for each: its perplexity; the mean difference in log-probability, in nats a token, with its
standard error over the chunks; the mean and the 99th percentile of its size; and the share of
places where its likeliest token is the reference's.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.bench.report import setting

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    **{
        f"kv_{name}": {"dtype": "bfloat16", "kv_cache_dtype": name}
        for name in ("fp8", "fp8_e5m2", "fp8_per_token_head", "int8")
    },
}
DEFAULT = ("float32", "bfloat16", "int8", "int4")
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)


class Scores(NamedTuple):
    """Of every token of every chunk but the first."""

    logprobs: np.ndarray  # [chunks, tokens]
    top_ids: np.ndarray  # [chunks, tokens]: the likeliest


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, help="a file (default: Python's own reference)")
    parser.add_argument("--num-chunks", type=int, default=32)
    parser.add_argument("--chunk-len", type=int, default=512, help="tokens")
    parser.add_argument("--variants", nargs="+", default=DEFAULT, choices=list(VARIANTS))
    args = parser.parse_args()
    text = (
        args.text.read_text() if args.text else "\n\n".join(topics[key] for key in sorted(topics))
    )
    reference = None
    for name in args.variants:
        print(f"{name} ...", file=sys.stderr)
        sizes = {"max_model_len": args.chunk_len + 1, "max_num_seqs": 4}
        with LLM(args.model, **sizes, **VARIANTS[name]) as llm:
            chunks = cut(llm.get_tokenizer(), text, args.num_chunks, args.chunk_len)
            scores = score(llm, chunks)
            if reference is None:
                print(json.dumps(setting(llm, args.model) | {"num_tokens": scores.logprobs.size}))
            reference = reference or scores
            line = {"variant": name, "weight_mib": round(llm.snapshot().weight_bytes / 2**20, 1)}
        print(json.dumps(line | compare(scores, reference)), flush=True)


def cut(tokenizer: Any, text: str, num_chunks: int, chunk_len: int) -> list[list[int]]:
    """Chunks of one length, each begun as the tokenizer begins a text."""
    begin = tokenizer("")["input_ids"]
    width = chunk_len - len(begin)
    ids = tokenizer(text[: 8 * num_chunks * chunk_len], add_special_tokens=False)["input_ids"]
    chunks = [begin + ids[start : start + width] for start in range(0, len(ids), width)]
    whole = [chunk for chunk in chunks if len(chunk) == chunk_len][:num_chunks]
    if len(whole) < num_chunks:
        raise SystemExit(
            f"the text has {len(whole)} chunks of {chunk_len} tokens, not {num_chunks}"
        )
    return whole


def score(llm: LLM, chunks: list[list[int]]) -> Scores:
    """What a model thinks of chunks."""
    logprobs, top_ids = [], []
    for output in llm.generate(chunks, SCORED):
        assert output.prompt_logprobs is not None
        told = [entry for entry in output.prompt_logprobs if entry is not None]
        pairs = zip(told, output.prompt_token_ids[1:], strict=True)
        logprobs.append([entry[token].logprob for entry, token in pairs])
        top_ids.append([next(t for t, one in entry.items() if one.rank == 1) for entry in told])
    return Scores(np.array(logprobs), np.array(top_ids))


def compare(scores: Scores, reference: Scores) -> dict[str, float]:
    """The figures of a variant."""
    change = scores.logprobs - reference.logprobs
    by_chunk = change.mean(axis=1)
    figures = {
        "perplexity": math.exp(-scores.logprobs.mean()),
        "change_nats": change.mean(),
        "change_error": by_chunk.std(ddof=1) / math.sqrt(len(by_chunk)),
        "size_mean_nats": np.abs(change).mean(),
        "size_p99_nats": np.percentile(np.abs(change), 99),
        "same_top": (scores.top_ids == reference.top_ids).mean(),
    }
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


if __name__ == "__main__":
    main()
