"""Throughput of jpaged beside Hugging Face transformers, on the same workload in the same run.

    python scripts/bench_peers.py --model HF_DIRECTORY --workload W1.jsonl --rounds 3

The engines take turns, each time in a fresh process, so that a busy or throttled machine hurts
both alike. transformers runs static batches of 16, padded on the left, in the workload's order.
The model is a Hugging Face directory (scripts/convert_checkpoint.py makes one of a GGUF file), the
dtype the same for both; unknown options go to jpaged. Prints a line of JSON for each engine, with
medians, and one with the ratio. Needs torch.
"""

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jpaged.bench.machine import LoadClock, peak_rss_mib
from jpaged.bench.throughput import WorkItem, read_workload

BATCH = 16


def main() -> None:
    """Reads the command line; without --worker, starts the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args, engine_options = parser.parse_known_args()
    if args.worker:
        print(json.dumps(measure_transformers(args)))
        return
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    shared = ["--model", args.model, "--workload", str(args.workload), "--dtype", args.dtype]
    shared += ["--limit", str(args.limit)] if args.limit else []
    bench = ["-m", "jpaged.cli", "bench", "throughput", *shared, *engine_options]
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        ours.append(run(bench))
        theirs.append(run([__file__, "--worker", *shared]))
    medians = [summary(results) for results in (ours, theirs)]
    for median in medians:
        print(json.dumps(median))
    ratio = medians[0]["output_tokens_per_s"] / medians[1]["output_tokens_per_s"]
    print(json.dumps({"ratio_of_output_tokens_per_s": round(ratio, 3)}))


def run(command: list[str]) -> dict[str, Any]:
    """The last line that a fresh Python prints, as JSON."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The last result with the median speeds and memory of all, and every speed."""
    names = ("output_tokens_per_s", "total_tokens_per_s", "wall_s", "peak_rss_mib")
    medians = {name: statistics.median(result[name] for result in results) for name in names}
    speeds = [result["output_tokens_per_s"] for result in results]
    others = [share for result in results for share in result["other_cpu_share"]]
    return {
        **results[-1],
        **medians,
        "output_tokens_per_s_of_rounds": speeds,
        "other_cpu_share": others,
    }


def measure_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """One run of the workload in static batches, after a short one to warm up."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    work = read_workload(args.workload, args.limit)
    size = max(BATCH // work[0].params.n, 1)
    generate_batch(model, [WorkItem(item.prompt_ids[:16], item.params) for item in work[:2]], 4)
    with LoadClock() as clock:
        for start in range(0, len(work), size):
            generate_batch(model, work[start : start + size])
    num_prompt = sum(len(item.prompt_ids) for item in work)
    num_output = sum(item.params.n * (item.params.max_tokens or 0) for item in work)
    return {
        "engine": f"transformers, static batches of {BATCH}",
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "output_tokens_per_s": round(num_output / clock.seconds, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / clock.seconds, 2),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "wall_s": round(clock.seconds, 3),
        "other_cpu_share": [clock.other_share],
        "peak_rss_mib": round(peak_rss_mib(), 1),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "torch")},
    }


def generate_batch(model: Any, items: list[WorkItem], num_tokens: int | None = None) -> None:
    """Runs requests that share n and temperature as far as the longest of them asks."""
    import torch
    from transformers import GenerationConfig

    width = max(len(item.prompt_ids) for item in items)
    num_tokens = num_tokens or max(item.params.max_tokens or 0 for item in items)
    params = items[0].params
    ids = torch.zeros((len(items), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, width - len(item.prompt_ids) :] = torch.tensor(item.prompt_ids)
        mask[row, width - len(item.prompt_ids) :] = 1
    config = GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=not params.is_greedy,
        temperature=params.temperature or 1.0,
        top_k=0,
        num_return_sequences=params.n,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, generation_config=config)
    assert output.shape == (len(items) * params.n, width + num_tokens)


if __name__ == "__main__":
    main()
