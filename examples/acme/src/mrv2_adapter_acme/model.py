"""The model. Layers are the host's (`L`), and so is the loop over them; no host is named here."""

from __future__ import annotations

from typing import Any

from mrv2.layers import CausalLM, LayerSet, StepContext, Stream
from torch import Tensor, nn

from .mixers import Memory
from .weights import WEIGHT_MAP


def attention(L: LayerSet, c: Any) -> nn.Module:
    """The host's attention, stored as `mixer`."""
    return L.self_attention(
        "mixer",
        c.hidden_size,
        num_heads=c.heads,
        num_kv_heads=c.kv_heads,
        head_dim=c.head_size,
        rope={"rope_type": "default", "rope_theta": c.rope_base},
        max_position=c.context,
        norm_eps=c.rms_norm_eps,
        window=None,
    )


class Block(nn.Module):
    """One decoder layer. Names given to layers equal the attributes that they are stored in."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        self.mixer = Memory(L.scope("mixer"), c) if c.plan[i] == "m" else attention(L, c)
        self.mlp = L.gated_mlp("mlp", c.hidden_size, c.ffn, norm_eps=c.rms_norm_eps)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer; `positions` [num_tokens]."""
        stream: Stream = self.mlp(self.mixer(h, positions, ctx), ctx)
        return stream


class AcmeForCausalLM(CausalLM):
    """Embedding, blocks, final norm and head."""

    block = Block
    weight_map = WEIGHT_MAP
    recurrent = True
