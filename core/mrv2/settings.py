"""What the environment says about adapters. Read in one place, so that every variable has one meaning."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mrv2.errors import SettingError

IMPORT_TIMEOUT_S = 60.0
"""Longest time an adapter's import may take: a cold import of torch from a slow disk fits, a hang doesn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables of the registry.

    Args:
        allowlist: `MRV2_ADAPTERS`, distribution names separated by commas; None: all installed ones.
        prefer: `MRV2_PREFER`, `Architecture=adapter` pairs separated by commas: which adapter serves an
            architecture (or model type) that several claim.
        catalogs: `MRV2_CATALOG`, JSON files separated as in `PATH`.
        import_timeout_s: `MRV2_IMPORT_TIMEOUT`, seconds.
        local_adapters: `MRV2_LOCAL_ADAPTERS`, files and folders separated as in `PATH`. Read inside vLLM only, where
            there is no command line of ours to name them.
    """

    allowlist: tuple[str, ...] | None = None
    prefer: Mapping[str, str] = field(default_factory=dict)
    catalogs: tuple[Path, ...] = ()
    import_timeout_s: float = IMPORT_TIMEOUT_S
    local_adapters: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Parse `env`, by default this process's environment. An empty variable counts as unset.

        Raises:
            SettingError: a value can't be understood; the message names the variable.
        """
        env = os.environ if env is None else env
        return cls(
            allowlist=split_names(env.get("MRV2_ADAPTERS")),
            prefer=_parse_prefer(env.get("MRV2_PREFER", "")),
            catalogs=tuple(Path(p) for p in env.get("MRV2_CATALOG", "").split(os.pathsep) if p),
            import_timeout_s=_parse_seconds(env.get("MRV2_IMPORT_TIMEOUT", "")),
            local_adapters=tuple(p for p in env.get("MRV2_LOCAL_ADAPTERS", "").split(os.pathsep) if p),
        )


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None when there are none."""
    names = tuple(n.strip() for n in (text or "").split(",") if n.strip())
    return names or None


def _parse_prefer(text: str) -> dict[str, str]:
    prefer: dict[str, str] = {}
    for item in split_names(text) or ():
        architecture, equals, name = (part.strip() for part in item.partition("="))
        if not (architecture and equals and name):
            raise SettingError(
                f"{item!r} is not of the form Architecture=adapter",
                where=f"MRV2_PREFER={text!r}",
                fix="for example MRV2_PREFER=AcmeForCausalLM=acme",
            )
        if prefer.setdefault(architecture, name) != name:
            raise SettingError(
                f"{architecture} is given to both {prefer[architecture]!r} and {name!r}",
                where=f"MRV2_PREFER={text!r}",
                fix="keep one of them",
            )
    return prefer


def _parse_seconds(text: str) -> float:
    if not text:
        return IMPORT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise SettingError(
            f"{text!r} is not a positive number of seconds",
            where="MRV2_IMPORT_TIMEOUT",
            fix=f"set it to a number such as 120, or unset it for {IMPORT_TIMEOUT_S:g}",
        )
    return seconds
