"""Adapters' tokenizers for vLLM, by mode: vLLM picks a tokenizer class by `tokenizer_mode`, which a model may set.

Every architecture of ours gets a mode in every process. A model's config takes it over if the user asked for none and
the adapter brings a tokenizer (`mrv2_tokenizer`); until then no adapter is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from mrv2.bridge.names import TOKENIZER_SUFFIX


def register_tokenizers(classes: Iterable[tuple[str, str]]) -> None:
    """Let vLLM know each registered class's tokenizer. May be called again.

    Args:
        classes: module and name of classes of models.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers import TokenizerRegistry

    for module, name in classes:
        mode = tokenizer_mode(name)
        TokenizerRegistry.tokenizers[mode] = (module, name + TOKENIZER_SUFFIX)
        RENDERER_REGISTRY.renderers[mode] = ("mrv2.bridge.tokenizer", "make_renderer")

        class Chooser(VerifyAndUpdateConfig):
            mrv2_class = (module, name)

            @classmethod
            def verify_and_update_model_config(cls, model_config: Any) -> None:
                choose_tokenizer(*cls.mrv2_class, model_config)

        MODELS_CONFIG_MAP[name] = Chooser


def tokenizer_mode(name: str) -> str:
    """The mode of the model class registered as `name`; vLLM has modes in small letters only."""
    return f"mrv2_{name.lower()}"


def choose_tokenizer(module: str, name: str, model_config: Any) -> None:
    """Set the mode, if there is a choice and the adapter makes it.

    Raises:
        HookResultError, TokenizerError: of the adapter's hook.
    """
    if model_config.tokenizer_mode != "auto" or model_config.skip_tokenizer_init:
        return
    source = getattr(importlib.import_module(module), name + TOKENIZER_SUFFIX)
    if source.find(model_config.tokenizer, model_config.tokenizer_revision) is not None:
        model_config.tokenizer_mode = tokenizer_mode(name)
