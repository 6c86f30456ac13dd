"""Llama, and Mistral, which is Llama with a window. Names follow the checkpoints; no host is named here."""

from __future__ import annotations

from typing import Any

from mrv2.layers import CausalLM, DecoderBlock, LayerSet, rope_parameters


class LlamaBlock(DecoderBlock):
    """One decoder layer."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        bias = getattr(c, "attention_bias", False)
        self.self_attn = L.self_attention(
            "self_attn",
            c.hidden_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            rope=rope_parameters(c, whole_heads=True),
            max_position=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            window=self.window(c),
            bias=bias,
            out_bias=bias,
        )
        self.mlp = L.gated_mlp(
            "mlp",
            c.hidden_size,
            c.intermediate_size,
            norm_eps=c.rms_norm_eps,
            act=c.hidden_act,
            bias=getattr(c, "mlp_bias", False),
        )

    @staticmethod
    def window(c: Any) -> int | None:
        """Tokens each layer looks back at, the current one included; None: all."""
        return None


class MistralBlock(LlamaBlock):
    """One decoder layer; one window for all of them, or none."""

    @staticmethod
    def window(c: Any) -> int | None:
        """The config's sliding window."""
        size: int | None = c.sliding_window
        return size


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, and models of the same shape, such as SmolLM2."""

    block = LlamaBlock


class MistralForCausalLM(CausalLM):
    """Mistral."""

    block = MistralBlock
