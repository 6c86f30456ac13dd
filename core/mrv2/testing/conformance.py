"""The suites as a test class: an adapter's author subclasses `AdapterConformance` and says which adapter.

    from mrv2.testing import AdapterConformance, tiny_config
    from acme.config import AcmeConfig
    from acme.reference import Reference, make_checkpoint

    class TestAcme(AdapterConformance):
        adapter = "acme"
        config = tiny_config(AcmeConfig)
        checkpoint = make_checkpoint
        reference = Reference

Each check is a test, run once for each config and level. The fields of `Target` are attributes; those left out come
from the adapter's `mrv2_test_target`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mrv2.errors import OverrideError, TargetError
from mrv2.local import is_path
from mrv2.testing.check import Job, call, finding
from mrv2.testing.results import Check, ConformanceFailure, Level, NotApplicable, NotRun
from mrv2.testing.subject import Subject
from mrv2.testing.suites import all_checks
from mrv2.testing.target import Target, Tolerances

F = TypeVar("F", bound=Callable[..., Any])

MIN_REASON = 10
"""Characters of a reason, at least."""


def override(reason: str) -> Callable[[F], F]:
    """Mark a test that stands in the place of a standard one. The summary shows the reason.

    Args:
        reason: why the standard test doesn't fit this adapter.

    Raises:
        OverrideError: it is no reason.
    """
    if not isinstance(reason, str) or len(reason.strip()) < MIN_REASON:
        raise OverrideError(
            f"{reason!r} is no reason",
            where="mrv2.testing.override",
            fix='@override("why the standard test can\'t hold")',
        )

    def mark(function: F) -> F:
        function.__mrv2_override__ = reason  # type: ignore[attr-defined]
        return function

    return mark


class AdapterConformance:
    """Subclass it as `Test…`. See the module's text.

    Attributes:
        adapter: name of an installed adapter, or a path relative to the test's file.
        config: the only config; or
        configs: several by name.
        reference: see `Target`, as for all that follow but the last.
        checkpoint: that of the only config, or what writes one.
        options: `extra_args` that requests may carry.
        wrong_options: those that have to be refused.
        tolerances: how far is too far.
        levels: those to run here; others are shown as not run.
    """

    __mrv2_conformance__: ClassVar[bool] = True

    adapter: ClassVar[str] = ""
    config: ClassVar[Any] = None
    configs: ClassVar[Mapping[str, Any]] = {}
    # Annotated as Any: a function as a class attribute would be taken for a method.
    reference: ClassVar[Any] = None
    checkpoint: ClassVar[Any] = None
    options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    wrong_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    tolerances: ClassVar[Tolerances] = Tolerances()
    levels: ClassVar[Sequence[str]] = tuple(Level)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _standard():
            own = vars(cls).get(name, _standard()[name])
            if name in vars(cls) and not getattr(own, "__mrv2_override__", ""):
                what = "takes out" if own is None else "replaces"
                raise OverrideError(
                    f"{cls.__qualname__} {what} the standard test {name}, and gives no reason",
                    where=f"{inspect.getsourcefile(cls) or cls.__module__}, {cls.__qualname__}.{name}",
                    fix='put @mrv2.testing.override("why") above it, or give it another name',
                )

    _subject: ClassVar[Subject]

    @classmethod
    def mrv2_subject(cls) -> Subject:
        """The adapter under test, made once per class.

        Raises:
            TargetError: the class names no adapter.
        """
        if "_subject" not in vars(cls):
            cls._subject = cls._make_subject()
        subject: Subject = cls._subject
        return subject

    @classmethod
    def _make_subject(cls) -> Subject:
        where = f"{cls.__module__}.{cls.__qualname__}"
        if not cls.adapter:
            raise TargetError(f"{where} names no adapter", where=where, fix='adapter = "its name, or a path"')
        adapter = cls.adapter
        if is_path(adapter):
            adapter = str((Path(inspect.getfile(cls)).parent / adapter).resolve())
        given = {f.name: _attribute(cls, f.name) for f in fields(Target)}
        if cls.config is not None:
            given["configs"] = {"config": cls.config}
        return Subject(adapter, Target(**given))


def _attribute(cls: type, name: str) -> Any:
    """As written in the class: a function stays one."""
    value = inspect.getattr_static(cls, name)
    return value.__func__ if isinstance(value, staticmethod) else value


@cache
def _standard() -> dict[str, Any]:
    return {f"test_{one.id}": _test_of(one) for one in all_checks()}


def _test_of(one: Check) -> Callable[..., None]:
    def test(self: AdapterConformance, mrv2_job: tuple[str, Level]) -> None:
        import pytest

        __tracebackhide__ = True
        config, level = mrv2_job
        subject, job = self.mrv2_subject(), Job(check=one, level=level, config=config)
        try:
            call(subject, job)
        except (NotRun, NotApplicable):
            raise
        except Exception as error:
            found = finding(subject, job, error)
            first = subject.met_in.setdefault(found.cause, job.label) if found.cause else job.label
            if first != job.label:
                pytest.fail(f"{one.title}\nthe failure of test_{first}, met again: {found.message}", pytrace=False)
            if isinstance(error, ConformanceFailure):
                pytest.fail(f"{one.title}\n{found.message}", pytrace=False)
            raise

    test.__name__ = f"test_{one.id}"
    test.__qualname__ = f"AdapterConformance.{test.__name__}"
    test.__doc__ = one.function.__doc__
    test.__module__ = __name__
    test.__mrv2_test__ = one  # type: ignore[attr-defined]
    return test


for _name, _test in _standard().items():
    setattr(AdapterConformance, _name, _test)
