"""The driver: active wherever Triton interprets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Says what Triton asks a device; nothing is ever launched through it."""

    @staticmethod
    def is_active() -> bool:
        """Whether kernels are interpreted."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is compiled."""
        raise NotImplementedError("the interpreter compiles nothing")

    def get_current_target(self) -> GPUTarget:
        """A target that no compiler of Triton knows."""
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_active_torch_device(self) -> Any:
        """PyTorch's CPU."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """PyTorch's counterpart of `torch.cuda`."""
        import torch

        return torch.cpu

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Times one call per quantile, in milliseconds: autotuning an interpreter is pointless."""

        def benchmark(call: Callable[[], object], *, quantiles: Sequence[float], **_: object) -> list[float]:
            start = time.perf_counter()
            call()
            return [1e3 * (time.perf_counter() - start)] * len(quantiles)

        return benchmark
