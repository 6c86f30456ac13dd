"""A model of Qwen3-0.6B's shape with random bf16 weights, so that nothing has to be downloaded to measure steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from mrv2.config import load_model_config
from mrv2.frontend.build import LoadedModel
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import build_model
from mrv2.model_state.default import DefaultModelState
from mrv2.registry import Registry

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


def make_model(shape: dict[str, Any], device: torch.device, folder: Path) -> LoadedModel:
    """The model with random weights, and a tokenizer with as many tokens."""
    config = transformers.Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    registry = Registry.discover()
    model_config = load_model_config(folder, registry)
    adapter = registry.resolve(model_config.architecture)
    layers = NativeLayers()
    module = build_model(model_config, adapter, layers, device=device, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    layers.finalize(module)
    return LoadedModel(
        name="random",
        module=module,
        caches=layers.caches,
        rope_fixed_up_to=None,
        state_class=DefaultModelState,
        config=model_config,
        tokenizer=None,
        adapter=adapter.name,
        chunked_prefill=True,
        prefix_caching=False,
    )
