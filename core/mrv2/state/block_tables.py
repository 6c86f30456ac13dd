"""Block tables of all KV groups: a staged column by row, gathered into batch order each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrv2.kernels.block_tables import compute_slot_mappings, gather_block_tables
from mrv2.state.columns import StagedColumn
from mrv2.state.plan import BlockWrites
from mrv2.state.view import Limits

if TYPE_CHECKING:
    from mrv2.attn.groups import KVGroup


class BlockTables:
    """Block ids per request and KV group; of a group of states one per request, its slot.

    A row isn't cleared when its request leaves: entries past a request's blocks are stale ids of earlier
    ones, and no step reads past `seq_lens`. Block 0 is scratch.
    """

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self._max_rows = limits.max_rows
        self._sizes = [group.block_size for group in groups]
        self._widths = [1 if group.states else -(-limits.max_model_len // group.block_size) for group in groups]
        self._num_paged = sum(not group.states for group in groups)
        assert not any(group.states for group in groups[: self._num_paged]), "groups of states come last"
        count, width, device = len(groups), max(self._widths, default=1), limits.device
        # One column holds all groups, one after the other, so that one kernel serves them all.
        self._column = StagedColumn((count * limits.max_rows, width), dtype=torch.int32, device=device)
        self._tables = self._column.device_tensor.view(count, limits.max_rows, width)
        self._block_sizes = torch.tensor(self._sizes, dtype=torch.int32, device=device)
        self._gathered = torch.zeros(count, limits.max_rows, width, dtype=torch.int32, device=device)
        self._slots = torch.full((count, limits.max_num_tokens), -1, dtype=torch.int64, device=device)

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

    def gather(
        self, rows: Tensor, active: Tensor, num_reqs: int, *, max_seq_len: int | None = None
    ) -> tuple[Tensor, ...]:
        """Each group's table in batch order; zeros for padding and inactive rows.

        Args:
            rows: [num_reqs] int32; -1 for padding.
            active: [max_rows] bool.
            num_reqs: padded.
            max_seq_len: upper bound of the batch's lengths; columns past it keep what an earlier step left.
                None: fill all columns.

        Returns:
            Per group, a view [num_reqs, max_blocks] int32 of a persistent buffer.
        """
        if not self._sizes:
            return ()
        width = self._tables.shape[2]
        num_cols = width if max_seq_len is None else min(width, -(-max_seq_len // min(self._sizes)))
        out = self._gathered[:, :num_reqs]
        gather_block_tables(tables=self._tables, rows=rows[:num_reqs], active=active, num_cols=num_cols, out=out)
        return tuple(table[:, :width] for table, width in zip(out, self._widths, strict=True))

    def slot_mappings(
        self, *, rows: Tensor, active: Tensor, token_to_i: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Each group's slot of every new token; -1 for padding and inactive rows.

        Args:
            rows: [num_reqs] int32; -1 for padding.
            active: [max_rows] bool.
            token_to_i: [num_tokens] int32; -1 for padding.
            positions: [num_tokens] int64.

        Returns:
            Per group, a view [num_tokens] int64 of a persistent buffer; all -1 for a group of states.
        """
        n = self._num_paged
        slots = self._slots[:, : token_to_i.shape[0]]
        if n:
            compute_slot_mappings(
                tables=self._tables[:n],
                block_sizes=self._block_sizes[:n],
                rows=rows,
                active=active,
                token_to_i=token_to_i,
                positions=positions,
                slots=slots[:n],
            )
        return tuple(slots)
