"""From a conversation to a prompt: messages checked, brought into the shape that the model's chat
template takes, rendered and tokenized with exactly one beginning-of-sequence token."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jinja2
from jinja2 import nodes

from jpaged.errors import RequestError

Message = Mapping[str, Any]
Messages = Sequence[Message]
ContentFormat = Literal["auto", "string", "openai"]

_SHAPE = '[{"role": "user", "content": "Hello"}]'
# What belongs to the tokenizer's method and not to the template.
_NOT_FOR_TEMPLATES = {"conversation", "tokenize", "return_dict", "return_tensors"}
# The tag of transformers around an assistant's words, which plain Jinja does not know.
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def list_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or a list of them, as a list. Raises RequestError for any other shape."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _wrong_shape(messages)
    is_message = [isinstance(message, Mapping) for message in messages]
    if any(is_message):
        if not all(is_message):
            raise _wrong_shape(messages[is_message.index(False)])
        return [cast("Messages", messages)]
    conversations = cast("Sequence[Messages]", messages)
    for conversation in conversations:
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise _wrong_shape(conversation)
    return list(conversations)


def _wrong_shape(value: Any) -> RequestError:
    return RequestError(
        f"messages must be a conversation, such as {_SHAPE}, or a list of conversations; "
        f"got {value!r:.80}"
    )


def render_chat(
    tokenizer: Any,
    messages: Messages,
    *,
    chat_template: str | Path | None = None,
    chat_template_content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The prompt of one conversation, as `LLM.generate` takes it.

    chat_template: Jinja text, or the path of a file with it; None takes the tokenizer's.
    chat_template_content_format: how the template takes a message's content: as a "string", or as
        "openai"'s list of parts; "auto" looks which of them the template reads.
    add_generation_prompt: end with the header of an answer. continue_final_message: leave the last
        message open, to be gone on with; the two exclude each other.
    chat_template_kwargs: further variables of the template; they win over the arguments above.

    Raises RequestError if there is no template, or it does not take the messages.
    """
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and this engine has none")
    options = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        "chat_template": chat_template,
        **(chat_template_kwargs or {}),
    }
    _check_options(options)
    options["chat_template"] = template = _template_text(tokenizer, options)
    content_format = _content_format(chat_template_content_format, template)
    checked = [_message(place, message, content_format) for place, message in enumerate(messages)]
    if not checked:
        raise RequestError(f"the conversation is empty; give messages, such as {_SHAPE}")
    try:
        text = tokenizer.apply_chat_template(checked, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RequestError(f"the chat template does not take these messages: {error}") from error
    return {"prompt": text, "prompt_token_ids": _encode(tokenizer, text)}


def _check_options(options: Mapping[str, Any]) -> None:
    if wrong := sorted(_NOT_FOR_TEMPLATES & set(options)):
        raise RequestError(f"chat_template_kwargs can not set {wrong[0]!r}: it is no variable")
    if options["continue_final_message"] and options["add_generation_prompt"]:
        raise RequestError(
            "continue_final_message=True needs add_generation_prompt=False: the last message is "
            "either gone on with, or answered"
        )


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a rendered template. One that writes no beginning-of-sequence token gets it,
    if the tokenizer begins texts with it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:1] != [bos] and list(tokenizer.encode(""))[:1] == [bos]:
        return [bos, *ids]
    return ids


# --- the template ---


def _template_text(tokenizer: Any, options: Mapping[str, Any]) -> str:
    given = options["chat_template"]
    if isinstance(given, Path) or (isinstance(given, str) and "{" not in given):
        given = _named_template(tokenizer, str(given)) or _read_template(Path(given))
    own = getattr(tokenizer, "chat_template", None)
    if given is None and isinstance(own, Mapping):  # several, told apart by what they are for
        return tokenizer.get_chat_template(None, tools=options["tools"])
    if not (template := given or own):
        raise RequestError(
            "the model has no chat template (a base model?); give chat_template=, or complete "
            "plain prompts"
        )
    return template


def _named_template(tokenizer: Any, name: str) -> str | None:
    own = getattr(tokenizer, "chat_template", None)
    return own.get(name) if isinstance(own, Mapping) else None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"chat_template={str(path)!r:.80} is neither a Jinja template nor a file with one: "
            f"{error.strerror}"
        ) from None


def _content_format(wanted: str, template: str) -> str:
    if wanted not in ("auto", "string", "openai"):
        raise RequestError(
            f"chat_template_content_format must be auto, string or openai, got {wanted!r}"
        )
    if wanted != "auto":
        return wanted
    return "openai" if reads_parts(template) else "string"


def reads_parts(template: str) -> bool:
    """Whether a template loops over a message's content, and so takes it as a list of parts.

    As vLLM finds out: a loop over `message.content`, or over a name that was set to it.
    """
    try:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(_GENERATION_TAG.sub("", template))
    except jinja2.TemplateError:
        return False  # rendering will say what is wrong with it
    names = {"content"} | {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"})
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


# --- the messages ---


def _message(place: int, message: Any, content_format: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"message {place} must have a role, such as {_SHAPE[1:-1]}; got {message!r:.80}"
        )
    try:
        texts = list(_texts_of(message.get("content")))
        calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
    except RequestError as error:
        raise RequestError(f"message {place}: {error}") from None
    parts = [{"type": "text", "text": text} for text in texts]
    content = parts if content_format == "openai" else "\n".join(texts)
    return {**message, "content": content} | ({"tool_calls": calls} if calls else {})


def _texts_of(content: Any) -> Iterator[str]:
    """The texts of a content: one, none, or those of its parts."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"content must be a string or a list of parts, got {content!r:.80}")
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise RequestError(f"a part of type {part['type']!r} is no text; only text is read")
        if not isinstance(text, str):
            raise RequestError(
                f'a part must be a string or {{"type": "text", "text": ...}}, got {part!r:.80}'
            )
        yield text


def _tool_call(call: Any) -> Any:
    """With its arguments as the object that templates take; OpenAI sends them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise RequestError(f"arguments of a tool call are no JSON: {error}") from None
    return {**call, "function": {**cast("Mapping[str, Any]", function), "arguments": parsed}}
