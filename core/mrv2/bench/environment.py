"""Where and how something was measured: for the head of every result."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Command, date, card and versions."""
    cuda = device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "versions": versions | ({"driver": driver_version()} if cuda else {}),
    }


def driver_version() -> str:
    """Of the GPU, as its tool says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"
