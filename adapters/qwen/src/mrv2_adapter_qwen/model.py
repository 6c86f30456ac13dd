"""Qwen2, Qwen2.5 and dense Qwen3. Names follow the checkpoints; no host is named here."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mrv2.layers import LayerSet, StepContext, Stream, WeightMap, rope_parameters


def window(c: Any, i: int) -> int | None:
    """Tokens layer `i` looks back at, the current one included; None: all."""
    return c.sliding_window if c.layer_types[i] == "sliding_attention" else None


class Qwen2Block(nn.Module):
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

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer."""
        return self.mlp(self.self_attn(h, positions, ctx), ctx)


class Qwen3Block(Qwen2Block):
    """One decoder layer: queries and keys are normalised per head."""

    @staticmethod
    def variant(c: Any) -> dict[str, Any]:
        """In what the generations' attention differs."""
        bias = c.attention_bias
        return {"head_dim": c.head_dim, "bias": bias, "out_bias": bias, "qk_norm_eps": c.rms_norm_eps}


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self, L: LayerSet, c: Any, block: type[Qwen2Block]) -> None:
        super().__init__()
        self.embed_tokens = L.embedding(
            "embed_tokens", c.vocab_size, c.hidden_size, shared_with_head=c.tie_word_embeddings
        )
        self.layers = L.stack("layers", c.num_hidden_layers, lambda L, i: block(L, c, i))
        self.norm = L.final_norm("norm", c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden]."""
        h = ctx.embed(self.embed_tokens, input_ids)
        return ctx.finish(self.norm, ctx.run(self.layers, h, positions))


class Qwen2ForCausalLM(nn.Module):
    """Qwen2 and Qwen2.5."""

    weight_map: ClassVar[WeightMap] = WeightMap(
        rename=(
            (r"\.input_layernorm\.", ".self_attn.norm."),
            (r"\.post_attention_layernorm\.", ".mlp.norm."),
        )
    )
    parts: ClassVar[tuple[type, ...]] = ()
    recurrent: ClassVar[bool] = False
    block: ClassVar[type[Qwen2Block]] = Qwen2Block

    def __init__(self, L: LayerSet, config: Any) -> None:
        super().__init__()
        self.model = Decoder(L.scope("model"), config, self.block)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = L.lm_head("lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden] for `input_ids` and `positions` [num_tokens]."""
        return self.model(input_ids, positions, ctx)


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3, dense."""

    block = Qwen3Block
