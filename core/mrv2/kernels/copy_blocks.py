"""Copies of whole blocks within one tensor of the pool."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_BLOCK = 1024


def copy_blocks_ref(*, pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Torch twin of `copy_blocks`."""
    pages[targets.long()] = pages[sources.long()]


@kernel(twin=copy_blocks_ref)
def copy_blocks(*, pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block `sources[k]` to block `targets[k]`, for all k in no particular order.

    Args:
        pages: in and out, [num_blocks, width] of any dtype, rows contiguous.
        sources: [num_copies] int32.
        targets: [num_copies] int32, all different, none of them a source.
    """
    width = pages.shape[1]
    grid = (sources.shape[0], triton.cdiv(width, _BLOCK))
    _copy_blocks_kernel[grid](pages, pages.stride(0), width, sources, targets, BLOCK=_BLOCK)


@jit()
def _copy_blocks_kernel(pages, stride, width, sources, targets, BLOCK: tl.constexpr):
    k = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    # Widened before it multiplies: a pool holds more than 2**31 elements.
    source = tl.load(sources + k).to(tl.int64) * stride
    target = tl.load(targets + k).to(tl.int64) * stride
    tl.store(pages + target + col, tl.load(pages + source + col, mask=inside), mask=inside)
