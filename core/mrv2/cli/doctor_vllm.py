"""The vLLM host in `mrv2 doctor`: what is installed, what keeps it from running adapters, and what it makes of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mrv2.bridge.environment import check_plugins
from mrv2.bridge.names import PREFIX
from mrv2.cli.vllm_install import INSTALL, RUNNER, find_vllm, require_vllm, runner_is_old
from mrv2.errors import Mrv2Error, VllmProbeError, VllmRunnerError, VllmVersionError
from mrv2.manifest import Capability

if TYPE_CHECKING:
    from mrv2.entry import AdapterEntry

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHost:
    """What is known about the vLLM of this environment.

    Args:
        about: for `--json` and printing.
        problems: what keeps it from running adapters, whichever.
        adapters: by `name@dist`, what vLLM itself says; None: it wasn't asked.
    """

    about: dict[str, Any]
    problems: tuple[Mrv2Error, ...]
    adapters: Mapping[str, Any] | None = None


def look(env: Mapping[str, str] = os.environ) -> VllmHost:
    """Metadata and environment alone."""
    install = find_vllm()
    if install is None:
        return VllmHost(about={"installed": False}, problems=())
    about: dict[str, Any] = {
        "installed": True,
        "version": install.version,
        "cpu": install.cpu,
        "listed": install.listed,
    }
    problems: list[Mrv2Error] = []
    try:
        check_plugins(env)
    except Mrv2Error as error:
        problems.append(error)
    about["plugin_enabled"] = not problems
    if runner_is_old(env):
        problems.append(
            VllmRunnerError(f"{RUNNER}={env[RUNNER]} forces the old model runner", where="environment", fix="unset it")
        )
    return VllmHost(about=about, problems=tuple(problems))


def ask(broken: Sequence[AdapterEntry], local: Sequence[str], timeout_s: float) -> VllmHost:
    """Metadata, environment, and vLLM itself.

    Raises:
        MissingExtraError: there is none.
    """
    from mrv2.cli.vllm_probe import ask_vllm

    require_vllm("mrv2 doctor --vllm")
    host = look()
    found = ask_vllm({key(entry) for entry in broken}, local, timeout_s)
    if isinstance(found, Mrv2Error):
        return VllmHost(about=host.about, problems=(*host.problems, found))
    problems = [*host.problems, *_unusable(found)]
    about = host.about | {"platform": found["platform"], "fingerprint": found["fingerprint"]}
    return VllmHost(about=about, problems=tuple(problems), adapters=found["adapters"])


def _unusable(found: Report) -> list[Mrv2Error]:
    """A vLLM that differs, or has nothing to run kernels with."""
    problems: list[Mrv2Error] = []
    differences, compared = found["fingerprint"]["differences"], found["fingerprint"]["compared_with"]
    if differences:
        listed = "".join(f"\n    {d['member']}: {d['here']}, in {compared}: {d['listed']}" for d in differences)
        problems.append(
            VllmVersionError(
                f"vLLM {found['fingerprint']['version']} differs from {compared} in what mrv2 touches:{listed}",
                where="vLLM",
                fix="install a listed vLLM, or a newer mrv2",
            )
        )
    if not found["platform"]["triton"]:
        on_cpu = found["platform"]["device"] == "cpu"
        problems.append(
            VllmProbeError(
                "vLLM finds no usable Triton, which Model Runner V2 needs",
                where=f"vLLM on {found['platform']['device'] or 'an unknown device'}",
                fix="for tests on a CPU: pip install mrv2-vllm-cpu-interpreter" if on_cpu else "pip install triton",
            )
        )
    return problems


def key(entry: AdapterEntry) -> str:
    """An adapter in the report."""
    return f"{entry.name}@{entry.dist}"


def in_vllm(entry: AdapterEntry, host: VllmHost, probed: Report | None) -> dict[str, Any]:
    """What vLLM would do for one adapter: as vLLM says, or where it wasn't asked, as the adapter's own answers imply.

    Args:
        entry: the adapter.
        host: see there.
        probed: what the adapter's hooks said; None: it is broken.
    """
    manifest = entry.manifest
    support = {c: manifest.support(c) for c in Capability} if manifest else {}
    capabilities = {
        "offered": [c.value for c, s in support.items() if s.on("vllm")],
        "native_only": [c.value for c, s in support.items() if s == "native"],
    }
    if host.adapters is not None and key(entry) in host.adapters:
        return {**capabilities, **host.adapters[key(entry)]}
    models = [
        {
            "architecture": model["architecture"],
            "names": [PREFIX + model["architecture"]],
            "own_model": model["vllm_class"] is None,
            "model": model["vllm_class"] or model["model"],
            "state": model["state"],
            "error": None,
        }
        for model in (probed or {}).get("models", ())
    ]
    return capabilities | {"models": models, "error": None}


def errors_of(about: Report) -> list[Report]:
    """Everything that is wrong with an adapter in vLLM alone."""
    found = [about["error"], *(model.get("error") for model in about["models"])]
    return [e for i, e in enumerate(found) if e is not None and e not in found[:i]]


# -- printing --------------------------------------------------------------------------------------------------


def host_lines(host: VllmHost, *, asked: bool) -> list[str]:
    """The paragraph about vLLM."""
    about = host.about
    if not about["installed"]:
        return [f"vLLM: not installed; {INSTALL}"]
    build = ", CPU build" if about["cpu"] else ""
    listed = "a listed release" if about["listed"] else "not a listed release"
    lines = [
        f"vLLM: {about['version']}{build}, {listed}; plug-in {'enabled' if about['plugin_enabled'] else 'left out'}"
    ]
    if "platform" in about:
        platform, compared = about["platform"], about["fingerprint"]
        kernels = "interpreted, for tests only" if platform["interpreted"] else "compiled"
        triton = f"Triton kernels {kernels}" if platform["triton"] else "no usable Triton"
        same = len(compared["differences"]) or "none"
        lines.append(f"  device {platform['device']}, {triton}; members that differ: {same}")
    elif not asked:
        lines.append("  not asked; `mrv2 doctor --vllm` compares its signatures and builds each adapter's class")
    return lines


def adapter_lines(about: Report) -> list[str]:
    """The lines under an adapter."""
    lines = []
    for model in about["models"]:
        names = " and ".join(model["names"]) or "not registered"
        if "model" in model:
            whose = "own model" if model["own_model"] else "vLLM's class"
            lines.append(f"  in vLLM: {names}: {whose} {model['model']}, state {model['state']}")
        else:
            lines.append(f"  in vLLM: {names}")
    if about["models"]:
        lines.append(f"  in vLLM: offers {', '.join(about['offered']) or 'no capability'}")
    if about["models"] and about["native_only"]:
        lines.append(f"  native host only: {', '.join(about['native_only'])}")
    return lines
