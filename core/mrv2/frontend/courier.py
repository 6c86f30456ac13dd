"""Brings pieces of text to those who read them in an event loop: all that have come, in one call."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque

from mrv2.frontend.results import StreamOutput

Item = StreamOutput | BaseException


class Courier:
    """Carries to the streams of one event loop. One is on its way at most; what is posted meanwhile goes next.

    Waking a loop costs more than putting a piece into a queue, and a loop that doesn't keep up must not be woken
    more often for it.

    Args:
        loop: not kept alive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[tuple[PieceQueue, Item]] = deque()
        self._on_its_way = False
        self._began = self._spent = self._reported = 0.0  # seconds

    def post(self, pieces: PieceQueue, item: Item) -> None:
        """Leave an item for `pieces`. Any thread."""
        self._posted.append((pieces, item))

    def ring(self) -> None:
        """Have what was posted carried. Any thread."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._posted.clear()  # the readers are gone
        elif self._posted and not self._on_its_way:
            self._on_its_way = True
            with contextlib.suppress(RuntimeError):  # closed just now
                loop.call_soon_threadsafe(self._arrive, loop)

    def _arrive(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began = time.thread_time()
        while self._posted:
            pieces, item = self._posted.popleft()
            pieces.put(item)
        loop.call_soon(self._settle)  # after the readers, who have been woken just now

    def _settle(self) -> None:
        self._spent += time.thread_time() - self._began
        self._on_its_way = False
        self.ring()

    def take_cost(self) -> float:
        """Seconds of processor time that arrivals and their readers took since this was last asked."""
        spent = self._spent
        cost, self._reported = spent - self._reported, spent
        return cost


class PieceQueue:
    """Pieces of one stream, for one reader in `loop`.

    Args:
        loop: the running one.
        courier: of that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, courier: Courier) -> None:
        self.courier = courier
        self._loop = loop
        self._items: list[Item] = []
        self._reader: asyncio.Future[None] | None = None

    def post(self, item: Item) -> None:
        """Send an item from any thread; it leaves when the courier is rung."""
        self.courier.post(self, item)

    def put(self, item: Item) -> None:
        """Add an item, in the loop's thread."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> StreamOutput:
        """What has come since the last call, as one piece; waits for the first.

        Raises:
            Mrv2Error: the stream has failed.
        """
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        pieces = [item for item in self._items if isinstance(item, StreamOutput)]
        failures = [item for item in self._items if isinstance(item, BaseException)]
        if not pieces:
            raise failures[0]
        self._items = [*failures]  # for the next call: they were the last to come
        return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _joined(pieces: list[StreamOutput]) -> StreamOutput:
    return StreamOutput(
        text="".join([piece.text for piece in pieces]),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finished=pieces[-1].finished,
    )
