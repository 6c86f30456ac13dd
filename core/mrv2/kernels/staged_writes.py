"""Scatter of staged host writes into a device column."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, on_host, tl

_BLOCK = 256


@on_host
def apply_staged_writes_ref(*, target: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor) -> None:
    """Twin of `apply_staged_writes`, in NumPy."""
    target_np, values_np, rows_np, cu_lens_np = target.numpy(), values.numpy(), rows.numpy(), cu_lens.numpy()
    lens = np.diff(cu_lens_np)
    row = np.repeat(rows_np, lens)
    col = np.repeat(starts.numpy() - cu_lens_np[:-1], lens) + np.arange(len(values_np))
    if rows_np.min() < 0:
        kept = row >= 0
        row, col, values_np = row[kept], col[kept], values_np[kept]
    target_np[row, col] = values_np


@kernel(twin=apply_staged_writes_ref)
def apply_staged_writes(*, target: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, values: Tensor) -> None:
    """Write run k, `values[cu_lens[k]:cu_lens[k + 1]]`, to `target[rows[k], starts[k]:]`.

    Runs are written in no particular order, so they must not overlap; `StagedColumn` sees to it.

    Args:
        target: in and out, [num_rows, width], any dtype that NumPy has, but bool (pass a byte view).
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
