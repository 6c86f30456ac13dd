"""Token ids to text, piece by piece, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from mrv2.loader.tokenizer import Tokenizer

REPLACEMENT = "�"
"""What a decoder shows for bytes that are no complete UTF-8 character yet."""

PROMPT_TOKENS = 6
"""Tokens at the prompt's end that the first piece is decoded with: joins depend on neighbours, not on all."""

MAX_HELD_TOKENS = 16
"""No character takes more tokens; past this the bytes are simply not UTF-8, and holding on would only cost."""


class IncrementalDetokenizer:
    """Turns tokens into text as they come.

    New tokens are decoded together with those of the last piece, and what that window's text gained is given
    out, except for bytes at its end that are no whole character yet. A window so begins where a piece began,
    never within a character, which some decoders need to get a run of bytes right; and it never begins with
    the new tokens, at whose front decoders may strip a space. The pieces join to the text of the whole.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt, whose end is the first context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = self._prompt_end(prompt_ids)
        self._num_new = 0  # tokens at the window's end that came since it began anew
        self._num_idle = 0  # of these, the ones that have given no text yet
        self._given = len(self._decode(self._window).rstrip(REPLACEMENT))  # characters that have been given out

    def _prompt_end(self, prompt_ids: Sequence[int]) -> list[int]:
        for n in range(PROMPT_TOKENS, PROMPT_TOKENS + MAX_HELD_TOKENS):
            window = list(prompt_ids[-n:])
            if len(window) < n or not self._decode(window).startswith(REPLACEMENT):
                return window
        return list(prompt_ids[-PROMPT_TOKENS:])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain."""
        return "".join([self._push_one(token) for token in token_ids])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        self._num_new += 1
        self._num_idle += 1
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if self._num_idle > MAX_HELD_TOKENS or (len(certain) == len(text) > self._given):
            piece = text[self._given :]
            self._begin_anew()
            return piece
        piece = certain[self._given :]
        if piece:
            self._given, self._num_idle = len(certain), 0
        return piece

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, where nobody watched them come."""
        self._window += token_ids
        return self.flush()

    def _begin_anew(self) -> None:
        """Start the window at the newest piece: what came before it is settled."""
        self._window = self._window[-self._num_new :]
        self._num_new, self._num_idle, self._given = 0, 0, len(self._decode(self._window))

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        text = self._decode(self._window)
        piece, self._given = text[self._given :], max(self._given, len(text))
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
