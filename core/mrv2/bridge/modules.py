"""Modules that exist in memory only, one per adapter, whose attributes are the classes vLLM registers.

vLLM names a model as "module:class" and hashes the module's file to know when to look at the class again. The file
given here is the adapter's own, which needs no line of code for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mrv2.bridge.names import MODULE_PREFIX, TOKENIZER_SUFFIX, adapter_file, module_name
from mrv2.entry import AdapterEntry
from mrv2.errors import Mrv2Error
from mrv2.registry import Registry


@dataclass(frozen=True, slots=True)
class Hosted:
    """An adapter as vLLM is told of it.

    Args:
        entry: the adapter, not imported.
        registry: that loads it; None: there is none, because of `error`.
        error: why its models can't be built; None: nothing is known to be wrong.
    """

    entry: AdapterEntry
    registry: Registry | None
    error: Mrv2Error | None

    def is_for(self, architecture: str) -> bool:
        """Whether vLLM is to know this adapter's class for `architecture`. Where several claim it, that is the one
        that a setting picks; if none does, each will do: its class says so when a model is built.
        """
        if self.registry is None or self.error is not None:
            return True
        try:
            return self.registry.find(architecture) is self.entry
        except Mrv2Error:
            return True


class HostedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules. There is one, in `sys.meta_path`."""

    def __init__(self) -> None:
        self.hosted: dict[str, Hosted] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, with the adapter's file as its origin."""
        if not fullname.startswith(MODULE_PREFIX) or fullname not in self.hosted:
            return None
        origin = str(adapter_file(self.hosted[fullname].entry))
        return importlib.machinery.ModuleSpec(fullname, self, origin=origin)

    def exec_module(self, module: ModuleType) -> None:
        """Give it a `__getattr__` that builds a class on first use."""
        hosted = self.hosted[module.__name__]

        def build(name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            made: type
            if name.endswith(TOKENIZER_SUFFIX):
                from mrv2.bridge.tokenizer import tokenizer_source

                made = tokenizer_source(hosted, name, module.__name__)
            else:
                from mrv2.bridge.build import hosted_class

                made = hosted_class(hosted, name, module.__name__)
            setattr(module, name, made)
            return made

        module.__getattr__ = build  # type: ignore[method-assign]


def install(hosted: Sequence[Hosted]) -> frozenset[str]:
    """Make the modules of `hosted` importable; returns the names of all that are."""
    finder = next((f for f in sys.meta_path if isinstance(f, HostedFinder)), None)
    if finder is None:
        finder = HostedFinder()
        sys.meta_path.append(finder)
    for one in hosted:
        finder.hosted.setdefault(module_name(one.entry), one)
    return frozenset(finder.hosted)
