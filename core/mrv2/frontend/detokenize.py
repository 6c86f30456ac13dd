"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from mrv2.loader.tokenizer import Tokenizer

REPLACEMENT = "�"
"""What a decoder shows for bytes that are no complete UTF-8 character yet."""

PROMPT_TOKENS = 6
"""Tokens at the prompt's end that the first piece is decoded with: joins depend on neighbours, not on all."""

MAX_HELD_TOKENS = 16
"""No character takes more tokens; past this the bytes are simply not UTF-8, and holding on would only cost."""

MAX_NEW_TOKENS = 256
"""Tokens in a window that ended within a character every time: time to look at them one by one."""

CONTEXT_TOKENS = PROMPT_TOKENS + MAX_HELD_TOKENS
"""Tokens at the prompt's end that are looked at, at most, for one that begins a character."""


class IncrementalDetokenizer:
    """Turns tokens into text as they come.

    New tokens are decoded together with those of the last piece, and what that window's text gained is given
    out, except for bytes at its end that are no whole character yet. A window so begins where a piece began,
    never within a character, which some decoders need to get a run of bytes right; and it never begins with
    the new tokens, at whose front decoders may strip a space. The pieces join to the text of the whole.

    Many may be decoded in one call: `windows` says what of, and `push` takes the texts.

    Args:
        tokenizer: decodes.
        prompt_ids: the prompt, or its last `CONTEXT_TOKENS`: the first context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._prompt: list[int] | None = list(prompt_ids[-CONTEXT_TOKENS:])  # None: has been looked at
        self._window = self._prompt[-PROMPT_TOKENS:]
        self._num_new = 0  # tokens at the window's end that came since it began anew
        self._num_idle = 0  # of these, the ones that have given no text yet
        self._given: int | None = None  # characters of the window's text that have been given out; None: all

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def windows(self, token_ids: list[int]) -> tuple[list[int], ...]:
        """Windows whose texts `push` or `whole` can use for these tokens."""
        window = self._window + token_ids
        return (window,) if self._given is not None else (self._window, window)

    def push(self, token_ids: list[int], texts: Sequence[str] = ()) -> str:
        """Add tokens; return the text that is now certain.

        Args:
            token_ids: what came.
            texts: of `windows(token_ids)`; without them each token is decoded here.
        """
        given = self._num_given(texts[0]) if texts else None
        if given is not None:
            piece = self._push_all(token_ids, texts[-1], given)
            if piece is not None:
                return piece
        self._look_at_prompt()
        return "".join([self._push_one(token) for token in token_ids])

    def _push_all(self, token_ids: list[int], text: str, given: int) -> str | None:
        """The same as one token after the other. None: it isn't, or nobody knows."""
        certain = text.rstrip(REPLACEMENT)
        whole, num_new = len(certain) == len(text), self._num_new + len(token_ids)
        if len(certain) <= given or (not whole and num_new > MAX_NEW_TOKENS):
            return None
        self._window = self._window + token_ids
        if whole:
            self._begin_anew(num_new)
        else:
            self._prompt, self._given, self._num_new, self._num_idle = None, len(certain), num_new, 0
        return certain[given:]

    def whole(self, token_ids: list[int], texts: Sequence[str]) -> str:
        """The text of all tokens at once, where nobody watched them come.

        Args:
            token_ids: all of them.
            texts: of `windows(token_ids)`.
        """
        if not token_ids:
            return ""
        given = self._num_given(texts[0])
        if given is not None:
            return texts[-1][given:]
        self._look_at_prompt()
        self._window, self._num_new = self._window + token_ids, 1
        return self.flush()

    def _num_given(self, before: str) -> int | None:
        """Characters of the window's text that were given out before; None: it begins within a character."""
        if self._given is not None:
            return self._given
        if self._prompt is None:
            return len(before)
        if len(self._prompt) > PROMPT_TOKENS and before.startswith(REPLACEMENT):
            return None
        return len(before.rstrip(REPLACEMENT))  # the answer may complete the prompt's last character

    def _look_at_prompt(self) -> None:
        """Find the first window: one that doesn't begin within a character, if there is one."""
        if self._prompt is None:
            return
        for n in range(PROMPT_TOKENS, len(self._prompt) + 1):
            text = self._decode(self._prompt[-n:])
            if not text.startswith(REPLACEMENT):
                self._window = self._prompt[-n:]
                break
        else:
            text = self._decode(self._window)
        self._given, self._prompt = len(text.rstrip(REPLACEMENT)), None

    def _push_one(self, token: int) -> str:
        if self._given is None:
            self._given = len(self._decode(self._window))
        self._window = [*self._window, token]
        self._num_new += 1
        self._num_idle += 1
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if self._num_idle > MAX_HELD_TOKENS or (len(certain) == len(text) > self._given):
            piece = text[self._given :]
            self._begin_anew(self._num_new)
            return piece
        piece = certain[self._given :]
        if piece:
            self._given, self._num_idle = len(certain), 0
        return piece

    def _begin_anew(self, num_new: int) -> None:
        """Start the window at the newest piece: what came before it is settled."""
        self._window, self._prompt, self._given = self._window[-num_new:], None, None
        self._num_new = self._num_idle = 0

    def flush(self) -> str:
        """The text still held back, incomplete characters included."""
        if not self._num_new:
            return ""
        text = self._decode(self._window)
        assert self._given is not None
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece
