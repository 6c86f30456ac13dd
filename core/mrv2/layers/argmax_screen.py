"""The most likely token of one request without reading the whole head in full precision.

Greedy decoding of a single request is bound by memory, and the head is a good part of a small model's bytes.
An 8-bit copy of its weight gives every logit up to a proven error; only tokens whose upper bound reaches the
best lower bound can win, and their logits are then computed exactly. The result is that of the full product.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

MAX_CANDIDATES = 512
"""Past this many the full product is the cheaper way."""

ROUNDING = 2.0**-16
"""Relative slack for sums in float32, of the screen and of the bound itself; generous up to 100,000 terms."""


@functools.cache
def int8_linear() -> tuple[Any, Any] | None:
    """PyTorch's (pack, linear) with 8-bit weights and activations, or None where it is missing or inexact."""
    try:
        pack: Any = torch.ops.quantized.linear_prepack.default
        linear: Any = torch.ops.quantized.linear_dynamic.default
        weight = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
        with torch.inference_mode(), torch.device("cpu"):
            rows = _digits(torch.linspace(-3, 5, 64), 5.0)
            got = linear(rows, pack(_as_quantized(weight, torch.ones(4)), None), False)
            # Digits are whole numbers from -128 to 127, for which the operator's own scale is exactly 1.
            return (pack, linear) if torch.equal(got, rows @ weight.float().t()) else None
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def _as_quantized(rows: Tensor, scales: Tensor) -> Tensor:
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to remove these tensors; `int8_linear` will then say None
        quantized: Tensor = torch._make_per_channel_quantized_tensor(rows, scales.double(), zeros, 0)
    return quantized


def _digits(x: Tensor, largest: float) -> Tensor:
    """X as two digits to base 256, [3, n]: `x ≈ (row 0 + row 1 / 256) * largest / 127`; row 2 spans the range."""
    scaled = x * (127 / largest)
    high = scaled.round()
    low = ((scaled - high) * 256).round().clamp_(-128, 127)
    span = torch.zeros_like(x)
    span[0], span[1] = -128, 127
    return torch.stack((high, low, span))


class ArgmaxScreen:
    """`argmax(weight @ x)` for one x.

    Args:
        weight: [rows, columns > 1] float32 on the CPU, kept by reference: later changes make the screen wrong.
    """

    def __init__(self, weight: Tensor) -> None:
        ops = int8_linear()
        assert ops is not None
        pack, self._linear = ops
        self._weight = weight
        with torch.inference_mode():
            scales = (weight.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
            self._packed = pack(_as_quantized((weight / scales[:, None]).round().to(torch.int8), scales), None)
            # |w - q * scale| is at most half a scale; the rounding of x costs at most |w|_1 times its own half step.
            self._error_per_l1 = scales * (0.5 + ROUNDING)  # [rows]; rows differ much in size
            self._error_per_step = float(weight.abs().sum(1).max()) + float(scales.max()) * weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor | None:
        """Index of the largest product, [1] int64, the lowest of equal ones.

        Args:
            x: [1, columns] float32.

        Returns:
            None when x isn't finite, or too many rows are in question: then use the full product.
        """
        x = x[0]
        largest, l1 = float(x.abs().max()), float(x.abs().sum())
        if not 0 < largest < float("inf"):
            return None
        high, low, _ = self._linear(_digits(x, largest), self._packed, False)
        step = largest / 127
        about = torch.add(high, low, alpha=1 / 256)  # in steps
        rest = self._error_per_step * (0.5 / 255 + 127 * ROUNDING)
        best = float(torch.sub(about, self._error_per_l1, alpha=l1 / step).amax()) - rest
        candidates = (torch.add(about, self._error_per_l1, alpha=l1 / step) >= best - rest).nonzero()[:, 0]
        if not 0 < len(candidates) <= MAX_CANDIDATES:
            return None
        exact = torch.mv(self._weight[candidates], x)
        return candidates[exact.argmax()][None]


def screen_bytes(weight: Tensor) -> int:
    """Memory that a screen of `weight` takes; 0 where it can't be had."""
    fits = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.shape[1] > 1
    usable = fits and int8_linear() is not None
    return weight.numel() if usable else 0
