"""Hugging Face transformers on a GPU: one static batch of a model with random weights.

    python scripts/gpu/hf_generate.py FOLDER_WITH_CONFIG ROWS PROMPT_LEN NEW_TOKENS ROUNDS

Prints a line of JSON: seconds of the best of some rounds, after one that warms up.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Reads the command line and measures."""
    folder, *numbers = sys.argv[1:]
    num_rows, prompt_len, num_new, rounds = map(int, numbers)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(on):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (num_rows, prompt_len), device=on)
    asked = transformers.GenerationConfig(
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=asked
            )
        assert output.shape == (num_rows, prompt_len + num_new)  # reading it waits for the device
        output.cpu()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(seconds[1:]), "device": on}))


if __name__ == "__main__":
    main()
