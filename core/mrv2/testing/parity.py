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
from mrv2.testing.bench import CONTEXT, logits_alone
from mrv2.testing.observe import observe
from mrv2.testing.points import BOUNDS, GROWTH, LOGITS, Growth, Point, bound_of, compare_points, flat, gaps, growth_of
from mrv2.testing.traps import Difference, likely_causes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was found.

    Attributes:
        points: in the order in which the model runs.
        unmatched: modules of the reference that no module of ours has the name of.
        misshapen: points of both that have other shapes, and which.
        growth: the first point within the bound at which the error grows all of a sudden, before any beyond it.
        causes: of the growth, else of the first difference, likeliest first.
        uncompared: `logits` or `modules`, if they weren't compared, to the reason.
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
    growth: Growth | None
    causes: tuple[str, ...]
    uncompared: Mapping[str, str]

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
    """Run the reference's sequence, whole and alone, and compare what passes between modules, and the logits.

    Args:
        loaded: the model.
        reference: of the same checkpoint.
        device: that the model was loaded to.
        names: (regex, replacement) for the reference's names, before the adapter's weight map sees them.

    Raises:
        TargetError: the reference's token ids are none of the model's, or nothing of it can be compared.
    """
    module: Any = loaded.module
    ids, count = _first_ids(reference, loaded.config.vocab_size), len(reference.ids)
    with observe(module) as seen:
        logits = logits_alone(loaded, ids, device=device)
    weight_map: WeightMap = getattr(type(module), "weight_map", WeightMap())
    theirs = our_names(reference.tensors, names, weight_map, list(seen.tensors))
    ours = {name: rows for name, t in seen.tensors.items() if (rows := flat(t, len(ids), len(ids))) is not None}
    want = {name: rows for name, t in theirs.items() if (rows := flat(t, count, len(ids))) is not None}
    unsaid = _add_logits(reference, logits, ours, want)
    _without_head(module, want)
    given = [t.dtype for t in (*theirs.values(), reference.logits) if t is not None and t.dtype in BOUNDS]
    dtype = max([next(module.parameters()).dtype, *given], key=lambda d: BOUNDS.get(d, 0.0))
    bound = bound_of(dtype, device)
    points, shapes = compare_points(ours, want, len(ids), bound)
    shapes |= {
        name: f"{list(t.shape)}, which isn't one row for each of {count} tokens"
        for name, t in theirs.items()
        if name in ours and name not in want and flat(t, count, len(ids)) is None
    }
    if unsaid and reference.logits is not None and not reference.bare:
        shapes[LOGITS] = unsaid
    known = {p.module for p in points} | {name.partition(".")[2] for name in shapes}
    uncompared = {LOGITS: unsaid} if unsaid else {}
    if not known - {LOGITS, ""}:
        uncompared["modules"] = _no_module(theirs, ours)
    if not points:
        raise _nothing(reference.name, shapes, uncompared)
    growth = growth_of(points, bound, dtype)
    worst = next((p for p in points if p.position >= 0), None) if growth is None else growth.point
    causes: tuple[str, ...] = ()
    if worst is not None:
        at = gaps(ours[worst.name], want[worst.name])
        limit = bound if growth is None else GROWTH * growth.before
        difference = Difference(
            point=worst.name,
            position=int((~(at <= limit)).nonzero()[0, 0]) + len(ids) - len(at),
            ours=ours,
            theirs=want,
            streams=seen.streams,
            modules=dict(module.named_modules()),
            bound=limit,
        )
        causes = likely_causes(difference)
    return Parity(
        model=loaded.name,
        adapter=loaded.adapter,
        reference=reference.name,
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=len(ids),
        bound=bound,
        points=tuple(points),
        unmatched=tuple(sorted({name.partition(".")[2] for name in theirs} - known)),
        misshapen=tuple(f"{name} ({what})" for name, what in shapes.items()),
        growth=growth,
        causes=causes,
        uncompared=uncompared,
    )


def _first_ids(reference: Activations, vocab: int) -> list[int]:
    ids = reference.ids[: CONTEXT - 1]  # of a causal model the beginning tells as much
    if not ids or not all(0 <= i < vocab for i in ids):
        raise TargetError(
            f"{reference.name} has {'no token ids' if not ids else f'token ids beyond the {vocab} of the model'}",
            where="--reference",
            fix="record one sequence of this model's tokens",
        )
    return ids


def _add_logits(reference: Activations, logits: Tensor, ours: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """Put both sides' logits last, of the last token alone if the reference gives no more; else why not."""
    given, n = reference.logits, len(logits)
    if given is None:
        return "the reference gives none"
    mine, rows = logits.float().cpu().reshape(n, -1), flat(given, len(reference.ids), n)
    if rows is None and len(reference.ids) == n and given.numel() == mine.shape[1]:
        mine, rows = mine[-1:], given.float().cpu().reshape(1, -1)
    if rows is None or rows.shape != mine.shape:
        return f"{list(given.shape)} of the reference, {list(mine.shape)} of ours"
    ours[LOGITS], want[LOGITS] = mine, rows
    return ""


def _without_head(module: Any, want: dict[str, Tensor]) -> None:
    """Drop what the reference's head gives if its logits are something else: code follows there (a scale, a soft cap),
    which is a part of our heads.
    """
    logits = want.get(LOGITS)
    for name, part in module.named_modules():
        head = want.get(f"out.{name}") if part is module.lm_head else None
        if logits is None or head is None or head.shape[1] != logits.shape[1]:
            continue
        if not torch.equal(head[-len(logits) :], logits):
            del want[f"out.{name}"]


def _no_module(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> str:
    if not theirs:
        return "the reference has none"
    some, mine = (", ".join([n for n in side if n != LOGITS][:3]) for side in (theirs, ours))
    return f"none of the reference's has a name of ours: it has {some}, and so on, ours are {mine}, and so on"


def _nothing(name: str, shapes: Mapping[str, str], uncompared: Mapping[str, str]) -> TargetError:
    if shapes:
        point, what = next(iter(shapes.items()))
        return TargetError(
            f"nothing of {name} has the shape of ours: {point} has {what}",
            where="--reference",
            fix="record the same checkpoint, one sequence, a row per token",
        )
    return TargetError(
        f"nothing of {name} can be compared: " + "; ".join(f"{what}: {why}" for what, why in uncompared.items()),
        where="--reference",
        fix="give --names, JSON that turns its names into ours, or a reference that gives logits",
    )


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
        "growth": None
        if parity.growth is None
        else {"point": parity.growth.point.name, "from": parity.growth.before, "to": parity.growth.point.error},
        "causes": list(parity.causes),
        "not_compared": dict(parity.uncompared),
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
