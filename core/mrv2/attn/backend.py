"""What runs paged attention, chosen once by device."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mrv2.state.view import CacheMeta

StepMemo = MutableMapping[Hashable, Any]
"""What a backend derives once per step and shares between layers. Empty at the start of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArgs:
    """The constants of one attention layer."""

    num_heads: int
    num_kv_heads: int  # divides num_heads; query head h reads key/value head h // (num_heads // num_kv_heads)
    head_dim: int
    window: int | None  # tokens in reach, the current one included; None: all
    scale: float
    soft_cap: float | None  # scores become soft_cap * tanh(scores / soft_cap) before the mask


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the paged cache, then attends causally over it."""

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
        memo: StepMemo,
    ) -> Tensor:
        """Attention of all tokens of the step.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k: [num_tokens, num_kv_heads, head_dim]; None, and then `v` is too: the caller has written both.
            v: as `k`.
            cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys then values; the last three axes
                are contiguous, the first two may have any strides. Written in place at `meta.slot_mapping`;
                negative slots go to slot 0.
            meta: of this layer's KV group.
            args: the layer's constants.
            memo: shared by the layers of one step.

        Returns:
            [num_tokens, num_heads, head_dim]. Padding tokens, and requests of length 0, get zeros. A row sees
            nothing but the slots its own block table and length name, whatever the rest of the cache holds;
            of an inactive row only that it harms no other row is promised.
        """
        ...


def select_backend(device: torch.device) -> AttentionBackend:
    """The backend for `device`. It may keep scratch memory: use one per runner."""
    if device.type == "cpu":
        from mrv2.attn.cpu import CpuAttention

        return CpuAttention()
    if device.type == "cuda":
        from mrv2.attn.triton import TritonAttention

        return TritonAttention()
    from mrv2.attn.reference import ReferenceAttention

    return ReferenceAttention()
