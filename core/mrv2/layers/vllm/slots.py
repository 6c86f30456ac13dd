"""Weight slots of vLLM's layers: unpacked names and global shapes in front of vLLM's own sharding loaders.

vLLM's loaders cut out a rank's share before they compare shapes, so a tensor of the wrong size may pass them. Here
the strict loader has compared the whole tensor before one of them is called. Parameters of a quantisation method
are the exception: only the method knows their shapes, and vLLM checks those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from mrv2.layers.base import PARAM_SLOT, Slot

_M = TypeVar("_M", bound=nn.Module)

Load = Callable[[Tensor], object]


def set_slots(layer: _M, slots: Callable[[], dict[str, Slot]]) -> _M:
    """Let `layer` list its slots. Bound to the instance: LoRA asks for vLLM's exact classes."""
    layer.weight_slots = slots  # type: ignore[assignment]
    return layer


def whole(layer: _M, **shapes: tuple[int, ...]) -> _M:
    """`layer` with one slot for each of its own parameters, under the parameter's name.

    Args:
        layer: one of vLLM's leaves.
        shapes: global shape by parameter; one that isn't given belongs to a quantisation method.
    """

    def slots() -> dict[str, Slot]:
        known = shapes if _is_plain(layer) else {}
        return {name: Slot(name, known.get(name), _loader(layer, name)) for name, _ in _own(layer)}

    return set_slots(layer, slots)


def packed(layer: _M, parts: Mapping[str, tuple[int | str, int]], in_size: int) -> _M:
    """`layer` with one slot for each part of each of its own parameters, named beside it.

    Args:
        layer: a merged projection.
        parts: by name, vLLM's shard id and the global output size.
        in_size: input size.
    """

    def slots() -> dict[str, Slot]:
        plain = _is_plain(layer)
        found: dict[str, Slot] = {}
        for name, _ in _own(layer):
            for part, (shard, size) in parts.items():
                shape = {"weight": (size, in_size), "bias": (size,)}.get(name) if plain else None
                found[f"../{part}.{name}"] = Slot(name, shape, _loader(layer, name, shard))
        return found

    return set_slots(layer, slots)


def optional(layer: _M) -> _M:
    """`layer` with slots that a checkpoint may lack: scales of a quantised cache."""
    return set_slots(
        layer, lambda: {name: Slot(name, None, _loader(layer, name), optional=True) for name, _ in _own(layer)}
    )


def tied_head(head: _M, vocab_size: int, hidden_size: int) -> _M:
    """A head that shares the embedding's parameter: no value of its own, and a copy in a checkpoint must be equal."""

    def same(tensor: Tensor) -> bool:
        rows: Any = head.shard_indices
        start, end = rows.org_vocab_start_index, rows.org_vocab_end_index
        own: Tensor = head.weight.data[: end - start]  # type: ignore[index, assignment, union-attr]
        return torch.equal(tensor[start:end].to(own), own)

    return set_slots(head, lambda: {"weight": Slot("weight", (vocab_size, hidden_size), None, same=same)})


def bare_parameter(name: str, shape: tuple[int, ...], shard: int | None) -> nn.Parameter:
    """A parameter of this rank's share of `shape`, divided along axis `shard`, with its slot."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    local = tuple(size // ranks if axis == shard else size for axis, size in enumerate(shape))
    parameter = nn.Parameter(torch.empty(local), requires_grad=False)

    def load(tensor: Tensor) -> None:
        parameter.data.copy_(tensor if shard is None else tensor.chunk(ranks, shard)[rank])

    setattr(parameter, PARAM_SLOT, Slot(name, shape, load))
    return parameter


def _own(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(layer.named_parameters(recurse=False))


def _is_plain(layer: nn.Module) -> bool:
    """Whether parameters are the ordinary ones. vLLM has one such method per kind of layer, all called alike."""
    method: Any = getattr(layer, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


def _loader(layer: nn.Module, name: str, shard: int | str | None = None) -> Load:
    """The parameter's own loader, looked up when it loads: quantisation may replace it."""

    def load(tensor: Tensor) -> None:
        parameter: Any = layer.get_parameter(name)
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        if shard is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard)

    return load
