"""Static: what can be known of an adapter without weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mrv2.adapter import require
from mrv2.attn.groups import AttentionCache
from mrv2.attn.specs import PerRequest
from mrv2.context import AdapterContext
from mrv2.errors import ModelBuildError, Mrv2Error
from mrv2.layers.native import check_names, check_recurrent
from mrv2.loading import describe, raised_at
from mrv2.manifest import Capability, Support
from mrv2.testing.results import ConformanceFailure, Level, check
from mrv2.testing.subject import Case, Subject
from mrv2.testing.torch_settings import require_unchanged, torch_settings

PUBLIC = re.compile(r"mrv2(\.(layers|kernels|testing)(\..*)?)?")
"""All of this package that an adapter may import."""

HOSTS = ("vllm",)
"""Hosts, which a model file must not know."""


@check(Level.STATIC, whole=True)
def hooks(subject: Subject) -> None:
    """The manifest is valid, the package imports, and its hooks give classes for every architecture (M2).

    The message names the hook, file and line. `mrv2 doctor NAME` says the same, and more about the environment.
    """
    for host in ("native", "vllm"):
        for architecture in subject.adapter.manifest.architectures:
            ctx = AdapterContext(architecture=architecture, host=host)
            subject.adapter.model_class(ctx)
            subject.adapter.model_state_class(ctx)
            subject.adapter.vllm(ctx)


@check(Level.STATIC, whole=True)
def imports(subject: Subject) -> None:
    """The package imports nothing but the public part of mrv2, and no host.

    What isn't public changes without notice, and what names a host doesn't run in the other one. Use `mrv2`,
    `mrv2.layers`, `mrv2.kernels` and, in tests, `mrv2.testing`; tell us what is missing there.
    """
    for file in source_files(subject):
        for module, line in _imports(_parsed(file)):
            foreign = module.partition(".")[0] in HOSTS
            if foreign or (module.partition(".")[0] == "mrv2" and not PUBLIC.fullmatch(module)):
                raise ConformanceFailure(
                    "imports of the adapter's package with what adapters may import",
                    f"{file}:{line}: imports {module}",
                    ["a host's code was called from the model" if foreign else "a private module of mrv2 was used"],
                )


def source_files(subject: Subject) -> list[Path]:
    """The adapter's own Python files, its tests left out."""
    entry = subject.entry
    path = Path(entry.manifest_path or entry.source)
    files = [path] if path.suffix == ".py" else sorted(path.parent.rglob("*.py"))
    return [f for f in files if f.is_file() and "tests" not in f.relative_to(path.parent).parts]


def _parsed(file: Path) -> ast.AST:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConformanceFailure(
            "imports of the adapter's package with what adapters may import",
            f"{file}{line}: {describe(error)}",
            ["a file that nothing imports: delete it, or correct it"],
        ) from error


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


@check(Level.STATIC, whole=True)
def settings_of_torch(subject: Subject) -> None:
    """Importing the package changes no setting of torch.

    They are the process's: its other models would compute otherwise, and so would the suites.
    """
    before = subject.settings_before
    require_unchanged(before, torch_settings(), by="the adapter was imported and asked for its target")


@check(Level.STATIC)
def builds(case: Case) -> None:
    """The model is built from its config, and every layer is stored under the name it was given (M1, C7).

    LoRA, quantisation, caches and checkpoints go by names. Pass `L.scope(attribute)` to sub-modules, and an
    attribute's own name to the layer that is stored in it. `recurrent` says whether a layer keeps a state per request.
    """
    try:
        model, layers = case.build()
    except Mrv2Error:
        raise
    except Exception as error:
        raise ModelBuildError(
            f"{describe(error)}, raised at {raised_at(error.__traceback__)}",
            where=f"config {case.name!r} of {case.subject.entry.label}",
            fix="correct the named line, or the config",
        ) from error
    check_names(model, layers)
    check_recurrent(model, layers)


@check(Level.STATIC)
def uses_what_it_declares(case: Case) -> None:
    """What the model's layers use is declared in `adapter.toml` (C7, O2).

    Hosts refuse what isn't declared. Add the capability with the hosts that have it.
    """
    _, layers = case.build()
    entry, specs = case.subject.entry, layers.caches
    hosts = [h for h in ("native", "vllm") if h == "native" or _serves_vllm(case.subject)]
    for host in hosts:
        for name, spec in specs.items():
            if isinstance(spec, PerRequest):
                require(Capability.RECURRENT, host, entry, setting=f"the state of {name}")  # type: ignore[arg-type]
            if isinstance(spec, AttentionCache) and spec.window is not None:
                setting = f"the window of {name}"
                require(Capability.SLIDING_WINDOW, host, entry, setting=setting)  # type: ignore[arg-type]


def _serves_vllm(subject: Subject) -> bool:
    """Whether anything is declared for it."""
    return any(s in (Support.VLLM, Support.BOTH) for s in subject.adapter.manifest.capabilities.values())
