"""What a user asks of one request: vLLM's names, defaults and limits, judged when it is set."""

import dataclasses
import enum
import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

from jpaged.errors import RequestError
from jpaged.judged_fields import (
    MAX_TOKEN_ID,
    JudgedFields,
    integer,
    optional,
    or_empty,
    real,
    record,
    refused,
    switch,
    texts,
    token_ids,
)
from jpaged.output_constraints import RepetitionDetectionParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 0.01
MAX_N = 16384
MAX_BEAM_WIDTH = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 100.0
MAX_COUNT = 2**31 - 1


class RequestOutputKind(enum.Enum):
    """What a stream's outputs hold: all so far, the news alone, or the end alone."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _temperature(name: str, value: Any) -> float:
    temperature = real(0.0, 2.0)(name, value)
    if temperature < GREEDY_TEMPERATURE:
        return 0.0
    if temperature < MIN_TEMPERATURE:
        logger.warning(
            "temperature=%s is raised to %s: below it, logits divided by it may overflow",
            temperature,
            MIN_TEMPERATURE,
        )
    return max(temperature, MIN_TEMPERATURE)


def _top_p(name: str, value: Any) -> float:
    top_p = real(0.0, 1.0)(name, value)
    if top_p == 0:
        raise RequestError("top_p must be above 0 and at most 1, got 0; 1 turns it off")
    return top_p


def _top_k(name: str, value: Any) -> int:
    return max(integer(-1, MAX_COUNT)(name, value), 0)


def _seed(name: str, value: Any) -> int | None:
    seed = integer(-(2**63), 2**64 - 1)(name, value)
    return None if seed == -1 else seed


def _num_logprobs(name: str, value: Any) -> int:
    return 1 if value is True else integer(-1, MAX_COUNT)(name, value)


def _ids_to_score(name: str, value: Any) -> tuple[int, ...] | None:
    ids = token_ids(name, value)
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise RequestError(
            f"{name} takes at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(ids)}; logprobs=-1 gives "
            "the whole vocabulary"
        )
    return ids or None


def _allowed_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = token_ids(name, value)
    if not ids:
        raise RequestError(f"{name} must not be empty; None allows all")
    return ids


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must map token ids to numbers, got {value!r:.80}")
    judge, biases = integer(0, MAX_TOKEN_ID), {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.strip().isdecimal() else key
        if isinstance(bias, bool) or not isinstance(bias, Real) or bias != bias:
            raise RequestError(f"{name} of token {key} must be a number, got {bias!r}")
        biases[judge(name, token)] = float(min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS))
    return biases or None


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        kinds = ", ".join(str(kind) for kind in RequestOutputKind)
        raise RequestError(f"{name} must be one of {kinds}, got {value!r}")
    return value


def _processor_params(name: str, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError(
            f"{name} must map names of processors, which are registered when the engine is made, "
            f"to their parameters, got {value!r:.80}"
        )
    return dict(value) or None


def _repetition(name: str, value: Any) -> Any:
    detection: Any = record(RepetitionDetectionParams)(name, value)
    return detection if detection.max_pattern_size else None


def _thinking_budget(name: str, value: Any) -> None:
    if not (isinstance(value, int) and value == -1):  # unlimited, as vLLM writes it
        refused(None, "there is no parser that tells thinking from answering")(name, value)


@dataclasses.dataclass(kw_only=True)
class SamplingParams(JudgedFields):
    """How to sample one request and when to stop it.

    Each field's meaning, limits and what differs from vLLM: docs/sampling_params.md. A value is
    judged when it is given and when it is assigned; fields are judged together when the record is
    made, and again when a request is made of it. Assigning later changes no request.

    Raises RequestError, naming the field, its value and its limit.
    """

    elsewhere: ClassVar = {
        "best_of": "draw n samples and choose by their cumulative_logprob",
        "do_sample": "temperature=0 is greedy",
        "early_stopping": "it belongs to BeamSearchParams, for LLM.beam_search",
        "guided_decoding": "it is called structured_outputs",
        "length_penalty": "it belongs to BeamSearchParams, for LLM.beam_search",
        "max_new_tokens": "it is called max_tokens",
        "num_return_sequences": "it is called n",
        "stop_sequences": "it is called stop",
        "truncate_prompt_tokens": "shorten the prompt's token ids",
        "use_beam_search": "call LLM.beam_search with BeamSearchParams",
    }

    n: Annotated[int, integer(1, MAX_N)] = 1
    temperature: Annotated[float, _temperature] = 1.0
    top_p: Annotated[float, _top_p] = 1.0
    top_k: Annotated[int, _top_k] = 0
    min_p: Annotated[float, real(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, optional(_seed)] = None

    presence_penalty: Annotated[float, real(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, real(-2.0, 2.0)] = 0.0
    # Beyond these limits float32 logits overflow.
    repetition_penalty: Annotated[float, real(1e-6, 1e6)] = 1.0
    logit_bias: Annotated[Mapping[int, float] | None, optional(_logit_bias)] = None
    allowed_token_ids: Annotated[Sequence[int] | None, optional(_allowed_ids)] = None
    bad_words: Annotated[Sequence[str] | None, or_empty(texts)] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, optional(record(StructuredOutputsParams))
    ] = None
    logits_processors: Annotated[Mapping[str, Any] | None, optional(_processor_params)] = None

    max_tokens: Annotated[int | None, optional(integer(1, MAX_COUNT))] = 16
    min_tokens: Annotated[int, integer(0, MAX_COUNT)] = 0
    stop: Annotated[str | Sequence[str] | None, or_empty(texts)] = None
    stop_token_ids: Annotated[Sequence[int] | None, or_empty(token_ids)] = None
    ignore_eos: Annotated[bool, switch] = False
    include_stop_str_in_output: Annotated[bool, switch] = False
    repetition_detection: Annotated[RepetitionDetectionParams | None, optional(_repetition)] = None

    logprobs: Annotated[int | None, optional(_num_logprobs)] = None
    prompt_logprobs: Annotated[int | None, optional(_num_logprobs)] = None
    logprob_token_ids: Annotated[Sequence[int] | None, optional(_ids_to_score)] = None
    flat_logprobs: Annotated[bool, switch] = False

    detokenize: Annotated[bool, switch] = True
    skip_special_tokens: Annotated[bool, switch] = True
    spaces_between_special_tokens: Annotated[bool, switch] = True
    output_kind: Annotated[RequestOutputKind, _output_kind] = RequestOutputKind.CUMULATIVE
    stream_interval: Annotated[int | None, optional(integer(1, MAX_COUNT))] = None
    skip_reading_prefix_cache: Annotated[bool | None, optional(switch)] = None

    extra_args: Annotated[
        Any, refused(None, "give logits_processors= the parameters of your own processors")
    ] = None
    thinking_token_budget: Annotated[int | None, _thinking_budget] = None
    skip_clone: Annotated[bool, refused(False, "each request takes its own copy")] = False
    routed_experts_prompt_start: Annotated[int, refused(0, "routed experts are not returned")] = 0

    def __post_init__(self) -> None:
        """Rules between fields, and greedy's: nothing to truncate, nothing to draw twice."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={list(self.stop)} needs detokenize=True: stop strings are sought in the text"
            )
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n != 1:
                raise RequestError(
                    f"n must be 1 when greedy (temperature={self.temperature}), got n={self.n}; "
                    "raise the temperature to draw different samples"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, drawn by no chance."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_rules(self) -> bool:
        """Whether logits are changed or scored beyond temperature and truncation."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(
            self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.structured_outputs
            or self.logits_processors
            or self.logprob_token_ids
        )


def _early_stopping(name: str, value: Any) -> Any:
    if not (value is None or isinstance(value, bool) or value == "never"):
        raise RequestError(
            f"{name} must be None (vLLM's rule), True, False or 'never' (Hugging Face's), "
            f"got {value!r}"
        )
    return value


_NO_BEAMS = "a beam search has no use for it yet; leave it out"


@dataclasses.dataclass(kw_only=True)
class BeamSearchParams(JudgedFields):
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

    elsewhere: ClassVar = {
        "n": "a search returns beam_width sequences",
        "num_beams": "it is called beam_width",
        "max_new_tokens": "it is called max_tokens",
        "stop": "a search ends at the model's own end-of-sequence tokens",
    }

    beam_width: Annotated[int, integer(1, MAX_BEAM_WIDTH)]
    max_tokens: Annotated[int, integer(1, MAX_COUNT)]
    ignore_eos: Annotated[bool, switch] = False
    temperature: Annotated[float, real(0.0, 2.0)] = 0.0
    length_penalty: Annotated[float, real(-100.0, 100.0)] = 1.0
    early_stopping: Annotated[bool | Literal["never"] | None, _early_stopping] = None
    include_stop_str_in_output: Annotated[bool, refused(False, _NO_BEAMS)] = False
    structured_outputs: Annotated[Any, refused(None, _NO_BEAMS)] = None
