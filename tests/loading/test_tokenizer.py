"""Tokenizers from a model's directory and from GGUF metadata, against recorded ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading import load_tokenizer
from jpaged.loading.gguf_tokenizer import build_tokenizer
from tests.loading.checkpoints import FIXTURES, LLAMA, close_writer, gguf_writer

EXPECTED = json.loads((FIXTURES / "tokenizer" / "expected.json").read_text())
MODELS = [LLAMA, FIXTURES / "formats" / "gguf_q4_1", FIXTURES / "formats" / "gguf_q4_k_m"]


@pytest.fixture(params=MODELS, ids=lambda path: path.name)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return load_tokenizer(request.param)


@pytest.mark.parametrize("sample", EXPECTED["samples"], ids=lambda sample: sample["text"][:12])
def test_ids_and_text_equal_the_recorded(tokenizer: Any, sample: dict[str, Any]):
    text, plain = sample["text"], sample["ids_no_special"]
    assert tokenizer(text)["input_ids"] == sample["ids"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == plain
    assert tokenizer.decode(plain) == sample["decoded"]
    assert (
        tokenizer.decode(sample["ids"], skip_special_tokens=True) == sample["decoded_skip_special"]
    )
    assert tokenizer.convert_ids_to_tokens(plain) == sample["tokens"]


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        *(("llama", name) for name in ("PreTrainedTokenizerFast", "TokenizersBackend")),
        *(("llama", name) for name in ("GPT2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast")),
        *(("qwen2", name) for name in ("Qwen2Tokenizer", "PreTrainedTokenizerFast")),
        ("qwen3", "Qwen2TokenizerFast"),
        ("gemma2", "GemmaTokenizer"),
        ("gemma3_text", "GemmaTokenizerFast"),
        ("mistral", "PreTrainedTokenizerFast"),
    ],
)
def test_the_class_is_that_of_auto_tokenizer(tmp_path: Path, model_type: str, named: str):
    """It is asked itself only where the choice is in doubt."""
    shutil.copytree(FIXTURES / "tokenizer", tmp_path, dirs_exist_ok=True)
    shutil.copy(LLAMA / "model.safetensors.index.json", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(expected)
    assert found.chat_template == expected.chat_template
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


def test_chat_template(tokenizer: Any):
    chat = EXPECTED["chat"]
    render = tokenizer.apply_chat_template
    text = render(chat["messages"], tokenize=False, add_generation_prompt=True)
    assert text == chat["text"]
    assert render(chat["messages"], tokenize=False) == chat["text_no_gen"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat["ids"]


def test_special_tokens(tokenizer: Any):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert {0, 1, 2, 3, 4} <= set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)


def test_spaces_between_special_tokens_change_nothing(tokenizer: Any):
    """As docs/sampling_params.md says of the field of that name."""
    ids = [1, 2, 1, *EXPECTED["samples"][0]["ids"], 2, 1]
    with_spaces, without = (
        tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        for spaces in (True, False)
    )
    assert with_spaces == without


def test_directory_without_a_tokenizer(tmp_path: Path):
    model = shutil.copytree(LLAMA, tmp_path / "model")
    for file in model.glob("*token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer: looked for tokenizer\.json"):
        load_tokenizer(model)


# ---- Kinds of GGUF tokenizers, by hand ----

LETTERS = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # printable, space, newline


def byte_level(pre: str, merges: list[str], **keys: Any) -> Any:
    tokens = ["<s>", "</s>", *LETTERS, *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return build_tokenizer(metadata | keys)


DIGITS = ["1 2", "12 3", "\u0120 \u0120", "\u0120\u0120 \u0120", "\u0120 1"]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["a", "ĠĠ", "Ġ1", "2", "3", "4"]),  # all digits in one word, its space before it
        ("smollm", ["a", "ĠĠĠ", "1", "2", "3", "4"]),  # each digit a word
        ("llama-bpe", ["<s>", "a", "ĠĠ", "Ġ", "123", "4"]),  # digits by threes
        ("qwen2", ["a", "ĠĠ", "Ġ", "1", "2", "3", "4"]),
        ("tekken", ["a", "ĠĠ", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_rules_of_splitting(pre: str, tokens: list[str]):
    # "Ġ1" comes after "1 2", so that GPT-2's word " 1234" shows which merge was possible.
    merges = DIGITS if pre != "gpt-2" else [DIGITS[-1], *DIGITS[:-1]]
    assert byte_level(pre, merges).encode("a   1234").tokens == tokens


def test_a_whole_word_is_taken_before_its_merges():
    keys = {"tokenizer.ggml.add_bos_token": False}
    merges = ["b c", "a bc"]
    assert byte_level("llama-bpe", merges, **keys).encode("abc").tokens == ["abc"]
    unreachable = byte_level("gpt-2", ["a b", "b c", "a bc"])
    assert unreachable.encode("abc").tokens == ["ab", "c"]
    reachable = byte_level("llama-bpe", ["a b", "b c", "a bc"], **keys)
    assert reachable.encode("abc").tokens == ["abc"]


def test_unknown_kinds_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"rule 'klingon'.*known are gpt-2"):
        byte_level("klingon", [])
    with pytest.raises(UnsupportedModelError, match=r"model 'rwkv'; supported are gpt2 and llama"):
        build_tokenizer({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.tokens"):
        build_tokenizer({})


def test_ends_are_added_where_the_file_asks():
    keys = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = byte_level("gpt-2", [], **keys)
    assert tokenizer.encode("a").tokens == ["<s>", "a", "</s>"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def sentencepiece(architecture: str = "llama", **keys: Any) -> Any:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    pieces = ["\u2581a", "ab", "\u2581", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "  ", *pieces]
    metadata = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0] + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return build_tokenizer(metadata | keys)


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes():
    tokenizer = sentencepiece()
    assert tokenizer.encode("ab").tokens == ["<s>", "\u2581a", "b"]
    assert tokenizer.encode("aab é").tokens == (
        ["<s>", "\u2581a", "ab", "\u2581", "<0xC3>", "<0xA9>"]
    )
    assert tokenizer.decode(tokenizer.encode("aab é").ids) == "aab é"


def test_sentencepiece_without_a_space_in_front():
    tokenizer = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("ab ab").tokens == ["<s>", "ab", "\u2581a", "b"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_runs_of_spaces_are_pieces():
    keys = {"tokenizer.ggml.add_space_prefix": False}
    # For Gemma the piece of two spaces comes first, as its id does; elsewhere its score decides.
    gemma = sentencepiece("gemma3", **keys).encode("a  a", add_special_tokens=False)
    assert gemma.tokens == ["a", "\u2581\u2581", "a"]
    llama = sentencepiece("llama", **keys).encode("a  a", add_special_tokens=False)
    assert llama.tokens == ["a", "\u2581", "\u2581a"]


def test_metadata_survives_the_file(tmp_path: Path):
    writer = gguf_writer(tmp_path / "model.gguf")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", *LETTERS, "[tool]", "ab"])
    writer.add_token_types([gguf.TokenType.CONTROL] + [1] * len(LETTERS) + [4, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}!")
    close_writer(writer)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.tokenize("<s>ab[tool]b") == ["<s>", "ab", "[tool]", "b"]
    assert (
        tokenizer.decode(tokenizer("<s>a[tool]")["input_ids"], skip_special_tokens=True)
        == "a[tool]"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi!"
