"""Finding adapters without importing any: the first stages of the registry.

Each stage is one function that returns a result, or the typed error that ends the chain for that adapter
alone: list entry points, allowlist, requirement on the core, manifest, API.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from mrv2.api import ENTRY_POINT_GROUP
from mrv2.entry import AdapterEntry
from mrv2.errors import (
    AdapterConflictError,
    CoreVersionError,
    ManifestError,
    ManifestMissingError,
    MetadataError,
    Mrv2Error,
    SettingError,
)
from mrv2.manifest import MANIFEST_FILE, check_api, declared_architectures, read_toml, validate
from mrv2.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An entry point and the distribution that brings it."""

    entry: AdapterEntry
    requires: tuple[str, ...]  # the distribution's requirements, as written


def installed_adapters(allowlist: Sequence[str] | None) -> tuple[AdapterEntry, ...]:
    """All stages for every installed adapter, sorted by name.

    Raises:
        SettingError: the allowlist names a distribution that isn't installed.
    """
    found = apply_allowlist(list_entry_points(), allowlist)
    entries = [examine(item) for item in found]
    return tuple(sorted(entries, key=lambda e: (e.name, e.dist)))


def examine(item: Installed) -> AdapterEntry:
    """The stages after the allowlist, up to the first that fails.

    The manifest is read even when the requirement fails, so that a broken adapter still says what it is for.
    """
    if item.entry.error is not None:
        return item.entry
    failure = check_single_copy(item) or check_core_requirement(item)
    entry = with_manifest(item.entry)
    return entry.failed(failure) if failure is not None else entry


# ---- stage 1: entry points ---------------------------------------------------------------------------------


def list_entry_points() -> tuple[Installed, ...]:
    """Every entry point of our group, one per distribution and name.

    Not `importlib.metadata.entry_points`, which keeps the first copy of a distribution only: stale metadata
    earlier on the path would hide an adapter in silence.
    """
    found: dict[tuple[str, str, str], Installed] = {}
    for dist in distributions():
        for point in _points(dist):
            item = _installed(dist, point)
            found.setdefault((canonicalize_name(item.entry.dist), item.entry.version, item.entry.name), item)
    return tuple(found.values())


def _points(dist: Distribution) -> Iterator[EntryPoint]:
    try:
        yield from dist.entry_points.select(group=ENTRY_POINT_GROUP)
    except (OSError, ValueError, AttributeError):
        # Undecodable entry points of some other package are no business of ours.
        return


def _installed(dist: Distribution, point: EntryPoint) -> Installed:
    metadata = _metadata(dist)
    name, version = (metadata["Name"], metadata["Version"]) if metadata else (None, None)
    entry = AdapterEntry(
        name=point.name,
        dist=name or "unknown distribution",
        version=version or "?",
        entry_point=point.value,
        source="installed",
    )
    if name is None or version is None:
        entry = entry.failed(
            MetadataError(
                "the distribution's METADATA is absent, isn't UTF-8, or has no name or version",
                where=f"{location(dist)}, entry point {point.name} = {point.value}",
                fix="reinstall it, or delete its left-over folder",
            )
        )
    elif EntryPoint.pattern.match(point.value) is None:
        entry = entry.failed(
            MetadataError(
                f"{point.value!r} is not of the form 'module' or 'module:attribute'",
                where=entry.where,
                fix=f'correct the entry point in group "{ENTRY_POINT_GROUP}" and reinstall',
            )
        )
    requires = metadata.get_all("Requires-Dist") if metadata else None
    return Installed(entry=entry, requires=tuple(requires or ()))


def _metadata(dist: Distribution) -> Any:
    """METADATA as a message; None where it can't be read, which the standard library's type hints don't admit."""
    try:
        return dist.metadata
    except (OSError, ValueError, TypeError):
        return None


def location(dist: Distribution) -> str:
    """Where a distribution's metadata lies."""
    return str(getattr(dist, "_path", dist.locate_file("")))


# ---- stage 2: allowlist ------------------------------------------------------------------------------------


def apply_allowlist(found: Sequence[Installed], allowlist: Sequence[str] | None) -> tuple[Installed, ...]:
    """Only the distributions listed; all of them without a list.

    Raises:
        SettingError: a listed one isn't installed, or brings no adapter.
    """
    if allowlist is None:
        return tuple(found)
    wanted = {canonicalize_name(name): name for name in allowlist}
    present = {canonicalize_name(item.entry.dist) for item in found}
    absent = [name for key, name in wanted.items() if key not in present]
    if absent:
        raise SettingError(
            f"no installed adapter comes from {', '.join(map(repr, absent))}",
            where=f"MRV2_ADAPTERS={','.join(allowlist)}",
            fix=f"install it, or list some of: {', '.join(sorted(present)) or 'none are installed'}",
        )
    return tuple(item for item in found if canonicalize_name(item.entry.dist) in wanted)


