"""A projection added to the residual stream, for few tokens, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.dependent import dependent_options
from mrv2.kernels.registry import jit, kernel, tl, triton
from mrv2.kernels.token_tile import (
    ARRIVALS,
    FROM_TOKENS,
    TokenTile,
    choose_token_tile,
    multiply,
    takes_tokens,
    token_block,
)
from mrv2.kernels.vector_tile import (
    VectorTile,
    await_inputs,
    choose_vector_tile,
    load_rows,
    load_vectors,
    takes_vectors,
)


def project_onto_ref(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    arrived: Tensor | None,
    out: Tensor,
    tile: VectorTile | TokenTile | None,
) -> None:
    """Torch twin of `project_onto`."""
    torch.add(F.linear(x, weight, bias), residual, out=out)


@kernel(twin=project_onto_ref)
def project_onto(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    arrived: Tensor | None,
    out: Tensor,
    tile: VectorTile | TokenTile | None,
) -> None:
    """`out = residual + (x @ weight.T + bias)`, the projection rounded before it is added, sums in float32.

    All tensors are contiguous, and all but `arrived` of one dtype. Programs that share the length of rows leave their
    sums in memory, and the one that is done last adds them up, in the order of the rows: results are the same each
    time, and a token's don't depend on the other tokens, only on how many there are.

    Args:
        x: [num_tokens, size], at most as many tokens as the tile takes.
        weight: [out_size, size].
        bias: [out_size].
        residual: [num_tokens, out_size].
        arrived: in and out, as `make_arrivals` makes it: of this product alone, or of launches one after the other.
            None: programs don't share rows.
        out: out, [num_tokens, out_size]; may be `residual` itself.
        tile: how the work is cut; None: as is best.
    """
    num_tokens, size = x.shape
    assert x.is_contiguous() and weight.is_contiguous()  # noqa: PT018
    assert residual.is_contiguous() and out.is_contiguous()  # noqa: PT018
    num_rows = weight.shape[0]
    if tile is None:
        few = num_tokens < FROM_TOKENS and takes_vectors(x, size)
        shared = arrived is not None
        tile = choose_vector_tile(size) if few else choose_token_tile(num_tokens, num_rows, size, splits=shared)
    if isinstance(tile, TokenTile):
        _launch_tokens(x, weight, bias, residual, arrived, out, tile)
        return
    assert takes_vectors(x, size)
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
        **dependent_options(x),
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


def _launch_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    arrived: Tensor | None,
    out: Tensor,
    tile: TokenTile,
) -> None:
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    programs = triton.cdiv(num_rows, tile.rows)
    assert takes_tokens(x)
    assert tile.splits == 1 or (arrived is not None and programs <= ARRIVALS)
    partial = x if tile.splits == 1 else x.new_empty(tile.splits, num_tokens, num_rows, dtype=torch.float32)
    _project_onto_tokens_kernel[(programs, tile.splits)](
        x,
        weight,
        x if bias is None else bias,
        residual,
        out,
        partial,
        x if arrived is None else arrived,
        num_tokens,
        num_rows,
        SIZE=size,
        SPAN=tile.span(size),
        SPLITS=tile.splits,
        TOKENS=token_block(num_tokens),
        ROWS=tile.rows,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        **dependent_options(x),
    )


@jit(do_not_specialize=["num_tokens"])
def _project_onto_tokens_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    arrived,
    num_tokens,
    num_rows,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    pid = tl.program_id(0)
    split = tl.program_id(1)
    row = pid * ROWS + tl.arange(0, ROWS)
    value, _ = multiply(
        x,
        x,
        x,
        x,
        weight,
        tl.minimum(row, num_rows - 1),
        num_tokens,
        split * SPAN,
        0,
        SIZE=SIZE,
        SPAN=SPAN,
        EVEN=SIZE == SPAN * SPLITS,
        TOKENS=TOKENS,
        ROWS=ROWS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        NORM=False,
        HAS_RESIDUAL=False,
        DEPENDENT=DEPENDENT,
    )
    token = tl.arange(0, TOKENS)
    inside = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    at = token[:, None] * num_rows + row[None, :]
    last = split == SPLITS - 1
    if SPLITS > 1:
        tl.store(partial + split * num_tokens * num_rows + at, value, mask=inside)
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        last = tl.atomic_add(arrived + pid, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        dtype = out.dtype.element_ty
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if SPLITS > 1:
            tl.store(arrived + pid, 0)  # for the next launch, replays included
            total = tl.zeros([TOKENS, ROWS], tl.float32)
            for s in tl.static_range(SPLITS):
                # Past the first-level cache, which other programs' stores don't reach.
                more = partial + s * num_tokens * num_rows + at
                total += tl.load(more, mask=inside, other=0.0, cache_modifier=".cg")
        else:
            total = value
        if HAS_BIAS:
            total += tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, (before + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)
