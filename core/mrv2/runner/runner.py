"""The native runner: one step in two phases, nothing of which reads a device value on the host.

`begin` brings the plan to the device and runs the model; `finish` samples, writes back and starts the copy
to the host. Between the two, and until the output is read, the next step may be planned and begun: its
input ids and lengths come from the device's own columns.

With graphs, `begin` replays a step's decodes, up to their tokens on the host; what has more than one token per request
follows as a forward of its own, replayed too where its size has been captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrv2.attn.groups import KVGroup
from mrv2.kernels.compile_ahead import only_compiling
from mrv2.kernels.report_sampled import report_sampled
from mrv2.kernels.update_after_sample import update_after_sample
from mrv2.layers.custom import CacheHandle
from mrv2.model_state.graphs import GraphPlan, GraphSupport
from mrv2.runner.forward import ForwardPass
from mrv2.runner.graphs import Captured, GraphKey, GraphStats, Recorder, StepGraphs
from mrv2.runner.outputs import CopyStream, JoinedOutput, OutputRing, Pending, PendingOutput
from mrv2.sample.params import MAX_STOP_TOKEN_IDS
from mrv2.sample.sampler import Sampler, SamplerOutput
from mrv2.sample.states import SamplerNeeds, SamplingStates
from mrv2.sample.tiers import FEW_RANKS, GREEDY, RANDOM, tier_of
from mrv2.state.block_tables import BlockTables
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.plan import StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.view import StepView


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step, or the rest of one, whose forward has been launched."""

    plan: StepPlan
    view: StepView
    hidden: Tensor  # [num_tokens, hidden]
    needs: SamplerNeeds
    decodes: Pending | None = None  # what ran before, to its end; not part of `plan`


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
        self._processors = forward.processors
        default = Sampler(self._sampling)
        self._sampler = self._processors.around(self._state.custom_sampler(default), self._requests.table)
        self._own_sampler = self._sampler is default
        self._ones = torch.ones(limits.max_rows, dtype=torch.int32, device=limits.device)
        self._copies = CopyStream(limits.device)
        self._ring = OutputRing(limits)
        self.graphs: StepGraphs | None = None

    def use_graphs(self, plan: GraphPlan, recorder: Recorder) -> StepGraphs:
        """Replay steps from now on. Nothing is captured yet."""
        own_kernels = any(isinstance(module, CacheHandle) for module in self._forward.model.modules())
        if own_kernels or self._state.graph_support() is not GraphSupport.ALWAYS:
            # A kernel of an adapter's may go as far as `max_query_len`, which would be all tokens of the step.
            plan = replace(plan, num_tokens=())
        limits = self._state.limits
        plan = GraphPlan(
            num_reqs=_within(plan.num_reqs, limits.max_rows),
            max_seq_lens=_within(plan.max_seq_lens, limits.max_model_len),
            num_tokens=_within(plan.num_tokens, limits.max_num_tokens),
        )
        self.graphs = StepGraphs(plan, body=self._launch, pad=lambda: self._buffers.send(None, -1), recorder=recorder)
        return self.graphs

    def capture_common(self) -> GraphStats | None:
        """Capture what most steps will be, and let the model capture what it wants. Counters; None: without graphs."""
        if self.graphs is None:
            return None
        with torch.inference_mode():
            self._state.capture_inner(self.graphs)
        self.graphs.capture_common((GREEDY, RANDOM) if self._own_sampler else (None,))
        return self.graphs.stats

    @torch.inference_mode()
    def compile_ahead(self, graphs: StepGraphs) -> None:
        """Have the kernels compiled, of layers and sampler, that the first steps would meet one after the other."""
        limits = self._state.limits
        self._buffers.send(None, -1)
        views = [self._gather(key) for key in graphs.common((GREEDY,))]
        for view in views:
            self._forward.compile_layers(view)
        for view in views[-1:] if self._own_sampler else ():  # the smallest: the sampler's are the same for all
            logits = torch.zeros(view.num_reqs, limits.vocab_size, dtype=limits.dtype, device=limits.device)
            with only_compiling():
                for needs in (FEW_RANKS, RANDOM, GREEDY):
                    self._report(*self._update(view, self._sampler(logits, view.rows, view.seq_lens.long(), needs)))

    def rehearse_graphs(self) -> None:
        """Run the largest steps that would be captured, for what they compile and allocate."""
        if self.graphs is not None:
            self.graphs.rehearse((FEW_RANKS, RANDOM, GREEDY) if self._own_sampler else (None,))

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> PendingStep | Pending:
        """Stage what changed, flush it in one go, prepare inputs on the device, run the model.

        Returns:
            What `finish` takes: the step, or its result if graphs have done it all.
        """
        for row, req_id in plan.removed:
            self._requests.remove_request(row, req_id)
            self._state.remove_request(row, req_id)
        for row, request in plan.added:
            self._requests.add_request(row, request)
            self._sampling.add_request(row, request)
            self._processors.add_request(row, request)
            self._state.add_request(row, request)
        self._tables.stage(plan.block_writes)
        self._state.stage_step(plan)

        self._requests.flush()
        self._tables.flush()
        self._sampling.flush()
        self._processors.flush()
        self._state.apply_staged_writes()

        self._forward.copy_blocks(plan.copies)
        needs = self._needs(plan)
        if self.graphs is None:
            return self._begin(plan, needs)
        if plan.num_decodes in (0, plan.num_reqs):
            return self._replay(self.graphs, plan, needs) or self._begin(plan, needs)
        decodes, rest = plan.part(0, plan.num_decodes), plan.part(plan.num_decodes, plan.num_reqs)
        done = self._replay(self.graphs, decodes, self._needs_of(decodes, needs))
        if done is None:
            return self._begin(plan, needs)
        needs = self._needs_of(rest, needs)
        prompts = self._replay(self.graphs, rest, needs)
        return replace(self._begin(rest, needs), decodes=done) if prompts is None else JoinedOutput(done, prompts)

    def finish(self, step: PendingStep | Pending) -> Pending:
        """Sample, write back to the request table, and start the copy to the host."""
        if not isinstance(step, PendingStep):
            return step
        output = self._finish(step)
        return output if step.decodes is None else JoinedOutput(step.decodes, output)

    # -- launched one by one -----------------------------------------------------------------------------

    def _begin(self, plan: StepPlan, needs: SamplerNeeds) -> PendingStep:
        view = self._prepare(plan)
        return PendingStep(plan=plan, view=view, hidden=self._forward.hidden(view), needs=needs)

    def _prepare(self, plan: StepPlan) -> StepView:
        return self._buffers.prepare(plan, self._requests, self._tables)

    @torch.inference_mode()
    def _finish(self, step: PendingStep) -> PendingOutput:
        sampled = self._sample(step.hidden, step.view, step.needs)
        tokens, num_sampled = self._write_back(step.view, sampled)
        return PendingOutput(
            step.plan, tokens=tokens, num_sampled=num_sampled, logprobs=sampled.logprobs, stream=self._copies
        )

    def _sample(self, hidden: Tensor, view: StepView, needs: SamplerNeeds) -> SamplerOutput:
        if self._own_sampler and needs.only_argmax:
            token_ids = self._forward.greedy(hidden, view)
            if token_ids is not None:
                return SamplerOutput(token_ids, None)
        logits = self._forward.logits(hidden, view)
        if not self._own_sampler:
            logits = logits.float()  # an adapter's is promised that
        # The token after the last computed one: its position is the length after this step.
        output: SamplerOutput = self._sampler(logits, view.rows, view.seq_lens.long(), needs)
        return output

    def _write_back(self, view: StepView, sampled: SamplerOutput) -> tuple[Tensor, Tensor]:
        """The tokens, [num_reqs, 1] int64, and how many of them each request has gained, [num_reqs] int32."""
        tokens, num_sampled = self._update(view, sampled)
        self._state.after_sample(view, num_sampled)
        return tokens, num_sampled

    def _update(self, view: StepView, sampled: SamplerOutput) -> tuple[Tensor, Tensor]:
        requests, tokens = self._requests, sampled.token_ids[:, None]
        num_sampled = torch.empty_like(view.rows)
        update_after_sample(
            rows=view.rows,
            seq_lens=view.seq_lens,
            sampled=tokens,
            num_candidates=self._ones[: view.num_reqs],
            all_token_ids=requests.table.all_token_ids,
            total_len=requests.table.total_len,
            num_computed=requests.table.num_computed,
            active=requests.active,
            len_limit=requests.len_limit,
            stop_token_ids=requests.stop_token_ids,
            num_sampled=num_sampled,
        )
        return tokens, num_sampled

    # -- replayed ----------------------------------------------------------------------------------------

    def _needs(self, plan: StepPlan) -> SamplerNeeds:
        needs = self._sampling.needs(plan.rows_np)
        return replace(needs, processed=True) if self._processors.wanted(plan.rows_np) else needs

    def _needs_of(self, part: StepPlan, whole: SamplerNeeds) -> SamplerNeeds:
        """Of both parts of a step as many log-probabilities, so that their outputs can be joined."""
        return replace(self._needs(part), num_logprobs=whole.num_logprobs)

    def _replay(self, graphs: StepGraphs, plan: StepPlan, needs: SamplerNeeds) -> Pending | None:
        """Run decodes, or prompts, to their end. None: nothing has been launched, they have to run eagerly."""
        if graphs.due:
            graphs.capture_next()
        tier = tier_of(needs) if self._own_sampler else None
        replay: Callable[[], Captured | None] | None
        if plan.num_decodes:
            replay = graphs.find(plan.num_reqs, plan.max_seq_len, tier)
        else:
            replay = graphs.find_prompts(plan.num_reqs, plan.num_tokens, plan.max_seq_len, tier)
        if replay is None:
            return None
        slot = self._ring.next_slot()
        self._buffers.send(plan, slot)
        left = replay()
        if left is None:
            return self._ring.begun(plan, slot)
        return self._finish(PendingStep(plan=plan, view=left.view, hidden=left.hidden, needs=needs))

    @torch.inference_mode()
    def _launch(self, key: GraphKey) -> Captured | None:
        """All that a graph holds. What is computed on the host here is the same in each of its steps."""
        view = self._gather(key)
        hidden = self._forward.hidden(view)
        if key.sampler is None:
            return Captured(view, hidden)
        self._report(*self._write_back(view, self._sample(hidden, view, key.sampler)))
        return None

    def _report(self, tokens: Tensor, num_sampled: Tensor) -> None:
        """To where the host reads it."""
        report_sampled(sampled=tokens, num_sampled=num_sampled, slot=self._buffers.note, out=self._ring.slots)

    def _gather(self, key: GraphKey) -> StepView:
        decodes, longest = (0, key.num_tokens) if key.num_tokens else (key.num_reqs, 1)
        sizes = {"num_reqs": key.num_reqs, "num_tokens": key.num_tokens or decodes, "max_seq_len": key.max_seq_len}
        self._buffers.gather(self._buffers.batch, self._requests, self._tables, **sizes)
        return self._buffers.view(self._requests, **sizes, num_decodes=decodes, max_query_len=longest)


def _within(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Ascending, and none larger than a step can be: an adapter's plan may be the same for engines of any size."""
    return tuple(sorted({min(size, most) for size in sizes if size > 0}))
