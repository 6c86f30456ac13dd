"""Copies of whole blocks, staged by the plan and done before the step touches the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mrv2.kernels.copy_blocks import copy_blocks
from mrv2.state.plan import BlockCopies
from mrv2.state.staging import StagingRing


class BlockCopier:
    """Copies blocks in every tensor of the pool.

    Args:
        pages: the pool's tensors, [num_blocks, page_bytes] uint8 each.
        device: where they are.
    """

    def __init__(self, pages: Sequence[Tensor], device: torch.device) -> None:
        # In the widest elements that fit: a byte each would waste bandwidth.
        self._pages = [page.view(widest_integer(page.shape[1])) for page in pages]
        self._ring = StagingRing(1024, device)
        self._received = torch.zeros(1024, dtype=torch.uint8, device=device)

    def run(self, copies: BlockCopies) -> None:
        """Start the copies in the current stream; nothing if there are none."""
        n = len(copies.sources)
        if not n:
            return
        nbytes = 2 * 4 * n
        staged_np = self._ring.take(nbytes)[:nbytes].view(np.int32).reshape(2, n)
        staged_np[0], staged_np[1] = copies.sources, copies.targets
        if self._received.shape[0] < nbytes:
            self._received = self._received.new_zeros(1 << (nbytes - 1).bit_length())
        received = self._received[:nbytes]
        self._ring.send(received)
        sources, targets = received.view(torch.int32).view(2, n)
        for pages in self._pages:
            copy_blocks(pages=pages, sources=sources, targets=targets)


def widest_integer(num_bytes: int) -> torch.dtype:
    """The integers in which `num_bytes` are fewest."""
    return next(d for d in (torch.int64, torch.int32, torch.int16, torch.int8) if num_bytes % d.itemsize == 0)
