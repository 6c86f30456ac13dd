"""Public helpers for tests of adapters and kernels, and the conformance kit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2.testing.check import Report, run_checks
    from mrv2.testing.conformance import AdapterConformance, override
    from mrv2.testing.freeze import check_frozen
    from mrv2.testing.kernels import check_kernel, interpret_kernels
    from mrv2.testing.references import recorded_reference, transformers_reference
    from mrv2.testing.results import ConformanceFailure, Level, Outcome, Result
    from mrv2.testing.subject import Subject
    from mrv2.testing.target import Target, Tolerances, tiny_config

_HOMES = {
    "AdapterConformance": "mrv2.testing.conformance",
    "ConformanceFailure": "mrv2.testing.results",
    "Level": "mrv2.testing.results",
    "Outcome": "mrv2.testing.results",
    "Report": "mrv2.testing.check",
    "Result": "mrv2.testing.results",
    "Subject": "mrv2.testing.subject",
    "Target": "mrv2.testing.target",
    "Tolerances": "mrv2.testing.target",
    "check_frozen": "mrv2.testing.freeze",
    "check_kernel": "mrv2.testing.kernels",
    "interpret_kernels": "mrv2.testing.kernels",
    "override": "mrv2.testing.conformance",
    "recorded_reference": "mrv2.testing.references",
    "run_checks": "mrv2.testing.check",
    "tiny_config": "mrv2.testing.target",
    "transformers_reference": "mrv2.testing.references",
}

__all__ = [
    "AdapterConformance",
    "ConformanceFailure",
    "Level",
    "Outcome",
    "Report",
    "Result",
    "Subject",
    "Target",
    "Tolerances",
    "check_frozen",
    "check_kernel",
    "interpret_kernels",
    "override",
    "recorded_reference",
    "run_checks",
    "tiny_config",
    "transformers_reference",
]


def __getattr__(name: str) -> Any:
    # Lazy: interpret_kernels() has to run before Triton is imported, and the pytest plugin imports no torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
