"""What vLLM calls in every process it starts (`vllm.general_plugins`): names are registered, no adapter is imported.

vLLM swallows what a plug-in raises, or dies of it whatever model it runs. So nothing is raised here: an error is kept
with the names it concerns, and raised when such a model is built.
"""

from __future__ import annotations

import logging

from mrv2.bridge.modules import Hosted, install
from mrv2.bridge.names import module_name, registered_names
from mrv2.discovery import installed_adapters
from mrv2.entry import AdapterEntry
from mrv2.errors import AdapterExcludedError, Mrv2Error
from mrv2.frontend.adapters import adapter_argument
from mrv2.registry import Registry
from mrv2.settings import Settings

logger = logging.getLogger("mrv2.bridge")


def register() -> None:
    """Tell vLLM the architectures of this environment's adapters. May be called again."""
    try:
        _register()
    except Exception:  # an environment that can't even be listed: models of others must go on working
        logger.exception("mrv2's adapters are not available in vLLM")


def _register() -> None:
    from vllm import ModelRegistry

    from mrv2.bridge.configs import register_configs
    from mrv2.bridge.options import check_requests
    from mrv2.bridge.tokenizer_modes import register_tokenizers
    from mrv2.layers.vllm.state_backends import register_state_types

    hosted = find_hosted()
    modules = install(hosted)
    taken = {name for name, model in ModelRegistry.models.items() if getattr(model, "module_name", None) not in modules}
    classes = [
        (module_name(one.entry), name)
        for one in hosted
        for architecture in filter(one.is_for, one.entry.architectures)
        for name in registered_names(architecture, taken)
    ]
    for module, name in classes:
        ModelRegistry.register_model(name, f"{module}:{name}")
    register_tokenizers(classes)
    register_configs([(one.entry, one.registry) for one in hosted if one.registry is not None and one.error is None])
    register_state_types()
    check_requests()
    _split_graphs_at_kernels()


def find_hosted() -> list[Hosted]:
    """Every adapter that claims an architecture, broken and excluded ones with the error that a user has to see."""
    everything = installed_adapters(None)
    try:
        local = Settings.from_env().local_adapters
        registry = Registry.discover(adapters=[adapter_argument(adapter) for adapter in local])
    except Mrv2Error as error:
        return [Hosted(entry, None, error) for entry in everything]
    allowed = [Hosted(entry, registry, entry.error) for entry in registry.entries]
    known = {(entry.name, entry.dist) for entry in registry.entries}
    claimed = {a for entry in registry.entries for a in entry.architectures}
    excluded = [
        Hosted(entry, registry, _excluded(entry))
        for entry in everything
        if (entry.name, entry.dist) not in known and not claimed.intersection(entry.architectures)
    ]
    return allowed + excluded


def _excluded(entry: AdapterEntry) -> AdapterExcludedError:
    return AdapterExcludedError(
        f"adapter {entry.label} is installed, and MRV2_ADAPTERS doesn't list it",
        where=entry.where,
        fix=f"add {entry.dist} to MRV2_ADAPTERS in the environment of vLLM, or unset the variable",
    )


def _split_graphs_at_kernels() -> None:
    """Piecewise CUDA graphs stop at attention; they have to at adapters' own kernels as well."""
    from vllm.config import CompilationConfig

    ops: list[str] | None = getattr(CompilationConfig, "_attention_ops", None)
    if ops is not None and "vllm::mrv2_cache" not in ops:
        ops.append("vllm::mrv2_cache")
