"""Hugging Face transformers: static batches in the workload's order, padded on the left.

With --batch-size 1 it is one request at a time, its samples together. The KV cache is used.
"""

from collections.abc import Sequence
from typing import Any

import measuring
import torch
from measuring import Request
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    """Reads the command line and measures."""
    parser = measuring.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, required=True, help="sequences of a batch")
    args = parser.parse_args()
    torch.set_num_threads(measuring.num_cpus())
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()

    def run(requests: Sequence[Request]) -> int:
        size = max(args.batch_size // requests[0].n, 1)
        return sum(
            generate(model, requests[start : start + size])
            for start in range(0, len(requests), size)
        )

    measuring.measure(args, run, packages=("transformers", "torch"))


def generate(model: Any, batch: Sequence[Request]) -> int:
    """Runs requests that share n and sampling as far as the longest of them asks; what the others
    did not ask for does not count."""
    first = batch[0]
    assert all(one[2:] == first[2:] for one in batch), "a batch has one n and kind of sampling"
    width = max(len(one.prompt_ids) for one in batch)
    num_tokens = max(one.max_tokens for one in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(batch):
        ids[row, width - len(one.prompt_ids) :] = torch.tensor(one.prompt_ids)
        mask[row, width - len(one.prompt_ids) :] = 1
    sampling = {"temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
    config = GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=first.temperature > 0,
        **(sampling if first.temperature > 0 else {}),
        num_return_sequences=first.n,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, generation_config=config)
    assert output.shape == (len(batch) * first.n, width + num_tokens)
    return measuring.num_output_tokens(batch)


if __name__ == "__main__":
    main()
