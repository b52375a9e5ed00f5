"""Beam search in the engine, on a model whose every logit is known, against plain searches."""

import functools as ft

import numpy as np
import pytest

from jpaged.core.state import check_invariants
from jpaged.engine.reporter import Reporter
from jpaged.errors import RequestTooLongError
from jpaged.sampling_params import BeamSearchParams
from tests.core.scripted import next_logits
from tests.engine.counting import expected, greedy, make_counting_engine, run
from tests.oracles.beam_search import hf_beam_search, vllm_beam_search

PROMPTS = [[(i * 7 + j * j) % 50 for j in range(n)] for i, n in enumerate((1, 8, 9, 17, 4, 30, 12))]
EOS_IDS = [7, 23, 31]


def logprobs_after(tokens: list[int], shift: int = 0) -> np.ndarray:
    logits = next_logits(tokens, shift)
    return logits - np.log(np.sum(np.exp(logits)))


def plain_search(prompt: list[int], params: BeamSearchParams, eos_ids: list[int], shift: int):
    options = {"eos_ids": eos_ids, "length_penalty": params.length_penalty}
    size = (params.beam_width, params.max_tokens)
    logprobs = ft.partial(logprobs_after, shift=shift)
    if params.early_stopping is None:
        options["ignore_eos"] = params.ignore_eos
        return vllm_beam_search(logprobs, prompt, *size, **options)
    options["early_stopping"] = params.early_stopping
    options["eos_ids"] = () if params.ignore_eos else eos_ids
    return hf_beam_search(logprobs, prompt, *size, **options)


def assert_found(intake, request, shift: int = 0) -> None:
    """What was found is what the plain search finds."""
    prompt = request.prompt_token_ids
    (group,) = request.samples
    want = plain_search(prompt, request.beam_params, group.eos_ids, shift)
    got = Reporter(None).beams_of(request).sequences
    assert [one.tokens for one in got] == [prompt + tokens for tokens, *_ in want]
    scores = [(one.cum_logprob, one.score) for one in got]
    np.testing.assert_allclose(scores, [one[1:] for one in want], atol=1e-4)


def make_engine(num_blocks: int = 64, **options):
    return make_counting_engine(num_blocks, eos_ids=EOS_IDS, **options)


def assert_at_rest(engine) -> None:
    check_invariants(engine._device.state)
    assert not engine.has_unfinished
    assert engine.num_free_blocks == engine.num_blocks - 1


