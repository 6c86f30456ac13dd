"""The classic traps behind a first difference, each looked for in the numbers, and what to suspect otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mrv2.layers.linear import LinearBase, PackedLinear
from mrv2.layers.small import Attention, RMSNorm
from mrv2.testing.points import LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first point beyond the bound, and all that was seen. Tensors are [n, size] float32 on the CPU."""

    point: str
    position: int
    ours: Mapping[str, Tensor]
    theirs: Mapping[str, Tensor]
    streams: Mapping[str, tuple[Tensor, Tensor]]
    modules: Mapping[str, nn.Module]
    bound: float

    @property
    def got(self) -> Tensor:
        """Ours."""
        return self.ours[self.point]

    @property
    def want(self) -> Tensor:
        """The reference's."""
        return self.theirs[self.point]

    @property
    def name(self) -> str:
        """The module's."""
        return self.point.partition(".")[2]

    @property
    def kind(self) -> str:
        """`in`, `out`, `q`, `k` or `logits`."""
        return self.point.partition(".")[0]

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Equal within the bound."""
        return a.shape == b.shape and float((a - b).abs().max()) <= self.bound * max(float(b.abs().max()), 1e-9)


def likely_causes(d: Difference) -> tuple[str, ...]:
    """Traps that the numbers show, then what is usual at such a place."""
    own = () if d.want.isfinite().all() else ("the reference's own values aren't all numbers",)
    return (*own, *(text for trap in TRAPS if (text := trap(d))), *_usual(d))


def _residual_apart(d: Difference) -> str:
    x, residual = (part.float() for part in d.streams.get(d.point, (d.got, d.got)))
    more = d.theirs.get(f"more.{d.name}")
    if more is not None and more.shape == d.got.shape and d.close(d.want + more, d.got):
        return "residual kept apart: the reference gives output and residual separately; their sum is ours"
    if d.point in d.streams and d.close(x, d.want):
        return "residual kept apart: the reference's value is the layer's output alone, ours with the residual added"
    if d.point in d.streams and d.close(residual, d.want):
        return "residual kept apart: the reference's value is the residual alone, before the layer's output is added"
    return ""


def _argument_order(d: Difference) -> str:
    for other, theirs in d.theirs.items():
        if other == d.point or other not in d.ours or d.close(theirs, d.want):
            continue
        if d.close(d.got, theirs) and d.close(d.ours[other], d.want):
            return f"argument order: what the reference has here is ours of {other.partition('.')[2]}, and the reverse"
    return ""


def _in_place(d: Difference) -> str:
    for other, theirs in d.theirs.items():
        ours = d.ours.get(other)
        if other == d.point or ours is None or not torch.equal(theirs, d.want) or d.close(ours, d.got):
            continue
        return (
            f"in-place buffer: the reference has the very same values for {other}, ours differ from each other: it "
            "recorded a buffer that was written again; copy tensors when they are recorded"
        )
    return ""


def _head_dim(d: Difference) -> int | None:
    holder = d.name if d.kind in ("q", "k") else d.name.rpartition(".")[0]
    for name, module in d.modules.items():
        if isinstance(module, Attention) and name.startswith(holder):
            return module.args.head_dim
    return None


def _rope_layout(d: Difference) -> str:
    size = None if d.kind == LOGITS else _head_dim(d)
    if size is None or d.got.shape[1] % size:
        return ""

    def halves(t: Tensor) -> Tensor:  # pairs side by side, brought to halves
        return t.reshape(len(t), -1, size // 2, 2).transpose(2, 3).flatten(1)

    for a, b, how in ((d.got, d.want, "ours"), (d.want, d.got, "the reference's")):
        if d.close(halves(a), b):
            return f"rope layout: {how} are interleaved pairs where the other side has halves: permute q and k"
    if d.kind not in ("q", "k"):
        return ""
    # A rotation keeps the length of each pair, whatever its angles: that tells which elements are paired.
    before = d.theirs.get(f"out.{d.name.rpartition('.')[0]}.{d.kind}_proj")
    if before is None:
        return ""
    paired = {
        side: [how for how in ("halves", "pairs") if d.close(_lengths(after, size, how), _lengths(before, size, how))]
        for side, after in (("ours", d.got), ("theirs", d.want))
    }
    if paired["ours"] != paired["theirs"] and all(len(p) == 1 for p in paired.values()):
        return f"rope layout: ours rotates {paired['ours'][0]}, the reference {paired['theirs'][0]}"
    return ""


def _lengths(t: Tensor, size: int, how: str) -> Tensor:
    pairs = (2, size // 2) if how == "halves" else (size // 2, 2)
    return t.square().reshape(len(t), -1, *pairs).sum(2 if how == "halves" else 3).flatten(1)


def _norm_offset(d: Difference) -> str:
    module = d.modules.get(d.name)
    if d.kind != "out" or not isinstance(module, RMSNorm):
        return ""
    weight = module.weight.detach().float().cpu()
    if d.got.shape[1] % len(weight):
        return ""
    plain = d.got.reshape(len(d.got), -1, len(weight)) / torch.where(weight == 0, 1, weight)
    for offset, how in ((1.0, "add one when loading"), (-1.0, "don't add one when loading")):
        if d.close((plain * (weight + offset)).flatten(1), d.want):
            return f"norm offset: the reference's gain is ours {'plus' if offset > 0 else 'minus'} one: {how}"
    return ""


def _soft_cap(d: Difference) -> str:
    if d.kind != LOGITS or _scale(d):
        return ""
    for a, b, how in ((d.got, d.want, "the reference's"), (d.want, d.got, "ours")):
        sorted_, slack = b.gather(1, a.argsort(1)), d.bound * float(b.abs().max())
        steps = sorted_.diff(dim=1)  # none falls: the order is the same
        if bool((steps >= -slack).all()) and not d.close(a, b) and float(b.abs().max()) < float(a.abs().max()):
            return f"a soft cap: logits have the same order on both sides, and {how} are squeezed"
    return ""


def _scale(d: Difference) -> str:
    factor = float((d.got * d.want).sum() / d.want.square().sum().clamp(min=1e-30))
    if abs(factor) > 1e-6 and d.close(d.got / factor, d.want):
        return f"a constant factor: ours is {factor:.4g} times the reference's"
    return ""


TRAPS: tuple[Callable[[Difference], str], ...] = (
    _residual_apart,
    _argument_order,
    _in_place,
    _rope_layout,
    _norm_offset,
    _scale,
    _soft_cap,
)


def _usual(d: Difference) -> Iterator[str]:
    module, last = d.modules.get(d.name), d.name.rpartition(".")[2]
    if d.kind == LOGITS and not any(name in d.theirs for name in d.ours if name != LOGITS):
        yield "anything in the model: modules weren't compared; give the reference as a module, or record activations"
    elif d.kind == LOGITS:
        yield "what follows the head: a scale of logits or a soft cap, on one side only"
        yield "the head's weight: tied to the embedding on one side, or a bias left out"
    elif d.kind in ("q", "k"):
        if d.position > 0:
            yield "rotation: another base or scaling, or positions (the first token is right)"
        yield "norms of queries and keys; rotation of another layout"
    elif isinstance(module, Attention) or last == "attn":
        if d.position > 1:
            yield f"a window: the first difference is at position {d.position}"
        yield "the scale of scores, a soft cap, a window, or query heads paired with other key heads"
    elif isinstance(module, RMSNorm):
        yield "the norm's epsilon or gain, or what was added to the stream before it (a residual left out, a scale)"
    elif d.kind == "in" and last == "lm_head":
        yield "the final norm, or what follows it: a scale of hidden states"
    elif d.kind == "in" and last.isdigit():
        yield "what comes before this layer: the embedding and its scale, or a residual"
    elif d.kind == "in" and (given := _given_to_attention(d)):
        yield from _within_attention(d, given)
    elif d.kind == "in":
        yield "what this projection is given: the activation, the gate, or attention's output"
    elif last.isdigit():
        yield "a residual left out or added twice within this layer, or a scale of it"
    else:
        yield "its weights: the wrong tensor, transposed, split in another order, a bias left out"


def _given_to_attention(d: Difference) -> list[str]:
    """Projections beside attention, and norms of what they give, if this projection takes what attention gives and all
    of them agree: they come before it and were compared.
    """
    holder = d.name.rpartition(".")[0]
    beside = {n.removeprefix(f"{holder}."): m for n, m in d.modules.items() if n.startswith(f"{holder}.")}
    if not any(isinstance(m, Attention) for m in beside.values()):
        return []
    parts: list[str] = []
    for name, module in beside.items():
        if isinstance(module, PackedLinear):
            parts += module.sizes
        elif f"{holder}.{name}" != d.name and isinstance(module, LinearBase):
            parts.append(name)
    seen = [n for n in d.ours if n == d.point or n in d.theirs]
    before = seen[: seen.index(d.point)]
    if len(parts) < 3 or any(f"out.{holder}.{part}" not in before for part in parts):
        return []
    norms = [n for n in beside if f"out.{holder}.{n}" in before and n.endswith(("q_norm", "k_norm"))]
    return [*parts, *norms]


def _within_attention(d: Difference, given: list[str]) -> Iterator[str]:
    holder = d.name.rpartition(".")[0]
    rotated = any(name.startswith((f"q.{holder}.", f"k.{holder}.")) for name in d.theirs)
    agree = f"{', '.join(given)} agree, what attention makes of them doesn't"
    if d.position > 1:
        yield f"a window: the first difference is at position {d.position}"
    if d.position > 0:
        rotation = "" if rotated else "rotation (its base, layout or positions), "
        yield f"{rotation}the scale of scores, a soft cap, or a window: {agree}"
    yield f"the order of heads, or which key heads query heads are paired with{'' if d.position > 0 else f': {agree}'}"
    yield "a gate or a norm of attention's output"
