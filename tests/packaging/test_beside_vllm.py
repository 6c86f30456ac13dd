"""Our requirements let every version stay that a supported vLLM brings. With the resolver: test_installing.py."""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

BROUGHT = {
    "0.26.0": {"torch": ["2.11.0"], "triton": ["3.6.0"], "transformers": ["5.5.3", "5.24.0"], "tokenizers": ["0.22.0"]},
    "0.32.0": {"torch": ["2.13.0"], "transformers": ["5.16.1", "5.19.0"], "tokenizers": ["0.23.2"]},
    "0.33.0": {"torch": ["2.14.0"], "transformers": ["5.16.1", "5.20.2"], "tokenizers": ["0.23.2"]},
}
"""Lowest and highest of what each requires, or of what came out by now where it names no highest. transformers of the
lowest takes tokenizers from 0.22 on."""
ALL = {"pydantic": ["2.12.0"], "safetensors": ["0.6.2"]}
"""Required alike by all."""


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {r.name: r.specifier for r in map(Requirement, project["dependencies"])}


@pytest.mark.parametrize("release", BROUGHT)
def test_what_vllm_brings_may_stay(release):
    ours = requirements()
    for name, versions in (ALL | BROUGHT[release]).items():
        for version in versions:
            assert version in ours[name], f"{name} {version} of vLLM {release}, and we require {ours[name]}"


def test_every_supported_release_is_checked():
    listed = json.loads((ROOT / "core" / "mrv2" / "bridge" / "versions.json").read_text())
    assert set(listed) == set(BROUGHT)
