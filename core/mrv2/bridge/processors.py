"""An adapter's logits processors as one of vLLM's, in its sampler's pipeline: before temperature, drafts excluded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mrv2.api import RequestData
from mrv2.errors import UnsupportedError
from mrv2.sample.processors import LogitsView, Processors
from mrv2.state.view import TableView


class HostedProcessors:
    """What vLLM's sampler calls. A request is known before the sampler hears of it, from the model's state.

    Args:
        processors: the adapter's, of this process.
        table: vLLM's request table with our names.
    """

    def __init__(self, processors: Processors, table: TableView) -> None:
        self._processors = processors
        self._table = table
        self._wanted: dict[int, bool] = {}

    def stage(self, row: int, request: RequestData) -> None:
        """A new request, or one that comes back after a preemption."""
        self._wanted[row] = self._processors.add_request(row, request)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether logits of this row have to be processed."""
        return self._wanted[req_idx]

    def apply_staged_writes(self) -> None:
        """Once per step, before the forward."""
        self._processors.flush()

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """In place: vLLM gives a float32 copy, of batches that want processing."""
        view = LogitsView(rows=ctx.expanded_idx_mapping.int(), positions=ctx.pos.long() + 1, table=self._table)
        for one in self._processors.made:
            one.apply(logits, view)
        return logits


def attach(
    processors: Processors, sampler: Any, table: Callable[[Any], TableView], config: Any
) -> HostedProcessors | None:
    """Put an adapter's processors at the end of those of vLLM's `sampler`; None: there are none.

    Raises:
        UnsupportedError: this release's runner takes none, or tokens are drafted: a processor sees the tokens before
            the one that is drawn, and drafts aren't in the request table.
    """
    if not processors:
        return None
    pipeline = getattr(sampler, "logits_processors", None)
    if pipeline is None:
        raise UnsupportedError(
            "logits processors, which Model Runner V2 of this vLLM has no place for",
            where="mrv2_logits_processors",
            fix="use vLLM 0.32 or later, or return none for host vllm",
        )
    if config.speculative_config is not None:
        raise UnsupportedError(
            "logits processors of an adapter, and drafts", where="speculative_config", fix="do without one of them"
        )
    hosted = HostedProcessors(processors, table(sampler.req_states))
    pipeline.append(hosted)
    return hosted
