"""A step's requests while they are being chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mrv2.api import RequestData

Rows = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """What the scheduler has chosen so far, in its order."""

    budget: int  # tokens left
    rows: list[Rows] = field(default_factory=list)
    takes: list[Rows] = field(default_factory=list)
    added: list[tuple[int, RequestData]] = field(default_factory=list)
    preempted: bool = False
    short: bool = False  # there were too few blocks for all decodes

    def append(self, rows_np: Rows, takes_np: Rows) -> None:
        """Add requests, with the tokens that each of them has computed."""
        self.rows.append(rows_np)
        self.takes.append(takes_np)
        self.budget -= int(takes_np.sum())

    def in_order(self) -> tuple[Rows, Rows]:
        """All rows and tokens, single tokens first: they are one batch for the attention kernels."""
        if len(self.rows) == 1:
            return self.rows[0], self.takes[0]
        rows_np, takes_np = np.concatenate(self.rows), np.concatenate(self.takes)
        order_np = np.argsort(takes_np != 1, kind="stable")
        return rows_np[order_np], takes_np[order_np]
