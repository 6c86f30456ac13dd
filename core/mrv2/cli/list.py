"""`mrv2 list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2.cli.options import Adapters, Json

if TYPE_CHECKING:
    from mrv2.entry import AdapterEntry


def command(json: Json = False, adapter: Adapters = None) -> None:
    """List adapters; a broken one is listed with its error and what it claims to serve."""
    import sys

    from mrv2.api import SDK_API
    from mrv2.cli.output import print_json, print_table
    from mrv2.registry import Registry
    from mrv2.version import __version__

    registry = Registry.discover(adapters=adapter or ())
    entries, notices = registry.entries, registry.idle_preferences()
    if json:
        print_json(
            {
                "version": __version__,
                "sdk_api": str(SDK_API),
                "adapters": [describe(e) for e in entries],
                "notices": [notice.to_dict() for notice in notices],
            }
        )
        return
    for notice in notices:
        print(notice, file=sys.stderr)
    if not entries:
        print("no adapters are installed; `mrv2 catalog` lists known ones")
        return
    rows = [_row(e) for e in entries]
    print_table(("adapter", "distribution", "version", "api", "architectures", "checked", "state"), rows)


def describe(entry: AdapterEntry) -> dict[str, Any]:
    """An entry for `--json`."""
    manifest = entry.manifest
    return {
        "name": entry.name,
        "distribution": entry.dist or None,
        "version": entry.version,
        "entry_point": entry.entry_point,
        "source": entry.source,
        "manifest": entry.manifest_path or None,
        "kind": manifest.kind if manifest else None,
        "sdk_api": manifest.sdk_api if manifest else None,
        "architectures": list(entry.architectures),
        "model_types": list(manifest.model_types) if manifest else [],
        "drafts": manifest.drafts.model_dump() if manifest and manifest.drafts else None,
        "capabilities": {str(c): str(s) for c, s in manifest.capabilities.items()} if manifest else {},
        "owner": manifest.owner if manifest else None,
        "docs": manifest.docs if manifest else None,
        "conformance": _conformance(entry),
        "error": entry.error.to_dict() if entry.error else None,
    }


def _conformance(entry: AdapterEntry) -> dict[str, Any] | None:
    """What `conformance.json` says, and whether it still holds."""
    from mrv2.errors import RecordError
    from mrv2.testing.record import read_record, stale

    try:
        record = read_record(entry) if entry.manifest_path else None
        return None if record is None else {"levels": record["levels"], "stale": stale(entry, record) or None}
    except RecordError as error:
        return {"levels": {}, "stale": error.what}


def _row(entry: AdapterEntry) -> tuple[str, ...]:
    from mrv2.testing.record import standing

    state = "ok" if entry.error is None else f"{entry.error.code} {entry.error.title}"
    return (
        entry.name,
        entry.dist or entry.source,
        entry.version,
        entry.manifest.sdk_api if entry.manifest else "?",
        ", ".join(entry.architectures) or "?",
        (standing(entry) if entry.manifest_path else "") or "-",
        state,
    )
