"""A model beside a reference, module by module: where the first difference is, and what most likely made it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrv2.errors import TargetError
from mrv2.frontend.build import LoadedModel
from mrv2.layers.base import WeightMap
from mrv2.testing.activations import Activations, our_names
from mrv2.testing.bench import CONTEXT, run_alone
from mrv2.testing.compare import Pair, errors
from mrv2.testing.observe import observe
from mrv2.testing.traps import Difference, likely_causes

BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference allowed, as a share of the largest value, by the coarser of both dtypes: some hundred roundings.
Sums in another order, and what depth adds, stay well below; every trap is far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place that was compared."""

    name: str  # KIND.NAME
    error: float  # as a share of the reference's largest value
    position: int  # the first beyond the bound, or -1

    @property
    def label(self) -> str:
        """For people."""
        kind, _, name = self.name.partition(".")
        what = {"in": "input", "q": "queries as compared, rotated", "k": "keys as compared, rotated"}.get(kind, "")
        return f"{name} ({what})" if what else name

    @property
    def module(self) -> str:
        """The module's name."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was found.

    Attributes:
        points: in the order in which the model runs.
        unmatched: modules of the reference that no module of ours has the name of.
        misshapen: points of both that have other shapes, and which.
        causes: of the first difference, likeliest first.
    """

    model: str
    adapter: str
    reference: str
    dtype: str
    num_tokens: int
    bound: float
    points: tuple[Point, ...]
    unmatched: tuple[str, ...]
    misshapen: tuple[str, ...]
    causes: tuple[str, ...]

    @property
    def first(self) -> Point | None:
        """The first point beyond the bound."""
        return next((p for p in self.points if not p.error <= self.bound), None)

    @property
    def depth(self) -> tuple[Point, ...]:
        """The streams after layers, or all points where there are none."""
        last = [p for p in self.points if p.name.startswith("out.") and p.module.rpartition(".")[2].isdigit()]
        return tuple(last or self.points)


