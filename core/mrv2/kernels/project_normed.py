"""RMS norm and the projection that follows it, for few tokens, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.add_rms_norm import add_rms_norm_ref
from mrv2.kernels.dependent import dependent_options
from mrv2.kernels.registry import jit, kernel, tl, triton
from mrv2.kernels.token_tile import FROM_TOKENS, TokenTile, choose_token_tile, multiply, takes_tokens, token_block
from mrv2.kernels.vector_tile import (
    VectorTile,
    await_inputs,
    choose_vector_tile,
    load_normed,
    load_rows,
    takes_vectors,
)


def project_normed_ref(
    *,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    out: Tensor,
    tile: VectorTile | TokenTile | None,
) -> None:
    """Torch twin of `project_normed`."""
    normed = torch.empty_like(x)
    add_rms_norm_ref(x=x, residual=residual, weight=gain, eps=eps, summed=summed, out=normed)
    out.copy_(F.linear(normed, weight, bias))


@kernel(twin=project_normed_ref)
def project_normed(
    *,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    summed: Tensor | None,
    out: Tensor,
    tile: VectorTile | TokenTile | None,
) -> None:
    """`summed = x + residual`, `out = norm(summed) @ weight.T + bias`; without a residual, of the norm of `x`.

    Sums are float32. Cut into a `VectorTile`, it rounds where `add_rms_norm` does; into a `TokenTile`, the norm is
    rounded once. All tensors are contiguous and of one dtype.

    Args:
        x: [num_tokens, size], at most as many tokens as the tile takes.
        residual: [num_tokens, size]; None: `x` is the whole stream.
        gain: [size], weight of the norm.
        eps: of the norm.
        weight: [out_size, size].
        bias: [out_size].
        summed: out, [num_tokens, size], None exactly where `residual` is. Neither `x` nor `residual` itself: all
            programs read those.
        out: out, [num_tokens, out_size].
        tile: how the work is cut; None: as is best.
    """
    num_tokens, size = x.shape
    assert (residual is None) == (summed is None)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()  # noqa: PT018
    num_rows = weight.shape[0]
    if tile is None:
        few = num_tokens < FROM_TOKENS and takes_vectors(x, size)
        tile = choose_vector_tile(size) if few else choose_token_tile(num_tokens, num_rows, size)
    if isinstance(tile, TokenTile):
        assert takes_tokens(x)
        assert tile.splits == 1
        _project_normed_tokens_kernel[(triton.cdiv(num_rows, tile.rows),)](
            x,
            x if residual is None else residual,
            gain,
            eps,
            weight,
            x if bias is None else bias,
            x if summed is None else summed,
            out,
            num_tokens,
            num_rows,
            SIZE=size,
            SPAN=tile.span(size),
            TOKENS=token_block(num_tokens),
            ROWS=tile.rows,
            DEPTH=tile.depth,
            STAGES=tile.stages,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            num_warps=tile.num_warps,
            **dependent_options(x),
        )
        return
    assert takes_vectors(x, size)
    _project_normed_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        x if residual is None else residual,
        gain,
        eps,
        weight,
        x if bias is None else bias,
        x if summed is None else summed,
        out,
        num_tokens,
        num_rows,
        SIZE=size,
        ROW=triton.next_power_of_2(size),
        TOKENS=triton.next_power_of_2(num_tokens),
        ROWS=tile.rows,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        **dependent_options(x),
    )


@jit(do_not_specialize=["num_tokens", "num_rows"])
def _project_normed_kernel(
    x,
    residual,
    gain,
    eps,
    weight,
    bias,
    summed,
    out,
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, ROW)
    tile = load_rows(weight, row, num_rows, SIZE, ROW)
    gains = tl.load(gain + k, mask=k < SIZE, other=0.0).to(tl.float32)
    await_inputs(DEPENDENT)
    normed = load_normed(
        x,
        residual,
        gains,
        eps,
        summed,
        num_tokens,
        tl.where(tl.program_id(0) == 0, SIZE, 0),
        SIZE=SIZE,
        ROW=ROW,
        TOKENS=TOKENS,
        HAS_RESIDUAL=HAS_RESIDUAL,
    )
    if HAS_BIAS:
        more = tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)
    for t in tl.static_range(TOKENS):
        value = tl.sum(tile.to(tl.float32) * normed[t][None, :], 1)
        if HAS_BIAS:
            value += more
        inside = row < tl.where(num_tokens > t, num_rows, 0)
        tl.store(out + t * num_rows + row, value.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_tokens"])
def _project_normed_tokens_kernel(
    x,
    residual,
    gain,
    eps,
    weight,
    bias,
    summed,
    out,
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value, squares = multiply(
        x,
        residual,
        gain,
        summed,
        weight,
        tl.minimum(row, num_rows - 1),
        num_tokens,
        0,
        tl.where(tl.program_id(0) == 0, SIZE, 0),
        SIZE=SIZE,
        SPAN=SPAN,
        EVEN=SIZE == SPAN,
        TOKENS=TOKENS,
        ROWS=ROWS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        NORM=True,
        HAS_RESIDUAL=HAS_RESIDUAL,
        DEPENDENT=DEPENDENT,
    )
    value = value * tl.rsqrt(squares / SIZE + eps)[:, None]
    if HAS_BIAS:
        value += tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)[None, :]
    token = tl.arange(0, TOKENS)
    inside = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    tl.store(out + token[:, None] * num_rows + row[None, :], value.to(out.dtype.element_ty), mask=inside)
