"""mrv2 adapter of the llama family. Hooks only choose; the model is in `model.py`."""

from __future__ import annotations

import mrv2


@mrv2.hookimpl
def mrv2_model(ctx: mrv2.AdapterContext) -> type:
    """The model class of the architecture; its module (and torch) is imported only now."""
    from mrv2_adapter_llama import model

    classes: dict[str, type] = {
        "LlamaForCausalLM": model.LlamaForCausalLM,
        "MistralForCausalLM": model.MistralForCausalLM,
        "MixtralForCausalLM": model.MixtralForCausalLM,
    }
    return classes[ctx.architecture]


@mrv2.hookimpl
def mrv2_test_target(ctx: mrv2.AdapterContext) -> object:
    """For `mrv2 check llama`."""
    from mrv2_adapter_llama.testing import target

    return target()
