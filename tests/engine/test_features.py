"""Features that need the engine's shell: own processors, grammars beside free rows, stops in
windows. The counting model and one letter a token, so that every text is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.logits_rules import LogitsProcessor
from jpaged.core.state import check_invariants
from jpaged.engine.reporter import Reporter
from jpaged.errors import ConfigError, RequestError
from jpaged.sampling_params import SamplingParams
from tests.engine.counting import expected, greedy, make_counting_engine, run
from tests.engine.plain_sampling import EOS, letter_tokenizer

PROMPTS = [[(i * 7 + j * j) % 50 for j in range(n)] for i, n in enumerate((1, 3, 9, 17, 4))]


def texts(requests) -> list[str]:
    reporter = Reporter(letter_tokenizer())
    return [one.text for request in requests for one in reporter.output_of(request).outputs]


def at_rest(engine) -> bool:
    check_invariants(engine._device.state)
    return engine.num_free_blocks == engine.num_blocks - 1


# --- stop strings ---


def test_what_a_window_made_behind_a_stop_string_leaves_no_trace():
    tokenizer = letter_tokenizer()
    engine, intake = make_counting_engine(
        num_decode_steps=32, tokenizer=tokenizer, max_num_batched_tokens=32
    )
    whole = expected(PROMPTS[2], 40)
    stop = tokenizer.decode(whole[11:13])
    place = tokenizer.decode(whole).find(stop) + 2
    requests = [
        *intake.accept([PROMPTS[2]], greedy(40, stop=[stop], logprobs=2)),
        *intake.accept([PROMPTS[2]], greedy(40, stop=stop, include_stop_str_in_output=True)),
        *intake.accept([PROMPTS[3]], greedy(30)),
    ]
    run(engine, requests)
    cut, kept, other = [Reporter(tokenizer).output_of(r).outputs[0] for r in requests]
    assert cut.token_ids == kept.token_ids == whole[:place]
    assert cut.text == tokenizer.decode(whole[: place - 2])
    assert kept.text == tokenizer.decode(whole[:place])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.logprobs) == place
    assert cut.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(cut.logprobs, cut.token_ids, strict=True))
    )
    assert other.token_ids == expected(PROMPTS[3], 30)
    num_output = len(cut.token_ids) + len(kept.token_ids) + len(other.token_ids)
    assert engine.stats.num_decode_tokens == num_output - 3  # the first of each is prefill's
    assert at_rest(engine)


# --- own processors ---


def only_above(logits, history, floor):
    """No id below `floor`; the history is at hand too."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return jnp.where((ids < floor[:, None]) & (history.num_tokens > 0)[:, None], -jnp.inf, logits)


FLOOR = LogitsProcessor("floor", only_above, np.int32(0))


def test_own_processors_act_on_the_requests_that_name_them():
    engine, intake = make_counting_engine(logits_processors=[FLOOR])
    requests = [
        *intake.accept([PROMPTS[1]], greedy(12, logits_processors={"floor": 40})),
        *intake.accept([PROMPTS[1]], greedy(12)),
        *intake.accept([PROMPTS[1]], SamplingParams(n=2, seed=4, logits_processors={"floor": 45})),
        *intake.accept([PROMPTS[1]], greedy(12, presence_penalty=0.5)),
    ]
    run(engine, requests)
    assert min(requests[0].samples[0].output_ids) >= 40
    assert requests[1].samples[0].output_ids == expected(PROMPTS[1], 12)
    assert min(min(sample.output_ids) for sample in requests[2].samples) >= 45
    assert min(requests[3].samples[0].output_ids) < 40
    assert at_rest(engine)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ceiling": 3}, r"names 'ceiling'; this engine was made with \['floor'\]"),
        ({"floor": [1, 2]}, "parameters of 'floor' are not like its default: shape"),
        ({"floor": 2**40}, "parameters of 'floor' are not like its default: .* not fit int32"),
        ({"floor": 1.5}, "parameters of 'floor' are not like its default"),
        ({"floor": {"a": 1}}, "parameters of 'floor' are not like its default"),
    ],
)
def test_parameters_of_processors_are_judged(params, message):
    _, intake = make_counting_engine(logits_processors=[FLOOR])
    with pytest.raises(RequestError, match=message):
        intake.accept([[1]], greedy(1, logits_processors=params))


@pytest.mark.parametrize("default", [(), {}, None, {"a": []}], ids=str)
def test_a_processor_without_a_default_is_refused(default):
    with pytest.raises(ConfigError, match=r"'bare' has default=.*, without any parameter"):
        LogitsProcessor("bare", only_above, default)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [slice(None), slice(3, 4), slice(49, 50)], ids=str)
