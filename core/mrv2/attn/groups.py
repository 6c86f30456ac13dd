"""KV cache groups, derived from what the model's layers declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mrv2.attn.specs import PerRequest, PerToken


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """What one attention layer declares: keys and values of every token in reach."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens in reach, the current one included; None: all

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Size of one token's keys and values in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of this layer."""
        return self.bytes_per_token(dtype) * block_size

    def views(self, pages: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        """The cache within `pages` [num_blocks, page_bytes] uint8: [num_blocks, 2, block_size, num_kv_heads,
        head_dim], strided if pages are larger than needed.
        """
        used = pages[:, : self.bytes_per_block(block_size, dtype)].view(dtype)
        return used.view(len(pages), 2, block_size, self.num_kv_heads, self.head_dim)


LayerSpec = AttentionCache | PerToken | PerRequest
"""What one layer declares."""

BoundCache = Tensor | Mapping[str, Tensor]
"""What one layer gets: an attention layer one tensor, an adapter's own cache its tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table. Layer k of every group lives in the pool's k-th tensor."""

    name: str
    index: int  # position in `StepView.block_tables`
    layers: tuple[str, ...]
    window: int | None
    block_size: int
    states: bool = False
    """Each request has one block, its state slot, instead of one per `block_size` tokens."""


def choose_block_size(layers: Mapping[str, LayerSpec], dtype: torch.dtype, *, step: int = 16) -> int:
    """Tokens per block, a multiple of `step`: `step` itself, or with states so many that a block of the largest layer
    with entries per token is no smaller than the largest state. They come from one pool, so smaller ones would
    leave most of each block unused.
    """
    states = [s.bytes_per_block(1, dtype) for s in layers.values() if isinstance(s, PerRequest)]
    tokens = [s.bytes_per_block(step, dtype) for s in layers.values() if not isinstance(s, PerRequest)]
    if not states or not tokens:
        return step
    return step * max(1, -(-max(states) // max(tokens)))


def make_groups(layers: Mapping[str, LayerSpec], block_size: int) -> tuple[KVGroup, ...]:
    """Group layers by kind and reach, in groups of equal size, so that one pool of blocks serves all.

    A kind with more layers than the smallest kind is split; the last group of a kind may be shorter. Groups of
    states come last.
    """
    kinds: dict[_Kind, list[str]] = {}
    for name, spec in layers.items():
        kinds.setdefault(_kind(spec), []).append(name)
    if not kinds:
        return ()
    size = min(len(names) for names in kinds.values())
    groups: list[KVGroup] = []
    for kind in sorted(kinds):
        names = kinds[kind]
        for start in range(0, len(names), size):
            groups.append(
                KVGroup(
                    name=f"{kind.label}.{start // size}",
                    index=len(groups),
                    layers=tuple(names[start : start + size]),
                    window=kind.window or None,
                    block_size=block_size,
                    states=kind.order == _STATES,
                )
            )
    return tuple(groups)


class _Kind(NamedTuple):
    """Layers of one kind may share a group. Sorts in the order of groups."""

    order: int
    window: int  # 0: none
    label: str


# What looks back at all tokens comes first: the prefix cache searches it for the longest hit, then narrows.
_FULL, _TOKENS, _WINDOW, _STATES = range(4)


def _kind(spec: LayerSpec) -> _Kind:
    if isinstance(spec, PerRequest):
        return _Kind(_STATES, 0, "states")
    if isinstance(spec, PerToken):
        return _Kind(_TOKENS, 0, "tokens")
    if spec.window is None:
        return _Kind(_FULL, 0, "full")
    return _Kind(_WINDOW, spec.window, f"window{spec.window}")
