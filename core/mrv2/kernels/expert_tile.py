"""What the two expert products share: how work is cut into tiles, and which tile a program has."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN201

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, tl

GROUP = 8
"""Row blocks that take turns at one tile of weights while it is in the L2 cache."""


def choose_block_rows(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a block, by how many tokens an expert has on average.

    Few: what counts is that each weight is read once, and by many programs. Many: that it is used often. In between
    wide blocks would be filled badly, since experts' shares differ.
    """
    rows = num_tokens * top_k / num_experts
    if dtype == torch.float32:  # no matrix units at this precision: small, to stay in registers
        return 16 if rows <= 8 else 32
    if rows <= 8:
        return 16
    if rows <= 24:
        return 32
    return 64 if rows <= 192 else 128


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: output columns, inputs per iteration, and what the compiler is told."""

    cols: int
    depth: int
    num_warps: int
    num_stages: int


def gate_up_tile(block_rows: int, dtype: torch.dtype) -> Tile:
    """For two products at a time, gate and up."""
    if dtype == torch.float32:
        return Tile(cols=32, depth=32, num_warps=4, num_stages=2)
    if block_rows == 16:  # narrow: with a handful of tokens there are few tiles for all processors
        return Tile(cols=32, depth=128, num_warps=4, num_stages=4)
    if block_rows <= 64:
        return Tile(cols=64, depth=64, num_warps=4, num_stages=4)
    return Tile(cols=128, depth=64, num_warps=8, num_stages=3)


def down_tile(block_rows: int, dtype: torch.dtype) -> Tile:
    """For one."""
    if dtype == torch.float32:
        return Tile(cols=32, depth=32, num_warps=4, num_stages=2)
    if block_rows == 16:
        return Tile(cols=64, depth=128, num_warps=4, num_stages=4)
    if block_rows <= 64:
        return Tile(cols=128, depth=64, num_warps=4, num_stages=4)
    return Tile(cols=256, depth=64, num_warps=8, num_stages=3)


def expert_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which; for twins, which may read the device."""
    for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if first < end:
            yield expert, slice(first, end)


@jit()
def locate_tile(NUM_TILES: tl.constexpr, GROUP: tl.constexpr):
    """This program's row block and column tile, of a grid of num_blocks * NUM_TILES."""
    program = tl.program_id(0)
    num_blocks = tl.num_programs(0) // NUM_TILES
    first = program // (GROUP * NUM_TILES) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    inner = program % (GROUP * NUM_TILES)
    return first + inner % size, inner // size
