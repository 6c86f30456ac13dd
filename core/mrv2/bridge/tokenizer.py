"""An adapter's tokenizer as vLLM uses one: encode, decode, and a chat's token ids, without a vocabulary."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig, BatchEncoding, PreTrainedTokenizerBase
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer

from mrv2.bridge.modules import Hosted
from mrv2.bridge.names import TOKENIZER_SUFFIX, architecture_of
from mrv2.context import AdapterContext
from mrv2.errors import Mrv2Error, TokenizerError
from mrv2.loader.tokenizer import AdapterTokenizer

try:
    from vllm.renderers.chat_utils import parse_chat_messages, parse_chat_messages_async
except ImportError:  # 0.26
    from vllm.entrypoints.chat_utils import parse_chat_messages, parse_chat_messages_async

TEMPLATE_OPTIONS = frozenset({"add_generation_prompt", "cohere_format", "return_dict", "tokenize"})
"""What a chat template is told by vLLM that `mrv2_tokenizer` has a place for, or no use. `vllm serve` says to every
template which format one family's models would want.
"""

NO_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


class TokenizerSource:
    """What vLLM loads a tokenizer with; a class per architecture, made by `tokenizer_source`."""

    mrv2_hosted: ClassVar[Hosted]
    mrv2_architecture: ClassVar[str]
    mrv2_found: ClassVar[dict[tuple[str, str | None], object | None]]

    @classmethod
    def find(cls, name: Any, revision: str | None = None) -> object | None:
        """The adapter's tokenizer for the folder or hub id `name`; None: transformers loads it. Asked once."""
        key = (str(name), revision)
        if key not in cls.mrv2_found:
            cls.mrv2_found[key] = cls._ask(str(name), revision)
        return cls.mrv2_found[key]

    @classmethod
    def from_pretrained(cls, path_or_repo_id: Any, *args: Any, revision: str | None = None, **options: Any) -> Any:
        """Called by vLLM in every process that needs text.

        Raises:
            TokenizerError: neither the tokenizer nor a config says how many ids there are.
        """
        own = cls.find(path_or_repo_id, revision)
        if own is None:
            return CachedHfTokenizer.from_pretrained(path_or_repo_id, *args, revision=revision, **options)
        if isinstance(own, PreTrainedTokenizerBase):
            return get_cached_tokenizer(own)
        return HostedTokenizer(
            own,
            vocab_size=_vocab_size(own, _folder(str(path_or_repo_id), revision)),
            name_or_path=str(path_or_repo_id),
            truncation_side=options.get("truncation_side", "left"),
        )

    @classmethod
    def _ask(cls, name: str, revision: str | None) -> object | None:
        hosted = cls.mrv2_hosted
        if hosted.registry is None or hosted.error is not None:
            return None
        try:
            adapter = hosted.registry.load(hosted.entry)
        except Mrv2Error:  # said when the model is built
            return None
        if adapter.hook_source("mrv2_tokenizer") is None:
            return None
        folder = _folder(name, revision)
        file = folder / "config.json"
        raw = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return adapter.tokenizer(
            AdapterContext(
                architecture=cls.mrv2_architecture,
                model_type=raw.get("model_type", ""),
                host="vllm",
                path=folder,
                config=AutoConfig.from_pretrained(folder) if raw else None,
                raw_config=raw,
            )
        )


def tokenizer_source(hosted: Hosted, name: str, module: str) -> type[TokenizerSource]:
    """The class called `name` of the adapter's module."""
    architecture = architecture_of(name.removesuffix(TOKENIZER_SUFFIX))
    facts = {"mrv2_hosted": hosted, "mrv2_architecture": architecture, "mrv2_found": {}, "__module__": module}
    return type(name, (TokenizerSource,), facts)


