"""What lies between the Q/K/V projection and attention, in one launch: split, norm, rotation, cache write."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.add_rms_norm import rms_norm_ref
from mrv2.kernels.dependent import await_previous, dependent_options
from mrv2.kernels.registry import jit, kernel, tl, triton

_ELEMENTS = 1024
"""Elements of one program's heads together."""


def qk_norm_rope_cache_ref(
    *,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_eps: float,
    k_eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    q: Tensor,
) -> None:
    """Torch twin of `qk_norm_rope_cache`."""
    num_q, num_kv, head_dim = q.shape[1], cache.shape[3], q.shape[2]
    queries, k, v = torch.split(qkv.reshape(-1, num_q + 2 * num_kv, head_dim), [num_q, num_kv, num_kv], 1)
    if q_weight is not None:
        queries = rms_norm_ref(queries, q_weight, q_eps)
    if k_weight is not None:
        k = rms_norm_ref(k, k_weight, k_eps)
    q.copy_(_rotate(queries, cos, sin))
    written = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[written]
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    cache[:, 0].index_put_((block, offset), _rotate(k, cos, sin)[written])
    cache[:, 1].index_put_((block, offset), v[written])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = cos.shape[-1]
    head, rest = x[..., :dim], x[..., dim:]
    rotated = (head * cos[:, None]).addcmul_(head.roll(dim // 2, -1), sin[:, None])
    return torch.cat((rotated, rest), -1)


@kernel(twin=qk_norm_rope_cache_ref)
def qk_norm_rope_cache(
    *,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_eps: float,
    k_eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    q: Tensor,
) -> None:
    """Queries ready for attention into `q`; keys and values into the cache.

    Queries and keys are normalised per head (where there is a weight), then the pairs
    (j, j + rotary_dim / 2) of their first rotary_dim elements are rotated. All tensors but `slot_mapping` have
    one dtype; each operation is computed in float32 and rounded, as the small layers do it.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows contiguous: Q, K, V.
        q_weight: [head_dim] of the queries' RMS norm; None: there is none.
        k_weight: [head_dim] of the keys'.
        q_eps: of the queries' norm.
        k_eps: of the keys'.
        cos: [num_tokens, rotary_dim], contiguous.
        sin: [num_tokens, rotary_dim], contiguous; its first half negated.
        slot_mapping: [num_tokens] int64, slot of each token; a token with a negative one isn't written. No slot
            occurs twice.
        cache: in and out, [num_blocks, 2, block_size, num_kv_heads, head_dim], keys then values; the last two
            axes contiguous.
        q: out, [num_tokens, num_heads, head_dim], contiguous.
    """
    num_tokens, num_q, head_dim = q.shape
    num_kv = cache.shape[3]
    assert qkv.shape == (num_tokens, (num_q + 2 * num_kv) * head_dim)
    assert qkv.stride(1) == 1
    assert q.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()  # noqa: PT018
    assert cache.stride()[3:] == (head_dim, 1)
    if num_tokens == 0:
        return
    block_dim = triton.next_power_of_2(head_dim)
    heads = max(_ELEMENTS // block_dim, 1)
    _qk_norm_rope_cache_kernel[(num_tokens, triton.cdiv(num_q + 2 * num_kv, heads))](
        qkv,
        qkv.stride(0),
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        q_eps,
        k_eps,
        cos,
        sin,
        slot_mapping,
        cache,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        q,
        cache.shape[2],
        NUM_Q=num_q,
        NUM_KV=num_kv,
        DIM=head_dim,
        ROTARY_DIM=cos.shape[1],
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=heads,
        BLOCK_DIM=block_dim,
        **dependent_options(qkv),
    )


@jit()
def _qk_norm_rope_cache_kernel(
    qkv,
    qkv_stride,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    cos,
    sin,
    slot_mapping,
    cache,
    cache_block_stride,
    cache_kv_stride,
    cache_offset_stride,
    q,
    block_size,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    dtype = q.dtype.element_ty
    inside = (head < NUM_Q + 2 * NUM_KV) & (d < DIM)
    is_q = head < NUM_Q
    is_k = (head >= NUM_Q) & (head < NUM_Q + NUM_KV)
    # The other element of each rotated pair. It is loaded again: its bytes are in the nearest cache.
    half: tl.constexpr = ROTARY_DIM // 2
    rotated = d < ROTARY_DIM
    partner = tl.where(d < half, d + half, tl.where(rotated, d - half, d))
    row = qkv + token * qkv_stride + head * DIM
    raw = tl.load(row + d, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(row + partner, mask=inside & rotated, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        mean = tl.sum(x * x, 1)[:, None] / DIM
        if Q_NORM:
            scale = tl.rsqrt(mean + q_eps)
            gain = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            partner_gain = tl.load(q_weight + partner, mask=d < DIM, other=0.0).to(tl.float32)
            x = tl.where(is_q, ((x * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32), x)
            y = tl.where(is_q, ((y * scale).to(dtype).to(tl.float32) * partner_gain).to(dtype).to(tl.float32), y)
        if K_NORM:
            scale = tl.rsqrt(mean + k_eps)
            gain = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
            partner_gain = tl.load(k_weight + partner, mask=d < DIM, other=0.0).to(tl.float32)
            x = tl.where(is_k, ((x * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32), x)
            y = tl.where(is_k, ((y * scale).to(dtype).to(tl.float32) * partner_gain).to(dtype).to(tl.float32), y)
    c = tl.load(cos + token * ROTARY_DIM + d, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY_DIM + d, mask=rotated, other=0.0).to(tl.float32)
    turned = ((x * c).to(dtype).to(tl.float32) + y * s).to(dtype)
    turned = tl.where(rotated, turned, x.to(dtype))
    tl.store(q + token * (NUM_Q * DIM) + head * DIM + d, turned, mask=inside & is_q)

    slot = tl.load(slot_mapping + token)
    block, offset = slot // block_size, slot % block_size  # int64: caches exceed 2**31 elements
    target = cache + block * cache_block_stride + offset * cache_offset_stride
    kv_head = tl.where(is_k, head - NUM_Q, head - NUM_Q - NUM_KV)
    target = target + tl.where(is_k, 0, 1) * cache_kv_stride + kv_head * DIM + d
    written = tl.where(slot >= 0, NUM_Q + 2 * NUM_KV, 0)
    tl.store(target, tl.where(is_k, turned, raw), mask=(head >= NUM_Q) & (head < written) & (d < DIM))
