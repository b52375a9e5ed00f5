"""`jpaged.functional` in other people's programs: the tokens of `LLM`, and state as a value."""

import dataclasses
import functools as ft
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jpaged
from jpaged import LLM, ModelConfig, SamplingParams
from jpaged import functional as F
from jpaged.errors import ConfigError

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)
NUM_NEW, NUM_SAMPLES, BLOCK_SIZE = 9, 2, 4
PROMPT_LENS = np.array([5, 1, 11], np.int32)
PROMPTS = np.random.default_rng(0).integers(0, 96, (3, 11), dtype=np.int32)
SEEDS = (3, 2**40 + 1, -7)
KEYS = np.stack([F.seed_key(seed) for seed in SEEDS])
GREEDY, RANDOM = F.Sampling(temperature=0.0), F.Sampling(temperature=1.0, top_p=0.95, min_p=0.01)


@ft.cache
def make_params(seed: int = 0) -> dict:
    """Random weights, sharp enough that the next token hangs on the ones before."""
    params = F.init_params(CONFIG, jax.random.key(seed), jnp.float32)
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)


def make_state(**options) -> F.EngineState:
    """As small as `generate` takes it: 3 prompts of 8 blocks, and the null block."""
    sizes = {"num_rows": 6, "max_model_len": 20, "block_size": BLOCK_SIZE, "num_blocks": 25}
    return F.init_state(CONFIG, key=jax.random.key(1), dtype="float32", **(sizes | options))


def generate(params, state=None, prompt_lens=PROMPT_LENS, keys=KEYS, sampling=GREEDY, **options):
    """Small chunks and windows, so that each prompt and output takes several."""
    defaults = {"max_new_tokens": NUM_NEW, "n": NUM_SAMPLES, "block_size": BLOCK_SIZE}
    chunks = {"num_prefill_tokens": 6, "num_decode_steps": 3}
    return F.generate(
        params,
        PROMPTS,
        prompt_lens,
        keys,
        config=CONFIG,
        state=state,
        sampling=sampling,
        **(defaults | chunks | options),
    )


# One program for most tests: what differs between them are its arguments.
_run = jax.jit(generate)


def as_arrays(sampling: F.Sampling) -> F.Sampling:
    """Each field with an entry for every prompt, and two ids to stop at."""
    types = ("float32", "float32", "int32", "float32", "int32")
    fields = [jnp.full(3, x, dtype) for x, dtype in zip(sampling[:-1], types, strict=True)]
    return F.Sampling(*fields, stop_ids=jnp.array([40, 91]))


def run(
    sampling: F.Sampling = GREEDY, *, params=None, state=None, prompt_lens=PROMPT_LENS
) -> F.Generation:
    params, state = params or make_params(), state or make_state()
    return _run(params, state, prompt_lens, KEYS, as_arrays(sampling))


