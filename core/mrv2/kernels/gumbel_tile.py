"""Gumbel noise inside Triton kernels: what `gumbel` computes, in float32."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from mrv2.kernels.registry import jit, tl


@jit()
def gumbel_of_bits(bits):
    """What `gumbel.gumbel_from_bits` does. Where noise is large, v is tiny and keeps its full resolution: there a
    series stands for the first logarithm. Elsewhere 1 - v comes from the complement of the bits, since v itself
    would round to 1 at the other end.
    """
    v = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    w = ((~bits).to(tl.float32) + 0.5) * (2.0**-32)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 1.0 / 32, series, -tl.log(w)))


@jit()
def gumbel_of_tokens(token, seed, position, stream):
    """Noise of each of `token`, an int32 tile of any ids; equal to that of whole counters bit for bit."""
    zero = tl.zeros_like(token)
    r0, r1, r2, r3 = tl.philox(seed, token >> 2, zero + position, zero + stream, zero)
    word = token & 3
    return gumbel_of_bits(tl.where(word == 0, r0, tl.where(word == 1, r1, tl.where(word == 2, r2, r3))))
