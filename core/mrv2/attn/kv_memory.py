"""The KV cache's tensors: one pool of blocks that all groups draw from, and how large it may be."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrv2.attn.groups import AttentionCache, BoundCache, KVGroup, LayerSpec
from mrv2.attn.specs import ALIGNMENT
from mrv2.errors import CacheTooSmallError


def page_sizes(groups: Sequence[KVGroup], layers: Mapping[str, LayerSpec], dtype: torch.dtype) -> list[int]:
    """Bytes of one block in each of the pool's tensors: tensor k holds the k-th layer of every group."""
    columns: list[list[tuple[LayerSpec, int]]] = [[] for _ in range(max((len(g.layers) for g in groups), default=0))]
    for group in groups:
        for column, name in zip(columns, group.layers, strict=False):
            column.append((layers[name], layers[name].bytes_per_block(group.block_size, dtype)))
    return [_page_size(column) for column in columns]


def _page_size(members: Sequence[tuple[LayerSpec, int]]) -> int:
    """The largest member's bytes. With adapters' own caches, rounded up so that each can be viewed in its dtype,
    and that attention's rows stay at whole multiples of a token.
    """
    size = max(used for _, used in members)
    attention = [used for spec, used in members if isinstance(spec, AttentionCache)]
    if len(attention) == len(members):
        return size
    unit = math.lcm(ALIGNMENT, max(attention, default=1))
    return -(-size // unit) * unit


def free_memory(device: torch.device) -> int:
    """Free bytes on the device now; on the CPU, memory the system could hand out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_num_blocks(
    block_bytes: int, *, wanted_blocks: int, kv_memory: int | None, device: torch.device, step_memory: int = 0
) -> int:
    """Blocks to allocate, the scratch block included.

    Args:
        block_bytes: bytes of one block over all tensors.
        wanted_blocks: more than this could never be used.
        kv_memory: bytes the caller grants; None: a share of what is free now.
        device: where the cache will live.
        step_memory: bytes of that share that steps need themselves.

    Raises:
        CacheTooSmallError: there is room for the scratch block only.
    """
    share = 0.9 if device.type == "cuda" else 0.4
    budget = max(0, int(free_memory(device) * share) - step_memory) if kv_memory is None else kv_memory
    blocks = min(budget // block_bytes, wanted_blocks)
    if blocks < 2:
        raise CacheTooSmallError(
            f"{budget} bytes hold {blocks} blocks of {block_bytes} bytes; at least 2 are needed (one is scratch)",
            where=f"free memory on {device}" if kv_memory is None else "kv_memory",
            fix=f"give at least {2 * block_bytes} bytes with kv_memory / --kv-memory"
            + (", or lower max_num_tokens or max_num_seqs" if step_memory else ""),
        )
    return blocks


def allocate_pages(sizes: Sequence[int], *, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """The pool's tensors, [num_blocks, size] uint8 for each of `sizes`, zeros at first."""
    return tuple(torch.zeros(num_blocks, size, dtype=torch.uint8, device=device) for size in sizes)


def bind_caches(
    groups: Sequence[KVGroup], layers: Mapping[str, LayerSpec], pages: Sequence[Tensor], dtype: torch.dtype
) -> dict[str, BoundCache]:
    """Each layer's cache as views of `pages`; see the specs' `views` for shapes.

    Layers of different groups that share a tensor are views of the same bytes; their groups never own the
    same block. A layer with smaller pages than its tensor gets a strided view.
    """
    return {
        name: layers[name].views(pages[k], group.block_size, dtype)
        for group in groups
        for k, name in enumerate(group.layers)
    }
