"""The classes that vLLM registers: our host, the adapter's model class, then vLLM's protocols.

The protocols come last, since `SupportsPP` has a `forward` of its own and vLLM looks for one in the class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.models.interfaces import SupportsEagle3, SupportsLoRA, SupportsPP

from mrv2.adapter import LoadedAdapter
from mrv2.api import VllmModel
from mrv2.bridge.failed import failed_class
from mrv2.bridge.host import HostMixin
from mrv2.bridge.modules import Hosted
from mrv2.bridge.names import architecture_of
from mrv2.bridge.state import bridged_state
from mrv2.bridge.theirs import TheirModelMixin, their_class
from mrv2.context import AdapterContext
from mrv2.errors import Mrv2Error
from mrv2.model_state.default import DefaultModelState

logger = logging.getLogger("mrv2.bridge")


def hosted_class(hosted: Hosted, name: str, module: str) -> type[nn.Module]:
    """The class registered as `name`; where something is wrong, one that raises it when a model is built.

    Args:
        hosted: the adapter.
        name: as registered.
        module: the module it is an attribute of.
    """
    try:
        if hosted.error is not None or hosted.registry is None:
            raise hosted.error or Mrv2Error(f"adapter {hosted.entry.name} can't be loaded", where=hosted.entry.where)
        context = AdapterContext(architecture=architecture_of(name), host="vllm")
        hosted.registry.find(context.architecture)  # raises if several claim it
        adapter = hosted.registry.load(hosted.entry)
        return _build(adapter, context, name, module)
    except Exception as error:
        logger.error("%s can't be built: %s", name, error)
        return failed_class(error, name, module)


def _build(adapter: LoadedAdapter, context: AdapterContext, name: str, module: str) -> type[nn.Module]:
    model: Any = adapter.model_class(context)
    state = adapter.model_state_class(context) or DefaultModelState
    facts = {
        "__module__": module,
        "__doc__": model.__doc__,
        "mrv2_adapter": adapter,
        "mrv2_context": context,
        "mrv2_model": model,
        "mrv2_state": bridged_state(
            state, recurrent=model.recurrent, processors=tuple(adapter.logits_processors(context))
        ),
    }
    how = adapter.vllm(context)
    if isinstance(how, VllmModel):
        theirs = their_class(how, model, adapter, context)
        return type(name, (TheirModelMixin, theirs), {**facts, "parts": model.parts})
    keys = tuple(part.key for part in model.parts)
    facts |= {"is_hybrid": model.recurrent, "has_inner_state": model.recurrent}
    made = type(name, (HostMixin, model, SupportsLoRA, SupportsPP, SupportsEagle3), facts)
    made.forward = _forward(keys, model)  # type: ignore[attr-defined]
    # Which dimension counts tokens; positions may have an axis in front (M-RoPE).
    dims = {"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0} | dict.fromkeys(keys, 0)
    compiled: type[nn.Module] = support_torch_compile(dynamic_arg_dims=dims)(made)
    return compiled


def _forward(keys: tuple[str, ...], model: type) -> Callable[..., Any]:
    """A `forward` that takes the parts' keys by name: compilation binds arguments by signature, not by `**`."""
    taken = "".join(f", {key}=None" for key in keys)
    given = "".join(f", {key}={key}" for key in keys)
    source = (
        f"def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None{taken}):\n"
        f"    return run(self, input_ids, positions, intermediate_tensors, inputs_embeds{given})\n"
    )
    namespace: dict[str, Any] = {"run": HostMixin.mrv2_forward}
    exec(compile(source, "<string>", "exec"), namespace)  # so named, vLLM looks for no file to hash
    forward: Callable[..., Any] = namespace["forward"]
    # Part of the key of vLLM's compile cache: one per model.
    forward.__module__, forward.__qualname__ = HostMixin.__module__, f"{model.__module__}.{model.__qualname__}.forward"
    return forward
