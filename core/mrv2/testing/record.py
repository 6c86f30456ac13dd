"""`conformance.json`: what passed, where, and for which files of the package. Imports no torch, for `mrv2 list`.

python -m mrv2.testing.record NAME FILE    # take over the levels of a record that was made on another machine
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.entry import AdapterEntry
from mrv2.errors import RecordError
from mrv2.testing.results import Level, LevelSummary, Outcome
from mrv2.version import __version__

if TYPE_CHECKING:
    from mrv2.testing.check import Report

FILE = "conformance.json"
FORMAT = 1
PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm")


def record_path(entry: AdapterEntry) -> Path:
    """Where the adapter's record is: beside `adapter.toml`; of a single file, beside it under its name."""
    path = Path(entry.manifest_path or entry.source)
    return path.with_suffix(f".{FILE}") if path.suffix == ".py" else path.parent / FILE


def file_hashes(entry: AdapterEntry) -> dict[str, str]:
    """SHA-256 of every file of the package by its path within; left out are the record itself, tests, and hidden files,
    which editors and systems put there.
    """
    path = Path(entry.manifest_path or entry.source)
    root = path.parent
    files = [path] if path.suffix == ".py" else sorted(p for p in root.rglob("*") if p.is_file())
    kept = [f for f in files if f != record_path(entry) and all(_counts(part) for part in f.relative_to(root).parts)]
    return {f.relative_to(root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in kept}


def _counts(part: str) -> bool:
    return part not in ("__pycache__", "tests") and not part.startswith(".")


def read_record(entry: AdapterEntry) -> dict[str, Any] | None:
    """The adapter's record; None: it has none.

    Raises:
        RecordError: it is damaged.
    """
    return _read(record_path(entry))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("levels"), dict):
        raise _damaged(path, f"it isn't of format {FORMAT}")
    odd = [n for n, level in record["levels"].items() if n not in tuple(Level) or not isinstance(level, dict)]
    if odd:
        raise _damaged(path, f"{odd[0]!r} is no level that was recorded")
    return record


def _damaged(path: Path, why: str) -> RecordError:
    return RecordError(f"{path.name} can't be read: {why}", where=str(path), fix="delete it, or record anew")


def standing(entry: AdapterEntry) -> str:
    """In a word: the levels that passed, `stale`, `damaged`, or nothing."""
    try:
        record = read_record(entry)
        if record is None:
            return ""
        return "stale" if stale(entry, record) else " ".join(sorted(record["levels"]))
    except (RecordError, OSError):
        return "damaged"


def stale(entry: AdapterEntry, record: Mapping[str, Any]) -> str:
    """Why a record no longer tells of the adapter; empty: it does."""
    if record.get("mrv2") != __version__:
        return f"it was made with mrv2 {record.get('mrv2')}"
    if record.get("files") != file_hashes(entry):
        return "files of the package have changed since"
    return ""


def write_record(entry: AdapterEntry, report: Report) -> Path:
    """Write what passed. Levels of an earlier record of the same files that weren't run now are kept.

    Raises:
        RecordError: something failed, nothing passed, or the file can't be written.
    """
    passed = [s for s in report.levels if s.passed]
    if report.failures or not passed:
        why = "something failed" if report.failures else "no level passed"
        raise RecordError(f"{why}, so nothing is recorded", where=entry.where, fix="see the report")
    try:
        before = read_record(entry)
    except RecordError:
        before = None
    levels = dict(before["levels"]) if before is not None and not stale(entry, before) else {}
    levels |= {summary.level.value: _level(summary, report) for summary in passed}
    return _write(entry, levels)


def merge_record(entry: AdapterEntry, other: Path) -> Path:
    """Take over the levels of a record of the same files, made elsewhere: of a level in both, the later one.

    Raises:
        RecordError: it can't be read, or tells of another adapter, other files or another mrv2; or ours is damaged.
    """
    theirs, ours = _read(other), read_record(entry)
    if theirs is None:
        raise _damaged(other, "there is no such file")
    why = stale(entry, theirs) if theirs.get("adapter") == entry.name else f"it is of adapter {theirs.get('adapter')}"
    if why:
        raise RecordError(f"{other} can't be taken over: {why}", where=entry.where, fix="record these files there")
    levels = dict(ours["levels"]) if ours is not None and not stale(entry, ours) else {}
    for level, about in theirs["levels"].items():
        if level not in levels or about["date"] >= levels[level]["date"]:
            levels[level] = about
    return _write(entry, levels)


def _write(entry: AdapterEntry, levels: Mapping[str, Any]) -> Path:
    path = record_path(entry)
    record = {
        "format": FORMAT,
        "adapter": entry.name,
        "sdk_api": entry.manifest.sdk_api if entry.manifest else None,
        "mrv2": __version__,
        "levels": {level: levels[level] for level in sorted(levels)},
        "files": file_hashes(entry),
    }
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        made.replace(path)  # whole or not at all, whoever writes or reads it meanwhile
    except OSError as error:
        raise RecordError(
            f"{path} can't be written: {error.strerror}", where=entry.where, fix="record it where the source is"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
    return path


def _level(summary: LevelSummary, report: Report) -> dict[str, Any]:
    own = [r for r in report.results if r.level is summary.level]
    return {
        "passed": summary.counts[Outcome.PASSED],
        "not_applicable": summary.counts[Outcome.NOT_APPLICABLE],
        "configs": sorted({r.config for r in own if r.config}),
        "reference": report.reference,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment(summary.level),
    }


def environment(level: Level) -> dict[str, str]:
    """Versions and hardware behind a level."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if level in (Level.GPU, Level.VLLM):
        import torch

        found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return found


def main(argv: list[str]) -> int:
    """Merge."""
    from mrv2.errors import Mrv2Error
    from mrv2.testing.subject import Subject

    name, file = argv
    try:
        print(f"recorded in {merge_record(Subject(name).entry, Path(file))}")
    except Mrv2Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
