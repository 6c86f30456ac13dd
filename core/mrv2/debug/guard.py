"""Views and metadata that refuse to be read once their step is over; debug mode hands them to adapters."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from mrv2.errors import StaleStepError
from mrv2.state.view import CacheMeta, StepView

_PACKAGE = Path(__file__).parents[1]


class StepScope:
    """Whether one step is still going on. Shared by all that is guarded for it."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.over = False


class _Guard:
    """Checks the scope at every access to a field."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> object:
        if name in type(self).__dataclass_fields__ and name != "scope":  # type: ignore[attr-defined]  # see below
            scope: StepScope = object.__getattribute__(self, "scope")
            if scope.over:
                raise _stale(type(self).__bases__[1].__name__, name, scope)
        return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedView(_Guard, StepView):
    """A `StepView` that can't be read once `scope` is over."""

    scope: StepScope


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedMeta(_Guard, CacheMeta):
    """A `CacheMeta` that can't be read once `scope` is over."""

    scope: StepScope


def guard_view(view: StepView, scope: StepScope) -> GuardedView:
    """The same view; reading it later raises `StaleStepError`."""
    return GuardedView(**{f.name: getattr(view, f.name) for f in fields(view)}, scope=scope)


def guard_meta(meta: CacheMeta, scope: StepScope) -> GuardedMeta:
    """The same metadata; reading it later raises `StaleStepError`."""
    return GuardedMeta(**{f.name: getattr(meta, f.name) for f in fields(meta)}, scope=scope)


def _stale(kind: str, name: str, scope: StepScope) -> StaleStepError:
    return StaleStepError(
        f"{kind}.{name} of step {scope.step_id} was read after that step",
        where=_reader(),
        fix="keep what later work needs as a copy of its own, indexed by row",
    )


def _reader() -> str:
    """The line outside of this package that reads, or leads to a helper of ours that does."""
    frame = sys._getframe()
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
