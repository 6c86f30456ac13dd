"""A gated activation: `act(gate) * up`, with gate and up side by side as their packed projection leaves them."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_BLOCK = 1024


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By transformers' `hidden_act` names."""

FORMULAS: Mapping[str, int] = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
"""What `activate` knows each of them by."""


def gated_act_ref(*, gate_up: Tensor, act: str, out: Tensor) -> None:
    """Torch twin of `gated_act`."""
    gate, up = gate_up.chunk(2, -1)
    out.copy_(ACTIVATIONS[act](gate) * up)


@kernel(twin=gated_act_ref)
def gated_act(*, gate_up: Tensor, act: str, out: Tensor) -> None:
    """`act(gate) * up`, the activation computed in float32 and rounded before the product.

    Args:
        gate_up: [num_tokens, 2 * size], rows contiguous: gate, then up.
        act: a key of `ACTIVATIONS`.
        out: out, [num_tokens, size], rows contiguous, same dtype.
    """
    num_tokens, size = out.shape
    assert gate_up.shape == (num_tokens, 2 * size)
    assert gate_up.stride(1) == out.stride(1) == 1
    if num_tokens == 0:
        return
    # Tokens on the first axis of the grid: the second holds 65535 programs at most.
    _gated_act_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        gate_up, gate_up.stride(0), out, out.stride(0), size, FORMULA=FORMULAS[act], BLOCK=_BLOCK
    )


@jit()
def activate(x, FORMULA: tl.constexpr):
    """An activation of float32 values; FORMULA is one of `FORMULAS`."""
    if FORMULA == 0:
        value = x * tl.sigmoid(x)
    elif FORMULA == 1:
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FORMULA == 2:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which doesn't cancel for negative u.
        value = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        value = tl.where(x < 0, 0.0, x)  # keeps NaN, as PyTorch does
    return value


@jit()
def _gated_act_kernel(gate_up, gate_up_stride, out, out_stride, size, FORMULA: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    row = gate_up + token * gate_up_stride
    gate = tl.load(row + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + size + lane, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, FORMULA)
    dtype = out.dtype.element_ty
    value = value.to(dtype).to(tl.float32) * up
    tl.store(out + token * out_stride + lane, value.to(dtype), mask=inside)
