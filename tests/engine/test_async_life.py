"""How requests of an `AsyncEngine` end before their time: aborts, slow and vanished readers, death,
closing. Nobody else notices, and nothing stays behind."""

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest

from jpaged import AsyncEngine, SamplingParams
from jpaged.engine import compiled
from jpaged.engine.engine import MAX_FAILURES
from jpaged.errors import EngineClosedError, EngineDeadError
from tests.engine.counting import CountingLLM, expected, greedy
from tests.engine.plain_sampling import letter_tokenizer
from tests.engine.streams import (
    CUMULATIVE,
    DELTA,
    FINAL_ONLY,
    PATIENCE,
    Gate,
    Pace,
    check_idle,
    outputs_of,
    run,
    threads,
    tokens_of,
    whole,
)
from tests.engine.test_async_engine import SlowTokenizer

PROMPT = [1, 2, 3]
KINDS = [CUMULATIVE, DELTA, FINAL_ONLY]


@pytest.fixture
def engine():
    engine = AsyncEngine(CountingLLM(tokenizer=letter_tokenizer()))
    yield engine
    engine.close()
    assert not threads()


async def first_of_each(streams) -> None:
    await asyncio.gather(*(anext(stream) for stream in streams))


async def leave(engine: AsyncEngine, rng: random.Random, place: int, prompt, params) -> None:
    """Starts a request and ends it somehow, at some time."""
    request_id, num_outputs = f"r{place}", rng.randrange(4)
    how = rng.choice(["cancel", "close", "abort", "abort and read"])
    if how == "cancel":
        task = asyncio.create_task(outputs_of(engine, prompt, params, request_id))
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.result()[-1].finished
        return
    stream = engine.generate(prompt, params, request_id)
    outputs = []
    async for output in stream:
        outputs.append(output)
        if len(outputs) > num_outputs:
            break
    if how.startswith("abort"):
        await engine.abort(request_id)
    if how == "abort and read":
        outputs += [output async for output in stream]
        reasons = {one.finish_reason for one in whole(outputs, params).outputs}
        assert reasons <= {"abort", "length"}
    await stream.aclose()


@pytest.mark.parametrize("seed", range(3))
def test_fifty_requests_of_which_many_leave(seed):
    rng = random.Random(seed)

    def draw():
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 24))]
        return prompt, greedy(rng.randrange(1, 40), output_kind=rng.choice(KINDS))

    async def main():
        async with AsyncEngine(CountingLLM()) as engine:
            stayers, leavers = [draw() for _ in range(25)], [draw() for _ in range(25)]
            jobs = [tokens_of(engine, *request) for request in stayers]
            jobs += [leave(engine, rng, place, *one) for place, one in enumerate(leavers)]
            order = list(range(50))
            rng.shuffle(order)
            results = await asyncio.gather(*(jobs[place] for place in order))
            for place, result in zip(order, results, strict=True):
                if place < 25:
                    prompt, params = stayers[place]
                    assert result == expected(prompt, params.max_tokens)
            await check_idle(engine)

    run(main())
    assert not threads()


def test_samples_of_a_request_end_together(engine):
    async def main():
        params = SamplingParams(n=3, seed=1, max_tokens=60, output_kind=CUMULATIVE)
        outputs = []
        async for output in engine.generate(PROMPT, params, "a"):
            outputs.append(output)
            await engine.abort(["b", "a"])
        assert {one.finish_reason for one in outputs[-1].outputs} <= {"abort", "length"}
        assert len(outputs[-1].outputs) == 3
        await check_idle(engine)

    run(main())


def test_an_aborted_text_is_told_to_its_end(engine):
    """What was held back because a stop string may have begun is told when nothing can follow."""
    Pace(engine)

    async def main():
        stop = ["pSbuhQK" * 9]  # so that all is held back
        params = greedy(60, stop=stop, output_kind=DELTA)
        outputs = []
        async for output in engine.generate(PROMPT, params, "a"):
            outputs.append(output)
            if len(outputs) == 2:
                await engine.abort("a")
        assert [one.outputs[0].text for one in outputs[:2]] == ["", ""]
        got = whole(outputs, params).outputs[0]
        text = letter_tokenizer().decode(got.token_ids, skip_special_tokens=True)
        assert got.text == text != ""

    run(main())


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_what_a_slow_reader_has_not_read_is_one_output(engine, kind):
    async def main():
        params = greedy(50, output_kind=kind)
        stream = engine.generate(PROMPT, params)
        outputs = [await anext(stream)]
        while (await engine.snapshot()).num_running:
            await asyncio.sleep(0.01)
        outputs += [output async for output in stream]
        assert len(outputs) <= 2
        assert whole(outputs, params).outputs[0].token_ids == expected(PROMPT, 50)

    run(main())


def test_a_request_may_leave_while_it_is_judged():
    tokenizer = SlowTokenizer()

    async def main():
        async with AsyncEngine(CountingLLM(tokenizer=tokenizer)) as engine:
            params = greedy(20, detokenize=False)
            cancelled = asyncio.create_task(tokens_of(engine, "abc", params))
            aborted = asyncio.create_task(outputs_of(engine, "abd", params, "a"))
            await asyncio.to_thread(tokenizer.is_reached.wait, PATIENCE)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            await engine.abort("a")
            tokenizer.may_go_on.set()
            (output,) = await aborted
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == []
            assert await tokens_of(engine, PROMPT, params) == expected(PROMPT, 20)
            assert (await engine.snapshot()).stats.num_prefill_tokens == len(PROMPT)
            await check_idle(engine)

    run(main())


