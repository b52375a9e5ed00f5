"""One output's text while it is generated: tokens in, text out, and the stop strings within.

Owns where a text ends because of a stop string, and how much of it may already be shown. Knows
nothing of the engine; the caller ends the sample when told that a stop string is complete.
"""

from collections.abc import Sequence
from typing import Any

from jpaged.engine.detokenize import Detokenizer
from jpaged.sampling_params import SamplingParams


def find_stop(text: str, stop: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where in `text` the first stop string to be complete ends, and which it is.

    Only those that end beyond `start` count; they may begin before it. Of those that end at the
    same place the first in the list wins (vLLM's rules).
    """
    best: tuple[int, str] | None = None
    for string in stop:
        place = text.find(string, max(0, start + 1 - len(string)))
        if place >= 0 and (best is None or place + len(string) < best[0]):
            best = place + len(string), string
    return best


class OutputText:
    """The text of one output, up to the stop string that ends it.

    A stop string is sought in the text of the tokens after the first `min_tokens`: it may begin in
    the text of those, and is cut there, but must end in a later one's. A character counts as the
    text of the token that completes it.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        stop = params.stop or ()
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._reach = max(map(len, self._stop), default=1) - 1  # of a stop string back from its end
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens, self._num_tokens = params.min_tokens, 0
        self._parts: list[str] = []
        self._len = 0  # of all parts
        self._tail = ""  # the last `_reach` characters, or as many as there are
        self._tentative = ""  # follows the parts, but may still be taken back
        self._untaken: list[str] = []  # what `take` has not given out
        self._num_taken = 0
        self.is_ended = False

    @property
    def text(self) -> str:
        """All text so far, what `take` holds back included."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def visible_len(self) -> int:
        """How much of `text` may be shown. While the output goes on, a stop string may have begun
        in the rest."""
        is_held = not (self.is_ended or self._includes_stop)
        return max(0, self._len - self._reach) if is_held else self._len

    def add(self, token_id: int) -> str | None:
        """Takes the next token. Returns the stop string that it completes; then the output has
        ended, and its text is cut before that string, or after it if it is to be included."""
        assert not self.is_ended, "the output has ended"
        self._num_tokens += 1
        old_tail, old_len, looked_at = self._tail, self._len, self._tentative
        delta = self._detokenizer.push((token_id,))
        self._append(delta)
        if not self._stop:
            return None
        self._tentative = self._detokenizer.tentative
        if self._num_tokens <= self._min_tokens:
            return None
        new = delta + self._tentative
        # What a bad byte has undone is read anew.
        start = len(old_tail) + (len(looked_at) if new.startswith(looked_at) else 0)
        found = find_stop(old_tail + new, self._stop, start)
        if found is None:
            return None
        end, string = found
        self.end()
        self._cut(old_len - len(old_tail) + end - (0 if self._includes_stop else len(string)))
        return string

    def end(self, stop_token_id: int | None = None) -> None:
        """Ends the output; all of its text is visible then, an unfinished character as U+FFFD.

        stop_token_id: the token that stopped it, if one did (end of sequence, or a stop id), for
        which `add` was not called. Its text counts only with include_stop_str_in_output. In what
        this adds no stop string is sought.
        """
        if self.is_ended:
            return
        if stop_token_id is not None and self._includes_stop:
            self._append(self._detokenizer.push((stop_token_id,)))
        self._append(self._detokenizer.flush())
        self.is_ended = True

    def take(self) -> str:
        """The visible text that was not taken before."""
        waiting, num = "".join(self._untaken), max(0, self.visible_len - self._num_taken)
        self._untaken = [waiting[num:]]
        self._num_taken += num
        return waiting[:num]

    def _append(self, delta: str) -> None:
        if delta:
            self._parts.append(delta)
            self._untaken.append(delta)
            self._len += len(delta)
            self._tail = (self._tail + delta)[-self._reach :] if self._reach else ""

    def _cut(self, length: int) -> None:
        self._parts, self._len = [self.text[:length]], length
        self._untaken = ["".join(self._untaken)[: length - self._num_taken]]
