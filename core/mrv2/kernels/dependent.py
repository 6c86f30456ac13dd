"""Programmatic dependent launch: a kernel begins while the one before still runs, up to what it needs of that one.

A decode step is a chain of kernels of a few microseconds each, a good part of which is starting up and running dry.
The rule that keeps this safe: a kernel launched so calls `await_previous` in every program before it touches a buffer
of the step, reading or writing; only weights may be asked for before. The kernel before is then complete, and since it
did the same, so is everything before it. Results are those of launches one after the other, bit for bit.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN201

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, tl

DEPENDENT_TOKENS = 4
"""Up to how many tokens that is done, on GPUs of compute capability 9 and up. It gains 8 to 12 % of a step of one
token. With cuBLAS's kernels between it gains nothing, and those for the matrix units take room on a processor that the
kernel before them would have used: 11 to 22 % lost at 8 to 64 tokens. `benchmarks/tune_decode.py` measures both."""


def depends(x: Tensor) -> bool:
    """Whether kernels over the tokens `x` [num_tokens, ...] are launched so."""
    return x.shape[0] <= DEPENDENT_TOKENS and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def dependent_options(dependent: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's own flag, and the launcher's, which not all of Triton's know."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}


@jit()
def await_previous(DEPENDENT: tl.constexpr):
    """Let the kernel behind begin, and wait for the one before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
