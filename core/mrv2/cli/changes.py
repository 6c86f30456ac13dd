"""What each version of the SDK API changed for authors of adapters; `CHANGELOG.md` tells the same at length."""

from __future__ import annotations

from collections.abc import Mapping

from mrv2.api import ApiVersion

CHANGES: Mapping[ApiVersion, tuple[str, ...]] = {
    ApiVersion(0, 1): ("first version",),
}
"""One line per change that an author may have to act on."""


def changes_since(written_for: ApiVersion) -> tuple[str, ...]:
    """Changes of all later versions, oldest first."""
    later = sorted(version for version in CHANGES if version > written_for)
    return tuple(f"{version}: {line}" for version in later for line in CHANGES[version])