def llm_outputs(sampling: F.Sampling, n: int, **fields) -> list:
    options = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }
    params = [
        SamplingParams(
            n=n,
            seed=seed,
            max_tokens=NUM_NEW,
            stop_token_ids=[40, 91],
            logprobs=0,
            **options,
            **fields,
        )
        for seed in SEEDS
    ]
    prompts = [row[:length].tolist() for row, length in zip(PROMPTS, PROMPT_LENS, strict=True)]
    with LLM(
        CONFIG,
        params=make_params(),
        skip_tokenizer_init=True,
        max_model_len=20,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        implementation="xla",  # as `generate`'s default
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [sample for output in outputs for sample in output.outputs]


@pytest.mark.parametrize(("sampling", "n"), [(GREEDY, 1), (RANDOM, NUM_SAMPLES)])
def test_generate_equals_llm(sampling: F.Sampling, n: int):
    result = run(sampling)
    rows = [row for row in range(6) if row % NUM_SAMPLES < n]
    for row, want in zip(rows, llm_outputs(sampling, n), strict=True):
        length = int(result.lengths[row])
        assert result.token_ids[row, :length].tolist() == want.token_ids
        assert not result.token_ids[row, length:].any()
        assert want.logprobs is not None
        logprobs = [
            of[token].logprob for of, token in zip(want.logprobs, want.token_ids, strict=True)
        ]
        np.testing.assert_allclose(result.logprobs[row, :length], logprobs, atol=1e-5)
        is_length = int(result.finish_reason[row]) == F.STOP_LENGTH
        assert want.finish_reason == ("length" if is_length else "stop")
    assert not result.status.any()


def test_greedy_samples_are_equal_and_random_ones_differ():
    greedy, random = (
        run(sampling).token_ids.reshape(3, NUM_SAMPLES, -1) for sampling in (GREEDY, RANDOM)
    )
    np.testing.assert_array_equal(greedy[:, 0], greedy[:, 1])
    assert (random[:, 0] != random[:, 1]).any(axis=-1).all()


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_logprobs_are_those_of_the_dense_model(sampling: F.Sampling):
    """Teacher forcing: the trainer's forward over the engine's sequences."""
    result = run(sampling)
    logits = jax.jit(jax.vmap(F.dense_forward(CONFIG), (None, 0)))(make_params(), result.sequences)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    for row, length in enumerate(result.lengths.tolist()):
        prompt_len = int(PROMPT_LENS[row // NUM_SAMPLES])
        assert (
            result.sequences[row, :prompt_len].tolist()
            == PROMPTS[row // NUM_SAMPLES, :prompt_len].tolist()
        )
        predicted = log_probs[row, prompt_len - 1 : prompt_len - 1 + length]
        token_ids = np.asarray(result.token_ids[row, :length])
        got = np.asarray(result.logprobs[row])
        np.testing.assert_allclose(got[:length], predicted[np.arange(length), token_ids], atol=1e-4)
        assert not got[length:].any()
        if sampling is GREEDY:
            np.testing.assert_array_equal(token_ids, predicted.argmax(axis=-1))


def test_parameters_may_differ_by_prompt():
    mixed = run(
        F.Sampling(temperature=jnp.array([0.0, 1.0, 0.0]), top_p=RANDOM.top_p, min_p=RANDOM.min_p)
    )
    greedy, random = run(GREEDY), run(RANDOM)
    np.testing.assert_array_equal(mixed.token_ids[:2], greedy.token_ids[:2])
    np.testing.assert_array_equal(mixed.token_ids[2:4], random.token_ids[2:4])
    np.testing.assert_array_equal(mixed.token_ids[4:], greedy.token_ids[4:])


def test_rows_stop_where_they_are_told():
    free = run(RANDOM)
    eos_id = int(free.token_ids[0, 2])
    result = run(RANDOM._replace(eos_id=eos_id))
    for row in range(6):
        tokens = free.token_ids[row, : free.lengths[row]].tolist()
        is_cut = eos_id in tokens
        want = tokens[: tokens.index(eos_id) + 1] if is_cut else tokens
        assert result.token_ids[row, : result.lengths[row]].tolist() == want
        assert (int(result.finish_reason[row]) == F.STOP_EOS) == is_cut
    assert int(result.lengths[0]) <= 3


# --- state as a value ---


def test_the_old_state_stays_usable_and_the_new_one_has_the_prompts_cached():
    state = make_state()
    first, again = run(RANDOM, state=state), run(RANDOM, state=state)
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.num_cached.tolist() == again.num_cached.tolist() == [0, 0, 0]
    F.check_invariants(first.state)
    later = run(RANDOM, state=first.state)
    np.testing.assert_array_equal(first.token_ids, later.token_ids)
    assert later.num_cached.tolist() == [4, 0, 8]
    assert run(state=F.new_weights(first.state)).num_cached.tolist() == [0, 0, 0]


def test_a_scan_over_weights_with_a_donated_state():
    versions = [make_params(seed) for seed in range(3)]

    def one(state, params):
        result = generate(
            params, F.new_weights(state), sampling=as_arrays(RANDOM), num_prefill_tokens=33
        )
        return result.state, (result.token_ids, result.num_cached)

    state = make_state(num_blocks=20_000)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *versions)
    scan = jax.jit(lambda state, params: jax.lax.scan(one, state, params), donate_argnums=0)
    compiled = scan.lower(state, stacked).compile()
    kv_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv))
    assert compiled.memory_analysis().temp_size_in_bytes < kv_bytes / 4  # no second cache

    last, (token_ids, num_cached) = compiled(state, stacked)
    F.check_invariants(last)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.kv))
    for got, params in zip(token_ids, versions, strict=True):
        alone = run(RANDOM, params=params)
        np.testing.assert_array_equal(got, alone.token_ids)
    assert not num_cached.any()
    assert int(last.weights_version) == 3


def test_without_a_state_and_with_prepared_weights():
    """One token each: no window is needed, and n = 1 has no forks."""
    serving = F.prepare(make_params(), CONFIG, "float32")
    keys = jax.vmap(ft.partial(jax.random.wrap_key_data, impl="threefry2x32"))(jnp.asarray(KEYS))
    one = jax.jit(
        lambda params, keys: generate(
            params, None, keys=keys, max_new_tokens=1, n=1, is_prepared=True
        )
    )
    result = one(serving, keys)
    np.testing.assert_array_equal(result.token_ids, run().token_ids[::NUM_SAMPLES, :1])
    assert result.lengths.tolist() == [1, 1, 1]
    assert result.finish_reason.tolist() == [F.STOP_LENGTH] * 3


