"""Our byte-level BPE. A checkpoint holds what training learned and nothing else: special tokens, and merges in order.

Ids: the special tokens, then the 256 bytes, then one for each merge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mrv2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FILE = "acme.vocab"
END, USER, ACME = "<|end|>", "<|user|>", "<|acme|>"


class VocabularyError(mrv2.Mrv2Error):
    """A checkpoint's vocabulary is absent or isn't one.

    Copy `acme.vocab` again from where the model was trained.
    """

    code = "ACME-2"
    title = "bad acme vocabulary"


class ChatError(mrv2.Mrv2Error):
    """A chat has a role that the model was not trained with.

    There are `user` and `assistant`; what a system would say goes into the first question.
    """

    code = "ACME-3"
    title = "bad chat"


class AcmeTokenizer:
    """Text to ids and back, and chats.

    Raises:
        VocabularyError: the folder's vocabulary is absent or isn't one.
    """

    def __init__(self, folder: Path) -> None:
        try:
            learned = json.loads((folder / FILE).read_text(encoding="utf-8"))
            merges = [(str(left), str(right)) for left, right in learned["merges"]]
            special = [str(token) for token in learned["special"]]
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            ids = {t: i for i, t in enumerate([*special, *alphabet, *(a + b for a, b in merges)])}
            self._plain, self._bpe = (_byte_level(models.BPE(vocab=ids, merges=merges)) for _ in range(2))
            self._special = {token: ids[token] for token in (END, USER, ACME)}
        except Exception as error:  # of the system, of JSON, of tokenizers
            raise VocabularyError(
                f"{FILE} can't be used ({type(error).__name__}: {error})", where=str(folder), fix="copy it again"
            ) from error
        self._bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        self.eos_token_ids = (self._special[END],)
        self.vocab_size = len(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens that are written in it are taken as such."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        text: str = self._bpe.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat. What people write makes no special tokens.

        Raises:
            ChatError: a role that there isn't.
        """
        ids: list[int] = []
        for message in messages:
            if message["role"] not in ("user", "assistant"):
                raise ChatError(f"the role {message['role']!r}", fix="use user and assistant")
            asked = message["role"] == "user"
            ids.append(self._special[USER if asked else ACME])
            ids.extend(self._plain.encode(message["content"]).ids)
            if not asked:
                ids.append(self._special[END])
        return [*ids, self._special[ACME]] if add_generation_prompt else ids


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
