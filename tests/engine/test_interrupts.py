"""Ctrl-C at any line of the engine, and errors that give nothing away."""

import sys

import jax
import pytest

from jpaged import LLM
from jpaged.core.state import check_invariants
from jpaged.engine import compiled
from jpaged.errors import EngineClosedError
from jpaged.sampling_params import SamplingParams
from tests.core.scripted import counting_params
from tests.engine.counting import CountingLLM, greedy

PROMPTS = [[1, 2, 3], [4] * 9, [7, 8, 9, 10, 11]]
PARAMS = [
    greedy(6),
    SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=6),
    greedy(3),
]
FILES = tuple(
    f"/jpaged/engine/{name}.py"
    for name in ("engine", "device", "roster", "lookups", "results", "request", "dispatch")
)


@pytest.fixture
def llm() -> LLM:
    """An LLM over the counting model, with a pool too small for all at once."""
    return CountingLLM(num_blocks=12, max_num_seqs=4, num_decode_steps=3)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]


class Interrupt:
    """Raises KeyboardInterrupt when so many lines of the engine have run; counts them."""

    def __init__(self, at: int = 0):
        self.at, self.num_lines = at, 0

    def __enter__(self):
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _on_call(self, frame, event, arg):
        return self._on_line if frame.f_code.co_filename.endswith(FILES) else None

    def _on_line(self, frame, event, arg):
        self.num_lines += event == "line"
        if event == "line" and self.num_lines == self.at:
            raise KeyboardInterrupt
        return self._on_line


def check_usable(llm: LLM, wanted: list[list[int]]) -> None:
    assert generate(llm) == wanted
    engine = llm.engine
    assert not engine.has_unfinished
    assert engine.num_free_blocks == engine.num_blocks - 1
    assert sorted(engine.roster._free_rows) == [1, 2, 3, 4]
    check_invariants(engine._device.state)


def test_an_interrupt_at_any_line_leaves_a_usable_engine(llm):
    wanted = generate(llm)
    with Interrupt() as counter:
        generate(llm)
    assert counter.num_lines > 1000
    for at in range(1, counter.num_lines, 31):
        with Interrupt(at), pytest.raises(KeyboardInterrupt):
            generate(llm)
        assert not llm.engine.has_unfinished
        check_usable(llm, wanted)


def test_a_second_interrupt_while_the_state_is_made_anew(llm, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    wanted = generate(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._device, "_make_state", interrupted)
        with Interrupt(700), pytest.raises(KeyboardInterrupt):
            generate(llm)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    check_usable(llm, wanted)


def test_an_error_before_anything_is_given_away_loses_no_row(llm, monkeypatch):
    wanted = generate(llm)
    requests = llm._intake.accept(PROMPTS, PARAMS)
    for request in requests:
        llm.engine.add(request)

    def failing(*_, **__):
        raise TypeError("does not compile")

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run_step", failing)
        with pytest.raises(TypeError, match="does not compile"):
            llm.engine.step()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [one.output_ids for request in requests for one in request.samples] == wanted
    check_usable(llm, wanted)


def test_a_traceback_that_holds_the_old_state_holds_no_memory(llm, monkeypatch):
    held = []

    def failing(params, state, *_, **__):
        held.append(state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run_window", failing)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    assert all(array.is_deleted() for array in jax.tree.leaves(held))


def test_a_closed_engine_takes_no_weights(llm):
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.engine.update_params(counting_params(1))
    assert not llm.engine._device.params
