"""Public helpers for tests of kernels and adapters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2.testing.freeze import check_frozen
    from mrv2.testing.kernels import check_kernel, interpret_kernels

_HOMES = {
    "check_frozen": "mrv2.testing.freeze",
    "check_kernel": "mrv2.testing.kernels",
    "interpret_kernels": "mrv2.testing.kernels",
}

__all__ = ["check_frozen", "check_kernel", "interpret_kernels"]


def __getattr__(name: str) -> Any:
    # Lazy: interpret_kernels() has to run before Triton is imported.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
