"""Points of a model and of a reference beside each other: how far apart they may be, and where an error grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.testing.compare import Pair, errors

BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference allowed, as a share of the largest value, by the coarser of both dtypes: some hundred roundings.

Sums in another order, and what depth adds, have to stay well below. In float32 on a CPU right models show at most
1.7e-6 (small configs of the adapters here) and 1.6e-5 (SmolLM2, 30 layers), so the bound is six times that. A lower one
would refuse deep models for their depth, and still miss what is small by nature, such as the exact GELU in place of its
approximation by tanh (5e-5). What gives such a mistake away isn't its size but that it comes at once: see `GROWTH`.
"""

ON_GPU: Mapping[torch.dtype, float] = {torch.float32: 5e-4}
"""The same of a model on a GPU, whose sums come in yet another order than the reference's on the CPU."""

GROWTH = 20.0
"""A point within the bound whose error is this many times that of every point before it is told as a warning. In right
models the factor is at most 3.4; a mistake in a layer shows a hundred."""

NOISE = 4.0
"""Roundings, of the coarser dtype, below which errors count as one size: growing from nothing is no growth."""

LOGITS = "logits"
"""The last point: what the model says in the end, whatever follows its last module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place that was compared."""

    name: str  # KIND.NAME, or `LOGITS`
    error: float  # as a share of the reference's largest value
    position: int  # the first beyond the bound, or -1

    @property
    def label(self) -> str:
        """For people."""
        what = {"in": "input", "q": "queries as compared, rotated", "k": "keys as compared, rotated"}
        kind = self.name.partition(".")[0]
        return f"{self.module} ({what[kind]})" if kind in what else self.module

    @property
    def module(self) -> str:
        """The module's name."""
        return self.name if self.name == LOGITS else self.name.partition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Where the error grows all of a sudden, though it stays within the bound."""

    point: Point
    before: float  # the largest error of the points before it, or what roundings make

    @property
    def factor(self) -> float:
        """How many times."""
        return self.point.error / self.before

    def __str__(self) -> str:
        """For people."""
        return f"{self.factor:.0f}-fold at {self.point.label}, from {self.before:.2g} to {self.point.error:.2g}"


def bound_of(dtype: torch.dtype, device: str) -> float:
    """The bound for the coarser dtype of both sides."""
    bounds = BOUNDS if torch.device(device).type == "cpu" else {**BOUNDS, **ON_GPU}
    return bounds.get(dtype, bounds[torch.float32])


def gaps(got: Tensor, want: Tensor) -> Tensor:
    """[n] the largest difference of each row, as a share of the largest value of all of `want`."""
    scale = want.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return errors(Pair(request="", got=got, want=want)) / max(float(scale), 1e-9)


def compare_points(
    ours: Mapping[str, Tensor], want: Mapping[str, Tensor], num_tokens: int, bound: float
) -> tuple[list[Point], dict[str, str]]:
    """What both have, in our order, and of what has another shape which.

    Args:
        ours: [num_tokens, size] by name, or [1, size] of the last token.
        want: the reference's.
        num_tokens: of the sequence.
        bound: see `bound_of`.
    """
    points, shapes = list[Point](), dict[str, str]()
    for name, got in ours.items():
        if name not in want:
            continue
        if want[name].shape != got.shape:
            shapes[name] = f"{want[name].shape[1]} values a token, ours {got.shape[1]}"
            continue
        gap = gaps(got, want[name])
        wrong = (~(gap <= bound)).nonzero()
        position = int(wrong[0, 0]) + num_tokens - len(got) if len(wrong) else -1
        points.append(Point(name=name, error=float(gap.max()), position=position))
    return points, shapes


def noise(dtype: torch.dtype) -> float:
    """What roundings alone make of an error."""
    return NOISE * torch.finfo(dtype).eps


def growth_of(points: list[Point], bound: float, dtype: torch.dtype) -> Growth | None:
    """The first point whose error is more than `GROWTH` times that of all before it, if none up to it is beyond the
    bound.
    """
    before = noise(dtype)
    for point in points:
        if not point.error <= bound:
            return None
        if point.error > GROWTH * before:
            return Growth(point=point, before=before)
        before = max(before, point.error)
    return None


def flat(tensor: Tensor, count: int, n: int) -> Tensor | None:
    """The first [n, size] in float32 of [count, ...] or [1, count, ...]; None: it isn't per token."""
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] == count:
        tensor = tensor[0]
    return tensor[:n].float().cpu().reshape(n, -1) if tensor.dim() and tensor.shape[0] == count else None
