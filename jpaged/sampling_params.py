"""What a user asks of one request: vLLM's names, defaults and limits, judged when it is made."""

import dataclasses
import logging
import numbers
from collections.abc import Sequence
from typing import Any, Literal

from jpaged.errors import RequestError

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 0.01
MAX_N = 16384
MAX_BEAM_WIDTH = 1024

NOT_SUPPORTED_YET: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": None,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "include_stop_str_in_output": False,
    "stream_interval": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "extra_args": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}
"""Fields that so far take only the value that asks for nothing."""

_SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request and when to stop it.

    n: how many samples of the prompt; 1 when greedy.
    temperature: 0 to 2. Below 1e-5 is greedy and resets top_p, top_k and min_p; otherwise a value
        below 0.01 is raised to 0.01.
    top_p, top_k, min_p: which tokens may be drawn; 1, 0 (or -1) and 0 mean all.
    seed: 64 bits, negative ones modulo 2**64; None or -1 takes the engine's.
    max_tokens: output tokens; None means up to the context length.
    stop_token_ids: tokens that end the output. ignore_eos: do not stop at the end of sequence.
    logprobs: None, or 0 for the log-probability of each sampled token.
    skip_reading_prefix_cache: compute the whole prompt anew; its blocks serve others all the same.
        None means False, and True where prompt_logprobs are asked for.

    Raises RequestError, naming the field, its value and its limit. vLLM's other fields are taken at
    their default alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    include_stop_str_in_output: bool = False
    stream_interval: int | None = None
    structured_outputs: Any = None
    logit_bias: Any = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Any = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        self._refuse_what_is_missing()
        self._judge()
        self._normalize()
        if self.is_greedy and self.n != 1:
            raise RequestError(
                f"n must be 1 when greedy (temperature={self.temperature}), got n={self.n}; "
                "raise the temperature to draw different samples"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, drawn by no chance."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may take the place of computing the prompt."""
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None

    def _refuse_what_is_missing(self) -> None:
        for name, neutral in NOT_SUPPORTED_YET.items():
            value = getattr(self, name)
            is_empty = neutral is None and value in ("", [], (), {})
            if value != neutral and not is_empty:
                raise RequestError(f"not supported yet: {name} (got {value!r}); leave it out")

    def _judge(self) -> None:
        for name in _SWITCHES:
            _check_switch(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            _check_switch("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        _check_integer("n", self.n, 1, MAX_N)
        _check_real("temperature", self.temperature, 0.0, 2.0)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0; 1 turns it off")
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, -1, 2**31 - 1)
            if self.logprobs != 0:
                raise RequestError(
                    f"not supported yet: logprobs={self.logprobs}; 0 gives the sampled token's"
                )
        if isinstance(self.stop_token_ids, str) or not isinstance(
            self.stop_token_ids, Sequence | None
        ):
            raise RequestError(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}"
            )
        for token_id in self.stop_token_ids or ():
            _check_integer("stop_token_ids", token_id, 0, 2**31 - 1)

    def _normalize(self) -> None:
        """One spelling for each meaning: what the engine reads needs no second look."""
        # NumPy's integers overflow where Python's do not.
        integers = {name: getattr(self, name) for name in ("n", "top_k", "seed", "max_tokens")}
        changes: dict[str, Any] = {k: int(v) for k, v in integers.items() if v is not None}
        changes["stop_token_ids"] = tuple(map(int, self.stop_token_ids or ()))
        if self.seed == -1:
            changes["seed"] = None
        if self.top_k == -1:
            changes["top_k"] = 0
        if self.is_greedy:
            changes.update(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature=%s is raised to %s: below it, logits divided by it may overflow",
                self.temperature,
                MIN_TEMPERATURE,
            )
            changes["temperature"] = MIN_TEMPERATURE
        for name, value in changes.items():
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search for a prompt's likeliest continuations.

    beam_width: sequences kept at each step, and returned. max_tokens: output tokens at most.
    ignore_eos: do not stop at the end of sequence.
    length_penalty: scores are cumulative log-probability / length ** length_penalty.
    early_stopping: None searches as vLLM does: the length counts the prompt too, and nothing ends a
        search but its last token. False, True and "never" search as Hugging Face's `generate` does
        with that value: the length counts generated tokens, and W finished sequences may end it.
    temperature: 0 to 2, as vLLM takes it; there and here beams are ranked by the model's own
        log-probabilities, whatever it is.
    include_stop_str_in_output, structured_outputs: taken at their default alone.

    Raises RequestError, naming the field, its value and its limit.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_switch("ignore_eos", self.ignore_eos)
        _check_real("temperature", self.temperature, 0.0, 2.0)
        _check_real("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (None, True, False, "never"):
            raise RequestError(
                "early_stopping must be None (vLLM's rule), True, False or 'never' (Hugging "
                f"Face's), got {self.early_stopping!r}"
            )
        for name, neutral in (("include_stop_str_in_output", False), ("structured_outputs", None)):
            if getattr(self, name) != neutral:
                raise RequestError(
                    f"not supported yet: {name} (got {getattr(self, name)!r}); leave it out"
                )
        for name in ("beam_width", "max_tokens"):  # NumPy's integers overflow
            object.__setattr__(self, name, int(getattr(self, name)))


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}")


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be an integer, got {value!r}")
    if not low <= int(value) <= high:
        raise RequestError(f"{name} must be from {low} to {high}, got {value}")


def _check_real(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if not value <= high or value < low:  # NaN is not
        raise RequestError(f"{name} must be from {low:g} to {high:g}, got {value}")
