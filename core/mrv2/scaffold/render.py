"""Writing a new project: every file of the skeleton, names and contents rendered with jinja2."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrv2.errors import ScaffoldError
from mrv2.scaffold.answers import TEMPLATE, environment

UNUSED = ".unused"
"""Folder of what these answers have no use for; cookiecutter's last hook deletes it."""


def render(context: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and text of each file, the project's folder first in the path.

    Args:
        context: all variables, as `complete` gives them.
    """
    env = environment()
    for file in sorted(TEMPLATE.glob("*{{*/**/*")):
        path = env.from_string(file.relative_to(TEMPLATE).as_posix()).render(cookiecutter=context)
        if file.is_dir() or path.endswith("/") or f"/{UNUSED}/" in path:  # a name that comes out empty: not with these
            continue
        yield path, env.from_string(file.read_text(encoding="utf-8")).render(cookiecutter=context)


def write_project(context: Mapping[str, Any], parent: Path) -> tuple[Path, list[str]]:
    """Write a project into a new folder of `parent`. All of it or, if that fails, nothing.

    Returns:
        The folder, and its files' paths within.

    Raises:
        ScaffoldError: there is something of that name already, or the system refuses to write.
    """
    folder = parent / f"mrv2-adapter-{context['name']}"
    if folder.exists() or folder.is_symlink():
        raise ScaffoldError(
            f"{folder} exists", where=str(parent), fix="nothing was written: rename it, or work in another folder"
        )
    files = []
    try:
        made = Path(tempfile.mkdtemp(prefix=".new-adapter-", dir=parent))
        try:
            for path, text in render(context):
                target = made / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8", newline="\n")
                files.append(path.partition("/")[2])
            folder.mkdir()  # ours from here on, whoever else is at work: a move onto it replaces an empty folder only
            (made / folder.name).rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ScaffoldError(
            f"{folder} can't be written: {error.strerror}",
            where=str(parent),
            fix="work in a folder that can be written",
        ) from error
    return folder, files
