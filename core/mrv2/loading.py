"""Importing one adapter and registering its hooks: the last stages of the registry."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TypeVar

import pluggy

from mrv2 import hookspecs
from mrv2.api import PROJECT
from mrv2.entry import AdapterEntry
from mrv2.errors import AdapterImportError, AdapterTimeoutError, HookError, Mrv2Error

T = TypeVar("T")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Adapters' code runs inside: what it prints must not stand among our results on stdout.

    Nested and concurrent uses are safe: whoever finds stdout diverted leaves it alone, so nobody can restore
    anything but the real one.
    """
    before = sys.stdout
    if before is sys.stderr:
        yield
        return
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before


# ---- import ------------------------------------------------------------------------------------------------


def import_plugin(entry: AdapterEntry, timeout_s: float) -> object | Mrv2Error:
    """Import the adapter's package and return what its entry point names, or the error.

    Raises:
        KeyboardInterrupt: the user's, or the adapter's own.
    """
    try:
        with stdout_to_stderr():
            return bounded(lambda: _load(entry), timeout_s, doing=f"importing {entry.entry_point}", where=entry.where)
    except Mrv2Error as error:
        return error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and the like too: an adapter may not end its host
        failure = AdapterImportError(
            f"{_import_failure(error)}, raised at {raised_at(error.__traceback__)}",
            where=entry.where,
            fix=_import_hint(error, entry),
        )
        failure.__cause__ = error
        return failure


def bounded(work: Callable[[], T], timeout_s: float, *, doing: str, where: str) -> T:
    """Run an adapter's code, and stop waiting for it after `timeout_s`.

    It runs in a thread of its own, so that code that waits for ever ends in an error with the line it waits
    at, whatever it waits for and in whichever thread the caller is. The stuck thread is a daemon: it keeps
    nobody from leaving.

    Raises:
        AdapterTimeoutError: it didn't end.
        BaseException: whatever `work` raised.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="mrv2-adapter", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        raise AdapterTimeoutError(
            f"{doing} didn't end within {timeout_s:g} s; it waits at {_waiting_at(frame)}",
            where=where,
            fix="move that work out of the import, uninstall the adapter, or raise MRV2_IMPORT_TIMEOUT",
        )
    if failures:
        raise failures[0]
    return results[0]


def _module(entry: AdapterEntry) -> str:
    return entry.entry_point.partition(":")[0].strip()


def _load(entry: AdapterEntry) -> object:
    if entry.loader is not None:
        return entry.loader()
    loaded = importlib.import_module(_module(entry))
    attribute = entry.entry_point.partition(":")[2]
    # A ":name [extra]" suffix is legal in entry points and means nothing here.
    attribute = attribute.partition("[")[0].strip()
    return attrgetter(attribute)(loaded) if attribute else loaded


def _import_failure(error: BaseException) -> str:
    text = describe(error)
    return f"its import tried to end the process ({text})" if isinstance(error, SystemExit) else text


def describe(error: BaseException) -> str:
    """Type and message of an exception on one line, whatever its class does when it is asked."""
    try:
        name, text = type(error).__name__, re.sub(r"\s+", " ", str(error)).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "an exception that can't be shown: its class raises when it is turned into text"
    return f"{name}: {text}" if text else name


def _import_hint(error: BaseException, entry: AdapterEntry) -> str:
    if type(error) is ModuleNotFoundError and error.name:
        return f"install what provides {error.name!r}, or correct the import"
    if entry.dist:
        return f"upgrade or uninstall {entry.dist}; `python -c 'import {_module(entry)}'` shows the whole trace"
    return "correct the named line"


def raised_at(trace: TracebackType | None) -> str:
    """`file:line` of the innermost frame outside the import machinery."""
    frames = [f for f in traceback.extract_tb(trace) if not _is_machinery(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _waiting_at(frame: FrameType | None) -> str:
    stack = [f for f in traceback.extract_stack(frame) if not _is_machinery(f.filename)] if frame else []
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"


def _is_machinery(filename: str) -> bool:
    own = filename in (__file__, importlib.__file__, threading.__file__)
    return own or filename.startswith("<frozen")


# ---- register ----------------------------------------------------------------------------------------------


def register(entry: AdapterEntry, plugin: object) -> pluggy.PluginManager | Mrv2Error:
    """A plugin manager that holds this adapter alone, after its hooks were checked.

    One manager per adapter: no hook of another one can answer, in whatever order they were registered.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        with stdout_to_stderr():
            failure = next(_bad_hooks(entry, plugin), None)
            if failure is not None:
                return failure
            manager.register(plugin, name=entry.name)
            manager.check_pending()
    except pluggy.PluginValidationError as error:
        return HookError(re.sub(r"\s+", " ", str(error)), where=entry.where, fix="see mrv2.hookspecs")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # looking at a module's or object's attributes may run its code
        failure = HookError(
            f"looking for its hooks failed: {describe(error)}, raised at {raised_at(error.__traceback__)}",
            where=entry.where,
            fix="correct the named line",
        )
        failure.__cause__ = error
        return failure
    if not manager.hook.mrv2_model.get_hookimpls() and entry.manifest is not None and entry.manifest.kind == "model":
        return HookError(
            "the adapter has no hook mrv2_model, so it can't provide a model",
            where=entry.where,
            fix="add one: `@mrv2.hookimpl` above `def mrv2_model(ctx)`",
        )
    return manager


def _bad_hooks(entry: AdapterEntry, plugin: object) -> Iterator[HookError]:
    for name, function in _hook_candidates(plugin):
        options = getattr(function, f"{PROJECT}_impl", None)
        where = f"{entry.where}, {source_of(function)}"
        spec = (options or {}).get("specname") or name
        if spec not in hookspecs.HOOKS:
            near = difflib.get_close_matches(spec, hookspecs.HOOKS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"hooks are {', '.join(hookspecs.HOOKS)}"
            yield HookError(f"{spec} is not a hook", where=where, fix=meant)
        elif options is None:
            yield HookError(f"{name} isn't marked as a hook", where=where, fix="put @mrv2.hookimpl above it")
        elif extra := [p for p in _parameters(function) if p != "ctx"]:
            yield HookError(
                f"{name} takes {', '.join(extra)}; the one argument of a hook is ctx",
                where=where,
                fix=f"def {name}(ctx)",
            )


def _hook_candidates(plugin: object) -> Iterator[tuple[str, Callable[..., object]]]:
    for name in dir(plugin):
        if not name.startswith(f"{PROJECT}_"):
            continue
        value = getattr(plugin, name, None)
        if inspect.isroutine(value):
            yield name, value


def _parameters(function: Callable[..., object]) -> list[str]:
    # Those with a default are never filled by pluggy, so they are the function's own affair.
    params = inspect.signature(function).parameters.values()
    return [p.name for p in params if p.default is p.empty]


def source_of(thing: object) -> str:
    """`file:line` where a function or class is defined, or where its module is; as far as known."""
    try:
        unwrapped = inspect.unwrap(thing)  # type: ignore[arg-type]
        path = inspect.getsourcefile(unwrapped) or inspect.getfile(unwrapped)
    except Exception:  # no source, or attributes that raise when they are read
        return _module_of(thing) or "an unknown place"
    if isinstance(thing, ModuleType):
        return path
    code = getattr(unwrapped, "__code__", None)
    if code is not None:
        return f"{path}:{code.co_firstlineno}"
    try:
        return f"{path}:{inspect.getsourcelines(unwrapped)[1]}"
    except (OSError, TypeError):
        return str(Path(path))


def _module_of(thing: object) -> str | None:
    try:
        return str(thing.__module__)
    except Exception:
        return None
