"""Adapters from a file or a folder, for prototyping: only ever used when named."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mrv2.discovery import accept_manifest
from mrv2.entry import AdapterEntry
from mrv2.errors import LocalAdapterError, Mrv2Error
from mrv2.manifest import MANIFEST_FILE, read_toml

HEADER_START = "# /// adapter"
HEADER_END = "# ///"


def is_path(argument: str) -> bool:
    """Whether `--adapter ARGUMENT` means a path rather than the name of an installed adapter."""
    return argument.endswith(".py") or "/" in argument or "\\" in argument or argument in (".", "..")


def local_adapter(argument: str) -> AdapterEntry:
    """The adapter in a folder (`__init__.py` beside `adapter.toml`) or in one file.

    A single file carries its manifest in a comment block, in the manner of PEP 723:

        # /// adapter
        # name = "acme"
        # sdk_api = "0.1"
        # ...
        # ///

    Raises:
        LocalAdapterError: the path isn't one of these.
    """
    # os.path: pathlib's functions raise for links in a circle, unknown users, and names that are too long.
    path = Path(os.path.realpath(os.path.expanduser(argument)))
    is_folder = os.path.isdir(path)
    file = path / "__init__.py" if is_folder else path
    if not os.path.isfile(file):
        what = f"{path} has no __init__.py" if is_folder else f"{path} doesn't exist, or is no regular file"
        raise LocalAdapterError(what, where=f"--adapter {argument}", fix="give a package folder or a .py file")
    module = path.name if is_folder else path.stem
    if not module.isidentifier():
        raise LocalAdapterError(
            f"{module!r} is not a module name", where=f"--adapter {argument}", fix="rename it to letters, digits and _"
        )
    manifest_path = path / MANIFEST_FILE if is_folder else file
    raw = _read_manifest(manifest_path, f"--adapter {argument}")
    entry = AdapterEntry(
        name=str(raw.get("name", module)) if isinstance(raw, Mapping) else module,
        dist="",
        version="local",
        entry_point=module,
        source=str(path),
        manifest_path=str(manifest_path),
        loader=lambda: _import(module, file),
    )
    return entry.failed(raw) if isinstance(raw, Mrv2Error) else accept_manifest(entry, raw)


def _read_manifest(path: Path, where: str) -> dict[str, Any] | Mrv2Error:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise LocalAdapterError(f"{path} is no regular file", where=where, fix=f"put {MANIFEST_FILE} there")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LocalAdapterError(
            f"{path} can't be read: {error.strerror}", where=where, fix=f"put {MANIFEST_FILE} beside __init__.py"
        ) from error
    except UnicodeDecodeError as error:
        raise LocalAdapterError(f"{path} isn't UTF-8: {error}", where=where, fix="save it as UTF-8") from error
    return read_toml(text if path.suffix == ".toml" else _header(text, path, where), f"{where}, {path}")


def _header(text: str, path: Path, where: str) -> str:
    lines = text.splitlines()
    if lines.count(HEADER_START) == 1:
        body = lines[lines.index(HEADER_START) + 1 :]
        block = body[: body.index(HEADER_END)] if HEADER_END in body else None
        if block is not None and all(line == "#" or line.startswith("# ") for line in block):
            return "\n".join(re.sub(r"^# ?", "", line) for line in block)
    raise LocalAdapterError(
        f"{path.name} states no manifest",
        where=where,
        fix=f"add one comment block with the lines of {MANIFEST_FILE}, from `{HEADER_START}` to `{HEADER_END}`",
    )


def _import(module: str, file: Path) -> ModuleType:
    """Import under its own name, so that its absolute imports and pickles work."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
        raise LocalAdapterError(
            f"another module called {module!r} is already imported from {getattr(loaded, '__file__', 'elsewhere')}",
            where=str(file),
            fix="rename the local adapter's file or folder",
        )
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(module, file, submodule_search_locations=folders)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        sys.modules.pop(module, None)
        raise
    return loaded
