"""The folder of converted and downloaded models: built once, whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mrv2.errors import ModelCacheError

MARKER = ".mrv2-complete.json"
HASHED_UP_TO = 32 * 1024 * 1024
"""Files up to this many bytes are hashed each time they are used; of larger ones only the size is compared."""


def cache_dir() -> Path:
    """`MRV2_CACHE`, else `mrv2` in the user's cache folder."""
    chosen = os.environ.get("MRV2_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    # Where there is no home (a container's user without an entry), `~` stays, and the text says what to set.
    return Path(base or os.path.expanduser("~/.cache")) / "mrv2"


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def build_once(key: str, build: Callable[[Path], None], *, what: str) -> Path:
    """The folder `key` in the cache, made by `build(empty folder)` if it isn't there whole.

    Other processes that want the same folder wait for this one. `build` works in a folder of another name
    that is renamed when it is done, so a process killed half-way leaves nothing that would be used; what it
    left is removed by the next one. The lock is the kernel's and ends with the process that holds it.

    Args:
        key: name of the folder; must change whenever the content would.
        build: fills the folder; its own typed errors pass through.
        what: shown on stderr while building and waiting ("converting x.gguf").

    Raises:
        ModelCacheError: the cache can't be written, or its disk is full.
    """
    root = cache_dir()
    target = root / key
    if is_whole(target):
        return target
    with _explained(root), _locked(root, key, what):
        if is_whole(target):  # another process was faster
            return target
        _remove_leftovers(root, key)
        if os.path.lexists(target):
            say(f"the cached {key} is damaged; making it again")
            _remove(target)
        say(what)
        work = root / f"{key}.tmp-{os.getpid()}"
        work.mkdir()
        try:
            build(work)
            _mark(work)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def is_whole(folder: Path) -> bool:
    """Whether `folder` was finished, and its files still have the recorded sizes and (small ones) hashes."""
    try:
        recorded = json.loads((folder / MARKER).read_bytes())
        return all(_describe(folder / name, entry["size"]) == entry for name, entry in recorded["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _describe(path: Path, expected_size: int | None = None) -> dict[str, object]:
    size = path.stat().st_size
    if size > HASHED_UP_TO or (expected_size is not None and size != expected_size):
        return {"size": size}
    return {"size": size, "sha256": sha256_of(path)}


def _mark(folder: Path) -> None:
    """Flush every file to the disk, then record what there is."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for path in files:
        _fsync(path)
    marker = folder / MARKER
    marker.write_text(json.dumps({"files": {str(p.relative_to(folder)): _describe(p) for p in files}}, indent=1))
    _fsync(marker)


def _fsync(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


def _remove(path: Path) -> None:
    """A folder, or whatever else has taken its name; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_leftovers(root: Path, key: str) -> None:
    """Work folders of processes that died; none is in use, since we hold the lock."""
    for path in root.glob(f"{key}.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path, key: str, what: str) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is {what}; waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ModelCacheError(
            "its disk is full" if full else f"it can't be written ({e.strerror or e})",
            where=str(root),
            fix="free some space there, or set MRV2_CACHE to another folder"
            if full
            else "set MRV2_CACHE to a folder that can be written",
        ) from e


def say(text: str) -> None:
    """A line on stderr: results on stdout stay clean."""
    print(f"mrv2: {text}", file=sys.stderr, flush=True)
