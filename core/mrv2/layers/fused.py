"""The native fused layers: compositions of the small ones, with the shortcuts that their order allows.

On a GPU launches are what costs, and fused kernels take the place of everything between the products, and for a few
tokens of the products too; on a CPU PyTorch's own operations are quicker than anything composed of loops over tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mrv2.kernels.gate_normed import gate_normed
from mrv2.kernels.gated_act import ACTIVATIONS, gated_act
from mrv2.kernels.project_normed import project_normed
from mrv2.kernels.project_onto import project_onto
from mrv2.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from mrv2.kernels.token_tile import takes_tokens
from mrv2.kernels.vector_tile import takes_vectors
from mrv2.layers.base import Stream
from mrv2.layers.linear import Linear, LinearBase, PackedLinear
from mrv2.layers.one_token import is_one_token
from mrv2.layers.rotary import Rotary, rotate
from mrv2.layers.small import Attention, RMSNorm

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext


FEW_TOKENS = 4
"""Up to here products are bound by reading their weights once, and kernels of our own that do what lies beside the
product are quicker than cuBLAS's and a launch for the rest. `benchmarks/tune_decode.py` says where that ends."""

EXTRA_PRODUCTS = 32 << 20
"""What the launches saved are worth: weights multiplied by a second token and on, which those kernels do one by one.
Measured on an H200: a layer of hidden size 1024 and MLP 3072 gains up to 4 tokens (27 µs against 31), one of 4096 and
14336 at 1 (110 against 125)."""


SOME_TOKENS, SOME_WEIGHTS = 32, 32 << 20
"""Up to here, from `FEW_TOKENS` on, the same kernels are quicker with the matrix units, if a layer's weights are so few
that reading them takes no longer than launches do: by 15 % of a step at 8 and 16 tokens."""


