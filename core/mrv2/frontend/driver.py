"""Two threads behind the front end: one drives the engine, one turns its events into text and results."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections import deque
from collections.abc import Sequence

from mrv2.errors import EngineError
from mrv2.frontend.output_processor import OutputProcessor, Ticket
from mrv2.loader.tokenizer import Tokenizer
from mrv2.runner.engine import Engine
from mrv2.runner.request import FinishReason, Request
from mrv2.runner.scheduler import StepEvents

MAX_PENDING_EVENTS = 64
"""Steps the output thread may lag behind before the engine waits for it: memory stays bounded."""

_Event = StepEvents | Request | None  # a step, a request ended from outside, or the end of all


class Driver:
    """Owns the engine from its first request to `close`. Every method may be called from any thread.

    Args:
        engine: driven by this object's thread only.
        tokenizer: for text; None: token ids only.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._arrivals: deque[Ticket] = deque()
        self._endings: deque[tuple[str, FinishReason]] = deque()
        self._closing = False
        self._failure: EngineError | None = None
        self._events: queue.Queue[_Event] = queue.Queue(MAX_PENDING_EVENTS)
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
        """
        with self._wake:
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
            if not self._threads:
                self._start()
            self._arrivals.extend(tickets)
            self._wake.notify()

    def end(self, req_id: str, reason: FinishReason) -> None:
        """Ask for a request's end. Unknown and ended ids are legal: the end may have come meanwhile."""
        with self._wake:
            self._endings.append((req_id, reason))
            self._wake.notify()

    def close(self) -> None:
        """Abort what runs and stop both threads. Repeating is legal, and so is calling it in a callback, which
        runs in one of them: it then returns before they have stopped.
        """
        if self._pid != os.getpid():
            return  # a forked child has the object, but neither thread
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _start(self) -> None:
        for name, target in (("engine", self._drive), ("outputs", self._deliver)):
            self._threads.append(threading.Thread(target=target, name=f"mrv2-{name}", daemon=True))
        for thread in self._threads:
            thread.start()

    def _drive(self) -> None:
        try:
            while self._take_mail():
                events = self._engine.step()
                if events is not None and (events.watched or events.ended):
                    self._events.put(events)
        except BaseException as error:  # whatever it is, nobody may be left waiting
            self._fail(error)
        with self._wake:
            self._closing = True
            late = list(self._arrivals)
        for ticket in late:
            self._outputs.open(ticket)
        self._events.put(None)

    def _take_mail(self) -> bool:
        """Take arrivals and endings; wait when idle. False: close."""
        with self._wake:
            while not (self._arrivals or self._endings or self._closing or self._engine.has_work):
                self._wake.wait()
            if self._closing:
                return False
            arrivals, endings = list(self._arrivals), list(self._endings)
            self._arrivals.clear()
            self._endings.clear()
        for ticket in arrivals:
            self._outputs.open(ticket)
        self._engine.add(ticket.request for ticket in arrivals)
        for req_id, reason in endings:
            request = self._engine.end(req_id, reason)
            if request is not None:
                self._events.put(request)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = EngineError(
                f"{type(error).__name__}: {error}",
                where=_where(error),
                fix="correct what raised there, then build a new LLM",
            )
            self._failure.__cause__ = error

    def _deliver(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                if isinstance(event, Request):
                    self._outputs.end(event)
                else:
                    self._outputs.process(event)
        except BaseException as error:
            self._fail(error)
            with self._wake:
                self._closing = True
                self._wake.notify()
            while self._events.get() is not None:  # let the engine thread get past a full queue
                pass
        with self._wake:
            closed = EngineError("the engine was closed while requests ran", where="LLM", fix="wait before closing")
        self._outputs.fail(self._failure or closed)


def _where(error: BaseException) -> str:
    """File, line and function that raised, and the last place before it outside of this package and of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = ("/mrv2/", "/torch/")
    outside = [f for f in frames if not any(part in f.filename.replace("\\", "/") for part in own)]
    named = dict.fromkeys(f"{f.filename}:{f.lineno} in {f.name}" for f in (*outside[-1:], *frames[-1:]))
    return ", reached by ".join(reversed(named)) or "engine thread"
