"""What an adapter's own layer declares to be cached: tensors per token, or per request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Each tensor of a page starts at a multiple of it, so that a page can be viewed in any dtype."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a cache: its entry for one token, or for one request.

    Args:
        shape: of one entry, global: never per rank.
        dtype: None: the model's.
        shard: axis divided over tensor-parallel ranks; None: every rank has all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    shard: int | None = None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Size of one entry in a model of `dtype`."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(frozen=True, slots=True)
class PerToken:
    """A cache that grows by one entry per token. Kernels see [num_blocks, block_size, *shape], strided."""

    tensors: Mapping[str, CacheTensor]  # by the name that the kernel knows them by

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: the tensors one after the other, each with all its tokens."""
        return sum(_aligned(t.num_bytes(dtype) * block_size) for t in self.tensors.values())

    def views(self, pages: Tensor, block_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors within `pages` [num_blocks, page_bytes] uint8."""
        return _views(pages, self.tensors, (block_size,), dtype)


@dataclass(frozen=True, slots=True)
class PerRequest:
    """A state of fixed size per request. Kernels see [num_slots, *shape], strided; a slot is one block."""

    tensors: Mapping[str, CacheTensor]  # by the name that the kernel knows them by

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one slot, whatever the block size."""
        return sum(_aligned(t.num_bytes(dtype)) for t in self.tensors.values())

    def views(self, pages: Tensor, block_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors within `pages` [num_blocks, page_bytes] uint8."""
        return _views(pages, self.tensors, (), dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _views(
    pages: Tensor, tensors: Mapping[str, CacheTensor], lead: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    start = 0
    for name, tensor in tensors.items():
        size = math.prod(lead) * tensor.num_bytes(dtype)
        part = pages[:, start : start + size].view(tensor.dtype or dtype)
        views[name] = part.view(len(pages), *lead, *tensor.shape)
        start += _aligned(size)
    return views
