"""Building and loading native kernels: kept, keyed, built by many at once, or refused with why."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import attention, build, library

SOURCE = 'extern "C" int answer() { return 42; }\n'


def build_one(source: Path, folder: Path, compilers=build.COMPILERS) -> Path:
    return build.build_all([source], folder, compilers)[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        build.find_compiler()
    except NativeUnavailableError as reason:
        pytest.skip(str(reason))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_is_compiled_once_and_runs(source, tmp_path, monkeypatch):
    library = build_one(source, tmp_path / "kept")
    assert ctypes.CDLL(str(library)).answer() == 42
    assert list((tmp_path / "kept").iterdir()) == [library]  # nothing half done is left
    made_at = library.stat().st_mtime_ns
    assert build_one(source, tmp_path / "kept") == library
    assert library.stat().st_mtime_ns == made_at


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: bytes(len(data)),
        lambda data: data.replace(b"answer", b"anther"),
    ],
    ids=["empty", "half", "all but a byte", "zeros", "another"],
)
def test_a_library_that_was_damaged_is_made_again(damage, source, tmp_path):
    """Half a library ends the process that loads it, and one with another bit may do anything."""
    kept = tmp_path / "kept"
    first = build_one(source, kept)
    made = first.read_bytes()
    first.write_bytes(damage(made))
    again = build_one(source, kept)
    assert again.read_bytes() == made
    assert ctypes.CDLL(str(again)).answer() == 42
    assert list(kept.iterdir()) == [again]


def test_whatever_bits_depend_on_is_in_the_name(source, monkeypatch):
    compiler = build.find_compiler()
    keys = {build.library_key(source, compiler)}
    source.write_text(SOURCE + "// changed")
    keys.add(build.library_key(source, compiler))
    (source.parent / "shared.h").write_text("// what it may include")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "version", lambda name: "0.0.1")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "_run", lambda command: "another compiler 1.0")
    keys.add(build.library_key(source, compiler))
    assert len(keys) == 7


def test_processes_that_build_at_once_do_not_disturb_each_other(source, tmp_path):
    code = (
        "import sys, ctypes; from pathlib import Path; from jpaged.native import build\n"
        "library = build.build_all([Path(sys.argv[1])], Path(sys.argv[2]))[0]\n"
        "print(ctypes.CDLL(str(library)).answer())"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "kept")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in running] == ["42\n"] * 3
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_thread_may_build_when_the_main_one_has_ended(source, tmp_path):
    code = (
        "import sys, ctypes, threading; from pathlib import Path; from jpaged.native import build\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    library = build.build_all([Path(sys.argv[1])], Path(sys.argv[2]))[0]\n"
        "    print(ctypes.CDLL(str(library)).answer(), flush=True)\n"
        "threading.Thread(target=late).start()"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "42\n", done.stderr


def test_no_compiler_is_told(source, tmp_path):
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler.*no-such"):
        build_one(source, tmp_path, ["no-such"])


def test_a_compiler_that_does_not_run_or_fails_is_told(source, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    broken.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="broken does not run"):
        build_one(source, tmp_path, [str(broken)])
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="error: out of order"):
        build_one(source, tmp_path, [str(failing)])
    source.write_text("this is no C++")
    with pytest.raises(NativeUnavailableError, match="error:"):
        build_one(source, tmp_path)


def test_a_folder_that_can_not_be_written_is_told(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NativeUnavailableError, match="can not write"):
        build_one(source, tmp_path / "file" / "folder")


@pytest.mark.parametrize("contents", [b"no library", None])
def test_a_library_that_does_not_load_is_told(contents, source, tmp_path):
    """Damaged, or whole but without the kernel."""
    damaged = tmp_path / "damaged.so" if contents else build_one(source, tmp_path / "kept")
    if contents:
        damaged.write_bytes(contents)
    with pytest.raises(NativeUnavailableError, match="does not load"):
        library._handler(damaged, "jpaged_attention")


def test_kernels_that_were_not_loaded_are_told(monkeypatch):
    monkeypatch.setattr(library, "_targets", {})
    with pytest.raises(NativeUnavailableError, match="not loaded"):
        attention.attend(*[None] * 3, **dict.fromkeys(ATTEND_OPTIONS) | {"scale": 1.0})


ATTEND_OPTIONS = (
    *("kv_dtype", "block_table", "context_lens", "query_start_loc", "num_decode_rows"),
    *("scale", "window", "soft_cap", "sinks"),
)


def test_nothing_is_kept_where_no_folder_is_given(tmp_path, monkeypatch):
    folders = []

    def build_all(sources: list[Path], folder: Path, compilers: object) -> list[Path]:
        assert folder.is_dir()
        folders.append(folder)
        return sources

    monkeypatch.setattr(library, "_targets", {})
    monkeypatch.setattr(build, "build_all", build_all)
    monkeypatch.setattr(library, "_handler", lambda path, symbol: symbol)
    monkeypatch.setattr(library, "_register", lambda path, handler: handler)
    library.load(None)
    library.load(None)  # once a process
    assert len(folders) == 1
    assert not folders[0].exists()
    assert library.target("matmul") == "jpaged_matmul"