def test_a_processor_that_makes_nan_ends_its_row_alone(temperature, place):
    def spoil(logits, history, is_on):
        return logits.at[:, place].set(jnp.where(is_on[:, None], jnp.nan, logits[:, place]))

    processor = LogitsProcessor("spoil", spoil, np.bool_(False))
    engine, intake = make_counting_engine(logits_processors=[processor])
    spoilt = SamplingParams(temperature=temperature, logits_processors={"spoil": True})
    requests = [
        *intake.accept([PROMPTS[1]], spoilt),
        *intake.accept([PROMPTS[2]], greedy(6, presence_penalty=0.0, logit_bias={7: 0.0})),
    ]
    run(engine, requests)
    assert requests[0].samples[0].finish_reason == "error"
    assert requests[0].samples[0].output_ids == []
    assert requests[1].samples[0].output_ids == expected(PROMPTS[2], 6)
    assert at_rest(engine)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda logits, _, floor: logits[:, :3], "must give logits"),
        (lambda logits, _, floor: None, "must give logits"),
        (lambda logits: logits, "can not be traced"),
        (lambda logits, _, floor: logits + 1 if floor[0] > 1 else logits, "can not be traced"),
    ],
)
def test_a_processor_that_does_not_do_fails_when_the_engine_is_made(apply, message):
    with pytest.raises(ConfigError, match=f"'odd' {message}"):
        make_counting_engine(logits_processors=[LogitsProcessor("odd", apply, np.int32(0))])


@pytest.mark.parametrize("processors", [[FLOOR, FLOOR], [only_above], "floor"])
def test_what_is_no_processor_is_refused(processors):
    with pytest.raises(ConfigError, match="logits_processors must"):
        make_counting_engine(logits_processors=processors)


# --- grammars ---


def test_grammars_bind_their_rows_and_leave_windows_to_the_others():
    engine, intake = make_counting_engine(
        eos_ids=[EOS], tokenizer=letter_tokenizer(), num_blocks=30
    )
    bound = SamplingParams(
        n=2, seed=5, max_tokens=20, logprobs=3, structured_outputs={"regex": "(ab|cd)*QRS"}
    )
    choice = SamplingParams(
        seed=6, max_tokens=20, structured_outputs={"choice": ["hello", "help", "goodbye"]}
    )
    free, requests = intake.accept(PROMPTS, greedy(24)), []
    for prompt in PROMPTS[:3]:
        requests += [*intake.accept([prompt], bound), *intake.accept([prompt], choice)]
    run(engine, [x for pair in zip(free, requests, strict=False) for x in pair] + requests[5:])
    for request in requests:
        for sample, text in zip(request.samples, texts([request]), strict=True):
            if sample.finish_reason == "length":
                assert request.params is not choice
                continue
            assert sample.finish_reason == "stop"
            assert sample.output_ids[-1] == EOS
            if request.params.structured_outputs.kind == "choice":
                assert text in ("hello", "help", "goodbye")
            else:
                assert text.endswith("QRS")
    for request in free:
        wanted = expected(request.prompt_token_ids, 24)
        got = request.samples[0].output_ids
        assert got == wanted[: len(got)]
        assert len(got) == 24 or got[-1] == EOS
    assert engine.stats.num_window_tokens > 0
    assert at_rest(engine)


@pytest.mark.parametrize(
    "fields",
    [{"ignore_eos": True}, {"min_tokens": 7}, {"allowed_token_ids": range(3, 50)}],
    ids=str,
)
def test_a_finished_grammar_ends_a_row_that_may_not_draw_the_end(fields):
    engine, intake = make_counting_engine(eos_ids=[EOS], tokenizer=letter_tokenizer())
    params = SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs={"choice": ["hello"]}, **fields
    )
    requests = intake.accept([PROMPTS[1]], params)
    run(engine, requests)
    assert texts(requests) == ["hello"]
    assert requests[0].samples[0].finish_reason == "stop"
    assert len(requests[0].samples[0].output_ids) == 5


def test_ignore_eos_goes_on_where_a_grammar_lets_it():
    """The counting model's likeliest id is the end where its grammar's text would be whole."""
    tokenizer = letter_tokenizer()
    engine, intake = make_counting_engine(eos_ids=[EOS, EOS + 1], tokenizer=tokenizer)
    asked = {"max_tokens": 9, "structured_outputs": {"regex": "(ab|cd)*"}}
    to_ends = {"logit_bias": {EOS: 100, EOS + 1: 99}}
    allowed = [EOS, EOS + 1, *tokenizer.encode("ab", add_special_tokens=False)]
    heeding, ignoring, own, few = (
        SamplingParams(temperature=0.0, **asked, **to_ends, **fields)
        for fields in (
            {},
            {"ignore_eos": True},
            {"ignore_eos": True, "stop_token_ids": [EOS + 1], "min_tokens": 3},
            {"ignore_eos": True, "allowed_token_ids": allowed},
        )
    )
    requests = intake.accept([PROMPTS[1]] * 4, [heeding, ignoring, own, few])
    run(engine, requests)
    found = [request.samples[0] for request in requests]
    assert [len(one.output_ids) for one in found] == [1, 9, 5, 9]
    assert [one.finish_reason for one in found] == ["stop", "length", "stop", "length"]
    assert found[2].stop_reason == EOS + 1
    assert texts(requests)[3] == "ababababa"


