"""What is imported, and when: a start must not wait for libraries that it does not need."""

import json
import subprocess
import sys

import pytest

from tests.loading.checkpoints import LLAMA

NEVER = {"torch", "orbax", "fastapi", "uvicorn", "gguf"}
FOR_TEXT = {"transformers", "tokenizers", "huggingface_hub", "llguidance"}
FOR_ARRAYS = {"jax", "jaxlib", "flax", "numpy"}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import jpaged", NEVER | FOR_TEXT | FOR_ARRAYS),
        ("from jpaged import SamplingParams", NEVER | FOR_TEXT | FOR_ARRAYS - {"numpy"}),
        ("from jpaged import LLM, AsyncEngine, SamplingParams", NEVER | FOR_TEXT),
        ("import jpaged.functional", NEVER | FOR_TEXT),
        (
            "import jpaged.cli\njpaged.cli._parser().format_help()",
            NEVER | FOR_TEXT | FOR_ARRAYS,
        ),
        (f"from jpaged.loading import load_tokenizer\nload_tokenizer({str(LLAMA)!r})", NEVER),
    ],
    ids=["jpaged", "params", "LLM", "functional", "help", "tokenizer"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, unwanted: set[str]):
    report = "import json, sys\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert "jpaged" in imported
    assert imported & unwanted == set()
