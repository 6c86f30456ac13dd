"""Whole steps as CUDA graphs: which there are, which of them serves a step, and how they come to be.

A graph replays launches with the arguments of its capture. So a step is padded to one of a few sizes, its batch is
brought to a fixed address, and everything else is read from persistent buffers; what differs between two steps of one
size is on the device. Decodes and prompts that are computed in one step are two forwards, each with a graph of its own.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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

SMALLEST_PROMPTS, PROMPT_REQS = 16, 64
"""Tokens of prompts, after padding, of the smallest step of them; requests that all of them have room for. Launching
one by one takes the host as long for ten tokens as for a thousand, and requests cost hardly more than their logits."""

NO_ROOM = "there was no memory to capture it: grant the KV cache less, with kv_memory / --kv-memory"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What is fixed in a captured step."""

    num_reqs: int  # after padding
    max_seq_len: int  # upper bound
    sampler: SamplerNeeds | None  # a tier; None: the graph ends with hidden states, sampling follows eagerly
    num_tokens: int = 0  # of prompts, after padding; 0: decodes, one token for each request


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
    prompts: int = 0
    """Replays, included above, of the part of a step that computes prompts."""
    prompts_eager: int = 0
    """Such parts that were launched one by one."""


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
    """Sizes up to the largest steps, these themselves included."""
    bounds, bound = [], SHORTEST_CONTEXT
    while bound < limits.max_model_len:
        bounds.append(bound)
        bound *= CONTEXT_FACTOR
    return GraphPlan(
        # The larger, the more a step pays for each request, or token, of padding.
        num_reqs=_spread(1, limits.max_rows, lambda octave: 1 if octave < 16 else 2 if octave < 128 else 4),
        max_seq_lens=(*bounds, limits.max_model_len),
        num_tokens=_spread(SMALLEST_PROMPTS, limits.max_num_tokens, lambda octave: 1 if octave < 512 else 8),
    )


def _spread(size: int, most: int, steps: Callable[[int], int]) -> tuple[int, ...]:
    """Sizes from `size` to `most`, so many in each octave."""
    sizes = []
    while size < most:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += octave // steps(octave)
    return (*sizes, most)


def find_key(
    plan: GraphPlan, num_reqs: int, max_seq_len: int, sampler: SamplerNeeds | None, *, num_tokens: int = 0
) -> GraphKey | str:
    """The key of a step of decodes, or, with `num_tokens`, of prompts; or why it has none. Keys are made here only, to
    be captured and to be looked up.
    """
    largest, longest = max(plan.num_reqs, default=0), max(plan.max_seq_lens, default=0)
    if num_reqs > largest:
        return f"graph_plan() has no size for more than {largest} requests"
    if max_seq_len > longest:
        return f"graph_plan() has no size for more than {longest} tokens of a request"
    if num_tokens:  # these are many sizes already: nothing but tokens tells them apart, as a rule
        tokens = next((n for n in plan.num_tokens if n >= num_tokens), None)
        if tokens is None:
            return f"graph_plan() has no size for {num_tokens} tokens of prompts"
        return GraphKey(min(PROMPT_REQS, largest) if num_reqs <= PROMPT_REQS else largest, longest, sampler, tokens)
    size = next(n for n in plan.num_reqs if n >= num_reqs)
    return GraphKey(size, next(n for n in plan.max_seq_lens if n >= max_seq_len), sampler)


