"""Conversations and templates: what is taken, what text comes out, how it begins."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jpaged.engine.chat import list_conversations, reads_parts, render_chat
from jpaged.errors import RequestError
from jpaged.loading import load_tokenizer
from tests.loading.checkpoints import FIXTURES, LLAMA

STRINGS = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message.content }}"
    "</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for m in messages %}{% set content = m['content'] %}[{{ m.role }}]"
    "{% for part in content %}({{ part['text'] }}){% endfor %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "Hi"}]


def make_tokenizer(template: Any = STRINGS, *, adds_bos: bool = True) -> Any:
    """Characters are tokens; texts begin with <s> if `adds_bos`."""
    specials = {"<s>": 0, "</s>": 1, "<unk>": 2}
    letters = {chr(code): code for code in range(32, 127)}
    model: Any = models.WordLevel(specials | letters, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


def text_of(messages: Any, template: Any = STRINGS, **options: Any) -> str:
    return render_chat(make_tokenizer(template), messages, **options)["prompt"]


# --- the shape of messages ---


def test_one_conversation_or_many():
    assert list_conversations(HELLO) == [HELLO]
    assert list_conversations(tuple(HELLO)) == [tuple(HELLO)]
    assert list_conversations([HELLO, HELLO]) == [HELLO, HELLO]
    assert list_conversations([]) == []


@pytest.mark.parametrize("wrong", ["Hi", HELLO[0], None, 3, ["Hi"], [HELLO[0], "Hi"], [HELLO, "a"]])
def test_other_shapes_are_shown_the_right_one(wrong):
    with pytest.raises(RequestError, match=r'such as \[{"role": "user", "content": "Hello"}\]'):
        list_conversations(wrong)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "the conversation is empty"),
        ([{"content": "Hi"}], "message 0 must have a role"),
        ([*HELLO, {"role": 3, "content": "Hi"}], "message 1 must have a role"),
        ([{"role": "user", "content": 3}], "message 0: content must be a string or a list"),
        ([{"role": "user", "content": {"text": "Hi"}}], "content must be a string or a list"),
        ([{"role": "user", "content": [3]}], "a part must be a string or"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part must be a string or"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "a part of type 'image_url' is no text",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments of a tool call are no JSON",
        ),
    ],
)
def test_wrong_messages_are_named(messages, said):
    with pytest.raises(RequestError) as caught:
        text_of(messages)
    assert said in str(caught.value)


# --- the template's ways ---


def test_an_answer_is_begun_or_not():
    assert text_of(HELLO) == "<s>[user]Hi</s>[assistant]"
    assert text_of(HELLO, add_generation_prompt=False) == "<s>[user]Hi</s>"


def test_a_last_message_is_gone_on_with():
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    going_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert text_of(begun, **going_on) == "<s>[user]Hi</s>[assistant]Well"
    for template in (STRINGS, PARTS):
        with pytest.raises(RequestError, match="needs add_generation_prompt=False"):
            text_of(begun, template, continue_final_message=True)
    with pytest.raises(RequestError, match="does not take these messages"):
        text_of(begun, "nothing of {{ 'them' }}", **going_on)


def test_templates_take_strings_or_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert text_of(parts) == "<s>[user]a\nb</s>[assistant]"
    assert text_of(parts, PARTS) == "<s>[user](a)(b)"
    assert text_of(HELLO, PARTS) == "<s>[user](Hi)"
    assert text_of(HELLO, PARTS, chat_template_content_format="string").count("()") == 2
    shown = text_of(HELLO, STRINGS, chat_template_content_format="openai")
    assert "[user][{'type': 'text', 'text': 'Hi'}]" in shown
    with pytest.raises(RequestError, match="must be auto, string or openai, got 'list'"):
        text_of(HELLO, chat_template_content_format="list")


def test_a_message_may_have_no_content():
    nothing = [{"role": "user"}, {"role": "assistant", "content": None}]
    assert text_of(nothing) == "<s>[user]</s>[assistant]</s>[assistant]"
    assert text_of(nothing, PARTS) == "<s>[user][assistant]"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (STRINGS, False),
        (PARTS, True),
        ("{% for m in messages %}{% for p in m.content|list %}{% endfor %}{% endfor %}", True),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        (
            "{% generation %}{% for p in m.content %}{% break %}{% endfor %}{%- endgeneration %}",
            True,
        ),
        ("{% for", False),
    ],
)
def test_whether_a_template_reads_parts(template, answer):
    assert reads_parts(template) == answer


def test_tools_and_variables_reach_the_template():
    template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{{ mood }}"
        "{% for m in messages %}{% for call in m.tool_calls %}"
        "{{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = text_of(messages, template, tools=tools, chat_template_kwargs={"mood": "!"})
    assert shown == "<weather>!weather=Oslo"
    assert text_of(HELLO, template) == ""
    assert call["function"]["arguments"] == '{"city": "Oslo"}'  # the caller's own stays
    bare = text_of(HELLO, chat_template_kwargs={"add_generation_prompt": False})
    assert bare == "<s>[user]Hi</s>"
    with pytest.raises(RequestError, match="can not set 'tokenize'"):
        text_of(HELLO, chat_template_kwargs={"tokenize": True})


def test_where_a_template_comes_from(tmp_path):
    (tmp_path / "mine.jinja").write_text("file of {{ messages|length }}")
    named = {"default": "plain {{ 1 }}", "tool_use": "with tools"}
    for given in (tmp_path / "mine.jinja", str(tmp_path / "mine.jinja")):
        assert text_of(HELLO, chat_template=given) == "file of 1"
    assert text_of(HELLO, chat_template="text {{ 1 }}") == "text 1"
    assert text_of(HELLO, named) == "plain 1"
    assert text_of(HELLO, named, tools=[{"type": "function", "function": {}}]) == "with tools"
    assert text_of(HELLO, named, chat_template="tool_use") == "with tools"
    with pytest.raises(RequestError, match="neither a Jinja template nor a file with one"):
        text_of(HELLO, chat_template="no_such_file")
    with pytest.raises(RequestError, match="the model has no chat template"):
        text_of(HELLO, None)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{%"]
)
def test_what_a_template_refuses_is_told(template):
    with pytest.raises(RequestError, match="does not take these messages"):
        text_of(HELLO, "{{ bos_token }}" + template)


def test_ids_equal_those_recorded_from_transformers():
    chat = json.loads((FIXTURES / "tokenizer" / "expected.json").read_text())["chat"]
    prompt = render_chat(load_tokenizer(LLAMA), chat["messages"])
    assert (prompt["prompt"], prompt["prompt_token_ids"]) == (chat["text"], chat["ids"])


# --- how a prompt begins ---


@pytest.mark.parametrize("template", [STRINGS, STRINGS.removeprefix("{{ bos_token }}")])
def test_a_prompt_begins_with_one_bos(template):
    prompt = render_chat(make_tokenizer(template), HELLO)
    assert prompt["prompt_token_ids"][0] == 0
    assert prompt["prompt_token_ids"].count(0) == 1
    assert prompt["prompt_token_ids"][1] == ord("[")


def test_a_tokenizer_that_adds_no_bos_leaves_it_to_the_template():
    for template, number in ((STRINGS, 1), (STRINGS.removeprefix("{{ bos_token }}"), 0)):
        prompt = render_chat(make_tokenizer(template, adds_bos=False), HELLO)
        assert prompt["prompt_token_ids"].count(0) == number
