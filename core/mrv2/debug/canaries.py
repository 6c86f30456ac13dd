"""Debug mode's watch over the KV cache: what is released is wiped, and what a step must not write keeps its bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mrv2.attn.groups import KVGroup
from mrv2.errors import CacheWriteError
from mrv2.runner.block_pool import BlockPool
from mrv2.state.block_copies import widest_integer
from mrv2.state.plan import StepPlan
from mrv2.state.view import StepView


class WatchedPool(BlockPool):
    """A pool that notes which blocks changed hands: nobody may read what they hold."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._changed: dict[int, None] = {}

    def allocate(self, count: int) -> list[int]:
        """See `BlockPool.allocate`."""
        blocks = super().allocate(count)
        self._changed |= dict.fromkeys(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """See `BlockPool.release`."""
        blocks = list(blocks)
        super().release(blocks)
        self._changed |= dict.fromkeys(b for b in blocks if not self._refs_np[b] and b not in self._key_of)

    def take_changed(self) -> list[int]:
        """Blocks handed out since the last call, or given back without becoming part of the prefix cache."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def owned(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[num_blocks]: blocks that rows refer to."""
        return np.asarray(self._refs_np > 0)


class Canaries:
    """Checksums of all blocks: after a step only those with entries of the step may differ. Reads the whole pool once
    a step, and nothing on the host.

    Wiped blocks hold all ones, which is NaN in every floating dtype. So does one more block at the pool's end that
    is never handed out: an index of -1 leads there, and so does what is left in the table of a row without owner.

    Args:
        pages: the pool's tensors, [num_blocks + 1, page_bytes] uint8 each. All are wiped.
        groups: KV groups.
        pool: of `num_blocks` blocks.
    """

    def __init__(self, pages: Sequence[Tensor], groups: Sequence[KVGroup], pool: WatchedPool) -> None:
        self._words = [page.view(widest_integer(page.shape[1])) for page in pages]
        self._groups = tuple(groups)
        self._pool = pool
        self.never_owned = pool.num_blocks
        for words in self._words:
            words.fill_(-1)
        self._sums = self._checksums()
        self._wiped = self._sums[:, :1].clone()  # [num_tensors, 1]: of a block of ones

    def _checksums(self) -> Tensor:
        """[num_tensors, num_blocks + 1] int64, overflowing as it may."""
        return torch.stack([words.sum(1, dtype=torch.int64) for words in self._words])

    def begin(self, plan: StepPlan) -> None:
        """Wipe what changed hands, and note what `plan` may write. Before the plan's copies."""
        changed = self._send(np.array(self._pool.take_changed(), np.int64))
        for words in self._words:
            words.index_fill_(0, changed, -1)
        self._sums[:, changed] = self._wiped
        sources, targets = (self._send(b.astype(np.int64)) for b in (plan.copies.sources, plan.copies.targets))
        self._sums[:, targets] = self._sums[:, sources]
        self._owned = self._send(np.append(self._pool.owned(), False))

    def check(self, view: StepView) -> Tensor:
        """Compare after a step: [2] int64, how many (tensor, block) pairs changed that had no reason to, and the flat
        index of the first. For `raise_if`, on the host.
        """
        written = torch.zeros_like(self._owned)
        for group, table, slots in zip(self._groups, view.block_tables, view.slot_mappings, strict=True):
            blocks = table.flatten() if group.states else slots.clamp(min=0) // group.block_size
            written.index_fill_(0, blocks.long(), True)
        allowed = written & self._owned
        allowed[:1] = True  # scratch
        sums = self._checksums()
        wrong = ((sums != self._sums) & ~allowed).flatten()
        self._sums = sums
        return torch.stack((wrong.sum(), wrong.int().argmax()))

    def raise_if(self, count: int, first: int, step_id: int) -> None:
        """Raise for what `check` found.

        Raises:
            CacheWriteError: it found something.
        """
        if not count:
            return
        k, block = divmod(first, self.never_owned + 1)
        layers = [f"{g.layers[k]} (group {g.name})" for g in self._groups if k < len(g.layers)]
        more = f", and {count - 1} more of blocks and layers" if count > 1 else ""
        raise CacheWriteError(
            f"step {step_id} changed block {block} of {' or '.join(layers)}, where it had nothing to write{more}",
            where=f"a kernel of {'this layer' if len(layers) == 1 else 'one of these layers'}",
            fix="write the slots of meta.slot_mapping or meta.state_slots only; padding's slot of -1 means scratch",
        )

    def _send(self, values: ArrayLike) -> Tensor:
        return send(values, self._sums.device)


def send(values: ArrayLike, device: torch.device) -> Tensor:
    """`values` on the device, without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
