"""Beam search as the host keeps it: a group of W rows, seated, run and preempted together.

What beams have become is read after each window, so that an interrupted group goes on from there:
one row, the leader, reads what all live beams begin with; the others are forked off it and catch up
with tokens of their own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpaged.core.beam import BeamOutput
from jpaged.core.beam_rules import HF_FALSE, HF_NEVER, HF_TRUE, NONE, VLLM, Beams, Hypotheses
from jpaged.core.step import STATUS_BAD_NUMBERS
from jpaged.engine.dispatch import pad_rows
from jpaged.engine.request import Request, Sample
from jpaged.engine.seq_view import GroupView

_RULES = {None: VLLM, False: HF_FALSE, True: HF_TRUE, "never": HF_NEVER}


@dataclasses.dataclass(eq=False)
class BeamGroup(Sample):
    """The only sample of a beam search. Its arrays are NumPy's, `Hypotheses` without the G."""

    live: Any = None
    finished: Any = None
    is_spread: bool = False  # every live beam has a row
    num_tails: int = 1  # different blocks among the rows' partly filled ones

    def __post_init__(self) -> None:
        # A beam each: the prompt's, of probability 1.
        self.live, self.finished = _no_sequences(self.width, 0), _no_sequences(self.width, 0)
        self.live.cum_logprob[0] = self.live.score[0] = 0.0

    @property
    def width(self) -> int:
        """W."""
        assert self.request.beam_params is not None
        return self.request.beam_params.beam_width

    @property
    def num_rows(self) -> int:
        """Rows it needs."""
        return self.width

    @property
    def max_tokens(self) -> int:
        """Most tokens of a beam's output."""
        return self.request.max_len - len(self.request.prompt_token_ids)

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a sequence, heeded or not."""
        ids = [self.request.eos_id, *self.request.stop_ids]
        return [token for token in ids if token >= 0]

    @property
    def ignores_eos(self) -> bool:
        """Whether end-of-sequence ids end nothing."""
        assert self.request.beam_params is not None
        return self.request.beam_params.ignore_eos

    @property
    def num_live(self) -> int:
        """Beams that go on."""
        return int(np.sum(self.live.cum_logprob > NONE))

    @property
    def sequences(self) -> list[list[int]]:
        """Each live beam's tokens, prompt included."""
        lengths = self.live.lengths[: self.num_live]
        return [
            self.request.prompt_token_ids + self.live.token_ids[w, :length].tolist()
            for w, length in enumerate(lengths)
        ]

    @property
    def token_ids(self) -> list[int]:
        """What the leader is seated with: the tokens all live beams begin with, and the first
        beam's next, whose KV it leaves to the others' rows and windows."""
        first, *others = self.sequences
        if not others:
            return first
        columns = enumerate(zip(first, *others, strict=True))
        return first[: 1 + next(place for place, tokens in columns if len(set(tokens)) > 1)]

    @property
    def num_tokens(self) -> int:
        """Tokens of each live beam; of the leader before the others have their rows."""
        if not self.is_spread:
            return len(self.token_ids)
        return len(self.request.prompt_token_ids) + self.num_output

    @property
    def num_output(self) -> int:
        """Tokens that each live beam has generated."""
        return int(self.live.lengths[0])

    @property
    def must_spread(self) -> bool:
        """Whether the leader has read what all share, and the other beams lack their rows."""
        has_rows = self.is_spread or self.num_live == 1
        return not has_rows and self.context_len == len(self.token_ids) - 1

    def leave_row(self) -> None:
        """Forgets everything about its rows."""
        super().leave_row()
        self.is_spread, self._keys = False, []

    def view(self, block_size: int, **cached: int) -> GroupView:
        """As the scheduler sees it. cached: what a waiting one would find in the prefix cache."""
        fields = {
            "num_tokens": self.num_tokens,
            "context_len": self.context_len,
            "num_blocks": self.num_blocks,
            "max_len": self.request.max_len,
            "num_rows": self.width,
            "num_live": self.num_live if self.is_spread else 1,
            "num_tails": self.num_tails,
            "num_beams": self.num_live,
            "beam_len": len(self.request.prompt_token_ids) + self.num_output,
        }
        keys = () if self.is_spread else self.prefix_keys(block_size)
        return GroupView(**(fields | cached), keys=keys)

    def advance(self, num_new: int, num_blocks: int) -> None:
        """Its rows' contexts have grown by `num_new` tokens each, to `num_blocks` columns."""
        if num_new:
            self.num_tails = self.num_live if self.is_spread else 1
        self.context_len += num_new
        self.num_blocks = max(self.num_blocks, num_blocks)


def _no_sequences(width: int, max_tokens: int) -> Hypotheses:
    def full(shape: tuple[int, ...], value: float, dtype: Any) -> Any:
        return np.full(shape, value, dtype)

    return Hypotheses(
        token_ids=full((width, max_tokens), 0, np.int32),
        logprobs=full((width, max_tokens), 0, np.float32),
        lengths=full((width,), 0, np.int32),
        cum_logprob=full((width,), NONE, np.float32),
        score=full((width,), NONE, np.float32),
    )


