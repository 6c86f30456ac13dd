"""A step's tokens, written into one slot of a ring that the host reads: where a graph can't choose an address."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from torch import Tensor

from mrv2.kernels.registry import jit, kernel, on_host, tl, triton

_BLOCK = 256


@on_host
def report_sampled_ref(*, sampled: Tensor, num_sampled: Tensor, slot: Tensor, out: Tensor) -> None:
    """Twin of `report_sampled`, in NumPy."""
    at, n = int(slot.numpy()[0]), sampled.shape[0]
    if at >= 0:
        entry = out.numpy()[at]
        entry[0, :n] = num_sampled.numpy()
        entry[1:, :n] = sampled.numpy().T


@kernel(twin=report_sampled_ref)
def report_sampled(*, sampled: Tensor, num_sampled: Tensor, slot: Tensor, out: Tensor) -> None:
    """Write counts and tokens to `out[slot]`, which may lie in pinned host memory: no copy is needed then.

    The slot is read on the device, so that a graph, whose addresses are fixed, can use another one in each replay.

    Args:
        sampled: [num_reqs, S] int64, ids below 2**31.
        num_sampled: [num_reqs] int32.
        slot: [1] int32; negative: nothing is written.
        out: out, [num_slots, 1 + S, at least num_reqs] int32: counts, then one line per token.
    """
    num_reqs, width = sampled.shape
    _report_sampled_kernel[(triton.cdiv(num_reqs, _BLOCK),)](
        sampled,
        sampled.stride(0),
        num_sampled,
        slot,
        out,
        out.stride(0),
        out.stride(1),
        num_reqs,
        WIDTH=width,
        BLOCK=_BLOCK,
    )


@jit(do_not_specialize=["sampled_stride", "num_reqs"])
def _report_sampled_kernel(
    sampled,
    sampled_stride,
    num_sampled,
    slot,
    out,
    slot_stride,
    line_stride,
    num_reqs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.load(slot)
    if at >= 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        real = i < num_reqs
        entry = out + at.to(tl.int64) * slot_stride
        tl.store(entry + i, tl.load(num_sampled + i, mask=real, other=0), mask=real)
        for s in range(WIDTH):
            token = tl.load(sampled + i * sampled_stride + s, mask=real, other=0)
            tl.store(entry + (s + 1) * line_stride + i, token.to(tl.int32), mask=real)
