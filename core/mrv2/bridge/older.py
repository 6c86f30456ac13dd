"""What vLLM 0.26 asks of a class with states, which later releases ask otherwise (`HostMixin`)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

from mrv2.errors import UnsupportedError
from mrv2.layers.vllm.caches import RequestState, state_layout

ONE_LAYOUT = not hasattr(MambaBase, "bind_kv_cache")
"""Whether this release takes all states of a model to be alike."""


class OlderHost:
    """Beside `HostMixin`, whose `get_mamba_specs_from_config` and `mrv2_built` it reads."""

    get_mamba_specs_from_config: Any
    mrv2_built: Any

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Of the largest state: attention's pages are made as large, and smaller states' padded."""
        shapes: tuple[tuple[int, ...], ...] = cls._largest(vllm_config).shapes
        return shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Beside the shapes."""
        dtypes: tuple[torch.dtype, ...] = cls._largest(vllm_config).dtypes
        return dtypes

    def get_mamba_state_copy_func(self) -> tuple[Any, ...]:
        """How prefix caching copies a state: every tensor as a whole."""
        state = next(handle for handle in self.mrv2_built.caches if isinstance(handle, RequestState))
        return (get_temporal_copy_spec,) * len(state_layout(state.local))

    @classmethod
    def _largest(cls, vllm_config: Any) -> Any:
        return max(cls.get_mamba_specs_from_config(vllm_config), key=lambda spec: spec.page_size_bytes)


def check_states(vllm_config: Any, states: list[RequestState]) -> None:
    """States of several layouts can't be kept for prefixes.

    Raises:
        UnsupportedError: they would have to be.
    """
    layouts = {tuple(state_layout(state.local)) for state in states}
    if ONE_LAYOUT and len(layouts) > 1 and vllm_config.cache_config.mamba_cache_mode == "align":
        raise UnsupportedError(
            f"prefix caching with states of {len(layouts)} layouts, which this vLLM takes to be alike",
            where="enable_prefix_caching",
            fix="turn it off, or take vLLM 0.32",
        )
