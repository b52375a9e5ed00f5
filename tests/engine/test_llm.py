"""`LLM` as its users meet it: weights that change, memory that returns, errors that harm nobody."""

import gc
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.engine import compiled
from jpaged.errors import ConfigError, EngineClosedError, RequestError
from jpaged.models.forward import dense_forward, init_params
from tests.models.test_model_config import LLAMA

CONFIG_OPTIONS = {
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_decode_steps": 4,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[5, 9, 2], [7] * 17, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def tiny_params(config, seed: int):
    params = init_params(config, jax.random.key(seed), "float32")
    return jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, params)


@pytest.fixture(scope="module")
def config():
    from jpaged.config import ModelConfig

    return ModelConfig.from_hf(LLAMA)


@pytest.fixture(scope="module")
def llm(config):
    with LLM(model=config, params=tiny_params(config, 0), **CONFIG_OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def dense_logits(config):
    """Logits of the dense model with the engine's first weights; one program for any length."""
    params, forward = tiny_params(config, 0), jax.jit(dense_forward(config))

    def logits(token_ids: list[int]) -> np.ndarray:
        padded = np.pad(np.array(token_ids, np.int32), (0, 32 - len(token_ids)))
        return np.asarray(forward(params, padded))[: len(token_ids)]

    return logits


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_results_come_in_input_order_with_their_prompts(llm):
    several = [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 1, 5)]
    outputs = llm.generate(PROMPTS, several, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in tokens_of(outputs)] == [12, 1, 5]
    assert all(output.finished for output in outputs)
    assert llm.generate([], GREEDY) == []


def test_tokens_are_the_dense_models(llm, dense_logits):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        whole = output.prompt_token_ids + output.outputs[0].token_ids
        best = dense_logits(whole).argmax(axis=1)[len(output.prompt_token_ids) - 1 : -1]
        assert output.outputs[0].token_ids == best.tolist()


def test_logprobs_of_sampled_tokens_are_the_dense_models(llm, dense_logits):
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=6, logprobs=0, n=2)
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    for completion in output.outputs:
        logits = dense_logits(PROMPTS[1] + completion.token_ids)[len(PROMPTS[1]) - 1 : -1]
        wanted = jax.nn.log_softmax(logits)[np.arange(6), completion.token_ids]
        got = [next(iter(entry.values())).logprob for entry in completion.logprobs]
        np.testing.assert_allclose(got, wanted, atol=1e-4)
        np.testing.assert_allclose(completion.cumulative_logprob, sum(got), rtol=1e-6)


def test_a_second_identical_run_compiles_nothing(llm):
    llm.reset_prefix_cache()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    programs = compiled.compile_clock.num_programs
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert compiled.compile_clock.num_programs == programs


def test_new_weights_give_a_fresh_engines_tokens_and_compile_nothing(llm, config):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    programs = compiled.compile_clock.num_programs
    llm.update_params(tiny_params(config, 1))
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert compiled.compile_clock.num_programs == programs
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    with LLM(model=config, params=tiny_params(config, 1), **CONFIG_OPTIONS) as fresh:
        assert tokens_of(outputs) == tokens_of(fresh.generate(PROMPTS, GREEDY, use_tqdm=False))
    llm.update_params(tiny_params(config, 0))


def test_the_owner_of_the_params_may_donate_them(config):
    params = tiny_params(config, 0)
    with LLM(model=config, params=params, **CONFIG_OPTIONS) as llm:
        before = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        jax.tree.map(lambda x: x.delete(), params)
        llm.reset_prefix_cache()
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before


def test_a_tree_of_another_model_is_refused(llm, config):
    params = tiny_params(config, 0)
    wrong = {**params, "model": {**params["model"], "norm": {"weight": jnp.ones(3)}}}
    with pytest.raises(ConfigError, match=r"norm.*shape \(3,\)"):
        llm.update_params(wrong)
    with pytest.raises(ConfigError, match="missing"):
        llm.update_params({"model": params["model"]["norm"]})
    with pytest.raises(ConfigError, match="nested dicts"):
        llm.update_params(OrderedDict(params))
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 3


def test_a_bad_request_stops_its_batch_before_any_work_and_no_other(llm):
    free = llm.engine.num_free_blocks
    with pytest.raises(RequestError, match=r"prompt 1: .*empty"):
        llm.generate([PROMPTS[0], []], GREEDY)
    with pytest.raises(RequestError, match="prompt 0"):
        llm.generate("text", GREEDY)
    assert not llm.engine.has_unfinished
    assert llm.engine.num_free_blocks == free
    assert len(tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))) == 3


