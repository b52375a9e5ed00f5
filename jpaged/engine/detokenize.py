"""Tokens to text: each character comes out once, and only when no later token can change it.

Owns what an output's text is (`whole_text`) and its incremental form (`Detokenizer`); the two
always agree. Knows nothing of requests and stop strings.

What a tokenizer's `decode` makes of a token hangs on few tokens before it:

- The bytes of a character may lie in several tokens, four at most (byte-level tokenizers).
- Byte tokens (`<0xE2>`, sentencepiece's fallback) count as a run: text if the whole run is valid
  UTF-8, else one U+FFFD for each byte, however many characters there were before the bad byte. So a
  run's text is uncertain until a token of another kind follows.
- The space in front of the first text may be dropped.
- Special tokens may be left out, even from the middle of a character.

(`tokenizers.decoders.DecodeStream` gives a run's characters out before it has ended, and raises
when a bad byte then takes them back.)
"""

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.loading.token_bytes import byte_fallback, byte_level

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_CONTEXT_LEN = 4  # tokens with text that the next one's may hang on: a character's bytes
_MAX_WINDOW_LEN = 16  # tokens kept before the window is cut to its context: cuts cost a decode


def whole_text(
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """An output's text as it continues the prompt's: decode(prompt + output) without the characters
    of decode(prompt), where an unfinished character at the prompt's end is not the prompt's.

    `output_token_ids` are those that count as text, so without the one that stopped the sample.
    """
    vocabulary = _Vocabulary(tokenizer, skip_special_tokens)
    context = vocabulary.context_of(prompt_token_ids)
    return vocabulary.decode([*context, *output_token_ids])[vocabulary.finished_len(context) :]


class Detokenizer:
    """The text of one output as its tokens arrive: all that `push` gives, then `flush`, joined, is
    `whole_text`. A token costs a decode of a few tokens, whatever the length of the output."""

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._vocabulary = vocabulary = _Vocabulary(tokenizer, skip_special_tokens)
        context = vocabulary.context_of(prompt_token_ids)
        run_len = len(vocabulary.trailing_bytes(context))
        self._window = context[: len(context) - run_len]  # the last tokens, and after them the run
        self._text = vocabulary.decode(self._window)  # the window's
        self._num_out = vocabulary.finished_len(context)  # characters of both that are out
        self._run = _ByteRun()
        for token_id in context[len(context) - run_len :]:
            self._run.push(token_id, vocabulary.byte_of(token_id))

    @property
    def tentative(self) -> str:
        """Characters that are complete, but that a later token may still take back: the text of a
        run of valid byte tokens. If the output ended here, they would stand."""
        run = self._run
        if not run.token_ids or run.is_broken:
            return ""
        if self._text:
            return (self._text + run.text)[self._num_out :]
        # At the very start the tokenizer may drop a space.
        complete = run.token_ids[: len(run.token_ids) - run.num_unfinished]
        return self._vocabulary.decode([*self._window, *complete])[self._num_out :]

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the output's next tokens; returns the text that became certain."""
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """The rest of the text, at the output's end: an unfinished character is U+FFFD there."""
        if self._run.token_ids:
            self._window, self._run = [*self._window, *self._run.token_ids], _ByteRun()
            self._text = self._vocabulary.decode(self._window)
        rest, self._num_out = self._text[self._num_out :], len(self._text)
        return rest

    def _push_one(self, token_id: int) -> str:
        vocabulary, run = self._vocabulary, self._run
        if (byte := vocabulary.byte_of(token_id)) is not None:
            run.push(token_id, byte)
            return ""
        if (run.token_ids or not self._text) and vocabulary.is_left_out(token_id):
            return ""
        window = [*self._window, *run.token_ids, token_id]
        text = vocabulary.decode(window)
        if not run.token_ids and text and text == self._text and not vocabulary.alone(token_id):
            return ""  # without text where some stands already, it has no effect on the next either
        certain_len = len(text) - vocabulary.num_unfinished(window, text)
        delta = text[self._num_out : certain_len]
        self._num_out = max(self._num_out, certain_len)
        self._window, self._text, self._run = window, text, _ByteRun() if run.token_ids else run
        self._shorten()
        return delta

    def _shorten(self) -> None:
        """Cuts the window to its context. How its first characters then read does not matter: the
        last ones, and those to come, are the same."""
        if self._text and len(self._window) > _MAX_WINDOW_LEN:
            num_held = len(self._text) - self._num_out
            self._window = self._window[-_CONTEXT_LEN:]
            self._text = self._vocabulary.decode(self._window)
            self._num_out = len(self._text) - num_held


class _ByteRun:
    """Byte tokens in a row, and the UTF-8 they have spelled so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""  # of its complete characters
        self.is_broken = False  # it can no longer become valid
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    @property
    def num_unfinished(self) -> int:
        """Bytes at its end that begin a character."""
        return 0 if self.is_broken else len(self._decoder.getstate()[0])

    def push(self, token_id: int, byte: int | None) -> None:
        assert byte is not None, "not a byte token"
        self.token_ids.append(token_id)
        if not self.is_broken:
            try:
                self.text += self._decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                self.is_broken = True


class _Vocabulary:
    """A tokenizer as one output reads it: how it decodes, and of what kind its tokens are."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self.alone = functools.cache(self._alone)
        self.byte_of = functools.cache(self._byte_of)
        self.is_left_out = functools.cache(self._is_left_out)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, spaces as the model wrote them: as in vLLM, nothing is cleaned up."""
        return self._decode(token_ids, self._skips)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def _alone(self, token_id: int) -> str:
        """A token's text where nothing precedes it."""
        return self.decode([token_id])

    def _byte_of(self, token_id: int) -> int | None:
        """A byte token's byte."""
        token = self._token(token_id)
        byte = byte_fallback(token or "")
        # For a tokenizer without byte fallback that name is plain text.
        return byte[0] if isinstance(byte, bytes) and self.alone(token_id) != token else None

    def _is_left_out(self, token_id: int) -> bool:
        """Whether decoding drops the token before it looks at its neighbours: a skipped special
        token, or an id of a padded vocabulary."""
        if self.alone(token_id):
            return False
        is_special = self._skips and self._decode([token_id], False) != ""
        return is_special or self._token(token_id) is None

    def _token(self, token_id: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def context_of(self, token_ids: Sequence[int]) -> list[int]:
        """The last tokens that count, as many as what follows may hang on."""
        context: list[int] = []
        is_run, num_with_text = True, 0
        for token_id in reversed(token_ids):
            if self.is_left_out(token_id):
                continue
            context.append(token_id)
            is_run = is_run and self.byte_of(token_id) is not None
            num_with_text += not is_run and self.alone(token_id) != ""
            if num_with_text == _CONTEXT_LEN:
                break
        return context[::-1]

    def trailing_bytes(self, token_ids: Sequence[int]) -> bytes:
        """What the byte tokens at the end spell."""
        found: list[int] = []
        for token_id in reversed(token_ids):
            if (byte := self.byte_of(token_id)) is None:
                break
            found.append(byte)
        return bytes(found[::-1])

    def finished_len(self, token_ids: Sequence[int]) -> int:
        """Length of their text without an unfinished character at its end."""
        if run := self.trailing_bytes(token_ids):
            return len(self.decode(token_ids[: len(token_ids) - _num_pending(run)]))
        text = self.decode(token_ids)
        return len(text) - self.num_unfinished(token_ids, text)

    def num_unfinished(self, token_ids: Sequence[int], text: str) -> int:
        """1 if `text`, that of these tokens, ends in a character whose bytes are not all there.

        For tokens of which the last is no byte token. U+FFFD at the end may also be the text
        itself, or a bad byte: then it is finished.
        """
        if not text.endswith(REPLACEMENT) or any(self.byte_of(t) is not None for t in token_ids):
            return 0
        tokens = [self._token(token_id) or "" for token_id in token_ids]
        if tokens[-1].endswith(REPLACEMENT):
            return 0
        data = b"".join(map(_byte_level, tokens))
        is_byte_level = data.decode(errors="replace") == text
        return 1 if not is_byte_level or _num_pending(data) else 0


def _num_pending(data: bytes) -> int:
    """Bytes at the end that begin a character and do not finish it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def _byte_level(token: str) -> bytes:
    spelled = byte_level(token)
    return spelled if isinstance(spelled, bytes) else spelled.encode(errors="surrogatepass")
