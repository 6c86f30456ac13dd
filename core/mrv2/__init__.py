"""mrv2: model-family adapter SDK, registry and runner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrv2.version import __version__

if TYPE_CHECKING:
    from mrv2.api import SDK_API, ApiVersion, RequestData, VllmModel, hookimpl
    from mrv2.context import AdapterContext
    from mrv2.errors import Mrv2Error
    from mrv2.frontend.llm import LLM
    from mrv2.model_state.base import ModelState
    from mrv2.model_state.default import DefaultModelState
    from mrv2.model_state.graphs import CaptureContext, GraphPlan, GraphSupport
    from mrv2.model_state.parts import InputPart
    from mrv2.registry import Registry
    from mrv2.sample.params import SamplingParams
    from mrv2.sample.processors import LogitsProcessor, LogitsView
    from mrv2.state.columns import MirroredColumn
    from mrv2.state.plan import StepPlan
    from mrv2.state.view import Limits, StepView

# Name to module. Imported on first use: `mrv2 --help` and an adapter's hooks must not wait for torch.
_HOMES = {
    "LLM": "mrv2.frontend.llm",
    "SDK_API": "mrv2.api",
    "AdapterContext": "mrv2.context",
    "ApiVersion": "mrv2.api",
    "CaptureContext": "mrv2.model_state.graphs",
    "DefaultModelState": "mrv2.model_state.default",
    "GraphPlan": "mrv2.model_state.graphs",
    "GraphSupport": "mrv2.model_state.graphs",
    "InputPart": "mrv2.model_state.parts",
    "Limits": "mrv2.state.view",
    "MirroredColumn": "mrv2.state.columns",
    "LogitsProcessor": "mrv2.sample.processors",
    "LogitsView": "mrv2.sample.processors",
    "ModelState": "mrv2.model_state.base",
    "Mrv2Error": "mrv2.errors",
    "Registry": "mrv2.registry",
    "RequestData": "mrv2.api",
    "SamplingParams": "mrv2.sample.params",
    "StepPlan": "mrv2.state.plan",
    "StepView": "mrv2.state.view",
    "VllmModel": "mrv2.api",
    "hookimpl": "mrv2.api",
}

__all__ = [
    "LLM",
    "SDK_API",
    "AdapterContext",
    "ApiVersion",
    "CaptureContext",
    "DefaultModelState",
    "GraphPlan",
    "GraphSupport",
    "InputPart",
    "Limits",
    "LogitsProcessor",
    "LogitsView",
    "MirroredColumn",
    "ModelState",
    "Mrv2Error",
    "Registry",
    "RequestData",
    "SamplingParams",
    "StepPlan",
    "StepView",
    "VllmModel",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mrv2' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