def test_vmap_over_weights():
    """As over members of an ensemble: each with a state of its own."""
    versions = [make_params(seed) for seed in range(2)]

    def draw(params):
        return generate(params, sampling=as_arrays(RANDOM), max_new_tokens=4, n=1).token_ids

    token_ids = jax.jit(jax.vmap(draw))(jax.tree.map(lambda *x: jnp.stack(x), *versions))
    for got, params in zip(token_ids, versions, strict=True):
        np.testing.assert_array_equal(got, run(RANDOM, params=params).token_ids[::2, :4])


class ByHand:
    """The steps of a generation one by one, compiled by the caller."""

    row_ids = jnp.array([1, 2, 3])
    forward = F.make_forward(CONFIG)

    def __init__(self):
        self.params = F.prepare(make_params(), CONFIG, "float32")
        self.start = jax.jit(self._start)
        self.go_on = jax.jit(ft.partial(F.decode_window, forward=self.forward, num_steps=4))

    def _start(self, params, state):
        admissions = F.make_admissions(
            state, self.row_ids, jnp.asarray(PROMPTS), jnp.asarray(PROMPT_LENS), jnp.asarray(KEYS),
            max_new_tokens=NUM_NEW, sampling=RANDOM._replace(stop_ids=(40, 91)),
        )  # fmt: skip
        state, _ = F.admit(state, admissions)
        state, _ = F.step(
            params,
            state,
            F.step_inputs(self.row_ids),
            forward=self.forward,
            num_tokens=32,
            num_decode_rows=0,
        )
        return state

    def finish(self, state: F.EngineState, row_ids=row_ids) -> np.ndarray:
        """Tokens and log-probabilities of the rest."""
        outputs = []
        for _ in range(2):
            state, output = self.go_on(self.params, state, row_ids)
            F.check_invariants(state)
            outputs.append(np.stack([output.token_ids, output.logprobs]))
        return np.concatenate(outputs, axis=1)


@pytest.fixture(scope="module")
def by_hand() -> ByHand:
    return ByHand()


def test_steps_by_hand_give_the_tokens_of_generate(by_hand: ByHand):
    state = by_hand.start(by_hand.params, make_state())
    tokens = by_hand.finish(state)[0].T.astype(int)
    want = run(RANDOM)
    for row, got in enumerate(tokens):
        length = int(want.lengths[row * NUM_SAMPLES]) - 1
        assert got[:length].tolist() == want.token_ids[row * NUM_SAMPLES, 1 : length + 1].tolist()


def test_a_state_saved_amid_a_generation_goes_on_with_the_same_tokens(
    by_hand: ByHand, tmp_path: Path
):
    state, _ = by_hand.go_on(
        by_hand.params, by_hand.start(by_hand.params, make_state()), by_hand.row_ids
    )
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as loader:
        loaded = loader.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(by_hand.finish(loaded), by_hand.finish(state))


def test_a_fork_draws_its_own_tokens_and_leaves_the_parent_alone(by_hand: ByHand):
    state = by_hand.start(by_hand.params, make_state())
    parents, children = jnp.array([1, 3, 0]), jnp.array([4, 5, 0])
    forked = jax.jit(F.fork)(state, parents, children, jnp.array([0, 7, 0]))
    alone = by_hand.finish(state)
    twins = by_hand.finish(forked, children)
    np.testing.assert_array_equal(twins[0, :, 0], alone[0, :, 0])  # the same sample index
    assert (twins[0, :, 1] != alone[0, :, 2]).any()
    np.testing.assert_array_equal(by_hand.finish(forked), alone)


# --- what goes wrong ---


def test_weights_that_are_nan_end_every_row_with_a_status():
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), make_params())
    result = run(RANDOM, params=params)
    assert result.status.tolist() == [F.STATUS_BAD_NUMBERS] * 6
    assert result.finish_reason.tolist() == [F.STOP_ERROR] * 6
    assert not result.lengths.any()
    assert not result.token_ids.any()
    F.check_invariants(result.state)
    assert run(state=result.state).num_cached.tolist() == [0, 0, 0]


