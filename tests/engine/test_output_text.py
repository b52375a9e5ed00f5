"""Stop strings in the text of an output, and what of it may be shown meanwhile."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.output_text import OutputText, find_stop
from jpaged.sampling_params import SamplingParams
from tests.engine.small_tokenizers import (
    LITERAL,
    CountingTokenizer,
    byte_level,
    ids_of,
    sentencepiece,
    text_by_definition,
)

WORDS = ["abc", "ab", "bc", "ba", "cab", "aa"]
ENDS = ["<s>", "</s>", "<tool>"]
BYTE_LEVEL = byte_level(word.encode() for word in WORDS)
LLAMA = sentencepiece("llama", WORDS)


def run(
    names: list[Any], tokenizer: Any = BYTE_LEVEL, prompt: tuple[Any, ...] = (), **options: Any
) -> tuple[str | None, str, int]:
    """Stop string, text and number of tokens; shown text is checked on the way."""
    output, shown = make(tokenizer, prompt, **options), ""
    ids = ids_of(tokenizer, *names)
    string, num = None, 0
    while string is None and num < len(ids):
        string = output.add(ids[num])
        num += 1
        shown += output.take()
        assert output.text.startswith(shown)
        assert len(shown) == output.visible_len
    output.end()
    assert shown + output.take() == output.text
    assert output.take() == ""
    return string, output.text, num


def make(tokenizer: Any, prompt: tuple[Any, ...] = (), **options: Any) -> OutputText:
    params = SamplingParams(max_tokens=100, **options)
    return OutputText(tokenizer, ids_of(tokenizer, *prompt), params)


@pytest.mark.parametrize(
    ("names", "stop", "text", "string", "num"),
    [
        (["ab", "cab", "aa"], "ca", "ab", "ca", 2),  # ends in the middle of a token
        (["aa", "bc", "aa"], "ab", "a", "ab", 2),  # across two
        ([b"a", b"b", b"c", b"a"], "abc", "", "abc", 3),  # across three, from the start
        (["abc", "aa"], ["c", "b", "bc"], "a", "b", 1),  # the first that is complete
        (["abc", "aa"], ["bc", "c"], "a", "bc", 1),  # complete together: the first in the list
        (["abc", "aa"], ["c", "bc"], "ab", "c", 1),
        (["cab", "ab"], ["cabab", "ba"], "ca", "ba", 2),  # complete first, though begun later
        (["abc", b"ab", b"c"], ["zz", "ca"], "ab", "ca", 2),
        ([b"a\xe2\x82\xac", b"b"], "\u20ac", "a", "\u20ac", 4),  # one character of three tokens
        ([b"\xe4\xbd\xa0a"], "\u4f60a", "", "\u4f60a", 4),
    ],
)
def test_where_a_stop_string_cuts(names, stop, text, string, num):
    assert run(names, stop=stop) == (string, text, num)
    included = run(names, stop=stop, include_stop_str_in_output=True)
    assert included == (string, text + string, num)


def test_without_a_stop_string_all_text_stays():
    assert run(["abc", "ab"]) == (None, "abcab", 2)
    assert run(["abc", "ab"], stop="abd") == (None, "abcab", 2)
    assert run(["abc", b"\xe2\x82"], stop=["zzz"]) == (None, "abc" + LITERAL, 3)


def test_the_prompt_is_no_part_of_it():
    assert run(["ab"], prompt=("abc",), stop="ca") == (None, "ab", 1)
    assert run([b"\x82\xac", "ab"], prompt=("a", b"\xe2"), stop="\u20aca") == ("\u20aca", "", 3)


def test_special_tokens_count_where_they_are_text():
    names = ["ab", "</s>", "ab"]
    assert run(names, stop="</s>") == (None, "abab", 3)
    assert run(names, stop="</s>", skip_special_tokens=False) == ("</s>", "ab", 2)
    assert run(names, stop="b</", skip_special_tokens=False) == ("b</", "a", 2)
    assert run(["ab", "<tool>"], stop="<tool>") == ("<tool>", "ab", 2)
    assert run([b"a", "</s>", b"b"], stop="ab") == ("ab", "", 3)


def test_a_stop_string_with_the_replacement_character():
    stop = LITERAL + "a"
    assert run(["ab", LITERAL.encode(), b"aa"], stop=stop) == (stop, "ab", 5)
    assert run([b"ab\xff", b"a"], stop=stop) == (stop, "ab", 4)
    assert run([b"ab\xff", b"a"], stop=LITERAL) == (LITERAL, "ab", 3)
    # While a character is in pieces there is none; at the end it is too late.
    assert run([b"a\xe2", b"\x82\xac", "ab"], stop=LITERAL) == (None, "a\u20acab", 5)
    assert run([b"a\xe2"], stop=LITERAL) == (None, "a" + LITERAL, 2)
    assert run(["ab", LITERAL, "aa"], LLAMA, stop=LITERAL) == (LITERAL, "ab", 2)
    assert run(["ab", b"z\xff", "aa"], LLAMA, stop=LITERAL) == (LITERAL, "ab", 4)


def test_a_byte_token_that_completes_a_stop_string_is_the_last():
    """Its text could still be taken back, but not by tokens that never come."""
    for prompt in ((), ("ab",)):
        assert run(["ab", b"\n", "ab"], LLAMA, prompt, stop="\n") == ("\n", "ab", 2)
        assert run([b"\n\n", "ab"], LLAMA, prompt, stop="\n\n") == ("\n\n", "", 2)
    assert run([b"  z"], LLAMA, stop=" z") == (" z", "", 3)  # the first space is dropped
    assert run([b"\x82\xac\n"], LLAMA, ("ab", b"\xe2"), stop="\n") == ("\n", "\u20ac", 3)
    included = run(["ab", b"z\n\n"], LLAMA, stop="\n", include_stop_str_in_output=True)
    assert included == ("\n", "abz\n", 3)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, ("ca", "ab", 2)),
        (1, ("ca", "ab", 2)),  # begins in the first token, ends after it
        (2, ("ca", "abcabab", 5)),  # the first one was complete too early
        (4, ("ca", "abcabab", 5)),
        (5, (None, "abcababcaab", 6)),
    ],
)
def test_min_tokens(min_tokens, expected):
    names = ["abc", b"a", "ba", "bc", "aa", b"b"]
    assert run(names, stop="ca", min_tokens=min_tokens) == expected


def test_min_tokens_and_a_character_that_ends_later():
    assert run([b"\xe2\x82\xac", "ab"], stop="\u20ac", min_tokens=2) == ("\u20ac", "", 3)
    assert run([b"\xe2\x82\xac", "ab"], stop="\u20ac", min_tokens=3) == (None, "\u20acab", 4)
    assert run(["ab", b"\n", "ab"], LLAMA, stop="\n", min_tokens=2) == (None, "ab\nab", 3)


def test_what_is_held_back_while_it_runs():
    output = make(BYTE_LEVEL, stop=["abcd", "c"])
    shown = []
    for token_id in ids_of(BYTE_LEVEL, "ab", "ab", "aa"):
        output.add(token_id)
        shown.append(output.take())
    assert shown == ["", "a", "ba"]
    assert output.text == "ababaa"
    output.end()
    assert output.take() == "baa"
    eager = make(BYTE_LEVEL, stop="abcd", include_stop_str_in_output=True)
    eager.add(ids_of(BYTE_LEVEL, "ab")[0])
    assert eager.take() == "ab"


@pytest.mark.parametrize(("includes", "text"), [(False, "ab"), (True, "ab</s>")])
def test_the_token_that_stops_is_text_only_if_included(includes, text):
    options = {"skip_special_tokens": False, "include_stop_str_in_output": includes}
    output = make(BYTE_LEVEL, stop=["</s>", "zz"], **options)
    output.add(ids_of(BYTE_LEVEL, "ab")[0])
    output.end(ids_of(BYTE_LEVEL, "</s>")[0])
    output.end()
    assert output.text == output.take() == text
    assert output.is_ended


def test_the_first_that_is_complete():
    assert find_stop("abcabc", ["cab", "bc"]) == (3, "bc")
    assert find_stop("abcabc", ["cab", "bc"], 3) == (5, "cab")
    assert find_stop("abcabc", ["cab", "bc"], 5) == (6, "bc")
    assert find_stop("abcabc", ["cab", "bc"], 6) is None
    assert find_stop("abc", []) is None


def expected_stop(texts: list[str], stop: list[str], min_tokens: int) -> tuple[int, str, int]:
    """Number of tokens, string and end of the first match, by trying all places."""
    for num in range(min_tokens + 1, len(texts)):
        for end in range(len(texts[num - 1]) + 1, len(texts[num]) + 1):
            for string in stop:
                if texts[num][:end].endswith(string):
                    return num, string, end
    return len(texts) - 1, "", len(texts[-1])


WORD = st.text("abc", min_size=1, max_size=4)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([*WORDS, b"a", b"b", b"c", "</s>", ""]), max_size=12),
    st.lists(WORD, min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_stops_as_by_trying_all_places(names, stop, min_tokens, includes):
    texts = [
        text_by_definition(BYTE_LEVEL, [], ids_of(BYTE_LEVEL, *names[:num]), skip=True)
        for num in range(len(names) + 1)
    ]
    num, string, end = expected_stop(texts, stop, min_tokens)
    found = run(names, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=includes)
    start = end if includes else end - len(string)
    assert found == (string or None, texts[-1][:start], num)


@settings(max_examples=200)
@given(
    st.sampled_from([BYTE_LEVEL, LLAMA]),
    st.lists(st.one_of(st.sampled_from([*WORDS, *ENDS]), st.binary(max_size=3)), max_size=10),
    st.lists(st.text(["a", "b", "\x80", "\xe9", LITERAL, "<"], min_size=1), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_bytes_and_specials(tokenizer, names, stop, skip):
    """The text is the definition's for the tokens taken, cut at a stop string if there is one."""
    string, text, num = run(names, tokenizer, stop=stop, skip_special_tokens=skip)
    taken = ids_of(tokenizer, *names)[:num]
    whole = text_by_definition(tokenizer, [], taken, skip=skip)
    if string is None:
        assert text == whole
    else:
        assert whole.startswith(text + string)
    certain = text.rstrip(LITERAL)
    assert all(each not in certain for each in stop)


def test_costs_grow_with_the_number_of_tokens():
    for names in (["ab"] * 300, [b"z"] * 300, ["ab", b"\n\n"] * 100):
        counting = CountingTokenizer(LLAMA)
        params = SamplingParams(max_tokens=1000, stop=["zzzzc", "q"])
        output = OutputText(counting, ids_of(LLAMA, "ab"), params)
        for token_id in ids_of(LLAMA, *names):
            assert output.add(token_id) is None
        output.end()
        assert counting.num_decoded <= 20 * 300 + 100
