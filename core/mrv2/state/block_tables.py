"""Block tables of all KV groups: a staged column by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrv2.state.columns import StagedColumn
from mrv2.state.plan import BlockWrites
from mrv2.state.view import Limits

if TYPE_CHECKING:
    from mrv2.attn.groups import KVGroup


class BlockTables:
    """Block ids per request and KV group; of a group of states one per request, its slot.

    A row isn't cleared when its request leaves: entries past a request's blocks are stale ids of earlier
    ones, and no step reads past `seq_lens`. Block 0 is scratch.

    Attributes:
        by_row: [num_groups, max_rows, width] int32.
        block_sizes: [num_groups] int32, tokens per block.
    """

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self._max_rows = limits.max_rows
        self._sizes = [group.block_size for group in groups]
        self._width = max(table_widths(limits, groups), default=1)
        count, width, device = len(groups), self._width, limits.device
        # One column holds all groups, one after the other, so that one kernel serves them all.
        self._column = StagedColumn((count * limits.max_rows, width), dtype=torch.int32, device=device)
        self.by_row: Tensor = self._column.device_tensor.view(count, limits.max_rows, width)
        self.block_sizes = torch.tensor(self._sizes, dtype=torch.int32, device=device)

    def stage(self, writes: tuple[BlockWrites, ...]) -> None:
        """Stage a step's new block ids, one entry per group."""
        assert len(writes) == len(self._sizes), (len(writes), len(self._sizes))
        for group, write in enumerate(writes):
            if len(write.rows):
                rows = write.rows + group * self._max_rows
                self._column.stage_runs(rows, write.starts, write.cu_lens, write.block_ids)

    def flush(self) -> None:
        """Bring everything staged to the device."""
        self._column.flush()

    def num_cols(self, max_seq_len: int) -> int:
        """Columns that requests of up to `max_seq_len` tokens can reach."""
        return min(self._width, -(-max_seq_len // min(self._sizes, default=1)))


def table_widths(limits: Limits, groups: tuple[KVGroup, ...]) -> tuple[int, ...]:
    """Per group, the most blocks of one request."""
    return tuple(1 if group.states else -(-limits.max_model_len // group.block_size) for group in groups)
