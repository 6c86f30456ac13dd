"""The model: our mixers beside standard attention. Imports the contract and torch only."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from mrv2.layers import LayerSet, StepContext, Stream, WeightMap
from recurrent.mixers import AverageMixer, BiasedAttention, DecayMixer


def mixer(L: LayerSet, c: Any, kind: str) -> nn.Module:
    """The mixer called `kind`, stored as `mixer`."""
    if kind == "attention":
        return L.self_attention(
            "mixer",
            c.hidden_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            rope={"rope_type": "default", "rope_theta": c.rope_theta},
            max_position=c.max_position_embeddings,
            norm_eps=c.rms_norm_eps,
            window=None,
        )
    classes: dict[str, type[nn.Module]] = {"decay": DecayMixer, "average": AverageMixer, "biased": BiasedAttention}
    return classes[kind](L.scope("mixer"), c)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        self.mixer = mixer(L, c, c.mixers[i])
        self.mlp = L.gated_mlp("mlp", c.hidden_size, c.intermediate_size, norm_eps=c.rms_norm_eps)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer."""
        return self.mlp(self.mixer(h, positions, ctx), ctx)


class TidalForCausalLM(nn.Module):
    """A hybrid decoder."""

    weight_map: ClassVar[WeightMap] = WeightMap()
    parts: ClassVar[tuple[type, ...]] = ()
    recurrent: ClassVar[bool] = True

    def __init__(self, L: LayerSet, config: Any) -> None:
        super().__init__()
        self.embed = L.embedding("embed", config.vocab_size, config.hidden_size)
        self.layers = L.stack("layers", len(config.mixers), lambda L, i: Block(L, config, i))
        self.norm = L.final_norm("norm", config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = L.lm_head("lm_head", config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Hidden states [num_tokens, hidden] for `input_ids` and `positions` [num_tokens]."""
        h = ctx.embed(self.embed, input_ids)
        return ctx.finish(self.norm, ctx.run(self.layers, h, positions))
