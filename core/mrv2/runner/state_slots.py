"""State slots: one block per request in each group of states, and checkpoints of them in the prefix cache.

A slot is overwritten by every step, so a prefix can only be shared from a copy: the state after exactly n full
blocks, kept under the n-th block's hash. A row whose next step starts at a block edge is copied before that
step; a row that starts from a hit gets the checkpoint copied into its own slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrv2.attn.groups import KVGroup
from mrv2.runner.block_pool import BlockPool
from mrv2.state.plan import BlockCopies, BlockWrites


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A copy that no hash leads to yet: the host hasn't confirmed that the row got that far."""

    num_blocks: int  # full blocks of tokens that went into the state
    blocks: tuple[int, ...]  # per group of states


class StateSlots:
    """The host's side of all groups of states.

    Args:
        pool: blocks for slots and checkpoints.
        groups: the groups of states only.
        max_rows: rows of the request table.
    """

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], *, max_rows: int) -> None:
        self._pool = pool
        self._indices = tuple(group.index for group in groups)
        self.slots_np = np.zeros((len(groups), max_rows), np.int32)  # 0: the row has none
        self._opened: list[int] = []  # rows, since the last `take_writes`
        self._pending: dict[int, list[_Checkpoint]] = {}  # by row, in order
        self._copies: list[tuple[int, int]] = []  # (source, target), since the last `take_copies`
        self._held: list[int] = []  # sources that must not be handed out before their copy is planned

    def __len__(self) -> int:
        return len(self._indices)

    # -- rows --------------------------------------------------------------------------------------------

    def open(self, row: int, checkpoints: Sequence[int]) -> None:
        """Give `row` its slots, starting from a hit's checkpoints, one per group, or from nothing."""
        # Held first: a checkpoint that nobody uses is free, and might else be handed out as another's target.
        self._pool.share(checkpoints)
        self._held += checkpoints
        slots = self._pool.allocate(len(self))
        self.slots_np[:, row] = slots
        self._opened.append(row)
        self._copies += zip(checkpoints, slots, strict=bool(checkpoints))

    def release(self, row: int) -> None:
        """Give back the slots of `row`, and its checkpoints that were never confirmed."""
        for checkpoint in self._pending.pop(row, ()):
            self._pool.release(checkpoint.blocks)
        self._pool.release(int(slot) for slot in self.slots_np[:, row] if slot)
        self.slots_np[:, row] = 0

    def take_writes(self) -> tuple[BlockWrites, ...]:
        """The slots of rows opened since the last call, one entry per group."""
        rows_np = np.array(self._opened, np.int32)
        self._opened.clear()
        ends_np = np.arange(len(rows_np) + 1, dtype=np.int32)
        starts_np = np.zeros(len(rows_np), np.int32)
        return tuple(
            BlockWrites(rows=rows_np, starts=starts_np, cu_lens=ends_np, block_ids=slots_np[rows_np])
            for slots_np in self.slots_np
        )

    def take_copies(self) -> BlockCopies:
        """The copies that the step now planned starts with."""
        copies_np: NDArray[np.int32] = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies.clear()
        self._pool.release(self._held)
        self._held.clear()
        return BlockCopies(sources=copies_np[:, 0], targets=copies_np[:, 1])

    # -- checkpoints -------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[int, ...] | None:
        """The checkpoint under a block's hash, one block per group; None if any group lacks it."""
        found = tuple(self._pool.find((g, digest)) for g in self._indices)
        return None if None in found else found  # type: ignore[return-value]

    def keep(self, row: int, num_blocks: int, hashes: Sequence[bytes], confirmed_blocks: int) -> None:
        """Copy the state of `row` before its next step, which starts after `num_blocks` full blocks.

        Only into blocks that are free: keeping a state never costs a running request its place. A row holds on
        to its last confirmed checkpoint and to those in flight.
        """
        known = num_blocks <= len(hashes) and self.find(hashes[num_blocks - 1]) is not None
        if known or self._pool.num_free < len(self):
            return
        self.commit(row, hashes, min(confirmed_blocks, len(hashes)))
        pending = self._pending.setdefault(row, [])
        while len(pending) > 1 and pending[1].num_blocks <= confirmed_blocks:
            self._pool.release(pending.pop(0).blocks)
        blocks = self._pool.allocate(len(self))
        self._copies += zip(self.slots_np[:, row].tolist(), blocks, strict=True)
        pending.append(_Checkpoint(num_blocks, tuple(blocks)))

    def commit(self, row: int, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Index the checkpoints of `row` up to `num_blocks` full blocks, whose tokens have been confirmed."""
        pending = self._pending.get(row, [])
        while pending and pending[0].num_blocks <= num_blocks:
            checkpoint = pending.pop(0)
            self._index(checkpoint.blocks, hashes[checkpoint.num_blocks - 1])
            self._pool.release(checkpoint.blocks)

    def commit_slot(self, row: int, digest: bytes) -> None:
        """Index the slot of `row` itself: its last step ended at a block edge, and no other will follow."""
        self._index(self.slots_np[:, row].tolist(), digest)

    def _index(self, blocks: Sequence[int], digest: bytes) -> None:
        for g, block in zip(self._indices, blocks, strict=True):
            self._pool.cache(block, (g, digest))

    def drop_pending(self) -> bool:
        """Give back all unconfirmed checkpoints; whether there were any.

        Steps run in the order of their plans: a copy planned earlier is done before a new owner writes.
        """
        dropped = [checkpoint for pending in self._pending.values() for checkpoint in pending]
        self._pending.clear()
        for checkpoint in dropped:
            self._pool.release(checkpoint.blocks)
        return bool(dropped)
