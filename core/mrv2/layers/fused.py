"""The native fused layers: compositions of the small ones, with the shortcuts that their order allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mrv2.layers.base import Stream
from mrv2.layers.linear import Linear, PackedLinear
from mrv2.layers.rotary import Rotary, rotate
from mrv2.layers.small import Attention, RMSNorm

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext


class SelfAttention(nn.Module):
    """See `LayerSet.self_attention`."""

    def __init__(
        self,
        *,
        norm: RMSNorm,
        qkv_proj: PackedLinear,
        qk_norms: tuple[RMSNorm, RMSNorm] | None,
        rotary: Rotary,
        attn: Attention,
        o_proj: Linear,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.qkv_proj = qkv_proj
        self.q_norm = None if qk_norms is None else qk_norms[0]
        self.k_norm = None if qk_norms is None else qk_norms[1]
        self.rotary = rotary
        self.attn = attn
        self.o_proj = o_proj

    def forward(self, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        """The stream with this layer's output pending; `positions` [num_tokens]."""
        x, residual = ctx.prenorm(self.norm, h)
        args = self.attn.args
        num_q, num_kv = args.num_heads, args.num_kv_heads
        heads = self.qkv_proj.project(x).view(-1, num_q + 2 * num_kv, args.head_dim)
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if self.q_norm is None or self.k_norm is None:
            # Queries and keys lie side by side: rotate them as one.
            qk = rotate(qk, ctx.angles(self.rotary.table, positions, qk.dtype))
            q, k = qk[:, :num_q], qk[:, num_q:]
        else:
            q, k = self.rotary(positions, self.q_norm(qk[:, :num_q]), self.k_norm(qk[:, num_q:]), ctx)
        out = ctx.attend(self.attn.name, q, k, v, args).reshape(-1, num_q * args.head_dim)
        return Stream(self.o_proj.project(out), residual)


class GatedMLP(nn.Module):
    """See `LayerSet.gated_mlp`."""

    def __init__(
        self, *, norm: RMSNorm, gate_up_proj: PackedLinear, down_proj: Linear, act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act = act

    def forward(self, h: Stream, ctx: NativeContext) -> Stream:
        """The stream with this layer's output pending."""
        x, residual = ctx.prenorm(self.norm, h)
        gate, up = self.gate_up_proj.project(x).chunk(2, -1)
        return Stream(self.down_proj.project(self.act(gate).mul_(up)), residual)
