"""The suites of the conformance kit, in the order in which they are read: what fails first explains what follows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from mrv2.testing.results import Check, CheckInfo

SUITES = (
    "static",
    "weights",
    "inputs",
    "state",
    "attention",
    "no_sync",
    "graphs",
    "sampling",
    "end_to_end",
    "capabilities",
    "host_parity",
)


def all_checks() -> tuple[Check, ...]:
    """Every check of every suite, in order. Imports torch."""
    return tuple(c for suite in SUITES for c in _checks_of(suite))


def _checks_of(suite: str) -> Iterator[Check]:
    module = importlib.import_module(f"{__name__}.{suite}")
    for name, function in vars(module).items():
        info = getattr(function, "__mrv2_check__", None)
        if isinstance(info, CheckInfo):
            yield Check(
                suite=suite.replace("_", "-"),
                name=name,
                levels=info.levels,
                whole=info.whole,
                runs=info.runs,
                function=function,
            )
