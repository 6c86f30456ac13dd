"""Torch's settings, which are the process's and no adapter's: another model there would compute otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mrv2.testing.results import ConformanceFailure

Settings = Mapping[str, object]


def torch_settings() -> Settings:
    """All that models are computed by, and that one line anywhere changes for every model."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 matmuls": torch.get_float32_matmul_precision(),
        "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
        "benchmark of cuDNN": torch.backends.cudnn.benchmark,
    }


def require_unchanged(before: Settings, after: Settings, *, by: str) -> None:
    """Refuse a change.

    Args:
        before: what is compared.
        after: the same, and perhaps more.
        by: what ran meanwhile.

    Raises:
        ConformanceFailure: naming the setting, and both values.
    """
    changed = [f"{key}: {value}, and then {after[key]}" for key, value in before.items() if after[key] != value]
    if changed:
        raise ConformanceFailure(
            f"torch's settings before and after {by}",
            "; ".join(changed),
            ["they were set for this model's sake: give dtype and device to each call, and a torch.Generator"],
        )
