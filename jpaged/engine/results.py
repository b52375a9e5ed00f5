"""What came back from the device, written into the host's records."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from jpaged.core.sampling import STOP_EOS, STOP_LENGTH, STOP_TOKEN
from jpaged.core.step import STOP_ERROR, StepOutput
from jpaged.engine.beam_group import BeamGroup
from jpaged.engine.dispatch import PrefillRow
from jpaged.engine.output_text import OutputText
from jpaged.engine.request import FinishReason, Sample
from jpaged.engine.structured import Matcher
from jpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_REASONS: dict[int, FinishReason] = {
    STOP_EOS: "stop",
    STOP_TOKEN: "stop",
    STOP_LENGTH: "length",
    STOP_ERROR: "error",
}


class PrefillResult(NamedTuple):
    """What a prefill step did besides adding tokens."""

    seated: list[Sample]  # forked samples that now have rows
    unused_rows: list[int]  # rows kept for forks that did not happen
    unseated: list[Sample]  # samples for which there was no row to fork into


def take_prefill(
    rows: Sequence[PrefillRow], output: StepOutput, *, block_size: int
) -> PrefillResult:
    """Records a prefill step. Forks that found no row are left to be admitted on their own: they
    find the prompt in the prefix cache."""
    result = PrefillResult([], [], [])
    starts = output.granted.cumsum() - output.granted
    for place, row in enumerate(rows):
        if isinstance(row.sample, BeamGroup):
            _advance_group(row, rows, output, block_size)
        elif row.parent is None:
            _take_prompt_scores(row.sample, int(output.granted[place]), output, int(starts[place]))
            _advance(row.sample, int(output.granted[place]), row.num_new, block_size)
        elif output.is_sampled[place] or output.finish_reason[place]:
            _seat_fork(row.sample, rows[row.parent].sample, row.row_id, block_size)
            result.seated.append(row.sample)
        else:
            result.unused_rows.append(row.row_id)
            continue
        _append(row.sample, output, (place,))
    for row in rows:
        parent = row.sample
        if row.parent is None and (parent.output_ids or parent.finish_reason):
            result.unseated.extend(parent.forks)
            parent.forks = []
    return result


def take_window(
    samples: Sequence[Sample], output: StepOutput, num_steps: int, *, block_size: int
) -> int:
    """Records a decode window. Returns the number of tokens it made."""
    num_sampled = 0
    for place, sample in enumerate(samples):
        reserved = min(num_steps, sample.request.max_len - sample.num_tokens)
        _advance(sample, int(output.granted[:, place].sum()), reserved, block_size)
        num_sampled += sum(_append(sample, output, (j, place)) for j in range(num_steps))
    return num_sampled


def _advance(sample: Sample, granted: int, reserved: int, block_size: int) -> None:
    request = sample.request
    if granted:
        # What it writes to is its own now.
        sample.is_tail_shared = False
        reserved_blocks = -(-(sample.context_len + reserved) // block_size)
        sample.num_blocks = max(sample.num_blocks, reserved_blocks)
    sample.context_len += granted
    if request.is_scoring and sample.context_len == len(request.prompt_token_ids) - 1:
        sample.finish("length")


def _advance_group(
    row: PrefillRow, rows: Sequence[PrefillRow], output: StepOutput, block_size: int
) -> None:
    """A group advances once, by what each of its rows ran."""
    group = row.sample
    assert isinstance(group, BeamGroup)
    if row.row_id != group.row_id:
        return
    granted = {int(output.granted[i]) for i, r in enumerate(rows) if r.sample is group}
    if len(granted) > 1:
        raise RuntimeError(f"rows of a beam group ran {sorted(granted)} tokens, not equally many")
    (num_new,) = granted
    group.advance(num_new, -(-(group.context_len + num_new) // block_size))


def _seat_fork(child: Sample, parent: Sample, row_id: int, block_size: int) -> None:
    parent.forks.remove(child)
    child.row_ids, child.context_len = [row_id], parent.context_len
    child.num_blocks = -(-child.context_len // block_size)
    child.is_tail_shared = parent.is_tail_shared = child.context_len % block_size != 0


def _take_prompt_scores(sample: Sample, granted: int, output: StepOutput, start: int) -> None:
    """Takes the scores of prompt tokens that a step gave. start: the sample's first in the step."""
    end, score_from = len(sample.request.prompt_token_ids), sample.next_scored
    if output.prompt is None or score_from >= end:
        return
    for place in range(granted):
        position = sample.context_len + place + 1
        if score_from <= position < end:
            num_top = sample.request.num_prompt_top or 0
            sample.prompt_scores.add(output.prompt, (start + place,), num_top=num_top)


def _append(sample: Sample, output: StepOutput, at: tuple[int, ...]) -> bool:
    """Takes the token sampled there, if any, and the end of the sample if it stopped. What a
    window made behind a stop that the device does not know counts for nothing."""
    if sample.finish_reason:
        return False
    token_id, reason = int(output.token_ids[at]), int(output.finish_reason[at])
    is_sampled = bool(output.is_sampled[at])
    if is_sampled:
        sample.output_ids.append(token_id)
        request = sample.request
        if request.num_top is not None:
            num_asked = len(request.params.logprob_token_ids or ())
            sample.scores.add(output.told, at, num_top=request.num_top, num_asked=num_asked)
    if reason:
        sample.finish(_REASONS[reason], token_id if reason == STOP_TOKEN else None)
        sample.is_ended_by_token = reason in (STOP_EOS, STOP_TOKEN)
    if is_sampled:
        _look_at(sample, token_id)
    return is_sampled


def _look_at(sample: Sample, token_id: int) -> None:
    """Stops that only the host sees, in vLLM's order: behind the device's, repetition; a stop
    string in any case, and then it is the reason."""
    is_stopped = sample.is_ended_by_token
    if sample.matcher is not None and not is_stopped:
        _follow(sample, sample.matcher, token_id)
    if not sample.finish_reason and _is_repeating(sample.output_ids, sample.request.params):
        sample.finish("repetition")
    if sample.text is not None:
        try:
            _read(sample, sample.text, token_id, is_stopped=is_stopped)
        except Exception as error:
            # A tokenizer may be anybody's, and what it fails at is this request's affair alone.
            sample.request.error = error
            sample.finish("error")


def _read(sample: Sample, text: OutputText, token_id: int, *, is_stopped: bool) -> None:
    """Takes a token into the sample's text. is_stopped: by that token."""
    found = None if is_stopped else text.add(token_id)
    if found is not None:
        sample.finish("stop", found)
    if sample.finish_reason:
        text.end(token_id if is_stopped else None)


def _follow(sample: Sample, matcher: Matcher, token_id: int) -> None:
    """Takes a token into the sample's grammar, and ends the sample where nothing may follow that
    it could draw."""
    try:
        matcher.accept(token_id)
        if sample.must_end and not sample.can_end_itself and not sample.finish_reason:
            sample.finish("stop")
    except RuntimeError as error:
        logger.warning(
            "request %s can not follow its grammar: %s", sample.request.request_id, error
        )
        sample.finish("error")


def _is_repeating(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether the output ends in a pattern of one of the sizes, `min_count` times in a row."""
    detection = params.repetition_detection
    if detection is None or len(tokens) < params.min_tokens:
        return False
    count = detection.min_count
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        if size * count > len(tokens):
            return False
        tail = tokens[-size * count :]
        if all(tail[i] == tail[i + size] for i in range(size * (count - 1))):
            return True
    return False
