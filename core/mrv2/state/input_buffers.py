"""The step's common inputs in persistent buffers: a plan becomes a `StepView`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mrv2.kernels.prepare_inputs import prepare_inputs
from mrv2.state.block_tables import BlockTables
from mrv2.state.plan import StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.staging import StagingRing
from mrv2.state.view import Limits, StepView

if TYPE_CHECKING:
    from mrv2.attn.groups import KVGroup


class InputBuffers:
    """Buffers for the largest step, allocated once, so that every step's tensors have the same addresses."""

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self._limits = limits
        self._num_groups = len(groups)
        rows, tokens, device = limits.max_rows, limits.max_num_tokens, limits.device
        # Rows, query_start_loc: what the host knows of a step, in one copy. Both begin at multiples of 16 bytes.
        self._batch = torch.zeros(2, rows // 4 * 4 + 4, dtype=torch.int32, device=device)
        self._batch_bytes = self._batch.view(torch.uint8).view(-1)
        self._ring = StagingRing(self._batch_bytes.shape[0], device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._logits_indices = torch.zeros(rows, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._token_to_i = torch.full((tokens,), -1, dtype=torch.int32, device=device)

    def prepare(
        self,
        plan: StepPlan,
        states: RequestStates,
        tables: BlockTables,
        *,
        num_reqs: int | None = None,
        num_tokens: int | None = None,
    ) -> StepView:
        """Gather the inputs of `plan` from the flushed `states` and `tables`, without reading the device.

        Args:
            plan: the step.
            states: the request table.
            tables: block tables of the same KV groups.
            num_reqs: requests after padding; default: the plan's.
            num_tokens: tokens after padding; default: the plan's.
        """
        num_reqs = plan.num_reqs if num_reqs is None else num_reqs
        num_tokens = plan.num_tokens if num_tokens is None else num_tokens
        assert 0 < plan.num_reqs <= num_reqs <= self._limits.max_rows, (plan.num_reqs, num_reqs)
        assert plan.num_tokens <= num_tokens <= self._limits.max_num_tokens, (plan.num_tokens, num_tokens)
        self._send_batch(plan)

        table = states.table
        rows = self._batch[0, :num_reqs]
        query_start_loc = self._batch[1, : num_reqs + 1]
        seq_lens, logits_indices = self._seq_lens[:num_reqs], self._logits_indices[:num_reqs]
        token_to_i, positions = self._token_to_i[:num_tokens], self._positions[:num_tokens]
        input_ids = self._input_ids[:num_tokens]
        prepare_inputs(
            rows=rows,
            query_start_loc=query_start_loc,
            num_computed=table.num_computed,
            all_token_ids=table.all_token_ids,
            active=table.active,
            seq_lens=seq_lens,
            logits_indices=logits_indices,
            token_to_i=token_to_i,
            positions=positions,
            input_ids=input_ids,
        )
        block_tables = tables.gather(rows, table.active, num_reqs, max_seq_len=plan.max_seq_len)
        slot_mappings = tables.slot_mappings(rows=rows, active=table.active, token_to_i=token_to_i, positions=positions)
        assert len(block_tables) == self._num_groups, (len(block_tables), self._num_groups)
        return StepView(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=plan.max_query_len,
            max_seq_len=plan.max_seq_len,
            num_decodes=plan.num_decodes,
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            input_ids=input_ids,
            positions=positions,
            token_to_i=token_to_i,
            logits_indices=logits_indices,
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            table=table,
        )

    def _send_batch(self, plan: StepPlan) -> None:
        """Copy rows and query starts to the device; padding, to the end of the buffers, has row -1 and no tokens."""
        nbytes, n = self._batch_bytes.shape[0], plan.num_reqs
        batch_np = self._ring.take(nbytes)[:nbytes].view(np.int32).reshape(2, -1)
        batch_np[0, :n], batch_np[0, n:] = plan.rows_np, -1
        batch_np[1, 0], batch_np[1, n + 1 :] = 0, plan.num_tokens
        np.cumsum(plan.query_lens_np, out=batch_np[1, 1 : n + 1])
        assert batch_np[1, n] == plan.num_tokens, (batch_np[1, n], plan.num_tokens)
        self._ring.send(self._batch_bytes)
