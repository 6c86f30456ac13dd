"""Where each request's tokens start in the flat token axis."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl

_BLOCK = 1024


def compute_query_start_loc_ref(*, query_lens: Tensor, query_start_loc: Tensor) -> None:
    """Torch twin of `compute_query_start_loc`."""
    query_start_loc[:1] = 0
    torch.cumsum(query_lens, 0, dtype=torch.int32, out=query_start_loc[1:])


@kernel(twin=compute_query_start_loc_ref)
def compute_query_start_loc(*, query_lens: Tensor, query_start_loc: Tensor) -> None:
    """Exclusive running sum of the query lengths.

    Args:
        query_lens: [num_reqs] int32; 0 for padding.
        query_start_loc: out, [num_reqs + 1] int32; the last entry is the number of real tokens.
    """
    _compute_query_start_loc_kernel[(1,)](query_lens, query_start_loc, query_lens.shape[0], BLOCK=_BLOCK)


@jit(do_not_specialize=["num_reqs"])
def _compute_query_start_loc_kernel(query_lens, query_start_loc, num_reqs, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(query_start_loc + lane, 0, mask=lane == 0)
    total = 0
    for start in range(0, num_reqs, BLOCK):
        i = start + lane
        lens = tl.load(query_lens + i, mask=i < num_reqs, other=0)
        tl.store(query_start_loc + 1 + i, total + tl.cumsum(lens, 0), mask=i < num_reqs)
        total += tl.sum(lens, 0)
