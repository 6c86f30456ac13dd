"""Graphs without a GPU: a step's operations, recorded and done again on the same tensors.

What a CUDA graph does to device-side code, this does too: Python runs once, and what it computed stays as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrv2.kernels.registry import Kernel

T = TypeVar("T")

_PACKAGES = (Path(__file__).parents[1], Path(torch.__file__).parent)
_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero"})
"""Operations for which the host waits, or whose result has a size that only the device knows."""


class HostReadError(AssertionError):
    """Device-side code needs a value of the device on the host. A graph can't be captured of it."""


class RecordedOps:
    """A `Recorder` of tensor operations and of the package's kernels, on any device. Kernels count as one operation,
    whatever their twins do inside.
    """

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Call `run`; the result does its operations again.

        Raises:
            HostReadError: `run` reads a tensor's value. What is read through NumPy goes unnoticed here.
        """
        tape = _Tape()
        with tape, tape.kernels():
            result = run()

        def replay() -> T:
            with torch.inference_mode():
                for step in tape.steps:
                    step()
            return result

        return replay


class RunAgain:
    """A `Recorder` that remembers nothing: each replay is a fresh build, what recorded ones are compared with."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """`run` itself."""
        return run


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self._opaque = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._opaque:
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name in _HOST_READS or (name.startswith("aten::index") and _has_mask(args)):
            raise HostReadError(f"{name} needs a value of the device on the host, at {_caller()}")
        result = func(*args, **kwargs)
        inputs = _storages((args, kwargs))
        outputs = [(k, t) for k, t in enumerate(_tensors(result)) if t.untyped_storage().data_ptr() not in inputs]
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if mutates or (outputs and "empty" not in name):
            self.steps.append(functools.partial(_again, func, args, kwargs, outputs))
        return result

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Record each call of a `Kernel` as one operation."""
        call = Kernel.__call__

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if self._opaque:
                return call(kernel, *args, **kwargs)
            self.steps.append(functools.partial(kernel, *args, **kwargs))
            self._opaque += 1
            try:
                return call(kernel, *args, **kwargs)
            finally:
                self._opaque -= 1

        with mock.patch.object(Kernel, "__call__", recorded):
            yield


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[tuple[int, Tensor]]) -> None:
    results = list(_tensors(func(*args, **kwargs)))
    for k, output in outputs:
        output.copy_(results[k])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in _tensors(value) if not t.is_mkldnn}  # these have none


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(
        t.dtype in (torch.bool, torch.uint8) for t in _tensors([a for a in args if isinstance(a, (list, tuple))])
    )


def _caller() -> str:
    """The line outside of this package and of torch that asked, or else the innermost one."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(package) for package in _PACKAGES) or file.parent.name in ("layers", "runner"):
            frames.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return frames[0] if frames else "an unknown line"
