"""Compiles kernel programs for a GPU that is not there, and prints a line of JSON for each.

    python scripts/gpu/compile_programs.py sm_80 DUMP_FOLDER PROGRAM...

`scripts/aot_check.py` runs it, in an environment with JAX's CUDA plugin: what a compiler can not
take ends the process, and then the programs after the last line are still to do. A line is what
`report` returns.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.machine_code import KernelCode, count_instructions, cut_entry, read_launches, read_ptxas
from gpu.targets import TARGETS, Target


def find_ptxas() -> Path:
    """The ptxas of this environment's NVIDIA wheels. Raises FileNotFoundError."""
    for folder in sys.path:
        for path in sorted(Path(folder).glob("nvidia/*/bin/ptxas")):
            return path
    raise FileNotFoundError("no ptxas in this environment; pip install nvidia-cuda-nvcc-cu12")


def set_environment(dump: Path) -> None:
    """What XLA reads when it starts: compile without a GPU, leave PTX in a folder."""
    version = tuple(int(x) for x in importlib.metadata.version("jaxlib").split(".")[:2])
    flags = [
        f"--xla_dump_to={dump}",
        f"--xla_gpu_cuda_data_dir={find_ptxas().parent.parent}",
        # Older ones leave PTX unasked, and do not know the flag.
        *(["--xla_dump_emitter_re=.*ptx.*"] if version >= (0, 11) else []),
    ]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["JAX_PLATFORMS"] = "cpu"  # or the plugin looks for CUDA's libraries
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def main(arguments: Sequence[str]) -> None:
    """Compiles each named program for an architecture."""
    arch, dump, *names = arguments
    set_environment(Path(dump))
    from gpu.programs import PROGRAMS

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for i, name in enumerate(names):
        print(json.dumps(report(PROGRAMS[name], TARGETS[arch], Path(dump), f"program_{i}")))
        sys.stdout.flush()


def report(program: Any, target: Target, dump: Path, module: str) -> dict[str, Any]:
    """Compiles a program and reads what came of it.

    Returns its name, the architecture, `kernels` as dicts of `KernelCode`, and what the program
    needs of memory beside its arguments; or, where JAX or XLA says no, `error`.
    """
    told: dict[str, Any] = {"program": program.name, "arch": target.arch}
    try:
        compiled = compile_for(program, target, module)
    except Exception as error:  # whatever is wrong with one program must not end the others
        return {**told, "error": f"{type(error).__name__}: {error}"[:2000]}
    memory = compiled.memory_analysis()
    return {
        **told,
        "kernels": [dataclasses.asdict(code) for code in read_kernels(dump, module, target)],
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def compile_for(program: Any, target: Target, module: str) -> Any:
    """The compiled program; XLA calls it `jit_` and the module's name."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        topology_name="gpu", platform="cuda", target_config=target.config, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("gpu",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def function(*args: Any) -> Any:
        return program.function(*args)

    function.__name__ = module
    compiled = jax.jit(
        function, in_shardings=sharding, out_shardings=sharding, donate_argnums=program.donated
    )
    # The mesh tells kernels what device they are for, the default device tells the compiler.
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        stack.enter_context(jax.default_device(topology.devices[0]))
        return compiled.lower(*program.args).compile()


def read_kernels(dump: Path, module: str, target: Target) -> list[KernelCode]:
    """The kernels of a compiled module that XLA did not write itself."""
    files = [path for path in dump.iterdir() if re.search(rf"\.jit_{module}\.", path.name)]
    (thunks,) = (path for path in files if path.name.endswith("thunk_sequence.txt"))
    codes = []
    for name, launch in read_launches(thunks.read_text()).items():
        for path in sorted(path for path in files if path.suffix == ".ptx"):
            if entry := cut_entry(path.read_text(), name):
                counts = count_instructions(entry)
                told = read_ptxas(run_ptxas(path, target), name)
                launch["shared_bytes"] += told.pop("static_shared_bytes")
                codes.append(KernelCode(name=name, **launch, **told, **counts))
                break
        else:
            raise FileNotFoundError(f"no PTX of kernel {name!r} among {[f.name for f in files]}")
    return codes


def run_ptxas(path: Path, target: Target) -> str:
    """What ptxas says of a PTX file."""
    command = [str(find_ptxas()), "-v", f"-arch={target.arch}", str(path), "-o", os.devnull]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stderr + done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
