"""The native runner: one step in two phases, nothing of which reads a device value on the host.

`begin` brings the plan to the device and runs the model; `finish` samples, writes back and starts the copy
to the host. Between the two, and until the output is read, the next step may be planned and begun: its
input ids and lengths come from the device's own columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.attn.groups import KVGroup
from mrv2.kernels.update_after_sample import update_after_sample
from mrv2.runner.forward import ForwardPass
from mrv2.runner.outputs import CopyStream, Pending, PendingOutput
from mrv2.sample.params import MAX_STOP_TOKEN_IDS
from mrv2.sample.sampler import Sampler, SamplerOutput
from mrv2.sample.states import SamplerNeeds, SamplingStates
from mrv2.state.block_tables import BlockTables
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.plan import StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.view import StepView


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step whose forward has been launched."""

    plan: StepPlan
    view: StepView
    hidden: Tensor  # [num_tokens, hidden]
    needs: SamplerNeeds


class Runner:
    """Runs plans. Holds the request table, block tables and input buffers on the device.

    Args:
        forward: the model with its state and caches.
        groups: KV groups of the model.
    """

    def __init__(self, forward: ForwardPass, groups: tuple[KVGroup, ...]) -> None:
        limits = forward.state.limits
        self._forward = forward
        self._state = forward.state
        self._requests = RequestStates(limits, max_stop_ids=MAX_STOP_TOKEN_IDS)
        self._tables = BlockTables(limits, groups)
        self._buffers = InputBuffers(limits, groups)
        self._sampling = SamplingStates(limits)
        default = Sampler(self._sampling)
        self._sampler = self._state.custom_sampler(default)
        self._may_skip_logits = self._sampler is default
        self._copies = CopyStream(limits.device)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> PendingStep:
        """Stage what changed, flush it in one go, prepare inputs on the device, run the model."""
        for row, req_id in plan.removed:
            self._requests.remove_request(row, req_id)
            self._state.remove_request(row, req_id)
        for row, request in plan.added:
            self._requests.add_request(row, request)
            self._sampling.add_request(row, request)
            self._state.add_request(row, request)
        self._tables.stage(plan.block_writes)
        self._state.stage_step(plan)

        self._requests.flush()
        self._tables.flush()
        self._sampling.flush()
        self._state.apply_staged_writes()

        self._forward.copy_blocks(plan.copies)
        view = self._prepare(plan)
        hidden = self._forward.hidden(view)
        return PendingStep(plan=plan, view=view, hidden=hidden, needs=self._sampling.needs(plan.rows_np))

    def _prepare(self, plan: StepPlan) -> StepView:
        return self._buffers.prepare(plan, self._requests, self._tables)

    @torch.inference_mode()
    def finish(self, step: PendingStep) -> Pending:
        """Sample, write back to the request table, and start the copy to the host."""
        view, requests = step.view, self._requests
        sampled = self._sample(step)
        tokens = sampled.token_ids[:, None]
        num_sampled = torch.empty_like(view.rows)
        update_after_sample(
            rows=view.rows,
            seq_lens=view.seq_lens,
            sampled=tokens,
            num_candidates=torch.ones_like(view.rows),
            all_token_ids=requests.table.all_token_ids,
            total_len=requests.table.total_len,
            num_computed=requests.table.num_computed,
            active=requests.active,
            len_limit=requests.len_limit,
            stop_token_ids=requests.stop_token_ids,
            num_sampled=num_sampled,
        )
        output = PendingOutput(
            step.plan.step_id, tokens=tokens, num_sampled=num_sampled, logprobs=sampled.logprobs, stream=self._copies
        )
        self._state.after_sample(view, num_sampled)
        return output

    def _sample(self, step: PendingStep) -> SamplerOutput:
        if self._may_skip_logits and step.needs.only_argmax:
            token_ids = self._forward.greedy(step.hidden, step.view)
            if token_ids is not None:
                return SamplerOutput(token_ids, None)
        logits = self._forward.logits(step.hidden, step.view)
        # The token after the last computed one: its position is the length after this step.
        output: SamplerOutput = self._sampler(logits, step.view.rows, step.view.seq_lens.long(), step.needs)
        return output
