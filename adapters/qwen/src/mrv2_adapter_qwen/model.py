"""Qwen2, Qwen2.5, and Qwen3, dense and with experts. Names follow the checkpoints; no host is named here."""

from __future__ import annotations

from typing import Any

from torch import nn

from mrv2.layers import CausalLM, DecoderBlock, LayerSet, rope_parameters


class Qwen2Block(DecoderBlock):
    """One decoder layer: biases on queries, keys and values only."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        self.self_attn = L.self_attention(
            "self_attn",
            c.hidden_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            rope=rope_parameters(c, whole_heads=True),
            max_position=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            window=self.window(c, i),
            **self.variant(c),
        )
        self.mlp = self.feed_forward(L, c, i)

    @staticmethod
    def window(c: Any, i: int) -> int | None:
        """Tokens layer `i` looks back at, the current one included; None: all."""
        size: int | None = c.sliding_window if c.layer_types[i] == "sliding_attention" else None
        return size

    @staticmethod
    def feed_forward(L: LayerSet, c: Any, i: int) -> nn.Module:
        """What is stored as `mlp` of layer `i`."""
        return L.gated_mlp("mlp", c.hidden_size, c.intermediate_size, norm_eps=c.rms_norm_eps, act=c.hidden_act)

    @staticmethod
    def variant(c: Any) -> dict[str, Any]:
        """In what the generations' attention differs."""
        return {"bias": True}


class Qwen3Block(Qwen2Block):
    """One decoder layer: queries and keys are normalised per head."""

    @staticmethod
    def variant(c: Any) -> dict[str, Any]:
        """In what the generations' attention differs."""
        return {"bias": c.attention_bias, "out_bias": c.attention_bias, "qk_norm_eps": c.rms_norm_eps}


class Qwen3MoeBlock(Qwen3Block):
    """One decoder layer: in most of them, each token goes to a few of many MLPs."""

    @staticmethod
    def window(c: Any, i: int) -> int | None:
        """One window for all layers, or none."""
        size: int | None = c.sliding_window
        return size

    @staticmethod
    def feed_forward(L: LayerSet, c: Any, i: int) -> nn.Module:
        """Experts in every `decoder_sparse_step`-th layer that isn't listed as dense."""
        sparse = c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0 and i not in c.mlp_only_layers
        if not sparse:
            return Qwen3Block.feed_forward(L, c, i)
        return L.moe(
            "mlp",
            c.hidden_size,
            c.moe_intermediate_size,
            num_experts=c.num_experts,
            top_k=c.num_experts_per_tok,
            norm_eps=c.rms_norm_eps,
            renormalize=c.norm_topk_prob,
            act=c.hidden_act,
        )


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5."""

    block = Qwen2Block


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, dense."""

    block = Qwen3Block


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts, such as Qwen3-30B-A3B."""

    block = Qwen3MoeBlock