def test_a_prompt_of_impossible_length_is_left_out_and_the_others_run():
    result = run(prompt_lens=np.array([5, 0, 12], np.int32))
    F.check_invariants(result.state)
    assert result.status.tolist() == [F.STATUS_OK] * 2 + [F.STATUS_NOT_SEATED] * 4
    np.testing.assert_array_equal(result.token_ids[:2], run().token_ids[:2])
    assert not result.sequences[2:].any()
    assert result.lengths[2:].tolist() == result.finish_reason[2:].tolist() == [0] * 4


def test_rows_and_blocks_held_by_others_are_told_on_the_device():
    state = make_state()
    rows = dataclasses.replace(state.rows, num_tokens=state.rows.num_tokens.at[2].set(1))
    result = run(state=dataclasses.replace(state, rows=rows))
    assert result.status.tolist() == [F.STATUS_OK] * 4 + [F.STATUS_NOT_SEATED] * 2
    np.testing.assert_array_equal(result.token_ids[:4], run().token_ids[:4])

    held = state.pool.ref_count.at[5:].set(1)  # 4 blocks are left
    full = dataclasses.replace(state, pool=dataclasses.replace(state.pool, ref_count=held))
    starved = run(state=full)
    assert F.STATUS_NO_BLOCKS in starved.status.tolist()
    for row, status in enumerate(starved.status.tolist()):
        length = int(starved.lengths[row])
        assert starved.token_ids[row, :length].tolist() == run().token_ids[row, :length].tolist()
        assert (int(starved.finish_reason[row]) == F.RUNNING) == (status == F.STATUS_NO_BLOCKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 12}, r"need 25 blocks.*has 12.*larger num_blocks"),
        ({"n": 0}, r"n=0 samples \(at least 1\)"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0 \(at least 1\)"),
        ({"max_new_tokens": 118}, r"max_model_len=129 exceeds the model's 128 positions"),
        ({"state": {"num_rows": 5}}, r"need 6 rows, and the state has 5"),
        ({"state": {"max_model_len": 19}, "max_new_tokens": 10}, r"exceed the 20 positions"),
        ({"state": {"num_blocks": 8}}, r"pool has 8"),
        ({"keys": KEYS[:2]}, r"keys must be 3 threefry keys or u32\[3, 2\].*uint32\[2, 2\]"),
        ({"keys": jax.random.key(0)}, r"keys must be 3"),
        ({"sampling": F.Sampling(temperature=np.ones(2))}, r"temperature has shape \(2,\)"),
        ({"sampling": F.Sampling(stop_ids=range(17))}, r"17 stop_ids exceed the 16"),
        ({"sampling": F.Sampling(stop_ids=np.ones((2, 1), int))}, r"stop_ids has shape \(2, 1\)"),
        ({"is_prepared": False, "params": "serving"}, r"qkv_proj.*is_prepared=True"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_told_when_traced(options: dict, message: str):
    options = dict(options)
    state = make_state(**options["state"]) if "state" in options else None
    params = make_params()
    if options.pop("params", None) == "serving":
        params = F.prepare(params, CONFIG, "float32")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda params: generate(params, **(options | {"state": state})), params)


@pytest.mark.parametrize(
    "sizes", [{"num_rows": 0}, {"block_size": 0}, {"max_model_len": 129}, {"num_blocks": 1}]
)
def test_a_state_of_impossible_size_is_refused(sizes: dict):
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        make_state(**sizes)


def test_blocks_per_prompt_counts_shared_prompt_blocks_once():
    assert F.blocks_per_prompt(11, 9, 1, 4) == 5  # 19 tokens with KV
    assert F.blocks_per_prompt(8, 6, 10, 4) == 2 + 10 * 2  # 2 full blocks; 5 tokens a sample
    assert F.blocks_per_prompt(8, 5, 10, 4) == 1 + 10 * 2  # a prompt of 7 is the worst here
    assert F.blocks_per_prompt(1, 1, 3, 16) == 3


def test_kv_of_a_dynamic_rope_is_told_apart_by_prompt_length():
    lens = jnp.array([3, 40])
    assert not F.request_root(CONFIG, lens).any()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    hf = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
          "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
          "max_position_embeddings": 16, "rope_parameters": rope}  # fmt: skip
    roots = F.request_root(ModelConfig.from_hf(hf), lens)
    assert roots.tolist() == [[0, 0, 0, 0], [40, 0, 0, 0]]


# --- the page that shows all this ---


def test_every_snippet_of_the_page_runs():
    page = Path(__file__).parent.parent / "docs" / "functional.md"
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 5
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(page), "exec"), names)
    assert jpaged.functional is F
