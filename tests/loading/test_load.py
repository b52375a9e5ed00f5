"""What counts as a model, in which dtype it loads, and what a load costs and imports."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.errors import CheckpointError, ConfigError
from jpaged.loading import cpu_has_bf16, find_checkpoint, resolve_dtype
from tests.loading.checkpoints import (
    FIXTURES,
    LLAMA,
    TINY,
    close_writer,
    gguf_writer,
    tiny_tensors,
    write_hf,
)

GGUF = FIXTURES / "formats" / "gguf_q4_1"
ROOT = FIXTURES.parent.parent


def test_three_kinds_of_model_argument():
    assert find_checkpoint(str(LLAMA)) == ("hf", LLAMA)
    assert find_checkpoint(GGUF) == ("gguf", GGUF / "model.gguf")
    assert find_checkpoint(GGUF / "model.gguf") == ("gguf", GGUF / "model.gguf")


def test_absent_path(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist.*nothing is downloaded"):
        find_checkpoint(tmp_path / "nowhere")


def test_directory_that_is_no_model(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        CheckpointError, match=r"looked for model\.safetensors, .*index\.json.*gguf"
    ):
        find_checkpoint(tmp_path)


def test_directory_with_a_pickle_only(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only.*save_pretrained"):
        find_checkpoint(tmp_path)


def test_directory_with_several_gguf_files(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        close_writer(gguf_writer(tmp_path / name))
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("x.safetensors", "give its directory"), ("x.bin", "no GGUF file")]
)
def test_file_of_another_kind(tmp_path: Path, name: str, message: str):
    (tmp_path / name).write_bytes(b"PK\x03\x04 something")
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path / name)


# ---- dtype ----


@pytest.mark.parametrize(
    ("requested", "resolved"),
    [
        *((name, name) for name in ("float32", "bfloat16", "float16")),
        *(("float", "float32"), ("half", "float16"), ("fp32", "float32")),
        *(("bf16", "bfloat16"), ("fp16", "float16")),
    ],
)
def test_a_dtype_asked_by_name_is_given(
    requested: str, resolved: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jpaged.loading.dtypes.cpu_has_bf16", lambda: False)
    assert resolve_dtype(requested, "float32", False) == resolved


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "torch.float16"])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_auto_with_bf16_units(stored: str, is_gguf: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.loading.dtypes.cpu_has_bf16", lambda: True)
    expected = "bfloat16" if is_gguf else stored.removeprefix("torch.")
    assert resolve_dtype("auto", stored, is_gguf) == expected


def test_auto_without_bf16_units(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("jpaged.loading.dtypes.cpu_has_bf16", lambda: False)
    with caplog.at_level("INFO", "jpaged"):
        assert resolve_dtype("auto", "float32", True) == "float32"
        assert resolve_dtype("auto", "bfloat16", False) == "float32"
    assert caplog.text.count("no bfloat16 units") == 2
    assert resolve_dtype("auto", "float16", False) == "float16"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert resolve_dtype("auto", "bfloat16", False) == "bfloat16"


def test_unknown_dtypes():
    with pytest.raises(ConfigError, match="dtype='int8' is not one of auto, float32"):
        resolve_dtype("int8", "float32", False)
    with pytest.raises(ConfigError, match="'float64' is not supported; name one of"):
        resolve_dtype("auto", "float64", False)


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "flags : fpu avx512f avx512_bf16 sse", True),
        ("x86_64", "flags : fpu amx_bf16", True),
        ("x86_64", "flags : fpu avx512f bf16", False),
        ("aarch64", "Features : fp asimd bf16", True),
        ("aarch64", "Features : fp asimd", False),
        ("x86_64", None, False),
    ],
)
def test_bf16_units_of_a_cpu(
    machine: str, flags: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    def read_text(path: Path, encoding: str) -> str:
        assert path == Path("/proc/cpuinfo")
        if flags is None:
            raise FileNotFoundError
        return flags

    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert cpu_has_bf16() is expected


# ---- What a load costs, and what it imports ----


def run_python(code: str, *arguments: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_everything_loads_without_torch():
    code = """
        import sys
        sys.modules["torch"] = None
        import jpaged.loading as loading
        from jpaged.model_config import ModelConfig
        for path in sys.argv[1:]:
            config = ModelConfig.from_hf(loading.load_hf_config(path))
            loading.load_params(path, config, "float32")
            loading.load_generation_config(path)
            print(loading.load_tokenizer(path)("Hello world")["input_ids"])
        assert sys.modules["torch"] is None
    """
    ids = [1, 44, 73, 332, 83, 291, 270, 453]
    # Nothing but the ids: no warning that torch is absent.
    assert run_python(code, LLAMA, GGUF) == f"{ids}\n" * 2


MEDIUM = {
    **TINY,
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def write_medium_gguf(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    sizes = {"embedding_length": 1024, "feed_forward_length": 2048}
    writer = gguf_writer(path / "model.gguf", "qwen3", **sizes, **{"attention.key_length": 256})
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float16))
    close_writer(writer)
    return path


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_holds_little_more_than_its_result(tmp_path: Path, kind: str, dtype: str):
    if kind == "hf":
        write_hf(tmp_path, MEDIUM, tiny_tensors(MEDIUM))
    else:
        write_medium_gguf(tmp_path, {"token_embd.weight": np.ones((32768, 1024), np.float32)})
    code = """
        import re, sys
        from pathlib import Path
        import jax
        from jpaged.loading import open_tensors
        from jpaged.loading.stored import read_tensor

        def memory(field):
            status = Path("/proc/self/status").read_text()
            return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) * 1024

        jax.numpy.zeros(8).block_until_ready()
        tensors = open_tensors(sys.argv[1])
        before = memory("VmRSS")
        arrays = [jax.device_put(read_tensor(t, sys.argv[2])) for t in tensors.values()]
        size = sum(array.nbytes for array in arrays)
        print(size, (memory("VmHWM") - before) / size)
    """
    size, peak = map(float, run_python(code, tmp_path, Path(dtype)).split())
    assert size >= 50e6
    assert peak < 1.5
