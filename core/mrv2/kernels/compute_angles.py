"""Cosines and sines of a step's positions, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton


def compute_angles_ref(*, positions: Tensor, inv_freq: Tensor, scaling: float, cos: Tensor, sin: Tensor) -> None:
    """Torch twin of `compute_angles`."""
    freqs = positions[:, None].float() * inv_freq
    c, s = freqs.cos() * scaling, freqs.sin() * scaling
    cos.copy_(torch.cat((c, c), -1))
    sin.copy_(torch.cat((-s, s), -1))


@kernel(twin=compute_angles_ref)
def compute_angles(*, positions: Tensor, inv_freq: Tensor, scaling: float, cos: Tensor, sin: Tensor) -> None:
    """`cos` and `sin` of `positions * inv_freq`, each twice, side by side, times `scaling`; computed in float32.

    Args:
        positions: [num_tokens] integers.
        inv_freq: [rotary_dim / 2] or [num_tokens, rotary_dim / 2] float32, contiguous.
        scaling: of both.
        cos: out, [num_tokens, rotary_dim], contiguous.
        sin: out, like `cos`; its first half negated.
    """
    num_tokens, rotary_dim = cos.shape
    assert inv_freq.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()  # noqa: PT018
    if num_tokens == 0:
        return
    half = rotary_dim // 2
    _compute_angles_kernel[(num_tokens,)](
        positions,
        positions.stride(0),
        inv_freq,
        half if inv_freq.dim() == 2 else 0,
        scaling,
        cos,
        sin,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        num_warps=2,
    )


@jit()
def _compute_angles_kernel(
    positions, position_stride, inv_freq, freq_stride, scaling, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    position = tl.load(positions + token * position_stride).to(tl.float32)
    angle = position * tl.load(inv_freq + token * freq_stride + d, mask=d < HALF, other=0.0)
    dtype = cos.dtype.element_ty
    c, s = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    at = token * (2 * HALF) + d
    tl.store(cos + at, c.to(dtype), mask=d < HALF)
    tl.store(cos + at + HALF, c.to(dtype), mask=d < HALF)
    tl.store(sin + at, (-s).to(dtype), mask=d < HALF)
    tl.store(sin + at + HALF, s.to(dtype), mask=d < HALF)
