"""Whole decode steps as CUDA graphs: which there are, which of them serves a step, and how they come to be.

A graph replays launches with the arguments of its capture. So a step is padded to one of a few sizes, its batch is
brought to a fixed address, and everything else is read from persistent buffers; what differs between two steps of one
size is on the device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mrv2.errors import GraphCaptureError
from mrv2.model_state.graphs import GraphPlan
from mrv2.sample.states import SamplerNeeds
from mrv2.state.view import Limits, StepView

T = TypeVar("T")

SHORTEST_CONTEXT, CONTEXT_FACTOR = 1024, 4
"""Bounds of lengths are far apart. Attention splits a request's own length, so that a bound too high costs a few
programs that end at once; an adapter's kernel may read as far as the bound."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What is fixed in a captured step, in which each request has one token."""

    num_reqs: int  # after padding, and so many tokens
    max_seq_len: int  # upper bound
    sampler: SamplerNeeds | None  # a tier; None: the graph ends with hidden states, sampling follows eagerly


@dataclass(frozen=True, slots=True)
class Captured:
    """What a replay leaves behind where more is to follow: in persistent buffers, and in the graphs' memory."""

    view: StepView
    hidden: Tensor  # [num_reqs, hidden]


@dataclass(slots=True)
class GraphStats:
    """Counters since the start."""

    captures: int = 0
    capture_seconds: float = 0.0
    replays: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    """Decode steps that ran eagerly although graphs are on, by reason."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What serves steps of `num_reqs` requests, the longest of them beyond `above`."""

    num_reqs: int
    above: int
    key: GraphKey
    replay: Callable[[], Captured | None]

    def serves(self, num_reqs: int, max_seq_len: int, sampler: SamplerNeeds | None) -> bool:
        """Whether looking for these would find the same."""
        alike = self.num_reqs == num_reqs and self.key.sampler is sampler
        return alike and self.above < max_seq_len <= self.key.max_seq_len


