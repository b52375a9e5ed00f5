"""Engines over a model that sees the last tokens alone: what it will not see again is free.

A request may be longer than the whole pool. Tokens are checked against plain Python, and after
every step the device's tables hold what the windows see, and no more.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import EngineConfig
from jpaged.core.state import check_invariants, init_state
from jpaged.engine.capacity import blocks_per_request, max_blocks_per_request
from jpaged.engine.defaults import Defaults
from jpaged.engine.engine import Engine
from jpaged.engine.intake import Intake
from jpaged.engine.reporter import Reporter
from jpaged.engine.rules import rule_sizes
from jpaged.errors import RequestTooLongError
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from tests.core.scripted import (
    VOCAB_SIZE,
    counting_kv,
    counting_params,
    greedy_continuation,
    next_logits,
    windowed_forward,
)
from tests.engine.counting import MODEL, greedy
from tests.oracles.beam_search import vllm_beam_search

WINDOW = 6
WINDOWED = dataclasses.replace(
    MODEL, layers=tuple(dataclasses.replace(layer, window=WINDOW) for layer in MODEL.layers)
)
LONG = [(j * j * 5 + 2) % 50 for j in range(40)]
PROMPTS = [[(i * 7 + j * j) % 50 for j in range(n)] for i, n in enumerate((1, 3, 9, 17, 4, 30, 12))]
MOST_STEPS = 500
TIGHT = {"num_decode_steps": 3, "max_num_batched_tokens": 5}
WAYS = [
    {"num_decode_steps": 8},
    {"num_decode_steps": 1, "enable_prefix_caching": False},
    TIGHT,
]
ROOMY = 64


class Windowed:
    """An engine whose pool holds what one row needs at most, unless told otherwise."""

    def __init__(self, num_blocks: int | None = None, **options):
        defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        config = EngineConfig.from_options(**(defaults | options)).resolved(WINDOWED, "cpu")
        self.most_held = max_blocks_per_request(config, WINDOWED)
        num_blocks = num_blocks or 1 + self.most_held

        def make_state():
            return init_state(
                counting_kv(num_blocks, 4),
                num_rows=config.max_num_seqs,
                max_blocks_per_row=blocks_per_request(config),
                hash_key=jnp.arange(4, dtype=jnp.uint32),
                num_stop_ids=config.max_stop_ids,
                rule_sizes=rule_sizes(config, VOCAB_SIZE),
            )

        self.engine = Engine(
            windowed_forward(WINDOW), counting_params(), config, make_state, VOCAB_SIZE
        )
        self.intake = Intake(WINDOWED, config, num_blocks, None, Defaults())
        self.peak = 0  # most blocks that a row held

    def run(self, *requests):
        for request in requests:
            self.engine.add(request)
        for _ in range(MOST_STEPS):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
            self.check()
        assert not self.engine.has_unfinished
        assert self.engine.num_free_blocks == self.engine.num_blocks - 1

    def check(self) -> None:
        """The device holds what it should, and the host knows."""
        state = self.engine._device.state
        check_invariants(state, window=WINDOW)
        rows, ref_count = jax.device_get((state.rows, state.pool.ref_count))
        assert self.engine.num_free_blocks == int((ref_count == 0).sum())
        for sample in self.engine.roster.running:
            assert rows.context_len[sample.row_id] == sample.context_len
            assert rows.num_blocks[sample.row_id] == sample.num_blocks
        self.peak = max(self.peak, int((rows.block_table != 0).sum(axis=1).max()))


def assert_right(requests) -> None:
    for request in requests:
        want = greedy_continuation(
            request.prompt_token_ids, request.params.max_tokens, window=WINDOW
        )
        assert [sample.output_ids for sample in request.samples] == [want] * request.params.n


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_request_longer_than_the_pool_ends(options):
    windowed = Windowed(**options)
    assert len(LONG) // 4 > windowed.most_held
    requests = windowed.intake.accept([LONG], greedy(23))
    windowed.run(*requests)
    assert_right(requests)
    assert windowed.peak <= windowed.most_held
    assert windowed.engine.stats.num_preemptions == 0


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_crowd_is_served_from_such_a_pool(options):
    windowed = Windowed(**options)
    requests = windowed.intake.accept([*PROMPTS, LONG], greedy(20))
    windowed.run(*requests)
    assert_right(requests)
    assert windowed.peak <= windowed.most_held


def test_preempted_requests_go_on_with_the_same_tokens():
    """Rows of one block are admitted side by side, and grow to three."""
    windowed = Windowed(**TIGHT)
    requests = windowed.intake.accept([[i, 5] for i in range(4)], greedy(50))
    windowed.run(*requests)
    assert windowed.engine.stats.num_preemptions > 0
    assert_right(requests)


def test_the_prompt_is_found_whole_and_kept_in_part():
    windowed = Windowed(ROOMY)
    for num_cached in (0, 36):
        (request,) = windowed.intake.accept([LONG], greedy(2))
        windowed.run(request)
        assert_right([request])
        assert request.num_cached_tokens == num_cached
    # The second time it held two blocks of what was found, and one for the rest.
    windowed.peak = 0
    (request,) = windowed.intake.accept([LONG], greedy(2))
    windowed.run(request)
    assert windowed.peak <= 4


def test_a_prompt_whose_cached_blocks_fill_the_pool_is_admitted():
    windowed = Windowed()
    prompt = LONG[: 4 * windowed.most_held]
    for num_cached in (0, len(prompt) - 4):
        (request,) = windowed.intake.accept([prompt], greedy(1))
        windowed.run(request)
        assert request.num_cached_tokens == num_cached
    (request,) = windowed.intake.accept([prompt], greedy(30))
    windowed.run(request)
    assert_right([request])


def test_samples_of_one_prompt_are_those_of_a_roomy_pool():
    params = SamplingParams(temperature=1.0, top_k=20, seed=5, max_tokens=20, n=3)
    found = []
    for num_blocks in (None, ROOMY):
        windowed = Windowed(num_blocks)
        requests = windowed.intake.accept([LONG, PROMPTS[2]], params)
        windowed.run(*requests)
        found.append([[s.output_ids for s in request.samples] for request in requests])
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 3


@settings(max_examples=15, deadline=None)
@given(
    mix=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3), st.integers(0, 2)),
        min_size=2,
        max_size=6,
    ),
    num_steps=st.integers(0, 20),
)
def test_any_mix_gives_each_its_tokens_and_leaves_no_block(mix, num_steps):
    """Prompts of shared families, samples, one aborted after some steps, in the smallest pool."""
    windowed = Windowed(**TIGHT)
    requests = []
    for prompt_len, max_tokens, n, family in mix:
        prompt = [(family * 11 + j * j) % 50 for j in range(prompt_len)]
        params = SamplingParams(temperature=float(n > 1), top_k=1, max_tokens=max_tokens, n=n)
        requests += windowed.intake.accept([prompt], params)
    for request in requests:
        windowed.engine.add(request)
    for _ in range(num_steps):
        windowed.engine.step()
        windowed.check()
    if not requests[0].is_finished:
        windowed.engine.abort(requests[:1])
        windowed.check()
    windowed.run()
    assert_right(requests[1:])
    assert windowed.peak <= windowed.most_held


@pytest.mark.slow  # test_beam_search has pools that one search fills
def test_beams_longer_than_the_pool():
    windowed = Windowed(9, **TIGHT)
    params = BeamSearchParams(beam_width=2, max_tokens=12)
    (request,) = windowed.intake.accept_beams([LONG], params)
    assert len(LONG) // 4 > 8 == 2 * windowed.most_held
    windowed.run(request)

    def logprobs_after(tokens: list[int]) -> np.ndarray:
        logits = next_logits(tokens, window=WINDOW)
        return logits - np.log(np.sum(np.exp(logits)))

    want = vllm_beam_search(
        logprobs_after, LONG, 2, 12, eos_ids=(), length_penalty=1.0, ignore_eos=False
    )
    got = Reporter(None).beams_of(request).sequences
    assert [one.tokens for one in got] == [LONG + tokens for tokens, *_ in want]


def test_what_can_not_fit_a_window_is_refused():
    too_small = Windowed(Windowed().most_held)
    with pytest.raises(RequestTooLongError, match="block pool"):
        too_small.intake.accept([LONG], greedy(4))
    params = BeamSearchParams(beam_width=2, max_tokens=12)
    with pytest.raises(RequestTooLongError, match="2 beams"):
        Windowed(8, **TIGHT).intake.accept_beams([LONG], params)
    assert too_small.intake.accept([LONG[:9]], greedy(4))
