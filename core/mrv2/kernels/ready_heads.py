"""Heads of a packed projection made ready for attention inside a kernel: normalised, rotated."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from mrv2.kernels.registry import jit, tl


@jit()
def ready_heads(
    row,
    head,
    weight,
    eps,
    cos,
    sin,
    token,
    real,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads `head` [N] of a token's projection, which `row` points at; [N, BLOCK_DIM], zeros where not `real` [N].

    Rounds as `qk_norm_rope_cache` does.
    """
    d = tl.arange(0, BLOCK_DIM)[None, :]
    dtype: tl.constexpr = row.dtype.element_ty
    half: tl.constexpr = ROTARY_DIM // 2
    rotated = d < ROTARY_DIM
    partner = tl.where(d < half, d + half, tl.where(rotated, d - half, d))
    inside = real[:, None] & (d < DIM)
    at = row + head[:, None] * DIM
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + partner, mask=inside & rotated, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps)
        gain = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        partner_gain = tl.load(weight + partner, mask=d < DIM, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * partner_gain).to(dtype).to(tl.float32)
    c = tl.load(cos + token * ROTARY_DIM + d, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY_DIM + d, mask=rotated, other=0.0).to(tl.float32)
    turned = ((x * c).to(dtype).to(tl.float32) + y * s).to(dtype)
    return tl.where(rotated, turned, x.to(dtype))