class Recorder(Protocol):
    """Makes a function that does again, on the device, what `run` launches."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """`run` is called once, maybe without effect. What it returned is returned by every replay, with new values."""
        ...


def default_plan(limits: Limits) -> GraphPlan:
    """Sizes up to the largest step of decodes, the largest itself included."""
    most, longest = limits.max_rows, limits.max_model_len
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        # The larger, the more a step pays for each request of padding.
        size += octave if octave < 16 else octave // 2 if octave < 128 else octave // 4
    bounds, bound = [], SHORTEST_CONTEXT
    while bound < longest:
        bounds.append(bound)
        bound *= CONTEXT_FACTOR
    return GraphPlan(num_reqs=(*sizes, most), max_seq_lens=(*bounds, longest))


def find_key(plan: GraphPlan, num_reqs: int, max_seq_len: int, sampler: SamplerNeeds | None) -> GraphKey | str:
    """The key of a step of decodes, or why it has none. Keys are made here only, to be captured and to be looked up."""
    size = next((n for n in plan.num_reqs if n >= num_reqs), None)
    bound = next((n for n in plan.max_seq_lens if n >= max_seq_len), None)
    if size is None:
        return f"graph_plan() has no size for more than {max(plan.num_reqs, default=0)} requests"
    if bound is None:
        return f"graph_plan() has no size for more than {max(plan.max_seq_lens, default=0)} tokens of a request"
    return GraphKey(size, bound, sampler)


class StepGraphs:
    """The graphs of one runner, captured when they are first needed, when there is nothing else to do, or at the start.

    Args:
        plan: sizes.
        body: launches a step.
        dry_run: launches one of padding alone, which changes nothing; so that all is compiled and allocated.
        recorder: captures.
    """

    def __init__(
        self,
        plan: GraphPlan,
        *,
        body: Callable[[GraphKey], Captured | None],
        dry_run: Callable[[GraphKey], object],
        recorder: Recorder,
    ) -> None:
        self.plan = plan
        self.stats = GraphStats()
        self._body = body
        self._dry_run = dry_run
        self._recorder = recorder
        self._replays: dict[GraphKey, Callable[[], Captured | None]] = {}
        self._kinds: set[tuple[int, SamplerNeeds | None]] = set()  # context and sampler of keys that have occurred
        self._wanted: deque[GraphKey] = deque()  # keys of those kinds, the largest first
        self._last: _Found | None = None

    def find(
        self, num_reqs: int, max_seq_len: int, sampler: SamplerNeeds | None
    ) -> Callable[[], Captured | None] | None:
        """Replays a step of this size; None: it has to run eagerly, which is counted and, the first time, said.

        Raises:
            GraphCaptureError: its graph was not there yet, and can't be had.
        """
        last = self._last
        if last is not None and last.serves(num_reqs, max_seq_len, sampler):
            self.stats.replays += 1
            return last.replay
        key = find_key(self.plan, num_reqs, max_seq_len, sampler)
        if isinstance(key, str):
            if key not in self.stats.eager:
                warnings.warn(f"a step of {num_reqs} decodes runs without a CUDA graph: {key}", stacklevel=2)
            self.stats.eager[key] = self.stats.eager.get(key, 0) + 1
            return None
        self._want(key)
        self.stats.replays += 1
        replay = self._replays.get(key) or self._capture(key)
        above = max((n for n in self.plan.max_seq_lens if n < key.max_seq_len), default=0)
        self._last = _Found(num_reqs, above, key, replay)
        return replay

    def capture_common(self, samplers: Sequence[SamplerNeeds | None]) -> None:
        """Capture steps of all sizes with short requests, for each of these samplers."""
        for sampler in samplers:
            key = find_key(self.plan, 1, 1, sampler)
            if isinstance(key, GraphKey):
                self._want(key)
        # The largest first: what it needs is enough for the others.
        self._wanted = deque(sorted(self._wanted, key=lambda key: -key.num_reqs))
        while self.capture_next():
            pass

    def capture_next(self) -> bool:
        """Capture one that may soon be needed; False: there is none."""
        while self._wanted:
            key = self._wanted.popleft()
            if key not in self._replays:
                self._capture(key)
                return True
        return False

    def rehearse(self, samplers: Sequence[SamplerNeeds | None]) -> None:
        """Run the largest steps eagerly, for what they compile and allocate."""
        for sampler in samplers:
            key = find_key(
                self.plan, max(self.plan.num_reqs, default=0), max(self.plan.max_seq_lens, default=0), sampler
            )
            if isinstance(key, GraphKey):
                self._dry_run(key)

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """See `CaptureContext.capture`."""
        run()
        return self._recorder.record(run)

    def _want(self, key: GraphKey) -> None:
        """Where one size occurs, others of its kind will."""
        kind = key.max_seq_len, key.sampler
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._wanted.extend(GraphKey(n, *kind) for n in reversed(self.plan.num_reqs))

    def _capture(self, key: GraphKey) -> Callable[[], Captured | None]:
        start = time.perf_counter()
        try:
            self._dry_run(key)
            replay = self._recorder.record(lambda: self._body(key))
        except Exception as error:
            raise GraphCaptureError(
                f"a step of {key.num_reqs} decodes can't be captured: {type(error).__name__}: {error}",
                where="the device side of the model, or of its ModelState",
                fix="find what reads a device value on the host there (mrv2.testing.check_frozen), say "
                "GraphSupport.NEVER in graph_support(), or run with graphs=False / --no-graphs",
            ) from error
        self._replays[key] = replay
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - start
        return replay


class CudaRecorder:
    """Captures on a side stream, all graphs in one pool of memory: they are replayed one after the other.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """See `Recorder.record`. Doesn't wait for the device."""
        graph, (stream, lock) = torch.cuda.CUDAGraph(), _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with lock, torch.cuda.stream(stream), _no_collection():
            # Other threads, such as the one that delivers outputs, may do as they like meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                self._give_up(graph)
                raise
            graph.capture_end()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed, so that the error that made it fail is the one that is seen."""
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # some versions of PyTorch don't tell the allocator then
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)


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
