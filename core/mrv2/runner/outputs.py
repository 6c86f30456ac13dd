"""What a step gives back to the host: columnar, read after the copy's event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.sample.sampler import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsOutput:
    """Log-probabilities of the model's own distribution. Column 0 is the sampled token, then the top k."""

    token_ids_np: NDArray[np.int64]  # [num_reqs, 1 + k]
    logprobs_np: NDArray[np.float32]  # [num_reqs, 1 + k]
    ranks_np: NDArray[np.int64]  # [num_reqs], of the sampled token; 1 is the most likely

    def select(self, at_np: NDArray[np.intp]) -> LogprobsOutput:
        """A copy of the rows at these positions."""
        return LogprobsOutput(
            token_ids_np=self.token_ids_np[at_np],
            logprobs_np=self.logprobs_np[at_np],
            ranks_np=self.ranks_np[at_np],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One step's result, by batch position."""

    step_id: int
    tokens_np: NDArray[np.int64]  # [num_reqs, tokens per step]
    num_sampled_np: NDArray[np.int32]  # [num_reqs]; 0 for unfinished prompts and stopped rows
    logprobs: LogprobsOutput | None = None


class Pending(Protocol):
    """A step's result on its way."""

    def wait(self) -> StepOutput:
        """Block until it has arrived."""
        ...


class PendingOutput:
    """A step's result on its way to the host. Owns its tensors until it has been read.

    On a GPU the copy runs on its own stream behind the step; `wait` blocks on the copy's event only.
    """

    def __init__(
        self, step_id: int, *, tokens: Tensor, num_sampled: Tensor, logprobs: Logprobs | None, stream: CopyStream
    ) -> None:
        self._step_id = step_id
        self._copies = stream.start([tokens, num_sampled])
        self._logprobs = stream.start(list(logprobs)) if logprobs is not None else None
        self._done = stream.record()

    def wait(self) -> StepOutput:
        """Block until the copy has arrived."""
        if self._done is not None:
            self._done.synchronize()
        tokens, num_sampled = (t.numpy() for t in self._copies)
        logprobs = None
        if self._logprobs is not None:
            ids, values, ranks = (t.numpy() for t in self._logprobs)
            logprobs = LogprobsOutput(token_ids_np=ids, logprobs_np=values, ranks_np=ranks)
        return StepOutput(step_id=self._step_id, tokens_np=tokens, num_sampled_np=num_sampled, logprobs=logprobs)


class CopyStream:
    """Copies from the device to host memory, beside the compute stream where there is one.

    Attributes:
        stream: of the copies; None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, tensors: list[Tensor]) -> list[Tensor]:
        """Begin copying; the results are valid after the event of `record`."""
        if self.stream is None:
            return [t.clone() for t in tensors]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for t in tensors:
                t.record_stream(self.stream)
            return [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]

    def record(self) -> torch.cuda.Event | None:
        """An event after all copies begun so far; None where copies are immediate."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event
