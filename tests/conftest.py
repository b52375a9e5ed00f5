"""Strict mode for every test: checked shapes, strict dtypes and ranks, one compilation cache."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKED_PACKAGES = ("jpaged.core", "jpaged.ops", "jpaged.models")
# XLA's newer emitters of CPU code take half of all the time it takes to compile. Since jax 0.11
# there are no others.
QUICK = {"xla_cpu_use_fusion_emitters": False}


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports jax or jpaged: both are set up by what they find then.
    selected = config.option.markexpr
    if "gpu" not in selected or "not gpu" in selected:
        os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    from jaxtyping import install_import_hook

    from tests import typecheck

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    install_import_hook(CHECKED_PACKAGES, f"{typecheck.__name__}.check")

    hypothesis.settings.register_profile("jpaged", deadline=None, database=None)
    hypothesis.settings.load_profile("jpaged")


@pytest.fixture(scope="module", autouse=True)
def compile_for_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles a module's programs quickly, or, where it is marked `optimized`, as users have them.

    They are dropped behind it: of little use to the next, and gigabytes in the end.
    """
    import jax
    from jax._src import compiler  # a public way there is for a single function only

    get_compile_options = compiler.get_compile_options
    quick = QUICK if jax.__version_info__ < (0, 11) else {}

    def quick_options(*args: Any, env_options_overrides: Any = None, **options: Any) -> Any:
        overrides = quick | dict(env_options_overrides or {})
        return get_compile_options(*args, env_options_overrides=overrides, **options)

    is_optimized = request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    with pytest.MonkeyPatch.context() as patched:
        if not is_optimized:
            patched.setattr(compiler, "get_compile_options", quick_options)
        yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    """The folder of recorded reference data for the wide sweeps, outside the repository."""
    folder = Path(os.environ.get("JPAGED_SHARED", ROOT.parent / "shared"))
    if not (folder / "fixtures").is_dir():
        pytest.skip(f"no recorded references in {folder}; name their folder in JPAGED_SHARED")
    return folder
