"""Every kernel with every feature is lowered for a GPU, on any machine: to Triton's code.

What the compiler then makes of it is for `scripts/aot_check.py` to see.
"""

import dataclasses
from typing import Any

import jax
import pytest

from scripts.gpu.programs import PROGRAMS, Program
from tests.kernels import lowering

TRITON = "__gpu$xla.gpu.triton"


def lower(program: Program, device_kind: str = lowering.A100) -> str:
    return lowering.lower(
        program.function, *program.args, donated=program.donated, device_kind=device_kind
    )


def kernel_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if TRITON in line]


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_lowered_to_triton(name: str):
    program = PROGRAMS[name]
    calls = kernel_calls(lower(program))
    assert calls
    assert all(program.kernel in call for call in calls)
    num_written = len(jax.tree.leaves([program.args[i] for i in program.donated]))
    aliases = sum(call.count("output_operand_alias<") for call in calls)
    assert aliases >= (num_written and 2)


@pytest.mark.skipif(not lowering.ASKS_DEVICE, reason="older JAX lowers for one device alone")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "bfloat16" in name])
def test_is_lowered_for_hopper(name: str):
    assert kernel_calls(lower(PROGRAMS[name], "NVIDIA H200"))


def test_all_kernels_are_there():
    kernels = {program.kernel for program in PROGRAMS.values()}
    assert kernels == {"paged_decode", "paged_prefill", "kv_write", "block_copy", "quant_matmul"}


def test_what_has_no_triton_form_is_seen():
    plain = PROGRAMS["decode: bfloat16"]

    def without_kernel(q: Any, *rest: Any) -> Any:
        return q

    assert not kernel_calls(lower(dataclasses.replace(plain, function=without_kernel)))
