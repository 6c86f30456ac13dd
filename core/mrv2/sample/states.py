"""Sampling parameters as columns, read through the row mapping, and what a batch needs of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.api import RequestData
from mrv2.sample.params import MIN_TEMPERATURE
from mrv2.state.columns import MirroredColumn, numpy_dtype
from mrv2.state.view import Limits


@dataclass(frozen=True, slots=True)
class SamplerNeeds:
    """Which operations a batch needs; host knowledge that chooses code, never results."""

    random: bool
    min_p: bool
    top_k: bool
    top_p: bool
    num_ranks: int  # how many of the most likely tokens top-k leaves at most; 0: all, for some request
    num_logprobs: int | None  # most that any request asked for; None: nobody did
    processed: bool = False  # an adapter's own processors have something to do

    @property
    def only_argmax(self) -> bool:
        """Whether the most likely tokens are all that is wanted."""
        return not self.random and self.num_logprobs is None and not self.processed


class SamplingStates:
    """A column per parameter, all of them in one: a request's parameters are one copy and one launch together.

    Attributes:
        seed: [max_rows] int64.
        temperature: [max_rows] float32; 0 is greedy.
        top_k: [max_rows] int32; 0 keeps all.
        top_p: [max_rows] float32; 1 keeps all.
        min_p: [max_rows] float32; 0 keeps all.
    """

    def __init__(self, limits: Limits) -> None:
        self._width = -(-limits.max_rows // 4) * 4  # each parameter begins at a multiple of 16 bytes
        self._all = MirroredColumn((6 * self._width,), dtype=torch.int32, device=limits.device)
        self.seed, self._seed_np = self._part(0, 2, torch.int64, limits.max_rows)
        self.temperature, self._temperature_np = self._part(2, 1, torch.float32, limits.max_rows)
        self.top_k, self._top_k_np = self._part(3, 1, torch.int32, limits.max_rows)
        self.top_p, self._top_p_np = self._part(4, 1, torch.float32, limits.max_rows)
        self.min_p, self._min_p_np = self._part(5, 1, torch.float32, limits.max_rows)
        self._logprobs_np = np.full(limits.max_rows, -1, np.int32)
        self._vocab_size = limits.vocab_size
        self._last: tuple[NDArray[np.int32], SamplerNeeds] | None = None  # what `needs` said, until a row changes

    def _part(self, start: int, words: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, NDArray[Any]]:
        """One parameter, of so many words a row, on the device and on the host."""
        cut = slice(start * self._width, (start + words) * self._width)
        return self._all.device_tensor[cut].view(dtype)[:rows], self._all.np[cut].view(numpy_dtype(dtype))[:rows]

    def add_request(self, row: int, request: RequestData) -> None:
        """Stage all parameters of `row`."""
        self._last = None
        params = request.sampling
        greedy = params.temperature < MIN_TEMPERATURE
        self._temperature_np[row] = 0.0 if greedy else params.temperature
        # A filter changes nothing for a greedy request: it must not make its batch sort.
        self._top_k_np[row] = 0 if greedy or params.top_k >= self._vocab_size else params.top_k
        self._top_p_np[row] = 1.0 if greedy else params.top_p
        self._min_p_np[row] = 0.0 if greedy else params.min_p
        self._seed_np[row] = request.seed
        self._logprobs_np[row] = -1 if params.logprobs is None else params.logprobs
        self._all.mark([2 * row, 2 * row + 1, *range(2 * self._width + row, 6 * self._width, self._width)])

    def flush(self) -> None:
        """Bring staged values to the device."""
        self._all.flush()

    def needs(self, rows_np: NDArray[np.int32]) -> SamplerNeeds:
        """What the batch of `rows_np` needs. Asked for the same array again, it doesn't look again."""
        if self._last is None or self._last[0] is not rows_np:
            self._last = rows_np, self._needs(rows_np)
        return self._last[1]

    def _needs(self, rows_np: NDArray[np.int32]) -> SamplerNeeds:
        logprobs = int(self._logprobs_np[rows_np].max(initial=-1))
        num_logprobs = None if logprobs < 0 else logprobs
        drawn_np = rows_np[self._temperature_np[rows_np] > 0]
        if not len(drawn_np):
            return SamplerNeeds(False, False, False, False, 0, num_logprobs)
        top_k_np = self._top_k_np[drawn_np]
        return SamplerNeeds(
            random=True,
            min_p=bool((self._min_p_np[drawn_np] > 0).any()),
            top_k=bool(top_k_np.any()),
            top_p=bool((self._top_p_np[drawn_np] < 1).any()),
            num_ranks=int(top_k_np.max()) if top_k_np.all() else 0,
            num_logprobs=num_logprobs,
        )
