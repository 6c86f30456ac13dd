"""Scatter of staged host writes into a device column."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl

_BLOCK = 256


def apply_staged_writes_ref(*, target: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor) -> None:
    """Torch twin of `apply_staged_writes`."""
    index = torch.arange(values.shape[0], device=values.device)
    run = torch.searchsorted(cu_lens[1:], index, right=True)
    row = rows[run].long()
    col = starts[run] + index - cu_lens[run]
    kept = row >= 0
    target[row[kept], col[kept]] = values[kept]


@kernel(twin=apply_staged_writes_ref)
def apply_staged_writes(*, target: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor) -> None:
    """Write run k, `values[cu_lens[k]:cu_lens[k + 1]]`, to `target[rows[k], starts[k]:]`.

    Runs are written in no particular order, so they must not overlap; `StagedColumn` sees to it.

    Args:
        target: in and out, [num_rows, width], any dtype but bool (pass a byte view).
        rows: [num_runs] int32; runs of negative rows are dropped.
        starts: [num_runs] int32, first column.
        cu_lens: [num_runs + 1] int32, from 0 to num_values.
        values: [num_values], the target's dtype.
    """
    _apply_staged_writes_kernel[(rows.shape[0],)](target, target.stride(0), rows, starts, cu_lens, values, BLOCK=_BLOCK)


@jit()
def _apply_staged_writes_kernel(
    target,
    target_stride,
    rows,
    starts,
    cu_lens,
    values,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    row = tl.load(rows + run).to(tl.int64)
    first = tl.load(cu_lens + run)
    length = tl.where(row >= 0, tl.load(cu_lens + run + 1) - first, 0)
    out = target + row * target_stride + tl.load(starts + run)
    for start in range(0, length, BLOCK):
        k = start + tl.arange(0, BLOCK)
        tl.store(out + k, tl.load(values + first + k, mask=k < length), mask=k < length)
