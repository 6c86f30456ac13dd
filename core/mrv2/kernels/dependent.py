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

NEVER, EARLY, LATE = 0, 1, 2
"""When a program lets the kernel behind it begin: that isn't launched dependently; at once; after its main loop."""

EARLY_TOKENS, DEPENDENT_TOKENS = 4, 32
"""Up to how many tokens launches are dependent on GPUs of compute capability 9 and up, and up to how many of these the
kernel behind begins at once: that gains 8 to 12 % of a step of one token. Programs for the matrix units that wait take
room on a processor which the kernel before them would have used, and cost 6 to 9 % at 8 to 32 tokens; beginning late
they gain 7 % at 8 and 1 % at 32. With cuBLAS's kernels between there is nothing to gain. `benchmarks/tune_decode.py`
measures all of it."""


def dependence(x: Tensor) -> int:
    """How kernels over the tokens `x` [num_tokens, ...] are launched."""
    if x.shape[0] > DEPENDENT_TOKENS or not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return NEVER
    return EARLY if x.shape[0] <= EARLY_TOKENS else LATE


def dependent_options(x: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch over the tokens `x`: the kernel's own, and the launcher's, which not all of
    Triton's know.
    """
    how = dependence(x)
    return {"DEPENDENT": how, "launch_pdl": True} if how else {"DEPENDENT": how}


@jit()
def await_previous(DEPENDENT: tl.constexpr):
    """Wait for the kernel before, and, if that is due at once, let the one behind begin."""
    if DEPENDENT == 1:  # EARLY
        tl.extra.cuda.gdc_launch_dependents()
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@jit()
def release_next(DEPENDENT: tl.constexpr):
    """Let the kernel behind begin, if that is due late. Without this it does so when all programs have ended."""
    if DEPENDENT == 2:  # LATE
        tl.extra.cuda.gdc_launch_dependents()
