"""The KV cache's tensors: one pool of blocks that all groups draw from, and how large it may be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrv2.attn.groups import AttentionCache, KVGroup
from mrv2.errors import CacheTooSmallError


def page_sizes(groups: Sequence[KVGroup], layers: Mapping[str, AttentionCache], dtype: torch.dtype) -> list[int]:
    """Bytes of one block in each of the pool's tensors: tensor k holds the k-th layer of every group."""
    sizes = [0] * max((len(group.layers) for group in groups), default=0)
    for group in groups:
        for k, name in enumerate(group.layers):
            sizes[k] = max(sizes[k], layers[name].bytes_per_token(dtype) * group.block_size)
    return sizes


def free_memory(device: torch.device) -> int:
    """Free bytes on the device now; on the CPU, memory the system could hand out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_num_blocks(block_bytes: int, *, wanted_blocks: int, kv_memory: int | None, device: torch.device) -> int:
    """Blocks to allocate, the scratch block included.

    Args:
        block_bytes: bytes of one block over all tensors.
        wanted_blocks: more than this could never be used.
        kv_memory: bytes the caller grants; None: a share of what is free now.
        device: where the cache will live.

    Raises:
        CacheTooSmallError: there is room for the scratch block only.
    """
    share = 0.9 if device.type == "cuda" else 0.4
    budget = int(free_memory(device) * share) if kv_memory is None else kv_memory
    blocks = min(budget // block_bytes, wanted_blocks)
    if blocks < 2:
        raise CacheTooSmallError(
            f"{budget} bytes hold {blocks} blocks of {block_bytes} bytes; at least 2 are needed (one is scratch)",
            where="kv_memory" if kv_memory is not None else f"free memory on {device}",
            fix=f"give at least {2 * block_bytes} bytes with kv_memory / --kv-memory",
        )
    return blocks


def allocate_caches(
    groups: Sequence[KVGroup],
    layers: Mapping[str, AttentionCache],
    *,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Cache tensor of each layer, [num_blocks, 2, block_size, num_kv_heads, head_dim].

    Layers of different groups that share a tensor are views of the same bytes; their groups never own the
    same block. A layer with smaller pages than its tensor gets a strided view.
    """
    pool = [
        torch.zeros(num_blocks, size, dtype=torch.uint8, device=device) for size in page_sizes(groups, layers, dtype)
    ]
    caches: dict[str, Tensor] = {}
    for group in groups:
        for k, name in enumerate(group.layers):
            cache = layers[name]
            used = cache.bytes_per_token(dtype) * group.block_size
            pages = pool[k][:, :used].view(dtype)
            shape = (num_blocks, 2, group.block_size, cache.num_kv_heads, cache.head_dim)
            caches[name] = pages.view(shape)
    return caches
