"""The native mixture of experts: a router, and experts whose weights lie packed in two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mrv2.errors import LayerArgumentError
from mrv2.kernels.down_experts import down_experts
from mrv2.kernels.expert_tile import choose_block_rows
from mrv2.kernels.gate_up_experts import gate_up_experts
from mrv2.kernels.group_by_expert import group_by_expert, max_blocks
from mrv2.kernels.route_experts import route_experts
from mrv2.kernels.sum_experts import sum_experts
from mrv2.layers.base import Slot, Stream
from mrv2.layers.linear import LinearBase, make_parameter, own_slots
from mrv2.layers.small import RMSNorm

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext


class Router(LinearBase):
    """See `LayerSet.router`."""

    def __init__(self, hidden_size: int, *, num_experts: int, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.weight = make_parameter(num_experts, hidden_size)
        self.bias = None
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, x: Tensor, ctx: NativeContext) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, [num_tokens, top_k], of x [num_tokens, hidden]."""
        logits = self.project(x)
        weights = x.new_empty(x.shape[0], self.top_k)
        experts = torch.empty(weights.shape, dtype=torch.int32, device=x.device)
        route_experts(
            logits=logits, num_real=ctx.num_real, renormalize=self.renormalize, weights=weights, experts=experts
        )
        return weights, experts

    def weight_slots(self) -> dict[str, Slot]:
        """`weight`."""
        return own_slots(self)


class Experts(nn.Module):
    """See `LayerSet.experts`.

    On the CPU the kernels' twins loop over the experts that have tokens. On a GPU nothing depends on how tokens
    are shared out: launches and buffers have the sizes that the number of tokens allows at most.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, act: str) -> None:
        super().__init__()
        self.top_k = top_k
        self.w13 = make_parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.w2 = make_parameter(num_experts, hidden_size, intermediate_size)
        self.act = act  # a key of ACTIVATIONS

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """[num_tokens, hidden] from x of that shape and the router's weights and experts, [num_tokens, top_k]."""
        w13, w2 = self.w13, self.w2
        num_tokens, top_k = experts.shape
        if top_k != self.top_k:
            raise LayerArgumentError(
                f"experts were given {top_k} per token, and built for {self.top_k}",
                where="arguments of the layer",
                fix="pass the router's top_k to L.experts",
            )
        num_experts, hidden, intermediate = w2.shape
        block_rows = choose_block_rows(num_tokens, top_k, num_experts, x.dtype)
        rows = num_tokens * top_k
        order = experts.new_empty(rows)
        offsets = experts.new_empty(num_experts + 1)
        blocks = experts.new_empty(max_blocks(rows, num_experts, block_rows), 2)
        group_by_expert(experts=experts, block_rows=block_rows, order=order, offsets=offsets, blocks=blocks)
        gated = x.new_empty(rows, intermediate)
        gate_up_experts(
            x=x,
            w13=w13,
            order=order,
            offsets=offsets,
            blocks=blocks,
            block_rows=block_rows,
            top_k=top_k,
            act=self.act,
            out=gated,
        )
        parts = x.new_empty(rows, hidden)
        down_experts(
            x=gated,
            w2=w2,
            weights=weights,
            order=order,
            offsets=offsets,
            blocks=blocks,
            block_rows=block_rows,
            out=parts,
        )
        out = torch.empty_like(x)
        sum_experts(parts=parts, experts=experts, out=out)
        return out

    def weight_slots(self) -> dict[str, Slot]:
        """`<i>.gate_proj.weight`, `<i>.up_proj.weight`, `<i>.down_proj.weight` of each expert i."""
        slots: dict[str, Slot] = {}
        size = self.w2.shape[2]
        for expert in range(self.w2.shape[0]):
            slots[f"{expert}.gate_proj.weight"] = self._slot("w13", expert, 0, size)
            slots[f"{expert}.up_proj.weight"] = self._slot("w13", expert, size, size)
            slots[f"{expert}.down_proj.weight"] = self._slot("w2", expert, 0, self.w2.shape[1])
        return slots

    def _slot(self, name: str, expert: int, start: int, rows: int) -> Slot:
        """Rows [start, start + rows) of one expert's matrix. The parameter is looked up when loading, since
        materialising a model replaces it.
        """

        def load(tensor: Tensor) -> None:
            with torch.no_grad():
                self.get_parameter(name)[expert, start : start + rows].copy_(tensor)

        return Slot(name, (rows, self.get_parameter(name).shape[2]), load)


class MoE(nn.Module):
    """See `LayerSet.moe`."""

    def __init__(self, *, norm: RMSNorm, gate: Router, experts: Experts) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate
        self.experts = experts

    def forward(self, h: Stream, ctx: NativeContext) -> Stream:
        """The stream with this layer's output pending."""
        x, residual = self.norm.add(h)
        weights, experts = self.gate(x, ctx)
        return Stream(self.experts(x, weights, experts), residual)
