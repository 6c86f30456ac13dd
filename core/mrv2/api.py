"""The SDK's version and the plain data that crosses the contract. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pluggy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mrv2.sample.params import SamplingParams

PROJECT = "mrv2"
"""pluggy's project name."""

ENTRY_POINT_GROUP = "mrv2.adapters"

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks an adapter's hook implementation: `@mrv2.hookimpl`."""


class ApiVersion(NamedTuple):
    """Version of the adapter contract, apart from the package's version."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


SDK_API = ApiVersion(0, 1)
"""What this core offers. An adapter states in `adapter.toml` what it was written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestData:
    """One request as `ModelState.add_request` and the parts see it.

    A preempted request comes back as a new `RequestData`: `prefill_token_ids` then holds the prompt and
    what was generated before.
    """

    req_id: str  # unique among requests that haven't ended
    prompt_token_ids: NDArray[np.int32]  # [prompt_len]
    prefill_token_ids: NDArray[np.int32]  # [prefill_len], starts with the prompt
    num_computed_tokens: int  # tokens whose cache entries already exist (prefix-cache hit)
    sampling: SamplingParams  # as the caller gave it
    seed: int  # of its draws: the caller's, or one the engine drew
    len_limit: int  # total tokens (prompt + generated) at which the device stops it
    stop_token_ids: tuple[int, ...]  # the caller's and, unless ignored, the model's own end tokens


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What `mrv2_vllm` returns to run vLLM's own model class, with the adapter's state.

    The parts' keys have to be keywords of that class's `forward`. Weights are loaded by vLLM then, not by us.

    Args:
        architecture: the class's name in vLLM's registry.
    """

    architecture: str
