"""The front desk: judges prompts and parameters before any device work."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.logits_rules import LogitsRules
from jpaged.engine.beam_group import make_group
from jpaged.engine.capacity import max_blocks_per_request
from jpaged.engine.defaults import Defaults
from jpaged.engine.output_text import OutputText
from jpaged.engine.request import Request, cache_root, derived_seed
from jpaged.engine.rules import RuleMaker, rule_sizes
from jpaged.engine.structured import Grammar, GrammarCompiler
from jpaged.errors import RequestError, RequestTooLongError
from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class Intake:
    """Turns prompts into requests that the engine can serve.

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
        sizes = rule_sizes(config, model.vocab_size)
        self._rules = RuleMaker(sizes, config.logits_processors, tokenizer)
        self._grammars = GrammarCompiler(tokenizer, model.vocab_size, self._eos_ids)

    def accept(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Requests for the prompts, in their order. Raises RequestError for the first bad one."""
        listed = _list_prompts(prompts)
        params = self._params_for(listed, sampling_params)
        return self._accept_all(self._accept_one, listed, params)

    def take_ordinal(self) -> int:
        """Numbers a request for `accept_stream`, so that requests which are judged side by side
        are told apart, and numbered as they came."""
        self._num_requests += 1
        return self._num_requests - 1

    def own_params(self, params: SamplingParams | None) -> SamplingParams:
        """A copy of the parameters, or of the model's defaults. Raises RequestError."""
        return self._params_for([""], params)[0]

    def accept_stream(
        self, prompt: Prompt, params: SamplingParams, ordinal: int, request_id: str
    ) -> Request:
        """A request whose outputs are told while they grow. Keeps the parameters. Raises
        RequestError. Several threads may call this at once, each with an ordinal of its own."""
        is_told = params.output_kind is not RequestOutputKind.FINAL_ONLY
        request = self._accept_one(prompt, params, ordinal, is_told=is_told)
        request.request_id = request_id
        return request

    def accept_beams(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[Request]:
        """Beam searches for the prompts, in their order. Raises RequestError for the first bad
        one."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}")
        listed = _list_prompts(prompts)
        return self._accept_all(self._accept_beam, listed, [params] * len(listed))

    def accept_scores(
        self, prompts: Prompt | Sequence[Prompt], continuations: Sequence[str | Sequence[int]]
    ) -> list[Request]:
        """Requests to score continuations of prompts, one each. Raises RequestError for the first
        bad one."""
        listed = _list_prompts(prompts)
        if isinstance(continuations, str) or not isinstance(continuations, Iterable):
            raise RequestError(f"continuations must be a list, got {continuations!r:.80}")
        others = list(continuations)
        if len(others) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts came with {len(others)} continuations; give one each"
            )
        return self._accept_all(self._accept_score, listed, others)

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

    def _accept_one(
        self, prompt: Prompt, params: SamplingParams, ordinal: int, *, is_told: bool = False
    ) -> Request:
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_tokens(token_ids)
        max_len = self._max_len(len(token_ids), params)
        stop_ids, held_ids = self._stop_ids(params)
        seed = params.seed
        return Request(
            request_id=str(ordinal),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            max_len=max_len,
            stop_ids=stop_ids,
            eos_id=self._eos_ids[0] if self._eos_ids and not params.ignore_eos else -1,
            seed=derived_seed(self._config.seed, ordinal) if seed is None else seed % 2**64,
            root=self._root(salt, len(token_ids)),
            rules=self._make_rules(params, held_ids),
            grammar=self._grammar(params),
            make_text=self._make_text(token_ids, params, is_told=is_told),
            num_top=self._num_top(params),
            num_prompt_top=self._width("prompt_logprobs", params.prompt_logprobs),
        )

    def _stop_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that end an output besides the first end of sequence, and those that min_tokens
        holds back: all of them, heeded or not."""
        own, eos_ids = dict.fromkeys(params.stop_token_ids or ()), dict.fromkeys(self._eos_ids)
        stop_ids = own if params.ignore_eos else own | dict.fromkeys(self._eos_ids[1:])
        limit = self._config.max_stop_ids
        if (number := len(own | dict.fromkeys(self._eos_ids[1:]))) > limit:
            raise RequestError(
                f"{number} stop ids, the model's own ends counted, exceed max_stop_ids={limit}; "
                "start the engine with more"
            )
        return tuple(stop_ids), tuple(eos_ids | own)

    def _make_rules(self, params: SamplingParams, held_ids: Sequence[int]) -> LogitsRules | None:
        if not params.has_rules:
            return None
        # An end of sequence would end the grammar's text, which ignore_eos wants to go on.
        is_barred = params.ignore_eos and params.structured_outputs is not None
        barred = set(self._eos_ids) - set(params.stop_token_ids or ()) if is_barred else ()
        return self._rules.make(params, held_ids, sorted(barred))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        spec = params.structured_outputs
        return None if spec is None else self._grammars.compile(spec)

    def _make_text(
        self, prompt_token_ids: list[int], params: SamplingParams, *, is_told: bool
    ) -> Callable[[], OutputText] | None:
        """What looks at each output's text while it grows, if there are strings to stop at, or a
        reader who is told of it meanwhile."""
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none")
        has_reader = is_told and params.detokenize and self._tokenizer is not None
        if not (params.stop or has_reader):
            return None
        return functools.partial(OutputText, self._tokenizer, prompt_token_ids, params)

    def _num_top(self, params: SamplingParams) -> int | None:
        if params.logprobs is None and params.logprob_token_ids:
            return 0
        return self._width("logprobs", params.logprobs)

    def _width(self, name: str, number: int | None) -> int | None:
        """How many likeliest ids are asked for, at most the vocabulary."""
        vocab_size, limit = self._model.vocab_size, self._config.max_logprobs
        width = vocab_size if number == -1 else number
        if width is not None and width > (vocab_size if limit == -1 else limit):
            raise RequestError(
                f"{name}={number} exceeds max_logprobs={limit}; start the engine with more, -1 for "
                "the whole vocabulary"
            )
        return None if width is None else min(width, vocab_size)

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

    def _accept_score(
        self, prompt: Prompt, continuation: str | Sequence[int], ordinal: int
    ) -> Request:
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_tokens(token_ids)
        if isinstance(continuation, str):
            scored = self._encode(continuation, add_special_tokens=False)
        else:
            scored = _check_ids(continuation)
        if not scored:
            raise RequestError("its continuation is empty; give at least one token")
        self._check_tokens(scored)
        length = len(token_ids) + len(scored)
        if length > self._max_model_len:
            raise RequestTooLongError(
                f"{len(token_ids)} prompt tokens and {len(scored)} to score exceed "
                f"max_model_len={self._max_model_len}; shorten them, or start the engine with a "
                "larger max_model_len"
            )
        self._check_pool(len(token_ids), length, is_scoring=True)
        return Request(
            request_id=str(ordinal),
            prompt=text,
            prompt_token_ids=token_ids + scored,
            params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            max_len=length,
            stop_ids=(),
            eos_id=-1,
            seed=0,
            root=self._root(salt, length),
            num_prompt_top=0,
            score_from=len(token_ids),
            is_scoring=True,
        )

    def _root(self, salt: str | None, prompt_len: int) -> tuple[int, int, int, int]:
        rope_start = self._model.dynamic_rope_start
        has_own_rope = rope_start is not None and prompt_len > rope_start
        return cache_root(cache_salt=salt, rope_len=prompt_len if has_own_rope else 0)

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

    def _encode(self, text: str, **options: Any) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("a text needs a tokenizer, and this engine has none; give token ids")
        try:
            return list(self._tokenizer.encode(text, **options))
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
        self._check_pool(prompt_len, max_len)
        return max_len

    def _check_pool(self, prompt_len: int, max_len: int, *, is_scoring: bool = False) -> None:
        # The last token's KV is never needed.
        needed = min(-(-(max_len - 1) // self._config.cache.block_size), self._most_held)
        if needed > self._num_blocks - 1:
            pool_tokens = (self._num_blocks - 1) * self._config.cache.block_size
            room = pool_tokens + 1 - prompt_len
            way = f"lower max_tokens to at most {room}" if room > 0 else "shorten the prompt"
            number = max_len - prompt_len
            what = f"{number} to score" if is_scoring else f"up to {number} of output"
            raise RequestTooLongError(
                f"{prompt_len} prompt tokens and {what} need more "
                f"than the {pool_tokens} tokens of the block pool; "
                f"{'shorten them' if is_scoring else way}, or start the engine with a larger pool"
            )


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