@pytest.mark.parametrize("early_stopping", [None, False, True, "never"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 17, "num_decode_steps": 3, "max_num_batched_tokens": 7},
        pytest.param({"num_blocks": 17, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 3, "num_decode_steps": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_searches_find_what_plain_ones_find(options, early_stopping):
    engine, intake = make_engine(**options)
    params = BeamSearchParams(beam_width=3, max_tokens=11, early_stopping=early_stopping)
    requests = intake.accept_beams(PROMPTS, params)
    run(engine, requests)
    for request in requests:
        assert_found(intake, request)
    assert_at_rest(engine)
    if "num_blocks" in options:
        assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("width", [1, 6])
def test_any_width_in_one_batch_with_samples(width):
    engine, intake = make_engine()
    beams = intake.accept_beams(PROMPTS[:3], BeamSearchParams(beam_width=width, max_tokens=9))
    wide = intake.accept_beams(PROMPTS[3:5], BeamSearchParams(beam_width=4, max_tokens=5))
    plain = intake.accept(PROMPTS, greedy(9, ignore_eos=True))
    run(engine, [*plain[:3], *beams, *plain[3:], *wide])
    for request in (*beams, *wide):
        assert_found(intake, request)
    assert [r.samples[0].output_ids for r in plain] == [expected(p, 9) for p in PROMPTS]
    assert_at_rest(engine)


def test_the_prompt_is_computed_once_and_dispatches_are_few(monkeypatch):
    engine, intake = make_engine(num_decode_steps=4)
    monkeypatch.setattr(engine._device, "spread", None)  # nothing was interrupted
    requests = intake.accept_beams(PROMPTS[3], BeamSearchParams(beam_width=6, max_tokens=10))
    run(engine, requests)
    assert_found(intake, requests[0])
    # All but the last prompt token in prefill; that one in the first window.
    assert engine.stats.num_prefill_tokens == len(PROMPTS[3])
    assert engine.stats.num_beam_windows == -(-10 // 4)


def test_a_search_goes_on_when_a_longer_one_beside_it_has_ended():
    """Beside the longer one its tokens had more room than they have alone."""
    engine, intake = make_engine(99, max_position=300, num_decode_steps=2)
    (short,), (long,) = (
        intake.accept_beams(prompt, BeamSearchParams(beam_width=3, max_tokens=max_tokens))
        for prompt, max_tokens in ((PROMPTS[1], 9), (PROMPTS[2], 100))
    )
    engine.add(short)
    engine.add(long)
    while not short.samples[0].num_output:
        engine.step()
    engine.abort([long])
    run(engine, [])
    assert_found(intake, short)
    assert_at_rest(engine)


@pytest.mark.parametrize("early_stopping", [None, False])
def test_no_length_penalty_loses_beams(early_stopping):
    """However far the power of a length is beyond the range of float32: where all are of one
    length, the likeliest are the best."""
    engine, intake = make_counting_engine()
    found = {}
    for length_penalty in (0.0, 100.0, -100.0):
        params = BeamSearchParams(
            beam_width=3,
            max_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        (request,) = intake.accept_beams(PROMPTS[3], params)
        run(engine, [request])
        found[length_penalty] = Reporter(None).beams_of(request).sequences
        assert all(np.isfinite(one.score) for one in found[length_penalty])
    tokens, *others = ([one.tokens for one in sequences] for sequences in found.values())
    assert len(tokens) == 3
    assert others == [tokens, tokens]


@pytest.mark.parametrize("early_stopping", [None, True])
def test_tokens_that_end_a_sequence_are_counted_too(early_stopping):
    engine, intake = make_counting_engine(num_decode_steps=8)
    params = BeamSearchParams(beam_width=3, max_tokens=5, early_stopping=early_stopping)
    run(engine, intake.accept_beams(PROMPTS[1], params))
    assert engine.stats.num_beam_tokens == 3 * 5


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens"),
    [(5, 9), *[pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (3, 6), (8, 2))]],
)
def test_a_pool_that_holds_one_search_finishes_all(prompt_len, max_tokens):
    """Exactly the blocks that the intake asks for: one less, and the request is refused."""
    width, block_size = 3, 4
    num_shared, num_all = prompt_len // block_size, -(-(prompt_len + max_tokens - 1) // block_size)
    needed = num_shared + width * (num_all - num_shared)
    prompts = [[i + 3 * j for j in range(prompt_len)] for i in range(3)]
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    engine, intake = make_engine(num_blocks=needed + 1)
    requests = intake.accept_beams(prompts, params)
    run(engine, requests)
    for request in requests:
        assert_found(intake, request)
    assert_at_rest(engine)
    _, small = make_engine(num_blocks=needed)
    with pytest.raises(RequestTooLongError, match="larger pool"):
        small.accept_beams(prompts, params)


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_search_that_gave_up_does_not_come_back_to_give_up_again(has_cache):
    """Two older requests grow, and for many steps leave blocks for its leader but not its beams."""
    engine, intake = make_counting_engine(25, num_decode_steps=1, enable_prefix_caching=has_cache)
    old = intake.accept([[i % 50 for i in range(12)], [3 * i for i in range(12)]], greedy(30))
    (search,) = intake.accept_beams([3] * 4, BeamSearchParams(beam_width=4, max_tokens=20))
    for request in old:
        engine.add(request)
    while not old[1].samples[0].output_ids:
        engine.step()
    run(engine, [search])
    assert engine.stats.num_preemptions == 1
    assert_found(intake, search)
    assert [len(request.samples[0].output_ids) for request in old] == [30, 30]
    assert_at_rest(engine)
