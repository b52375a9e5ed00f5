"""The command line: what it reads, what it writes, and what it says of bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jpaged
from jpaged import cli, cli_options

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "fixtures" / "arch" / "llama_sharded"
WITHOUT_TOKENIZER = ROOT / "tests" / "fixtures" / "arch" / "llama_llama3rope"
SMALL = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 --num-decode-steps 4"


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file of prompts; objects become lines of JSON."""

    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        is_text = path.suffix == ".txt"
        text = [line if is_text else json.dumps(line) for line in lines]
        path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        return path

    return write


def generate(prompts: Path, *options: Any, model: Path = MODEL) -> int:
    argv = ["generate", model, "--prompts", prompts, *SMALL.split(), *options]
    return cli.main([str(arg) for arg in argv])


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def refusal(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """The one line that a refused command writes."""
    try:
        code = cli.main([str(arg) for arg in argv])
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    captured = capsys.readouterr()
    assert code == cli.BAD_INPUT
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


# --- good input ---


def test_each_kind_of_line_gets_its_answer(write, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    prompts = write(
        "Hello there",
        {"prompt": "Hello there", "id": "named", "max_tokens": 2},
        {"prompt_token_ids": [1, 50, 60], "id": 7, "temperature": 0.8, "n": 2, "seed": 5},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    )
    assert generate(prompts, "--out", out, "--temperature", 0, "--max-tokens", 5) == 0
    text, named, ids, chat = answers(out)
    assert [text["id"], named["id"], ids["id"], chat["id"]] == [0, "named", 7, 3]
    assert [text["prompt"], named["prompt"], ids["prompt"]] == ["Hello there"] * 2 + [None]
    assert "<|im_start|>user\nHi<|im_end|>" in chat["prompt"]
    lengths = [[len(one["token_ids"]) for one in line["outputs"]] for line in answers(out)]
    assert lengths == [[5], [2], [5, 5], [3]]
    assert named["outputs"][0]["token_ids"] == text["outputs"][0]["token_ids"][:2]
    first, second = ids["outputs"]
    assert first["token_ids"] != second["token_ids"]
    assert set(first) == {"text", "token_ids", "finish_reason", "stop_reason"}
    assert first["finish_reason"] == "length"
    assert text["num_cached_tokens"] == 0


def test_the_command_line_answers_as_the_library(write, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    texts = ["one two three", "The list of the"]
    assert generate(write(*texts), "--out", out, "--temperature", 0, "--max-tokens", 6) == 0
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with jpaged.LLM(MODEL, num_decode_steps=4, **options) as llm:
        params = jpaged.SamplingParams(temperature=0.0, max_tokens=6)
        expected = llm.generate(texts, params, use_tqdm=False)
    for line, output in zip(answers(out), expected, strict=True):
        assert line["outputs"][0]["token_ids"] == output.outputs[0].token_ids
        assert line["outputs"][0]["text"] == output.outputs[0].text


def test_text_files_chat_and_stdout(write, capsys: pytest.CaptureFixture[str]):
    prompts = write("Hi", "", "How are you?", name="prompts.txt")
    assert generate(prompts, "--chat", "--temperature", 0, "--max-tokens", 4) == 0
    captured = capsys.readouterr()
    shown = [line for line in captured.out.splitlines() if line.startswith(">>> ")]
    assert shown == [">>> Hi", ">>> How are you?"]
    assert "[...]" in captured.out  # the answers were cut at 4 tokens
    for told in ("Model loading took", "KV cache size: ", "Maximum concurrency for 64 tokens"):
        assert told in captured.err
    assert "2 prompts of" in captured.err
    assert "8 tokens of output" in captured.err
    assert "programs were compiled" in captured.err


def test_token_ids_need_no_tokenizer(write, tmp_path: Path):
    prompts, out = write({"prompt_token_ids": [1, 50, 60]}), tmp_path / "out.jsonl"
    defaults = '{"temperature": 0, "max_new_tokens": 4}'
    options = ["--skip-tokenizer-init", "--ignore-eos", "--override-generation-config", defaults]
    assert generate(prompts, "--out", out, *options, model=WITHOUT_TOKENIZER) == 0
    (one,) = answers(out)[0]["outputs"]
    assert one["text"] == ""
    assert len(one["token_ids"]) == 4


def test_a_stop_token_ends_an_output(write, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    options = ["--out", out, "--temperature", 0, "--max-tokens", 6, "--ignore-eos"]
    assert generate(write("Hello"), *options) == 0
    whole = answers(out)[0]["outputs"][0]["token_ids"]
    stop = whole[2]
    assert generate(write("Hello"), *options, "--stop-token-ids", stop) == 0
    (one,) = answers(out)[0]["outputs"]
    assert one["token_ids"] == whole[: whole.index(stop) + 1]
    assert (one["finish_reason"], one["stop_reason"]) == ("stop", stop)


def test_auto_takes_the_longest_context_that_the_pool_holds(write, tmp_path: Path, capsys):
    out = tmp_path / "out.jsonl"
    options = ["--out", out, "--temperature", 0, "--max-tokens", 4, "--block-size", 16]
    pool = ["--max-model-len", "auto", "--num-gpu-blocks-override", 4]
    assert generate(write("Hello"), *options, *pool) == 0
    told = capsys.readouterr().err
    assert "max_model_len auto: 48 tokens" in told
    assert "Maximum concurrency for 48 tokens per request: 1.33x" in told
    assert len(answers(out)[0]["outputs"][0]["token_ids"]) == 4
    prompts = write({"prompt_token_ids": [1] * 48})
    assert generate(prompts, *pool, "--kv-cache-memory-bytes", "1G") == cli.BAD_INPUT
    assert "max_model_len=48" in capsys.readouterr().err


# --- plan ---


def test_a_plan_is_a_table_or_a_line_of_json(capsys):
    argv = ["plan", str(MODEL / "config.json"), "--device", "A100-40g", "--max-model-len", "0.2k"]
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert "1 x A100-40g of 39.4 GiB" in table
    assert table.endswith("It fits.\n")
    assert cli.main([*argv, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    plan = json.loads(line)
    assert (plan["fits"], plan["max_model_len"]) == (True, 200)
    assert f"{plan['num_blocks']:,}" in table


def test_a_plan_takes_the_engines_options_and_the_devices(capsys):
    options = {
        "--device": "24G",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--kv-cache-dtype": "fp8_e4m3",
        "--dtype": "half",
        "--quantization": "int4",
        "--max-model-len": "auto",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "1K",
        "--block-size": "32",
        "--gpu-memory-utilization": "0.5",
        "--num-gpu-blocks-override": "5",
        "--kv-cache-memory-bytes": "1G",
    }
    argv = ["plan", MODEL, "--json", *(part for flag in options.items() for part in flag)]
    assert cli.main([str(arg) for arg in argv]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["hardware"] == {
        "device": "24G",
        "device_bytes": 24 * 2**30,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "dtype": "float16",
    }
    assert plan["kv_cache_dtype"] == "fp8_e4m3"
    assert plan["requested_bytes"] == 12 * 2**30
    assert (plan["num_blocks"], plan["max_model_len"], plan["block_size"]) == (5, 128, 32)
    assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (8, 1024)


def test_a_plan_that_does_not_fit_has_its_own_code(capsys):
    assert cli.main(["plan", str(MODEL), "--device", "1m"]) == cli.DOES_NOT_FIT
    told = capsys.readouterr().out
    assert "It does not fit: a device lacks" in told
    assert "This alone makes room: --device t4" in told


def test_a_plan_starts_no_backend_and_reads_no_weights(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text((MODEL / "config.json").read_text())
    gguf = ROOT / "tests" / "fixtures" / "formats" / "gguf_q4_1"
    for model in (config, tmp_path, gguf):
        command = [sys.executable, "-m", "jpaged.cli", "plan", model, "--device", "l4"]
        env = {**os.environ, "JAX_PLATFORMS": "none_such"}  # a backend could not start
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr
        assert "It fits." in done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--device", "a100"], "device='a100' is unknown; there are t4, "),
        (["--device", "l4", "--tensor-parallel-size", "3"], "tensor_parallel_size=3 does not"),
        (["--device", "l4", "--tensor-parallel-size", "0"], "must be a whole number from 1"),
        (["--device", "l4", "--kv-cache-dtype", "int3"], "kv_cache_dtype='int3' is unknown"),
        (["--device", "l4", "--max-model-len", "1m"], "max_model_len=1000000 exceeds the"),
        (["--device", "l4", "--quantization", "gguf"], "plan with int8 for Q8_0"),
        ([], "the following arguments are required: --device"),
    ],
)
def test_a_plan_that_can_not_be_made_says_why(capsys, options: list[str], told: str):
    assert told in refusal(capsys, "plan", MODEL, *options)


def test_a_plan_needs_a_config(capsys, tmp_path: Path):
    assert "does not exist" in refusal(capsys, "plan", tmp_path / "none", "--device", "l4")
    assert "is no model" in refusal(capsys, "plan", tmp_path, "--device", "l4")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "BertModel" in refusal(capsys, "plan", tmp_path, "--device", "l4")
    quantized = '{"architectures": ["LlamaForCausalLM"], "quantization_config": {}}'
    (tmp_path / "config.json").write_text(quantized.replace("{}", '{"quant_method": "awq"}'))
    assert "awq" in refusal(capsys, "plan", tmp_path / "config.json", "--device", "l4")


# --- bad input ---


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (7, "a line is a JSON string or object"),
        ({"text": "Hi"}, "unknown key 'text'"),
        ({"id": 1}, "give one of prompt, prompt_token_ids, messages; got none"),
        ({"prompt": "Hi", "prompt_token_ids": [1]}, "got prompt, prompt_token_ids"),
        ({"prompt": ["Hi"]}, "prompt must be a string"),
        ({"prompt_token_ids": []}, "token ids must be a list of at least one integer"),
        ({"prompt_token_ids": [1, True]}, "token ids must be a list of at least one integer"),
        ({"messages": [{"content": "Hi"}]}, "messages must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"prompt": "Hi", "temperature": -1}, "temperature must be from 0 to 2, got -1"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens must be from 1"),
        ({"prompt": "Hi", "temperature": 0, "n": 2}, "n must be 1 when greedy"),
        ({"prompt": "Hi", "stop": ""}, "stop must not be an empty string"),
    ],
)
def test_a_bad_line_is_named_before_any_work(write, capsys, line: Any, told: str):
    path = write("fine", line)
    # The model does not even exist: nothing looks at it.
    message = refusal(capsys, "generate", "no/such/model", "--prompts", path)
    assert message.startswith(f"jpaged: {path}:2: ")
    assert told in message


def test_broken_json_is_named_with_its_column(tmp_path: Path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n\n{"prompt": \n')
    message = refusal(capsys, "generate", "no/such/model", "--prompts", path)
    assert message == f"jpaged: {path}:3: no JSON: Expecting value (column 12)"


@pytest.mark.parametrize("is_there", [True, False])
def test_an_output_that_can_not_be_written_is_told_first(
    tmp_path: Path, capsys, monkeypatch, is_there
):
    """As of a folder or file that is not one's own; permissions bind no root, who may run this."""
    path = tmp_path / "out.jsonl"
    if is_there:
        path.touch()
    denied = path if is_there else tmp_path
    access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != denied and access(p, mode))
    options = ("--prompts", tmp_path / "none.txt", "--out", path)
    assert "read-only, or not yours" in refusal(capsys, "generate", "no/such/model", *options)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000], ids=["deep", "long number"])
def test_json_that_python_does_not_read_is_named_too(tmp_path: Path, capsys, text: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{text}\n')
    message = refusal(capsys, "generate", "no/such/model", "--prompts", path)
    assert message.startswith(f"jpaged: {path}:2: no JSON that can be read: ")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("prompts.jsonl", b"", "has no prompts"),
        ("prompts.txt", b"\n \n", "has no prompts"),
        ("prompts.txt", b"Hi\n\xff\xfe\n", "is not UTF-8"),
        ("prompts.csv", b"Hi\n", "must end in .jsonl or .txt"),
        ("prompts.txt", None, "can not be read: No such file"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, capsys, name, content, told):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert told in refusal(capsys, "generate", "no/such/model", "--prompts", path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--block-size", "0"], "block_size must be from 1 to 256, got 0"),
        (["--block-size", "many"], "argument --block-size: invalid int value: 'many'"),
        (["--max-model-len", "1.5K"], "'1.5K' is no size"),
        (["--max-model-len", "-2"], "argument --max-model-len: '-2' is no size"),
        (["--max-model-len", "most"], "'most' is no size"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization must be above 0"),
        (["--implementation", "magic"], "implementation='magic' is unknown"),
        (["--quantization", "fp8"], "'fp8' is unknown; choose int8 or int4 or gguf"),
        (["--temperature", "nan"], "temperature must be from 0 to 2, got nan"),
        (["--n", "0"], "n must be from 1"),
        (["--out", "no/such/folder/out.jsonl"], "no/such/folder is no directory"),
        (["--generation-config", "mine"], "'mine' is neither auto nor vllm nor a folder with"),
        (["--override-generation-config", "{"], "'{' is no JSON: Expecting"),
        (["--override-generation-config", "[1]"], "'[1]' is no JSON object"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens must be at most max_tokens=8"),
        (["--repetition-penalty", "0"], "repetition_penalty must be from 1e-06"),
        (["--stop", "a", ""], "stop must not be an empty string"),
        (["--pages", "4"], "unrecognized arguments: --pages"),
        ([], "no/such/model does not exist"),
    ],
)
def test_bad_options_are_refused(write, capsys, options: list[str], told: str):
    path = write("Hi")
    assert told in refusal(capsys, "generate", "no/such/model", "--prompts", path, *options)


@pytest.mark.parametrize(
    ("line", "options", "told"),
    [
        ({"prompt_token_ids": [1, 512]}, [], "token id 512 is outside the vocabulary"),
        ({"prompt_token_ids": [1] * 64}, [], "exceeds max_model_len=64"),
        ("Hi", ["--skip-tokenizer-init"], "needs a tokenizer"),
        ({"messages": [{"role": "user"}]}, ["--skip-tokenizer-init"], "chat needs a tokenizer"),
    ],
)
def test_what_only_the_engine_can_judge_names_the_line_too(write, capsys, line, options, told):
    path = write({"prompt_token_ids": [1]}, line)
    assert generate(path, *options) == cli.BAD_INPUT
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"jpaged: {path}:2: ")
    assert told in last


def test_ctrl_c_is_no_traceback(write, capsys, monkeypatch):
    def interrupt(*args: Any, **kwargs: Any):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_prompts", interrupt)
    assert cli.main(["generate", "model", "--prompts", "prompts.txt"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "jpaged: interrupted\n"


# --- arguments ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2G", 2**31),
        ("1.1m", 1_100_000),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int):
    assert cli_options.read_size(text) == size


@pytest.mark.parametrize(("text", "length"), [("auto", "auto"), ("-1", "auto"), ("4K", 4096)])
def test_the_longest_context_may_be_left_to_the_pool(text: str, length: int | str):
    argv = ["bench", "throughput", "--model", "m", "--workload", "w.jsonl"]
    options = cli.engine_options([*argv, "--max-model-len", text])
    assert jpaged.EngineConfig.from_options(**options).max_model_len == length


def test_jax_is_to_reserve_what_the_engine_is_to_use(write, monkeypatch, capsys):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # and not deleted, so that it is put back
    argv = ["generate", "no/such/model", "--prompts", str(write("Hi"))]
    assert cli.main([*argv, "--gpu-memory-utilization", "0.5"]) == cli.BAD_INPUT
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    assert cli.main(argv) == cli.BAD_INPUT  # what is set stays
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"


def test_every_engine_option_of_the_command_line_is_one_of_the_configs():
    argv = ["bench", "throughput", "--model", "m", "--workload", "w.jsonl"]
    flags = {
        "--dtype": "float32",
        "--max-model-len": "1k",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "1K",
        "--block-size": "32",
        "--num-gpu-blocks-override": "99",
        "--kv-cache-memory-bytes": "1G",
        "--gpu-memory-utilization": "0.5",
        "--seed": "3",
        "--num-decode-steps": "4",
        "--implementation": "xla",
        "--compilation-cache-dir": "",
    }
    given = [part for flag in flags.items() for part in flag]
    options = cli.engine_options([*argv, *given, "--deterministic", "--no-enable-prefix-caching"])
    config = jpaged.EngineConfig.from_options(**options)
    assert (config.max_model_len, config.max_num_batched_tokens) == (1000, 1024)
    assert config.deterministic
    assert not config.cache.enable_prefix_caching
    assert (config.cache.block_size, config.cache.num_gpu_blocks_override) == (32, 99)
    assert config.cache.kv_cache_memory_bytes == 2**30


def test_help_and_version_import_nothing_heavy():
    script = (
        "import sys\n"
        "from jpaged.cli import main\n"
        "try:\n    main([sys.argv[1]])\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "assert not {'jax', 'flax', 'transformers', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    for flag, told in (("--help", "generate"), ("--version", jpaged.__version__)):
        command = [sys.executable, "-c", script, flag]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert told in done.stdout
