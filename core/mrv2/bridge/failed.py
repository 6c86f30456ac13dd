"""What vLLM gets in place of a class that can't be made: it passes vLLM's inspection, and raises when it is built.

Raised earlier, in the process that inspects classes, the error would be a line in a log above another error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def failed_class(error: Exception, name: str, module: str) -> type[nn.Module]:
    """A model class called `name` whose constructor raises `error`."""

    class Failed(nn.Module):
        mrv2_error = error

        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            raise self.mrv2_error

        def embed_input_ids(self, input_ids: Tensor) -> Tensor:
            raise self.mrv2_error

        def forward(self, input_ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
            raise self.mrv2_error

        def compute_logits(self, hidden_states: Tensor) -> Tensor:
            raise self.mrv2_error

    Failed.__name__ = Failed.__qualname__ = name
    Failed.__module__ = module
    return Failed
