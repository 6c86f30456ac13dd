"""Two faults of Triton 3.9's interpreter that vLLM's kernels meet, put right when vLLM loads its plugins."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mrv2_vllm_cpu_interpreter import speed

_MARK = "mrv2_patched"


def apply() -> None:
    """Patch the interpreter and vLLM; may be called again."""
    cast_masks()
    filter_without_triton()
    speed.apply()


def cast_masks() -> None:
    """Masks computed by `&` of integers stay integers in the interpreter, and loads and stores take bools alone.

    Met in vLLM's n-gram kernel.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)
        if not hasattr(original, _MARK):
            setattr(InterpreterBuilder, name, _with_bool_mask(original, position))


def _with_bool_mask(original: Any, position: int) -> Any:
    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[position] if len(args) > position else kwargs["mask"]
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return original(self, *args, **kwargs)

    setattr(patched, _MARK, True)
    return patched


def filter_without_triton() -> None:
    """The top-k/top-p kernel of vLLM calls `.to()` on a loop variable, which the interpreter gives as a Python integer.

    Its PyTorch implementation of the same filter takes over.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    # Every caller goes through this module's `apply_top_k_top_p`, which looks the name up here.
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
