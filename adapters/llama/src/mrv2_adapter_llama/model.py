"""Llama, and Mistral, which is Llama with a window. Names follow the checkpoints; no host is named here."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mrv2.layers import LayerSet, StepContext, Stream, WeightMap, rope_parameters


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, L: LayerSet, c: Any, window: int | None) -> None:
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
            window=window,
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

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer."""
        return self.mlp(self.self_attn(h, positions, ctx), ctx)


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self, L: LayerSet, c: Any, window: int | None) -> None:
        super().__init__()
        self.embed_tokens = L.embedding(
            "embed_tokens", c.vocab_size, c.hidden_size, shared_with_head=c.tie_word_embeddings
        )
        self.layers = L.stack("layers", c.num_hidden_layers, lambda L, i: Block(L, c, window))
        self.norm = L.final_norm("norm", c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden]."""
        h = ctx.embed(self.embed_tokens, input_ids)
        return ctx.finish(self.norm, ctx.run(self.layers, h, positions))


class LlamaForCausalLM(nn.Module):
    """Llama 2 and 3, and models of the same shape, such as SmolLM2."""

    weight_map: ClassVar[WeightMap] = WeightMap(
        rename=(
            (r"\.input_layernorm\.", ".self_attn.norm."),
            (r"\.post_attention_layernorm\.", ".mlp.norm."),
        )
    )
    parts: ClassVar[tuple[type, ...]] = ()
    recurrent: ClassVar[bool] = False

    def __init__(self, L: LayerSet, config: Any) -> None:
        super().__init__()
        self.model = Decoder(L.scope("model"), config, self.window(config))
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = L.lm_head("lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)

    @staticmethod
    def window(config: Any) -> int | None:
        """Tokens each layer looks back at, the current one included; None: all."""
        return None

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden] for `input_ids` and `positions` [num_tokens]."""
        return self.model(input_ids, positions, ctx)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: one window for all layers, or none."""

    @staticmethod
    def window(config: Any) -> int | None:
        """The config's sliding window."""
        return config.sliding_window
