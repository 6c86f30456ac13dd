"""The file of a recorded run: what `mrv2 generate --record` writes and `mrv2 replay` reads. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mrv2.errors import RequestError, RunFileError
from mrv2.sample.params import SamplingParams

FORMAT = 1

TokenId = int
TopLogprobs = tuple[float, int, tuple[tuple[TokenId, float], ...]]
"""Of one generated token: its log-probability, its rank (1: the most likely), and the most likely ones with theirs."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Identity(_Part):
    """What a run depends on besides its requests; every mapping is from a name to what identifies it."""

    environment: dict[str, str]  # versions, machine, card
    adapter: dict[str, str]  # name, distribution, version, SDK API, and each file of the package
    checkpoint: dict[str, str]  # each file and each tensor
    settings: dict[str, str | int | bool | None]  # fields of `EngineConfig`, nothing left open


class Ending(_Part):
    """How a request was ended by something else than its tokens: a stop string, its deadline, its caller."""

    turn: int = Field(ge=0)  # after so many turns of the engine's loop
    reason: str


class RecordedRequest(_Part):
    """A request, when it came, and what came of it."""

    line: int  # of the input, 1-based
    id: Any = None  # the caller's own
    prompt: tuple[TokenId, ...] = Field(min_length=1)
    sampling: dict[str, Any]  # fields of `SamplingParams`; `seed` is the one that was used
    turn: int = Field(ge=0)  # it came after so many turns of the engine's loop
    arrived: float  # seconds since the first request
    first_token: float | None  # seconds since it arrived
    total: float  # the same
    tokens: tuple[TokenId, ...]
    complete: bool  # False: the engine made more tokens, which were cut off
    finish_reason: str
    stop_reason: str | int | None
    ending: Ending | None  # None: its tokens or its length ended it
    logprobs: tuple[TopLogprobs, ...] | None  # [tokens]; None: not asked for
    cached_tokens: int
    preemptions: int

    def params(self) -> SamplingParams:
        """How it was generated, seed included."""
        given: dict[str, Any] = self.sampling
        return SamplingParams(**given)


class Run(_Part):
    """A recorded run.

    Args:
        format: of the file.
        mrv2: version that wrote it.
        model: as named on the command line; paths are absolute.
        path: the folder that this meant.
        adapters: local adapters (absolute paths) and preferred names, as given.
        identity: what the run depended on.
        requests: in the order in which they came.
        steps: (requests, tokens) of every step in turn.
    """

    format: int
    mrv2: str
    model: str
    path: str
    adapters: tuple[str, ...]
    identity: Identity
    requests: tuple[RecordedRequest, ...] = Field(min_length=1)
    steps: tuple[tuple[int, int], ...]


def read_run(path: Path) -> Run:
    """Read a run.

    Raises:
        RunFileError: the file can't be read, isn't of a format known here, or is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except OSError as error:
        raise RunFileError(str(error.strerror), where=str(path), fix="check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON ({error})") from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(found, int) or isinstance(found, bool):
        raise _damaged(path, "it has no `format`")
    if found != FORMAT:
        raise RunFileError(
            f"the run is of format {found}, written by mrv2 {raw.get('mrv2')}; this version reads format {FORMAT}",
            where=str(path),
            fix="replay it with the version that recorded it",
        )
    try:
        run = Run.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{at}: {first['msg']}") from error
    for number, request in enumerate(run.requests):
        _check_request(path, number, request)
    return run


def _check_request(path: Path, number: int, request: RecordedRequest) -> None:
    at = f"requests.{number}"
    if {f.name for f in fields(SamplingParams)} != set(request.sampling) or request.sampling["seed"] is None:
        raise _damaged(path, f"{at}.sampling doesn't hold exactly the fields of SamplingParams, or no seed")
    try:
        request.params()
    except RequestError as error:
        raise _damaged(path, f"{at}.sampling: {error.what}") from error
    if request.logprobs is not None and len(request.logprobs) != len(request.tokens):
        raise _damaged(path, f"{at}.logprobs are not as many as its tokens")


def _damaged(path: Path, why: str) -> RunFileError:
    return RunFileError(
        f"the run can't be read: {why}",
        where=str(path),
        fix="give a file that `mrv2 generate --record` wrote, unedited",
    )


def check_free(path: Path) -> None:
    """Whether a run may be written there; asked before the work, so that none is lost.

    Raises:
        RunFileError: something is there already, or there is no such folder.
    """
    if os.path.lexists(path):
        raise RunFileError("it exists, and a run is never overwritten", where=str(path), fix="name another file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunFileError(f"{path.parent} is no folder that can be written", where=str(path), fix="make it first")


def write_run(path: Path, run: Run) -> None:
    """Write a run: whole or not at all, and never over a file that is there.

    Raises:
        RunFileError: it can't be written there, or a file has appeared meanwhile.
    """
    check_free(path)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(run.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunFileError(str(error.strerror), where=str(path), fix="name a file that can be written") from error
    try:
        os.link(temporary, path)  # unlike a rename, it refuses a name that is taken
    except FileExistsError as error:
        raise RunFileError("it has appeared meanwhile", where=str(path), fix="name another file") from error
    except OSError:  # a file system without hard links
        check_free(path)
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
