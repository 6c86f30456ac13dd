"""Adapters' config classes for vLLM: transformers learns their model types, and an adapter is imported when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrv2.context import AdapterContext
from mrv2.entry import AdapterEntry
from mrv2.errors import ConfigError
from mrv2.registry import Registry


class LazyConfigs(dict[str, Any]):
    """Config classes by model type, where a value may be an `AdapterConfig` that is resolved when it is read."""

    def __getitem__(self, key: str) -> Any:
        """The class."""
        value = super().__getitem__(key)
        if isinstance(value, AdapterConfig):
            value = self[key] = value.load()
        return value

    def values(self) -> Any:
        """Classes that somebody has asked for; listing all must import no adapter."""
        return self._loaded().values()

    def items(self) -> Any:
        """As `values`."""
        return self._loaded().items()

    def _loaded(self) -> dict[str, Any]:
        return {key: value for key, value in super().items() if not isinstance(value, AdapterConfig)}


class AdapterConfig:
    """The config class of one model type, not imported."""

    def __init__(self, entry: AdapterEntry, registry: Registry, model_type: str) -> None:
        self.entry = entry
        self.registry = registry
        self.model_type = model_type

    def load(self) -> type:
        """Ask the adapter.

        Raises:
            ConfigError: it brings none.
            Mrv2Error: the adapter can't be loaded.
        """
        context = AdapterContext(architecture=self.entry.architectures[0], model_type=self.model_type, host="vllm")
        found = self.registry.load(self.entry).config_class(context)
        if found is None:
            raise ConfigError(
                f"neither transformers nor adapter {self.entry.name} knows model_type {self.model_type!r}",
                where=self.entry.where,
                fix="correct config.json, or let the adapter bring a class (mrv2_config)",
            )
        return found


def register_configs(entries: Sequence[tuple[AdapterEntry, Registry]]) -> None:
    """Make `AutoConfig` know the model types of `entries` that transformers itself doesn't. May be called again."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    known = CONFIG_MAPPING._extra_content
    if not isinstance(known, LazyConfigs):
        known = CONFIG_MAPPING._extra_content = LazyConfigs(known)
    for entry, registry in entries:
        for model_type in entry.manifest.model_types if entry.manifest is not None else ():
            if model_type not in CONFIG_MAPPING_NAMES:
                known.setdefault(model_type, AdapterConfig(entry, registry, model_type))
