"""The usual frame of a decoder-only language model, host-neutral: families state only their block.

Checkpoint names are those of transformers' `…ForCausalLM`. A family whose frame differs writes its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mrv2.layers.base import LayerSet, StepContext, Stream, WeightMap


class DecoderBlock(nn.Module):
    """Attention, then an MLP, each with its own norm and residual add.

    A subclass builds `self_attn` and `mlp` in its constructor `(L, config, i)`, `i` the layer's number.
    """

    self_attn: nn.Module  # called with (h, positions, ctx)
    mlp: nn.Module  # called with (h, ctx)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer; `positions` [num_tokens]."""
        stream: Stream = self.mlp(self.self_attn(h, positions, ctx), ctx)
        return stream


class Decoder(nn.Module):
    """Embedding, blocks and final norm: everything below the head.

    Args:
        L: the host's layer set, in this module's scope.
        config: has `vocab_size`, `hidden_size`, `num_hidden_layers`, `rms_norm_eps`, `tie_word_embeddings`.
        block: of every layer.
    """

    def __init__(self, L: LayerSet, config: Any, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = L.embedding(
            "embed_tokens", config.vocab_size, config.hidden_size, shared_with_head=config.tie_word_embeddings
        )
        self.layers = L.stack("layers", config.num_hidden_layers, lambda L, i: block(L, config, i))
        self.norm = L.final_norm("norm", config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden]."""
        h = ctx.run(self.layers, ctx.embed(self.embed_tokens, input_ids), positions)
        hidden: Tensor = ctx.finish(self.norm, h)
        return hidden


class CausalLM(nn.Module):
    """A decoder and its head. Norms belong to the layer they feed, hence the two renames.

    Args:
        L: the host's layer set.
        config: see `Decoder`.

    Attributes:
        weight_map: renames norms; a family with other names has its own.
        parts: none.
        recurrent: no.
        block: the family's `DecoderBlock`.
    """

    weight_map: ClassVar[WeightMap] = WeightMap(
        rename=(
            (r"\.input_layernorm\.", ".self_attn.norm."),
            (r"\.post_attention_layernorm\.", ".mlp.norm."),
        )
    )
    parts: ClassVar[tuple[type, ...]] = ()
    recurrent: ClassVar[bool] = False
    block: ClassVar[type[nn.Module]]

    def __init__(self, L: LayerSet, config: Any) -> None:
        super().__init__()
        self.model = Decoder(L.scope("model"), config, self.block)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = L.lm_head("lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden] for `input_ids` and `positions` [num_tokens]."""
        hidden: Tensor = self.model(input_ids, positions, ctx)
        return hidden
