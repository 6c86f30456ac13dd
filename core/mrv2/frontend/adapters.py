"""Which adapter a word means: a name, a package folder, a project folder, or a file.

Imports no torch.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from mrv2.errors import LocalAdapterError
from mrv2.local import is_path
from mrv2.registry import Registry


def adapter_argument(argument: str) -> str:
    """What to give as `adapters=`: a name as it is, of a project folder its package's, of other paths the whole path.

    A word without a slash is an installed adapter, if there is one of that name, else a folder here.

    Raises:
        LocalAdapterError: it is empty, or a project without an adapter.
    """
    if not argument.strip():
        raise LocalAdapterError("its name is empty", where="NAME|PATH|FILE", fix="give a name, a folder or a file")
    # os.path: pathlib's functions raise for links in a circle, unknown users, and names that are too long.
    path = os.path.realpath(os.path.expanduser(argument))
    if not is_path(argument) and (not os.path.isdir(path) or _is_installed(argument)):
        return argument
    return str(_package_in(Path(path)))


def _is_installed(name: str) -> bool:
    return any(entry.is_called(name) for entry in Registry.discover().entries)


def _package_in(path: Path) -> Path:
    """The folder with the adapter's package; `path` itself unless it is a project."""
    project = path / "pyproject.toml"
    if os.path.exists(path / "__init__.py") or not os.path.isfile(project):
        return path
    try:
        found: Any = tomllib.loads(project.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LocalAdapterError(
            f"pyproject.toml can't be read: {error}", where=str(project), fix="correct it, or give the package's folder"
        ) from error
    for key in ("project", "entry-points", "mrv2.adapters"):
        found = found.get(key) if isinstance(found, dict) else None
    points = found.values() if isinstance(found, dict) else ()
    modules = [str(point).partition(":")[0].replace(".", "/") for point in points]
    for folder in (path / root / module for module in modules for root in ("src", ".")):
        if (folder / "__init__.py").exists():
            return folder.resolve()
    raise LocalAdapterError(
        f"{path} is a project, and declares no adapter whose package lies in it",
        where=str(project),
        fix='add [project.entry-points."mrv2.adapters"], or give the package\'s folder',
    )
