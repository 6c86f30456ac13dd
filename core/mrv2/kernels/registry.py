"""How a kernel is declared: a Triton launcher, its torch twin, and the rule that picks one of them.

The twin is the readable definition, and what runs on the CPU. Both take the same arguments and write the
same tensors. Nothing here needs a GPU, or Triton itself: where Triton is missing, twins run everywhere.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from mrv2.errors import KernelError

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has wheels for Linux only
    triton = tl = None

__all__ = ["Kernel", "interpreting", "jit", "kernel", "on_host", "tl", "triton"]

P = ParamSpec("P")
R = TypeVar("R")


def interpreting() -> bool:
    """Whether Triton was imported under `TRITON_INTERPRET=1`: kernels then run, slowly, on CPU tensors.

    Triton decides this when it is first imported, since its own library functions are kernels too.
    """
    if triton is None:
        return False
    return not isinstance(tl.cdiv, triton.JITFunction)


_CAN_INTERPRET = interpreting()
"""Looked up once: to read the environment at every call would cost a tenth of a millisecond per step on a CPU."""


compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)
"""Whether launches compile their kernel and do nothing else; see `compile_ahead`."""

compile_mode: ContextVar[Any] = ContextVar("compile_mode", default=None)
"""Triton's, of which threads compile; None: each launch does it by itself."""

try:
    from triton.runtime import _async_compile
except ImportError:  # nobody sets the mode then
    _async_compile = None

if triton is not None:

    class Compiled(triton.JITFunction):  # type: ignore[misc]  # Triton isn't typed
        """A kernel for the GPU."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            """A launch, or, with `warmup`, what comes before one."""
            mode, warmup = compile_mode.get(), warmup or compiles_only.get()
            if mode is None:
                return super().run(*args, grid=grid, warmup=warmup, **kwargs)
            # Entering it would wait for all that it compiles when it is left.
            before = _async_compile.active_mode.set(mode)
            try:
                return super().run(*args, grid=grid, warmup=warmup, **kwargs)
            finally:
                _async_compile.active_mode.reset(before)


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, usable where Triton is missing, and in step with how Triton was imported.

    Args:
        do_not_specialize: integer arguments that change with the batch; Triton would otherwise compile the
            kernel anew for values of 1 and multiples of 16.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        if triton is None:
            return fn  # never launched: `Kernel` runs the twin
        if not interpreting():
            return Compiled(fn, do_not_specialize=do_not_specialize)
        with triton.knobs.runtime.scope():
            # The variable may have been taken back since Triton's import (see mrv2.testing.interpret_kernels).
            triton.knobs.runtime.interpret = True
            return triton.jit(fn, do_not_specialize=do_not_specialize)

    return decorate


class Kernel(Generic[P, R]):
    """A launcher and its twin, called like a function.

    CUDA tensors go to Triton. CPU tensors go to the twin, unless `TRITON_INTERPRET=1` is set.
    """

    def __init__(self, launcher: Callable[P, R], twin: Callable[P, R]) -> None:
        self.triton = launcher
        self.twin = twin
        functools.update_wrapper(self, launcher)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the device of the first tensor argument."""
        if triton is None:
            return self.twin(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if value.is_cuda or (_CAN_INTERPRET and os.environ.get("TRITON_INTERPRET") == "1"):
                    return self.triton(*args, **kwargs)
                break
        return self.twin(*args, **kwargs)


def on_host(twin: Callable[P, None]) -> Callable[P, None]:
    """A twin that reads and writes its tensors through NumPy, for integer work on a few rows: there NumPy's calls
    cost a fraction of torch's.

    It is given CPU tensors. Of tensors elsewhere it gets copies, which are copied back: as slow as that sounds, but
    only tests do it.
    """

    @functools.wraps(twin)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).is_cpu:
            return twin(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        copies = {id(tensor): tensor.cpu() for tensor in tensors}
        twin(
            *(copies.get(id(value), value) for value in args),  # type: ignore[arg-type]
            **{name: copies.get(id(value), value) for name, value in kwargs.items()},  # type: ignore[arg-type]
        )
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])
        return None

    return run


def kernel(*, twin: Callable[P, R]) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Declare a Triton launcher together with its torch twin.

    Raises:
        KernelError: the two don't take the same parameters.
    """

    def decorate(launcher: Callable[P, R]) -> Kernel[P, R]:
        ours, theirs = inspect.signature(launcher).parameters, inspect.signature(twin).parameters
        if [(p.name, p.kind, p.default) for p in ours.values()] != [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]:
            name = getattr(launcher, "__qualname__", repr(launcher))
            raise KernelError(
                f"kernel {name} takes ({', '.join(ours)}), its twin ({', '.join(theirs)})",
                where=f"{launcher.__module__}.{name}",
                fix="give the launcher and the twin the same parameters, in the same order",
            )
        return Kernel(launcher, twin)

    return decorate