def pack_spread(group: BeamGroup, width: int) -> dict[str, Any]:
    """The arguments of `core.beam.spread` for one group; `width` is a bucket of token lists."""
    W, sequences = group.width, group.sequences
    token_ids: Any = np.zeros((W, width), np.int32)
    for place, tokens in enumerate(sequences):
        token_ids[place, : len(tokens)] = tokens
    return {
        "parent": pad_rows([group.row_id] * len(sequences), W),
        "row_ids": pad_rows(group.row_ids[: len(sequences)], W),
        "token_ids": token_ids,
        "num_tokens": pad_rows([len(tokens) for tokens in sequences], W),
    }


def pack_beams(
    groups: Sequence[BeamGroup], num_groups: int, max_tokens: int, num_eos_ids: int
) -> Beams:
    """Groups of one width, padded to `num_groups`; sequences padded to `max_tokens`."""
    W, missing = groups[0].width, num_groups - len(groups)
    params = [group.request.beam_params for group in groups]

    def stack(name: str) -> Hypotheses:
        rows = [getattr(group, name) for group in groups]
        return jax.tree.map(
            lambda *xs: np.stack([_fitted(x, max_tokens) for x in xs]),
            *rows,
            *[_no_sequences(W, max_tokens)] * missing,
        )

    def field(values: Sequence[Any], dtype: Any) -> Any:
        return np.array([*values, *[0] * missing], dtype)

    eos_ids: Any = np.full((num_groups, num_eos_ids), -1, np.int32)
    for place, group in enumerate(groups):
        eos_ids[place, : len(group.eos_ids)] = group.eos_ids
    row_ids: Any = np.array([g.row_ids for g in groups] + [[0] * W] * missing, np.int32)
    return Beams(
        row_ids=row_ids,
        live=stack("live"),
        finished=stack("finished"),
        is_done=field([False] * len(groups), np.bool_) | (np.arange(num_groups) >= len(groups)),
        max_len=field([group.request.max_len for group in groups], np.int32),
        length_penalty=field([p.length_penalty for p in params if p], np.float32),
        rule=field([_RULES[p.early_stopping] for p in params if p], np.int32),
        eos_ids=eos_ids,
        ignores_eos=field([p.ignore_eos for p in params if p], np.bool_),
    )


def _fitted(x: Any, max_tokens: int) -> Any:
    """A list of tokens with room for `max_tokens`: it may come from a window with more, too."""
    if x.ndim < 2:
        return x
    kept = x[:, :max_tokens]
    return np.pad(kept, ((0, 0), (0, max_tokens - kept.shape[1])))


def take_beams(
    groups: Sequence[BeamGroup], beams: Beams, output: BeamOutput, block_size: int
) -> tuple[int, int]:
    """Records a window. Returns the last tokens of prompts that it read, and the tokens that it
    chose, W in a step: whether they end their sequence or not."""
    num_prompt = num_generated = 0
    for place, group in enumerate(groups):
        before = group.num_output
        group.live, group.finished = (
            jax.tree.map(lambda x, place=place: x[place].copy(), kind)
            for kind in (beams.live, beams.finished)
        )
        group.is_spread = True
        num_new = int(output.num_new[place])
        group.advance(num_new, -(-(group.context_len + num_new) // block_size))
        group.num_tails = int(output.num_tails[place])
        num_prompt += int(num_new > 0 and before == 0)
        num_generated += group.width * (group.num_output - before)
        if output.status[place] == STATUS_BAD_NUMBERS:
            group.finish("error")
        elif beams.is_done[place]:
            group.finish("length" if group.num_tokens >= group.request.max_len else "stop")
    return num_prompt, num_generated


def best_sequences(group: BeamGroup) -> list[tuple[list[int], list[float], float, float]]:
    """(output ids, log-probabilities, their sum, score) of the W best finished or live sequences,
    the best first. Under Hugging Face's rule only finished ones count, unless there are none."""
    kinds = [group.finished, group.live]
    if group.request.beam_params and group.request.beam_params.early_stopping is not None:
        has_finished = bool(np.any(group.finished.score > NONE))
        kinds = kinds[:1] if has_finished else kinds[1:]
    found = [
        (
            kind.token_ids[w, : kind.lengths[w]].tolist(),
            kind.logprobs[w, : kind.lengths[w]].tolist(),
            float(kind.cum_logprob[w]),
            float(kind.score[w]),
        )
        for kind in kinds
        for w in np.flatnonzero(kind.score > NONE)
    ]
    return sorted(found, key=lambda one: -one[3])[: group.width]


def make_group(request: Request) -> BeamGroup:
    """The group of a request that asks for beam search."""
    return BeamGroup(request, 0)
