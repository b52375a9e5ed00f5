"""Every implementation of paged attention over every case, held against NumPy in float64."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import cases
from tests.kernels.cases import LARGEST, MORE_PROGRAMS, PROGRAMS, Case, Program
from tests.native.kernels import load_or_skip

FLOATS = tuple(p for p in PROGRAMS if p.stored not in LARGEST)
PLAIN = next(p for p in PROGRAMS if p.name == "plain float32")
EIGHT_BIT = next(p for p in PROGRAMS if p.name.startswith("int8"))


class Form(NamedTuple):
    """An implementation, and the programs it has an own form of."""

    options: dict[str, Any]
    programs: tuple[Program, ...]


FORMS = {
    "xla": Form({"implementation": "xla"}, PROGRAMS),
    # Pools of 8 bits it leaves to XLA.
    "native": Form({"implementation": "native", "is_careful": True}, FLOATS),
    "pallas": Form({"implementation": "pallas", "is_careful": True}, PROGRAMS),
    # All rows in the kernel of prompts.
    "pallas deterministic": Form(
        {"implementation": "pallas", "is_careful": True, "deterministic": True}, (PLAIN, EIGHT_BIT)
    ),
}
ALL = [(name, program) for name, form in FORMS.items() for program in form.programs]

MORE = [
    (name, program)
    for name in ("xla", "native", "pallas")
    for program in MORE_PROGRAMS
    if name != "native" or program.stored not in LARGEST
]


def ids(pairs) -> list[str]:
    return [f"{name}, {program.name}" for name, program in pairs]


@functools.cache
def expected_of(case: Case) -> np.ndarray:
    return cases.expected(case.program, cases.draw(case))


def judge(form: str, case: Case) -> None:
    options = FORMS[form].options
    if options["implementation"] == "native":
        load_or_skip()
    got = cases.run(case.program, cases.draw(case), **options)
    cases.check(case.program, expected_of(case), got, f"{form}, {case.name}")


@pytest.mark.parametrize(("form", "program"), ALL, ids=ids(ALL))
def test_every_case(form, program):
    for case in cases.named_cases([program]):
        judge(form, case)


@pytest.mark.gpu
@pytest.mark.parametrize("program", [*PROGRAMS, *MORE_PROGRAMS], ids=lambda p: p.name)
def test_every_case_compiled_for_the_gpu(program):
    for case in cases.named_cases([program]):
        judge("pallas", case)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "program"), MORE, ids=ids(MORE))
def test_every_group_size_and_head_dim(form, program):
    for case in cases.named_cases([program], num_drawn=2):
        judge(form, case)


def test_there_are_enough_cases_and_no_two_are_alike():
    drawn = list(cases.named_cases())
    assert len(drawn) >= 150
    assert len({case.name for case in drawn}) == len(drawn)
    assert len({(case.program, case.rows) for case in drawn}) == len(drawn)
    assert {p.block_size for p in PROGRAMS} == {1, 8, 16, 32}
    assert {p.heads[0] // p.heads[1] for p in MORE_PROGRAMS} == set(range(1, 17))
    assert {p.stored for p in PROGRAMS} == {"float32", "bfloat16", "float16", *LARGEST}
    assert {p.scales for p in PROGRAMS} == {"none", "tensor", "token_head"}


lengths = st.one_of(st.integers(0, 140), st.integers(0, 480))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    decode=st.lists(lengths, min_size=4, max_size=4),
    prefill=st.lists(st.tuples(lengths, st.integers(0, 20)), min_size=4, max_size=4).filter(
        lambda rows: sum(n for _, n in rows) <= 60
    ),
)
def test_any_rows(form, data, seed, decode, prefill):
    """In the programs of the fixed cases."""
    program = data.draw(st.sampled_from(FORMS[form].programs))
    rows = [(n, 1) for n in decode] + [(past + n, n) for past, n in prefill]
    judge(form, Case("any rows", program, tuple(rows), seed))


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_result_is_seen(form):
    """The control: what is judged depends on every key that is visible."""
    case = next(c for c in cases.named_cases([PLAIN]) if c.name.endswith("tiles of keys"))
    inputs = cases.draw(case)
    if FORMS[form].options["implementation"] == "native":
        load_or_skip()
    last = inputs.block_table[1, 3]  # of 64 keys in blocks of 16
    inputs.v[last, 15] += 1
    options = FORMS[form].options
    got = cases.run(case.program, inputs, **options)
    with pytest.raises(AssertionError, match="Mismatched elements: 144 /"):  # 6 heads of 24
        cases.check(case.program, expected_of(case), got)
