"""The fused layers for one token on a CPU, which is what decoding a single request runs.

Decoding one request is bound by the weights that stream by, and they flush the caches: whatever runs between two
products meets cold code and cold data, and takes three times as long as alone. So as little as possible runs there.
NumPy's operations, which share PyTorch's memory, take a quarter of the time of PyTorch's at this size; buffers and
views are made once per runner and layer; the residual is added by the product that follows it. Products and softmax
attention stay PyTorch's.

float32 only; equal to the composed layers up to the order of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mrv2.attn.backend import AttentionBackend
from mrv2.attn.cpu import CpuAttention
from mrv2.layers.base import Stream
from mrv2.layers.linear import LinearBase
from mrv2.layers.small import RMSNorm

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext
    from mrv2.layers.fused import GatedMLP, SelfAttention

Floats = NDArray[np.float32]


def is_one_token(x: Tensor) -> bool:
    """Whether `x` [num_tokens, hidden] is for these layers."""
    return x.shape[0] == 1 and x.dtype is torch.float32


class OneToken:
    """Runs fused layers for a single token. One per runner, whose thread alone uses it.

    Args:
        attention: the runner's.
    """

    def __init__(self, attention: CpuAttention) -> None:
        self.attention = attention
        self._attentions: dict[nn.Module, _Attention] = {}
        self._mlps: dict[nn.Module, _MLP] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def attend(self, layer: SelfAttention, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        """`SelfAttention.forward`; nothing is pending in the stream it returns."""
        ready = self._attentions.get(layer)
        if ready is None or ready.weights is not layer.members[1].settled:
            ready = self._attentions[layer] = _Attention(layer, self)
        return ready(h, positions, ctx)

    def gate(self, layer: GatedMLP, h: Stream) -> Stream:
        """`GatedMLP.forward`; nothing is pending in the stream it returns."""
        ready = self._mlps.get(layer)
        if ready is None or ready.weights is not layer.members[1].settled:
            ready = self._mlps[layer] = _MLP(layer, self)
        return ready(h)

    def buffer(self, use: str, size: int) -> Tensor:
        """[1, size] float32, shared by all layers for one `use`: layers run one after the other."""
        key = (use, size)
        if key not in self._buffers:
            with torch.inference_mode(False):  # else it could only be written to in inference mode
                self._buffers[key] = torch.empty(1, size)
        return self._buffers[key]


def one_token_for(backend: AttentionBackend) -> OneToken | None:
    """What runs single tokens beside `backend`; None: nothing does, off the CPU."""
    return OneToken(backend) if isinstance(backend, CpuAttention) else None


class _Norm:
    """`RMSNorm.add` into a buffer."""

    def __init__(self, norm: RMSNorm, one: OneToken) -> None:
        self._weight_np: Floats = norm.weight.detach().numpy()
        self._eps, self._size = norm.eps, len(self._weight_np)
        self.out = one.buffer("normalised", self._size)
        self._out_np: Floats = self.out.numpy()[0]

    def __call__(self, h: Stream) -> Tensor:
        """The residual stream; its norm is in `out`."""
        x = h.x if h.residual is None else h.x + h.residual
        x_np, out_np = x.numpy()[0], self._out_np
        np.multiply(x_np, self._weight_np, out_np)
        np.multiply(out_np, (float(x_np.dot(x_np)) / self._size + self._eps) ** -0.5, out_np)
        return x


class _Product:
    """A projection from one buffer into another."""

    def __init__(self, linear: LinearBase, x: Tensor, out: Tensor) -> None:
        self._weight, self._bias = linear.full_weight().detach().t(), linear.bias
        self._x, self._out = x, out

    def __call__(self) -> None:
        if self._bias is None:
            torch.mm(self._x, self._weight, out=self._out)
        else:
            torch.addmm(self._bias, self._x, self._weight, out=self._out)


class _Onto:
    """A projection added to the residual stream. Its result is a new tensor: others may keep it."""

    def __init__(self, linear: LinearBase) -> None:
        self._weight, self._bias = linear.full_weight().detach().t(), linear.bias

    def __call__(self, residual: Tensor, x: Tensor) -> Stream:
        out = torch.addmm(residual, x, self._weight)
        return Stream(out if self._bias is None else out.add_(self._bias), None)


class _Attention:
    """A `SelfAttention` with its buffers."""

    def __init__(self, layer: SelfAttention, one: OneToken) -> None:
        norm, qkv_proj, qk_norms, rotary, o_proj, self._name, args = layer.members
        self.weights = qkv_proj.settled
        self._args, self._table, self._backend = args, rotary.table, one.attention
        num_q, num_qk = args.num_heads, args.num_heads + args.num_kv_heads
        self._norm = _Norm(norm, one)
        qkv = one.buffer("qkv", (num_qk + args.num_kv_heads) * args.head_dim)
        self._qkv_proj, self._o_proj = _Product(qkv_proj, self._norm.out, qkv), _Onto(o_proj)

        heads = qkv.view(-1, args.head_dim)
        self._q = heads[:num_q].view(1, args.num_kv_heads, -1, args.head_dim)
        self._kv_np: Floats = heads[num_q:].view(2, -1).numpy()
        qk_np: Floats = heads[:num_qk].numpy()
        self._head_norms: tuple[tuple[Floats, Floats, float], ...] = ()
        if qk_norms is not None:
            parts = zip((qk_np[:num_q], qk_np[num_q:]), qk_norms, strict=True)
            self._head_norms = tuple((x_np, n.weight.detach().numpy(), n.eps) for x_np, n in parts)

        dim = rotary.table.rotary_dim
        self._rotated_np = qk_np[:, :dim]
        self._turned_np: Floats = one.buffer("turned", num_qk * dim).view(-1, dim).numpy()
        self._halves_np = self._rotated_np[:, : dim // 2], self._rotated_np[:, dim // 2 :]
        self._turned_halves_np = self._turned_np[:, : dim // 2], self._turned_np[:, dim // 2 :]

    def __call__(self, h: Stream, positions: Tensor, ctx: NativeContext) -> Stream:
        residual = self._norm(h)
        self._qkv_proj()
        for x_np, weight_np, eps in self._head_norms:
            x_np *= (np.square(x_np).mean(-1, keepdims=True) + np.float32(eps)) ** np.float32(-0.5)
            x_np *= weight_np
        self._rotate(*ctx.angles_np(self._table, positions))
        cache, meta = ctx.cache_of(self._name)
        out = self._backend.attend_one(self._q, self._kv_np, cache=cache, meta=meta, args=self._args, memo=ctx.memo)
        return self._o_proj(residual, out)

    def _rotate(self, cos_np: Floats, sin_np: Floats) -> None:
        """`rotary.rotate`, in place."""
        x_np, turned_np = self._rotated_np, self._turned_np
        self._turned_halves_np[0][:], self._turned_halves_np[1][:] = self._halves_np[1], self._halves_np[0]
        np.multiply(turned_np, sin_np, turned_np)
        np.multiply(x_np, cos_np, x_np)
        np.add(x_np, turned_np, x_np)


class _MLP:
    """A `GatedMLP` with its buffers."""

    def __init__(self, layer: GatedMLP, one: OneToken) -> None:
        norm, gate_up_proj, down_proj, self._act = layer.members
        self.weights = gate_up_proj.settled
        self._norm = _Norm(norm, one)
        gate_up = one.buffer("gate_up", gate_up_proj.full_weight().shape[0])
        self._gate, self._up = gate_up.chunk(2, -1)
        self._gate_up_proj, self._down_proj = _Product(gate_up_proj, self._norm.out, gate_up), _Onto(down_proj)

    def __call__(self, h: Stream) -> Stream:
        residual = self._norm(h)
        self._gate_up_proj()
        return self._down_proj(residual, self._act(self._gate).mul_(self._up))
