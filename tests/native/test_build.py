"""Building and loading native kernels: kept, keyed, built by many at once, or refused with why."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import attention, build

SOURCE = 'extern "C" int answer() { return 42; }\n'


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
    library = build.build(source, tmp_path / "kept")
    assert ctypes.CDLL(str(library)).answer() == 42
    assert list((tmp_path / "kept").iterdir()) == [library]  # nothing half done is left
    made_at = library.stat().st_mtime_ns
    assert build.build(source, tmp_path / "kept") == library
    assert library.stat().st_mtime_ns == made_at


def test_whatever_bits_depend_on_is_in_the_name(source, monkeypatch):
    compiler = build.find_compiler()
    keys = {build.library_key(source, compiler)}
    source.write_text(SOURCE + "// changed")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "version", lambda name: "0.0.1")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    keys.add(build.library_key(source, compiler))
    monkeypatch.setattr(build, "_run", lambda command: "another compiler 1.0")
    keys.add(build.library_key(source, compiler))
    assert len(keys) == 6


def test_processes_that_build_at_once_do_not_disturb_each_other(source, tmp_path):
    code = (
        "import sys, ctypes; from pathlib import Path; from jpaged.native import build\n"
        "print(ctypes.CDLL(str(build.build(Path(sys.argv[1]), Path(sys.argv[2])))).answer())"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "kept")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in running] == ["42\n"] * 3
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_no_compiler_is_told(source, tmp_path):
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler.*no-such"):
        build.build(source, tmp_path, ["no-such"])


def test_a_compiler_that_does_not_run_or_fails_is_told(source, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    broken.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="broken does not run"):
        build.build(source, tmp_path, [str(broken)])
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="error: out of order"):
        build.build(source, tmp_path, [str(failing)])
    source.write_text("this is no C++")
    with pytest.raises(NativeUnavailableError, match="error:"):
        build.build(source, tmp_path)


def test_a_folder_that_can_not_be_written_is_told(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NativeUnavailableError, match="can not write"):
        build.build(source, tmp_path / "file" / "folder")


@pytest.mark.parametrize("contents", [b"no library", None])
def test_a_library_that_does_not_load_is_told(contents, source, tmp_path):
    """Damaged, or whole but without the kernel."""
    library = tmp_path / "damaged.so" if contents else build.build(source, tmp_path / "kept")
    if contents:
        library.write_bytes(contents)
    with pytest.raises(NativeUnavailableError, match="does not load"):
        attention._register(library)


def test_kernels_that_were_not_loaded_are_told(monkeypatch):
    monkeypatch.setattr(attention, "_target", None)
    with pytest.raises(NativeUnavailableError, match="not loaded"):
        attention.attend(*[None] * 3, **dict.fromkeys(ATTEND_OPTIONS))


ATTEND_OPTIONS = (
    *("kv_dtype", "block_table", "context_lens", "query_start_loc", "num_decode_rows"),
    *("scale", "window", "soft_cap", "sinks"),
)


def test_nothing_is_kept_where_no_folder_is_given(source, tmp_path, monkeypatch):
    built = []

    def register(library: Path) -> str:
        assert library.is_file()
        built.append(library)
        return "target"

    monkeypatch.setattr(attention, "_target", None)
    monkeypatch.setattr(attention, "SOURCE", source)
    monkeypatch.setattr(attention, "_register", register)
    attention.load(None)
    attention.load(None)  # once a process
    assert len(built) == 1
    assert not built[0].parent.exists()
