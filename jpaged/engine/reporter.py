"""Requests as users get them back: text, log-probabilities and reasons, in vLLM's words."""

from collections.abc import Sequence
from typing import Any

from jpaged.engine.beam_group import BeamGroup, best_sequences
from jpaged.engine.detokenize import whole_text
from jpaged.engine.output import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    Logprobs,
    PromptLogprobs,
    RequestOutput,
    ScoredTokens,
)
from jpaged.engine.request import Request, Sample
from jpaged.engine.token_scores import MAX_PIECES, TokenTexts, entries
from jpaged.sampling_params import RequestOutputKind


class Reporter:
    """Words results. tokenizer: None gives no texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts, self._no_texts = TokenTexts(tokenizer), TokenTexts(None)

    def output_of(self, request: Request) -> RequestOutput:
        """What a user gets of a request, whatever state it is in. Raises what its text raised."""
        _check(request)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                self._completion_of(request, sample, self._text_of(request, sample))
                for sample in request.samples
            ],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs_of(request),
        )

    def news_of(self, request: Request) -> RequestOutput | None:
        """What the reader of a request's stream is to be told now, if anything: with FINAL_ONLY
        the whole when it is finished, else what is new in the samples that have news. All that it
        gives, joined, is the whole. Costs as much as the news are long. Raises as `output_of`."""
        _check(request)
        if request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.output_of(request) if request.is_finished else None
        samples = [sample for sample in request.samples if sample.has_news]
        if not samples:
            return None
        is_first = not any(sample.num_told for sample in request.samples)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._news_of_sample(request, sample) for sample in samples],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs_of(request) if is_first else None,
        )

    def _news_of_sample(self, request: Request, sample: Sample) -> CompletionOutput:
        first, is_ended = sample.num_told, sample.finish_reason is not None
        if is_ended and sample.text is not None:
            sample.text.end()  # an abort or error has not
        news = self._completion_of(
            request, sample, sample.text.take() if sample.text else "", first
        )
        sample.num_told, sample.is_end_told = len(sample.output_ids), is_ended
        return news

    def _completion_of(
        self, request: Request, sample: Sample, text: str, first: int = 0
    ) -> CompletionOutput:
        """A sample's output from token `first` on."""
        has_logprobs = request.num_top is not None
        return CompletionOutput(
            index=sample.index,
            text=text,
            token_ids=sample.output_ids[first:],
            cumulative_logprob=sample.scores.cumulative if has_logprobs else None,
            logprobs=self._logprobs_of(request, sample, first) if has_logprobs else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def _logprobs_of(self, request: Request, sample: Sample, first: int) -> Logprobs:
        params = request.params
        token_ids, start = sample.output_tail(first, MAX_PIECES)
        found = entries(
            sample.scores,
            token_ids,
            start,
            self._texts_for(request),
            asked_ids=params.logprob_token_ids or (),
            first=first,
        )
        listed: Logprobs = FlatLogprobs() if params.flat_logprobs else []
        for entry in found:
            listed.append(entry)
        return listed

    def _prompt_logprobs_of(self, request: Request) -> PromptLogprobs | None:
        if request.num_prompt_top is None:
            return None
        found = entries(
            request.samples[0].prompt_scores,
            request.prompt_token_ids,
            request.score_from,
            self._texts_for(request),
        )
        listed: PromptLogprobs = FlatLogprobs() if request.params.flat_logprobs else []
        listed.append(None)
        for entry in found:
            listed.append(entry)
        return listed

    def _texts_for(self, request: Request) -> TokenTexts:
        return self._texts if request.params.detokenize else self._no_texts

    def _text_of(self, request: Request, sample: Sample) -> str:
        params, end = request.params, len(sample.output_ids)
        if self._tokenizer is None or not params.detokenize:
            return ""
        if sample.text is not None:
            if sample.finish_reason is not None:
                sample.text.end()  # an abort or error has not
            return sample.text.text
        if sample.is_ended_by_token and not params.include_stop_str_in_output:
            end -= 1
        return whole_text(
            self._tokenizer,
            request.prompt_token_ids,
            sample.output_ids[:end],
            skip_special_tokens=params.skip_special_tokens,
        )

    def scores_of(self, request: Request) -> ScoredTokens:
        """What a user gets of a request that scored tokens."""
        scores = request.samples[0].prompt_scores
        token_ids = request.prompt_token_ids[request.score_from :]
        return ScoredTokens(token_ids, scores.logprobs, scores.ranks)

    def beams_of(self, request: Request) -> BeamSearchOutput:
        """What a user gets of a beam search, whatever state it is in."""
        (group,) = request.samples
        assert isinstance(group, BeamGroup)
        return BeamSearchOutput(
            [self._sequence_of(group, *found) for found in best_sequences(group)]
        )

    def _sequence_of(
        self,
        group: BeamGroup,
        output_ids: list[int],
        logprobs: list[float],
        cum_logprob: float,
        score: float,
    ) -> BeamSearchSequence:
        tokens = group.request.prompt_token_ids + output_ids
        is_ended = output_ids[-1:] and output_ids[-1] in group.eos_ids and not group.ignores_eos
        return BeamSearchSequence(
            tokens=tokens,
            cum_logprob=cum_logprob,
            score=score,
            logprobs=self._beam_logprobs(output_ids, logprobs),
            text=self._decode(tokens) if self._tokenizer else None,
            finish_reason="stop" if is_ended else group.finish_reason,
        )

    def _beam_logprobs(
        self, output_ids: Sequence[int], logprobs: Sequence[float]
    ) -> list[dict[int, Logprob]]:
        return [
            {token: Logprob(value, None, self._texts.of(token, output_ids[:place]))}
            for place, (token, value) in enumerate(zip(output_ids, logprobs, strict=True))
        ]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


def _check(request: Request) -> None:
    if request.error is not None:
        raise request.error
