"""`LLM`: vLLM's offline class. Prompts in, `RequestOutput`s out, in input order."""

import logging
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from jpaged import loading
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import compiled, weights
from jpaged.engine.chat import ContentFormat, Messages, list_conversations, render_chat
from jpaged.engine.defaults import read_defaults
from jpaged.engine.engine import Engine
from jpaged.engine.intake import Intake, Prompt
from jpaged.engine.output import BeamSearchOutput, RequestOutput, ScoredTokens
from jpaged.engine.reporter import Reporter
from jpaged.engine.request import Request
from jpaged.engine.serving import make_engine, resolve_model
from jpaged.engine.stats import EngineStats
from jpaged.engine.usage import Snapshot
from jpaged.errors import ConfigError, RequestError
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.typing import Params

logger = logging.getLogger(__name__)


class LLM:
    """A model ready to answer batches of prompts.

    model: a Hugging Face directory or GGUF file, or a `ModelConfig` (or Hugging Face config dict)
        together with `params`.
    params: the canonical tree of weights, for programs that own them. They are copied into the
        engine's own layout; `update_params` takes new ones.
    tokenizer: a path, or any object with transformers' interface. skip_tokenizer_init: none at all;
        prompts are token ids then, and outputs carry no text.
    generation_config: "auto" takes end-of-sequence ids and default sampling from the checkpoint,
        "vllm" takes the end-of-sequence ids alone, and a folder's generation_config.json is read in
        the place of the checkpoint's. override_generation_config: values that win over the file's,
        such as {"temperature": 0.5}.
    chat_template: for `chat`, in the place of the tokenizer's: Jinja text, or a file with it.
    options: the fields of `EngineConfig` and `CacheConfig`, flat.

    Raises ConfigError or CheckpointError before any weight is read where possible.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | Mapping[str, Any],
        *,
        params: Params | None = None,
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        chat_template: str | Path | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(**options)
        compiled.keep_programs(config.compilation_cache_dir)
        is_path = isinstance(model, str | Path)
        if is_path == (params is not None):
            raise ConfigError(
                "give a path, whose weights are loaded, or a ModelConfig with params=its weights; "
                f"got model={type(model).__name__} and params "
                f"{'too' if params is not None else '=None'}"
            )
        self._chat_template = chat_template
        self._tokenizer = None if skip_tokenizer_init else _load_tokenizer(tokenizer, model)
        defaults = read_defaults(
            model,
            self._tokenizer,
            resolve_model(model, needs_weights=config.load_format != "dummy").vocab_size,
            generation_config=generation_config,
            override=override_generation_config,
        )
        self._engine, self.model_config, self._dtype = make_engine(model, params, config)
        self._reporter = Reporter(self._tokenizer)
        self._intake = Intake(
            self.model_config,
            self._engine.config,
            self._engine.num_blocks,
            self._tokenizer,
            defaults,
        )
        if config.warm_up in ("before", "background"):
            self._engine.warm_up(config.warm_up)

    # --- generation ---

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all in one continuously batched run.

        prompts: text, token ids, or dicts with `prompt` or `prompt_token_ids` and an optional
            `cache_salt`; one or a list.
        sampling_params: one for all, or one each; None takes the model's defaults.

        Returns outputs in the order of the prompts. Raises RequestError, before any work, if one of
        the requests can not be served: then none is. An interrupt or error ends this call's
        requests and leaves the engine usable.
        """
        requests = self._intake.accept(prompts, sampling_params)
        self._serve(requests, use_tqdm=use_tqdm)
        return [self._reporter.output_of(request) for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts, `params.beam_width` for each, best first.

        Beams share the prompt's blocks and each other's; none computes a token twice. Searches run
        side by side as far as rows and blocks allow, and at most `concurrency_limit` of them; it
        changes no result. Raises as `generate` does.
        """
        is_number = isinstance(concurrency_limit, Integral) and concurrency_limit >= 1
        if concurrency_limit is not None and not is_number:
            raise RequestError(
                f"concurrency_limit must be a whole number from 1, got {concurrency_limit!r}"
            )
        requests = self._intake.accept_beams(prompts, params)
        size = concurrency_limit or max(len(requests), 1)
        for start in range(0, len(requests), size):
            self._serve(requests[start : start + size], use_tqdm=use_tqdm)
        return [self._reporter.beams_of(request) for request in requests]

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool = True,
    ) -> list[ScoredTokens]:
        """Log-probabilities of given tokens behind prompts; nothing is generated.

        continuations: text (encoded without special tokens) or token ids, one for each prompt.
        Cached prefixes are used as far as they hold no scored token's beginning. Raises as
        `generate` does, and RequestError for a request whose numbers went wrong.
        """
        requests = self._intake.accept_scores(prompts, continuations)
        self._serve(requests, use_tqdm=use_tqdm)
        for place, request in enumerate(requests):
            if request.samples[0].finish_reason == "error":
                raise RequestError(f"prompt {place}: the model gave NaN; check the weights")
        return [self._reporter.scores_of(request) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | Path | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template.

        The arguments are those of `preprocess_chat` and `generate`; errors too.
        """
        prompts = self.preprocess_chat(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def preprocess_chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        chat_template: str | Path | None = None,
        **options: Any,
    ) -> list[Prompt]:
        """The prompts that `chat` makes of one conversation or a list of them, for `generate`.

        messages: dicts with a `role` and a `content`, a string or a list of text parts. options:
            those of `chat.render_chat`.

        Raises RequestError, with the place of the conversation, if there is no chat template or it
        does not take the messages.
        """
        template, prompts = chat_template or self._chat_template, []
        for place, conversation in enumerate(list_conversations(messages)):
            try:
                prompt = render_chat(
                    self._tokenizer, conversation, chat_template=template, **options
                )
            except RequestError as error:
                refused = RequestError(f"conversation {place}: {error}")
                refused.prompt_index = place
                raise refused from error
            prompts.append(prompt)
        return prompts

    def _serve(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        try:
            for request in requests:
                self._engine.add(request)
            self._run(requests, use_tqdm=use_tqdm)
        except BaseException:
            # Wherever it struck, host and device start again from what the host knows.
            self._engine.abort_and_restart(requests)
            raise

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        started, num_output = time.perf_counter(), 0
        bar = tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm)
        with bar:
            while self._engine.has_unfinished:
                for request in self._engine.step():
                    if request.error is not None:
                        raise request.error
                    if not request.is_finished:
                        continue
                    num_output += sum(len(sample.output_ids) for sample in request.samples)
                    speed = num_output / (time.perf_counter() - started)
                    bar.set_postfix_str(f"output {speed:.1f} tokens/s", refresh=False)
                    bar.update()

    # --- everything else ---

    def get_tokenizer(self) -> Any:
        """The tokenizer, with transformers' interface. Raises RequestError if there is none."""
        if self._tokenizer is None:
            raise RequestError("this LLM has no tokenizer (skip_tokenizer_init=True)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes when no parameters are given; a copy, to change at will."""
        return self._intake.default_params.clone()

    def update_params(self, params: Params) -> None:
        """Takes new weights, a canonical tree of the same shapes. Compiles nothing, and nothing
        computed with the old weights is used again. Raises ConfigError if the tree differs, or
        the engine serves the numbers of a GGUF file (`quantization="gguf"`)."""
        serving = weights.take(params, self.model_config, self._engine.config, self._dtype)
        self._engine.update_params(serving)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests run."""
        return self._engine.reset_prefix_cache()

    @property
    def dtype(self) -> str:
        """The dtype of weights and activations; KV has it too, if `kv_cache_dtype` is auto."""
        return self._dtype

    def snapshot(self) -> Snapshot:
        """The engine now: who runs, how the block pool is used, and the counts so far."""
        return self._engine.snapshot()

    @property
    def stats(self) -> EngineStats:
        """The engine's counts."""
        return self._engine.stats

    @property
    def engine(self) -> Engine:
        """The engine below, for those who plan their own steps."""
        return self._engine

    @property
    def intake(self) -> Intake:
        """What makes the engine's requests of prompts."""
        return self._intake

    @property
    def reporter(self) -> Reporter:
        """What words the engine's results."""
        return self._reporter

    def close(self) -> None:
        """Frees weights and KV cache. Also at the end of `with LLM(...) as llm`."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _load_tokenizer(tokenizer: Any, model: Any) -> Any:
    """The given tokenizer, or that of a path; none for a model given as config and params."""
    if tokenizer is None:
        return loading.load_tokenizer(model) if isinstance(model, str | Path) else None
    return loading.load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
