"""Columns of the request table.

Three kinds: host only (plain NumPy), host truth mirrored to the device (`MirroredColumn`), and device truth
to which the host stages differences (`StagedColumn`). A flush costs what changed, and nothing if nothing did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mrv2.kernels.staged_writes import apply_staged_writes
from mrv2.state.staging import StagingRing

_ALIGN = 16
"""Bytes. Each part of a staging buffer starts at a multiple of it, whatever the number of writes: values of any dtype
are aligned, and Triton, which compiles a kernel anew for pointers that aren't, has one case to compile."""

_Runs = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.generic]]
"""rows, starts, lengths, values."""


class StagedColumn:
    """Device truth, [num_rows] or [num_rows, width], changed by the host through staged writes.

    Args:
        shape: of the column; allocated once, zeros at first.
        dtype: any that NumPy has too.
        device: where `device_tensor` lives.
    """

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        assert len(shape) in (1, 2), shape
        self.device_tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.dtype_np = numpy_dtype(dtype)
        table = self.device_tensor.view(torch.uint8) if dtype == torch.bool else self.device_tensor
        self._table = table if len(shape) == 2 else table[:, None]  # [num_rows, width]
        self._num_rows, self._width = self._table.shape
        self._pending: list[_Runs] = []
        self._single: list[tuple[int, int, NDArray[np.generic]]] = []  # row, start, values; behind `_pending`
        # Usually enough: one whole row, or one value in every row.
        nbytes = 4 * _ALIGN + 12 * self._num_rows + max(self._width, self._num_rows) * self.dtype_np.itemsize
        self._ring = StagingRing(nbytes, device)
        self._received = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def stage(self, row: int, start: int, values: ArrayLike) -> None:
        """Stage `values` [n] for columns `start` and on of `row`. The values are copied now."""
        array = np.array(values, dtype=self.dtype_np).reshape(-1)
        assert 0 <= row < self._num_rows, row
        assert 0 <= start <= self._width - len(array), (start, len(array))
        if len(array):
            self._single.append((row, start, array))

    def stage_runs(self, rows: ArrayLike, starts: ArrayLike, cu_lens: ArrayLike, values: ArrayLike) -> None:
        """Stage many runs: run k puts `values[cu_lens[k]:cu_lens[k + 1]]` at `[rows[k], starts[k]:]`.

        All arguments are copied now.
        """
        array = np.array(values, dtype=self.dtype_np).reshape(-1)
        if not len(array):
            return
        rows_np, starts_np, lens = _int32(rows), _int32(starts), np.diff(_int32(cu_lens))
        assert len(rows_np) == len(starts_np) == len(lens), (len(rows_np), len(starts_np), len(lens))
        assert lens.sum() == len(array), (lens, len(array))
        assert 0 <= rows_np.min() <= rows_np.max() < self._num_rows, rows_np
        assert 0 <= starts_np.min() <= (starts_np + lens).max() <= self._width, (starts_np, lens)
        self._join_single()
        self._pending.append((rows_np, starts_np, lens, array))

    def _join_single(self) -> None:
        """Put the single writes, which come one by one when requests do, with the others."""
        if self._single:
            rows, starts, values = zip(*self._single, strict=True)
            self._single.clear()
            lens = _int32([len(array) for array in values])
            self._pending.append((_int32(rows), _int32(starts), lens, np.concatenate(values)))

    def flush(self) -> None:
        """Bring all staged writes to the device: one copy, one kernel. Of two writes to a place, the later wins."""
        if not (self._pending or self._single):
            return
        self._join_single()
        rows, starts, lens, values = _concatenate(self._pending)
        self._pending.clear()
        if len(rows) > 1 and len(np.unique(rows)) < len(rows):
            rows, starts, lens, values = _without_overlaps(rows, starts, lens, values, width=self._width)
        n = len(rows)
        apart = -(-4 * n // _ALIGN) * _ALIGN // 4
        num_ints = 2 * apart + n + 1
        header = -(-4 * num_ints // _ALIGN) * _ALIGN
        nbytes = header + values.nbytes
        staged_np = self._ring.take(nbytes)
        ints_np = staged_np[: 4 * num_ints].view(np.int32)
        ints_np[:n], ints_np[apart : apart + n], ints_np[2 * apart] = rows, starts, 0
        np.cumsum(lens, out=ints_np[2 * apart + 1 :])
        staged_np[header:nbytes] = values.view(np.uint8)
        if self._received.shape[0] < nbytes:
            self._received = self._received.new_zeros(1 << (nbytes - 1).bit_length())
        received = self._received[:nbytes]
        self._ring.send(received)
        ints = received[: 4 * num_ints].view(torch.int32)
        apply_staged_writes(
            target=self._table,
            rows=ints[:n],
            starts=ints[apart : apart + n],
            cu_lens=ints[2 * apart :],
            values=received[header:].view(self._table.dtype),
        )


class MirroredColumn:
    """Host truth, [num_rows] or [num_rows, width], mirrored to `device_tensor`.

    The host reads and writes `np` and marks what it changed; `flush` sends the marked rows. The two never
    share memory, on the CPU either.
    """

    def __init__(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device, fill: float | int | bool = 0
    ) -> None:
        self.np = np.full(shape, fill, dtype=numpy_dtype(dtype))
        self._device = StagedColumn(shape, dtype=dtype, device=device)
        self.device_tensor = self._device.device_tensor
        self.device_tensor.fill_(fill)
        self._width = shape[1] if len(shape) == 2 else 1
        self._dirty: list[NDArray[np.int64]] = []

    def set(self, row: int, value: ArrayLike) -> None:
        """Write `value` to `row` and mark it."""
        self.np[row] = value
        self.mark(row)

    def mark(self, row: int | Sequence[int] | NDArray[np.integer]) -> None:
        """Note that `np[row]` has changed; many rows may be given at once."""
        self._dirty.append(np.array(row, dtype=np.int64).reshape(-1))

    def flush(self) -> None:
        """Send the marked rows: one copy, one kernel."""
        if not self._dirty:
            return
        rows = np.unique(np.concatenate(self._dirty))
        self._dirty.clear()
        cu_lens = np.arange(len(rows) + 1) * self._width
        self._device.stage_runs(rows, np.zeros(len(rows)), cu_lens, self.np[rows])
        self._device.flush()


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    """NumPy's dtype for torch's."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def _int32(values: ArrayLike) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _concatenate(pending: list[_Runs]) -> _Runs:
    if len(pending) == 1:
        return pending[0]
    rows, starts, lens, values = zip(*pending, strict=True)
    return np.concatenate(rows), np.concatenate(starts), np.concatenate(lens), np.concatenate(values)


def _without_overlaps(
    rows: NDArray[np.int32],
    starts: NDArray[np.int32],
    lens: NDArray[np.int32],
    values: NDArray[np.generic],
    *,
    width: int,
) -> _Runs:
    """The same writes as runs that don't overlap, so that the device may do them in any order."""
    begins = np.cumsum(lens) - lens
    place = np.repeat(rows.astype(np.int64) * width + starts - begins, lens) + np.arange(len(values))
    place, last = np.unique(place[::-1], return_index=True)  # first in reverse: the last write to a place
    values = values[::-1][last]
    row, col = np.divmod(place, width)
    new_run = np.concatenate([[True], (np.diff(place) != 1) | (np.diff(row) != 0)])
    begins = np.flatnonzero(new_run)
    lens = np.diff(np.append(begins, len(place)))
    return _int32(row[begins]), _int32(col[begins]), _int32(lens), values
