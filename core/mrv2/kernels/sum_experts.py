"""What a token's experts had to say, added up."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_BLOCK = 512


def sum_experts_ref(*, parts: Tensor, experts: Tensor, out: Tensor) -> None:
    """Torch twin of `sum_experts`."""
    # Selected and not multiplied: what was left out holds arbitrary bits.
    heard = torch.where((experts >= 0)[..., None], parts.view(*experts.shape, -1), 0.0)
    out.copy_(heard.sum(1, dtype=torch.float32))


@kernel(twin=sum_experts_ref)
def sum_experts(*, parts: Tensor, experts: Tensor, out: Tensor) -> None:
    """The sum of each token's rows, in float32 and in the order of its experts; zeros for a token without any.

    Args:
        parts: [num_tokens * top_k, hidden], contiguous, weighted.
        experts: [num_tokens, top_k] int32, contiguous; rows of negative ones aren't read.
        out: out, [num_tokens, hidden], rows contiguous, same dtype.
    """
    num_tokens, hidden = out.shape
    assert parts.is_contiguous() and experts.is_contiguous()  # noqa: PT018
    assert out.stride(1) == 1
    if num_tokens == 0:
        return
    _sum_experts_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
        parts, experts, out, out.stride(0), HIDDEN=hidden, TOP_K=experts.shape[1], BLOCK=_BLOCK
    )


@jit()
def _sum_experts_kernel(
    parts, experts, out, out_stride, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        length = tl.where(tl.load(experts + token * TOP_K + j) >= 0, HIDDEN, 0)
        part = tl.load(parts + (token * TOP_K + j) * HIDDEN + lane, mask=lane < length, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * out_stride + lane, total.to(out.dtype.element_ty), mask=lane < HIDDEN)
