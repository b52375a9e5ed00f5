"""Log-probabilities of given tokens: of prompts, and of continuations that are only scored."""

import numpy as np
import pytest

from jpaged.core.state import check_invariants
from jpaged.engine.reporter import Reporter
from jpaged.errors import RequestError, RequestTooLongError
from jpaged.sampling_params import SamplingParams
from tests.core.scripted import VOCAB_SIZE, next_logits
from tests.engine.counting import (
    counting_params,
    expected,
    greedy,
    make_counting_engine,
    run,
)
from tests.oracles.sampler import log_softmax

PROMPTS = [[(i * 7 + j * j) % 50 for j in range(n)] for i, n in enumerate((1, 3, 9, 17, 4, 30, 12))]


def scores_after(tokens: list[int], shift: int = 0) -> np.ndarray:
    return log_softmax(next_logits(tokens, shift).astype(np.float32).astype(np.float64))


def check_prompt(entries, prompt: list[int], k: int, shift: int = 0) -> None:
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for place in range(1, len(prompt)):
        want, entry = scores_after(prompt[:place], shift), entries[place]
        told = entry[prompt[place]]
        assert told.rank == 1 + int((want > want[prompt[place]]).sum())
        for token, one in entry.items():
            assert one.logprob == pytest.approx(want[token], abs=1e-5)
        likeliest = sorted((one.logprob for one in entry.values()), reverse=True)[:k]
        assert likeliest == pytest.approx(sorted(want, reverse=True)[:k], abs=1e-5)
        assert len(entry) in (k, k + 1)


@pytest.mark.parametrize(
    ("options", "k"),
    [
        ({}, 5),
        ({"max_num_batched_tokens": 7}, 5),  # in chunks
        ({"num_blocks": 17}, 5),  # preempted
        ({"max_logprobs": -1}, -1),  # the whole vocabulary
    ],
    ids=str,
)
def test_prompt_logprobs_are_those_of_the_model(options, k):
    engine, intake = make_counting_engine(**options)
    plain = intake.accept(PROMPTS[:4], greedy(20))
    scored = intake.accept(PROMPTS, greedy(20, prompt_logprobs=k))
    again = intake.accept(PROMPTS, greedy(1, prompt_logprobs=k))  # the cache is warm by now
    run(engine, [*plain, *scored])
    run(engine, again)
    for request in (*scored, *again):
        output = Reporter(None).output_of(request)
        check_prompt(output.prompt_logprobs, request.prompt_token_ids, VOCAB_SIZE if k < 0 else k)
        assert output.num_cached_tokens == 0
    for request in (*plain, *scored):
        assert request.samples[0].output_ids == expected(request.prompt_token_ids, 20)
    assert all(Reporter(None).output_of(request).prompt_logprobs is None for request in plain)
    if options.get("num_blocks") == 17:
        assert engine.stats.num_preemptions > 0
    check_invariants(engine._device.state)
    assert engine.num_free_blocks == engine.num_blocks - 1


@pytest.mark.parametrize("num_blocks", [64, 17])
def test_no_prompt_is_scored_by_old_weights_and_new(num_blocks):
    engine, intake = make_counting_engine(num_blocks, max_num_batched_tokens=7)
    requests = [
        *intake.accept([PROMPTS[5]] * 2, greedy(3, prompt_logprobs=2)),
        *intake.accept_scores([PROMPTS[3]] * 3, [[9] * 20] * 3),
    ]
    for request in requests:
        engine.add(request)
    for shift in range(1, 4):
        for _ in range(3):
            engine.step()
        was_there = [r.samples[0].next_scored == len(r.prompt_token_ids) for r in requests]
        assert not all(was_there)
        engine.update_params(counting_params(shift))
    run(engine, [])
    for request, is_old in zip(requests, was_there, strict=True):
        entries = Reporter(None).output_of(request).prompt_logprobs
        if not is_old and not request.is_scoring:
            check_prompt(entries, request.prompt_token_ids, 2, shift)
        elif not is_old:
            tokens, begin = request.prompt_token_ids, request.score_from
            want = [scores_after(tokens[:i], shift)[tokens[i]] for i in range(begin, len(tokens))]
            assert Reporter(None).scores_of(request).logprobs == pytest.approx(want, abs=1e-5)
    assert engine.num_free_blocks == engine.num_blocks - 1


def test_samples_share_the_scores_of_their_prompt():
    engine, intake = make_counting_engine()
    params = SamplingParams(n=4, seed=3, max_tokens=5, prompt_logprobs=0, logprobs=2)
    (request,) = intake.accept([PROMPTS[3]], params)
    run(engine, [request])
    output = Reporter(None).output_of(request)
    check_prompt(output.prompt_logprobs, PROMPTS[3], 0)
    assert engine.stats.num_prefill_tokens == len(PROMPTS[3])
    assert all(len(one.logprobs) == 5 for one in output.outputs)


