"""The one strict weight loader of both hosts: every slot is filled once, every checkpoint tensor is used."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.errors import Mrv2Error, WeightsError
from mrv2.layers.base import WeightMap
from mrv2.loader.slots import ResolvedSlot, collect_slots, name_some
from mrv2.loader.source import TensorInfo

__all__ = [
    "LoadReport",
    "ResolvedSlot",
    "bind_weight_map",
    "check_layer_count",
    "check_weights",
    "collect_slots",
    "load_weights",
]

UNTOUCHED = "Nothing has been loaded"

PLAIN_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
"""What may be copied into a floating parameter. Eight-bit floats and integers need scales to mean anything."""

_KINDS = {
    "missing": "not in the checkpoint",
    "unused": "not used by the model",
    "shape": "wrong shape",
    "dtype": "packed or quantised values, which this model doesn't read",
    "twice": "a second tensor for one place",
    "tied": "differs from the tensor it is tied to",
    "layers": "number of layers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every slot and every checkpoint tensor. Names are full and unpacked."""

    filled: tuple[str, ...]
    tied: tuple[str, ...]  # value lives elsewhere
    defaulted: tuple[str, ...]  # optional, and not in the checkpoint
    ignored: tuple[str, ...]  # checkpoint names that the weight map declares unused
    num_bytes: int  # read from the checkpoint


def load_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    weight_map: WeightMap,
    *,
    num_layers: int | None = None,
    elsewhere: tuple[str, ...] = (),
    where: str = "",
) -> LoadReport:
    """Fill `model` from (checkpoint name, tensor) pairs, in any order. Parameters keep their addresses.

    Args:
        model: built by a layer set; every parameter has a slot.
        tensors: read one at a time; a lazy iterator keeps memory flat.
        weight_map: the family's renames, ignored names, and transform.
        num_layers: the config's layer count; the model must have a stack of that many.
        elsewhere: prefixes of our names that another pipeline stage fills.
        where: file or folder, for messages.

    Raises:
        WeightsError: see its documentation; lists the names of each kind. The model is unusable then.
        SlotError: the model's own layers are at fault. Nothing has been loaded.
    """
    audit = _Audit(collect_slots(model), num_layers)
    copies: list[tuple[str, ResolvedSlot, Tensor]] = []
    for origin, name, tensor in _canonical(tensors, weight_map, audit):
        if name.startswith(elsewhere):
            continue
        slot = audit.see(origin, name, tuple(tensor.shape), tensor.dtype)
        if slot is None:
            continue
        audit.num_bytes += tensor.nbytes
        if slot.slot.load is None:
            copies.append((origin, slot, tensor))  # its twin may not be filled yet
        else:
            with torch.no_grad():
                slot.slot.load(tensor)
    for origin, slot, tensor in copies:
        if not _same(tensor, slot):
            audit.problem("tied", f"{origin} (tied to {slot.param_name})")
    audit.finish(where, fix="Don't run this instance: its weights are incomplete")
    return audit.report()


def bind_weight_map(model: nn.Module, config: object) -> None:
    """Give a new model's weight map the config that the model was built from, if its `transform` asks for it."""
    weight_map = getattr(model, "weight_map", None)
    if isinstance(weight_map, WeightMap) and (bound := weight_map.for_config(config)) is not weight_map:
        model.weight_map = bound  # type: ignore[assignment]


def check_layer_count(names: Iterable[str], weight_map: WeightMap, num_layers: int | None, *, where: str = "") -> None:
    """Compare the config's layer count with a checkpoint's names before a model of that many layers is built.

    Refuses nothing that `check_weights` would let pass, and spares the time and memory of a model that can't fit.

    Args:
        names: of the checkpoint's tensors.
        weight_map: the family's; with a `transform`, names tell nothing.
        num_layers: the config's; None: it has none.
        where: file or folder, for messages.

    Raises:
        WeightsError: the checkpoint has no stack of that many layers.
    """
    if num_layers is None or weight_map.transform is not None:
        return
    stacks = _stacks(name for name in map(weight_map.canonical, names) if name is not None)
    if num_layers in map(len, stacks.values()):
        return
    counts = [f"{prefix} has {num_layers} in the config, {len(n)} in the checkpoint" for prefix, n in stacks.items()]
    raise _misfit({"layers": counts or [f"{num_layers} in the config, none in the checkpoint"]}, where, UNTOUCHED)


def check_weights(
    model: nn.Module,
    infos: Iterable[TensorInfo],
    weight_map: WeightMap,
    *,
    num_layers: int | None = None,
    elsewhere: tuple[str, ...] = (),
    where: str = "",
) -> None:
    """Everything `load_weights` checks except values, from headers alone; the model isn't touched.

    A map with a `transform` can't be followed without tensors; then only the model's own slots are checked.

    Raises:
        WeightsError: as `load_weights`.
        SlotError: the model's own layers are at fault.
    """
    audit = _Audit(collect_slots(model), num_layers)
    if weight_map.transform is not None:
        return
    for info in infos:
        name = weight_map.canonical(info.name)
        if name is not None and not name.startswith(elsewhere):
            audit.see(info.name, name, info.shape, info.dtype)
    audit.finish(where, fix=UNTOUCHED)


