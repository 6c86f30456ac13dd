"""vLLM's batch and request table with our names. See docs/bridge.md for each member."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrv2.state.view import Limits, StepView, TableView


class Views:
    """Makes a step's view. Buffers are allocated once; what vLLM has in the same form is shared, not copied.

    Args:
        limits: sizes.
    """

    def __init__(self, limits: Limits) -> None:
        device = limits.device
        self._rows = torch.full((limits.max_rows,), -1, dtype=torch.int32, device=device)
        self._token_to_i = torch.full((limits.max_num_tokens,), -1, dtype=torch.int32, device=device)
        self._token = torch.arange(limits.max_num_tokens, device=device)
        self._active = torch.ones(limits.max_rows, dtype=torch.bool, device=device)

    def step(
        self, batch: Any, table: Any, *, block_tables: tuple[Tensor, ...] = (), slot_mappings: Tensor | None = None
    ) -> StepView:
        """The view of one step.

        Args:
            batch: vLLM's `InputBatch`.
            table: vLLM's `RequestState`.
            block_tables: per KV group, gathered for the batch; empty in a profiling run without attention.
            slot_mappings: [groups, num_tokens], as above.
        """
        n, reqs, padded = batch.num_reqs, batch.num_reqs_after_padding, batch.num_tokens_after_padding
        rows = self._rows[:reqs].fill_(-1)
        rows[:n].copy_(batch.idx_mapping[:n])
        starts = batch.query_start_loc[: reqs + 1]
        token = self._token[:padded]
        i = torch.searchsorted(starts[1 : n + 1].long(), token, right=True)
        token_to_i = self._token_to_i[:padded].copy_(torch.where(token < batch.num_tokens, i, -1))
        input_ids, positions = batch.input_ids[:padded], batch.positions[:padded]
        if padded > batch.num_tokens:  # vLLM leaves what an earlier step had there
            real = token_to_i >= 0
            input_ids, positions = torch.where(real, input_ids, 0), torch.where(real, positions, 0)
        lens_np = batch.num_scheduled_tokens
        longer = np.flatnonzero(lens_np[:n] != 1)
        slots = () if slot_mappings is None else tuple(s[:padded] for s in slot_mappings.unbind(0))
        return StepView(
            num_reqs=reqs,
            num_tokens=padded,
            # 0.26 promises no length beyond the scheduled ones.
            max_query_len=getattr(batch, "max_query_len", None) or int(lens_np.max(initial=1)),
            max_seq_len=int(batch.seq_lens_cpu_upper_bound.max()),
            num_decodes=int(longer[0]) if len(longer) else n,
            rows=rows,
            query_start_loc=starts,
            seq_lens=batch.seq_lens[:reqs],
            input_ids=input_ids,
            positions=positions,
            token_to_i=token_to_i,
            logits_indices=(starts[1:].long() - 1).clamp(min=0),
            block_tables=tuple(t[:reqs] for t in block_tables),
            slot_mappings=slots,
            table=self.table(table),
        )

    def table(self, table: Any) -> TableView:
        """Columns of vLLM's `RequestState`."""
        return TableView(
            all_token_ids=table.all_token_ids.gpu,
            prompt_len=table.prompt_len.gpu,
            prefill_len=table.prefill_len.gpu,
            total_len=table.total_len.gpu,
            num_computed=table.num_computed_tokens.gpu,
            active=self._active,
        )
