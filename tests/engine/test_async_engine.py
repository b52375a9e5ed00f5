"""`AsyncEngine` as its readers meet it: what outputs hold, and that they are those of `LLM`."""

import asyncio
import dataclasses
import random
import re
import threading

import pytest

from jpaged import AsyncEngine, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.errors import ConfigError, QueueFullError, RequestError
from tests.core.scripted import counting_params
from tests.engine.counting import CountingLLM, expected, greedy
from tests.engine.plain_sampling import letter_tokenizer
from tests.engine.streams import (
    CUMULATIVE,
    DELTA,
    FINAL_ONLY,
    Pace,
    check_idle,
    outputs_of,
    run,
    threads,
    tokens_of,
    whole,
)

PROMPT = [1, 2, 3]
LONG = [7, 1, 4, 8, 2, 9, 3, 5, 6]  # two full blocks and a token


@pytest.fixture
def engine():
    engine = AsyncEngine(CountingLLM(tokenizer=letter_tokenizer()))
    yield engine
    engine.close()
    assert not threads()


def test_what_outputs_of_each_kind_hold(engine):
    Pace(engine)
    wanted = expected(PROMPT, 20)
    text = letter_tokenizer().decode(wanted, skip_special_tokens=True)

    def outputs(kind):
        return run(outputs_of(engine, PROMPT, greedy(20, output_kind=kind)))

    so_far = [output.outputs[0] for output in outputs(CUMULATIVE)]
    assert [one.token_ids for one in so_far] == [wanted[: len(one.token_ids)] for one in so_far]
    assert all(text.startswith(one.text) for one in so_far)
    assert [len(one.token_ids) for one in so_far] == [1, 9, 17, 20]
    news = [output.outputs[0] for output in outputs(DELTA)]
    assert [token for one in news for token in one.token_ids] == wanted
    assert "".join(one.text for one in news) == text
    assert [one.finish_reason for one in news] == [None] * (len(news) - 1) + ["length"]
    (last,) = outputs(FINAL_ONLY)
    assert (last.outputs[0].token_ids, last.outputs[0].text, last.finished) == (wanted, text, True)
    assert so_far[-1] == last.outputs[0]
    run(check_idle(engine))


def test_a_reader_may_change_what_they_were_given(engine):
    async def main():
        lengths = []
        async for output in engine.generate(PROMPT, greedy(20, logprobs=1)):
            lengths.append(len(output.outputs[0].token_ids))
            output.outputs[0].token_ids.clear()
            output.outputs[0].logprobs.clear()
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 20

    run(main())


def draw_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    is_greedy = rng.random() < 0.2
    params = SamplingParams(
        output_kind=rng.choice([CUMULATIVE, DELTA, DELTA, FINAL_ONLY]),
        stream_interval=rng.choice([None, 1, 3, 100]),
        temperature=0.0 if is_greedy else 1.0,
        n=1 if is_greedy else rng.choice([1, 1, 2, 3]),
        seed=rng.randrange(100),
        max_tokens=rng.randrange(1, 24),
        stop=rng.sample(["a", "Q", "ug", "x1", "Ke"], rng.choice([0, 1, 3])),
        include_stop_str_in_output=rng.random() < 0.5,
        stop_token_ids=rng.sample(range(50), rng.choice([0, 2])),
        detokenize=True,
        skip_special_tokens=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        flat_logprobs=rng.random() < 0.5,
    )
    return [rng.randrange(50) for _ in range(rng.randrange(1, 20))], params


@pytest.mark.parametrize("seed", range(3))
def test_outputs_joined_are_those_of_the_offline_class(seed):
    rng = random.Random(seed)
    llm = CountingLLM(tokenizer=letter_tokenizer(), eos_ids=[5])
    prompts, several = zip(*(draw_request(rng) for _ in range(40)), strict=True)
    wanted = llm.generate(list(prompts), list(several), use_tqdm=False)
    llm.reset_prefix_cache()

    async def main():
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(
                *(outputs_of(engine, *one) for one in zip(prompts, several, strict=True))
            )

    for want, outputs, params in zip(wanted, run(main()), several, strict=True):
        got = whole(outputs, params)
        assert got.outputs == want.outputs
        assert got.prompt_token_ids == want.prompt_token_ids
        assert got.prompt_logprobs == want.prompt_logprobs
        check_intervals(outputs, params)


