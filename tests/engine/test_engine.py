"""The whole engine with a model whose every token is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.core.state import check_invariants
from jpaged.engine import compiled
from jpaged.errors import EngineClosedError, RequestError, RequestTooLongError
from jpaged.sampling_params import SamplingParams
from tests.core.scripted import counting_params
from tests.engine.counting import expected, greedy, make_counting_engine, run

PROMPTS = [[(i * 7 + j * j) % 50 for j in range(n)] for i, n in enumerate((1, 3, 9, 17, 4, 30, 12))]


def free_blocks_at_rest(engine) -> int:
    check_invariants(engine._device.state)
    return engine.num_free_blocks


def answers(requests) -> list[list[int]]:
    return [request.samples[0].output_ids for request in requests]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_decode_steps": 1},
        {"num_decode_steps": 3, "max_num_batched_tokens": 7},
        {"enable_prefix_caching": False},
        {"num_blocks": 17},
        {"num_blocks": 17, "num_decode_steps": 1, "enable_prefix_caching": False},
        {"long_prefill_token_threshold": 5},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_every_request_gets_its_own_tokens(options):
    engine, intake = make_counting_engine(**options)
    requests = intake.accept(PROMPTS, greedy(20))
    run(engine, requests)
    assert answers(requests) == [expected(prompt, 20) for prompt in PROMPTS]
    assert {request.samples[0].finish_reason for request in requests} == {"length"}
    assert free_blocks_at_rest(engine) == engine.num_blocks - 1


def test_a_small_pool_preempts_and_the_counter_tells():
    engine, intake = make_counting_engine(num_blocks=17)
    run(engine, intake.accept(PROMPTS, greedy(20)))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_resumed_hits > 0


def test_a_prompt_interrupted_half_way_is_looked_up_once():
    engine, intake = make_counting_engine()
    (request,) = intake.accept([PROMPTS[5]], greedy(2))
    engine.add(request)
    engine.step()
    assert not request.samples[0].output_ids
    engine.update_params(counting_params())
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.num_cache_queries == len(PROMPTS[5])
    assert engine.stats.num_resumed_queries == len(PROMPTS[5])


def seeded(seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=seed, max_tokens=12, n=n)


@pytest.fixture(scope="module")
def solo_samples() -> list[list[int]]:
    """Five samples of one seeded request, each alone in an engine."""
    engine, intake = make_counting_engine()
    (request,) = intake.accept([PROMPTS[2]], seeded(11, n=5))
    run(engine, [request])
    return [sample.output_ids for sample in request.samples]


def test_samples_of_one_seed_differ(solo_samples):
    assert len({tuple(tokens) for tokens in solo_samples}) == 5


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 2}, {"num_blocks": 17}, {"num_decode_steps": 1}, {"max_num_seqs": 3}],
    ids=str,
)
def test_sample_j_is_the_same_in_any_crowd(solo_samples, options):
    engine, intake = make_counting_engine(**options)
    crowd = intake.accept(PROMPTS, seeded(3, n=2))
    (request,) = intake.accept([PROMPTS[2]], seeded(11, n=5))
    run(engine, [*crowd[:3], request, *crowd[3:]])
    assert [sample.output_ids for sample in request.samples] == solo_samples
    assert free_blocks_at_rest(engine) == engine.num_blocks - 1


def test_fewer_samples_are_the_first_of_more(solo_samples):
    engine, intake = make_counting_engine()
    (request,) = intake.accept([PROMPTS[2]], seeded(11, n=2))
    run(engine, [request])
    assert [sample.output_ids for sample in request.samples] == solo_samples[:2]


def test_samples_read_their_prompt_once():
    engine, intake = make_counting_engine()
    run(engine, intake.accept([PROMPTS[5]], seeded(1, n=5)))
    assert engine.stats.num_prefill_tokens == len(PROMPTS[5])


def test_requests_without_a_seed_differ_and_repeat_with_the_engine_seed():
    params = SamplingParams(max_tokens=12)
    runs = []
    for engine_seed in (0, 0, 1):
        engine, intake = make_counting_engine(seed=engine_seed)
        requests = intake.accept([PROMPTS[2]] * 2, params)
        run(engine, requests)
        runs.append(answers(requests))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_a_repeated_prompt_is_found_in_the_cache_up_to_whole_blocks_before_its_last_token():
    engine, intake = make_counting_engine()
    for prompt, cached in ((PROMPTS[3], 16), (PROMPTS[3][:16], 12)):
        first, second = intake.accept([prompt, prompt], greedy(2))
        run(engine, [first])
        run(engine, [second])
        assert second.num_cached_tokens == cached
    assert engine.reset_prefix_cache()
    (third,) = intake.accept([PROMPTS[3]], greedy(2))
    run(engine, [third])
    assert third.num_cached_tokens == 0


def test_a_salt_shares_with_its_own_kind_alone():
    engine, intake = make_counting_engine()
    cached = []
    for salt in ("a", "b", "a", None):
        prompt = {"prompt_token_ids": PROMPTS[3]} | ({"cache_salt": salt} if salt else {})
        (request,) = intake.accept(prompt, greedy(2))
        run(engine, [request])
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 16, 0]


def test_stop_ids_and_eos_end_a_request():
    tokens = expected(PROMPTS[1], 20)
    stop = tokens[6]
    assert stop not in tokens[:6]
    engine, intake = make_counting_engine()
    (request,) = intake.accept([PROMPTS[1]], greedy(20, stop_token_ids=[stop, 49]))
    run(engine, [request])
    sample = request.samples[0]
    assert (sample.output_ids, sample.finish_reason, sample.stop_reason) == (
        tokens[:7],
        "stop",
        stop,
    )

    intake._eos_ids = [stop]
    with_eos, ignoring = (
        intake.accept([PROMPTS[1]], greedy(20, ignore_eos=ignore))[0] for ignore in (False, True)
    )
    run(engine, [with_eos, ignoring])
    assert with_eos.samples[0].stop_reason is None
    assert with_eos.samples[0].output_ids == tokens[:7]
    assert ignoring.samples[0].output_ids == tokens


def test_the_context_length_ends_a_request():
    engine, intake = make_counting_engine()
    prompt = [5] * 63
    (request,) = intake.accept([prompt], greedy(50))
    run(engine, [request])
    assert request.samples[0].output_ids == expected(prompt, 1)
    assert request.samples[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], RequestError, "empty"),
        ([50], RequestError, "token id 50 is outside the vocabulary"),
        ([3, -1], RequestError, "token id -1"),
        ([1] * 64, RequestTooLongError, "max_model_len=64"),
        ([1] * 40, RequestTooLongError, "block pool"),
        ("text", RequestError, "tokenizer"),
        ({"prompt_ids": [1]}, RequestError, "unknown key"),
        ([1.5], RequestError, "integers"),
        ([True, False], RequestError, "integers"),
        ({"prompt_token_ids": 5}, RequestError, "integers"),
        (None, RequestError, "integers"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, RequestError, "cache_salt"),
        ({}, RequestError, "neither"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_work(prompt, error, words):
    engine, intake = make_counting_engine(num_blocks=11)
    with pytest.raises(error, match=words) as caught:
        intake.accept([PROMPTS[0], prompt], greedy(4))
    assert "prompt 1" in str(caught.value)
    requests = intake.accept(PROMPTS[:3], greedy(4))
    run(engine, requests)
    assert answers(requests) == [expected(prompt, 4) for prompt in PROMPTS[:3]]
    assert free_blocks_at_rest(engine) == 10


@pytest.mark.parametrize(
    "prompts",
    [
        (4, 5, 6),
        range(4, 7),
        np.array([4, 5, 6]),
        jnp.array([4, 5, 6]),
        [np.int32(4), np.int64(5), 6],
        [[4, 5, 6]],
        [np.array([4, 5, 6])],
        np.array([[4, 5, 6]]),
        {"prompt_token_ids": np.array([4, 5, 6])},
        (ids for ids in [[4, 5, 6]]),
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_integers_of_any_kind_are_token_ids(prompts):
    _, intake = make_counting_engine()
    (request,) = intake.accept(prompts, greedy(1))
    assert request.prompt_token_ids == [4, 5, 6]
    assert {type(token) for token in request.prompt_token_ids} == {int}


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_prompt_at_all_is_refused(prompts):
    _, intake = make_counting_engine()
    with pytest.raises(RequestError, match="prompts must be a text, token ids, or a list"):
        intake.accept(prompts, greedy(1))


@pytest.mark.parametrize("params", [5, {"temperature": 0}, SamplingParams, [{}]])
def test_what_is_no_sampling_params_is_refused(params):
    _, intake = make_counting_engine()
    with pytest.raises(RequestError, match="must be SamplingParams"):
        intake.accept(PROMPTS[:1], params)


def test_parameters_must_match_the_prompts():
    _, intake = make_counting_engine()
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        intake.accept(PROMPTS[:2], [greedy(1)])
    with pytest.raises(RequestError, match="max_stop_ids=16"):
        intake.accept(PROMPTS[:1], greedy(1, stop_token_ids=list(range(17))))


def test_abort_frees_a_request_anywhere():
    engine, intake = make_counting_engine(max_num_seqs=2)
    requests = intake.accept(PROMPTS, greedy(20))
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    gone = [requests[0], requests[5]]  # one runs, one waits
    engine.abort(gone)
    while engine.has_unfinished:
        engine.step()
    kept = [i for i in range(len(PROMPTS)) if i not in (0, 5)]
    assert [requests[i].samples[0].output_ids for i in kept] == [
        expected(PROMPTS[i], 20) for i in kept
    ]
    assert {request.samples[0].finish_reason for request in gone} == {"abort"}
    assert free_blocks_at_rest(engine) == engine.num_blocks - 1


def test_new_weights_are_used_by_all_that_follows_and_nothing_stale_is_read():
    engine, intake = make_counting_engine()
    old, running = intake.accept([PROMPTS[3], PROMPTS[5]], greedy(20))
    run(engine, [old])
    engine.add(running)
    engine.step()
    engine.step()
    before = list(running.samples[0].output_ids)
    programs = compiled.compile_clock.num_programs
    engine.update_params(counting_params(shift=5))
    (again,) = intake.accept([PROMPTS[3]], greedy(20))
    run(engine, [again])
    assert compiled.compile_clock.num_programs == programs
    assert again.num_cached_tokens == 0
    assert again.samples[0].output_ids == expected(PROMPTS[3], 20, shift=5)
    rest = expected(PROMPTS[5] + before, 20 - len(before), shift=5)
    assert running.samples[0].output_ids == before + rest


def test_a_lost_state_is_made_anew_and_everyone_gets_their_tokens(monkeypatch):
    engine, intake = make_counting_engine()
    requests = intake.accept(PROMPTS, greedy(20))
    real, calls = compiled.run_window, []

    def failing(params, state, *args, **kwargs):
        calls.append(1)
        if len(calls) in (2, 5, 6):
            jax.tree.map(lambda x: x.delete(), state)  # as a donated call that failed leaves it
            raise RuntimeError("out of memory")
        return real(params, state, *args, **kwargs)

    monkeypatch.setattr(compiled, "run_window", failing)
    run(engine, requests)
    assert answers(requests) == [expected(prompt, 20) for prompt in PROMPTS]
    assert free_blocks_at_rest(engine) == engine.num_blocks - 1


def test_a_device_that_keeps_failing_is_reported(monkeypatch):
    engine, intake = make_counting_engine()
    requests = intake.accept(PROMPTS[:2], greedy(5))

    def failing(params, state, *args, **kwargs):
        jax.tree.map(lambda x: x.delete(), state)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run_step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(engine, requests)
    while engine.has_unfinished:
        engine.step()
    assert answers(requests) == [expected(prompt, 5) for prompt in PROMPTS[:2]]


def test_a_closed_engine_says_so():
    engine, intake = make_counting_engine()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.add(intake.accept([PROMPTS[0]], greedy(1))[0])


@settings(max_examples=25, deadline=None)
@given(
    mix=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    num_steps=st.sampled_from([1, 3]),
)
def test_any_mix_gives_each_its_solo_tokens_and_leaves_no_block(mix, num_steps):
    """Prompts of shared families, samples, small pool: greedy ones against plain Python, seeded
    ones against the same request in another mix."""
    engine, intake = make_counting_engine(num_blocks=17, num_decode_steps=num_steps)
    requests = []
    for prompt_len, max_tokens, n, family in mix:
        prompt = [(family * 11 + j * j) % 50 for j in range(prompt_len)]
        params = greedy(max_tokens) if n == 1 else seeded(family, n=n)
        requests += intake.accept([prompt], params)
    run(engine, requests)
    assert free_blocks_at_rest(engine) == 16
    for request in requests:
        if request.params.is_greedy:
            prompt = request.prompt_token_ids
            assert request.samples[0].output_ids == expected(prompt, request.params.max_tokens)
    seen: dict = {}
    for request in requests:
        for sample in request.samples:
            key = (tuple(request.prompt_token_ids), request.params.seed, sample.index)
            if not request.params.is_greedy:
                assert seen.setdefault(key, sample.output_ids) == sample.output_ids
