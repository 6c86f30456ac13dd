"""`mrv2 serve`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mrv2.cli.options import Adapters, Json

if TYPE_CHECKING:
    from mrv2.cli.vllm_install import VllmInstall
    from mrv2.entry import AdapterEntry
    from mrv2.loader.model import ModelLocation
    from mrv2.registry import Registry

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, GGUF file, hub id, or a bundled name: smollm2.")]
Options = Annotated[
    list[str] | None, typer.Argument(metavar="[-- VLLM_OPTIONS]", help="Everything after -- goes to `vllm serve`.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the command and what is set in its environment; start nothing.")
]

WHERE = "mrv2 serve"


def command(
    model: Model, options: Options = None, dry_run: DryRun = False, adapter: Adapters = None, json: Json = False
) -> None:
    """Serve a model with vLLM. With --json as with --dry-run, nothing is started."""
    from mrv2.cli.output import print_json
    from mrv2.cli.vllm_install import find_vllm, require_vllm
    from mrv2.registry import Registry

    install = find_vllm() if dry_run or json else require_vllm(WHERE)
    if install is not None:
        _check_environment(install)
    elif dry_run:
        print("vLLM isn't installed here: this is the command for a GPU, and no release was checked", file=sys.stderr)
    registry = Registry.discover(adapters=adapter or ())
    location, entry = _find(model, registry)
    words = _command(location, entry, options or [], install)
    added = _environment(registry, entry, os.environ)
    if json:
        about = {"model": str(location.path), "adapter": entry.label, "vllm": install and install.version}
        print_json(about | {"command": words, "environment": added})
        return
    shown = shlex.join([*(f"{name}={value}" for name, value in added.items()), *words])
    if dry_run:
        print(shown)
        return
    assert install is not None
    print(f"{location.name} by adapter {entry.label} in vLLM {install.version}:\n{shown}", file=sys.stderr, flush=True)
    # In place of this process, so that signals and a supervisor's look reach vLLM itself.
    os.execve(words[0], words, os.environ | added)


def _check_environment(install: VllmInstall) -> None:
    """What would keep vLLM from running any adapter, said in seconds and not after a model has been loaded."""
    from mrv2.bridge.environment import check_plugins
    from mrv2.cli.vllm_install import RUNNER, runner_is_old
    from mrv2.errors import VllmRunnerError

    check_plugins(os.environ)
    if runner_is_old(os.environ):
        raise VllmRunnerError(
            f"{RUNNER}={os.environ[RUNNER]} forces the old model runner, which knows no model state",
            where="environment",
            fix=f"unset {RUNNER}; mrv2 serve sets it to 1",
        )
    if not install.listed:
        from mrv2.bridge.versions import check_version

        check_version()  # imports vLLM


def _find(model: str, registry: Registry) -> tuple[ModelLocation, AdapterEntry]:
    """The checkpoint's folder and its adapter, which isn't imported here."""
    from mrv2.adapter import require
    from mrv2.config import checkpoint_architecture
    from mrv2.loader.model import resolve_model
    from mrv2.manifest import Capability

    location = resolve_model(model)
    entry = registry.find(checkpoint_architecture(location.path))
    if entry.error is not None:
        raise entry.error
    if location.from_gguf:  # converted before vLLM sees it, so it is the native host's ability
        require(Capability.GGUF, "native", entry, setting=f"the GGUF file behind {location.name}")
    return location, entry


def _command(location: ModelLocation, entry: AdapterEntry, argv: list[str], install: VllmInstall | None) -> list[str]:
    """The whole command line of vLLM."""
    from mrv2.bridge.names import PREFIX
    from mrv2.cli import vllm_options as options
    from mrv2.config import checkpoint_architecture

    given = options.read_options(argv)
    options.refuse_clashes(given)
    options.check_capabilities(given, entry)
    # This name is the adapter's whatever classes vLLM or other plug-ins have.
    words, overrides = options.merge_overrides(given, PREFIX + checkpoint_architecture(location.path))
    added = [options.HF_OVERRIDES, overrides]
    if location.kind != "folder" and options.last(given, "--served-model-name") is None:
        added += ["--served-model-name", location.name]
    if install is not None and install.cpu and options.last(given, "--dtype") is None:
        added += ["--dtype", "float32"]  # as `mrv2 generate` on a CPU
    added += options.switched_off(given, entry)
    # -P: a folder called vllm here must not stand in for the package.
    start = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    return [*start, str(location.path.resolve()), *added, *words]


def _environment(registry: Registry, entry: AdapterEntry, env: Mapping[str, str]) -> dict[str, str]:
    """What is set for vLLM and its processes; what the user has set stays."""
    from mrv2.cli.vllm_install import RUNNER

    wanted = {RUNNER: "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    added = {name: value for name, value in wanted.items() if not env.get(name)}
    if entry.dist:
        if entry in registry.chosen:
            choices = [f"{architecture}={entry.dist}" for architecture in entry.architectures]
            kept = [p for p in env.get("MRV2_PREFER", "").split(",") if p.partition("=")[0] not in entry.architectures]
            added["MRV2_PREFER"] = ",".join([*filter(None, kept), *choices])
    else:
        before = env.get("MRV2_LOCAL_ADAPTERS", "").split(os.pathsep)
        added["MRV2_LOCAL_ADAPTERS"] = os.pathsep.join([str(Path(entry.source).resolve()), *filter(None, before)])
    return added
