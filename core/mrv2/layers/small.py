"""Small layers without a product: norms, embeddings, activations, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrv2.attn.backend import AttentionArgs
from mrv2.errors import LayerArgumentError
from mrv2.kernels.add_rms_norm import add_rms_norm, rms_norm_ref
from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.layers.base import Slot, Stream
from mrv2.layers.linear import make_parameter, own_slots

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext


def check_activation(name: str, where: str) -> str:
    """`name`, if it is an activation's.

    Raises:
        LayerArgumentError: there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise LayerArgumentError(
            f"activation {name!r} is unknown", where=where, fix=f"use one of: {', '.join(sorted(ACTIVATIONS))}"
        )
    return name


FEW_TOKENS = 8
"""Up to here the number of operations costs more than the bytes they move."""


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis; see `LayerSet.norm`.

    As transformers does it: the mean square in float32, the result cast back, then the weight.

    On the CPU, PyTorch composes RMS norm of seven operations but has one kernel for layer norm, and the layer
    norm of (x, -x) is the RMS norm of x: its mean is zero, its variance the mean square. For a few tokens that
    takes a third of the time.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = make_parameter(size)
        self.eps = eps
        # The weight, [2, size] the weight twice, [2, 1] 1 and -1, [2, size] as a shape, the weight's version.
        self._short: tuple[nn.Parameter, Tensor, Tensor, torch.Size, int] | None = None

    def add(self, h: Stream) -> tuple[Tensor, Tensor]:
        """Add the pending output and normalise; see `StepContext.prenorm`."""
        if h.x.is_cuda:
            return self.add_fused(h)
        residual = h.x if h.residual is None else h.x + h.residual
        return self.forward(residual), residual

    def add_fused(self, h: Stream) -> tuple[Tensor, Tensor]:
        """`add` in one kernel."""
        out = torch.empty_like(h.x)
        summed = None if h.residual is None else torch.empty_like(h.x)
        add_rms_norm(x=h.x, residual=h.residual, weight=self.weight, eps=self.eps, summed=summed, out=out)
        return out, h.x if summed is None else summed

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        short = self._short
        if short is not None and x.dim() == 2 and x.shape[0] <= FEW_TOKENS and short[0]._version == short[4]:
            _, twice, signs, shape, _ = short
            return torch.layer_norm(x[:, None] * signs, shape, twice, None, self.eps)[:, 0]
        return rms_norm_ref(x, self.weight, self.eps)

    def finalize_weights(self) -> None:
        """Prepare the short way, where it applies."""
        weight = self.weight
        self._short = None
        if weight.dtype is torch.float32 and weight.device.type == "cpu" and not weight.is_inference():
            twice = weight.detach().expand(2, -1).contiguous()
            signs = torch.tensor([[1.0], [-1.0]], device="cpu")
            self._short = (weight, twice, signs, twice.shape, weight._version)

    def weight_slots(self) -> dict[str, Slot]:
        """`weight`."""
        return own_slots(self)


class Embedding(nn.Module):
    """Token table; see `LayerSet.embedding`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = make_parameter(vocab_size, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] integers to [num_tokens, hidden]."""
        return F.embedding(input_ids, self.weight)

    def weight_slots(self) -> dict[str, Slot]:
        """`weight`."""
        return own_slots(self)


class Attention(nn.Module):
    """Cache write and causal attention; see `LayerSet.attention`. Has no parameters."""

    def __init__(self, name: str, args: AttentionArgs) -> None:
        super().__init__()
        self.name = name  # full: caches go by it
        self.args = args

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: NativeContext) -> Tensor:
        """[num_tokens, heads * head_dim] from q [num_tokens, heads, head_dim], k and v [num_tokens, kv_heads,
        head_dim]; each may come flat over its last two axes.
        """
        args = self.args
        out = ctx.attend(
            self.name,
            q.view(-1, args.num_heads, args.head_dim),
            k.view(-1, args.num_kv_heads, args.head_dim),
            v.view(-1, args.num_kv_heads, args.head_dim),
            args,
        )
        return out.reshape(-1, args.num_heads * args.head_dim)
