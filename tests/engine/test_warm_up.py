"""Programs compiled ahead are those that requests call, and a warm-up does no harm if it fails."""

import asyncio
import functools
import gc
import logging
import threading

import jax
import pytest

from jpaged import LLM, AsyncEngine, SamplingParams
from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.sampling import Sampler
from jpaged.engine import calls, compiled, warm_up
from jpaged.engine.dispatch import pad_rows
from jpaged.engine.warm_up import WarmUp
from jpaged.errors import ConfigError
from jpaged.models.forward import init_params
from tests.engine.counting import make_counting_engine

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }
)
OPTIONS = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "num_decode_steps": 2,
    "block_size": 8,
    "num_gpu_blocks_override": 40,
    "implementation": "xla",
}
# Rows in buckets of 2 and 3, tokens in 16 and 24, windows of 2 and 1, chunks, a fork. On a CPU the
# program of windows of 2 serves those of 1 as well.
PROMPTS = [[1, 5, 9], list(range(40)), [7] * 11, [3, 4], list(range(9, 30))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=5),
    SamplingParams(temperature=0.0, max_tokens=2),
    SamplingParams(temperature=1.0, n=2, seed=1, max_tokens=6),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True),
]
NAMES = [
    "look-up of 64 tokens",
    "admission of 64 tokens",
    "release of rows",
    "prefill of 16 tokens in 3 rows",
    "prefill of 24 tokens in 3 rows",
    "2 decode steps of 2 rows",
    "2 decode steps of 3 rows",
]


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0), "float32")


def serve_all(llm: LLM) -> int:
    """Serves requests that need every program of plain ones. Returns how many were compiled."""
    before = compiled.compile_clock.num_programs
    llm.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 5, 2, 6, 7]
    return compiled.compile_clock.num_programs - before


def test_what_was_compiled_before_is_not_compiled_again(params, caplog):
    jax.clear_caches()
    caplog.set_level("INFO", logger="jpaged")
    with LLM(MODEL, params=params, warm_up="before", **OPTIONS) as llm:
        assert serve_all(llm) == 0
    assert f"{len(NAMES)} programs are warm" in caplog.text


def test_the_calls_ahead_are_those_of_the_buckets(params):
    with LLM(MODEL, params=params, **OPTIONS) as llm:
        assert [name for name, _ in llm.engine._device.calls_ahead()] == NAMES
    without = OPTIONS | {"enable_prefix_caching": False, "num_decode_steps": 1}
    with LLM(MODEL, params=params, **without) as llm:
        found = [name for name, _ in llm.engine._device.calls_ahead()]
        assert found == [n.replace("2 dec", "1 dec") for n in NAMES if "look-up" not in n]


def test_windows_of_all_lengths_share_a_program_where_that_costs_nothing(params, monkeypatch):
    """Else a window of one step has its own: on a GPU, and where all ids of a large vocabulary are
    told, for which a longer window has too large results."""

    def length(num_top: int) -> int:
        device, sampler = llm.engine._device, Sampler(num_top=num_top)
        rows = pad_rows((), 2)
        call = device._calls.window({}, device.state, rows, num_steps=1, sampler=sampler)
        assert call.args[3:] == (() if call.keywords["num_steps"] == 1 else (1,))
        return call.keywords["num_steps"]

    with LLM(MODEL, params=params, **OPTIONS) as llm:
        assert [length(0), length(512), length(513)] == [2, 2, 1]
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert length(0) == 1


def test_requests_run_while_programs_are_compiled(params, monkeypatch):
    """The first program is held back until a request was served, which compiles what it needs; what
    it does not need is compiled in the background, and not again."""
    jax.clear_caches()
    served, waiting = threading.Event(), threading.Event()
    compile_now = calls.compile_ahead

    def held_back(call):
        waiting.set()
        assert served.wait(60)
        compile_now(call)

    monkeypatch.setattr(warm_up, "compile_ahead", held_back)
    with LLM(MODEL, params=params, warm_up="background", **OPTIONS) as llm:
        assert waiting.wait(60)
        before = compiled.compile_clock.num_programs
        llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
        num_needed = compiled.compile_clock.num_programs - before
        served.set()
        ahead = llm.engine._warm_up
        assert ahead is not None
        ahead.join()
        assert ahead.num_compiled == len(NAMES)
        assert compiled.compile_clock.num_programs - before == len(NAMES)
        assert 0 < num_needed < len(NAMES)
        assert serve_all(llm) == 0