def _canonical(
    tensors: Iterable[tuple[str, Tensor]], weight_map: WeightMap, audit: _Audit
) -> Iterator[tuple[str, str, Tensor]]:
    """(checkpoint name, our name, tensor) of all tensors that aren't ignored."""

    def renamed() -> Iterator[tuple[str, str, Tensor]]:
        for origin, tensor in tensors:
            name = weight_map.canonical(origin)
            if name is None:
                audit.ignored.append(origin)
            else:
                yield origin, name, tensor

    if weight_map.transform is None:
        yield from renamed()
    else:
        # What goes in and what comes out need not correspond, so messages can only give the new names.
        transform: Any = weight_map.transform  # what takes the config has it: `WeightMap.for_config`
        try:
            for name, tensor in transform((n, t) for _, n, t in renamed()):
                yield name, name, tensor
        except Mrv2Error:
            raise
        except Exception as error:  # an adapter's code
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise WeightsError(
                f"weight_map.transform failed: {type(error).__name__}: {error}",
                where=f"{frame.filename}:{frame.lineno} in {frame.name}",
                fix="it takes an iterator of (name, tensor), already renamed, and yields such pairs",
            ) from error


def _misfit(problems: Mapping[str, list[str]], where: str, state: str) -> WeightsError:
    """The error that lists `problems` by kind, and says in what state the model is."""
    kinds = [(title, problems[kind]) for kind, title in _KINDS.items() if kind in problems]
    return WeightsError(
        "\n".join(["", *(f"    {title} {name_some(names)}" for title, names in kinds)]),
        where=where,
        fix=f"compare config.json with the checkpoint, and the adapter's weight_map with its names. {state}.",
    )


def _same(tensor: Tensor, slot: ResolvedSlot) -> bool:
    """Whether a copy in the checkpoint equals the tensor it is tied to, as far as it is in this process."""
    if slot.slot.same is not None:
        return slot.slot.same(tensor)
    parameter = slot.parameter
    return parameter is None or torch.equal(tensor.to(parameter.dtype), parameter.detach().to(tensor.device))


@dataclass(slots=True)
class _Audit:
    """Book-keeping of one load: what has been seen, and everything that is wrong."""

    slots: dict[str, ResolvedSlot]
    num_layers: int | None
    seen: dict[str, str] = field(default_factory=dict)  # our name -> checkpoint name
    names: list[str] = field(default_factory=list)  # all checkpoint tensors that aren't ignored, by our name
    problems: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def problem(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, []).append(text)

    def see(self, origin: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ResolvedSlot | None:
        """The slot that this tensor fills; None, and a problem noted, if it fits none."""
        self.names.append(name)
        slot = self.slots.get(name)
        if slot is None:
            self.problem("unused", origin)
        elif name in self.seen:
            self.problem("twice", f"{origin} (after {self.seen[name]})")
        else:
            self.seen[name] = origin
            if slot.slot.shape is None:
                return slot
            floating = slot.parameter is None or slot.parameter.is_floating_point()
            if floating and dtype not in PLAIN_DTYPES:
                self.problem("dtype", f"{origin} {str(dtype).removeprefix('torch.')}")
            elif shape != slot.slot.shape:
                self.problem("shape", f"{origin} is {list(shape)}, the model has {list(slot.slot.shape)}")
            else:
                return slot
        return None

    def finish(self, where: str, *, fix: str) -> None:
        """Add what only the whole shows, and raise if anything is wrong."""
        missing = [name for name, slot in self.slots.items() if slot.required and name not in self.seen]
        spellings = self._spellings() if missing else {}
        for name in missing:
            self.problem("missing", name + _hint(name, spellings))
        for text in self._layer_counts():
            self.problem("layers", text)
        if self.problems:
            raise _misfit(self.problems, where, fix)

    def report(self) -> LoadReport:
        return LoadReport(
            filled=tuple(n for n in self.seen if not self.slots[n].tied),
            tied=tuple(n for n, s in self.slots.items() if s.tied),
            defaulted=tuple(n for n, s in self.slots.items() if s.slot.optional and n not in self.seen),
            ignored=tuple(self.ignored),
            num_bytes=self.num_bytes,
        )

    def _spellings(self) -> dict[str, str]:
        """The checkpoint's names by ours with the layer left open, where the two differ."""
        return {_LAYER.sub(".#.", ours, count=1): origin for ours, origin in self.seen.items() if ours != origin}

    def _layer_counts(self) -> Iterator[str]:
        ours, theirs = _stacks(self.slots), _stacks(self.names)
        for prefix, numbers in ours.items():
            if numbers != theirs.get(prefix, set()):
                yield f"{prefix} has {len(numbers)} in the config, {len(theirs.get(prefix, set()))} in the checkpoint"
        if self.num_layers is not None and self.num_layers not in map(len, ours.values()):
            sizes = ", ".join(f"{prefix} {len(numbers)}" for prefix, numbers in ours.items()) or "none"
            yield f"the config says {self.num_layers}, the model class built {sizes}"


_LAYER = re.compile(r"\.\d+\.")


def _hint(name: str, spellings: dict[str, str]) -> str:
    """How the checkpoint spells the same tensor of another layer, where our name isn't the checkpoint's."""
    number, origin = _LAYER.search(name), spellings.get(_LAYER.sub(".#.", name, count=1))
    if number is None or origin is None:
        return ""
    return f" (checkpoint: {_LAYER.sub(number.group(), origin, count=1)})"


def _stacks(names: Iterable[str]) -> dict[str, set[int]]:
    """Layer numbers by the name of their stack, the outermost only."""
    stacks: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match is not None:
            stacks.setdefault(name[: match.start()], set()).add(int(match.group()[1:-1]))
    return stacks
