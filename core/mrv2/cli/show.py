"""`mrv2 show`."""

from __future__ import annotations

from typing import Any

from mrv2.cli.options import Adapters, Json, Name


def command(name: Name, json: Json = False, adapter: Adapters = None) -> None:
    """Show one adapter. A broken one ends in its error."""
    from mrv2.cli.list import describe
    from mrv2.cli.output import print_json
    from mrv2.cli.probe import probe
    from mrv2.errors import Mrv2Error
    from mrv2.registry import Registry

    registry = Registry.discover(adapters=adapter or ())
    entry = registry.get(name)
    if entry.error is not None:
        raise entry.error
    (report,) = probe([entry], adapter or (), registry.settings.import_timeout_s)
    if isinstance(report, Mrv2Error):
        raise report
    about = describe(entry)
    if json:
        print_json(about | {"hooks": report["hooks"], "models": report["models"]})
        return
    _print(about, report)


def _print(about: dict[str, Any], report: dict[str, Any]) -> None:
    from mrv2.cli.output import indent, print_table

    capabilities = ", ".join(f"{c}: {s}" for c, s in about["capabilities"].items())
    facts = {
        "distribution": f"{about['distribution']} {about['version']}" if about["distribution"] else "local",
        "manifest": about["manifest"],
        "kind": about["kind"],
        "SDK API": about["sdk_api"],
        "architectures": ", ".join(about["architectures"]),
        "model types": ", ".join(about["model_types"]) or "none",
        "capabilities": capabilities or "none",
        "owner": about["owner"],
        "docs": about["docs"] or "none",
    }
    print(about["name"])
    print(indent("\n".join(f"{key}: {value}" for key, value in facts.items())))
    print("\nhooks")
    print_table(("hook", "supplied by"), [(hook, source or "default") for hook, source in report["hooks"].items()])
    for model in report["models"]:
        print(f"\n{model['architecture']}: {model['model']}, {model['source']}")
        for part in model["parts"]:
            print(f"  part {part['class']}, {part['source']}")
        print_table(
            ("model state", "method", "defined at"),
            [(method, m["by"], m["source"]) for method, m in model["methods"].items()],
        )
