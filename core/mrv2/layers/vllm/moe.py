"""Experts: vLLM's fused mixture, and its weights under the checkpoint's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import GateLinear

from mrv2.errors import UnsupportedError
from mrv2.layers.base import Slot
from mrv2.layers.vllm.slots import set_slots

try:
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory as make_experts
except ImportError:  # 0.26
    from vllm.model_executor.layers.fused_moe import FusedMoE as make_experts


def gate_linear(config: VllmConfig, name: str, hidden_size: int, num_experts: int) -> GateLinear:
    """The router's projection; whole on every rank."""
    try:
        return GateLinear(hidden_size, num_experts, quant_config=config.quant_config, prefix=name)
    except TypeError:  # 0.26 never quantises it
        return GateLinear(hidden_size, num_experts, prefix=name)


def fused_experts(
    config: VllmConfig,
    name: str,
    gate: GateLinear,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    act: str,
) -> nn.Module:
    """All experts and their choice; sums over ranks itself.

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
        quant_config=config.quant_config,
        prefix=name,
        enable_eplb=parallel.enable_eplb,
        num_redundant_experts=parallel.eplb_config.num_redundant_experts,
    )
    wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
    return set_slots(experts, lambda: _slots(experts, shapes))


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
