"""A model's fused layers by themselves, one of each kind: what kernels a step of a certain size launches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mrv2.layers.base import Stream
from mrv2.layers.context import NativeContext
from mrv2.layers.fused import GatedMLP, SelfAttention


def run_each_kind(model: nn.Module, positions: Tensor, ctx: NativeContext) -> None:
    """Run one of each kind of fused layer in the model, as the first and as a later one of a stream of zeros.

    Args:
        model: has native layers. Those that it composes by itself aren't run.
        positions: [num_tokens].
        ctx: of the step.
    """
    for layer in each_kind(model):
        weight = layer.norm.weight
        h = Stream(torch.zeros(len(positions), len(weight), dtype=weight.dtype, device=weight.device), None)
        for _ in range(2):
            h = layer(h, positions, ctx) if isinstance(layer, SelfAttention) else layer(h, ctx)


def each_kind(model: nn.Module) -> Iterator[SelfAttention | GatedMLP]:
    """The first of those that differ in more than their weights' values."""
    seen = set()
    for layer in model.modules():
        if isinstance(layer, SelfAttention | GatedMLP):
            weights = tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters())
            own = layer.act if isinstance(layer, GatedMLP) else (layer.attn.args, id(layer.rotary.table))
            kind = type(layer), weights, own
            if kind not in seen:
                seen.add(kind)
                yield layer
