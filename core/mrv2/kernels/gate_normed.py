"""RMS norm, the gate and up projections and the gated activation, for few tokens, in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.add_rms_norm import add_rms_norm_ref
from mrv2.kernels.dependent import dependent_options
from mrv2.kernels.gated_act import FORMULAS, activate, gated_act_ref
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
    tile: VectorTile | TokenTile | None,
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
    tile: VectorTile | TokenTile | None,
) -> None:
    """`summed = x + residual`, `out = act(gate) * up`, gate and up being the projections of the norm of `summed`.

    A program has rows of the gate and the same ones of up. Sums are float32, and rounded as `gated_act` takes them. Cut
    into a `VectorTile`, it rounds where `add_rms_norm` does; into a `TokenTile`, the norm is rounded once. All tensors
    are contiguous and of one dtype.

    Args:
        x: [num_tokens, size], at most as many tokens as the tile takes.
        residual: [num_tokens, size]; None: `x` is the whole stream.
        gain: [size], weight of the norm.
        eps: of the norm.
        weight: [2 * out_size, size], gate, then up.
        bias: [2 * out_size].
        act: a key of `ACTIVATIONS`.
        summed: out, [num_tokens, size], None exactly where `residual` is. Neither `x` nor `residual` itself: all
            programs read those.
        out: out, [num_tokens, out_size].
        tile: how the work is cut: a `VectorTile` in rows of one of the two; None: as is best.
    """
    num_tokens, size = x.shape
    num_rows = out.shape[1]
    assert (residual is None) == (summed is None)
    assert weight.shape[0] == 2 * num_rows
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()  # noqa: PT018
    if tile is None:
        few = num_tokens < FROM_TOKENS and takes_vectors(x, size)
        tile = choose_vector_tile(size, matrices=2) if few else choose_token_tile(num_tokens, 2 * num_rows, size)
    if isinstance(tile, TokenTile):
        assert takes_tokens(x)
        assert tile.splits == 1
        _gate_normed_tokens_kernel[(triton.cdiv(2 * num_rows, tile.rows),)](
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
            ROWS=tile.rows // 2,
            DEPTH=tile.depth,
            STAGES=tile.stages,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            FORMULA=FORMULAS[act],
            num_warps=tile.num_warps,
            **dependent_options(x),
        )
        return
    assert takes_vectors(x, size)
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
        **dependent_options(x),
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


@jit(do_not_specialize=["num_tokens"])
def _gate_normed_tokens_kernel(
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
    FORMULA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Gate and up take turns: the two of a pair end up in one thread.
    lane = tl.arange(0, 2 * ROWS)
    pair = tl.program_id(0) * ROWS + lane // 2
    row = tl.minimum(pair, num_rows - 1) + (lane % 2) * num_rows
    value, squares = multiply(
        x,
        residual,
        gain,
        summed,
        weight,
        row,
        num_tokens,
        0,
        tl.where(tl.program_id(0) == 0, SIZE, 0),
        SIZE=SIZE,
        SPAN=SPAN,
        EVEN=SIZE == SPAN,
        TOKENS=TOKENS,
        ROWS=2 * ROWS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        NORM=True,
        HAS_RESIDUAL=HAS_RESIDUAL,
        DEPENDENT=DEPENDENT,
    )
    value = value * tl.rsqrt(squares / SIZE + eps)[:, None]
    if HAS_BIAS:
        value += tl.load(bias + row).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gate, up = tl.split(tl.reshape(value.to(dtype).to(tl.float32), [TOKENS, ROWS, 2]))
    acted = activate(gate, FORMULA).to(dtype).to(tl.float32)
    token = tl.arange(0, TOKENS)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (token < num_tokens)[:, None] & (column < num_rows)[None, :]
    tl.store(out + token[:, None] * num_rows + column[None, :], (acted * up).to(dtype), mask=inside)
