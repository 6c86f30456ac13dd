"""`mrv2 doctor`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Adapters, Json, OptionalName

if TYPE_CHECKING:
    from mrv2.cli.doctor_vllm import VllmHost
    from mrv2.entry import AdapterEntry
    from mrv2.errors import Mrv2Error
    from mrv2.registry import Registry


Vllm = Annotated[
    bool, typer.Option("--vllm", help="Ask the installed vLLM too: its signatures, and each adapter's class in it.")
]

Result = tuple["AdapterEntry", "Mrv2Error | None", Mapping[str, Any]]
"""An adapter, its error, and what vLLM would do for it."""


def command(name: OptionalName = None, vllm: Vllm = False, json: Json = False, adapter: Adapters = None) -> int:
    """Check adapters; exit code 1 when one is broken."""
    from mrv2.api import SDK_API
    from mrv2.cli.doctor_vllm import errors_of
    from mrv2.cli.output import print_json
    from mrv2.registry import Registry
    from mrv2.version import __version__

    registry = Registry.discover(adapters=adapter or ())
    entries = [e for e in registry.entries if name is None or e.is_called(name)]
    if not entries and name is not None:
        registry.get(name)  # raises, naming those that exist
    reports = _examine(registry, entries, adapter or [])
    host = _vllm(registry, reports, vllm=vllm)
    results = _results(reports, host)
    general = [*_general(registry, entries, whole=name is None), *(host.problems if vllm else ())]
    broken = sum(error is not None or (vllm and bool(errors_of(about))) for _, error, about in results)
    problems = len(general) + broken
    if json:
        print_json(
            {
                "version": __version__,
                "sdk_api": str(SDK_API),
                "python": platform.python_version(),
                "vllm": host.about | {"problems": [error.to_dict() for error in host.problems]},
                "adapters": [_describe(*result) for result in results],
                "general": [error.to_dict() for error in general],
                "problems": problems,
            }
        )
    else:
        print(f"mrv2 {__version__}, SDK API {SDK_API}, Python {platform.python_version()}")
        _print(results, general, host, changes=name is not None, asked=vllm)
        print(f"problems: {problems}; adapters: {len(entries)}")
    return 1 if problems else 0


def _examine(
    registry: Registry, entries: list[AdapterEntry], adapters: list[str]
) -> list[tuple[AdapterEntry, Mapping[str, Any] | Mrv2Error]]:
    """Each adapter's error, or its answers after importing those that got so far, each in its own process."""
    from mrv2.cli.probe import probe

    sound = [e for e in entries if e.error is None]
    answers = iter(probe(sound, adapters, registry.settings.import_timeout_s))
    return [(entry, entry.error or next(answers)) for entry in entries]


def _vllm(
    registry: Registry, reports: list[tuple[AdapterEntry, Mapping[str, Any] | Mrv2Error]], *, vllm: bool
) -> VllmHost:
    """What can be known without importing vLLM, or what it says itself."""
    from mrv2.cli.doctor_vllm import ask, look

    if not vllm:
        return look()
    sound = {e.source + e.name for e, report in reports if isinstance(report, Mapping)}
    broken = [e for e in registry.entries if e.source + e.name not in sound]  # and those that weren't looked at
    local = [e.source for e in registry.chosen if not e.dist]
    return ask(broken, local, registry.settings.import_timeout_s * max(1, len(sound)))


def _results(reports: list[tuple[AdapterEntry, Mapping[str, Any] | Mrv2Error]], host: VllmHost) -> list[Result]:
    from mrv2.cli.doctor_vllm import in_vllm
    from mrv2.errors import Mrv2Error

    found: list[Result] = []
    for entry, report in reports:
        error = report if isinstance(report, Mrv2Error) else None
        found.append((entry, error, in_vllm(entry, host, None if isinstance(report, Mrv2Error) else report)))
    return found


def _general(registry: Registry, entries: list[AdapterEntry], *, whole: bool) -> list[Mrv2Error]:
    """What is wrong with no single adapter."""
    from mrv2.catalog import read_catalogs
    from mrv2.errors import CatalogError

    found: list[Mrv2Error] = [
        *registry.conflicts(among=entries),
        *registry.idle_preferences(among=None if whole else entries),
    ]
    if whole:
        try:
            read_catalogs(registry.settings.catalogs)
        except CatalogError as error:
            found.append(error)
    return found


def _changes(entry: AdapterEntry) -> list[str]:
    from mrv2.cli.changes import changes_since

    return list(changes_since(entry.manifest.api)) if entry.manifest else []


def _describe(entry: AdapterEntry, error: Mrv2Error | None, vllm: Mapping[str, Any]) -> dict[str, Any]:
    from mrv2.cli.list import describe

    about = describe(entry) | {"error": error.to_dict() if error else None}
    return about | {"changes": _changes(entry), "vllm": vllm}


def _print(results: list[Result], general: list[Mrv2Error], host: VllmHost, *, changes: bool, asked: bool) -> None:
    from mrv2.cli.doctor_vllm import adapter_lines, errors_of, host_lines
    from mrv2.cli.output import indent

    print("\n".join(host_lines(host, asked=asked)))
    for entry, error, vllm in results:
        claims = ", ".join(entry.architectures) or "nothing readable"
        print(f"{entry.label}: {'ok' if error is None else 'broken'}; claims {claims}")
        if error is not None:
            print(indent(str(error)))
        else:
            print("".join(f"{line}\n" for line in adapter_lines(vllm)), end="")
        for found in errors_of(vllm):
            print(f"  in vLLM: {found['code']} {found['title']}: {found['what']}\n    fix: {found['fix']}")
        if changes and entry.manifest is not None:
            news = _changes(entry)
            print(indent(f"written for SDK API {entry.manifest.sdk_api}; changed since: {'' if news else 'nothing'}"))
            print("".join(f"    {line}\n" for line in news), end="")
    for problem in general if asked else [*general, *host.problems]:
        print(problem)
