"""When requests have to end, whatever they have got to."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

from mrv2.runner.request import Request, Status


class Deadlines:
    """Running and waiting requests that have a deadline, the nearest first. A step costs one comparison.

    Args:
        clock: what deadlines are told by.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()  # so that requests are never compared
        self._tidy_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, next(self._numbers), request))
        if len(self._heap) >= self._tidy_at:  # most end long before: don't keep them until then
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.ENDED]
            heapq.heapify(self._heap)
            self._tidy_at = 64 + 2 * len(self._heap)

    def take_expired(self) -> list[str]:
        """Ids of requests whose deadline has passed, once each; some may have ended by themselves."""
        expired: list[str] = []
        while self._heap and self._heap[0][0] <= self._clock():
            expired.append(heapq.heappop(self._heap)[2].req_id)
        return expired
