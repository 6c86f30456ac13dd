"""Where the templates are of what this program writes: reports, and bodies of adapters."""

from __future__ import annotations

from pathlib import Path


def template_folder() -> Path:
    """The folder `templates`: within the package in a wheel, at the repository's top where it is worked on."""
    packed = Path(__file__).parent / "_templates"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "templates"