class HostedTokenizer(TokenizerLike):
    """Around an adapter's tokenizer, of which only `encode(text)` and `decode(ids)` are demanded.

    There may be no vocabulary of strings, so a "token" is its id in digits: vLLM's detokeniser only wants to have
    them back, and asks `decode` for whatever people see.
    """

    def __init__(self, own: Any, *, vocab_size: int, name_or_path: str, truncation_side: str) -> None:
        self.own = AdapterTokenizer(own)
        self.name_or_path = name_or_path
        self._vocab_size = vocab_size
        self._truncation_side = truncation_side
        self._hidden: dict[int, bool] = {}

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All of the adapter's, of which vLLM asks for one."""
        return self.own.eos_token_ids

    @property
    def eos_token_id(self) -> int | None:  # type: ignore[override]
        """The first of them."""
        return self.end_token_ids[0] if self.end_token_ids else None

    @property
    def bos_token_id(self) -> int | None:  # type: ignore[override]
        """None: `encode` adds what belongs in front."""
        return None

    @property
    def pad_token_id(self) -> int | None:  # type: ignore[override]
        """None: nothing is padded."""
        return None

    @property
    def all_special_ids(self) -> list[int]:
        """Those that are known."""
        return list(self.end_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """As `all_special_ids`."""
        return [str(i) for i in self.end_token_ids]

    @property
    def is_fast(self) -> bool:
        """Whether it is one of the `tokenizers` library."""
        return False

    @property
    def vocab_size(self) -> int:
        """Ids from 0."""
        return self._vocab_size

    def __len__(self) -> int:
        return self._vocab_size

    def __hash__(self) -> int:
        return id(self)

    @property
    def max_token_id(self) -> int:
        """The last of them."""
        return self._vocab_size - 1

    @property
    def max_chars_per_token(self) -> int:
        """Not known, so that no text is refused for its length in characters."""
        return sys.maxsize

    @property
    def truncation_side(self) -> str:
        """Of a prompt that is too long."""
        return self._truncation_side

    def num_special_tokens_to_add(self) -> int:
        """Of the empty text."""
        return len(self.own.encode(""))

    def get_vocab(self) -> dict[str, int]:
        """Nothing: there may be none."""
        return {}

    def get_added_vocab(self) -> dict[str, int]:
        """As `get_vocab`."""
        return {}

    def encode(
        self, text: str, truncation: bool | None = None, max_length: int | None = None, **options: Any
    ) -> list[int]:
        """Token ids, with what the adapter's `encode` adds."""
        ids = self.own.encode(text)
        if not truncation or max_length is None or len(ids) <= max_length:
            return ids
        return ids[len(ids) - max_length :] if self._truncation_side == "left" else ids[:max_length]

    def __call__(self, text: Any, text_pair: str | None = None, **options: Any) -> BatchEncoding:
        """`input_ids` of a text, or of each."""
        many = not isinstance(text, str)
        ids = [self.encode(one, **options) for one in (text if many else [text])]
        return BatchEncoding({"input_ids": ids if many else ids[0]})

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Text of `ids`."""
        return self.own.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """Digits of those that are to be seen."""
        return [str(int(i)) for i in ids if not (skip_special_tokens and self._is_hidden(int(i)))]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Back again."""
        return int(tokens) if isinstance(tokens, str) else [int(t) for t in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of what `convert_ids_to_tokens` gave."""
        return self.decode([int(t) for t in tokens if t])

    def apply_chat_template(self, messages: Any, tools: Any = None, **options: Any) -> list[int]:
        """The adapter's, which has a place for messages alone.

        Raises:
            VLLMValidationError: vLLM's answer for a wrong request; there is no template, it refuses these messages,
                or something else is asked of it.
        """
        asked = options | {"tools": tools}
        lost = sorted(name for name, value in asked.items() if value and name not in TEMPLATE_OPTIONS)
        if lost:
            raise VLLMValidationError(f"the adapter's chat template takes no {', '.join(lost)}", parameter=lost[0])
        try:
            return self.own.apply_chat_template(
                messages, add_generation_prompt=bool(options.get("add_generation_prompt", True))
            )
        except Mrv2Error as error:
            raise VLLMValidationError(str(error), parameter="messages") from error

    def _is_hidden(self, token: int) -> bool:
        if token not in self._hidden:
            shown = self.decode([token], skip_special_tokens=True)
            self._hidden[token] = not shown and bool(self.decode([token]))
        return self._hidden[token]


class HostedRenderer(BaseRenderer[HostedTokenizer]):
    """From chat messages to token ids, by the adapter alone."""

    def render_messages(self, messages: Any, params: Any) -> Any:
        """The conversation and its prompt."""
        conversation, _, _ = parse_chat_messages(messages, self.model_config, content_format="string")
        return conversation, self._render(conversation, params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        """As `render_messages`."""
        conversation, _, _ = await parse_chat_messages_async(messages, self.model_config, content_format="string")
        return conversation, self._render(conversation, params)

    def _render(self, conversation: Any, params: Any) -> Any:
        ids = self.get_tokenizer().apply_chat_template(conversation, **params.get_apply_chat_template_kwargs())
        return parse_dec_only_prompt(ids)


def make_renderer(config: Any, tokenizer: Any) -> Any:
    """What vLLM renders chats with: its own way for a tokenizer of transformers', ours for others."""
    kind = HostedRenderer if isinstance(tokenizer, HostedTokenizer) else HfRenderer
    return kind(config, tokenizer)


def _folder(name: str, revision: str | None) -> Path:
    """Where the tokenizer's files are; from the hub, if `name` is no folder."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, ignore_patterns=list(NO_WEIGHTS)))


def _vocab_size(own: Any, folder: Path) -> int:
    size = getattr(own, "vocab_size", None)
    if size is None and (folder / "config.json").is_file():
        size = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise TokenizerError(
            "vLLM has to know how many token ids there are",
            where=f"{type(own).__module__}.{type(own).__qualname__}",
            fix="give the tokenizer vocab_size, or the config",
        )
    return size
