"""The config of a checkpoint, in our own words."""

from __future__ import annotations

from typing import Any, ClassVar

import transformers


class AcmeConfig(transformers.PretrainedConfig):
    """Sizes of the model. Hosts ask for some of them by transformers' names, which `attribute_map` leads to ours.

    Args:
        vocab_size: ids that have an embedding, which is the head as well.
        width: of the residual stream.
        plan: one letter a layer: `m`, a memory; `a`, attention.
        ffn: width of each MLP.
        heads: query heads of attention.
        kv_heads: its key and value heads.
        head_size: of each.
        memory_heads: heads of a memory.
        memory_size: of each: a memory is a square matrix per head.
        eps: of all norms.
        rope_base: of rotary frequencies.
        context: longest sequence.
        kwargs: what every config has, end tokens among it.
    """

    model_type = "acme"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "intermediate_size": "ffn",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_size",
        "rms_norm_eps": "eps",
        "max_position_embeddings": "context",
    }

    def __init__(
        self,
        *,
        vocab_size: int = 320,
        width: int = 64,
        plan: str = "mam",
        ffn: int = 96,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 32,
        memory_heads: int = 2,
        memory_size: int = 32,
        eps: float = 1e-06,
        rope_base: float = 10000.0,
        context: int = 256,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.width = width
        self.plan = plan
        self.depth = len(plan)
        self.ffn = ffn
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.memory_heads = memory_heads
        self.memory_size = memory_size
        self.eps = eps
        self.rope_base = rope_base
        self.context = context
        super().__init__(**{**kwargs, "tie_word_embeddings": True})
