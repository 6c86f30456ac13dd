"""The public surface as data: what a change of has to come with a new SDK API version.

    python -m mrv2.testing.surface tests/contract/surface.json           # compare
    python -m mrv2.testing.surface tests/contract/surface.json --write   # accept

The committed file names the families whose classes others may inherit, so that no family is named here.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrv2.api import SDK_API
from mrv2.context import AdapterContext
from mrv2.hookspecs import HOOKS
from mrv2.manifest import Capability, Manifest
from mrv2.registry import Registry

CLASSES = (
    "mrv2.layers.base:LayerSet",
    "mrv2.layers.causal_lm:CausalLM",
    "mrv2.layers.causal_lm:Decoder",
    "mrv2.layers.causal_lm:DecoderBlock",
    "mrv2.layers.base:ModelClass",
    "mrv2.layers.base:StepContext",
    "mrv2.layers.custom:CacheKernel",
    "mrv2.model_state.base:ModelState",
    "mrv2.model_state.default:DefaultModelState",
    "mrv2.model_state.graphs:CaptureContext",
    "mrv2.model_state.parts:InputPart",
    "mrv2.sample.processors:LogitsProcessor",
    "mrv2.sample.processors:LogitsView",
    "mrv2.registry:Registry",
    "mrv2.state.columns:MirroredColumn",
    "mrv2.testing.conformance:AdapterConformance",
)
"""Classes whose methods adapters call, inherit or override."""

DATACLASSES = (
    "mrv2.api:RequestData",
    "mrv2.attn.specs:CacheTensor",
    "mrv2.attn.specs:PerRequest",
    "mrv2.attn.specs:PerToken",
    "mrv2.context:AdapterContext",
    "mrv2.layers.base:Slot",
    "mrv2.layers.base:WeightMap",
    "mrv2.model_state.graphs:GraphPlan",
    "mrv2.sample.params:SamplingParams",
    "mrv2.state.plan:BlockCopies",
    "mrv2.state.plan:BlockWrites",
    "mrv2.state.plan:StepPlan",
    "mrv2.state.view:CacheMeta",
    "mrv2.state.view:Limits",
    "mrv2.state.view:StepView",
    "mrv2.state.view:TableView",
    "mrv2.testing.target:Target",
    "mrv2.testing.target:Tolerances",
)
"""Data whose fields adapters read or fill in."""


FUNCTIONS = (
    *(
        f"mrv2.layers:{name}"
        for name in ("fresh", "load_state", "read_tokens", "rope_parameters", "steps", "store_state", "write_tokens")
    ),
    *(
        f"mrv2.testing:{name}"
        for name in (
            "check_frozen",
            "check_kernel",
            "interpret_kernels",
            "override",
            "recorded_reference",
            "run_checks",
            "tiny_config",
            "transformers_reference",
        )
    ),
)
"""Functions that adapters call."""


def surface(families: Sequence[str]) -> dict[str, Any]:
    """Everything adapters are written against, as sorted plain data.

    Args:
        families: adapters whose model modules are part of the surface.

    Raises:
        Mrv2Error: one of `families` isn't installed, or is broken.
    """
    specs = importlib.import_module("mrv2.hookspecs")
    return {
        "sdk_api": str(SDK_API),
        "families": sorted(families),
        "exports": sorted(importlib.import_module("mrv2").__all__),
        "hooks": {name: list(inspect.signature(getattr(specs, name)).parameters) for name in HOOKS},
        "manifest": {name: _annotation(f.annotation) for name, f in Manifest.model_fields.items()},
        "capabilities": sorted(Capability),
        "classes": {path: describe_class(_load(path)) for path in CLASSES},
        "functions": {path: signature_text(_load(path)) for path in FUNCTIONS},
        "dataclasses": {path: describe_fields(_load(path)) for path in DATACLASSES},
        "adapters": {name: describe_family(name) for name in sorted(families)},
    }


def render(families: Sequence[str]) -> str:
    """`surface` as the text of the committed file."""
    return json.dumps(surface(families), indent=1, sort_keys=True) + "\n"


def compare(committed: str) -> str:
    """A unified diff from the committed text to the present surface; empty: equal."""
    present = render(json.loads(committed)["families"])
    return "\n".join(difflib.unified_diff(committed.splitlines(), present.splitlines(), "committed", "present", n=2))


# ---- one thing each ----------------------------------------------------------------------------------------


def describe_class(cls: type) -> dict[str, str]:
    """Public members that the class itself defines: signatures of methods, annotations of attributes."""
    found: dict[str, str] = {name: _annotation(a) for name, a in inspect.get_annotations(cls).items()}
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, property):
            found[name] = f"property -> {_annotation(inspect.signature(member.fget).return_annotation)}"  # type: ignore[arg-type]
        elif isinstance(member, staticmethod | classmethod):
            found[name] = f"{type(member).__name__} {signature_text(member.__func__)}"
        elif inspect.isfunction(member):
            abstract = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
            found[name] = abstract + signature_text(member)
    return {name: text for name, text in found.items() if not name.startswith("_") or name.startswith("__")}


def describe_fields(cls: type) -> dict[str, str]:
    """Fields of a dataclass, with the defaults that make them optional."""
    found: dict[str, str] = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            default = f" = {f.default!r}"
        else:
            default = "" if f.default_factory is dataclasses.MISSING else " = <made>"
        found[f.name] = f"{_annotation(f.type)}{default}"
    return found


def describe_family(name: str) -> dict[str, dict[str, str]]:
    """Public classes of the modules that hold an adapter's model classes."""
    registry = Registry.discover()
    adapter = registry.load(registry.get(name))
    found: dict[str, dict[str, str]] = {}
    for architecture in adapter.manifest.architectures:
        model = adapter.model_class(AdapterContext(architecture=architecture))
        for cls in vars(sys.modules[model.__module__]).values():
            public = isinstance(cls, type) and cls.__module__ == model.__module__ and not cls.__name__.startswith("_")
            if public:
                found[f"{cls.__module__}:{cls.__qualname__}"] = describe_class(cls)
    return found


def signature_text(function: Any) -> str:
    """A signature in one spelling, whatever the Python version and whether annotations are strings."""
    signature = inspect.signature(function)
    parts: list[str] = []
    star = False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        annotation = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{prefix}{p.name}{annotation}{default}")
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty else f" -> {_annotation(returns)}"
    return f"({', '.join(parts)}){arrow}"


def _annotation(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str]) -> int:
    """Compare with, or rewrite, the committed file."""
    path = Path(argv[0])
    committed = path.read_text(encoding="utf-8")
    if "--write" in argv:
        path.write_text(render(json.loads(committed)["families"]), encoding="utf-8")
        return 0
    difference = compare(committed)
    print(difference or "the surface is as committed")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
