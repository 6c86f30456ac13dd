"""Two threads behind the front end: one drives the engine, one turns its events into text and results."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence

import torch

from mrv2.errors import EngineError, QueueFullError
from mrv2.frontend.deadlines import Deadlines
from mrv2.frontend.event_box import EventBox
from mrv2.frontend.output_processor import OutputProcessor
from mrv2.frontend.ticket import Ticket
from mrv2.loader.tokenizer import Tokenizer
from mrv2.runner.device import on_device
from mrv2.runner.engine import Engine
from mrv2.runner.outputs import StepEvents
from mrv2.runner.request import FinishReason, Request

MAX_PENDING_EVENTS = 256
"""Steps the output thread may lag behind before the engine waits for it: memory stays bounded."""

_Event = StepEvents | Request  # a step, or a request ended from outside


class Driver:
    """Owns the engine from its first request to `close`. Every method may be called from any thread.

    Args:
        engine: driven by this object's thread only.
        tokenizer: for text; None: token ids only.
        device: that the engine runs on.
        max_queue: most requests without a row; None: any number.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, *, device: torch.device, max_queue: int | None
    ) -> None:
        self._engine = engine
        self._device = device
        self._max_queue = max_queue
        self._lock = threading.RLock()  # a finaliser may call `close` in a thread that holds it
        self._wake = threading.Condition(self._lock)  # for the engine's thread: there is mail
        self._room = threading.Condition(self._lock)  # for callers who feed: the queue has moved
        self._num_taken = 0  # arrivals that the engine's thread is just handing over
        self._arrivals: deque[Ticket] = deque()
        self._endings: deque[tuple[str, FinishReason]] = deque()
        self._deadlines = Deadlines()  # the engine thread's
        self._num_told = 0  # requests without a row when those who wait for room were woken last
        self._closing = False
        self._failure: EngineError | None = None
        self._events: EventBox[_Event] = EventBox(MAX_PENDING_EVENTS)
        self._outputs = OutputProcessor(
            tokenizer,
            stop_request=lambda req_id: self.end(req_id, FinishReason.STOP),
            drop_request=lambda req_id: self.end(req_id, FinishReason.ABORT),
        )
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue requests together: none of them starts before all are known.

        Raises:
            EngineError: the engine has failed or was closed.
            QueueFullError: there is no room for all of them; none is queued then.
        """
        with self._lock:
            self._check_open()
            if (count := len(tickets)) > self._num_free():
                raise QueueFullError(
                    f"{self._num_waiting()} requests wait, and {count} more would exceed max_queue={self._max_queue}",
                    where="LLM",
                    fix="try again later, or raise max_queue",
                )
            self._queue(tickets)

    def feed(self, tickets: deque[Ticket]) -> None:
        """Queue as many as there is room for and take them off `tickets`; wait until it is one at least.

        Raises:
            EngineError: the engine has failed or was closed, maybe while waiting.
        """
        with self._lock:
            self._check_open()
            while not (free := self._num_free()):
                self._room.wait()
                self._check_open()
            self._queue([tickets.popleft() for _ in range(min(free, len(tickets)))])

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise EngineError("the engine is closed", where="LLM", fix="build a new one")
        if self._pid != os.getpid():
            raise EngineError(
                f"the engine belongs to process {self._pid}, which this one was forked from",
                where="LLM",
                fix="build the LLM in the process that uses it",
            )

    def _num_free(self) -> int:
        return sys.maxsize if self._max_queue is None else max(0, self._max_queue - self._num_waiting())

    def _num_waiting(self) -> int:
        """Requests without a row. Too many rather than too few: those just being handed over may count twice."""
        return len(self._arrivals) + self._num_taken + self._engine.scheduler.num_waiting

    def _queue(self, tickets: Sequence[Ticket]) -> None:
        if not self._threads:
            self._start()
        self._arrivals.extend(tickets)
        self._wake.notify()

    def end(self, req_id: str, reason: FinishReason) -> None:
        """Ask for a request's end. Unknown and ended ids are legal: the end may have come meanwhile."""
        with self._lock:
            self._endings.append((req_id, reason))
            self._wake.notify()

    def close(self) -> None:
        """Abort what runs and stop both threads. Repeating is legal, and so is calling it in a callback, which
        runs in one of them: it then returns before they have stopped.
        """
        if self._pid != os.getpid():
            return  # a forked child has the object, but neither thread
        self._stop()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._wake.notify()
            self._room.notify_all()

    def _start(self) -> None:
        for name, target in (("engine", self._drive), ("outputs", self._deliver)):
            self._threads.append(threading.Thread(target=target, name=f"mrv2-{name}", daemon=True))
        for thread in self._threads:
            thread.start()

    def _drive(self) -> None:
        try:
            with on_device(self._device):
                while self._take_mail():
                    events = self._engine.step()
                    if events is not None and (events.ended or len(events.numbers_np)):
                        self._events.put(events, urgent=bool(events.ended))
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._fail(error)
        self._stop()
        for ticket in self._arrivals:  # nothing is added any more
            self._outputs.open(ticket)
        self._events.close()

    def _take_mail(self) -> bool:
        """Take arrivals and endings; wait when idle, after what can be done in advance. False: close."""
        if self._is_quiet():
            return True
        while not self._has_mail() and self._engine.use_idle_time():
            time.sleep(0)  # let the other thread go on: it may have results to deliver
        with self._lock:
            self._room.notify_all()
            self._num_told = self._engine.scheduler.num_waiting
            while not self._has_mail():
                self._wake.wait()
            if self._closing:
                return False
            arrivals, endings = list(self._arrivals), list(self._endings)
            self._arrivals.clear()
            self._endings.clear()
            self._num_taken = len(arrivals)
        for ticket in arrivals:
            self._outputs.open(ticket)
            self._deadlines.add(ticket.request)
        self._engine.add(ticket.request for ticket in arrivals)
        self._num_taken = 0
        endings += [(req_id, FinishReason.TIMEOUT) for req_id in self._deadlines.take_expired()]
        for req_id, reason in endings:
            request = self._engine.end(req_id, reason)
            if request is not None:
                self._events.put(request, urgent=True)
        return True

    def _is_quiet(self) -> bool:
        """Whether the next step is all there is to do. A glance without the lock: what it misses, the next one sees."""
        other = self._arrivals or self._endings or self._closing or len(self._deadlines) or not self._engine.has_work
        return not other and self._engine.scheduler.num_waiting == self._num_told

    def _has_mail(self) -> bool:
        """Whether there is anything to do. Without the lock it may be out of date."""
        return bool(self._arrivals or self._endings or self._closing or self._engine.has_work)

    def _fail(self, error: BaseException) -> None:
        """Note why the engine has failed: the first reason, which later ones may follow from."""
        failure = error if isinstance(error, EngineError) else None
        if failure is None:
            failure = EngineError(
                f"{type(error).__name__}: {error}",
                where=_where(error),
                fix="correct what raised there, then build a new LLM",
            )
            failure.__cause__ = error
        with self._lock:
            self._failure = self._failure or failure

    def _deliver(self) -> None:
        try:
            outputs = self._outputs
            while (events := self._events.take(outputs.rest_until, waiting=outputs.waiting)) is not None:
                outputs.process(events)
        except BaseException as error:
            self._fail(error)
            self._stop()
            self._events.drop_all()  # let the engine thread get past a full box
        with self._lock:
            closed = EngineError("the engine was closed while requests ran", where="LLM", fix="wait before closing")
        self._outputs.fail(self._failure or closed)


def _where(error: BaseException) -> str:
    """File, line and function that raised, and the last place before it outside of this package and of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = ("/mrv2/", "/torch/")
    outside = [f for f in frames if not any(part in f.filename.replace("\\", "/") for part in own)]
    named = dict.fromkeys(f"{f.filename}:{f.lineno} in {f.name}" for f in (*outside[-1:], *frames[-1:]))
    return ", reached by ".join(reversed(named)) or "engine thread"
