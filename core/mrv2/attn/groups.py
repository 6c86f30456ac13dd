"""KV cache groups, derived from what the model's layers declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """What one attention layer declares: keys and values of every token in reach."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens in reach, the current one included; None: all

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Size of one token's keys and values in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table. Layer k of every group lives in the pool's k-th tensor."""

    name: str
    index: int  # position in `StepView.block_tables`
    layers: tuple[str, ...]
    window: int | None
    block_size: int


def make_groups(layers: Mapping[str, AttentionCache], block_size: int) -> tuple[KVGroup, ...]:
    """Group layers by reach, in groups of equal size, so that one pool of blocks serves all.

    A kind with more layers than the smallest kind is split; the last group of a kind may be shorter.
    """
    kinds: dict[int | None, list[str]] = {}
    for name, cache in layers.items():
        kinds.setdefault(cache.window, []).append(name)
    if not kinds:
        return ()
    size = min(len(names) for names in kinds.values())
    groups: list[KVGroup] = []
    # Full attention first: the prefix cache searches it for the longest hit, then narrows.
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        names = kinds[window]
        for start in range(0, len(names), size):
            kind = "full" if window is None else f"window{window}"
            groups.append(
                KVGroup(
                    name=f"{kind}.{start // size}",
                    index=len(groups),
                    layers=tuple(names[start : start + size]),
                    window=window,
                    block_size=block_size,
                )
            )
    return tuple(groups)
