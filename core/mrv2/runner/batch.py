"""A step's requests while they are being chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mrv2.api import RequestData

Rows = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """What the scheduler has chosen so far."""

    budget: int  # tokens left
    decodes_np: Rows = field(default_factory=lambda: np.empty(0, np.int32))  # rows that compute one token each
    prompts: list[tuple[int, int]] = field(default_factory=list)  # rows, and how many tokens of their prompts
    added: list[tuple[int, RequestData]] = field(default_factory=list)
    preempted: bool = False
    short: bool = False  # there were too few blocks for all decodes

    def add_decodes(self, rows_np: Rows) -> None:
        """Add those that decode, once."""
        self.decodes_np = rows_np
        self.budget -= len(rows_np)

    def add_prompt(self, row: int, take: int) -> None:
        """Add one request, with `take` tokens of its prompt."""
        self.prompts.append((row, take))
        self.budget -= take

    def holds(self, row: int) -> bool:
        """Whether `row` takes part."""
        return row in self.decodes_np or any(row == other for other, _ in self.prompts)

    def in_order(self) -> tuple[Rows, Rows]:
        """All rows and their tokens, single tokens first: they are one batch for the attention kernels."""
        ones_np = np.ones(len(self.decodes_np), np.int32)
        if not self.prompts:
            return self.decodes_np, ones_np
        prompts_np, takes_np = np.array(self.prompts, np.int32).T
        rows_np, takes_np = np.concatenate((self.decodes_np, prompts_np)), np.concatenate((ones_np, takes_np))
        order_np = np.argsort(takes_np != 1, kind="stable")
        return rows_np[order_np], takes_np[order_np]