def compare_modules(
    loaded: LoadedModel,
    reference: Activations,
    *,
    device: str,
    names: Sequence[tuple[str, str]] = (),
) -> Parity:
    """Run the reference's sequence, whole and alone, and compare what passes between modules.

    Args:
        loaded: the model.
        reference: of the same checkpoint.
        device: that the model was loaded to.
        names: (regex, replacement) for the reference's names, before the adapter's weight map sees them.

    Raises:
        TargetError: the reference's token ids are none of the model's, or no module of it has a name of ours.
    """
    module: Any = loaded.module
    count, vocab = len(reference.ids), loaded.config.vocab_size
    ids = reference.ids[: CONTEXT - 1]  # of a causal model the beginning tells as much
    if not ids or not all(0 <= i < vocab for i in ids):
        raise TargetError(
            f"{reference.name} has {'no token ids' if not ids else f'token ids beyond the {vocab} of the model'}",
            where="--reference",
            fix="record one sequence of this model's tokens",
        )
    with observe(module) as seen:
        run_alone(loaded, ids, {}, device=device)
    weight_map: WeightMap = getattr(type(module), "weight_map", WeightMap())
    theirs = our_names(reference.tensors, names, weight_map, list(seen.tensors))
    dtype = next(module.parameters()).dtype
    coarse = max([dtype, *(t.dtype for t in theirs.values() if t.dtype in BOUNDS)], key=lambda d: BOUNDS.get(d, 0.0))
    bound = BOUNDS.get(coarse, BOUNDS[torch.float32])
    ours = {name: _flat(t, len(ids), len(ids)) for name, t in seen.tensors.items()}
    want = {name: flat for name, t in theirs.items() if (flat := _flat(t, count, len(ids))) is not None}
    points, first, shapes = [], None, dict[str, str]()
    for name, theirs_ in theirs.items():
        if name in ours and name not in want:
            shapes[name] = f"{list(theirs_.shape)}, which isn't one row for each of {count} tokens"
    for name, got in ours.items():
        if got is None or name not in want:
            continue
        if want[name].shape != got.shape:
            shapes[name] = f"{want[name].shape[1]} values a token, ours {got.shape[1]}"
            continue
        scale = want[name].nan_to_num(0.0, 0.0, 0.0).abs().max()
        gap = errors(Pair(request=name, got=got, want=want[name])) / max(float(scale), 1e-9)
        wrong = (~(gap <= bound)).nonzero()
        point = Point(name=name, error=float(gap.max()), position=int(wrong[0, 0]) if len(wrong) else -1)
        points.append(point)
        first = first or (point if len(wrong) else None)
    if not points and shapes:
        name, what = next(iter(shapes.items()))
        raise TargetError(
            f"nothing of {reference.name} has the shape of ours: {name} has {what}",
            where="--reference",
            fix="record the same checkpoint, one sequence, a row per token",
        )
    if not points:
        raise TargetError(
            f"no module of {reference.name} has a name of ours: it has {', '.join(list(theirs)[:3])}, and so on",
            where="--reference",
            fix=f"give --names; ours are {', '.join(list(ours)[:3])}, and so on",
        )
    causes: tuple[str, ...] = ()
    if first is not None:
        difference = Difference(
            point=first.name,
            position=first.position,
            ours={k: t for k, t in ours.items() if t is not None},
            theirs=want,
            streams=seen.streams,
            modules=dict(module.named_modules()),
            bound=bound,
        )
        causes = likely_causes(difference)
        if not want[first.name].isfinite().all():
            causes = ("the reference's own values aren't all numbers", *causes)
    known = {p.module for p in points} | {name.partition(".")[2] for name in shapes}
    return Parity(
        model=loaded.name,
        adapter=loaded.adapter,
        reference=reference.name,
        dtype=str(coarse).removeprefix("torch."),
        num_tokens=len(ids),
        bound=bound,
        points=tuple(points),
        unmatched=tuple(sorted({name.partition(".")[2] for name in theirs} - known)),
        misshapen=tuple(f"{name} ({what})" for name, what in shapes.items()),
        causes=causes,
    )


def _flat(tensor: Tensor, count: int, n: int) -> Tensor | None:
    """The first [n, size] in float32 of [count, ...] or [1, count, ...]; None: it isn't per token."""
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] == count:
        tensor = tensor[0]
    return tensor[:n].float().cpu().reshape(n, -1) if tensor.dim() and tensor.shape[0] == count else None


def to_dict(parity: Parity) -> dict[str, Any]:
    """For `--json`."""
    first = parity.first
    return {
        "model": parity.model,
        "adapter": parity.adapter,
        "reference": parity.reference,
        "dtype": parity.dtype,
        "tokens": parity.num_tokens,
        "bound": parity.bound,
        "first": None if first is None else {"point": first.name, "error": first.error, "position": first.position},
        "causes": list(parity.causes),
        "points": [{"point": p.name, "error": p.error} for p in parity.points],
        "unmatched": list(parity.unmatched),
        "misshapen": list(parity.misshapen),
    }


def bars(points: Sequence[Point], bound: float, width: int = 32) -> list[str]:
    """One line a point: its error on a logarithmic scale, from a hundred-thousandth of the bound up; the bound is
    marked.
    """
    low, high = math.log10(bound) - 5, max(math.log10(bound) + 2, 0.5)

    def place(error: float) -> int:
        exponent = math.log10(max(error, 1e-12)) if math.isfinite(error) else high
        return round(width * min(max((exponent - low) / (high - low), 0), 1))

    mark, size, lines = place(bound), max((len(p.label) for p in points), default=0), []
    for p in points:
        bar = ("#" * place(p.error)).ljust(width)
        bar = bar[:mark] + "|" + bar[mark:]
        lines.append(f"{p.label:<{size}}  {bar}  {p.error:.2g}" + ("" if p.error <= bound else "  beyond the bound"))
    return lines
