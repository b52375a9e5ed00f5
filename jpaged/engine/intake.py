"""The front desk: judges prompts and parameters before any device work, and words the results."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine.beam_group import BeamGroup, best_sequences, make_group
from jpaged.engine.capacity import max_blocks_per_request
from jpaged.engine.defaults import Defaults
from jpaged.engine.output import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from jpaged.engine.request import Request, Sample, cache_root, derived_seed
from jpaged.errors import RequestError, RequestTooLongError
from jpaged.sampling_params import BeamSearchParams, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_PROMPT_TAIL = 8  # prompt tokens that the output's text may hang on


class Intake:
    """Turns prompts into requests that the engine can serve, and requests into outputs.

    num_blocks: the pool's, null block included.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        num_blocks: int,
        tokenizer: Any,
        defaults: Defaults,
    ) -> None:
        assert isinstance(config.max_model_len, int), "not a resolved config"
        self._model, self._config, self._tokenizer = model, config, tokenizer
        self._max_model_len: int = config.max_model_len
        self._num_blocks = num_blocks
        self._most_held = max_blocks_per_request(config, model)
        self._eos_ids = defaults.eos_ids
        self._num_requests = 0
        self.default_params = defaults.params

    # --- in ---

    def accept(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Requests for the prompts, in their order. Raises RequestError for the first bad one."""
        listed = _list_prompts(prompts)
        params = self._params_for(listed, sampling_params)
        return self._accept_all(self._accept_one, listed, params)

    def accept_beams(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[Request]:
        """Beam searches for the prompts, in their order. Raises RequestError for the first bad
        one."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        listed = _list_prompts(prompts)
        return self._accept_all(self._accept_beam, listed, [params] * len(listed))

    def _accept_all(
        self, accept: Callable[..., Request], prompts: Sequence[Prompt], params: Sequence[Any]
    ) -> list[Request]:
        requests = []
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(accept(prompt, one, self._num_requests + place))
            except RequestError as error:
                refused = type(error)(f"prompt {place}: {error}")
                refused.prompt_index = place
                raise refused from None
        self._num_requests += len(requests)
        return requests

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [(params or self.default_params).clone()] * len(prompts)
        listed = list(params) if isinstance(params, Iterable) else [params]
        for one in listed:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, got {one!r}")
        if len(listed) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(listed)} sampling_params; "
                "give one for all, or one each"
            )
        return [one.clone() for one in listed]

    def _accept_one(self, prompt: Prompt, params: SamplingParams, ordinal: int) -> Request:
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_tokens(token_ids)
        max_len = self._max_len(len(token_ids), params)
        stop_ids = dict.fromkeys(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= dict.fromkeys(self._eos_ids[1:])
        if len(stop_ids) > self._config.max_stop_ids:
            raise RequestError(
                f"{len(stop_ids)} stop ids exceed max_stop_ids={self._config.max_stop_ids}; "
                "start the engine with more"
            )
        rope_start = self._model.dynamic_rope_start
        has_own_rope = rope_start is not None and len(token_ids) > rope_start
        seed = params.seed
        return Request(
            request_id=str(ordinal),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_len=max_len,
            stop_ids=tuple(stop_ids),
            eos_id=self._eos_ids[0] if self._eos_ids and not params.ignore_eos else -1,
            seed=derived_seed(self._config.seed, ordinal) if seed is None else seed % 2**64,
            root=cache_root(cache_salt=salt, rope_len=len(token_ids) if has_own_rope else 0),
        )

    def _accept_beam(self, prompt: Prompt, params: BeamSearchParams, ordinal: int) -> Request:
        width, max_num_seqs = params.beam_width, self._config.max_num_seqs or 0
        if width > max_num_seqs:
            raise RequestError(
                f"beam_width={width} exceeds max_num_seqs={max_num_seqs}, the rows that there are; "
                "lower it, or start the engine with more"
            )
        greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=0)
        request = self._accept_one(prompt, greedy, ordinal)
        prompt_len = len(request.prompt_token_ids)
        if prompt_len + params.max_tokens > self._max_model_len:
            raise RequestTooLongError(
                f"{prompt_len} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={self._max_model_len}; lower max_tokens to at most "
                f"{self._max_model_len - prompt_len}"
            )
        block_size = self._config.cache.block_size
        num_shared = prompt_len // block_size
        num_all = -(-(request.max_len - 1) // block_size)
        needed = min(num_shared + width * (num_all - num_shared), width * self._most_held)
        if needed > self._num_blocks - 1:
            raise RequestTooLongError(
                f"{width} beams of {prompt_len} prompt tokens and up to {params.max_tokens} of "
                f"output need {needed} blocks, and the pool has {self._num_blocks - 1}; lower "
                "beam_width or max_tokens, or start the engine with a larger pool"
            )
        request.beam_params = params
        request.samples = [make_group(request)]
        return request

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text if there is any, token ids, and the salt of the prefix cache."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt), None
        if not isinstance(prompt, Mapping):
            return None, _check_ids(prompt), None
        if unknown := sorted(set(prompt) - _PROMPT_KEYS):
            raise RequestError(f"unknown key {unknown[0]!r}; there are {sorted(_PROMPT_KEYS)}")
        text, token_ids, salt = (
            prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt")
        )
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestError(f"cache_salt must be a string that is not empty, got {salt!r}")
        if token_ids is not None:
            return text, _check_ids(token_ids), salt
        if not isinstance(text, str):
            raise RequestError("it has neither a prompt text nor prompt_token_ids")
        return text, self._encode(text), salt

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("a text needs a tokenizer, and this engine has none; give token ids")
        try:
            return list(self._tokenizer.encode(text))
        except TypeError:
            raise RequestError(f"its text is no valid Unicode: {text!r:.80}") from None

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("it is empty; give at least one token")
        vocab_size = self._model.vocab_size
        if bad := [token for token in token_ids if not 0 <= token < vocab_size]:
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary, 0 to {vocab_size - 1}"
            )

    def _max_len(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens at which a sample ends, if it can hold any output at all."""
        limit = self._max_model_len
        if prompt_len >= limit:
            raise RequestTooLongError(
                f"it has {prompt_len} tokens, and with one of output exceeds "
                f"max_model_len={limit}; shorten it to at most {limit - 1}, or start the engine "
                "with a larger max_model_len"
            )
        max_len = min(limit, prompt_len + (params.max_tokens or limit))
        # The last token's KV is never needed.
        needed = min(-(-(max_len - 1) // self._config.cache.block_size), self._most_held)
        if needed > self._num_blocks - 1:
            pool_tokens = (self._num_blocks - 1) * self._config.cache.block_size
            room = pool_tokens + 1 - prompt_len
            way = f"lower max_tokens to at most {room}" if room > 0 else "shorten the prompt"
            raise RequestTooLongError(
                f"{prompt_len} prompt tokens and up to {max_len - prompt_len} of output need more "
                f"than the {pool_tokens} tokens of the block pool; {way}, or start the "
                "engine with a larger pool"
            )
        return max_len

    # --- out ---

    def output_of(self, request: Request) -> RequestOutput:
        """What a user gets of a request, whatever state it is in."""
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion_of(request, sample) for sample in request.samples],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _completion_of(self, request: Request, sample: Sample) -> CompletionOutput:
        has_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=sample.index,
            text=self._text_of(request, sample),
            token_ids=list(sample.output_ids),
            cumulative_logprob=sum(sample.logprobs) if has_logprobs else None,
            logprobs=self._logprobs_of(sample.output_ids, sample.logprobs)
            if has_logprobs
            else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

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
            logprobs=self._logprobs_of(output_ids, logprobs),
            text=self._decode(tokens, skip_special_tokens=False) if self._tokenizer else None,
            finish_reason="stop" if is_ended else group.finish_reason,
        )

    def _logprobs_of(
        self, output_ids: Sequence[int], logprobs: Sequence[float]
    ) -> list[dict[int, Logprob]]:
        pairs = zip(output_ids, logprobs, strict=True)
        return [{t: Logprob(value, None, self._decode([t], False))} for t, value in pairs]

    def _text_of(self, request: Request, sample: Sample) -> str:
        """The output's text as it continues the prompt's: what decoding both adds to the prompt's,
        where an unfinished character at the prompt's end does not count as the prompt's."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return ""
        # The token that stopped a sample is no part of its text.
        end = len(sample.output_ids) - (sample.finish_reason == "stop")
        tail = request.prompt_token_ids[-_PROMPT_TAIL:]
        before = self._decode(tail, params.skip_special_tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        whole = self._decode(tail + sample.output_ids[:end], params.skip_special_tokens)
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a text, token ids, or a list of them, got {prompts!r}")
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(map(_is_integer, listed)) else listed


def _check_ids(token_ids: Any) -> list[int]:
    listed = list(token_ids) if isinstance(token_ids, Iterable) else None
    if listed is None or not all(map(_is_integer, listed)):
        raise RequestError(f"token ids must be a list of integers, got {token_ids!r:.80}")
    return [operator.index(token) for token in listed]


def _is_integer(value: Any) -> bool:
    """Python's, NumPy's or JAX's; True and False are none."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
