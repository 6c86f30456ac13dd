"""An adapter's logits processors (`mrv2_logits_processors`): the interface, and the step between logits and draw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from mrv2.api import RequestData
from mrv2.model_state.default import take_options
from mrv2.sample.sampler import SamplerOutput, top_logprobs
from mrv2.sample.states import SamplerNeeds
from mrv2.state.view import Limits, TableView


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsView:
    """What the rows of logits belong to; their order changes from step to step."""

    rows: Tensor  # [n] int32; -1 for padding
    positions: Tensor  # [n] int64, the position that the new token will have: as many tokens come before it
    table: TableView  # columns by row; tokens before the new one are `all_token_ids[row, :position]`


class LogitsProcessor(ABC):
    """Changes logits after penalties and before temperature. One instance per runner, in both hosts.

    Rows are used again: `add_request` sets everything that is kept for one. What requests without a wish for this
    processor sample must not change. Log-probabilities that are reported stay the model's own.
    """

    options: ClassVar[type[BaseModel] | None] = None
    """The entries of `SamplingParams.extra_args` that it reads, as a model that validates them."""

    @abstractmethod
    def __init__(self, limits: Limits) -> None:
        """Allocate what is kept per row, once."""

    @abstractmethod
    def add_request(self, row: int, request: RequestData) -> bool:
        """Stage everything kept for `row`. False: logits of this request stay as they are."""

    def flush(self) -> None:  # noqa: B027
        """Bring staged values to the device, in one go."""

    @abstractmethod
    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Change `logits` [n, vocab] float32 in place. Device code only: no host reads.

        Rows of requests that `add_request` said False of are among them.
        """


class Processors:
    """The processors of one runner.

    Args:
        classes: from the hook, in order.
        limits: of the runner.
    """

    def __init__(self, classes: Sequence[type[LogitsProcessor]], limits: Limits) -> None:
        self.made = tuple(kind(limits) for kind in classes)
        self._wanted_np = np.zeros(limits.max_rows, bool)

    def __bool__(self) -> bool:
        return bool(self.made)

    def add_request(self, row: int, request: RequestData) -> bool:
        """Whether some processor changes this request's logits."""
        if not self.made:
            return False
        wanted = [one.add_request(row, request) for one in self.made]  # all of them, whatever the first says
        self._wanted_np[row] = any(wanted)
        return any(wanted)

    def flush(self) -> None:
        """Of all."""
        for one in self.made:
            one.flush()

    def wanted(self, rows_np: NDArray[np.int32]) -> bool:
        """Whether some request of a batch wants one."""
        return bool(self.made) and bool(self._wanted_np[rows_np].any())

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        """Processed logits, float32. The given ones are not changed."""
        changed = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        for one in self.made:
            one.apply(changed, view)
        return changed

    def check_options(self, rest: Callable[[Mapping[str, Any]], None], extra_args: Mapping[str, Any]) -> None:
        """Validate what the processors read; what they don't know goes to `rest`.

        Raises:
            RequestError: naming the option.
        """
        left = dict(extra_args)
        for one in self.made:
            left = take_options(one, extra_args, left)
        rest(left)

    def around(self, sampler: Any, table: TableView) -> Any:
        """`sampler` with the processors in front of it; itself, if there are none."""
        return ProcessedSampler(self, sampler, table) if self.made else sampler


class ProcessedSampler:
    """A sampler that gets processed logits, where a batch wants them."""

    def __init__(self, processors: Processors, sampler: Any, table: TableView) -> None:
        self._processors = processors
        self._sampler = sampler
        self._table = table

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplerNeeds) -> SamplerOutput:
        """As `Sampler`; log-probabilities are those before processing."""
        if not needs.processed:
            plain: SamplerOutput = self._sampler(logits, rows, positions, needs)
            return plain
        view = LogitsView(rows=rows, positions=positions, table=self._table)
        changed = self._processors.apply(logits, view)
        output: SamplerOutput = self._sampler(changed, rows, positions, replace(needs, num_logprobs=None))
        if needs.num_logprobs is None:
            return output
        return SamplerOutput(output.token_ids, top_logprobs(logits.float(), output.token_ids, needs.num_logprobs))
