"""Which device a model runs on, and code that has to see it as the current one."""

from __future__ import annotations

import contextlib

import torch

from mrv2.errors import UnsupportedError


def choose_device(name: str) -> torch.device:
    """The device that `name` means. A GPU comes with its index: "cuda" means the calling thread's current one.

    Raises:
        UnsupportedError: torch doesn't know it, or it isn't there.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device {name!r} is unknown", where="device", fix="use cpu, cuda or cuda:0") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        fix = f"use cuda:0 to cuda:{count - 1}" if count else "use --device cpu"
        raise UnsupportedError(f"device {name!r} is not available here", where="device", fix=fix)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one of this thread: streams, events and kernel launches go by that, not by tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
