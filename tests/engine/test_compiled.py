"""Where compiled programs are kept."""

import pwd
from pathlib import Path

import jax
import pytest

from jpaged.engine import compiled


@pytest.fixture
def no_folder():
    """JAX as it is before a program tells it of a folder; the tests' own comes back."""
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", given)


@pytest.fixture
def homeless(monkeypatch):
    """A user as containers have them: a number, with no entry among the users."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("no_folder", "homeless")
def test_a_user_without_a_home_keeps_nothing_unless_told_where(caplog, tmp_path, monkeypatch):
    compiled.keep_programs(None)
    assert compiled.native_folder(None) is None
    assert "this user has no home; give compilation_cache_dir" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.keep_programs(None)
    assert compiled.native_folder(None) == tmp_path / "jpaged" / "programs" / "native"


@pytest.mark.usefixtures("no_folder", "homeless")
@pytest.mark.parametrize("folder", ["", "here"])
def test_who_says_where_is_asked_for_no_home(folder, caplog):
    compiled.keep_programs(folder)
    assert compiled.native_folder(folder) == (Path("here/native") if folder else None)
    assert not caplog.records
