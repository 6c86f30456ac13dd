"""mrv2 adapter of the qwen family. Hooks only choose; the model is in `model.py`."""

from __future__ import annotations

import mrv2


@mrv2.hookimpl
def mrv2_model(ctx: mrv2.AdapterContext) -> type:
    """The model class of the architecture; its module (and torch) is imported only now."""
    from mrv2_adapter_qwen import model

    classes: dict[str, type] = {
        "Qwen2ForCausalLM": model.Qwen2ForCausalLM,
        "Qwen3ForCausalLM": model.Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": model.Qwen3MoeForCausalLM,
    }
    return classes[ctx.architecture]


@mrv2.hookimpl
def mrv2_test_target(ctx: mrv2.AdapterContext) -> object:
    """For `mrv2 check qwen`."""
    from mrv2_adapter_qwen.testing import target

    return target()
