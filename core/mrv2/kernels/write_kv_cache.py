"""The step's keys and values, scattered into the paged cache."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton


def write_kv_cache_ref(*, k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Torch twin of `write_kv_cache`."""
    slots = slot_mapping.clamp(min=0)
    block_size = cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    cache[:, 0].index_put_((block, offset), k)
    cache[:, 1].index_put_((block, offset), v)


@kernel(twin=write_kv_cache_ref)
def write_kv_cache(*, k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot: block `slot // block_size`, offset `slot % block_size`.

    Negative slots go to slot 0, which is scratch and keeps one of its writers' values.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], at least one token; a head is contiguous.
        v: as `k`.
        cache: in and out, [num_blocks, 2, block_size, num_kv_heads, head_dim], keys then values; the last
            three axes are contiguous.
        slot_mapping: [num_tokens] int64.
    """
    num_tokens, kv_heads, head_dim = k.shape
    _write_kv_cache_kernel[(num_tokens,)](
        k,
        v,
        cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.stride(0),
        cache.stride(1),
        WIDTH=kv_heads * head_dim,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.shape[2],
        BLOCK=triton.next_power_of_2(kv_heads * head_dim),
    )


@jit()
def _write_kv_cache_kernel(
    k,
    v,
    cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    kv_stride,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slot_mapping + token), 0)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    head, d = lane // HEAD_DIM, lane % HEAD_DIM
    key = tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=inside)
    target = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * WIDTH + lane
    tl.store(target, key.to(cache.dtype.element_ty), mask=inside)
    tl.store(target + kv_stride, value.to(cache.dtype.element_ty), mask=inside)
