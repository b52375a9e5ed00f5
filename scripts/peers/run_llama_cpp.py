"""llama.cpp by llama-cpp-python: one sequence after the other, token by token, of a GGUF file.

The file decides the type of the weights, whatever --dtype says. A prompt that begins as the one
before did is read from where they part.
"""

from collections.abc import Sequence
from itertools import islice

import measuring
from llama_cpp import Llama
from measuring import Request

BATCH = 512  # prompt tokens of a call


def main() -> None:
    """Reads the command line and measures."""
    args = measuring.parser((__doc__ or "").splitlines()[0]).parse_args()
    longest = max(
        len(one.prompt_ids) + one.max_tokens
        for one in measuring.read_workload(args.workload, args.limit)
    )
    llama = Llama(
        args.model,
        n_ctx=longest + 1,
        n_batch=BATCH,
        n_threads=measuring.num_cpus(),
        n_threads_batch=measuring.num_cpus(),
        verbose=False,
    )

    def run(requests: Sequence[Request]) -> int:
        return sum(complete(llama, request) for request in requests for _ in range(request.n))

    measuring.measure(args, run, packages=("llama-cpp-python",))


def complete(llama: Llama, request: Request) -> int:
    """Makes the tokens of one sample; nothing ends it early."""
    tokens = llama.generate(
        request.prompt_ids, temp=request.temperature, top_p=request.top_p, top_k=0, min_p=0.0
    )
    return sum(1 for _ in islice(tokens, request.max_tokens))


if __name__ == "__main__":
    main()