def test_a_request_may_read_the_cache_once_its_scores_are_there():
    engine, intake = make_counting_engine(num_blocks=17)
    scored = intake.accept(PROMPTS, greedy(24, prompt_logprobs=0))
    run(engine, scored)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_resumed_hits > 0


def test_continuations_are_scored_without_generation():
    engine, intake = make_counting_engine()
    continuations = [[5], [1, 2, 3], [9] * 12, [4, 4], [40, 30, 20, 10], [7] * 30, [11]]
    requests = intake.accept_scores(PROMPTS, continuations)
    run(engine, [*requests, *intake.accept(PROMPTS[:2], greedy(9))])
    for request, prompt, continuation in zip(requests, PROMPTS, continuations, strict=True):
        found = Reporter(None).scores_of(request)
        assert found.token_ids == continuation
        want = [scores_after(prompt + continuation[:i]) for i in range(len(continuation))]
        picked = [float(w[t]) for w, t in zip(want, continuation, strict=True)]
        assert found.logprobs == pytest.approx(picked, abs=1e-5)
        ranks = [1 + int((w > w[t]).sum()) for w, t in zip(want, continuation, strict=True)]
        assert found.ranks == ranks
        assert found.cumulative_logprob == pytest.approx(sum(picked), abs=1e-4)
        assert not request.samples[0].output_ids
    check_invariants(engine._device.state)
    assert engine.num_free_blocks == engine.num_blocks - 1


def test_many_continuations_of_one_prompt_compute_it_once():
    engine, intake = make_counting_engine()
    prompt, others = PROMPTS[5], [[i, i + 1, i + 2] for i in range(5)]
    run(engine, intake.accept_scores([prompt], [others[0]]))
    first = engine.stats.num_prefill_tokens
    assert first == len(prompt) + 2  # the last token scored needs no KV
    run(engine, intake.accept_scores([prompt] * 5, others))
    # What is read again of a prompt of 30 is the last block, with its last token's hidden state.
    assert engine.stats.num_prefill_tokens - first == 5 * (len(prompt) - 28 + 2)


def test_a_whole_context_can_be_scored():
    engine, intake = make_counting_engine()
    (request,) = intake.accept_scores([[1] * 10], [[2] * 54])
    run(engine, [request])
    assert len(Reporter(None).scores_of(request).logprobs) == 54


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[1, 2]], [], "1 prompts came with 0 continuations"),
        ([[1, 2]], [[]], "its continuation is empty"),
        ([[1, 2]], [[50]], "token id 50 is outside the vocabulary"),
        ([[1, 2]], ["text"], "needs a tokenizer"),
        ([[1, 2]], "text", "continuations must be a list"),
        ([[]], [[1]], "it is empty"),
    ],
)
def test_what_can_not_be_scored_is_refused(prompts, continuations, message):
    _, intake = make_counting_engine()
    with pytest.raises(RequestError, match=message):
        intake.accept_scores(prompts, continuations)


def test_too_long_to_score():
    _, intake = make_counting_engine()
    with pytest.raises(RequestTooLongError, match="60 prompt tokens and 5 to score exceed"):
        intake.accept_scores([[1] * 60], [[2] * 5])


def test_too_long_to_score_for_the_pool():
    _, intake = make_counting_engine(num_blocks=5)
    with pytest.raises(RequestTooLongError, match=r"9 to score need more .*shorten them"):
        intake.accept_scores([[1] * 9], [[2] * 9])


@pytest.mark.parametrize("asked", [50, 51, 60])
def test_more_than_the_vocabulary_is_the_vocabulary(asked):
    engine, intake = make_counting_engine(max_logprobs=60)
    requests = intake.accept([PROMPTS[1]], greedy(2, logprobs=asked, prompt_logprobs=asked))
    run(engine, requests)
    output = Reporter(None).output_of(requests[0])
    check_prompt(output.prompt_logprobs, PROMPTS[1], VOCAB_SIZE)
    assert [len(entry) for entry in output.outputs[0].logprobs] == [VOCAB_SIZE] * 2


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(("asked", "limit"), [(21, 20), (-1, 20), (6, 5), (-1, 5)])
def test_more_than_the_engine_allows_is_refused(name, asked, limit):
    _, intake = make_counting_engine(max_logprobs=limit)
    with pytest.raises(RequestError, match=f"{name}={asked} exceeds max_logprobs={limit}"):
        intake.accept([[1]], SamplingParams(**{name: asked}))
