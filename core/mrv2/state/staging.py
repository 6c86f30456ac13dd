"""Host buffers that the device copies from, or reads in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """What the ring needs of a CUDA event."""

    def record(self) -> object:
        """Mark this point of the current stream."""
        ...

    def synchronize(self) -> object:
        """Wait until the stream has passed the mark."""
        ...


@dataclass(slots=True)
class _Buffer:
    tensor: Tensor  # [nbytes] uint8, on the host
    bytes_np: NDArray[np.uint8]  # the same memory
    event: Event | None  # passed once the last reader of this buffer is done


class StagingRing:
    """Buffers used in turn: the host fills one while the device may still read the others.

    A buffer is handed out again only after the device has done what was launched to read it. With as many buffers
    as steps in flight, plus one, that never waits. On the CPU a copy is done when it returns.

    Args:
        nbytes: size of each buffer; one that proves too small is replaced, by powers of two.
        device: where copies go; buffers are pinned for CUDA.
        depth: number of buffers.
        make_event: makes the event that follows a buffer's last reader; default: a CUDA event, or none.
    """

    def __init__(
        self, nbytes: int, device: torch.device, *, depth: int = 4, make_event: Callable[[], Event] | None = None
    ) -> None:
        self._pin = device.type == "cuda"
        self._make_event = make_event or (torch.cuda.Event if self._pin else None)
        self._buffers = [self._allocate(nbytes) for _ in range(depth)]
        self._turn = 0

    def _allocate(self, nbytes: int) -> _Buffer:
        tensor = torch.zeros(max(nbytes, 16), dtype=torch.uint8, pin_memory=self._pin)
        return _Buffer(tensor, tensor.numpy(), None)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next buffer, [nbytes] or longer, for the host to fill; once per `send` or `release`."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.event is not None:
            buffer.event.synchronize()
        if len(buffer.bytes_np) < nbytes:
            buffer = self._buffers[self._turn] = self._allocate(1 << (nbytes - 1).bit_length())
        return buffer.bytes_np

    def send(self, out: Tensor) -> None:
        """Start the copy of the buffer taken last to `out` [n] uint8 on the device, in the current stream."""
        buffer = self._buffers[self._turn]
        out.copy_(buffer.tensor[: out.shape[0]], non_blocking=True)
        self.release()

    def release(self) -> None:
        """The current stream has been given all that reads the buffer taken last."""
        buffer = self._buffers[self._turn]
        if self._make_event is not None:
            if buffer.event is None:
                buffer.event = self._make_event()
            buffer.event.record()
