"""What is kept per request beside the caches."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

import mrv2


class Options(BaseModel):
    """What a request may carry in `extra_args`."""

    model_config = ConfigDict(strict=True)
    gain: float = 0.0


class Gain(mrv2.InputPart):
    """Each token's request's gain, times one to three by position."""

    key = "gain"
    options = Options

    def __init__(self, limits: mrv2.Limits) -> None:
        self.by_row = mrv2.MirroredColumn((limits.max_rows,), dtype=torch.float32, device=limits.device)
        self.buffer = torch.zeros(limits.max_num_tokens, device=limits.device)

    def add_request(self, row: int, request: mrv2.RequestData) -> None:
        """Stage the row's gain."""
        self.by_row.set(row, Options.model_validate(request.sampling.extra_args).gain)

    def flush(self) -> None:
        """Bring it to the device."""
        self.by_row.flush()

    def fill(self, view: mrv2.StepView) -> Tensor:
        """[num_tokens], 0 for padding."""
        i = view.token_to_i.clamp(min=0).long()
        row = view.rows[i].clamp(min=0).long()
        value = self.by_row.device_tensor[row] * (view.positions % 3 + 1)
        return self.buffer[: view.num_tokens].copy_(torch.where(view.token_to_i >= 0, value, 0.0))

    def fill_dummy(self, num_reqs: int, num_tokens: int) -> Tensor:
        """[num_tokens] zeros."""
        return self.buffer[:num_tokens].zero_()


class HeronState(mrv2.DefaultModelState):
    """The parts are all there is."""
