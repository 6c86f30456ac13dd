"""The residual add and the RMS norm that follows it, in one pass over the stream."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_WARP_ELEMENTS = 512
"""Elements of a row per warp: 16 per thread, two loads of 16 bytes in half precision."""


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis as transformers casts it: statistics in float32, the result cast, then the weight."""
    if x.dtype is not torch.float32:
        return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_ref(
    *, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, summed: Tensor | None, out: Tensor
) -> None:
    """Torch twin of `add_rms_norm`."""
    if residual is not None:
        assert summed is not None
        x = summed.copy_(x + residual)
    out.copy_(rms_norm_ref(x, weight, eps))


@kernel(twin=add_rms_norm_ref)
def add_rms_norm(
    *, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, summed: Tensor | None, out: Tensor
) -> None:
    """`summed = x + residual`, `out = summed / rms(summed) * weight`; without a residual, the norm of `x`.

    Args:
        x: [num_tokens, size], rows contiguous.
        residual: [num_tokens, size], rows contiguous; None: `x` is the whole stream.
        weight: [size] of the same dtype.
        eps: added to the mean square.
        summed: out, like `x`, rounded to its dtype before the norm; None exactly where `residual` is. May be
            `x` or `residual` itself.
        out: out, like `x`.
    """
    num_tokens, size = x.shape
    assert (residual is None) == (summed is None)
    assert x.stride(1) == out.stride(1) == 1
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(size)
    pending, total = (x, x) if residual is None or summed is None else (residual, summed)
    _add_rms_norm_kernel[(num_tokens,)](
        x,
        x.stride(0),
        pending,
        pending.stride(0),
        weight,
        eps,
        total,
        total.stride(0),
        out,
        out.stride(0),
        size,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // _WARP_ELEMENTS, 1), 16),
    )


@jit()
def _add_rms_norm_kernel(
    x,
    x_stride,
    residual,
    residual_stride,
    weight,
    eps,
    summed,
    summed_stride,
    out,
    out_stride,
    size,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    dtype = out.dtype.element_ty
    value = tl.load(x + token * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + token * residual_stride + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(summed + token * summed_stride + lane, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    # Rounded before the weight, as the composition does it.
    normed = (value * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + lane, (normed * gain).to(dtype), mask=inside)
