"""The request table: what the device knows of every request, one row each. Rows never move."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.api import RequestData
from mrv2.state.columns import StagedColumn
from mrv2.state.view import Limits, TableView

_LENGTHS = ("prompt_len", "prefill_len", "total_len", "num_computed", "len_limit")


class RequestStates:
    """Device truth of all requests; the host stages what it adds and removes.

    A freed row is reused at once and may hold anything, so `add_request` sets every field of it. Token ids
    past `total_len` are the only thing left over, and nothing reads them.

    Attributes:
        table: what adapters may read.
        len_limit: [max_rows] int32, total tokens at which the device stops a row.
        stop_token_ids: [max_rows, max_stop_ids] int32; unused places hold -1.
        active: [max_rows] bool.
    """

    def __init__(self, limits: Limits, *, max_stop_ids: int) -> None:
        rows, device = limits.max_rows, limits.device
        self._max_model_len = limits.max_model_len
        self._max_stop_ids = max_stop_ids
        self._ids = StagedColumn((rows, limits.max_model_len), dtype=torch.int32, device=device)
        # One column for all the lengths, a row of it per field: one kernel sets them all.
        self._lengths = StagedColumn((len(_LENGTHS), rows), dtype=torch.int32, device=device)
        self._stop_ids = StagedColumn((rows, max_stop_ids), dtype=torch.int32, device=device)
        self._active = StagedColumn((rows,), dtype=torch.bool, device=device)
        self._owners: dict[int, str] = {}
        self._new: list[tuple[int, ...]] = []  # rows, and their lengths; not staged yet

        lengths = dict(zip(_LENGTHS, self._lengths.device_tensor, strict=True))
        self.len_limit = lengths.pop("len_limit")
        self.stop_token_ids = self._stop_ids.device_tensor
        self.active = self._active.device_tensor
        self.table = TableView(all_token_ids=self._ids.device_tensor, active=self.active, **lengths)

    def add_request(self, row: int, request: RequestData) -> None:
        """Stage every field of `row`. Adding a row again is legal."""
        prompt_len, prefill_len = len(request.prompt_token_ids), len(request.prefill_token_ids)
        assert prompt_len <= prefill_len <= self._max_model_len, (prompt_len, prefill_len)
        assert 0 <= request.num_computed_tokens < prefill_len, "a step computes one token at least"
        stop_ids = np.full(self._max_stop_ids, -1, dtype=np.int32)
        stop_ids[: len(request.stop_token_ids)] = request.stop_token_ids
        self._owners[row] = request.req_id
        self._ids.stage(row, 0, request.prefill_token_ids)
        self._new.append((row, prompt_len, prefill_len, prefill_len, request.num_computed_tokens, request.len_limit))
        self._stop_ids.stage(row, 0, stop_ids)
        self._active.stage(row, 0, True)

    def remove_request(self, row: int, req_id: str) -> None:
        """Stage that `row` is inactive, if it is `req_id`'s; otherwise nothing."""
        if self._owners.get(row) == req_id:
            del self._owners[row]
            self._active.stage(row, 0, False)

    def flush(self) -> None:
        """Bring everything staged to the device."""
        if self._new:
            rows, *lengths = np.array(self._new, np.int32).T
            self._new.clear()
            fields = np.repeat(np.arange(len(_LENGTHS)), len(rows))
            self._lengths.stage_runs(
                fields, np.tile(rows, len(_LENGTHS)), np.arange(len(fields) + 1), np.concatenate(lengths)
            )
        self._ids.flush()
        self._lengths.flush()
        self._stop_ids.flush()
        self._active.flush()
