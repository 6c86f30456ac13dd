"""Launches captured as a CUDA graph, on a stream of their own and with memory of their own."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaRecorder:
    """Captures on a side stream, all graphs in one pool of memory: they are replayed one after the other.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.CUDAGraph | None = None  # whose pool all share; without a graph PyTorch refuses one

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Capture what `run` launches: a function that does it again, and returns what `run` returned. Waits for the
        device only where its memory is full of blocks that the allocator keeps for later.

        Raises:
            torch.OutOfMemoryError: the pool has to grow, and there is no memory for it.
        """
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._capture(run)
        # The allocator gives blocks back to the driver when it needs memory, but not while a graph is captured.
        torch.cuda.empty_cache()
        return self._capture(run)

    def _capture(self, run: Callable[[], T]) -> Callable[[], T]:
        graph, (stream, lock) = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        # A new one until a capture has succeeded: PyTorch also refuses one whose only capture failed.
        pool = torch.cuda.graph_pool_handle() if self._first is None else self._first.pool()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with lock, torch.cuda.stream(stream), _no_collection():
            # Other threads, such as the one that delivers outputs, may do as they like meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                self._give_up(graph, pool)
                raise
            graph.capture_end()
        self._first = self._first or graph

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """End a capture that has failed, so that the error that made it fail is the one that is seen."""
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # some versions of PyTorch don't tell the allocator then
                torch._C._cuda_endAllocateToPool(self._device.index, pool)


@functools.cache
def _capture_stream(device: torch.device) -> tuple[torch.cuda.Stream, threading.Lock]:
    """The device's stream for captures, of all engines, and who may use it: cuBLAS gives each stream a workspace of
    tens of megabytes for good.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # The workspace comes now and not in a pool, where the first capture would put it.
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.zeros(64, 64, dtype=dtype, device=device)
            torch.mm(square, square)
    return stream, threading.Lock()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collected tensor or graph would be freed within the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
