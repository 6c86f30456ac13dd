"""The second way into vLLM: vLLM's own model class, with the adapter's state."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn

from mrv2.adapter import LoadedAdapter
from mrv2.api import VllmModel
from mrv2.bridge.checks import check_engine
from mrv2.context import AdapterContext
from mrv2.errors import HookResultError


class TheirModelMixin:
    """In front of a class of vLLM's: checks, and the state."""

    mrv2_adapter: ClassVar[LoadedAdapter]
    mrv2_state: ClassVar[type]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_engine(vllm_config, self.mrv2_adapter, type(self))
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    @classmethod
    def get_model_state_cls(cls) -> type:
        """Asked by Model Runner V2 before it chooses by itself."""
        return cls.mrv2_state


def their_class(how: VllmModel, model: Any, adapter: LoadedAdapter, context: AdapterContext) -> type[nn.Module]:
    """The class of `how.architecture` in vLLM, if it can take the parts' inputs.

    Raises:
        HookResultError: vLLM has no such class, or its `forward` lacks a part's key.
    """
    from vllm import ModelRegistry

    def wrong(what: str, fix: str) -> HookResultError:
        where = ", ".join(p for p in (adapter.entry.where, adapter.hook_source("mrv2_vllm")) if p)
        return HookResultError(f"mrv2_vllm of adapter {adapter.name} names {what}", where=where, fix=fix)

    registered = ModelRegistry.models.get(how.architecture)
    found = None if registered is None else registered.load_model_cls()
    if found is None or issubclass(found, TheirModelMixin) or hasattr(found, "mrv2_adapter"):
        raise wrong(f"{how.architecture!r}, which is no class of vLLM's", "name an architecture that vLLM itself has")
    parameters = inspect.signature(found.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lost = [part.key for part in model.parts if part.key not in parameters and not open_ended]
    if lost:
        raise wrong(
            f"{how.architecture}, whose forward doesn't take {', '.join(lost)}",
            f"leave these parts out for {context.architecture} in vLLM, or run the adapter's own model",
        )
    return found  # type: ignore[no-any-return]
