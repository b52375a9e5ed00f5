"""What each field of SamplingParams changes, on a model whose logits are known.

The plain greedy output of PROMPT ends by itself; each test says how one field makes it another.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.logits_rules import LogitsProcessor
from jpaged.engine.output import FlatLogprobs, RequestOutput
from jpaged.engine.reporter import Reporter
from jpaged.errors import RequestError
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.core.scripted import next_logits
from tests.engine.counting import expected, make_counting_engine, run
from tests.engine.plain_sampling import EOS, letter_tokenizer
from tests.oracles.sampler import log_softmax

PROMPT = [10, 17, 38, 26, 28, 44]
ENDLESS = expected(PROMPT, 30)
PLAIN = ENDLESS[: ENDLESS.index(EOS) + 1]
TOKENIZER = letter_tokenizer()
BAN = LogitsProcessor(
    "ban",
    lambda logits, _, token: jnp.where(
        jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == token[:, None], -jnp.inf, logits
    ),
    np.int32(-1),
)
REFUSED = {
    "extra_args": {"a": 1},
    "thinking_token_budget": 5,
    "skip_clone": True,
    "routed_experts_prompt_start": 3,
}


@pytest.fixture(scope="module")
def ask() -> Callable[..., RequestOutput]:
    """Serves PROMPT under some fields; greedy and up to 30 tokens unless they say otherwise."""
    engine, intake = make_counting_engine(
        eos_ids=[EOS], tokenizer=TOKENIZER, logits_processors=[BAN], num_blocks=40
    )

    def ask(**fields) -> RequestOutput:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30} | fields)
        (request,) = intake.accept([PROMPT], params)
        run(engine, [request])
        return Reporter(TOKENIZER).output_of(request)

    return ask


def greedy_under(
    change: Callable[[np.ndarray, list[int]], np.ndarray], eos: int = EOS
) -> list[int]:
    """The greedy output where `change(logits, output)` is what tokens are chosen from."""
    output: list[int] = []
    while len(output) < 30 and eos not in output:
        logits = next_logits(PROMPT + output).astype(np.float32)
        output.append(int(np.argmax(change(logits, output))))
    return output


def times(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    return np.bincount(tokens, minlength=len(logits)).astype(np.float32)


def are_likeliest(found: list[int]) -> bool:
    """Whether each token is one of the likeliest; there are ties."""
    logits = [next_logits(PROMPT + found[:place]) for place in range(len(found))]
    return all(x[token] == x.max() for x, token in zip(logits, found, strict=True))


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_the_plain_output_ends_by_itself(ask):
    (one,) = ask().outputs
    assert one.token_ids == PLAIN
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    assert one.text == TOKENIZER.decode(PLAIN, skip_special_tokens=True)


class TestDraws:
    def test_n(self, ask):
        output = ask(n=3, temperature=1.0, seed=1)
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3

    def test_temperature(self, ask):
        assert not are_likeliest(tokens(ask(temperature=1.5, seed=1)))

    def test_top_p(self, ask):
        assert are_likeliest(tokens(ask(temperature=1.5, seed=1, top_p=1e-9)))

    def test_top_k(self, ask):
        assert tokens(ask(temperature=1.5, seed=1, top_k=1)) == PLAIN

    def test_min_p(self, ask):
        assert are_likeliest(tokens(ask(temperature=1.5, seed=1, min_p=1.0)))

    def test_seed(self, ask):
        one, again, other = (tokens(ask(temperature=1.5, seed=seed)) for seed in (1, 1, 2))
        assert one == again != other


class TestLogits:
    def test_presence_penalty(self, ask):
        wanted = greedy_under(lambda x, out: x + 2 * (times(x, out) > 0), eos=-1)
        assert tokens(ask(presence_penalty=-2.0, ignore_eos=True)) == wanted
        assert wanted != greedy_under(lambda x, out: x + 2 * times(x, out), eos=-1)

    def test_frequency_penalty(self, ask):
        wanted = greedy_under(lambda x, out: x + 2 * times(x, out))
        assert tokens(ask(frequency_penalty=-2.0)) == wanted != PLAIN

    def test_repetition_penalty(self, ask):
        # No logit of this model is negative: those are multiplied, see the sampler's own tests.
        wanted = greedy_under(lambda x, out: np.where(times(x, PROMPT + out) > 0, x / 3, x))
        assert tokens(ask(repetition_penalty=3.0)) == wanted
        assert wanted != greedy_under(lambda x, out: np.where(times(x, out) > 0, x / 3, x))

    def test_logit_bias(self, ask):
        wanted = greedy_under(lambda x, _: x + 2 * times(x, [7]) - 100 * times(x, [42]))
        assert tokens(ask(logit_bias={7: 2.0, 42: -100})) == wanted != PLAIN

    def test_allowed_token_ids(self, ask):
        allowed = [EOS, 7, 9, 30]
        wanted = greedy_under(lambda x, _: np.where(times(x, allowed) > 0, x, -np.inf))
        assert tokens(ask(allowed_token_ids=allowed)) == wanted

    def test_bad_words(self, ask):
        single, pair = TOKENIZER.decode(PLAIN[:1]), TOKENIZER.decode(PLAIN[1:3])
        assert PLAIN[0] not in tokens(ask(bad_words=[single]))
        got = tokens(ask(bad_words=[pair]))
        assert got[:2] == PLAIN[:2]
        assert got[2] != PLAIN[2]

    def test_structured_outputs(self, ask):
        (one,) = ask(structured_outputs={"choice": ["zebra", "apple"]}).outputs
        assert one.text in ("zebra", "apple")

    def test_logits_processors(self, ask):
        wanted = greedy_under(lambda x, _: np.where(times(x, [42]) > 0, -np.inf, x))
        assert tokens(ask(logits_processors={"ban": 42})) == wanted != PLAIN


class TestEnds:
    def test_max_tokens(self, ask):
        (one,) = ask(max_tokens=3).outputs
        assert (one.token_ids, one.finish_reason) == (PLAIN[:3], "length")
        assert len(tokens(ask(max_tokens=None, ignore_eos=True))) == 64 - len(PROMPT)

    def test_min_tokens(self, ask):
        got = tokens(ask(min_tokens=10))
        assert EOS not in got[:10]
        assert got[:5] == PLAIN[:5]

    def test_ignore_eos(self, ask):
        (one,) = ask(ignore_eos=True).outputs
        assert (one.token_ids, one.finish_reason) == (ENDLESS, "length")

    def test_stop(self, ask):
        (one,) = ask(stop=["zz", TOKENIZER.decode(PLAIN[1:3])]).outputs
        assert one.token_ids == PLAIN[:3]
        assert one.text == TOKENIZER.decode(PLAIN[:1])
        assert (one.finish_reason, one.stop_reason) == ("stop", TOKENIZER.decode(PLAIN[1:3]))

    def test_stop_token_ids(self, ask):
        (one,) = ask(stop_token_ids=[PLAIN[2]]).outputs
        assert (one.finish_reason, one.stop_reason) == ("stop", PLAIN[2])
        assert one.token_ids == PLAIN[:3]
        assert one.text == TOKENIZER.decode(PLAIN[:2])

    def test_include_stop_str_in_output(self, ask):
        stops = {"stop": TOKENIZER.decode(PLAIN[1:3])}, {"stop_token_ids": [PLAIN[2]]}
        for stop in stops:
            (one,) = ask(include_stop_str_in_output=True, **stop).outputs
            assert one.text == TOKENIZER.decode(PLAIN[:3])

    def test_repetition_detection(self, ask):
        detection = {"min_pattern_size": 3, "max_pattern_size": 3, "min_count": 2}
        (one,) = ask(ignore_eos=True, repetition_detection=detection).outputs
        assert one.finish_reason == "repetition"
        assert one.token_ids == ENDLESS[: len(one.token_ids)]
        assert one.token_ids[-3:] == one.token_ids[-6:-3]
        asked = {"min_tokens": len(one.token_ids) + 1, "repetition_detection": detection}
        assert len(tokens(ask(ignore_eos=True, **asked))) > len(one.token_ids)


class TestTold:
    def test_logprobs(self, ask):
        (one,) = ask(logprobs=2).outputs
        assert ask().outputs[0].logprobs is None
        for place, entry in enumerate(one.logprobs):
            want = log_softmax(next_logits(PROMPT + PLAIN[:place]).astype(np.float64))
            assert len(entry) == 2  # the token is the likeliest itself
            for token, told in entry.items():
                assert told.logprob == pytest.approx(want[token], abs=1e-5)
                assert told.decoded_token == TOKENIZER.decode([token])
            assert [told.rank for told in entry.values()] == [1, 2]

    def test_prompt_logprobs(self, ask):
        first, *rest = ask(prompt_logprobs=0).prompt_logprobs
        assert first is None
        assert [list(entry) for entry in rest] == [[token] for token in PROMPT[1:]]

    def test_logprob_token_ids(self, ask):
        (one,) = ask(logprob_token_ids=[3, 4]).outputs
        assert all({3, 4} <= set(entry) for entry in one.logprobs)

    def test_flat_logprobs(self, ask):
        flat, listed = (
            ask(logprobs=3, prompt_logprobs=2, flat_logprobs=is_flat) for is_flat in (True, False)
        )
        assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
        assert list(flat.outputs[0].logprobs) == listed.outputs[0].logprobs
        assert list(flat.prompt_logprobs[1:]) == listed.prompt_logprobs[1:]


class TestText:
    def test_detokenize(self, ask):
        (one,) = ask(detokenize=False).outputs
        assert (one.text, one.token_ids) == ("", PLAIN)
        output = ask(detokenize=False, logprobs=2, prompt_logprobs=1)
        entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
        assert {told.decoded_token for entry in entries for told in entry.values()} == {None}

    def test_skip_special_tokens(self, ask):
        assert 0 in PLAIN, "a special token"
        assert ask(skip_special_tokens=False).outputs[0].text == TOKENIZER.decode(PLAIN[:-1])
        assert "<s>" in ask(skip_special_tokens=False).outputs[0].text
        assert "<s>" not in ask().outputs[0].text

    def test_spaces_between_special_tokens(self, ask):
        for skips in (True, False):
            texts = {
                ask(skip_special_tokens=skips, spaces_between_special_tokens=s).outputs[0].text
                for s in (True, False)
            }
            assert len(texts) == 1


def test_skip_reading_prefix_cache(ask):
    ask()
    assert ask().num_cached_tokens == 4
    assert ask(skip_reading_prefix_cache=True).num_cached_tokens == 0


@pytest.mark.parametrize(
    "fields", [{"output_kind": kind} for kind in RequestOutputKind] + [{"stream_interval": 5}]
)
def test_output_kind_and_stream_interval_are_for_streams_alone(ask, fields):
    assert ask(**fields).outputs == ask().outputs


@pytest.mark.parametrize("name", REFUSED)
def test_extra_args_and_others_are_refused_with_a_reason(name):
    with pytest.raises(RequestError, match=f"{name}"):
        SamplingParams(**{name: REFUSED[name]})


def test_no_field_is_forgotten():
    source = dataclasses.fields(SamplingParams)
    tested = {
        name.removeprefix("test_")
        for group in (TestDraws, TestLogits, TestEnds, TestTold, TestText)
        for name in vars(group)
        if name.startswith("test_")
    }
    elsewhere = {"skip_reading_prefix_cache", "output_kind", "stream_interval", *REFUSED}
    assert {field.name for field in source} == tested | elsewhere