def break_windows(monkeypatch, number: int) -> RuntimeError:
    """Lets the next `number` windows fail after they were given the state."""
    error, calls = RuntimeError("no such device"), []
    run_window = compiled.run_window

    def failing(params, state, *rest, **options):
        calls.append(1)
        if len(calls) > number:
            return run_window(params, state, *rest, **options)
        state.rows.num_tokens.delete()
        raise error

    monkeypatch.setattr(compiled, "run_window", failing)
    return error


def test_errors_of_the_device_that_pass_are_not_noticed(engine, monkeypatch):
    async def main():
        break_windows(monkeypatch, MAX_FAILURES - 1)
        prompts = [[place, 7] for place in range(9)]
        got = await asyncio.gather(*(tokens_of(engine, p, greedy(20)) for p in prompts))
        assert got == [expected(prompt, 20) for prompt in prompts]
        await check_idle(engine)

    run(main())


@pytest.mark.parametrize("place", ["device", "release", "loop"])
def test_a_dying_engine_tells_its_cause_to_all(monkeypatch, place):
    llm = CountingLLM()

    def failing(*_):
        raise RuntimeError("no such device")

    async def main(engine):
        tasks = [asyncio.create_task(tokens_of(engine, PROMPT, greedy(40))) for _ in range(10)]
        if place == "device":
            break_windows(monkeypatch, MAX_FAILURES)
        else:
            name = {"release": "_retire", "loop": "step"}[place]
            monkeypatch.setattr(llm.engine, name, failing)
        for task in tasks:
            with pytest.raises(EngineDeadError, match="no such device") as caught:
                await task
            assert isinstance(caught.value.__cause__, RuntimeError)
        later = [tokens_of(engine, PROMPT, greedy(4)), engine.snapshot(), engine.abort("a")]
        for one in later:
            with pytest.raises(EngineDeadError, match="no such device"):
                await one
        assert engine.errored
        assert not engine.is_running

    engine = AsyncEngine(llm)
    run(main(engine))
    engine.close()
    assert not threads()


def test_a_row_that_is_not_released_at_once_costs_nobody_their_tokens(engine, monkeypatch):
    Pace(engine)
    device, calls = engine._llm.engine._device, []
    release = device.release

    def failing(row_ids):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such device")
        return release(row_ids)

    async def main():
        stayer = asyncio.create_task(tokens_of(engine, [4, 5], greedy(60)))
        async for _ in engine.generate(PROMPT, greedy(61), "a"):
            monkeypatch.setattr(device, "release", failing)
            await engine.abort("a")
        assert await stayer == expected([4, 5], 60)
        assert calls
        await check_idle(engine)

    run(main())


def test_closing_ends_what_runs_waits_and_comes_later():
    engine = AsyncEngine(CountingLLM())
    Gate(engine).let(2, num_requests=12)

    async def main():
        streams = [engine.generate([place, 7], greedy(60)) for place in range(12)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        while sum(task.done() for task in tasks) < 6:
            await asyncio.sleep(0.001)
        is_seated = [task.done() for task in tasks]
        await engine.shutdown()
        assert not threads()
        assert not engine.is_running
        assert not engine.errored
        assert sum(is_seated) == 6
        for task, stream, is_started in zip(tasks, streams, is_seated, strict=True):
            with pytest.raises(EngineClosedError):
                _ = [output async for output in stream] if is_started else await task
        for later in (tokens_of(engine, PROMPT, greedy(4)), engine.snapshot()):
            with pytest.raises(EngineClosedError):
                await later
        await engine.shutdown()

    run(main())
    engine.close()


def test_one_engine_serves_one_loop_after_another_and_several_at_once(engine):
    for _ in range(2):
        assert run(tokens_of(engine, PROMPT, greedy(20))) == expected(PROMPT, 20)
    results = {}

    def serve(place):
        results[place] = run(tokens_of(engine, [place, 3], greedy(30)))

    loops = [threading.Thread(target=serve, args=(place,)) for place in range(5)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(PATIENCE)
    assert results == {place: expected([place, 3], 30) for place in range(5)}
    run(check_idle(engine))


def test_a_loop_that_is_closed_under_a_request_frees_its_rows(engine):
    gate, loop = Gate(engine), asyncio.new_event_loop()
    gate.let(2, num_requests=4)
    streams = [engine.generate([place, 3], greedy(60, output_kind=DELTA)) for place in range(4)]
    loop.run_until_complete(asyncio.wait_for(first_of_each(streams), PATIENCE))
    loop.close()
    gate.let(float("inf"))

    async def main():
        assert await tokens_of(engine, PROMPT, greedy(20)) == expected(PROMPT, 20)
        while (await engine.snapshot()).num_running:
            await asyncio.sleep(0.01)
        await check_idle(engine)

    run(main())


def test_an_engine_that_is_forgotten_warns_and_ends_its_thread():
    engine = AsyncEngine(CountingLLM())
    assert run(tokens_of(engine, PROMPT, greedy(4))) == expected(PROMPT, 4)
    gone = weakref.ref(engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    (warning,) = [one for one in caught if "AsyncEngine was not closed" in str(one.message)]
    assert warning.category is ResourceWarning
    assert gone() is None
    deadline = time.monotonic() + PATIENCE
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


SCRIPT = """
import asyncio
from jpaged import AsyncEngine
from tests.engine.counting import CountingLLM, greedy

engine = AsyncEngine(CountingLLM())
stream = engine.generate([1, 2, 3], greedy(60))
print(len(asyncio.run(anext(stream)).outputs[0].token_ids))
"""


def test_an_interpreter_ends_with_an_engine_that_runs():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        env={
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(root / ".cache" / "jax"),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
        },
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Fatal" not in done.stderr
