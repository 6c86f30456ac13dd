"""The fused layers, composed of vLLM's leaves. Leaves keep vLLM's exact classes: LoRA and quantisation ask for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from mrv2.layers.base import Stream
from mrv2.layers.vllm.small import TableRotary, prenorm


class SelfAttention(nn.Module):
    """See `LayerSet.self_attention`."""

    def __init__(
        self,
        *,
        norm: RMSNorm,
        qkv_proj: QKVParallelLinear,
        qk_norms: tuple[RMSNorm, RMSNorm] | None,
        rotary_emb: TableRotary,
        attn: Attention,
        o_proj: RowParallelLinear,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.qkv_proj = qkv_proj
        self.q_norm = None if qk_norms is None else qk_norms[0]
        self.k_norm = None if qk_norms is None else qk_norms[1]
        self.rotary_emb = rotary_emb
        self.attn = attn
        self.o_proj = o_proj
        self.split = [attn.num_heads * attn.head_size, *[attn.num_kv_heads * attn.head_size] * 2]  # of this rank

    def forward(self, h: Stream, positions: Tensor, ctx: Any) -> Stream:
        """The stream with this layer's output pending; `positions` [num_tokens]."""
        x, residual = prenorm(self.norm, h)
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split(self.split, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _per_head(self.q_norm, q, self.attn.head_size), _per_head(self.k_norm, k, self.attn.head_size)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return Stream(out, residual)


def _per_head(norm: RMSNorm, x: Tensor, head_dim: int) -> Tensor:
    normed: Tensor = norm(x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim))
    return normed.view(x.shape)


class GatedMLP(nn.Module):
    """See `LayerSet.gated_mlp`."""

    def __init__(
        self, *, norm: RMSNorm, gate_up_proj: MergedColumnParallelLinear, act: nn.Module, down_proj: RowParallelLinear
    ) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up_proj = gate_up_proj
        self.act = act
        self.down_proj = down_proj

    def forward(self, h: Stream, ctx: Any) -> Stream:
        """The stream with this layer's output pending."""
        x, residual = prenorm(self.norm, h)
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act(gate_up))
        return Stream(out, residual)


class MoE(nn.Module):
    """See `LayerSet.moe`."""

    def __init__(self, *, norm: RMSNorm, gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate
        self.experts = experts

    def forward(self, h: Stream, ctx: Any) -> Stream:
        """The stream with this layer's output pending. vLLM's runner applies the gate itself."""
        x, residual = prenorm(self.norm, h)
        return Stream(self.experts(hidden_states=x, router_logits=x), residual)
