"""Hooks of mkdocs: README and changelog as pages, the API reference, and links that lead out of `docs/`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
from public import Reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Pages that lie outside of `docs/`."""

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any, **kwargs: Any) -> Files:
    """Add the pages from outside."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Make links fit the site, and fill the API reference."""
    source = page.file.src_uri
    home = ROOT if source in FROM_ROOT.values() else DOCS
    text = "".join(
        part if part.startswith("```") else LINK.sub(lambda m: _link(m, home, source), part)
        for part in re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    )
    return text + "\n" + _reference() if source == "api.md" else text


def _link(match: re.Match[str], home: Path, source: str) -> str:
    """A link to a page of the site; to a file of the repository, its path instead."""
    text, target = match[1], match[2]
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, _, anchor = target.partition("#")
    file = Path(os.path.normpath(home / path))
    if not file.exists():
        raise PluginError(f"{source}: [{text}]({target}) leads to {file}, which doesn't exist")
    inside = file.relative_to(ROOT).as_posix()
    if inside in FROM_ROOT or (file.parent == DOCS and file.suffix == ".md"):
        return f"[{text}]({FROM_ROOT.get(inside, file.name)}{'#' + anchor if anchor else ''})"
    return text if text.strip("`/") == inside else f"{text} (`{inside}`)"


def _reference() -> str:
    reference = Reference()
    missing = list(reference.undocumented())
    if missing:
        raise PluginError(f"public names without documentation: {', '.join(missing)}")
    return reference.sections()
