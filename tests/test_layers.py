"""The shape of the tree: who imports whom, what lives in one place only, how long things are."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "jpaged").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])
ALL_FILES = sorted([*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])

EDGE = {"__init__", "__main__", "cli", "functional"}  # the package's own ways in
BASE = {path.stem for path in (ROOT / "jpaged").glob("*.py")} - EDGE
BELOW = {
    "base": {"base"},
    "ops": {"base", "ops", "native"},
    "native": {"base", "native"},
    "core": {"base", "ops", "core"},
    "models": {"base", "ops", "models"},  # and core.batch
    "loading": {"base", "ops", "models", "loading"},
    "parallel": {"base", "ops", "models", "parallel"},  # and core.state
}
"""Which layers a layer may import. The shell (engine, bench, server, CLI) may import everything."""

ALSO = {("models", "core.batch"), ("parallel", "core.state"), ("parallel", "core.batch")}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
HARD_MAX_FUNCTION_LINES = 80
MAX_LONG_SHARE = 0.05
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def name_of(path: Path) -> str:
    """The dotted module name: jpaged.core.state."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, lazy ones included."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str:
    """core for jpaged.core.state; base for jpaged.errors; shell for the rest."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else ""
    if first in BASE:
        return "base"
    return first if first in BELOW else "shell"


def uses(path: Path, dotted: str) -> list[int]:
    """The lines on which the file names `dotted`, such as jax.jit, or imports it."""
    owner, _, attribute = dotted.rpartition(".")
    lines = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and node.attr == attribute:
            if not owner or ast.unparse(node.value) == owner:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and owner and node.module == owner:
            lines += [node.lineno for alias in node.names if alias.name == attribute]
    return lines


def uses_outside(dotted: str, allowed: set[str], files: list[Path] = FILES) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if name_of(path) not in allowed
        for line in uses(path, dotted)
    ]


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of each function, docstring not counted."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield f"{name_of(path)}.{node.name}", length


def test_layers_import_only_what_lies_below():
    wrong = []
    for path in FILES:
        layer = layer_of(name_of(path))
        for target in imports_of(path):
            if layer == "shell" or not target.startswith("jpaged."):
                continue
            below = target.removeprefix("jpaged.")
            is_also = any(
                layer == who and (below == what or below.startswith(f"{what}."))
                for who, what in ALSO
            )
            # `from jpaged.core import batch` names the package on the way to an allowed module.
            is_passage = any(layer == who and what.startswith(f"{below}.") for who, what in ALSO)
            if not (is_also or is_passage or layer_of(target) in BELOW[layer]):
                wrong.append(f"{name_of(path)} imports {target}")
    assert not wrong


def test_kernels_stand_alone_and_hold_all_of_pallas():
    wrong = []
    for path in FILES:
        is_kernel = name_of(path).startswith("pallas_kernels")
        for target in imports_of(path):
            if is_kernel and target.split(".")[0] == "jpaged":
                wrong.append(f"{name_of(path)} imports {target}")
            if not is_kernel and target.startswith("jax.experimental.pallas"):
                wrong.append(f"{name_of(path)} imports {target}")
            if (
                target.startswith("pallas_kernels")
                and layer_of(name_of(path))
                in {
                    "base",
                    "core",
                    "models",
                    "loading",
                    "parallel",
                }
                and not is_kernel
            ):
                wrong.append(f"{name_of(path)} imports {target}")
    assert not wrong


@pytest.mark.parametrize("dotted", ["jax.jit", "jax.pmap", "nnx.jit", "jax.experimental.pjit.pjit"])
def test_functions_are_compiled_in_one_place(dotted):
    assert not uses_outside(dotted, {"jpaged.engine.compiled"})


@pytest.mark.parametrize("dotted", ["jax.device_get", "jax.block_until_ready", "block_until_ready"])
def test_the_device_is_read_in_one_place(dotted):
    # The benchmarks measure, so they wait; a load waits for a part before it reads the next.
    files = [path for path in FILES if not name_of(path).startswith("jpaged.bench")]
    assert not uses_outside(dotted, {"jpaged.engine.engine", "jpaged.engine.weights"}, files)


def test_pure_layers_never_make_numpy_arrays_of_device_arrays():
    """`check_invariants` is for tests and reads the whole state."""
    wrong = []
    for path in FILES:
        if layer_of(name_of(path)) not in {"core", "ops", "models"}:
            continue
        allowed = {
            line
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef) and node.name == "check_invariants"
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        found = set(uses(path, "np.asarray")) | set(uses(path, "item"))
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line in found - allowed]
    assert not wrong


@pytest.mark.parametrize("dotted", ["os.environ", "os.getenv", "os.putenv"])
def test_the_environment_is_read_at_the_edge(dotted):
    assert not uses_outside(dotted, {"jpaged.cli", "jpaged.engine.compiled"})


def test_torch_is_for_tests_alone():
    wrong = [
        f"{name_of(path)} imports {target}"
        for path in FILES
        for target in imports_of(path)
        if target.split(".")[0] in {"torch", "torchvision", "tests"}
    ]
    assert not wrong


def test_oracles_know_nothing_of_what_they_judge():
    wrong = [
        f"{name_of(path)} imports {target}"
        for path in (ROOT / "tests" / "oracles").rglob("*.py")
        for target in imports_of(path)
        if target.split(".")[0] in {"jpaged", "pallas_kernels"}
    ]
    assert not wrong


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = dict(entry for path in FILES for entry in functions_of(path))
    assert {name: n for name, n in lengths.items() if n > HARD_MAX_FUNCTION_LINES} == {}
    long = {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert len(long) <= MAX_LONG_SHARE * len(lengths), long


def test_packages_are_two_levels_deep_at_most():
    assert [name_of(path) for path in FILES if len(path.relative_to(ROOT).parts) > 3] == []


def test_no_module_has_a_name_that_says_nothing():
    assert [name_of(path) for path in ALL_FILES if path.stem in VAGUE_NAMES] == []


def test_the_rules_see_what_they_forbid(tmp_path):
    path = tmp_path / "case.py"
    path.write_text("import jax\nfrom os import environ\nf = jax.jit(lambda x: x)\nx.item()\n")
    assert uses(path, "jax.jit") == [3]
    assert uses(path, "os.environ") == [2]
    assert uses(path, "item") == [4]
    assert uses(path, "jax.device_get") == []
