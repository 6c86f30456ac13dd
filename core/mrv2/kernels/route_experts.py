"""The router's choice: of each token the `top_k` most likely experts, and the weights of what they will say."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_LOWEST = float(torch.finfo(torch.float32).min)
"""What NaN and -inf count as when experts are ranked, so that a choice is in range whatever the logits hold."""


def route_experts_ref(
    *, logits: Tensor, num_real: Tensor | None, renormalize: bool, weights: Tensor, experts: Tensor
) -> None:
    """Torch twin of `route_experts`."""
    logits = logits.float()
    # A stable sort and not `topk`, which promises no order among equals.
    ranked = logits.nan_to_num(nan=_LOWEST, posinf=float("inf"), neginf=_LOWEST)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : weights.shape[1]]
    picked = logits.softmax(-1).gather(1, chosen)
    if renormalize:
        picked = picked / picked.sum(-1, keepdim=True)
    if num_real is not None:
        padding = torch.arange(len(logits), device=logits.device)[:, None] >= num_real
        chosen, picked = chosen.masked_fill(padding, -1), picked.masked_fill(padding, 0.0)
    weights.copy_(picked)
    experts.copy_(chosen)


@kernel(twin=route_experts_ref)
def route_experts(
    *, logits: Tensor, num_real: Tensor | None, renormalize: bool, weights: Tensor, experts: Tensor
) -> None:
    """Softmax over all experts in float32, the largest `top_k`, then, if asked for, a sum of one.

    Equal logits: the lower expert first.

    Args:
        logits: [num_tokens, num_experts], rows contiguous.
        num_real: [1] int32, how many tokens aren't padding; padding, all behind them, gets expert -1 and weight 0.
            None: all are real.
        renormalize: divide the chosen weights by their sum.
        weights: out, [num_tokens, top_k], contiguous, the largest first.
        experts: out, [num_tokens, top_k] int32, contiguous; distinct within a token.
    """
    num_tokens, num_experts = logits.shape
    top_k = experts.shape[1]
    assert logits.stride(1) == 1
    assert weights.is_contiguous() and experts.is_contiguous()  # noqa: PT018
    assert top_k <= num_experts
    if num_tokens == 0:
        return
    _route_experts_kernel[(num_tokens,)](
        logits,
        logits.stride(0),
        experts if num_real is None else num_real,
        weights,
        experts,
        LOWEST=_LOWEST,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        HAS_PADDING=num_real is not None,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )


@jit(do_not_specialize=["num_real"])  # the end of a buffer, aligned anyhow
def _route_experts_kernel(
    logits,
    logits_stride,
    num_real,
    weights,
    experts,
    LOWEST: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)
    inside = lane < NUM_EXPERTS
    raw = tl.load(logits + token * logits_stride + lane, mask=inside, other=float("-inf")).to(tl.float32)
    left = tl.where(raw >= LOWEST, raw, LOWEST)  # a comparison with NaN is false
    left = tl.where(inside, left, float("-inf"))
    top = tl.max(left, 0)
    total = tl.sum(tl.exp(raw - top), 0)  # of the raw values: NaN stays NaN
    k = tl.arange(0, BLOCK_K)
    values = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.full([BLOCK_K], -1, tl.int32)
    for j in range(TOP_K):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, lane, BLOCK_E), 0)
        left = tl.where(lane == expert, float("-inf"), left)
        values = tl.where(k == j, best, values)
        chosen = tl.where(k == j, expert, chosen)
    picked = tl.exp(values - top) / total
    if RENORMALIZE:
        picked = picked / tl.sum(picked, 0)
    if HAS_PADDING:
        real = token < tl.load(num_real)
        picked = tl.where(real, picked, 0.0)
        chosen = tl.where(real, chosen, -1)
    tl.store(weights + token * TOP_K + k, picked.to(weights.dtype.element_ty), mask=k < TOP_K)
    tl.store(experts + token * TOP_K + k, chosen, mask=k < TOP_K)
