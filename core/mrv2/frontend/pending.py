"""Tokens that have come and are not text yet, kept as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class PendingTokens:
    """Tokens of watched requests, over as many steps as passed since they were last taken."""

    def __init__(self) -> None:
        self._numbers: list[Ids] = []  # of requests, an array a step
        self._tokens: list[Ids] = []

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, numbers_np: Ids, tokens_np: Ids) -> None:
        """Keep a step's tokens.

        Args:
            numbers_np: [num_tokens], of the request that each belongs to.
            tokens_np: [num_tokens], a request's in their order.
        """
        if len(numbers_np):
            self._numbers.append(numbers_np)
            self._tokens.append(tokens_np)

    def take(self, numbers: Sequence[int] | None = None) -> dict[int, list[int]]:
        """Remove and return the tokens of these requests, None: of all; by a request's number."""
        if not self._numbers or (numbers is not None and not numbers):
            return {}
        numbers_np, tokens_np = np.concatenate(self._numbers), np.concatenate(self._tokens)
        self._numbers, self._tokens = [], []
        if numbers is not None:
            taken_np = np.isin(numbers_np, numbers)
            self.add(numbers_np[~taken_np], tokens_np[~taken_np])
            numbers_np, tokens_np = numbers_np[taken_np], tokens_np[taken_np]
            if not len(numbers_np):
                return {}
        order_np = np.argsort(numbers_np, kind="stable")
        numbers_np, tokens = numbers_np[order_np], tokens_np[order_np].tolist()
        starts = np.flatnonzero(np.diff(numbers_np, prepend=-1)).tolist()
        ends = [*starts[1:], len(tokens)]
        spans = zip(numbers_np[starts].tolist(), starts, ends, strict=True)
        return {number: tokens[start:end] for number, start, end in spans}
