"""openvino-genai: its continuous batching on the CPU, of a GGUF file or a folder in its own format.

--dtype is the precision of the arithmetic; the KV cache has the plugin's own default, or is float32
where the arithmetic is.
"""

from collections.abc import Sequence

import measuring
import numpy as np
import openvino_genai as ov_genai
from measuring import Request
from openvino import Tensor

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KV_GIB = 2
MAX_NUM_SEQS = 64
MAX_BATCHED_TOKENS = 512
NO_TOP_K = 2**31 - 1


def main() -> None:
    """Reads the command line and measures."""
    args = measuring.parser((__doc__ or "").splitlines()[0]).parse_args()
    options = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype],
        "INFERENCE_NUM_THREADS": measuring.num_cpus(),
    }
    if args.dtype == "float32":
        options["KV_CACHE_PRECISION"] = "f32"
    pipeline = ov_genai.ContinuousBatchingPipeline(args.model, scheduler(), "CPU", options)

    def run(requests: Sequence[Request]) -> int:
        prompts = [Tensor(np.array([one.prompt_ids], np.int64)) for one in requests]
        outputs = pipeline.generate(prompts, [generation_config(one) for one in requests])
        return sum(len(ids) for output in outputs for ids in output.m_generation_ids)

    measuring.measure(
        args,
        run,
        packages=("openvino-genai", "openvino"),
        warms_up_whole=True,
        kv_cache_precision=options.get("KV_CACHE_PRECISION", "default"),
        kv_cache_gib=KV_GIB,
        max_num_seqs=MAX_NUM_SEQS,
    )


def scheduler() -> "ov_genai.SchedulerConfig":
    """Continuous batching with chunked prefill and prefix caching."""
    config = ov_genai.SchedulerConfig()
    config.cache_size = KV_GIB
    config.max_num_seqs = MAX_NUM_SEQS
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = True
    return config


def generation_config(request: Request) -> "ov_genai.GenerationConfig":
    """How one request is to be continued."""
    config = ov_genai.GenerationConfig()
    config.max_new_tokens = request.max_tokens
    config.ignore_eos = True
    config.num_return_sequences = request.n
    config.do_sample = request.temperature > 0
    if config.do_sample:
        config.temperature, config.top_p = request.temperature, request.top_p
        config.top_k, config.rng_seed = NO_TOP_K, 1
    return config


if __name__ == "__main__":
    main()
