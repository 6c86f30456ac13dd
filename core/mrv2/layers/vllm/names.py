"""Names given to layers, and those they have."""

from __future__ import annotations

from torch import nn

from mrv2.errors import LayerNameError
from mrv2.layers.vllm.layer_set import VllmLayers


def check_names(model: nn.Module, layers: VllmLayers, prefix: str) -> None:
    """Every layer is stored under the name it was given; vLLM's caches, LoRA and quantisation go by names.

    Raises:
        LayerNameError: lists given and actual names.
    """
    before = f"{prefix}." if prefix else ""
    paths: dict[int, str] = {id(m): before + path for path, m in model.named_modules()}
    paths |= {id(p): before + path for path, p in model.named_parameters()}
    wrong = [
        f"{given} is stored as {paths.get(id(layer), 'nothing')}"
        for given, layer in layers.built.named
        if paths.get(id(layer)) != given
    ]
    if wrong:
        raise LayerNameError(
            "; ".join(wrong[:8]) + (f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            fix="pass the attribute's own name, and L.scope(attribute) to sub-modules",
        )