# ---- stage 3: the distribution -----------------------------------------------------------------------------


def check_single_copy(item: Installed) -> Mrv2Error | None:
    """Refuse a distribution that the path holds twice with different contents.

    Equal copies are normal: an editable install and the metadata in its source folder.
    """
    found = tuple(distributions(name=item.entry.dist))
    if len(found) < 2:
        return None
    copies: dict[tuple[str, str], str] = {}
    for dist in found:
        metadata = _metadata(dist)
        version = str(metadata["Version"]) if metadata else "an unreadable version"
        points = sorted(f"{p.name}={p.value}" for p in _points(dist))
        copies.setdefault((version, ";".join(points)), location(dist))
    if len(copies) < 2:
        return None
    listed = "; ".join(f"{version} in {path}" for (version, _), path in copies.items())
    return AdapterConflictError(
        f"{item.entry.dist} is installed more than once: {listed}",
        where=item.entry.where,
        fix="uninstall it until it is gone, delete what is left over, then install it again",
    )


def check_core_requirement(item: Installed) -> Mrv2Error | None:
    """Compare the distribution's requirement on `mrv2` with the core that is running."""
    for text in item.requires:
        try:
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName) as error:
            return MetadataError(
                f"requirement {text!r} can't be parsed: {error}",
                where=item.entry.where,
                fix="reinstall the distribution",
            )
        if canonicalize_name(requirement.name) != "mrv2":
            continue
        if not applies:
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            return CoreVersionError(
                f"it requires {text}, and mrv2 {__version__} is running",
                where=item.entry.where,
                fix=f'pip install "{text}", or install a version of {item.entry.dist} for mrv2 {__version__}',
            )
    return None


# ---- stage 4: manifest, API --------------------------------------------------------------------------------


def with_manifest(entry: AdapterEntry) -> AdapterEntry:
    """The entry with its manifest, or with the reason why there is none."""
    text = read_manifest(entry)
    if isinstance(text, Mrv2Error):
        return entry.failed(text)
    entry = replace(entry, manifest_path=text.path)
    raw = read_toml(text.text, entry.where)
    if isinstance(raw, Mrv2Error):
        return entry.failed(raw)
    return accept_manifest(entry, raw)


def accept_manifest(entry: AdapterEntry, raw: Mapping[str, Any]) -> AdapterEntry:
    """Check API, fields and name of a raw manifest."""
    entry = replace(entry, architectures=declared_architectures(raw))
    failure = check_api(raw, entry.where)
    if failure is not None:
        return entry.failed(failure)
    manifest = validate(raw, entry.where)
    if isinstance(manifest, Mrv2Error):
        return entry.failed(manifest)
    if manifest.name != entry.name:
        return entry.failed(
            ManifestError(
                f"name is {manifest.name!r}, the entry point is called {entry.name!r}",
                where=entry.where,
                fix="give both the same name, and reinstall",
            )
        )
    return replace(entry, manifest=manifest)


@dataclass(frozen=True, slots=True)
class ManifestText:
    """A manifest as found."""

    path: str
    text: str


def read_manifest(entry: AdapterEntry) -> ManifestText | Mrv2Error:
    """Read `adapter.toml` beside the top-level package, through the package's loader and without importing it.

    The top level only, because `find_spec("a.b")` imports `a`. Through the loader, because a package may be
    in a zip file, or anywhere for an editable install.
    """
    module = entry.entry_point.partition(":")[0].strip()
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return ManifestMissingError(
            f"package {top!r} doesn't exist: its folder was moved or deleted after it was installed",
            where=entry.where,
            fix=f"pip install it again from its folder or wheel, or pip uninstall {entry.dist}",
        )
    for path in _manifest_paths(spec):
        data = _read(spec, path)
        if data is None:
            continue
        try:
            return ManifestText(path, data.decode("utf-8"))
        except UnicodeDecodeError as error:
            return ManifestError(f"not UTF-8: {error}", where=f"{entry.where}, {path}", fix="save it as UTF-8")
    return ManifestMissingError(
        f"no {MANIFEST_FILE} beside {spec.origin or f'package {top!r}'}",
        where=entry.where,
        fix=f"ship {MANIFEST_FILE} inside the package folder {top!r}, and reinstall",
    )


def _manifest_paths(spec: ModuleSpec) -> Iterator[str]:
    # Only a package has a folder of its own; beside a single module lies everybody's site-packages.
    for folder in spec.submodule_search_locations or ():
        yield str(Path(folder) / MANIFEST_FILE)


def _read(spec: ModuleSpec, path: str) -> bytes | None:
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait for ever
        return None
    get_data = getattr(spec.loader, "get_data", None)
    try:
        data = get_data(path) if get_data is not None else Path(path).read_bytes()
    except OSError:
        return None
    return bytes(data)
