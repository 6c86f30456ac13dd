"""The compiler that is never asked to compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpreterBackend(BaseBackend):
    """Claims the target "cpu"."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Only that of `InterpreterDriver`."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Identifies the backend in Triton's cache."""
        return "mrv2-vllm-cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Compiling starts here, so this is where it ends."""
        raise NotImplementedError("kernels run in Triton's interpreter; TRITON_INTERPRET was changed after its import")

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        """There are none."""

    def load_dialects(self, context: object) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Device functions have no other implementation here."""
        return {}
