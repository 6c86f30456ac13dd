"""What a `ModelState` says about CUDA graphs of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class GraphSupport(Enum):
    """Which steps may be captured once and replayed for others of the same padded size."""

    NEVER = "never"
    """None: device-side code needs the host in every step."""
    UNIFORM_1 = "uniform_1"
    """Those in which each request has one token."""
    UNIFORM_K = "uniform_k"
    """Those in which each request has the same number of tokens: decodes, and drafts to verify."""
    ALWAYS = "always"
    """Any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Sizes to capture. A step takes the smallest that it fits in, and runs eagerly if it fits in none."""

    num_reqs: tuple[int, ...]  # requests after padding, ascending
    max_seq_lens: tuple[int, ...]  # upper bounds of lengths, ascending
    num_tokens: tuple[int, ...] = ()  # tokens after padding of prompts that are computed in a step, ascending


class CaptureContext(Protocol):
    """Captures what an adapter replays by itself."""

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Run `run` once, then capture what it launches. The result replays that; call it on the device side, outside
        of what the runner captures. What `run` reads and writes has to stay where it is; what it returns lives in
        the graphs' memory, valid until any graph is replayed.
        """
        ...
