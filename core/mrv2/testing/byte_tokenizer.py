"""A tokenizer without a file: one token a byte, so that a character may need several of them."""

from __future__ import annotations

from collections.abc import Sequence

SPECIAL = 256
"""The only id that is no byte."""


class ByteTokenizer:
    """Decodes as UTF-8; what is no character yet becomes U+FFFD.

    Args:
        unreadable: an id that can't be decoded; `decode` raises `KeyError` of it.
    """

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, unreadable: int | None = None) -> None:
        self.unreadable = unreadable

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        if self.unreadable in ids:
            raise KeyError(self.unreadable)
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(special if i == SPECIAL else bytes([i]) for i in ids).decode("utf-8", errors="replace")

    def decode_batch(self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each sequence of ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]
