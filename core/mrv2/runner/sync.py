"""The runner's readable twin: no overlap, no device columns, no kernels; every value comes from host lists.

It serves two readers: a person who wants to see what a step means, and tests that hold `Runner` to it. It
takes the same plans, but only when every earlier output has been consumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mrv2.api import RequestData
from mrv2.attn.groups import KVGroup
from mrv2.runner.forward import ForwardPass
from mrv2.runner.outputs import LogprobsOutput, StepOutput
from mrv2.sample.sampler import Logprobs, Sampler
from mrv2.sample.states import SamplingStates
from mrv2.state.plan import StepPlan
from mrv2.state.view import StepView, TableView


@dataclass(slots=True)
class _Row:
    request: RequestData
    tokens: list[int]
    computed: int
    blocks: list[list[int]] = field(default_factory=list)  # per KV group


class SyncRunner:
    """Runs a plan to its end and returns its output.

    Args:
        forward: the model with its state and caches.
        groups: KV groups of the model.
    """

    def __init__(self, forward: ForwardPass, groups: tuple[KVGroup, ...]) -> None:
        self._forward = forward
        self._state = forward.state
        self._groups = groups
        self._limits = forward.state.limits
        self._sampling = SamplingStates(self._limits)
        self._sampler = self._state.custom_sampler(Sampler(self._sampling))
        self._rows: dict[int, _Row] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """Take the plan, run the model, sample, remember."""
        for row, req_id in plan.removed:
            self._rows.pop(row, None)
            self._state.remove_request(row, req_id)
        for row, request in plan.added:
            tokens = [int(t) for t in request.prefill_token_ids]
            self._rows[row] = _Row(request, tokens, request.num_computed_tokens, [[] for _ in self._groups])
            self._sampling.add_request(row, request)
            self._forward.processors.add_request(row, request)
            self._state.add_request(row, request)
        self._write_blocks(plan)
        self._state.stage_step(plan)
        self._sampling.flush()
        self._forward.processors.flush()
        self._state.apply_staged_writes()

        self._forward.copy_blocks(plan.copies)
        view = self._view(plan)
        logits = self._forward.logits(self._forward.hidden(view), view).float()
        processors = self._forward.processors
        needs = replace(self._sampling.needs(plan.rows_np), processed=processors.wanted(plan.rows_np))
        sampler = processors.around(self._sampler, view.table)
        sampled = sampler(logits, view.rows, view.seq_lens.long(), needs)
        num_sampled = [
            self._write_back(int(row), int(take), int(token))
            for row, take, token in zip(plan.rows_np, plan.query_lens_np, sampled.token_ids, strict=True)
        ]
        self._state.after_sample(view, torch.tensor(num_sampled, dtype=torch.int32, device=self._limits.device))
        return StepOutput(
            step_id=plan.step_id,
            tokens_np=sampled.token_ids[:, None].cpu().numpy(),
            num_sampled_np=np.array(num_sampled, np.int32),
            logprobs=_logprobs_to_host(sampled.logprobs),
        )

    def _write_back(self, row: int, take: int, token: int) -> int:
        entry = self._rows[row]
        entry.computed += take
        if entry.computed < len(entry.tokens):  # the prompt isn't finished
            return 0
        entry.tokens.append(token)
        return 1

    def _write_blocks(self, plan: StepPlan) -> None:
        for g, writes in enumerate(plan.block_writes):
            for k, row in enumerate(writes.rows.tolist()):
                if row not in self._rows:  # it grew, then left, before any step
                    continue
                ids = writes.block_ids[writes.cu_lens[k] : writes.cu_lens[k + 1]].tolist()
                start = int(writes.starts[k])
                self._rows[row].blocks[g][start : start + len(ids)] = ids

    def _view(self, plan: StepPlan) -> StepView:
        rows, takes = plan.rows_np.tolist(), plan.query_lens_np.tolist()
        input_ids: list[int] = []
        positions: list[int] = []
        token_to_i: list[int] = []
        slots: list[list[int]] = [[] for _ in self._groups]
        for i, (row, take) in enumerate(zip(rows, takes, strict=True)):
            entry = self._rows[row]
            span = range(entry.computed, entry.computed + take)
            input_ids += entry.tokens[span.start : span.stop]
            positions += span
            token_to_i += [i] * take
            for g, group in enumerate(self._groups):
                size, blocks = group.block_size, entry.blocks[g]
                slots[g] += [-1] * take if group.states else [blocks[p // size] * size + p % size for p in span]
        starts = np.concatenate(([0], np.cumsum(takes)))
        return StepView(
            num_reqs=len(rows),
            num_tokens=len(input_ids),
            max_query_len=max(takes),
            max_seq_len=max(self._rows[row].computed + take for row, take in zip(rows, takes, strict=True)),
            num_decodes=plan.num_decodes,
            rows=self._tensor(rows),
            query_start_loc=self._tensor(starts.tolist()),
            seq_lens=self._tensor([self._rows[row].computed + take for row, take in zip(rows, takes, strict=True)]),
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions, torch.int64),
            token_to_i=self._tensor(token_to_i),
            logits_indices=self._tensor((starts[1:] - 1).tolist(), torch.int64),
            block_tables=tuple(self._block_table(g, rows) for g in range(len(self._groups))),
            slot_mappings=tuple(self._tensor(s, torch.int64) for s in slots),
            table=self._table(),
        )

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._limits.device)

    def _block_table(self, g: int, rows: list[int]) -> Tensor:
        width = max(len(self._rows[row].blocks[g]) for row in rows)
        padded = [self._rows[row].blocks[g] + [0] * (width - len(self._rows[row].blocks[g])) for row in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self._limits.device)

    def _table(self) -> TableView:
        limits = self._limits
        tokens_np = np.zeros((limits.max_rows, limits.max_model_len), np.int32)
        columns_np = np.zeros((4, limits.max_rows), np.int32)
        active_np = np.zeros(limits.max_rows, bool)
        for row, entry in self._rows.items():
            tokens_np[row, : len(entry.tokens)] = entry.tokens
            prompt, prefill = len(entry.request.prompt_token_ids), len(entry.request.prefill_token_ids)
            columns_np[:, row] = prompt, prefill, len(entry.tokens), entry.computed
            active_np[row] = True
        prompt_len, prefill_len, total_len, computed = torch.from_numpy(columns_np).to(limits.device).unbind(0)
        return TableView(
            all_token_ids=torch.from_numpy(tokens_np).to(limits.device),
            prompt_len=prompt_len,
            prefill_len=prefill_len,
            total_len=total_len,
            num_computed=computed,
            active=torch.from_numpy(active_np).to(limits.device),
        )


def _logprobs_to_host(logprobs: Logprobs | None) -> LogprobsOutput | None:
    if logprobs is None:
        return None
    ids, values, ranks = (t.cpu().numpy() for t in logprobs)
    return LogprobsOutput(token_ids_np=ids, logprobs_np=values, ranks_np=ranks)
