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

    A piece is what decoding (context + new tokens) adds to decoding the context alone; it is held back while
    it ends within a character. So the pieces join to the text of the whole, also for tokenizers that
    strip or insert spaces between tokens.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt, whose end is the first context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._start = 0  # first token of the context
        self._read = len(self._ids)  # tokens whose text has been given out

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=self._skip)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        self._ids += token_ids
        before, now = self._decode(self._start, self._read), self._decode(self._start, len(self._ids))
        if now.endswith(REPLACEMENT) and len(self._ids) - self._read <= MAX_HELD_TOKENS:
            return ""
        self._read = len(self._ids)
        self._start = max(0, self._read - CONTEXT_TOKENS)
        return now[len(before) :]

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        before, now = self._decode(self._start, self._read), self._decode(self._start, len(self._ids))
        self._read = len(self._ids)
        return now[len(before) :]


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
