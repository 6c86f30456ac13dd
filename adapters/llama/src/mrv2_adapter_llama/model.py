"""Llama; Mistral, which is Llama with a window; Mixtral, which is Mistral with experts.

Names follow the checkpoints; no host is named here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mrv2.layers import CausalLM, DecoderBlock, LayerSet, WeightMap, rope_parameters


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
            head_dim=c.head_dim or c.hidden_size // c.num_attention_heads,
            rope=rope_parameters(c, whole_heads=True),
            max_position=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            window=self.window(c),
            bias=bias,
            out_bias=bias,
        )
        self.mlp = self.feed_forward(L, c)

    @staticmethod
    def feed_forward(L: LayerSet, c: Any) -> nn.Module:
        """What is stored as `mlp`."""
        return L.gated_mlp(
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


class MixtralBlock(MistralBlock):
    """One decoder layer: each token goes to a few of many MLPs."""

    @staticmethod
    def feed_forward(L: LayerSet, c: Any) -> nn.Module:
        """What is stored as `mlp`."""
        return L.moe(
            "mlp",
            c.hidden_size,
            c.intermediate_size,
            num_experts=c.num_local_experts,
            top_k=c.num_experts_per_tok,
            norm_eps=c.rms_norm_eps,
            act=c.hidden_act,
        )


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, and models of the same shape, such as SmolLM2."""

    block = LlamaBlock


class MistralForCausalLM(CausalLM):
    """Mistral."""

    block = MistralBlock


class MixtralForCausalLM(CausalLM):
    """Mixtral, in whose checkpoints experts have names of their own."""

    block = MixtralBlock
    weight_map = WeightMap(
        rename=(
            *CausalLM.weight_map.rename,
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
            (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
            (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        )
    )
