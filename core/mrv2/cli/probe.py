"""Importing an adapter in a process of its own, with a deadline: whatever it does, the caller goes on.

`doctor` and `show` start probes; the same module is what runs in the child (`python -m mrv2.cli.probe`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.errors import AdapterImportError, AdapterTimeoutError, Mrv2Error, all_error_classes

if TYPE_CHECKING:
    from mrv2.adapter import LoadedAdapter
    from mrv2.entry import AdapterEntry

STATE_METHODS = (
    "add_request",
    "remove_request",
    "get_mm_embeddings",
    "prepare_inputs",
    "prepare_attn",
    "prepare_dummy_inputs",
)
"""The methods that vLLM's own `ModelState` has too, by which adapters mostly differ."""

AT_ONCE = 4
"""Probes that run at the same time."""

GRACE_S = 20.0
"""What a child gets beyond its own limits, to start and to report."""


# ---- parent ------------------------------------------------------------------------------------------------


def probe(
    entries: Sequence[AdapterEntry], adapters: Sequence[str], timeout_s: float
) -> Iterator[dict[str, Any] | Mrv2Error]:
    """What each adapter turned out to be, or its error, in the order of `entries`."""
    for start in range(0, len(entries), AT_ONCE):
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(_Child(e, adapters, timeout_s)) for e in entries[start : start + AT_ONCE]]
            yield from [child.result() for child in running]


class _Child:
    """One probing process; leaving the context ends it and whatever it started."""

    def __init__(self, entry: AdapterEntry, adapters: Sequence[str], timeout_s: float) -> None:
        self._entry = entry
        self._timeout_s = 2 * timeout_s + GRACE_S  # import and hooks are bounded by timeout_s each
        self._folder = tempfile.TemporaryDirectory(prefix="mrv2-probe-")
        folder = Path(self._folder.name)
        self._report = folder / "report.json"
        self._log = folder / "log"
        job = {"name": entry.name, "dist": entry.dist, "adapters": list(adapters), "report": str(self._report)}
        # -P and PYTHONPATH: the child sees the modules this process sees, and no others.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrv2.cli.probe", json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._deadline = time.monotonic() + self._timeout_s

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def result(self) -> dict[str, Any] | Mrv2Error:
        """Wait for the report."""
        where = self._entry.where
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return AdapterTimeoutError(
                f"the process that imported {self._entry.entry_point} gave no answer within {self._timeout_s:g} s",
                where=where,
                fix="uninstall the adapter, or raise MRV2_IMPORT_TIMEOUT",
            )
        try:
            report: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log = self._log.read_text(encoding="utf-8", errors="replace").strip()
            last = f": {log.splitlines()[-1]}" if log else ""
            return AdapterImportError(
                f"the process that imported {self._entry.entry_point} died with {ended}{last}",
                where=where,
                fix=f"python -X faulthandler -c 'import {self._entry.entry_point.partition(':')[0]}'",
            )
        return _rebuild(report["error"]) if report["error"] else report


def _rebuild(error: dict[str, str]) -> Mrv2Error:
    cls = next((c for c in all_error_classes() if c.code == error["code"]), None)
    if cls is None:  # an adapter's own, whose class this process doesn't have
        cls = type("AdapterError", (Mrv2Error,), {"code": error["code"], "title": error["title"]})
    return cls(error["what"], where=error["where"], fix=error["fix"])


# ---- child -------------------------------------------------------------------------------------------------


def inspect_adapter(adapter: LoadedAdapter) -> dict[str, Any]:
    """Ask the hooks that choose classes, for each architecture, without a checkpoint.

    Raises:
        HookResultError: a hook answers wrongly.
    """
    from mrv2.context import AdapterContext
    from mrv2.hookspecs import HOOKS
    from mrv2.loading import source_of

    models = []
    for architecture in adapter.manifest.architectures if adapter.manifest.kind == "model" else ():
        ctx = AdapterContext(architecture=architecture)
        model = adapter.model_class(ctx)
        state = adapter.model_state_class(ctx) or _default_state()
        models.append(
            {
                "architecture": architecture,
                "model": _name(model),
                "source": source_of(model),
                "parts": [{"class": _name(p), "source": source_of(p)} for p in getattr(model, "parts", ())],
                "state": _name(state),
                "methods": {name: _supplier(state, name) for name in STATE_METHODS},
                "vllm_class": _vllm_class(adapter, architecture),
            }
        )
    return {"hooks": {hook: adapter.hook_source(hook) for hook in HOOKS}, "models": models}


def _vllm_class(adapter: LoadedAdapter, architecture: str) -> str | None:
    """The class of vLLM's that the adapter wants to run there instead of its own model."""
    from mrv2.context import AdapterContext

    how = adapter.vllm(AdapterContext(architecture=architecture, host="vllm"))
    return None if how is None else how.architecture


def _default_state() -> type:
    # Imports torch, so only once the model class has been found good.
    from mrv2.model_state.default import DefaultModelState

    return DefaultModelState


def _supplier(state: type, method: str) -> dict[str, str]:
    from mrv2.loading import source_of

    owner = next(c for c in state.__mro__ if method in vars(c))
    return {"by": f"{_name(owner)}.{method}", "source": source_of(vars(owner)[method])}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _child(job: dict[str, Any]) -> dict[str, Any]:
    from mrv2.loading import bounded
    from mrv2.registry import Registry

    try:
        registry = Registry.discover(adapters=job["adapters"])
        entry = next(e for e in registry.entries if (e.name, e.dist) == (job["name"], job["dist"]))
        adapter = registry.load(entry)
        found = bounded(
            lambda: inspect_adapter(adapter),
            registry.settings.import_timeout_s,
            doing=f"calling the hooks of {entry.name}",
            where=entry.where,
        )
    except Mrv2Error as error:
        return {"error": error.to_dict()}
    return {"error": None, **found}


def main() -> None:
    """Probe one adapter and write the report; leave without waiting for threads that hang."""
    job = json.loads(sys.argv[1])
    Path(job["report"]).write_text(json.dumps(_child(job)), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
