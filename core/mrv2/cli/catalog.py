"""`mrv2 catalog`."""

from __future__ import annotations

from mrv2.cli.options import Json


def command(json: Json = False) -> None:
    """List what the catalogues know."""
    from mrv2.catalog import read_catalogs
    from mrv2.cli.output import print_json, print_table
    from mrv2.registry import Registry
    from mrv2.settings import Settings

    known = read_catalogs(Settings.from_env().catalogs)
    installed = {e.name for e in Registry.discover().entries}
    if json:
        print_json({"catalog": [e.model_dump() for e in known], "installed": sorted(installed)})
        return
    rows = [
        (
            e.adapter,
            "yes" if e.adapter in installed else "no",
            e.models or "-",
            ", ".join(e.architectures),
            f"pip install {e.install}",
        )
        for e in known
    ]
    print_table(("adapter", "installed", "models", "architectures", "install"), rows)
