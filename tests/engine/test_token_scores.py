"""What the host keeps of log-probabilities, and how single tokens read."""

import numpy as np

from jpaged.core.sampling import Told
from jpaged.engine.token_scores import TokenScores, TokenTexts, entries
from tests.engine.tiny_tokenizers import BYTES, byte_level, sentencepiece


def told(top: list[float], asked: list[float]) -> Told:
    """Of one row whose token is id 1, as NumPy's."""
    numbers = np.array([top], np.float32)
    ids = np.arange(len(top), dtype=np.int32)[None]
    token = numbers[:, 1]
    return Told(token, np.array([2], np.int32), ids, numbers, np.array([asked], np.float32))


def test_a_request_keeps_what_it_asked_for_whatever_others_ask():
    scores = TokenScores()
    scores.add(told([-3.0, -1.0, -2.0, -0.5], [-7.0, -8.0, 0.0]), (0,), num_top=2, num_asked=1)
    assert scores.top_ids[0].tolist() == [3, 1]
    assert scores.top_logprobs[0].tolist() == [-0.5, -1.0]
    assert scores.asked_logprobs[0].tolist() == [-7.0]
    (entry,) = entries(scores, [1], 0, TokenTexts(None), asked_ids=[9])
    found = {token: (one.logprob, one.rank) for token, one in entry.items()}
    assert found == {1: (-1.0, 2), 3: (-0.5, 1), 9: (-7.0, None)}
    assert list(entry) == [1, 3, 9]


def test_of_equals_the_first_comes_first():
    scores = TokenScores()
    scores.add(told([-1.0, -1.0, -1.0], []), (0,), num_top=3)
    assert scores.top_ids[0].tolist() == [0, 1, 2]


def test_a_character_in_pieces_belongs_to_its_last_piece():
    first = 3  # behind the special tokens
    pieces = [first + byte for byte in "a\N{SLIGHTLY SMILING FACE}b".encode()]
    for tokenizer in (byte_level(BYTES), sentencepiece(["a", "b"])):
        texts = TokenTexts(tokenizer)
        read = [texts.of(token, pieces[:place]) for place, token in enumerate(pieces)]
        assert read == ["a", "", "", "", "\N{SLIGHTLY SMILING FACE}", "b"]
        assert texts.of(pieces[1], ()) == ""


def test_without_a_tokenizer_there_are_no_texts():
    assert TokenTexts(None).of(3, ()) is None
