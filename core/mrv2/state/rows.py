"""Which rows of the request table are taken."""

from __future__ import annotations


class RowAllocator:
    """Hands out rows `0 … max_rows - 1`. The row freed last goes out first, so reuse is immediate."""

    def __init__(self, max_rows: int) -> None:
        self._free = list(range(max_rows - 1, -1, -1))
        self._taken = [False] * max_rows

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self) -> int:
        """A free row; there must be one."""
        assert self._free, "no free row"
        row = self._free.pop()
        self._taken[row] = True
        return row

    def release(self, row: int) -> None:
        """Give `row` back, once."""
        assert row in range(len(self._taken)), f"there is no row {row}"
        assert self._taken[row], f"row {row} is free already"
        self._taken[row] = False
        self._free.append(row)
