"""Which places of a model a checkpoint has to fill, under unpacked names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from mrv2.errors import SlotError
from mrv2.layers.base import PARAM_SLOT, HasWeightSlots, Slot

MAX_NAMES = 8
"""Names listed per kind in an error; the total is always given."""


@dataclass(frozen=True, slots=True)
class ResolvedSlot:
    """A slot with its full names.

    Attributes:
        name: full unpacked name, which the renamed checkpoint tensor has to equal.
        param_name: full name of the parameter it is part of, as the module that lists it sees it.
        parameter: that parameter; of a tied slot the shared one, or None where this host keeps it elsewhere.
        slot: what the layer declared.
    """

    name: str
    param_name: str
    parameter: nn.Parameter | None
    slot: Slot

    @property
    def tied(self) -> bool:
        """Its value lives elsewhere; a checkpoint may carry a copy, which must be equal."""
        return self.slot.load is None

    @property
    def required(self) -> bool:
        """A checkpoint without it is refused."""
        return not self.tied and not self.slot.optional


def collect_slots(model: nn.Module) -> dict[str, ResolvedSlot]:
    """All slots of `model` by full name, in module order.

    A module lists its own (`weight_slots()`), or its parameters carry one each (`LayerSet.param`).

    Raises:
        SlotError: a parameter has no slot, a slot has no parameter, or two slots have one name.
    """
    found: dict[str, ResolvedSlot] = {}
    problems: list[str] = []
    for path, module in model.named_modules():
        for key, slot in _declared(module):
            resolved = _resolve(model, path, key, slot)
            if resolved.name in found:
                problems.append(f"two slots are called {resolved.name}")
            if resolved.parameter is None and not resolved.tied:
                problems.append(f"slot {resolved.name} fills {resolved.param_name}, which is no parameter")
            found[resolved.name] = resolved
    owned = {id(s.parameter) for s in found.values() if s.parameter is not None and not s.tied}
    orphans = [name for name, p in model.named_parameters() if id(p) not in owned]
    if orphans:
        problems.append(f"no slot fills the parameters {name_some(orphans)}")
    if problems:
        raise SlotError(
            "; ".join(problems),
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            fix="make parameters through the layer set, or list them in the module's weight_slots()",
        )
    return found


def name_some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    more = "" if len(names) <= MAX_NAMES else ", …"
    return f"({len(names)}): {', '.join(names[:MAX_NAMES])}{more}"


def _declared(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    listed = module.weight_slots() if isinstance(module, HasWeightSlots) else {}
    yield from listed.items()
    covered = {slot.param for slot in listed.values()}
    for name, parameter in module.named_parameters(recurse=False):
        slot = getattr(parameter, PARAM_SLOT, None)
        if slot is not None and name not in covered:
            yield name, replace(slot, param=name)


def _resolve(model: nn.Module, path: str, key: str, slot: Slot) -> ResolvedSlot:
    param_name = _join(path, slot.param)
    try:
        parameter = model.get_parameter(param_name)
    except AttributeError:
        parameter = None
    return ResolvedSlot(_join(path, key), param_name, parameter, slot)


def _join(path: str, key: str) -> str:
    while key.startswith("../"):
        path, key = path.rpartition(".")[0], key[3:]
    return f"{path}.{key}" if path else key
