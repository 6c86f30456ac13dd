"""A request's text as it grows, up to its first stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mrv2.frontend.detokenize import IncrementalDetokenizer
from mrv2.loader.tokenizer import Tokenizer


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


class TextStream:
    """A request's text as it grows, up to its first stop string.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt, or its last `CONTEXT_TOKENS`.
        stops: non-empty strings; none: the text goes on to the end.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, stops: Sequence[str], skip_special_tokens: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops) if stops else None
        self._pieces: list[str] = []

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return None if self._stops is None else self._stops.found

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    def windows(self, token_ids: list[int]) -> tuple[list[int], ...]:
        """What to decode for `push` and `push_whole`."""
        return self._detokenizer.windows(token_ids)

    def push_whole(self, token_ids: list[int], texts: Sequence[str]) -> None:
        """Add all tokens at once; without stop strings, which would have been looked for before."""
        self._pieces.append(self._detokenizer.whole(token_ids, texts))

    def push(self, token_ids: list[int], texts: Sequence[str] = ()) -> tuple[str, int]:
        """Add tokens; return the text that can be given out, and how many tokens were looked at.

        That is all of them, or those up to the one that completed a stop string.
        """
        if self._stops is None:
            piece, num_seen = self._detokenizer.push(token_ids, texts), len(token_ids)
        else:
            piece, num_seen = self._push_to_stop(self._stops, token_ids, texts)
        self._pieces.append(piece)
        return piece, num_seen

    def _push_to_stop(self, stops: StopStrings, token_ids: list[int], texts: Sequence[str]) -> tuple[str, int]:
        before = copy.copy(self._detokenizer), copy.copy(stops)
        piece = stops.push(self._detokenizer.push(token_ids, texts))
        if stops.found is None:
            return piece, len(token_ids)
        # It is in there; once more, one by one, for the token that completed it.
        (self._detokenizer, stops), pieces = before, []
        self._stops = stops
        for num_seen, token in enumerate(token_ids, 1):
            pieces.append(stops.push(self._detokenizer.push([token])))
            if stops.found is not None:
                return "".join(pieces), num_seen
        return "".join(pieces), len(token_ids)

    def flush(self) -> str:
        """The text still held back; generation has ended."""
        piece = ""
        if self.found is None:
            piece = self._detokenizer.flush()
            if self._stops is not None:
                piece = self._stops.push(piece) + self._stops.flush()
            self._pieces.append(piece)
        return piece
