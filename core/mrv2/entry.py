"""`AdapterEntry`: one line of `mrv2 list`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from packaging.utils import canonicalize_name

from mrv2.errors import Mrv2Error
from mrv2.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """One adapter as far as it is known without importing it. Broken ones stay listed, with their error."""

    name: str
    dist: str  # distribution's name; empty for a local adapter
    version: str
    entry_point: str  # "module" or "module:attribute"
    source: str  # "installed", or the path of a local adapter
    manifest: Manifest | None = None
    architectures: tuple[str, ...] = ()  # as declared, known even when the manifest is refused
    manifest_path: str = ""
    error: Mrv2Error | None = None
    loader: Callable[[], object] | None = field(default=None, repr=False, compare=False)  # local adapters import so

    @property
    def where(self) -> str:
        """Distribution, version, entry point and file, for error messages."""
        origin = f"{self.dist} {self.version}" if self.dist else f"local adapter {self.source}"
        parts = [origin, f"entry point {self.name} = {self.entry_point}" if self.dist else "", self.manifest_path]
        return ", ".join(p for p in parts if p)

    @property
    def label(self) -> str:
        """Name and origin, short."""
        return f"{self.name} ({self.dist} {self.version})" if self.dist else f"{self.name} ({self.source})"

    def serves(self, architecture: str) -> bool:
        """Whether the adapter claims `architecture`."""
        return architecture in self.architectures

    def serves_model_type(self, model_type: str) -> bool:
        """Whether the adapter claims `model_type`."""
        return self.manifest is not None and model_type in self.manifest.model_types

    def is_called(self, name: str) -> bool:
        """Whether a user means this adapter by `name`: its own name, or its distribution's."""
        return name == self.name or (bool(self.dist) and canonicalize_name(name) == canonicalize_name(self.dist))

    def failed(self, error: Mrv2Error) -> AdapterEntry:
        """The same, with the error that ends its chain."""
        return replace(self, error=error)
