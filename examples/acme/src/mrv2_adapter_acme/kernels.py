"""The memory's kernel: Triton on a GPU, its twin in plain PyTorch elsewhere. `tests/test_kernels.py` compares them."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from mrv2.kernels import jit, kernel, tl, triton
from torch import Tensor

_BLOCK = 32
"""Columns of a state that one program keeps in registers."""


def update_memory_ref(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Torch twin of `update_memory`: the t-th tokens of all requests side by side. Reads nothing on the host."""
    lens = starts[1:] - starts[:-1]
    known = (seq_lens > lens)[:, None, None, None]
    s = torch.where(known, state[slots.long()], 0.0)
    out.zero_()
    for t in range(max_query_len):
        live = t < lens
        i = (starts[:-1] + t).clamp(max=q.shape[0] - 1).long()
        query, key = _unit(q[i]), _unit(k[i])
        faded = keep[i][..., None, None] * s
        missed = v[i].float() - torch.einsum("rhk,rhkv->rhv", key, faded)
        taught = faded + (rate[i][..., None] * key)[..., None] * missed[..., None, :]
        s = torch.where(live[:, None, None, None], taught, s)
        y = torch.einsum("rhk,rhkv->rhv", query, s).to(out.dtype)
        out.index_add_(0, i, torch.where(live[:, None, None], y, 0))
    state[slots.long()] = s


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@kernel(twin=update_memory_ref)
def update_memory(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Teach each request's memory this step's tokens, one after the other, and ask it after each.

    Per head, with unit vectors q and k: S is faded, S' = keep S; what it says of k is set right by a share,
    S = S' + rate k (v - k'S')'; and the answer is q'S.

    Args:
        q: [num_tokens, heads, size], rows contiguous.
        k: [num_tokens, heads, size], rows contiguous.
        v: [num_tokens, heads, size], rows contiguous.
        keep: [num_tokens, heads] float32 in (0, 1), rows contiguous.
        rate: [num_tokens, heads] float32 in (0, 1), rows contiguous.
        state: in and out, [num_slots, heads, size, size] float32, rows contiguous. Slot 0 is scratch, where padding
            points.
        slots: [num_reqs] int32, each request's slot.
        starts: [num_reqs + 1] int32, where each request's tokens begin; padded requests have none.
        seq_lens: [num_reqs] int32, length of each request after this step.
        max_query_len: upper bound of a request's tokens in this step.
        out: out, [num_tokens, heads, size], contiguous; zeros for padding.
    """
    _, heads, size = q.shape
    out.zero_()
    grid = (slots.shape[0], heads, triton.cdiv(size, _BLOCK))
    _update_memory_kernel[grid](
        q,
        *q.stride()[:2],
        k,
        *k.stride()[:2],
        v,
        *v.stride()[:2],
        keep,
        keep.stride(0),
        rate,
        rate.stride(0),
        state,
        *state.stride()[:3],
        slots,
        slots.stride(0),
        starts,
        seq_lens,
        size,
        out,
        SIZE=triton.next_power_of_2(size),
        BLOCK=_BLOCK,
    )


@jit()
def _update_memory_kernel(
    q,
    q_token,
    q_head,
    k,
    k_token,
    k_head,
    v,
    v_token,
    v_head,
    keep,
    keep_token,
    rate,
    rate_token,
    state,
    state_slot,
    state_head,
    state_row,
    slots,
    slots_stride,
    starts,
    seq_lens,
    size,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, SIZE)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    known = tl.load(seq_lens + request) > end - start
    # Widened before it multiplies: a pool may hold more than 2**31 elements.
    slot = state + tl.load(slots + request * slots_stride).to(tl.int64) * state_slot + head * state_head
    tile = slot + row[:, None] * state_row + column[None, :]
    inside = (row < size)[:, None] & (column < size)[None, :]
    # A new request's slot holds arbitrary bits, NaN among them: select, never multiply.
    s = tl.where(known, tl.load(tile, mask=inside, other=0.0), 0.0)
    first = start.to(tl.int64)
    q += first * q_token + head * q_head
    k += first * k_token + head * k_head
    v += first * v_token + head * v_head
    keep += first * keep_token + head
    rate += first * rate_token + head
    out += (first * heads + head) * size
    for _ in range(start, end):
        query = tl.load(q + row, mask=row < size, other=0.0).to(tl.float32)
        key = tl.load(k + row, mask=row < size, other=0.0).to(tl.float32)
        value = tl.load(v + column, mask=column < size, other=0.0).to(tl.float32)
        query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        s = s * tl.load(keep)
        missed = value - tl.sum(key[:, None] * s, 0)
        s = s + (tl.load(rate) * key)[:, None] * missed[None, :]
        tl.store(out + column, tl.sum(query[:, None] * s, 0).to(out.dtype.element_ty), mask=column < size)
        q += q_token
        k += k_token
        v += v_token
        keep += keep_token
        rate += rate_token
        out += heads * size
    tl.store(tile, s, mask=inside)