def test_a_grammar_ends_a_row_whose_own_list_has_no_more_text():
    tokenizer = letter_tokenizer()
    engine, intake = make_counting_engine(eos_ids=[EOS], tokenizer=tokenizer)
    params = greedy(
        9,
        ignore_eos=True,
        structured_outputs={"regex": "abc*"},
        allowed_token_ids=[EOS, *tokenizer.encode("ab", add_special_tokens=False)],
    )
    requests = intake.accept([PROMPTS[1]], params)
    run(engine, requests)
    assert texts(requests) == ["ab"]
    assert requests[0].samples[0].finish_reason == "stop"


def test_a_grammar_and_an_own_list_of_ids_hold_together():
    tokenizer = letter_tokenizer()
    engine, intake = make_counting_engine(eos_ids=[EOS], tokenizer=tokenizer)
    allowed = [EOS, *tokenizer.encode("helpgod", add_special_tokens=False)]
    params = SamplingParams(
        seed=1,
        max_tokens=20,
        allowed_token_ids=allowed,
        structured_outputs={"choice": ["hex", "help", "bye"]},
    )
    requests = intake.accept([PROMPTS[1]], params)
    run(engine, requests)
    assert texts(requests) == ["help"]


def test_a_row_with_nothing_to_draw_ends_with_an_error_and_harms_nobody():
    tokenizer = letter_tokenizer()
    engine, intake = make_counting_engine(eos_ids=[EOS], tokenizer=tokenizer)
    params = SamplingParams(max_tokens=20, allowed_token_ids=[EOS], min_tokens=3)
    (broken,) = intake.accept([PROMPTS[1]], params)
    (other,) = intake.accept([PROMPTS[2]], greedy(12))
    run(engine, [broken, other])
    assert broken.samples[0].finish_reason == "error"
    assert broken.samples[0].output_ids == []
    assert other.samples[0].output_ids == expected(PROMPTS[2], 12)
    assert at_rest(engine)


def test_a_broken_schema_fails_its_request_alone():
    _, intake = make_counting_engine(eos_ids=[EOS], tokenizer=letter_tokenizer())
    with pytest.raises(RequestError, match="structured_outputs"):
        intake.accept([[1]], SamplingParams(structured_outputs={"regex": "(ab"}))


# --- what the engine has no room or no tokenizer for ---


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_ends_count_among_the_stop_ids(ignore_eos):
    _, intake = make_counting_engine(eos_ids=[1, 2], max_stop_ids=4)
    fields = {"ignore_eos": ignore_eos, "stop_token_ids": [2, 5, 6, 7]}
    assert intake.accept([[1]], greedy(1, **fields))
    fields["stop_token_ids"] = [5, 6, 7, 8]
    with pytest.raises(RequestError, match=r"5 stop ids, the model's own.*exceed max_stop_ids=4"):
        intake.accept([[1]], greedy(1, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias has token id 50, outside the vocabulary"),
        ({"allowed_token_ids": [3, 51]}, "allowed_token_ids has token id 51"),
        ({"logprob_token_ids": [50]}, "logprob_token_ids has token id 50"),
        ({"logit_bias": dict.fromkeys(range(9), 1.0)}, "9 entries, and max_logit_bias=8"),
        ({"bad_words": list("abcde")}, "5 spellings in tokens, and max_bad_words=4"),
        ({"bad_words": ["abcdef"]}, "a bad word has 6 tokens, and max_bad_word_len=5"),
        ({"stop_token_ids": list(range(20))}, "20 stop ids, .* exceed max_stop_ids=16"),
    ],
)
def test_limits_of_rules(fields, message):
    _, intake = make_counting_engine(
        tokenizer=letter_tokenizer(), max_logit_bias=8, max_bad_words=4, max_bad_word_len=5
    )
    with pytest.raises(RequestError, match=message):
        intake.accept([[1]], greedy(1, **fields))


@pytest.mark.parametrize(
    "fields", [{"stop": "a"}, {"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}}]
)
def test_what_needs_a_tokenizer_says_so(fields):
    _, intake = make_counting_engine()
    with pytest.raises(RequestError, match="tokenizer"):
        intake.accept([[1]], greedy(1, **fields))
