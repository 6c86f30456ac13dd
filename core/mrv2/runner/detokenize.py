"""Token ids to text, piece by piece, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from mrv2.loader.tokenizer import Tokenizer

REPLACEMENT = "�"
"""What a decoder shows for bytes that are no complete UTF-8 character yet."""

CONTEXT_TOKENS = 6
"""Tokens before the new ones that are decoded with them: joins depend on neighbours, not on the whole text."""


MAX_HELD_TOKENS = 16
"""No character takes more tokens; past this the bytes are simply not UTF-8, and holding on would only cost."""


class IncrementalDetokenizer:
    """Turns tokens into text as they come.

    The newest tokens are decoded together with a few before them, and what that window's text gained is
    given out, except for bytes at its end that are no whole character yet. So the pieces join to the text of
    the whole, also for tokenizers that strip or insert spaces between tokens.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt, whose end is the first context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_held = 0  # tokens at the window's end that have not been given out whole
        self._given = len(self._decode())  # characters of the window's text that have been given out

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        self._window += token_ids
        self._num_held += len(token_ids)
        text = self._decode()
        certain = text.rstrip(REPLACEMENT)
        if len(certain) < len(text) and self._num_held <= MAX_HELD_TOKENS:
            piece = certain[self._given :]
            self._given = max(self._given, len(certain))
            return piece
        piece = text[self._given :]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._num_held, self._given = 0, len(self._decode())
        return piece

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        text = self._decode()
        piece, self._given = text[self._given :], len(text)
        return piece


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may become one.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text; return what can be given out. After `found` is set, nothing more comes."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back; generation has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
