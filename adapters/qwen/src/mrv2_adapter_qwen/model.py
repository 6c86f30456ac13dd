"""Qwen2, Qwen2.5 and dense Qwen3. Names follow the checkpoints; no host is named here."""

from __future__ import annotations

from typing import Any

from mrv2.layers import CausalLM, DecoderBlock, LayerSet, rope_parameters


def window(c: Any, i: int) -> int | None:
    """Tokens layer `i` looks back at, the current one included; None: all."""
    size: int | None = c.sliding_window if c.layer_types[i] == "sliding_attention" else None
    return size


class Qwen2Block(DecoderBlock):
    """One decoder layer: biases on queries, keys and values only."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        self.self_attn = L.self_attention(
            "self_attn",
            c.hidden_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            rope=rope_parameters(c, whole_heads=True),
            max_position=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            window=window(c, i),
            **self.variant(c),
        )
        self.mlp = L.gated_mlp("mlp", c.hidden_size, c.intermediate_size, norm_eps=c.rms_norm_eps, act=c.hidden_act)

    @staticmethod
    def variant(c: Any) -> dict[str, Any]:
        """In what the generations' attention differs."""
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return {"head_dim": head_dim, "bias": True}


class Qwen3Block(Qwen2Block):
    """One decoder layer: queries and keys are normalised per head."""

    @staticmethod
    def variant(c: Any) -> dict[str, Any]:
        """In what the generations' attention differs."""
        bias = c.attention_bias
        return {"head_dim": c.head_dim, "bias": bias, "out_bias": bias, "qk_norm_eps": c.rms_norm_eps}


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5."""

    block = Qwen2Block


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, dense."""

    block = Qwen3Block
