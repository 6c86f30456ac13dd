"""The step's common inputs in persistent buffers: a plan becomes a `StepView`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.kernels.prepare_inputs import prepare_inputs
from mrv2.state.block_tables import BlockTables, table_widths
from mrv2.state.plan import StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.staging import StagingRing
from mrv2.state.view import Limits, StepView

if TYPE_CHECKING:
    from mrv2.attn.groups import KVGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The buffers, cut to one step's padded sizes."""

    num_reqs: int
    num_tokens: int
    shared: dict[str, Tensor]  # named alike in the kernel and in the view
    tables: Tensor  # [num_groups, num_reqs, width] int32
    slots: Tensor  # [num_paged, num_tokens] int64
    block_tables: tuple[Tensor, ...]  # as in the view
    slot_mappings: tuple[Tensor, ...]


class InputBuffers:
    """Buffers for the largest step, allocated once, so that every step's tensors have the same addresses.

    Attributes:
        batch: [2, n] int32 on the device: rows, and where queries start; the view's tensors of these names lie here.
            The last place of the first line is beyond all rows, and free for what a graph has to be told.
    """

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self._limits = limits
        rows, tokens, device = limits.max_rows, limits.max_num_tokens, limits.device
        self._widths = table_widths(limits, groups)
        self._num_paged = sum(not group.states for group in groups)
        assert not any(group.states for group in groups[: self._num_paged]), "groups of states come last"
        # Rows, query starts: all that the host has to say of a step. Both begin at multiples of 16 bytes.
        self.batch = torch.zeros(2, rows // 4 * 4 + 4, dtype=torch.int32, device=device)
        self._ramp_np = np.arange(self.batch.shape[1], dtype=np.int32)
        self._ring = StagingRing(self.batch.nbytes, device, depth=8)  # a step may need two
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._logits_indices = torch.zeros(rows, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._token_to_i = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        width = max(self._widths, default=1)
        self._block_tables = torch.zeros(len(groups), rows, width, dtype=torch.int32, device=device)
        self._slots = torch.full((len(groups), tokens), -1, dtype=torch.int64, device=device)
        self._cut = self._cut_to(rows, tokens)

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
        self.gather(
            torch.from_numpy(self._stage(plan)),
            states,
            tables,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_seq_len=plan.max_seq_len,
        )
        self._ring.release()
        return self.view(
            states,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=plan.num_decodes,
            max_query_len=plan.max_query_len,
            max_seq_len=plan.max_seq_len,
        )

    def send(self, plan: StepPlan | None, note: int) -> None:
        """Bring a plan's rows and query starts to `batch`, from where a graph gathers.

        Args:
            plan: the step; None: one of padding alone.
            note: put into `note`.
        """
        if plan is None:
            self.batch.fill_(-1)
            self.batch[1].zero_()
            return
        self._stage(plan)[0, -1] = note
        self._ring.send(self.batch.view(-1).view(torch.uint8))

    @property
    def note(self) -> Tensor:
        """[1] int32 on the device: what came with the last `send`; -1 with padding alone."""
        return self.batch[0, -1:]

    def view(
        self,
        states: RequestStates,
        *,
        num_reqs: int,
        num_tokens: int,
        num_decodes: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> StepView:
        """The buffers at these padded sizes, as they have been or will be gathered."""
        cut = self._cut_for(num_reqs, num_tokens)
        return StepView(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_decodes=num_decodes,
            block_tables=cut.block_tables,
            slot_mappings=cut.slot_mappings,
            table=states.table,
            **cut.shared,
        )

    def gather(
        self,
        batch: Tensor,
        states: RequestStates,
        tables: BlockTables,
        *,
        num_reqs: int,
        num_tokens: int,
        max_seq_len: int,
    ) -> None:
        """The device's part of `prepare`, one launch, from which a graph can be captured.

        Args:
            batch: as the attribute, anywhere the device can read: a staging buffer in pinned memory, or, in a graph,
                which always reads the same address, the attribute itself.
            states: the request table.
            tables: block tables.
            num_reqs: padded.
            num_tokens: padded.
            max_seq_len: upper bound; block ids that only longer requests have stay what an earlier step left.
        """
        cut = self._cut_for(num_reqs, num_tokens)
        assert len(tables.by_row) == len(self._widths), (len(tables.by_row), len(self._widths))
        prepare_inputs(
            num_computed=states.table.num_computed,
            all_token_ids=states.table.all_token_ids,
            active=states.table.active,
            tables=tables.by_row,
            block_sizes=tables.block_sizes,
            num_cols=tables.num_cols(max_seq_len),
            batch=batch,
            block_tables=cut.tables,
            slots=cut.slots,
            **cut.shared,
        )

    def _stage(self, plan: StepPlan) -> NDArray[np.int32]:
        """Rows and query starts in a staging buffer; padding, to its end, has row -1 and no tokens."""
        nbytes, n = self.batch.nbytes, plan.num_reqs
        batch_np = self._ring.take(nbytes)[:nbytes].view(np.int32).reshape(self.batch.shape)
        batch_np[0, :n], batch_np[0, n:] = plan.rows_np, -1
        np.minimum(self._ramp_np, plan.num_tokens, out=batch_np[1])  # right if all have one token
        if plan.num_decodes < n:
            np.cumsum(plan.query_lens_np, out=batch_np[1, 1 : n + 1])
            batch_np[1, n + 1 :] = plan.num_tokens
        assert batch_np[1, n] == plan.num_tokens, (batch_np[1, n], plan.num_tokens)
        return batch_np

    def _cut_for(self, num_reqs: int, num_tokens: int) -> _Cut:
        """The last cut, if its sizes are these."""
        if (self._cut.num_reqs, self._cut.num_tokens) != (num_reqs, num_tokens):
            self._cut = self._cut_to(num_reqs, num_tokens)
        return self._cut

    def _cut_to(self, num_reqs: int, num_tokens: int) -> _Cut:
        tables = self._block_tables[:, :num_reqs]
        return _Cut(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            shared={
                "rows": self.batch[0, :num_reqs],
                "query_start_loc": self.batch[1, : num_reqs + 1],
                "seq_lens": self._seq_lens[:num_reqs],
                "logits_indices": self._logits_indices[:num_reqs],
                "token_to_i": self._token_to_i[:num_tokens],
                "positions": self._positions[:num_tokens],
                "input_ids": self._input_ids[:num_tokens],
            },
            tables=tables,
            slots=self._slots[: self._num_paged, :num_tokens],
            block_tables=tuple(table[:, :width] for table, width in zip(tables, self._widths, strict=True)),
            slot_mappings=tuple(self._slots[:, :num_tokens]),
        )
