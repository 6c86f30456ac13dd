"""Experts: vLLM's fused mixture, and its weights under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import GateLinear

from mrv2.errors import LayerArgumentError, UnsupportedError
from mrv2.layers.base import Slot
from mrv2.layers.vllm.slots import set_slots

try:
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory as make_experts
except ImportError:  # 0.26
    from vllm.model_executor.layers.fused_moe import FusedMoE as make_experts


class Router(GateLinear):
    """See `LayerSet.router`."""

    def choose(self, top_k: int, *, renormalize: bool) -> None:
        """How many, and whether their weights sum to one."""
        self.top_k, self.renormalize = top_k, renormalize

    def forward(self, x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Weights and experts of each token, [num_tokens, top_k]; vLLM's padding is routed like a token."""
        logits, _ = super().forward(x)
        # A stable sort: of equals the lower expert comes first, which `topk` doesn't promise.
        scores, experts = torch.sort(logits.float().softmax(-1), dim=-1, descending=True, stable=True)
        weights = scores[:, : self.top_k]
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts[:, : self.top_k].int()


def gate_linear(config: VllmConfig, name: str, hidden_size: int, num_experts: int) -> GateLinear:
    """The router's projection; whole on every rank."""
    return _gate(GateLinear, config, name, hidden_size, num_experts)


def router(config: VllmConfig, name: str, hidden_size: int, num_experts: int) -> Router:
    """The projection, and the choice."""
    return _gate(Router, config, name, hidden_size, num_experts)


def _gate(kind: Any, config: VllmConfig, name: str, hidden_size: int, num_experts: int) -> Any:
    try:
        return kind(hidden_size, num_experts, quant_config=config.quant_config, prefix=name)
    except TypeError:  # 0.26 never quantises it
        return kind(hidden_size, num_experts, prefix=name)


def fused_experts(
    config: VllmConfig,
    name: str,
    gate: GateLinear | None,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    act: str,
    route: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> nn.Module:
    """All experts and their choice, by `gate` or by `route`; sums over ranks itself.

    Raises:
        UnsupportedError: sequence-parallel experts are asked for.
    """
    parallel = config.parallel_config
    if parallel.use_sequence_parallel_moe:
        raise UnsupportedError(
            "sequence-parallel experts, which these layers don't do", where="parallel_config", fix="turn it off"
        )
    experts: nn.Module = make_experts(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        renormalize=renormalize,
        activation=act,
        gate=gate,
        custom_routing_function=route,
        quant_config=config.quant_config,
        prefix=name,
        enable_eplb=parallel.enable_eplb,
        num_redundant_experts=parallel.eplb_config.num_redundant_experts,
    )
    wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
    return set_slots(experts, lambda: _slots(experts, shapes))


class GivenExperts(nn.Module):
    """See `LayerSet.experts`: vLLM's mixture, which is handed the choice in place of a router's logits."""

    def __init__(self, config: VllmConfig, name: str, *, top_k: int, **sizes: Any) -> None:
        super().__init__()
        self.experts = fused_experts(
            config, f"{name}.experts", None, top_k=top_k, renormalize=False, route=_given, **sizes
        )
        self.name = name
        self.top_k = top_k
        own: Any = self.experts.weight_slots  # listed by this module: a checkpoint has no level between
        del self.experts.weight_slots
        set_slots(self, lambda: {place: replace(slot, param=f"experts.{slot.param}") for place, slot in own().items()})

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """[num_tokens, hidden] from x of that shape and weights and experts, [num_tokens, top_k]."""
        if experts.shape[1] != self.top_k:
            raise LayerArgumentError(
                f"{self.name} was given {experts.shape[1]} experts per token, and built for {self.top_k}",
                where="arguments of the layer",
                fix="pass the router's top_k to L.experts",
            )
        left_out = experts < 0
        weights = weights.float().masked_fill(left_out, 0)
        choice = torch.cat((weights, experts.masked_fill(left_out, 0).float()), -1)
        out: Tensor = self.experts(hidden_states=x, router_logits=choice)
        return out


def _given(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The choice as `GivenExperts` has packed it: weights, then experts, which float32 holds exactly."""
    return gating_output[:, :topk], gating_output[:, topk:].int()


def _slots(experts: Any, shapes: dict[str, tuple[int, int]]) -> dict[str, Slot]:
    """`<i>.gate_proj.weight` and so on; one tensor may go to several places (redundant experts)."""
    routed = getattr(experts, "routed_experts", experts)
    owner = "routed_experts." if routed is not experts else ""
    plain = type(routed.quant_method).__name__.startswith("Unquantized")
    places: dict[str, list[tuple[str, int, str]]] = {}
    # Each entry: ("experts.w13_", "experts.3.gate_proj.", 3, "w1"): parameters by their start, names by theirs.
    for stem, name, expert, shard in routed.get_expert_mapping():
        start = stem.removeprefix("experts.").removeprefix("routed_experts.")
        for own, _ in routed.named_parameters(recurse=False):
            if own.startswith(start):
                place = name.removeprefix("experts.") + own.removeprefix(start)
                places.setdefault(place, []).append((own, expert, shard))
    found: dict[str, Slot] = {}
    for place, targets in places.items():
        shape = shapes[place.split(".")[1]] if plain and place.endswith(".weight") else None
        found[place] = Slot(owner + targets[0][0], shape, _loader(routed, targets))
    return found


def _loader(routed: Any, targets: list[tuple[str, int, str]]) -> Any:
    def load(tensor: Tensor) -> None:
        for own, expert, shard in targets:
            parameter = routed.get_parameter(own)
            # False comes back for an expert of another rank, which is as it should be.
            parameter.weight_loader(parameter, tensor, own, shard_id=shard, expert_id=expert, return_success=True)

    return load
