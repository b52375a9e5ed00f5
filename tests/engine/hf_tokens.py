"""Greedy continuations by Hugging Face transformers, and judging ours against its logits."""

from typing import Any

import numpy as np
import torch

MARGIN = 1e-3  # logits closer than this are a tie that float32 rounding may break either way


def hf_greedy(hf_model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Each prompt alone, through transformers' own generate and cache."""
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            full = hf_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        out.append(full[0, len(prompt) :].tolist())
    return out


def worst_gap(hf_model: Any, prompt: list[int], output: list[int]) -> float:
    """How far below Hugging Face's best logit any of our tokens lies, by teacher forcing."""
    ids = torch.tensor([prompt + output[:-1]])
    with torch.no_grad():
        logits = hf_model(ids, use_cache=False).logits[0, len(prompt) - 1 :].numpy()
    chosen = np.take_along_axis(logits, np.array(output)[:, None], axis=1)[:, 0]
    return float(np.max(logits.max(axis=1) - chosen))
