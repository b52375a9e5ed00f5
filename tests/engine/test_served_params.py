"""Random mixes of parameters through the whole engine, against requests served in plain Python."""

import random
from typing import Any

import pytest

from jpaged.core.state import check_invariants
from jpaged.engine.reporter import Reporter
from jpaged.sampling_params import SamplingParams
from tests.engine.counting import make_counting_engine
from tests.engine.plain_sampling import EOS, LETTERS, OTHER_EOS, Plain, letter_tokenizer, serve

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def draw_params(rng: random.Random) -> SamplingParams:
    """Few features at a time, all of them in the long run."""
    max_tokens = rng.randint(1, 24)
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": rng.choice([0, 0, 1, 7, 80]),
        "top_p": rng.choice([1.0, 1.0, 0.8, 1e-9]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
    }
    features: dict[str, Any] = {
        "repetition_penalty": lambda: rng.choice([0.5, 1.3, 4.0]),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "logit_bias": lambda: {t: rng.uniform(-100, 3) for t in rng.sample(range(50), 5)},
        "allowed_token_ids": lambda: rng.sample(range(50), rng.randint(1, 12)),
        "bad_words": lambda: ["".join(rng.sample(LETTERS, rng.randint(1, 2))) for _ in range(20)],
        "min_tokens": lambda: rng.randint(1, max_tokens),
        "stop": lambda: ["".join(rng.sample(LETTERS, rng.randint(1, 2))) for _ in range(20)],
        "stop_token_ids": lambda: rng.sample(range(3, 50), 3),
        "include_stop_str_in_output": lambda: True,
        "ignore_eos": lambda: True,
        "repetition_detection": lambda: {"max_pattern_size": 3, "min_count": 2},
        "logprobs": lambda: rng.choice([0, 3, 8]),
        "logprob_token_ids": lambda: rng.sample(range(50), 3),
    }
    for name in rng.sample(sorted(features), rng.randint(0, 5)):
        fields[name] = features[name]()
    num = 1 if fields["temperature"] == 0 else rng.randint(1, 3)
    return SamplingParams(n=num, seed=rng.randrange(2**40), max_tokens=max_tokens, **fields)


def draw_prompt(rng: random.Random) -> list[int]:
    family = rng.randrange(3)
    return [3 + (family * 13 + j * j) % 47 for j in range(rng.randint(1, 20))]


def check(request, mode: str) -> None:
    """A request's outputs are those of plain Python."""
    params, output = request.params, Reporter(letter_tokenizer()).output_of(request)
    for sample, got in zip(request.samples, output.outputs, strict=True):
        want = serve(request.prompt_token_ids, params, request.seed, sample.index, mode=mode)
        assert got.token_ids == want.token_ids, params
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason), (
            params
        )
        assert got.text == want.text, params
        if params.logprobs is None and not params.logprob_token_ids:
            assert got.logprobs is None
            assert got.cumulative_logprob is None
            continue
        assert got.logprobs is not None
        assert len(got.logprobs) == len(want.logprobs)
        total = sum(value for value, _ in want.logprobs)
        assert got.cumulative_logprob == pytest.approx(total, abs=1e-4)
        for place, entry in enumerate(got.logprobs):
            check_entry(entry, params, want, place)


def check_entry(entry, params: SamplingParams, want: Plain, place: int) -> None:
    """Of equal ids at the limit any may be told, so that values are compared and not ids."""
    token, numbers = want.token_ids[place], want.numbers[place]
    assert next(iter(entry)) == token
    assert entry[token].rank == want.logprobs[place][1]
    assert {*(params.logprob_token_ids or ()), token} <= set(entry)
    for other, told in entry.items():
        assert told.logprob == pytest.approx(numbers[other], abs=1e-5)
        assert told.decoded_token == letter_tokenizer().decode([other])
    k = params.logprobs or 0
    likeliest = sorted((told.logprob for told in entry.values()), reverse=True)[:k]
    assert likeliest == pytest.approx(sorted(numbers.tolist(), reverse=True)[:k], abs=1e-5)
    assert len(entry) <= k + 1 + len(params.logprob_token_ids or ())
    assert sum(told.rank == 1 + i for i in range(k) for told in entry.values()) >= k


def serve_all(mode: str, seed: int, num_requests: int, **options) -> int:
    """Serves and checks random requests. Returns the number of preemptions."""
    rng = random.Random(seed)
    engine, intake = make_counting_engine(
        eos_ids=[EOS, OTHER_EOS], tokenizer=letter_tokenizer(), logprobs_mode=mode, **options
    )
    requests = []
    for _ in range(num_requests):
        requests += intake.accept([draw_prompt(rng)], draw_params(rng))
        engine.add(requests[-1])
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        check(request, mode)
    reasons = {sample.finish_reason for request in requests for sample in request.samples}
    assert reasons == {"stop", "length", "repetition"}
    check_invariants(engine._device.state)
    assert engine.num_free_blocks == engine.num_blocks - 1
    return engine.stats.num_preemptions


@pytest.mark.parametrize("num_blocks", [17, pytest.param(64, marks=pytest.mark.slow)])
def test_mixes_of_parameters_give_what_plain_python_gives(num_blocks):
    num_preemptions = serve_all(MODES[0], seed=2, num_requests=60, num_blocks=num_blocks)
    assert (num_preemptions > 0) == (num_blocks == 17)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_so_they_do_in_all_modes(mode):
    serve_all(mode, seed=1, num_requests=60)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3, 32])
@pytest.mark.parametrize("seed", range(3))
def test_so_they_do_in_windows_of_any_length(num_steps, seed):
    serve_all("raw_logprobs", seed=seed, num_requests=100, num_decode_steps=num_steps)
