"""`mrv2 doctor`."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from mrv2.cli.options import Adapters, Json, OptionalName

if TYPE_CHECKING:
    from mrv2.entry import AdapterEntry
    from mrv2.errors import Mrv2Error
    from mrv2.registry import Registry


def command(name: OptionalName = None, json: Json = False, adapter: Adapters = None) -> int:
    """Check adapters; exit code 1 when one is broken."""
    from mrv2.api import SDK_API
    from mrv2.cli.output import print_json
    from mrv2.registry import Registry
    from mrv2.version import __version__

    registry = Registry.discover(adapters=adapter or ())
    entries = [e for e in registry.entries if name is None or e.is_called(name)]
    if not entries and name is not None:
        registry.get(name)  # raises, naming those that exist
    results = list(zip(entries, _examine(registry, entries, adapter or []), strict=True))
    general = _general(registry, entries, whole=name is None)
    problems = len(general) + sum(error is not None for _, error in results)
    if json:
        print_json(
            {
                "version": __version__,
                "sdk_api": str(SDK_API),
                "python": platform.python_version(),
                "adapters": [_describe(entry, error) for entry, error in results],
                "general": [error.to_dict() for error in general],
                "problems": problems,
            }
        )
    else:
        print(f"mrv2 {__version__}, SDK API {SDK_API}, Python {platform.python_version()}")
        _print(results, general, changes=name is not None)
        print(f"problems: {problems}; adapters: {len(entries)}")
    return 1 if problems else 0


def _examine(registry: Registry, entries: list[AdapterEntry], adapters: list[str]) -> list[Mrv2Error | None]:
    """Each adapter's error, after importing those that got so far, each in its own process."""
    from mrv2.cli.probe import probe
    from mrv2.errors import Mrv2Error

    sound = [e for e in entries if e.error is None]
    reports = iter(probe(sound, adapters, registry.settings.import_timeout_s))
    found: list[Mrv2Error | None] = []
    for entry in entries:
        if entry.error is not None:
            found.append(entry.error)
            continue
        report = next(reports)
        found.append(report if isinstance(report, Mrv2Error) else None)
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


def _describe(entry: AdapterEntry, error: Mrv2Error | None) -> dict[str, Any]:
    from mrv2.cli.list import describe

    return describe(entry) | {"error": error.to_dict() if error else None, "changes": _changes(entry)}


def _print(results: list[tuple[AdapterEntry, Mrv2Error | None]], general: list[Mrv2Error], *, changes: bool) -> None:
    from mrv2.cli.output import indent

    for entry, error in results:
        claims = ", ".join(entry.architectures) or "nothing readable"
        print(f"{entry.label}: {'ok' if error is None else 'broken'}; claims {claims}")
        if error is not None:
            print(indent(str(error)))
        if changes and entry.manifest is not None:
            news = _changes(entry)
            print(indent(f"written for SDK API {entry.manifest.sdk_api}; changed since: {'' if news else 'nothing'}"))
            print("".join(f"    {line}\n" for line in news), end="")
    for error in general:
        print(error)
