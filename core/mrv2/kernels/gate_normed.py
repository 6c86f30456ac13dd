"""RMS norm, the gate and up projections and the gated activation, for a few tokens, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.add_rms_norm import add_rms_norm_ref
from mrv2.kernels.dependent import dependent_options, depends
from mrv2.kernels.gated_act import FORMULAS, activate, gated_act_ref
from mrv2.kernels.registry import jit, kernel, tl, triton
from mrv2.kernels.vector_tile import (
    VectorTile,
    await_inputs,
    choose_vector_tile,
    load_normed,
    load_rows,
    takes_vectors,
)


def gate_normed_ref(
    *,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    summed: Tensor | None,
    out: Tensor,
    tile: VectorTile | None,
) -> None:
    """Torch twin of `gate_normed`."""
    normed = torch.empty_like(x)
    add_rms_norm_ref(x=x, residual=residual, weight=gain, eps=eps, summed=summed, out=normed)
    gated_act_ref(gate_up=F.linear(normed, weight, bias), act=act, out=out)


@kernel(twin=gate_normed_ref)
def gate_normed(
    *,
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    summed: Tensor | None,
    out: Tensor,
    tile: VectorTile | None,
) -> None:
    """`summed = x + residual`, `out = act(gate) * up`, gate and up being the projections of the norm of `summed`.

    A program has rows of the gate and the same ones of up. Rounds where `add_rms_norm`, a product with float32 sums and
    `gated_act` do. All tensors are contiguous and of one dtype.

    Args:
        x: [num_tokens, size], at most `MOST_TOKENS` tokens.
        residual: [num_tokens, size]; None: `x` is the whole stream.
        gain: [size], weight of the norm.
        eps: of the norm.
        weight: [2 * out_size, size], gate, then up; size at most `LONGEST_ROW`.
        bias: [2 * out_size].
        act: a key of `ACTIVATIONS`.
        summed: out, [num_tokens, size], None exactly where `residual` is. Neither `x` nor `residual` itself: all
            programs read those.
        out: out, [num_tokens, out_size].
        tile: how the work is cut, in rows of one of the two; None: as is best.
    """
    num_tokens, size = x.shape
    num_rows = out.shape[1]
    assert takes_vectors(x, size)
    assert (residual is None) == (summed is None)
    assert weight.shape[0] == 2 * num_rows
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()  # noqa: PT018
    tile = tile or choose_vector_tile(size, matrices=2)
    _gate_normed_kernel[(triton.cdiv(num_rows, tile.rows),)](
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
        FORMULA=FORMULAS[act],
        num_warps=tile.num_warps,
        **dependent_options(depends(x)),
    )


@jit(do_not_specialize=["num_tokens", "num_rows"])
def _gate_normed_kernel(
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
    FORMULA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, ROW)
    dtype = out.dtype.element_ty
    gates = load_rows(weight, row, num_rows, SIZE, ROW)
    ups = load_rows(weight + num_rows.to(tl.int64) * SIZE, row, num_rows, SIZE, ROW)
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
    for t in tl.static_range(TOKENS):
        gate = tl.sum(gates.to(tl.float32) * normed[t][None, :], 1)
        up = tl.sum(ups.to(tl.float32) * normed[t][None, :], 1)
        if HAS_BIAS:
            gate += tl.load(bias + row, mask=row < num_rows, other=0.0).to(tl.float32)
            up += tl.load(bias + num_rows + row, mask=row < num_rows, other=0.0).to(tl.float32)
        acted = activate(gate.to(dtype).to(tl.float32), FORMULA).to(dtype).to(tl.float32)
        inside = row < tl.where(num_tokens > t, num_rows, 0)
        tl.store(out + t * num_rows + row, (acted * up.to(dtype).to(tl.float32)).to(dtype), mask=inside)
