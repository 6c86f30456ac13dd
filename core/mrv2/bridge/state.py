"""The adapter's `ModelState` driven by vLLM's life-cycle calls.

vLLM calls, in a step: `remove_request` (of finished and preempted requests, then of every new one, with an id it may
never have seen), `add_request`, `apply_staged_writes` (only when something was added), `preprocess_state`,
`prepare_attn`, `prepare_inputs`, the forward, `postprocess_state`. Profiling runs call `prepare_inputs` alone, and
graph capture `prepare_dummy_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.model_states.default import DefaultModelState as VllmModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from mrv2.attn.groups import KVGroup
from mrv2.bridge.checks import check_graphs, check_native_only, check_stages
from mrv2.bridge.groups import bound_caches, kv_groups
from mrv2.bridge.processors import HostedProcessors, attach
from mrv2.bridge.request import request_data
from mrv2.bridge.view import Views
from mrv2.layers.vllm.caches import CacheBuilder, RequestState
from mrv2.model_state.base import ModelState
from mrv2.model_state.default import DefaultModelState
from mrv2.sample.processors import LogitsProcessor, Processors
from mrv2.state.plan import StepPlan
from mrv2.state.view import Limits, StepView


class BridgeMixin:
    """In front of one of vLLM's states; `ours` is the adapter's."""

    mrv2_state_class: ClassVar[type[ModelState]]
    mrv2_processors: ClassVar[tuple[type[LogitsProcessor], ...]]

    def __init__(self, vllm_config: Any, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        own = self.mrv2_state_class
        check_native_only(own)
        check_stages(own, vllm_config.parallel_config.pipeline_parallel_size)
        self.limits = Limits(
            max_rows=vllm_config.scheduler_config.max_num_seqs,
            max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
            device=device,
            dtype=vllm_config.model_config.dtype,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        self.ours = own(model, self.limits, ())
        check_graphs(self.ours, vllm_config)
        self._views = Views(self.limits)
        self._rows: dict[str, int] = {}  # of requests that `ours` knows
        self._dirty = False  # something was staged and not yet flushed
        self._table: Any = None  # vLLM's request table, from its sampler or the first call of `prepare_inputs`
        self._late: Callable[[], None] | None = None  # what waits for the table
        self._unseen = False  # a real step whose view `before_forward` hasn't had
        self._view: StepView | None = None  # of the last real step
        self._step = 0
        self._changed: tuple[list[tuple[int, str]], list[tuple[int, Any]]] = ([], [])
        self._processors: HostedProcessors | None = None  # on the last pipeline stage, if the adapter has any
        self._plain = _adds_nothing(own, self.ours)
        self._asks_after = own.after_sample is not ModelState.after_sample

    # -- host side ---------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A new request, or one that comes back after a preemption, perhaps in another row."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        request = request_data(new_req_data, max_model_len=self.limits.max_model_len)
        self._rows[request.req_id] = req_index
        self._dirty = True
        self._changed[1].append((req_index, request))
        self.ours.add_request(req_index, request)
        if self._processors is not None:
            self._processors.stage(req_index, request)

    def remove_request(self, req_id: str) -> None:
        """Given is the id alone, and every new request's before it adds it."""
        super().remove_request(req_id)  # type: ignore[misc]
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._dirty = True
            self._changed[0].append((row, req_id))
            self.ours.remove_request(row, req_id)

    def apply_staged_writes(self) -> None:
        """Those of vLLM; ours are flushed with the step that they are for, after `stage_step`."""
        super().apply_staged_writes()  # type: ignore[misc]

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """The caches exist now, and the groups are known."""
        if isinstance(self, MambaHybridModelState):
            layers = self.vllm_config.compilation_config.static_forward_context.values()
            if not any(isinstance(layer, RequestState) for layer in layers):
                self._align_mode = False  # a pipeline stage without states: vLLM would look for one
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        self._bind(kv_cache_config)

    # -- device side -------------------------------------------------------------------------------------

    def preprocess_state(self, input_batch: Any, block_tables: Any, *args: Any, **kwargs: Any) -> None:
        """Only of real steps, and the first call of one: host work is staged and flushed here."""
        if not self._plain:
            self._stage(input_batch)
            self._unseen = True
            if self._table is not None:
                self._begin(self._views.step(input_batch, self._table, block_tables=tuple(block_tables)))
        super().preprocess_state(input_batch, block_tables, *args, **kwargs)  # type: ignore[misc]

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Metadata as vLLM builds it. Builders of adapters' caches get what vLLM doesn't tell them."""
        if not self._groups:  # 0.26 has no call for it
            self._bind(kv_cache_config)
        builders = [
            (i, builder)
            for i, group in enumerate(attn_groups)
            for one in group
            if isinstance(builder := one.get_metadata_builder(0), CacheBuilder)
        ]
        if not self._plain:
            view = partial(self._views.step, block_tables=tuple(block_tables), slot_mappings=slot_mappings)
            self._late = partial(self._attend, lambda: view(input_batch, self._table), builders)
            for _, builder in builders:
                builder.extras = {}  # the metadata's too, so that `_attend` may come after it is built
            if self._table is not None:
                self._run_late()
        if self.vllm_config.num_speculative_tokens and isinstance(self, MambaHybridModelState):
            self._tell_accepted(input_batch, [b for _, b in builders if b.states])
        return super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, *args, **kwargs
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Inputs of vLLM, and the parts'."""
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        self._table = req_states
        if self._plain:
            return inputs
        if self._unseen:  # the first step of all, where no sampler and no profiling run came before it
            self._run_late()
        view = self._view
        if view is None or view.num_tokens != input_batch.num_tokens_after_padding:  # a profiling run
            view = self._views.step(input_batch, req_states)
        return inputs | self.ours.prepare_inputs(view)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The same addresses with neutral values, for capture."""
        inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)  # type: ignore[misc]
        return inputs | self.ours.prepare_dummy_inputs(num_reqs, num_tokens)

    def postprocess_state(self, idx_mapping: Tensor, num_sampled: Any, *args: Any, **kwargs: Any) -> None:
        """After write-back; `num_sampled` is 0 where a step sampled nothing."""
        super().postprocess_state(idx_mapping, num_sampled, *args, **kwargs)  # type: ignore[misc]
        view = self._view
        if not self._asks_after or view is None or len(idx_mapping) > view.num_reqs:
            return
        if isinstance(num_sampled, int):
            num_sampled = torch.full((len(idx_mapping),), num_sampled, dtype=torch.int32, device=self.limits.device)
        padding = view.num_reqs - len(num_sampled)
        self.ours.after_sample(view, torch.nn.functional.pad(num_sampled.int(), (0, padding)))

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """The adapter's wrapper around vLLM's sampler; None: it has none. Only on the last pipeline stage."""
        self._table = sampler.req_states
        made = Processors(self.mrv2_processors, self.limits)
        self._processors = attach(made, sampler, self._views.table, self.vllm_config)
        own = self.ours.custom_sampler(sampler)
        default: tuple[Any, Any] | None = super().custom_sampler(sampler)  # type: ignore[misc]
        return default if own is sampler else (own, None)

    # -- own ---------------------------------------------------------------------------------------------

    def _bind(self, kv_cache_config: Any) -> None:
        """Tell the adapter's state its groups and caches."""
        layers = self.vllm_config.compilation_config.static_forward_context
        self.ours.groups = self._groups = kv_groups(kv_cache_config, layers)
        self.ours.bind_kv_cache(bound_caches(kv_cache_config, layers))

    def _begin(self, view: StepView) -> None:
        """The adapter's first look at a real step."""
        self._view, self._unseen = view, False
        self.ours.before_forward(view)

    def _attend(self, view: Callable[[], StepView], builders: list[tuple[int, CacheBuilder]]) -> None:
        """The adapter's metadata, of its groups' builders."""
        self._view = now = view()
        if self._unseen:
            self._begin(now)
        extras = self.ours.attn_extras(now)
        for i, builder in builders:
            builder.extras |= extras.get(self._groups[i].name, {}) if extras else {}

    def _run_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late()

    def _stage(self, batch: Any) -> None:
        """`stage_step`, then the flush."""
        lens = np.asarray(batch.num_scheduled_tokens[: batch.num_reqs], np.int32)
        longer = np.flatnonzero(lens != 1)
        removed, added = self._changed
        self._changed = ([], [])
        self._step += 1
        self.ours.stage_step(
            StepPlan(
                step_id=self._step,
                removed=tuple(removed),
                added=tuple(added),
                rows_np=np.asarray(batch.idx_mapping_np[: batch.num_reqs], np.int32),
                query_lens_np=lens,
                block_writes=(),
                num_decodes=int(longer[0]) if len(longer) else len(lens),
                num_tokens=batch.num_tokens,
                max_query_len=int(lens.max(initial=1)),
                max_seq_len=int(batch.seq_lens_cpu_upper_bound.max()),
            )
        )
        if self._dirty or type(self.ours).stage_step is not ModelState.stage_step:
            self.ours.apply_staged_writes()
            self._dirty = False

    def _tell_accepted(self, batch: Any, builders: list[CacheBuilder]) -> None:
        """Counts of accepted drafts, which vLLM hands to its own four builders alone."""
        if not builders:
            return
        drafts, lens = self.vllm_config.num_speculative_tokens, batch.num_scheduled_tokens
        prefilling = batch.is_prefilling_np
        runs_as_decode = getattr(batch, "prefill_runs_as_decode_np", None)
        if runs_as_decode is not None:
            prefilling = prefilling & ~runs_as_decode
        verify = torch.from_numpy(~prefilling & (lens > 0) & (lens <= drafts + 1)).to(self.limits.device)
        accepted = self.num_accepted_tokens_gpu[batch.idx_mapping]
        for builder in builders:
            builder.set_accepted(accepted, verify)

    vllm_config: Any
    num_accepted_tokens_gpu: Tensor
    _groups: tuple[KVGroup, ...] = ()


class PlainBridge(BridgeMixin, VllmModelState):
    """Of models of attention."""


class RecurrentBridge(BridgeMixin, MambaHybridModelState):
    """Of models that keep states per request, which vLLM's class moves between blocks."""


@cache
def bridged_state(
    own: type[ModelState], *, recurrent: bool, processors: tuple[type[LogitsProcessor], ...] = ()
) -> type:
    """The class that vLLM gets for the adapter's `own` and its logits processors."""
    base = RecurrentBridge if recurrent else PlainBridge
    facts = {"mrv2_state_class": own, "mrv2_processors": processors, "__module__": __name__}
    return type(f"{base.__name__}Of{own.__name__}", (base,), facts)


def _adds_nothing(own: type[ModelState], state: ModelState) -> bool:
    """Whether every step would do nothing: the default state without parts."""
    return own is DefaultModelState and not state.parts  # type: ignore[attr-defined]
