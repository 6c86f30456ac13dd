"""`InputPart`: one extra model input, its persistent buffer, and both ways it is filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import BaseModel
from torch import Tensor

from mrv2.api import RequestData
from mrv2.state.view import Limits, StepView


class InputPart(ABC):
    """One keyword of the model's `forward`, owned together with the buffer behind it.

    `fill` and `fill_dummy` return slices of the same buffer, so a graph captured with dummies replays with
    real data. Host-side methods stage; only `flush` touches the device.
    """

    key: ClassVar[str]
    """Name of the keyword in `forward` and in `prepare_inputs`."""

    options: ClassVar[type[BaseModel] | None] = None
    """The entries of `SamplingParams.extra_args` that this part reads, as a model that validates them."""

    @abstractmethod
    def __init__(self, limits: Limits) -> None:
        """Allocate every buffer, once, for the largest step in `limits`."""

    def add_request(self, row: int, request: RequestData) -> None:  # noqa: B027 - most parts keep no row state
        """Stage everything this part keeps for `row`; the row may hold another request's values."""

    def remove_request(self, row: int, req_id: str) -> None:  # noqa: B027
        """Forget `row`. Unknown ids are legal."""

    def flush(self) -> None:  # noqa: B027
        """Bring staged values to the device, in one go."""

    @abstractmethod
    def fill(self, view: StepView) -> Tensor:
        """This step's value, a slice of the persistent buffer. Device code only: no host reads."""

    @abstractmethod
    def fill_dummy(self, num_reqs: int, num_tokens: int) -> Tensor:
        """A neutral value of the same shape, dtype and address as `fill` for these padded sizes."""
