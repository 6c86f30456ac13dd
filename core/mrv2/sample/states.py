"""Sampling parameters as columns, read through the row mapping, and what a batch needs of the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.api import RequestData
from mrv2.sample.params import MIN_TEMPERATURE
from mrv2.state.columns import MirroredColumn
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
    """One mirrored column per parameter."""

    def __init__(self, limits: Limits) -> None:
        rows, device = (limits.max_rows,), limits.device
        self._temperature = MirroredColumn(rows, dtype=torch.float32, device=device)
        self._top_k = MirroredColumn(rows, dtype=torch.int32, device=device)
        self._top_p = MirroredColumn(rows, dtype=torch.float32, device=device)
        self._min_p = MirroredColumn(rows, dtype=torch.float32, device=device)
        self._seed = MirroredColumn(rows, dtype=torch.int64, device=device)
        self._logprobs_np = np.full(rows, -1, np.int32)
        self._vocab_size = limits.vocab_size

    def add_request(self, row: int, request: RequestData) -> None:
        """Stage all parameters of `row`."""
        params = request.sampling
        greedy = params.temperature < MIN_TEMPERATURE
        self._temperature.set(row, 0.0 if greedy else params.temperature)
        # A filter changes nothing for a greedy request: it must not make its batch sort.
        self._top_k.set(row, 0 if greedy or params.top_k >= self._vocab_size else params.top_k)
        self._top_p.set(row, 1.0 if greedy else params.top_p)
        self._min_p.set(row, 0.0 if greedy else params.min_p)
        self._seed.set(row, request.seed)
        self._logprobs_np[row] = -1 if params.logprobs is None else params.logprobs

    def flush(self) -> None:
        """Bring staged values to the device."""
        for column in (self._temperature, self._top_k, self._top_p, self._min_p, self._seed):
            column.flush()

    def needs(self, rows_np: NDArray[np.int32]) -> SamplerNeeds:
        """What the batch of `rows_np` needs."""
        logprobs = int(self._logprobs_np[rows_np].max(initial=-1))
        num_logprobs = None if logprobs < 0 else logprobs
        drawn_np = rows_np[self._temperature.np[rows_np] > 0]
        if not len(drawn_np):
            return SamplerNeeds(False, False, False, False, 0, num_logprobs)
        top_k_np = self._top_k.np[drawn_np]
        return SamplerNeeds(
            random=True,
            min_p=bool((self._min_p.np[drawn_np] > 0).any()),
            top_k=bool(top_k_np.any()),
            top_p=bool((self._top_p.np[drawn_np] < 1).any()),
            num_ranks=int(top_k_np.max()) if top_k_np.all() else 0,
            num_logprobs=num_logprobs,
        )

    @property
    def temperature(self) -> Tensor:
        """[max_rows] float32; 0 is greedy."""
        return self._temperature.device_tensor

    @property
    def top_k(self) -> Tensor:
        """[max_rows] int32; 0 keeps all."""
        return self._top_k.device_tensor

    @property
    def top_p(self) -> Tensor:
        """[max_rows] float32; 1 keeps all."""
        return self._top_p.device_tensor

    @property
    def min_p(self) -> Tensor:
        """[max_rows] float32; 0 keeps all."""
        return self._min_p.device_tensor

    @property
    def seed(self) -> Tensor:
        """[max_rows] int64."""
        return self._seed.device_tensor