class StepGraphs:
    """The graphs of one runner, captured when they are first needed, when there is nothing else to do, or at the start.

    Args:
        plan: sizes.
        body: launches a step.
        pad: makes the next step one of padding alone, which changes nothing. Such a one is launched before a capture,
            so that all is compiled and allocated.
        recorder: captures.

    Attributes:
        due: whether `capture_next` captures a size of prompts that has just been launched one by one. It takes as long
            as another launch, and is best done while the device computes those prompts.
    """

    def __init__(
        self,
        plan: GraphPlan,
        *,
        body: Callable[[GraphKey], Captured | None],
        pad: Callable[[], object],
        recorder: Recorder,
    ) -> None:
        self.plan = plan
        self.stats = GraphStats()
        self._body = body
        self._pad = pad
        self._recorder = recorder
        self._replays: dict[GraphKey, Callable[[], Captured | None]] = {}
        self._kinds: set[tuple[int, SamplerNeeds | None]] = set()  # context and sampler of keys that have occurred
        self._wanted: deque[GraphKey] = deque()  # keys of those kinds, the largest first, and of prompts
        self._met: set[GraphKey] = set()  # keys of prompts that have been launched one by one
        self.due = False
        self._no_room: set[GraphKey] = set()  # keys for whose graphs there was no memory
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
            self._note_eager(num_reqs, key)
            return None
        self._want(key)
        replay = self._replays.get(key) or (None if key in self._no_room else self._capture(key))
        if replay is None:
            self._note_eager(num_reqs, NO_ROOM)
            return None
        self.stats.replays += 1
        above = max((n for n in self.plan.max_seq_lens if n < key.max_seq_len), default=0)
        self._last = _Found(num_reqs, above, key, replay)
        return replay

    def _note_eager(self, num_reqs: int, why: str) -> None:
        if why not in self.stats.eager:
            warnings.warn(f"a step of {num_reqs} decodes runs without a CUDA graph: {why}", stacklevel=3)
        self.stats.eager[why] = self.stats.eager.get(why, 0) + 1

    def find_prompts(
        self, num_reqs: int, num_tokens: int, max_seq_len: int, sampler: SamplerNeeds | None
    ) -> Callable[[], Captured | None] | None:
        """Replays a step of prompts, or launches it one by one if it is the first of its size; None: it has to run
        eagerly, at the size that it has.
        """
        key = find_key(self.plan, num_reqs, max_seq_len, sampler, num_tokens=num_tokens)
        replay = self._replays.get(key) if isinstance(key, GraphKey) else None
        if replay is not None:
            self.stats.replays += 1
            self.stats.prompts += 1
            return replay
        self.stats.prompts_eager += 1
        if isinstance(key, str) or sampler is None or key in self._met or key in self._no_room:
            return None  # without a tier, hidden states of all tokens would have to be kept
        self._met.add(key)
        self._wanted.appendleft(key)
        self.due = True
        return lambda: self._body(key)

    def capture_common(self, samplers: Sequence[SamplerNeeds | None]) -> None:
        """Capture what `common` says."""
        self._wanted = deque(self.common(samplers))
        self._kinds.update((key.max_seq_len, key.sampler) for key in self._wanted if not key.num_tokens)
        while (wanted := self._next_wanted()) is not None:
            self._capture(wanted)

    def common(self, samplers: Sequence[SamplerNeeds | None]) -> list[GraphKey]:
        """Decodes of all sizes with short requests, and the most prompts, for each of these samplers."""
        short = (find_key(self.plan, 1, 1, sampler) for sampler in samplers)
        decodes = [replace(key, num_reqs=n) for key in short if isinstance(key, GraphKey) for n in self.plan.num_reqs]
        prompts = [key for key in self._largest(samplers) if key.num_tokens and key.sampler is not None]
        # The largest first: what it needs is enough for the others.
        return [*prompts, *sorted(decodes, key=lambda key: -key.num_reqs)]

    def capture_next(self) -> bool:
        """Capture one that may soon be needed; False: there is none. One that can't be had is no error until a step
        needs it.
        """
        self.due = False
        key = self._next_wanted()
        if key is not None:
            try:
                self._capture(key)
            except GraphCaptureError as error:
                warnings.warn(str(error), stacklevel=2)
        return key is not None

    def _next_wanted(self) -> GraphKey | None:
        while self._wanted:
            key = self._wanted.popleft()
            if key not in self._replays and key not in self._no_room:
                return key
        return None

    def rehearse(self, samplers: Sequence[SamplerNeeds | None]) -> None:
        """Run the largest steps eagerly, for what they compile and allocate."""
        for key in self._largest(samplers):
            self._pad()
            self._body(key)

    def _largest(self, samplers: Sequence[SamplerNeeds | None]) -> list[GraphKey]:
        """Keys of the largest decodes and prompts for each of these samplers."""
        most, longest = max(self.plan.num_reqs, default=1), max(self.plan.max_seq_lens, default=1)
        tokens = {0, max(self.plan.num_tokens, default=0)}
        found = (
            find_key(self.plan, min(most, PROMPT_REQS) if n else most, longest, sampler, num_tokens=n)
            for sampler in samplers
            for n in tokens
        )
        return [key for key in found if isinstance(key, GraphKey)]

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

    def _capture(self, key: GraphKey) -> Callable[[], Captured | None] | None:
        """None: there is no memory for it."""
        start = time.perf_counter()
        try:
            self._pad()
            if key not in self._met:
                self._body(key)
            replay = self._recorder.record(lambda: self._body(key))
        except torch.OutOfMemoryError:
            self._no_room.add(key)
            return None
        except Exception as error:
            raise GraphCaptureError(
                f"a step of {_described(key)} can't be captured: {type(error).__name__}: {error}",
                where="the device side of the model, or of its ModelState",
                fix="find what reads a device value on the host there (mrv2.testing.check_frozen), say "
                "GraphSupport.NEVER in graph_support(), or run with graphs=False / --no-graphs",
            ) from error
        self._replays[key] = replay
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - start
        return replay


def _described(key: GraphKey) -> str:
    return f"{key.num_tokens} tokens of prompts" if key.num_tokens else f"{key.num_reqs} decodes"
