"""The config of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig


class TidalConfig(PretrainedConfig):
    """Sizes of a hybrid decoder. `mixers` names each layer's mixer: decay, average, biased or attention."""

    model_type = "tidal"

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        hidden_size: int = 32,
        intermediate_size: int = 48,
        mixers: Sequence[str] = ("decay", "attention", "biased", "average", "attention", "decay"),
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 8,
        decay_heads: int = 3,
        decay_key: int = 5,
        decay_value: int = 6,
        average_size: int = 20,
        biased_heads: int = 3,
        biased_key: int = 10,
        biased_value: int = 7,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 128,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.mixers = list(mixers)
        self.num_hidden_layers = len(self.mixers)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.decay_heads = decay_heads
        self.decay_key = decay_key
        self.decay_value = decay_value
        self.average_size = average_size
        self.biased_heads = biased_heads
        self.biased_key = biased_key
        self.biased_value = biased_value
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)