def check_intervals(outputs, params: SamplingParams) -> None:
    """Each delta of a sample but the first and last has at least as many tokens as asked."""
    if params.output_kind is FINAL_ONLY:
        assert len(outputs) == 1
    if params.output_kind is not DELTA:
        assert all(len(output.outputs) == params.n for output in outputs)
        return
    deltas = [one for output in outputs for one in output.outputs]
    assert sum(one.finish_reason is not None for one in deltas) == params.n
    for index in range(params.n):
        _, *others = [one for one in deltas if one.index == index]
        for one in others[:-1]:
            assert len(one.token_ids) >= (params.stream_interval or 1)
    # What is told of the prompt is told once.
    assert sum(output.prompt_logprobs is not None for output in outputs) <= 1


def test_the_first_token_comes_at_once_and_then_every_so_many(engine):
    Pace(engine)
    params = greedy(30, output_kind=DELTA, stream_interval=10)
    outputs = run(outputs_of(engine, PROMPT, params))
    # Windows are of 8 tokens.
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 16, 13]


def test_requests_without_seeds_draw_as_offline_in_the_order_of_their_coming():
    params = SamplingParams(max_tokens=8)
    prompts = [PROMPT] * 12
    wanted = CountingLLM().generate(prompts, params, use_tqdm=False)
    wanted = [output.outputs[0].token_ids for output in wanted]
    assert len({tuple(tokens) for tokens in wanted}) > 6

    async def main():
        async with AsyncEngine(CountingLLM()) as engine:
            return await asyncio.gather(*(tokens_of(engine, p, params) for p in prompts))

    assert run(main()) == wanted


def test_bad_requests_are_refused_alone(engine):
    bad = [
        ([], greedy(4), None, "empty"),
        ([1, 99], greedy(4), None, "token id 99"),
        ([1] * 64, greedy(4), None, "max_model_len"),
        ([PROMPT], greedy(4), None, "list of integers"),
        (PROMPT, {"max_tokens": 4}, None, "SamplingParams"),
        (PROMPT, greedy(4, logprobs=40), None, "max_logprobs"),
        (PROMPT, greedy(4), 7, "request_id"),
    ]

    async def main():
        good = asyncio.create_task(tokens_of(engine, PROMPT, greedy(40)))
        for *request, reason in bad:
            with pytest.raises(RequestError, match=reason):
                await outputs_of(engine, *request)
        assert await good == expected(PROMPT, 40)
        await check_idle(engine)

    run(main())


def test_a_request_that_can_not_be_worded_ends_alone(engine, monkeypatch):
    news_of = engine._reporter.news_of

    def failing(request):
        if request.request_id == "bad" and request.samples[0].num_told:
            raise ValueError("no words for it")
        return news_of(request)

    monkeypatch.setattr(engine._reporter, "news_of", failing)

    async def main():
        good = asyncio.create_task(tokens_of(engine, PROMPT, greedy(40)))
        with pytest.raises(ValueError, match="no words"):
            await outputs_of(engine, PROMPT, greedy(40), "bad")
        assert await good == expected(PROMPT, 40)
        await check_idle(engine)

    run(main())


