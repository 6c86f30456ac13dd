"""A projection added to the residual stream, for a few tokens, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.dependent import dependent_options, depends
from mrv2.kernels.registry import jit, kernel, tl, triton
from mrv2.kernels.vector_tile import (
    VectorTile,
    await_inputs,
    choose_vector_tile,
    load_rows,
    load_vectors,
    takes_vectors,
)


def project_onto_ref(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, out: Tensor, tile: VectorTile | None
) -> None:
    """Torch twin of `project_onto`."""
    torch.add(F.linear(x, weight, bias), residual, out=out)


@kernel(twin=project_onto_ref)
def project_onto(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, out: Tensor, tile: VectorTile | None
) -> None:
    """`out = residual + (x @ weight.T + bias)`, the projection rounded before it is added, sums in float32.

    All tensors are contiguous and of one dtype.

    Args:
        x: [num_tokens, size], at most `MOST_TOKENS` tokens.
        weight: [out_size, size], size at most `LONGEST_ROW`.
        bias: [out_size].
        residual: [num_tokens, out_size].
        out: out, [num_tokens, out_size]; may be `residual` itself.
        tile: how the work is cut; None: as is best.
    """
    num_tokens, size = x.shape
    assert takes_vectors(x, size)
    assert x.is_contiguous() and weight.is_contiguous()  # noqa: PT018
    assert residual.is_contiguous() and out.is_contiguous()  # noqa: PT018
    tile = tile or choose_vector_tile(size)
    num_rows = weight.shape[0]
    _project_onto_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        weight,
        x if bias is None else bias,
        residual,
        out,
        num_tokens,
        num_rows,
        SIZE=size,
        ROW=triton.next_power_of_2(size),
        TOKENS=triton.next_power_of_2(num_tokens),
        ROWS=tile.rows,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        **dependent_options(depends(x)),
    )


@jit(do_not_specialize=["num_tokens", "num_rows"])
def _project_onto_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = load_rows(weight, row, num_rows, SIZE, ROW)
    await_inputs(DEPENDENT)
    dtype = out.dtype.element_ty
    vectors = load_vectors(x, num_tokens, SIZE, ROW, TOKENS)
    for t in tl.static_range(TOKENS):
        inside = row < tl.where(num_tokens > t, num_rows, 0)
        before = tl.load(residual + t * num_rows + row, mask=inside, other=0.0).to(tl.float32)
        value = tl.sum(tile.to(tl.float32) * vectors[t].to(tl.float32)[None, :], 1)
        if HAS_BIAS:
            value += tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)
        tl.store(out + t * num_rows + row, (before + value.to(dtype).to(tl.float32)).to(dtype), mask=inside)
