"""What sampling costs beside greedy decoding, on a workload's own shapes.

    python -m benchmarks.sampling_costs --model HF_DIRECTORY --workload W1.jsonl --rounds 3

All variants take turns in one process, each over the whole workload with an empty prefix cache,
the end of sequence ignored, so that every variant makes equally many tokens. Prints one line of
JSON for each: median seconds, and the median over the rounds of its ratio to that round's greedy
run.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged import LLM
from jpaged.bench.machine import LoadClock
from jpaged.bench.report import setting
from jpaged.bench.workload import WorkItem, read_workload

DRAWN = {"temperature": 1.0, "seed": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": DRAWN,
    "top_p, top_k and min_p": DRAWN | {"top_p": 0.9, "top_k": 50, "min_p": 0.05},
    "top_p": DRAWN | {"top_p": 0.9},
    "logprobs of 5": {"temperature": 0.0, "logprobs": 5},
    "penalties": DRAWN
    | {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2},
    "all of it": DRAWN
    | {
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "logprobs": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "logit_bias": {5: -1.0},
        "min_tokens": 4,
    },
}


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    workload = read_workload(args.workload, args.limit)
    names = ["greedy", *(name for name in args.variants if name != "greedy")]
    options = {"dtype": args.dtype, "max_model_len": args.max_model_len}
    with LLM(args.model, skip_tokenizer_init=True, **options) as llm:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(args.rounds + 1):
            print(f"round {turn} of {args.rounds}; 0 compiles", file=sys.stderr)
            for name in names:
                clock = run(llm, workload, VARIANTS[name])
                if turn:
                    seconds[name].append(clock.seconds)
        report(seconds, setting(llm, args.model))


def run(llm: LLM, workload: Sequence[WorkItem], fields: dict[str, Any]) -> LoadClock:
    """One run of the workload under some parameters."""
    params = []
    for item in workload:
        one = item.params.clone()
        for name, value in fields.items():
            setattr(one, name, value)
        params.append(one)
    llm.reset_prefix_cache()
    with LoadClock() as clock:
        outputs = llm.generate([item.prompt_ids for item in workload], params, use_tqdm=False)
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == [item.params.max_tokens for item in workload], "unequal work"
    return clock


def report(seconds: dict[str, list[float]], about: dict[str, Any]) -> None:
    """Prints what was found."""
    print(json.dumps(about))
    for name, taken in seconds.items():
        ratios = [own / base for own, base in zip(taken, seconds["greedy"], strict=True)]
        line = {
            "variant": name,
            "median_s": round(statistics.median(taken), 3),
            "ratio_to_greedy": round(statistics.median(ratios), 3),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
