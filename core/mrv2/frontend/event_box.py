"""Hands events from one thread to another that wants to be left alone for a while."""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

T = TypeVar("T")


class EventBox(Generic[T]):
    """A bounded queue whose reader says when it wants to be woken. An urgent event wakes it at once.

    Every wake-up costs both threads the interpreter's lock, so a busy writer is spared those that can wait.

    Args:
        limit: events after which `put` waits for the reader.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._come = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._events: list[T] = []
        self._urgent = False
        self._eager = False  # the reader wants the next event, whatever it is
        self._closed = False  # no more events come
        self._dead = False  # nobody reads any more

    def put(self, event: T, *, urgent: bool) -> None:
        """Add an event; wait while there is no room."""
        with self._lock:
            while len(self._events) >= self._limit and not self._dead:
                self._room.wait()
            if self._dead:
                return
            self._events.append(event)
            self._urgent = self._urgent or urgent or 2 * len(self._events) > self._limit
            if self._urgent or self._eager:
                self._come.notify()

    def close(self) -> None:
        """Say that nothing more comes."""
        with self._lock:
            self._closed = True
            self._come.notify()

    def drop_all(self) -> None:
        """Let everything that is put from now on vanish."""
        with self._lock:
            self._dead = True
            self._room.notify_all()

    def take(self, rest_until: float, *, waiting: bool) -> list[T] | None:
        """All events so far, or None after the last.

        Args:
            rest_until: until this time of `time.monotonic` only what is urgent ends the wait.
            waiting: after it, return in any case; else when there is an event.
        """
        with self._lock:
            while not (self._urgent or self._closed):
                rest = rest_until - time.monotonic()
                if rest <= 0 and (waiting or self._events):
                    break
                self._eager = rest <= 0
                self._come.wait(rest if rest > 0 else None)
            events, self._events = self._events, []
            self._urgent = self._eager = False
            self._room.notify_all()
            return None if self._closed and not events else events
