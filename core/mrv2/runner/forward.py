"""The model part of a step: device side of `ModelState`, forward, logits. Shared by both runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mrv2.attn.backend import select_backend
from mrv2.attn.groups import BoundCache, KVGroup
from mrv2.kernels.compile_ahead import only_compiling
from mrv2.layers.context import NativeContext
from mrv2.layers.each_kind import run_each_kind
from mrv2.layers.one_token import one_token_for
from mrv2.model_state.base import ModelState
from mrv2.sample.processors import LogitsProcessor, Processors
from mrv2.state.block_copies import BlockCopier
from mrv2.state.plan import BlockCopies
from mrv2.state.view import AttnMetadata, StepView


class ForwardPass:
    """A built model with its state and caches.

    Args:
        model: built from the native layer set, weights loaded.
        state: its `ModelState`.
        groups: KV groups, in the order of `StepView.block_tables`.
        caches: layer name to its cache.
        pages: the tensors behind the caches, [num_blocks, page_bytes] uint8.
        processors: the adapter's own, of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        groups: Sequence[KVGroup],
        *,
        caches: Mapping[str, BoundCache],
        pages: Sequence[Tensor],
        processors: Sequence[type[LogitsProcessor]] = (),
    ) -> None:
        self.model = model
        self.state = state
        self.processors = Processors(processors, state.limits)
        self._caches = caches
        self._group_of = {name: group.name for group in groups for name in group.layers}
        self._backend = select_backend(state.limits.device)
        self._one_token = one_token_for(self._backend)
        self.pages = tuple(pages)
        self._copier = BlockCopier(self.pages, state.limits.device)
        state.bind_kv_cache(caches)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Do the plan's copies between blocks; the first thing in a step that touches the cache."""
        self._copier.run(copies)

    def check_options(self, extra_args: Mapping[str, Any]) -> None:
        """The adapter's check of a request's options: its processors', then its state's."""
        self.processors.check_options(self.state.check_options, extra_args)

    def metadata(self, view: StepView) -> AttnMetadata:
        """Attention metadata of the step."""
        return self.state.prepare_attn(view)

    def hidden(self, view: StepView) -> Tensor:
        """Run the model; [num_tokens, hidden]."""
        ctx = self._context(view)
        inputs = self.state.prepare_inputs(view)
        hidden: Tensor = self.model(view.input_ids, view.positions, ctx, **inputs)
        return hidden

    def compile_layers(self, view: StepView) -> None:
        """Have the kernels compiled that the model's layers launch in a step like this; nothing else happens."""
        ctx = self._context(view)
        with only_compiling():
            run_each_kind(self.model, view.positions, ctx)

    def _context(self, view: StepView) -> NativeContext:
        self.state.before_forward(view)
        return NativeContext(
            attn=self.metadata(view),
            caches=self._caches,
            group_of=self._group_of,
            backend=self._backend,
            one_token=self._one_token,
            prompt_lens=lambda: view.table.prompt_len[view.rows.clamp(min=0).long()],
        )

    def logits(self, hidden: Tensor, view: StepView) -> Tensor:
        """Logits of each request's last token, [num_reqs, vocab] in the model's dtype."""
        logits: Tensor = self.model.lm_head(_last(hidden, view))  # type: ignore[operator]
        return logits

    def greedy(self, hidden: Tensor, view: StepView) -> Tensor | None:
        """The most likely next tokens, [num_reqs] int64, where the head has them without all logits."""
        greedy: Callable[[Tensor], Tensor | None] | None = getattr(self.model.lm_head, "greedy", None)
        return None if greedy is None or view.num_reqs > 1 else greedy(_last(hidden, view))


def _last(hidden: Tensor, view: StepView) -> Tensor:
    """Hidden states of each request's last token, [num_reqs, hidden]: of decodes, as they are."""
    return hidden[: view.num_reqs] if view.num_decodes == view.num_reqs else hidden[view.logits_indices]
