"""What the real vLLM makes of every adapter here, asked in a process of its own: importing it takes many seconds.

`mrv2 doctor --vllm` starts it; the same module is what runs in the child (`python -m mrv2.cli.vllm_probe`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.errors import Mrv2Error, VllmProbeError

if TYPE_CHECKING:
    from mrv2.bridge.modules import Hosted

IMPORT_S = 180.0
"""What vLLM's own import may take, on a slow disk."""


# ---- parent ------------------------------------------------------------------------------------------------


def ask_vllm(broken: Collection[str], adapters: Sequence[str], timeout_s: float) -> dict[str, Any] | Mrv2Error:
    """What the child found, or why there is no answer.

    Args:
        broken: adapters that can't be loaded, by name and distribution (`name@dist`): they are only named.
        adapters: local ones.
        timeout_s: what the imports of adapters may take together.
    """
    with tempfile.TemporaryDirectory(prefix="mrv2-vllm-probe-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        job = {"broken": sorted(broken), "report": str(report)}
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "MRV2_LOCAL_ADAPTERS": os.pathsep.join(
                filter(None, [*adapters, os.environ.get("MRV2_LOCAL_ADAPTERS", "")])
            ),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-P", "-m", "mrv2.cli.vllm_probe", json.dumps(job)]
        with log.open("wb") as out:
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, timeout=IMPORT_S + timeout_s
                ).returncode
            except subprocess.TimeoutExpired:
                return _no_answer(f"gave no answer within {IMPORT_S + timeout_s:g} s", log)
        if not report.exists():
            return _no_answer(f"ended with exit code {code}", log)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _no_answer(how: str, log: Path) -> VllmProbeError:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return VllmProbeError(
        f"the process that asked vLLM {how}{said}", where="vLLM", fix="python -c 'import vllm.config'"
    )


# ---- child -------------------------------------------------------------------------------------------------


def examine(broken: Collection[str]) -> dict[str, Any]:
    """Everything that `doctor --vllm` shows, from the vLLM of this process."""
    from vllm.plugins import load_general_plugins

    from mrv2.bridge.plugin import find_hosted

    load_general_plugins()
    return {
        "platform": _platform(),
        "fingerprint": fingerprint(),
        "adapters": {f"{one.entry.name}@{one.entry.dist}": _adapter(one, broken) for one in find_hosted()},
    }


def _platform() -> dict[str, Any]:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    interpreted = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
    return {"device": current_platform.device_type, "triton": bool(HAS_TRITON), "interpreted": interpreted}


def fingerprint() -> dict[str, Any]:
    """The installed vLLM beside the table: which release it is compared with, and all members that differ."""
    from mrv2.bridge import versions

    version, here, table = versions.installed(), versions.signatures(), versions.table()

    def differences(listed: str) -> list[dict[str, str]]:
        there = table[listed]
        members = sorted(here.keys() | there.keys())
        pairs = [(m, here.get(m, "absent"), there.get(m, "absent")) for m in members]
        return [{"member": m, "here": a, "listed": b} for m, a, b in pairs if a != b]

    nearest = version if version in table else min(table, key=lambda listed: len(differences(listed)))
    return {
        "version": version,
        "listed": version in table,
        "compared_with": nearest,
        "differences": differences(nearest),
    }


def _adapter(hosted: Hosted, broken: Collection[str]) -> dict[str, Any]:
    """Names that vLLM has for one adapter, and what the first of each architecture is."""
    from vllm import ModelRegistry

    from mrv2.bridge.names import PREFIX, module_name

    module = module_name(hosted.entry)
    models = []
    for architecture in hosted.entry.architectures:
        names = [
            name
            for name in (architecture, PREFIX + architecture)
            if getattr(ModelRegistry.models.get(name), "module_name", None) == module
        ]
        about: dict[str, Any] = {"architecture": architecture, "names": names}
        if names and f"{hosted.entry.name}@{hosted.entry.dist}" not in broken:
            about |= _class(ModelRegistry.models[names[-1]].load_model_cls())
        models.append(about)
    return {"error": hosted.error.to_dict() if hosted.error else None, "models": models}


def _class(made: Any) -> dict[str, Any]:
    """Which model and state a registered class consists of, or the error it would raise."""
    error = getattr(made, "mrv2_error", None)
    if error is not None:
        shown = error.to_dict() if isinstance(error, Mrv2Error) else Mrv2Error(repr(error)).to_dict()
        return {"error": shown}
    from mrv2.bridge.theirs import TheirModelMixin

    theirs = issubclass(made, TheirModelMixin)
    model = made.__mro__[2] if theirs else made.mrv2_model
    state = made.mrv2_state.mrv2_state_class
    return {
        "error": None,
        "own_model": not theirs,
        "model": f"{model.__module__}.{model.__qualname__}",
        "state": f"{state.__module__}.{state.__qualname__}",
    }


def main() -> None:
    """Answer and leave, without waiting for threads."""
    job = json.loads(sys.argv[1])
    Path(job["report"]).write_text(json.dumps(examine(job["broken"])), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
