"""`mrv2 explain`. Adapters' own errors are read from their source; nothing of them is imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mrv2.cli.options import Adapters, Json, complete_codes
from mrv2.entry import AdapterEntry
from mrv2.errors import CommandLineError, Mrv2Error, all_error_classes

Code = Annotated[
    str | None,
    typer.Argument(metavar="CODE", help="MRV2-101, 101, or an adapter's own.", autocompletion=complete_codes),
]


def command(code: Code = None, adapter: Adapters = None, json: Json = False) -> None:
    """Print what an error class documents."""
    from mrv2.cli.output import print_json, print_table

    if code is None:
        listed = [*map(_describe, all_error_classes()), *_of_adapters(_entries(adapter))]
        if json:
            print_json({"errors": listed})
        else:
            print_table(("code", "error", "of"), [(e["code"], e["title"], e["adapter"] or "mrv2") for e in listed])
        return
    found = find(code, adapter)
    if json:
        print_json(found)
        return
    print(f"{found['code']} {found['title']} (exit code {found['exit_code']})\n\n{found['text']}")
    if found["adapter"]:
        print(f"\nof {found['adapter']}, {found['where']}")


def find(code: str, adapters: Sequence[str] | None = None) -> dict[str, Any]:
    """The error of a code: ours, with or without its prefix, else an adapter's.

    Args:
        code: whatever its case.
        adapters: local ones, looked at beside those installed.

    Raises:
        CommandLineError: there is none.
    """
    wanted = code.upper()
    for cls in all_error_classes():
        if cls.code in (wanted, f"MRV2-{wanted}"):
            return _describe(cls)
    entries = _entries(adapters)
    for error in _of_adapters(entries):
        if error["code"].upper() == wanted:
            return error
    if wanted.startswith("MRV2-") or wanted.isdecimal():
        raise CommandLineError(
            f"there is no error {code!r}", where="mrv2 explain", fix="`mrv2 explain` lists all codes"
        )
    looked = ", ".join(entry.label for entry in entries) or "there is none"
    raise CommandLineError(
        f"{code!r} is no error of mrv2, nor of an adapter here ({looked})",
        where="mrv2 explain",
        fix="mrv2's own codes begin with MRV2; of an adapter that isn't installed, add --adapter PATH",
    )


def _describe(cls: type[Mrv2Error]) -> dict[str, Any]:
    text = inspect.getdoc(cls)
    return {
        "code": cls.code,
        "title": cls.title,
        "exit_code": cls.exit_code,
        "text": text,
        "adapter": None,
        "where": None,
    }


def _entries(adapters: Sequence[str] | None) -> Sequence[AdapterEntry]:
    from mrv2.registry import Registry

    try:
        return Registry.discover(adapters=adapters or ()).entries
    except Mrv2Error:
        if adapters:
            raise
        return ()  # a setting that makes no sense: our own errors are explained all the same


def _of_adapters(entries: Sequence[AdapterEntry]) -> Iterator[dict[str, Any]]:
    """Classes with a `code` and a `title`, both written out, of each adapter's package."""
    for entry in entries:
        if not entry.manifest_path:  # its package wasn't found
            continue
        path = Path(entry.manifest_path)
        for file in [path] if path.suffix == ".py" else sorted(path.parent.rglob("*.py")):
            for node in _classes(file):
                values = dict(_constants(node))
                if isinstance(values.get("code"), str) and isinstance(values.get("title"), str):
                    yield {
                        "code": values["code"],
                        "title": values["title"],
                        "exit_code": values.get("exit_code", Mrv2Error.exit_code),
                        "text": ast.get_docstring(node) or "",
                        "adapter": entry.label,
                        "where": f"{file}:{node.lineno}",
                    }


def _classes(file: Path) -> list[ast.ClassDef]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    for statement in node.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Constant):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from ((t.id, statement.value.value) for t in targets if isinstance(t, ast.Name))
