"""The config of a checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class HeronConfig(PretrainedConfig):
    """Sizes of a decoder whose layers look back through a window, remember, and see everything, in turn."""

    model_type = "heron"

    def __init__(
        self,
        *,
        vocab_size: int = 53,
        hidden_size: int = 64,
        intermediate_size: int = 48,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 1,
        head_dim: int = 32,
        memory_size: int = 64,
        look_back: int = 7,
        query_scale: float = 0.11,
        embed_scale: float = 1.5,
        final_scale: float = 0.7,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        max_position_embeddings: int = 256,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.memory_size = memory_size
        self.look_back = look_back
        self.query_scale = query_scale
        self.embed_scale = embed_scale
        self.final_scale = final_scale
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**({"tie_word_embeddings": True} | kwargs))
