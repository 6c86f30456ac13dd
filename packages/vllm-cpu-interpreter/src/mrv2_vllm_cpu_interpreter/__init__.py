"""Model Runner V2 on a CPU: a Triton backend called "cpu" that never compiles, since the interpreter runs all kernels.

vLLM's CPU build uses Triton, and with it Model Runner V2, only if there is a backend of that name. Slow by design:
it is for tests of tiny models on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

DIST = "mrv2-vllm-cpu-interpreter"

_GPU_BUILD = re.compile(r"^(cuda|hip|rocm|xpu)\s*(?::[^=]*)?=\s*['\"]?([^'\"\s]+)", re.MULTILINE)


def gpu_build(version_file: str) -> str | None:
    """What PyTorch was built for, by the text of its `version.py`: `"cuda 12.8"`; None: for the CPU alone."""
    found = [(name, value) for name, value in _GPU_BUILD.findall(version_file) if value != "None"]
    return f"{found[0][0]} {found[0][1]}" if found else None


def refuse_gpu_build() -> None:
    """Stop here if PyTorch can use a GPU: with this package every Triton kernel would run in the interpreter.

    Raises:
        ImportError: PyTorch is a GPU build. It isn't imported to find out.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    build = gpu_build((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    if build is not None:
        raise ImportError(
            f"{DIST} is installed beside a GPU build of PyTorch ({build}), and would make all Triton kernels run in "
            f"the interpreter. Uninstall it: pip uninstall {DIST}"
        )


refuse_gpu_build()
os.environ.setdefault("TRITON_INTERPRET", "1")
