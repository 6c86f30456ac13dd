"""The registry: which adapter serves an architecture, and nothing imported but that one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrv2.adapter import LoadedAdapter
from mrv2.catalog import install_hint, read_catalogs
from mrv2.discovery import installed_adapters
from mrv2.entry import AdapterEntry
from mrv2.errors import (
    AdapterConflictError,
    CatalogError,
    Mrv2Error,
    SettingError,
    UnknownAdapterError,
    UnknownArchitectureError,
)
from mrv2.loading import import_plugin, register
from mrv2.local import is_path, local_adapter
from mrv2.settings import Settings, split_names


class Registry:
    """The adapters of this environment. Make one with `Registry.discover()`.

    Attributes:
        entries: all adapters, sorted by name, broken ones with their error.
        chosen: those the caller named, which win over others.
    """

    def __init__(self, entries: Sequence[AdapterEntry], settings: Settings) -> None:
        self.entries = tuple(entries)
        self.settings = settings
        self.chosen: tuple[AdapterEntry, ...] = ()
        self._loaded: dict[tuple[str, str], LoadedAdapter] = {}

    @classmethod
    def discover(cls, *, adapters: Sequence[str] = (), allowlist: str | None = None) -> Registry:
        """Look at what is installed, without importing any of it.

        Args:
            adapters: local files or folders, and names of installed adapters. All of them win over other
                adapters for the architectures they have.
            allowlist: distribution names separated by commas; None: `MRV2_ADAPTERS`, or all.

        Raises:
            SettingError: an environment variable makes no sense, or the allowlist names what isn't installed.
            LocalAdapterError: a path in `adapters` is no adapter.
            UnknownAdapterError: a name in `adapters` is not installed.
        """
        settings = Settings.from_env()
        names = split_names(allowlist) if allowlist is not None else settings.allowlist
        local = list({e.source: e for e in map(local_adapter, filter(is_path, adapters))}.values())
        entries = [*local, *installed_adapters(names)]
        registry = cls(sorted(entries, key=lambda e: (e.name, e.dist)), settings)
        registry.chosen = (*local, *(registry.get(a) for a in adapters if not is_path(a)))
        return registry

    # -- look-up -----------------------------------------------------------------------------------------

    def get(self, name: str) -> AdapterEntry:
        """The adapter called `name`, by its own or its distribution's name; it may be a broken one.

        Raises:
            UnknownAdapterError: there is none.
            AdapterConflictError: there are several.
        """
        found = [e for e in self.entries if e.is_called(name)]
        if not found:
            raise UnknownAdapterError(
                f"no adapter is called {name!r}", where="installed adapters", fix=f"there are: {_names(self.entries)}"
            )
        if len(found) > 1:
            raise self._conflict(f"the name {name}", found, "use the distribution's name, or uninstall one")
        return found[0]

    def find(self, architecture: str) -> AdapterEntry:
        """The adapter that serves `architecture`, not imported.

        Raises:
            UnknownArchitectureError: none does.
            AdapterConflictError: several do, and no setting picks one.
            SettingError: `MRV2_PREFER` gives it to an adapter that isn't there or doesn't serve it.
            Mrv2Error: the one that does is broken; its own error.
        """
        entry = self._pick(architecture, lambda e: e.serves(architecture))
        if entry is None:
            raise self._unknown(f"architecture {architecture!r}", architecture=architecture)
        return entry

    def resolve(self, architecture: str) -> LoadedAdapter:
        """The adapter that serves `architecture`, imported. No other one is.

        Raises:
            Mrv2Error: as `find` and `load`.
        """
        return self.load(self.find(architecture))

    def for_model_type(self, model_type: str) -> LoadedAdapter | None:
        """The adapter that serves `model_type`, imported; None: none claims it.

        Raises:
            Mrv2Error: as `resolve`, but for the unknown.
        """
        entry = self._pick(model_type, lambda e: e.serves_model_type(model_type))
        return None if entry is None else self.load(entry)

    def load(self, entry: AdapterEntry) -> LoadedAdapter:
        """Import one adapter and check its hooks; once per registry.

        Raises:
            Mrv2Error: the first stage that failed.
        """
        key = (entry.name, entry.dist or entry.source)
        if key not in self._loaded:
            if entry.error is not None:
                raise entry.error
            plugin = import_plugin(entry, self.settings.import_timeout_s)
            if isinstance(plugin, Mrv2Error):
                raise plugin
            manager = register(entry, plugin)
            if isinstance(manager, Mrv2Error):
                raise manager
            self._loaded[key] = LoadedAdapter(entry, manager)
        return self._loaded[key]

    def conflicts(self, among: Sequence[AdapterEntry] | None = None) -> tuple[AdapterConflictError, ...]:
        """Names and architectures that several adapters claim and no setting decides.

        Args:
            among: only what one of these claims; None: all.
        """
        concerned = self.entries if among is None else among
        found: list[AdapterConflictError] = []
        for name in dict.fromkeys(e.name for e in concerned):
            same = [e for e in self.entries if e.name == name]
            if len({e.dist for e in same}) > 1:
                found.append(self._conflict(f"the name {name}", same, "uninstall one"))
        for architecture in dict.fromkeys(a for e in concerned for a in e.architectures):
            try:
                self._pick(architecture, lambda e, a=architecture: e.serves(a))  # type: ignore[misc]
            except AdapterConflictError as error:
                found.append(error)
            except SettingError:
                continue  # one of idle_preferences()
        return tuple(found)

    def idle_preferences(self, among: Sequence[AdapterEntry] | None = None) -> tuple[SettingError, ...]:
        """Entries of `MRV2_PREFER` that can't have any effect here, for `doctor` and `list`.

        They are no reason to refuse other architectures: the variable may be meant for several environments.

        Args:
            among: only for what one of these claims; None: all.
        """
        concerned = [
            what
            for what in self.settings.prefer
            if among is None or any(e.serves(what) or e.serves_model_type(what) for e in among)
        ]
        faults = map(self._preference_fault, concerned)
        return tuple(fault for fault in faults if fault is not None)

    # -- choice ------------------------------------------------------------------------------------------

    def _pick(self, what: str, serves: Callable[[AdapterEntry], bool]) -> AdapterEntry | None:
        # A broken adapter counts: falling back to another one would change results in silence.
        claims = [e for e in self.entries if serves(e)]
        preferred = self.settings.prefer.get(what)
        picked = [e for e in claims if e in self.chosen]
        picked = [e for e in picked or claims if preferred is not None and e.is_called(preferred)] or picked
        if claims and not picked and (fault := self._preference_fault(what)) is not None:
            raise fault
        claims = picked or claims
        if len(claims) > 1:
            first = claims[0].dist or claims[0].name
            fix = f"set MRV2_PREFER={what}={first}, or give --adapter {first}, or uninstall one"
            raise self._conflict(what, claims, fix)
        return claims[0] if claims else None

    def _preference_fault(self, what: str) -> SettingError | None:
        """Why `MRV2_PREFER` can't be followed for `what`, an architecture or model type."""
        name = self.settings.prefer.get(what)
        claims = [e for e in self.entries if e.serves(what) or e.serves_model_type(what)]
        if name is None or any(e.is_called(name) for e in claims):
            return None
        if not any(e.is_called(name) for e in self.entries):
            why, fix = "which is not installed", f"install it, or name one of: {_names(claims or self.entries)}"
        elif claims:
            why, fix = "which doesn't serve it", f"name one of: {_names(claims)}"
        else:
            why, fix = "and no adapter here serves that architecture or model type", "correct its spelling"
        return SettingError(f"{what} is given to {name!r}, {why}", where="MRV2_PREFER", fix=f"{fix}, or unset it")

    def _conflict(self, what: str, claims: Sequence[AdapterEntry], fix: str) -> AdapterConflictError:
        return AdapterConflictError(
            f"{what} is claimed by {' and by '.join(e.label for e in claims)}",
            where="; ".join(e.where for e in claims),
            fix=fix,
        )

    def _unknown(self, what: str, *, architecture: str) -> UnknownArchitectureError:
        served = sorted({a for e in self.entries for a in e.architectures})
        try:
            hint = install_hint(read_catalogs(self.settings.catalogs), architecture=architecture)
        except CatalogError as error:
            hint = f"(the catalogues can't tell: {error.what}, {error.where})"
        unreadable = [
            f"{e.label}: {e.error.code} {e.error.title}" for e in self.entries if e.error and not e.architectures
        ]
        return UnknownArchitectureError(
            f"no adapter serves {what}; installed ones serve {', '.join(served) or 'nothing'}"
            + "".join(f"; unreadable is {line}" for line in unreadable),
            where="the checkpoint's config.json",
            fix=hint or "install an adapter for it, or give your own with --adapter ./folder",
        )


def _names(entries: Sequence[AdapterEntry]) -> str:
    return ", ".join(dict.fromkeys(e.name for e in entries)) or "none"
