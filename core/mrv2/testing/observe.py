"""What passes between the modules of a model in the native host, by the names that its checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from mrv2.layers.base import Stream
from mrv2.layers.context import NativeContext
from mrv2.layers.linear import Linear, LinearBase, PackedLinear
from mrv2.layers.small import RMSNorm


@dataclass(slots=True)
class Observed:
    """What was seen, each at its first call, in that order.

    Attributes:
        tensors: `out.NAME` and `in.NAME` of modules; parts of a packed projection under their own names; of attention
            layers `q.NAME` and `k.NAME`, as they are compared, and `out.NAME`. Of a layer of a stack the stream: what
            is pending included.
        streams: of those the pending output and the residual apart, where there are two.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep(self, point: str, tensor: Tensor) -> None:
        """A copy of it."""
        if point not in self.tensors:
            self.tensors[point] = tensor.detach().clone().cpu()

    def keep_stream(self, point: str, h: Stream) -> None:
        """The stream and its parts."""
        if h.residual is not None and point not in self.streams:
            self.streams[point] = h.x.detach().clone().cpu(), h.residual.detach().clone().cpu()
        self.keep(point, h.x if h.residual is None else h.x + h.residual)


@contextmanager
def observe(model: nn.Module) -> Iterator[Observed]:
    """Watch everything that runs of `model` within the block: also what layers call of each other by other ways than
    calling the module, which hooks don't see.
    """
    seen = Observed()
    members = {id(m) for parent in model.modules() if isinstance(parent, nn.ModuleList) for m in parent}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not name:
                continue
            if id(module) in members:
                _watch_layer(stack, seen, name, module)
            elif isinstance(module, RMSNorm):
                for method in ("add", "add_fused", "forward"):
                    _wrap(stack, module, method, _norm(seen, name))
            elif isinstance(module, LinearBase) and isinstance(module, Linear | PackedLinear):
                _wrap(stack, module, "project", _linear(seen, name, module))
            else:
                _watch(stack, seen, name, module)
        attend = NativeContext.attend

        def attended(ctx: NativeContext, layer: str, q: Tensor, k: Tensor | None, *args: Any) -> Tensor:
            seen.keep(f"q.{layer}", q.flatten(1))
            if k is not None:
                seen.keep(f"k.{layer}", k.flatten(1))
            out = attend(ctx, layer, q, k, *args)
            seen.keep(f"out.{layer}", out.flatten(1))
            return out

        stack.enter_context(mock.patch.object(NativeContext, "attend", attended))
        yield seen


def _wrap(stack: ExitStack, module: nn.Module, method: str, note: Callable[[Any, Any], None]) -> None:
    run = getattr(module, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        note(args[0] if args else None, result)
        return result

    object.__setattr__(module, method, wrapped)
    stack.callback(delattr, module, method)


def _norm(seen: Observed, name: str) -> Callable[[Any, Any], None]:
    return lambda given, result: seen.keep(f"out.{name}", result[0] if isinstance(result, tuple) else result)


def _linear(seen: Observed, name: str, module: Linear | PackedLinear) -> Callable[[Any, Any], None]:
    parent = name.rpartition(".")[0]

    def note(given: Tensor, result: Tensor) -> None:
        if isinstance(module, PackedLinear):
            for part, tensor in zip(module.sizes, torch.split(result, list(module.sizes.values()), -1), strict=True):
                seen.keep(f"out.{parent}.{part}" if parent else f"out.{part}", tensor)
        else:
            seen.keep(f"in.{name}", given)
            seen.keep(f"out.{name}", result)

    return note


def _watch_layer(stack: ExitStack, seen: Observed, name: str, module: nn.Module) -> None:
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Stream):
            seen.keep_stream(f"in.{name}", args[0])

    def after(_: nn.Module, args: object, out: Any) -> None:
        if isinstance(out, Stream):
            seen.keep_stream(f"out.{name}", out)

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _watch(stack: ExitStack, seen: Observed, name: str, module: nn.Module) -> None:
    def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(module, LinearBase) and isinstance(args[0], Tensor):  # the head
            seen.keep(f"in.{name}", args[0])
        if isinstance(out, Stream):
            if out.residual is not None:  # else nothing is pending: what the layer gave is in the sum
                seen.keep(f"out.{name}", out.x)
        elif isinstance(out, Tensor):
            seen.keep(f"out.{name}", out)

    stack.callback(module.register_forward_hook(after).remove)
