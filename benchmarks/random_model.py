"""A model of Qwen3-0.6B's shape with random bf16 weights, so that nothing has to be downloaded to measure steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from mrv2.frontend.build import LoadedModel, load
from mrv2.frontend.engine_config import EngineConfig

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
TINY = SHAPE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}


def write_config(shape: dict[str, Any], folder: Path) -> str:
    """A folder from which `weights="random"` makes the model."""
    transformers.Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def make_model(shape: dict[str, Any], device: torch.device, folder: Path) -> LoadedModel:
    """The model, for engines that share no prefixes."""
    config = EngineConfig(device=str(device), dtype="bfloat16", weights="random")
    return replace(load(write_config(shape, folder), config), prefix_caching=False)