def are_few(x: Tensor, *linears: LinearBase) -> bool:
    """Whether products of `x` [num_tokens, hidden] are for kernels of our own: the one place that decides."""
    if x.dtype is not torch.bfloat16 and x.dtype is not torch.float16:
        return False
    weights = [linear.full_weight() for linear in linears]
    num_tokens, total = x.shape[0], sum(weight.numel() for weight in weights)
    if not x.is_contiguous():
        return False
    if num_tokens <= FEW_TOKENS:
        fits = takes_vectors(x, max(weight.shape[1] for weight in weights))
        return fits and (num_tokens - 1) * total <= EXTRA_PRODUCTS
    # In float16 what the norm is divided by last could overflow before.
    fits = num_tokens <= SOME_TOKENS and x.dtype is torch.bfloat16
    return fits and total <= SOME_WEIGHTS and takes_tokens(x)


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
        # For a single token Python is what costs, and reading a sub-module as an attribute is a call in Python.
        self.members = (norm, qkv_proj, qk_norms, rotary, o_proj, attn.name, attn.args)

    def forward(self, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        """The stream with this layer's output pending; `positions` [num_tokens]."""
        if h.x.is_cuda:
            return self.forward_fused(h, positions, ctx)
        if ctx.one_token is not None and is_one_token(h.x):
            return ctx.one_token.attend(self, h, positions, ctx)
        norm, qkv_proj, qk_norms, rotary, o_proj, name, args = self.members
        x, residual = norm.add(h)
        num_q, num_kv = args.num_heads, args.num_kv_heads
        heads = qkv_proj.project(x).view(-1, num_q + 2 * num_kv, args.head_dim)
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if qk_norms is None:
            # Queries and keys lie side by side: rotate them as one.
            qk = rotate(qk, ctx.angles(rotary.table, positions, qk.dtype))
            q, k = qk[:, :num_q], qk[:, num_q:]
        else:
            q, k = rotary(positions, qk_norms[0](qk[:, :num_q]), qk_norms[1](qk[:, num_q:]), ctx)
        out = ctx.attend(name, q, k, v, args).reshape(-1, num_q * args.head_dim)
        return Stream(o_proj.project(out), residual)

    def forward_fused(self, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        """The same, with one kernel from the packed projection to the cache."""
        norm, qkv_proj, _, _, o_proj, _, _ = self.members
        if are_few(h.x, qkv_proj, o_proj):
            return self.forward_few(h, positions, ctx)
        x, residual = norm.add_fused(h)
        return Stream(o_proj.project(self._attend(qkv_proj.project(x), positions, ctx)), residual)

    def forward_few(self, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        """The same for a few tokens, in four kernels; nothing is pending in the stream it returns."""
        norm, qkv_proj, _, _, o_proj, _, _ = self.members
        weight = qkv_proj.full_weight()
        summed = None if h.residual is None else torch.empty_like(h.x)
        qkv = h.x.new_empty(h.x.shape[0], weight.shape[0])
        project_normed(
            x=h.x,
            residual=h.residual,
            gain=norm.weight,
            eps=norm.eps,
            weight=weight,
            bias=qkv_proj.bias,
            summed=summed,
            out=qkv,
            tile=None,
        )
        attended = self._attend(qkv, positions, ctx)
        return add_projected(o_proj, attended, h.x if summed is None else summed)

    def _attend(self, qkv: Tensor, positions: Tensor, ctx: NativeContext) -> Tensor:
        """From the packed projection to what the output projection takes, [num_tokens, num_heads * head_dim]."""
        _, _, qk_norms, rotary, _, name, args = self.members
        angles = ctx.angles(rotary.table, positions, qkv.dtype)
        cos, sin = angles.cos[:, 0], angles.sin[:, 0]
        norms: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 0.0)
        if qk_norms is not None:
            norms = qk_norms[0].weight, qk_norms[1].weight, qk_norms[0].eps, qk_norms[1].eps
        attended = ctx.attend_projected(name, qkv, norms, (cos, sin), args)
        if attended is not None:
            return attended.view(-1, args.num_heads * args.head_dim)
        cache, meta = ctx.cache_of(name)
        q = qkv.new_empty(qkv.shape[0], args.num_heads, args.head_dim)
        qk_norm_rope_cache(
            qkv=qkv,
            q_weight=norms[0],
            k_weight=norms[1],
            q_eps=norms[2],
            k_eps=norms[3],
            cos=cos,
            sin=sin,
            slot_mapping=meta.slot_mapping,
            cache=cache,
            q=q,
        )
        return ctx.attend(name, q, None, None, args).reshape(-1, args.num_heads * args.head_dim)


def add_projected(linear: Linear, x: Tensor, residual: Tensor) -> Stream:
    """`linear` of a few tokens, added to the stream."""
    out = torch.empty_like(residual)
    project_onto(
        x=x,
        weight=linear.full_weight(),
        bias=linear.bias,
        residual=residual,
        arrived=linear.arrivals(),
        out=out,
        tile=None,
    )
    return Stream(out, None)


class GatedMLP(nn.Module):
    """See `LayerSet.gated_mlp`."""

    def __init__(self, *, norm: RMSNorm, gate_up_proj: PackedLinear, down_proj: Linear, act: str) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act = act  # a key of ACTIVATIONS
        self.members = (norm, gate_up_proj, down_proj, ACTIVATIONS[act])  # see SelfAttention

    def forward(self, h: Stream, ctx: NativeContext) -> Stream:
        """The stream with this layer's output pending."""
        if h.x.is_cuda:
            return self.forward_fused(h)
        if ctx.one_token is not None and is_one_token(h.x):
            return ctx.one_token.gate(self, h)
        norm, gate_up_proj, down_proj, act = self.members
        x, residual = norm.add(h)
        gate, up = gate_up_proj.project(x).chunk(2, -1)
        return Stream(down_proj.project(act(gate).mul_(up)), residual)

    def forward_fused(self, h: Stream) -> Stream:
        """The same, with one kernel for the gate."""
        norm, gate_up_proj, down_proj, _ = self.members
        if are_few(h.x, gate_up_proj, down_proj):
            return self.forward_few(h)
        x, residual = norm.add_fused(h)
        gate_up = gate_up_proj.project(x)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        gated_act(gate_up=gate_up, act=self.act, out=gated)
        return Stream(down_proj.project(gated), residual)

    def forward_few(self, h: Stream) -> Stream:
        """The same for a few tokens, in two kernels; nothing is pending in the stream it returns."""
        norm, gate_up_proj, down_proj, _ = self.members
        weight = gate_up_proj.full_weight()
        summed = None if h.residual is None else torch.empty_like(h.x)
        gated = h.x.new_empty(h.x.shape[0], weight.shape[0] // 2)
        gate_normed(
            x=h.x,
            residual=h.residual,
            gain=norm.weight,
            eps=norm.eps,
            weight=weight,
            bias=gate_up_proj.bias,
            act=self.act,
            summed=summed,
            out=gated,
            tile=None,
        )
        return add_projected(down_proj, gated, h.x if summed is None else summed)
