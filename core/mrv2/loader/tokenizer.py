"""Text to token ids and back: the checkpoint's own tokenizer, an adapter's, or none."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mrv2.context import AdapterContext
from mrv2.errors import TokenizerError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
"""A folder with none of these has no tokenizer; with one that can't be read, it has a broken one."""

SMALL_BATCH = 8
"""Texts that aren't worth the library's thread pool, which a process that forks is warned of ever after."""

Message = Mapping[str, Any]
"""One turn of a chat, `{"role": ..., "content": ...}`."""


class Tokenizer(Protocol):
    """What the engine and the command line use."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens the tokenizer itself knows, beside the model's."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer adds by itself."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        ...

    def decode_batch(self, batch: Sequence[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """What `decode` gives for each, at once."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat.

        Raises:
            TokenizerError: there is no chat template, or it refuses these messages.
        """
        ...


class TokenizerAdapter(Protocol):
    """What is needed of a loaded adapter here."""

    def tokenizer(self, ctx: AdapterContext) -> Any:
        """The adapter's own tokenizer, or None."""
        ...


def load_tokenizer(context: AdapterContext, adapter: TokenizerAdapter | None = None) -> Tokenizer | None:
    """The adapter's tokenizer, else the one in the checkpoint's folder, else None: ids in and out.

    Raises:
        TokenizerError: the folder's tokenizer can't be read.
    """
    own = None if adapter is None else adapter.tokenizer(context)
    if own is not None:
        return AdapterTokenizer(own)
    if context.path is None or not any((context.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return FolderTokenizer(context.path)


class FolderTokenizer:
    """The tokenizer that transformers reads from a checkpoint's folder.

    Attributes:
        hf: the transformers tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # each tokenizer kind fails with types of its own
            raise TokenizerError(
                f"transformers can't read it ({type(e).__name__}: {e})",
                where=str(folder),
                fix="get the tokenizer's files again, or let an adapter bring a tokenizer (mrv2_tokenizer)",
            ) from e
        self._plain_decode = bool(getattr(self.hf, "is_fast", False)) and all(
            _home(type(self.hf), name).startswith("transformers.tokenization_utils") for name in ("decode", "_decode")
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token, if it names one."""
        return () if self.hf.eos_token_id is None else (int(self.hf.eos_token_id),)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds by itself (a BOS, for one)."""
        return list(self.hf.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Spaces aren't cleaned up, so that the text of a prefix is a prefix of the text."""
        decode = self.hf.backend_tokenizer.decode if self._plain_decode else self._slow_decode
        text: str = decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _slow_decode(self, ids: list[int], *, skip_special_tokens: bool) -> Any:
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def decode_batch(self, batch: Sequence[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """What `decode` gives for each. Where it can, outside of Python, and so of the interpreter's lock."""
        if not self._plain_decode or len(batch) <= SMALL_BATCH:
            return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]
        texts: list[str] = self.hf.backend_tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        return texts

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat.

        Raises:
            TokenizerError: there is no chat template, or it refuses these messages.
        """
        if self.hf.chat_template is None:
            raise _no_template(str(self.folder))
        try:
            ids = self.hf.apply_chat_template(
                [dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except Exception as e:  # the template is the checkpoint's code, run by jinja in its sandbox
            raise TokenizerError(
                f"the chat template refuses these messages ({type(e).__name__}: {e})",
                where=str(self.folder),
                fix="look at the roles it allows and their order",
            ) from e
        return list(ids)


class AdapterTokenizer:
    """An adapter's tokenizer, of which only `encode(text)` and `decode(ids)` are demanded.

    Attributes:
        eos_token_ids: the adapter's, if it has any.

    Raises:
        TokenizerError: its `eos_token_ids` are something else.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._takes_skip = _takes(inner.decode, "skip_special_tokens")
        given = getattr(inner, "eos_token_ids", None)
        try:
            self.eos_token_ids = () if given is None else tuple(operator.index(i) for i in given)
        except TypeError as e:
            raise TokenizerError(
                f"eos_token_ids is {given!r}, expected token ids",
                where=f"{type(inner).__module__}.{type(inner).__qualname__}",
                fix="give a tuple of them; () for none",
            ) from e

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt."""
        return [int(i) for i in self.inner.encode(text)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; special tokens are left out only by a tokenizer whose `decode` has that keyword."""
        keywords = {"skip_special_tokens": skip_special_tokens} if self._takes_skip else {}
        text: str = self.inner.decode(list(ids), **keywords)
        return text

    def decode_batch(self, batch: Sequence[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """What `decode` gives for each."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The adapter's template.

        Raises:
            TokenizerError: it has none.
        """
        template = getattr(self.inner, "apply_chat_template", None)
        if template is None:
            raise _no_template(f"{type(self.inner).__module__}.{type(self.inner).__qualname__}")
        return list(template(messages, add_generation_prompt=add_generation_prompt))


def _home(kind: type, method: str) -> str:
    """The module of the class that `kind` has `method` from."""
    return next((base.__module__ for base in kind.__mro__ if method in vars(base)), "")


def _takes(function: Any, keyword: str) -> bool:
    try:
        return keyword in inspect.signature(function).parameters
    except (TypeError, ValueError):  # code of another language needn't have a signature
        return False


def _no_template(where: str) -> TokenizerError:
    return TokenizerError(
        "a chat was asked for, and the tokenizer has no chat template",
        where=where,
        fix="give a raw prompt, or add chat_template.jinja to the model folder",
    )
