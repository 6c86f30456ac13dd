"""Physical KV blocks: reference counts, a free list in eviction order, and the prefix cache's index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

BlockKey = tuple[int, bytes]
"""(KV group index, hash of the block's tokens and everything before them)."""


class BlockPool:
    """Hands out blocks 1 … num_blocks - 1; block 0 is scratch and never owned.

    A block is *used* (referenced by rows), or *free*. A free block may still be cached under its key until
    it is handed out again; the least recently freed goes first, and blocks without a key before those with.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._refs_np = np.zeros(num_blocks, np.int32)
        self._refs = self._refs_np.data  # the same; one number at a time is quicker by this
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the scratch one."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; a cached one loses its key. The caller has checked `num_free`."""
        assert count <= len(self._free)
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
        self._refs_np[blocks] = 1
        return blocks

    def find(self, key: BlockKey) -> int | None:
        """The block cached under `key`, used or free."""
        return self._block_of.get(key)

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: sharing them takes them off the free list."""
        return sum(block in self._free for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. Give a request's blocks last first: its tail is then evicted first."""
        refs, free, key_of = self._refs, self._free, self._key_of
        for block in blocks:
            refs[block] = left = refs[block] - 1
            assert left >= 0, f"block {block} released twice"
            if left == 0:
                free[block] = None
                if block not in key_of:
                    free.move_to_end(block, last=False)

    def cache(self, block: int, key: BlockKey) -> None:
        """Index a full block. The first block under a key stays; a copy is left unindexed."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def reset_cache(self) -> None:
        """Forget all keys (weights were reloaded); blocks in use stay in use."""
        self._key_of.clear()
        self._block_of.clear()
