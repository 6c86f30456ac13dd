"""The vLLM host's step context. Metadata and caches aren't in it: vLLM's layers find them by their own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.sequence import IntermediateTensors

from mrv2.layers.base import Stream
from mrv2.layers.vllm.small import prenorm

HIDDEN, RESIDUAL = "hidden_states", "residual"
"""Names of what passes between pipeline stages."""


class VllmContext:
    """What `forward` gets for one step. Made within the traced forward, of tensors and Python constants.

    Args:
        is_first: this pipeline stage embeds.
        is_last: this pipeline stage produces the hidden states.
        incoming: what the stage before sent; None on the first.
        inputs_embeds: [num_tokens, hidden], instead of a look-up; None: look up.
        aux_layers: numbers of the layers whose input streams a drafter wants, the layer count for the last output.
    """

    def __init__(
        self,
        *,
        is_first: bool,
        is_last: bool,
        incoming: IntermediateTensors | None,
        inputs_embeds: Tensor | None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.is_first = is_first
        self.is_last = is_last
        self.incoming = incoming
        self.inputs_embeds = inputs_embeds
        self.aux_layers = aux_layers
        self.aux: list[Tensor] = []

    def embed(self, table: nn.Module, input_ids: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Stream:
        """See `StepContext.embed`."""
        if not self.is_first:
            assert self.incoming is not None
            return Stream(self.incoming[HIDDEN], self.incoming[RESIDUAL])
        embedded = table(input_ids) if self.inputs_embeds is None else self.inputs_embeds
        return Stream(embedded if then is None else then(embedded), None)

    def run(self, layers: nn.ModuleList, h: Stream, positions: Tensor) -> Stream:
        """See `StepContext.run`. Layers of other stages give back what they get."""
        for i, layer in enumerate(layers):
            self._keep(i, h)
            h = layer(h, positions, self)
        self._keep(len(layers), h)
        return h

    def finish(self, norm: nn.Module, h: Stream, then: Callable[[Tensor], Tensor] | None = None) -> Any:
        """See `StepContext.finish`; on an earlier stage what the next one gets."""
        if not self.is_last:
            residual = torch.zeros_like(h.x) if h.residual is None else h.residual
            return IntermediateTensors({HIDDEN: h.x, RESIDUAL: residual})
        hidden, _ = prenorm(norm, h)
        return hidden if then is None else then(hidden)

    def prenorm(self, norm: nn.Module, h: Stream) -> tuple[Tensor, Tensor]:
        """See `StepContext.prenorm`. The stream that was given is used up."""
        return prenorm(norm, h)

    def _keep(self, i: int, h: Stream) -> None:
        if i in self.aux_layers:
            self.aux.append(h.x if h.residual is None else h.x + h.residual)
