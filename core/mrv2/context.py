"""What an adapter's hooks are told. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Host = Literal["native", "vllm"]
"""Who runs the model: our own runner, or vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContext:
    """The one argument of every hook.

    Args:
        architecture: as the checkpoint's config names it, one of the manifest's `architectures`.
        model_type: as the checkpoint's config names it.
        host: who will run the model.
        path: the checkpoint's folder or file; None when there is none (a config made in a test).
        config: the loaded config object; None while `mrv2_config` is asked for its class.
        raw_config: `config.json` as written, before any class has interpreted it.
    """

    architecture: str
    model_type: str = ""
    host: Host = "native"
    path: Path | None = None
    config: Any = None
    raw_config: Mapping[str, Any] = field(default_factory=dict)
