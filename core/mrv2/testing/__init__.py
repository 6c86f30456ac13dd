"""Public helpers for tests of kernels and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2.testing.kernels import check_kernel, interpret_kernels

__all__ = ["check_kernel", "interpret_kernels"]


def __getattr__(name: str) -> Any:
    # Lazy: interpret_kernels() has to run before Triton is imported.
    if name in __all__:
        from mrv2.testing import kernels

        return getattr(kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
