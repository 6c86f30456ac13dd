"""What a step gives back to the host: columnar, read after the copy's event."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.runner.request import Request
from mrv2.sample.sampler import Logprobs
from mrv2.state.plan import StepPlan
from mrv2.state.view import Limits


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What an output changed, for the front end. Only watched requests appear before their end."""

    numbers_np: NDArray[np.int64]  # [num_tokens], of the watched request that each token belongs to
    tokens_np: NDArray[np.int64]  # [num_tokens], a request's in their order
    logprobs: LogprobsOutput | None  # [num_tokens, ...]
    ended: tuple[Request, ...]


class Pending(Protocol):
    """A step's result on its way."""

    def wait(self) -> StepOutput:
        """Block until it has arrived."""
        ...


class PendingOutput:
    """A step's result on its way to the host. Owns its tensors until it has been read.

    On a GPU the copy runs on its own stream behind the step; `wait` blocks on the copy's event only.

    Args:
        plan: the step; what its tensors have more is padding.
        tokens: [at least num_reqs, tokens per step] int64.
        num_sampled: [at least num_reqs] int32.
        logprobs: or None.
        stream: that copies.
    """

    def __init__(
        self, plan: StepPlan, *, tokens: Tensor, num_sampled: Tensor, logprobs: Logprobs | None, stream: CopyStream
    ) -> None:
        self._step_id, self._num_reqs = plan.step_id, plan.num_reqs
        self._copies = stream.start([tokens, num_sampled])
        self._logprobs = stream.start(list(logprobs)) if logprobs is not None else None
        self._done = stream.record()

    def wait(self) -> StepOutput:
        """Block until the copy has arrived."""
        if self._done is not None:
            self._done.synchronize()
        n = self._num_reqs
        tokens, num_sampled = (t.numpy()[:n] for t in self._copies)
        logprobs = None
        if self._logprobs is not None:
            ids, values, ranks = (t.numpy()[:n] for t in self._logprobs)
            logprobs = LogprobsOutput(token_ids_np=ids, logprobs_np=values, ranks_np=ranks)
        return StepOutput(step_id=self._step_id, tokens_np=tokens, num_sampled_np=num_sampled, logprobs=logprobs)


class OutputRing:
    """Host memory that graphs write their results to, in place of a copy: a few slots, used in turn.

    Attributes:
        slots: [num_slots, 2, max_rows] int32, pinned for CUDA: tokens gained, and the tokens.
    """

    def __init__(self, limits: Limits, *, num_slots: int = 16) -> None:
        pin = limits.device.type == "cuda"
        self.slots = torch.zeros(num_slots, 2, limits.max_rows, dtype=torch.int32, pin_memory=pin)
        self.slots_np = self.slots.numpy()
        self._outputs: list[RingOutput | None] = [None] * num_slots
        self._events = [torch.cuda.Event() if pin else None for _ in range(num_slots)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def next_slot(self) -> int:
        """The slot for the next step; what it holds has been read then. With no more steps in flight than slots, that
        never waits.
        """
        self._turn = (self._turn + 1) % len(self._outputs)
        output, self._outputs[self._turn] = self._outputs[self._turn], None
        if output is not None:
            output.wait()
        return self._turn

    def begun(self, plan: StepPlan, slot: int) -> RingOutput:
        """The result of `plan`, whose launch has been given to the current stream."""
        done = self._events[slot]
        if done is not None:
            done.record()
        output = self._outputs[slot] = RingOutput(plan, self.slots_np[slot], done)
        return output


class RingOutput:
    """A step's result that a graph writes to `slot_np` [2, max_rows]."""

    def __init__(self, plan: StepPlan, slot_np: NDArray[np.int32], done: torch.cuda.Event | None) -> None:
        self._step_id, self._num_reqs = plan.step_id, plan.num_reqs
        self._slot_np, self._done = slot_np, done
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        """Block until it has arrived."""
        if self._output is None:
            if self._done is not None:
                self._done.synchronize()
            # A copy: the slot is used again.
            slot_np = self._slot_np[:, : self._num_reqs].astype(np.int64)
            self._output = StepOutput(
                step_id=self._step_id, tokens_np=slot_np[1][:, None], num_sampled_np=slot_np[0].astype(np.int32)
            )
        return self._output


class JoinedOutput:
    """The result of a step that ran in two parts."""

    def __init__(self, first: Pending, second: Pending) -> None:
        self._parts = first, second

    def wait(self) -> StepOutput:
        """Block until both have arrived."""
        first, second = (part.wait() for part in self._parts)
        logprobs, a, b = None, first.logprobs, second.logprobs
        if a is not None and b is not None:
            both = {f.name: np.concatenate((getattr(a, f.name), getattr(b, f.name))) for f in fields(a)}
            logprobs = LogprobsOutput(**both)
        return StepOutput(
            step_id=first.step_id,
            tokens_np=np.concatenate((first.tokens_np, second.tokens_np)),
            num_sampled_np=np.concatenate((first.num_sampled_np, second.num_sampled_np)),
            logprobs=logprobs,
        )


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