def test_an_error_is_logged_and_ends_the_warm_up_alone(params, monkeypatch, caplog):
    def fail(call):
        raise RuntimeError("no memory for the compiler")

    monkeypatch.setattr(warm_up, "compile_ahead", fail)
    for when in ("before", "background"):
        with LLM(MODEL, params=params, warm_up=when, **OPTIONS) as llm:
            assert llm.engine._warm_up is not None
            llm.engine._warm_up.join()
            assert llm.engine._warm_up.num_compiled == 0
            serve_all(llm)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert f"{NAMES[0]} was not compiled ahead: no memory for the compiler" in caplog.text


class Programs:
    """Calls by name that stand still in the second until they are let go on."""

    def __init__(self, number: int = 3) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.compiled: list[int] = []
        self.calls = [(str(i), functools.partial(Program(self, i))) for i in range(number)]


class Program:
    """Stands for a jitted function."""

    def __init__(self, programs: Programs, place: int) -> None:
        self._programs, self._place = programs, place

    def __call__(self):
        raise AssertionError("a warm-up makes no call")

    def lower(self) -> "Program":
        return self

    def compile(self) -> None:
        if self._place == 1:
            self._programs.begun.set()
            assert self._programs.go_on.wait(60)
        self._programs.compiled.append(self._place)


def test_it_stops_after_the_program_being_compiled():
    programs = Programs()
    ahead = WarmUp(programs.calls)
    ahead.start()
    assert programs.begun.wait(60)
    ahead.stop()
    ahead.join(0.01)
    assert programs.compiled == [0]
    programs.go_on.set()
    ahead.join(60)
    assert programs.compiled == [0, 1]


def test_it_stops_before_the_process_has_too_many_maps(monkeypatch, caplog):
    caplog.set_level("INFO", logger="jpaged")
    assert warm_up._may_map_more()
    monkeypatch.setattr(warm_up, "_MOST_MAPS", 0.0)
    programs = Programs()
    WarmUp(programs.calls).run()
    assert programs.compiled == []
    assert "0 and those behind it wait for a request" in caplog.text


def test_closing_an_engine_ends_its_warm_up(monkeypatch):
    engine, _ = make_counting_engine()
    programs = Programs()
    monkeypatch.setattr(engine._device, "calls_ahead", lambda: programs.calls)
    engine.warm_up("background")
    assert engine._warm_up is not None
    assert programs.begun.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    programs.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not engine._warm_up._thread.is_alive()


def test_a_forgotten_engine_ends_its_warm_up(monkeypatch):
    engine, _ = make_counting_engine()
    programs = Programs()
    monkeypatch.setattr(engine._device, "calls_ahead", lambda: programs.calls)
    engine.warm_up("background")
    ahead = engine._warm_up
    assert ahead is not None
    assert programs.begun.wait(60)
    del engine
    gc.collect()
    programs.go_on.set()
    ahead.join(60)
    assert programs.compiled == [0, 1]


@pytest.mark.parametrize(("chosen", "is_warmed"), [(None, True), ("off", False)])
def test_an_async_engine_warms_up_in_the_background_unless_told(params, chosen, is_warmed):
    async def first_tokens(llm: LLM) -> list[int]:
        async with AsyncEngine(llm) as engine:
            outputs = [output async for output in engine.generate([1, 5, 9], PARAMS[0])]
        return outputs[-1].outputs[0].token_ids

    llm = LLM(MODEL, params=params, warm_up=chosen, **OPTIONS)
    tokens = asyncio.run(first_tokens(llm))
    assert (llm.engine._warm_up is not None) == is_warmed
    with LLM(MODEL, params=params, **OPTIONS) as plain:
        (output,) = plain.generate([[1, 5, 9]], PARAMS[0], use_tqdm=False)
    assert tokens == output.outputs[0].token_ids


def test_a_wrong_choice_is_refused():
    with pytest.raises(ConfigError, match="warm_up='always' is unknown; choose off or before"):
        EngineConfig(warm_up="always")  # pyright: ignore[reportArgumentType]
