"""What a compiler made of a kernel, read from the files that XLA and ptxas leave.

Owns the text formats and what is asked of machine code. Knows nothing of how it was compiled.
"""

import dataclasses
import re
from typing import Any

# A line of XLA's thunk sequence: a kernel in Triton's language, be it ours or one of XLA's fusions.
_THUNK = re.compile(
    r"kCustomKernel\b.*?\]\s*(?P<name>\S+)\s+grid:\s*\[(?P<grid>[\d, ]+)\]\s+"
    r"threads:\s*\[(?P<threads>[\d, ]+)\]\s+shared_memory:\s*(?P<shared>\d+)"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;\n]*?,\s*(0x[0-9a-f]+|\d+)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCode:
    """One kernel's machine code."""

    name: str
    grid: list[int]
    num_threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_mma: int  # mma.sync: a warp's product on tensor cores
    num_wgmma: int  # wgmma: one of four warps, from Hopper on
    num_copies_16: int  # asynchronous copies of 16 bytes
    num_copies_less: int  # smaller ones


def read_launches(thunk_sequence: str) -> dict[str, dict[str, Any]]:
    """Grid, threads and dynamic shared memory of each custom kernel, by its name."""
    launches = {}
    for match in _THUNK.finditer(thunk_sequence):
        threads = [int(x) for x in match["threads"].split(",")]
        launches[match["name"]] = {
            "grid": [int(x) for x in match["grid"].split(",")],
            "num_threads": threads[0] * threads[1] * threads[2],
            "shared_bytes": int(match["shared"]),
        }
    return launches


def cut_entry(ptx: str, name: str) -> str | None:
    """The part of a PTX module that belongs to the kernel of that name, or None."""
    for entry in re.split(r"(?=\.visible\s+\.entry\s)", ptx)[1:]:
        if re.match(rf"\.visible\s+\.entry\s+{re.escape(name)}\s*\(", entry):
            return entry
    return None


def count_instructions(entry: str) -> dict[str, int]:
    """Tensor-core instructions and asynchronous copies of a kernel, by `KernelCode`'s names."""
    sizes = [int(size, 0) for size in _COPY.findall(entry)]
    return {
        "num_mma": len(re.findall(r"\bmma\.sync", entry)),
        "num_wgmma": len(re.findall(r"\bwgmma\.mma_async", entry)),
        "num_copies_16": sizes.count(16),
        "num_copies_less": sum(size < 16 for size in sizes),
    }


def read_ptxas(log: str, name: str) -> dict[str, int]:
    """Registers, spilled bytes and static shared memory that `ptxas -v` tells of a kernel.

    Raises ValueError if it tells nothing.
    """
    parts = re.split(r"Compiling entry function '([^']+)'", log)
    told = dict(zip(parts[1::2], parts[2::2], strict=True)).get(name, "")
    registers, spills = _REGISTERS.search(told), _SPILLS.search(told)
    if registers is None or spills is None:
        raise ValueError(f"ptxas tells nothing of kernel {name!r}: {log[-500:]}")
    shared = _STATIC_SHARED.search(told)
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "static_shared_bytes": int(shared[1]) if shared else 0,
    }


def judge(
    kernel: KernelCode, *, shared_limit: int, multiplies: bool, copies_ahead: bool
) -> list[str]:
    """What is wrong with a kernel's code.

    shared_limit: bytes. multiplies: its products belong on tensor cores. copies_ahead: what it
    reads belongs into shared memory by asynchronous copies of 16 bytes.
    """
    problems = []
    if kernel.spill_bytes:
        problems.append(f"{kernel.spill_bytes} bytes spilled")
    if kernel.shared_bytes > shared_limit:
        problems.append(f"{kernel.shared_bytes} bytes of shared memory, of {shared_limit}")
    if multiplies and not kernel.num_mma + kernel.num_wgmma:
        problems.append("no tensor-core instruction")
    if copies_ahead and not kernel.num_copies_16:
        problems.append(f"no 16-byte asynchronous copy ({kernel.num_copies_less} smaller)")
    return problems