def test_a_limit_of_searches_at_a_time_changes_none(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    found = [
        [
            [one.tokens for one in output.sequences]
            for output in llm.beam_search(PROMPTS, params, concurrency_limit=limit)
        ]
        for limit in (None, 1, np.int64(2))
    ]
    assert found[1:] == found[:1] * 2
    for limit in (0, 1.5, "2"):
        with pytest.raises(RequestError, match="concurrency_limit must be a whole number"):
            llm.beam_search(PROMPTS, params, concurrency_limit=limit)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (KeyboardInterrupt, ("run_step", "run_window", "admit", "release")),
        (RuntimeError, ("run_step", "run_window", "admit")),  # a failed release harms nobody
    ],
)
def test_an_interrupt_anywhere_leaves_a_usable_engine(llm, monkeypatch, error, names):
    wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for name in names:
        real = getattr(compiled, name)

        def interrupted(*args, real=real, **kwargs):
            real(*args, **kwargs)  # the state is given away and its successor lost
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(compiled, name, interrupted)
            with pytest.raises(error):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted


class ChatTokenizer:
    """Letters are tokens from 10 on; texts get BOS (1) in front, and the template writes it too."""

    chat_template = "given"
    eos_token_id = 2

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **_):
        text = "<" + "".join(message["content"] for message in messages)
        return text + "a" * add_generation_prompt

    def encode(self, text, *, add_special_tokens=True):
        ids = [1 if letter == "<" else ord(letter) - ord("a") + 10 for letter in text]
        return [1] * add_special_tokens + ids

    def decode(self, token_ids, *, skip_special_tokens, **_):
        return "".join(chr(token + 87) for token in token_ids)

    def convert_ids_to_tokens(self, token_id):
        return chr(token_id + 87)


def test_chat_takes_one_conversation_or_many_and_begins_each_once(config):
    one, other = ([{"role": "user", "content": text}] for text in ("bc", "d"))
    options = CONFIG_OPTIONS | {"tokenizer": ChatTokenizer()}
    with LLM(model=config, params=tiny_params(config, 0), **options) as llm:
        for messages, prompts in ((one, ["<bca"]), ([one, other], ["<bca", "<da"]), ([], [])):
            outputs = llm.chat(messages, GREEDY, use_tqdm=False)
            assert [output.prompt for output in outputs] == prompts
            assert all(output.prompt_token_ids.count(1) == 1 for output in outputs)
        for messages in (None, "bc", one[0]):
            with pytest.raises(RequestError, match="messages must be a conversation, such as"):
                llm.chat(messages, GREEDY)
        with pytest.raises(RequestError, match="conversation 1: message 0 must have a role"):
            llm.chat([one, [{"content": "b"}]], GREEDY)


def test_parameters_may_be_changed_between_calls_and_hurt_no_defaults(llm):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams()
    lengths = []
    params.temperature = 0
    for params.max_tokens in (3, 5):
        lengths += [len(tokens) for tokens in tokens_of(llm.generate(PROMPTS[:1], params))]
    assert lengths == [3, 5]
    assert llm.get_default_sampling_params() == SamplingParams()


def test_closing_gives_the_memory_back(config):
    params = tiny_params(config, 0)
    gc.collect()
    before = len(jax.live_arrays())
    with LLM(model=config, params=params, **CONFIG_OPTIONS) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert len(jax.live_arrays()) > before
    gc.collect()
    assert len(jax.live_arrays()) == before
    with pytest.raises(EngineClosedError):
        llm.generate(PROMPTS, GREEDY)


def test_a_model_is_a_path_or_a_config_with_params(config, tmp_path):
    with pytest.raises(ConfigError, match="give a path"):
        LLM(model=config)
    with pytest.raises(ConfigError, match="give a path"):
        LLM(model=str(tmp_path), params={})
    with pytest.raises(ConfigError, match="unknown option 'max_len'"):
        LLM(model=config, params={}, max_len=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 10**6}, "exceeds the"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "below max_num_seqs"),
        ({"kv_cache_memory_bytes": 1000}, "needs .* GiB"),
        ({"gpu_memory_utilization": 0.0}, "above 0"),
        ({"watermark": 1.0}, "watermark must be from 0 to below 1, got 1.0"),
        ({"watermark": "0.1"}, "watermark must be .*, got '0.1'"),
        ({"dtype": "int3"}, "int3"),
        ({"implementation": "magic"}, "magic"),
        ({"num_decode_steps": 0}, "num_decode_steps"),
        ({"seed": True}, "seed"),
    ],
)
def test_contradictory_options_say_what_to_turn(config, options, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        LLM(model=config, params=tiny_params(config, 0), **(CONFIG_OPTIONS | options))


def test_start_up_tells_the_capacity(config, caplog):
    caplog.set_level("INFO", logger="jpaged")
    options = CONFIG_OPTIONS | {"num_gpu_blocks_override": 20}
    with LLM(model=config, params=tiny_params(config, 0), **options):
        pass
    assert "KV cache size: 160 tokens" in caplog.text
    assert "Maximum concurrency for 64 tokens per request: 2.50x" in caplog.text
    assert "Model loading took" in caplog.text