class Failing:
    """A tokenizer that fails at the letter Q, wherever it meets it."""

    def __init__(self):
        self._whole = letter_tokenizer()

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def decode(self, token_ids, **options):
        text = self._whole.decode(token_ids, **options)
        if "Q" in text:
            raise ValueError("no Q")
        return text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"output_kind": DELTA},
        {"output_kind": FINAL_ONLY},
        {"output_kind": FINAL_ONLY, "stop": ["#"]},
        {"n": 2, "seed": 1, "temperature": 0.01},
        {"stop_token_ids": [letter_tokenizer().convert_tokens_to_ids("Q")]},
    ],
    ids=str,
)
def test_a_tokenizer_that_fails_fails_its_request_alone(fields):
    tokenizer = Failing()
    bad_id = tokenizer.convert_tokens_to_ids("Q")
    prompts = [[i, 2] for i in range(50)]
    bad = next(p for p in prompts if bad_id in expected(p, 12)[4:])
    good = next(p for p in prompts if bad_id not in expected(p, 12))
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **fields})
    if params.stop_token_ids:
        params.include_stop_str_in_output = True  # so that the letter is text

    async def main():
        async with AsyncEngine(CountingLLM(tokenizer=tokenizer)) as engine:
            other = asyncio.create_task(tokens_of(engine, good, greedy(12)))
            with pytest.raises(ValueError, match="no Q"):
                await outputs_of(engine, bad, params)
            assert await other == expected(good, 12)
            await check_idle(engine)

    run(main())
    llm = CountingLLM(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no Q"):
        llm.generate([good, bad], params, use_tqdm=False)
    assert not llm.engine.has_unfinished
    (output,) = llm.generate([good], greedy(12), use_tqdm=False)
    assert output.outputs[0].token_ids == expected(good, 12)


def test_ids_of_live_requests_are_taken(engine):
    Pace(engine)

    async def main():
        async for output in engine.generate(PROMPT, greedy(40), "a"):
            assert output.request_id == "a"
            if not output.finished:
                with pytest.raises(RequestError, match="request_id='a'"):
                    await outputs_of(engine, PROMPT, greedy(4), "a")
        assert await tokens_of(engine, PROMPT, greedy(4), "a") == expected(PROMPT, 4)
        others = await asyncio.gather(*(outputs_of(engine, PROMPT, greedy(2)) for _ in range(8)))
        assert len({outputs[-1].request_id for outputs in others}) == 8

    run(main())


def test_a_queue_has_its_limit():
    async def main():
        async with AsyncEngine(CountingLLM(), max_queued=10) as engine:
            tasks = [asyncio.create_task(tokens_of(engine, PROMPT, greedy(20))) for _ in range(30)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [one for one in results if isinstance(one, QueueFullError)]
            assert [one for one in results if one not in refused] == [expected(PROMPT, 20)] * 10
            assert len(refused) == 20
            assert "max_queued=10" in str(refused[0])
            assert await tokens_of(engine, PROMPT, greedy(3)) == expected(PROMPT, 3)

    run(main())
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="max_queued"):
            AsyncEngine(CountingLLM(), max_queued=wrong)


def test_those_who_run_are_not_queued():
    async def main():
        async with AsyncEngine(CountingLLM(), max_queued=1) as engine:
            streams = [engine.generate(PROMPT, greedy(40)) for _ in range(6)]
            for stream in streams:
                await anext(stream)
            for stream in streams:
                await stream.aclose()
            await check_idle(engine)

    run(main())


class SlowTokenizer:
    """Encodes only when it may."""

    def __init__(self):
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def encode(self, text, **options):
        self.is_reached.set()
        assert self.may_go_on.wait(120)
        return [ord(letter) % 50 for letter in text]


def test_a_prompt_that_takes_long_to_judge_holds_up_nobody():
    tokenizer = SlowTokenizer()

    async def main():
        async with AsyncEngine(CountingLLM(tokenizer=tokenizer)) as engine:
            params = greedy(20, detokenize=False)
            slow = asyncio.create_task(tokens_of(engine, "abc", params))
            for _ in range(3):
                assert await tokens_of(engine, PROMPT, params) == expected(PROMPT, 20)
            assert tokenizer.is_reached.is_set()
            assert not slow.done()
            tokenizer.may_go_on.set()
            assert await slow == expected([ord(letter) % 50 for letter in "abc"], 20)

    run(main())


def test_weights_caches_and_counts_between_steps(engine):
    async def main():
        for num_computed in (len(LONG), len(LONG) + 1, 2 * len(LONG) + 1):
            assert await tokens_of(engine, LONG, greedy(9)) == expected(LONG, 9)
            assert (await engine.snapshot()).stats.num_prefill_tokens == num_computed
            if num_computed == len(LONG) + 1:
                assert await engine.reset_prefix_cache()
        await engine.update_params(counting_params(3))
        assert await tokens_of(engine, LONG, greedy(9)) == expected(LONG, 9, shift=3)
        snapshot = await engine.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
        assert snapshot.stats.num_prefill_tokens == 3 * len(LONG) + 1
        with pytest.raises(AttributeError):  # to who asked for it, and to nobody else
            await engine._call(lambda: engine._llm.engine.no_such_thing)
        assert engine.is_running

    run(main())


def test_cached_prefixes_stay_while_a_request_runs(engine):
    Pace(engine)

    async def main():
        async for output in engine.generate(PROMPT, greedy(40)):
            assert await engine.reset_prefix_cache() is output.finished

    run(main())


def test_what_is_known_at_once(engine):
    assert engine.get_tokenizer().decode([10]) == letter_tokenizer().decode([10])
    assert dataclasses.asdict(engine.get_default_sampling_params()) == dataclasses.asdict(
        SamplingParams()
    )


def test_one_thread_calls_the_engine_and_sleeps_when_there_is_nothing_to_do(monkeypatch):
    callers, calls = set(), []

    def recorded(name):
        method = getattr(Engine, name)

        def recording(self, *args):
            callers.add(threading.current_thread().name)
            calls.append(name)
            return method(self, *args)

        return recording

    names = ["add", "abort", "step", "update_params", "reset_prefix_cache", "snapshot", "close"]
    for name in names:
        monkeypatch.setattr(Engine, name, recorded(name))
    looks = []
    has_unfinished = Engine.has_unfinished.fget
    monkeypatch.setattr(
        Engine, "has_unfinished", property(lambda self: looks.append(1) or has_unfinished(self))
    )

    async def main():
        async with AsyncEngine(CountingLLM()) as engine:
            await tokens_of(engine, PROMPT, greedy(9))
            stream = engine.generate(PROMPT, greedy(40))
            await anext(stream)
            await stream.aclose()
            await engine.update_params(counting_params())
            await engine.reset_prefix_cache()
            await engine.snapshot()
            num_looks = len(looks)
            await asyncio.sleep(0.3)
            assert len(looks) <= num_looks + 1

    run(main())
    assert callers == {"jpaged-engine"}
    assert set(calls) == set(names)


def test_grammars_are_made_side_by_side_while_others_run():
    """Matchers of one grammar are forked in several threads while the engine's follows others."""
    forms = [{"regex": "[a-c]{4,8}"}, {"choice": ["aQx", "bug"]}, {"regex": "[a-z]+1"}]

    async def main():
        llm = CountingLLM(tokenizer=letter_tokenizer(), eos_ids=[1])
        async with AsyncEngine(llm) as engine:
            several = [
                SamplingParams(seed=seed, max_tokens=9, structured_outputs=forms[seed % 3])
                for seed in range(24)
            ]
            free = asyncio.create_task(tokens_of(engine, PROMPT, greedy(40, ignore_eos=True)))
            got = await asyncio.gather(*(outputs_of(engine, PROMPT, one) for one in several))
            assert await free == expected(PROMPT, 40)
        return [whole(*one).outputs[0] for one in zip(got, several, strict=True)]

    for seed, output in enumerate(run(main())):
        pattern = forms[seed % 3].get("regex", "aQx|bug")
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text)
        else:
            assert re.fullmatch("[a-z]{9}", output.text)
