"""Where checkpoint tensors come from: names, shapes and lazy reads. No source runs code from a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrv2.errors import CheckpointFileError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Named tensors of one checkpoint. An adapter with a format of its own brings one (`mrv2_weight_source`)."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it reads, for messages."""
        ...

    def names(self) -> Iterable[str]:
        """Every tensor's name, each once."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns, without reading it."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor on the CPU, or a slice of it; read (or mapped) at this call and not kept."""
        ...


def tensor_infos(source: WeightSource) -> Iterator[TensorInfo]:
    """What `source` holds, without reading any of it."""
    for name in source.names():
        yield TensorInfo(name, tuple(source.shape(name)), source.dtype(name))


def iter_tensors(source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in `source`, one at a time."""
    for name in source.names():
        yield name, source.read(name)


class SafetensorsSource:
    """A folder with one safetensors file, or shards and their index. Tensors are memory-mapped.

    Raises:
        CheckpointFileError: no such file, only pickle files, a truncated or damaged file, or an index that
            doesn't say what the shards hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = _read_index(folder)
        self.files = _shards(folder, self._index) if self._index is not None else (_single_file(folder),)
        self._handles = {path: _open(path) for path in self.files}
        self._file_of = self._locate()

    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return tuple(self._entry(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """From the header.

        Raises:
            CheckpointFileError: a type that torch has no equal of.
        """
        stored = self._entry(name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointFileError(
                f"tensor {name} has the type {stored}, which no plain checkpoint has",
                where=str(self._file_of[name]),
                fix="use the unquantised checkpoint",
            )
        return _DTYPES[stored]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor (mapped, so a page is read when it is touched), or a slice of it."""
        handle = self._handles[self._file_of[name]]
        tensor: Tensor = handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        return tensor

    def _entry(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)

    def _locate(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise _disagree(f"tensor {name} is in {found[name].name} and in {path.name}", self.folder)
                found[name] = path
        if self._index is not None:
            for name, file in self._index.items():
                if name not in found or found[name].name != file:
                    raise _disagree(f"the index puts tensor {name} into {file}, which hasn't got it", self.folder)
            extra = [name for name in found if name not in self._index]
            if extra:
                raise _disagree(f"tensor {extra[0]} is in {found[extra[0]].name} but not in the index", self.folder)
        return found


def _disagree(what: str, folder: Path) -> CheckpointFileError:
    return CheckpointFileError(
        what, where=str(folder), fix=f"get {INDEX_NAME} and all shards again, from the same revision"
    )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name to shard name, or None for a checkpoint of one file."""
    path = folder / INDEX_NAME
    if os.path.lexists(folder / SINGLE_NAME) or not os.path.lexists(path):
        return None
    _check_regular(path)
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        index = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as e:
        raise CheckpointFileError(
            f"the index is no JSON object with a weight_map ({e})", where=str(path), fix="get the file again"
        ) from e
    if not index:
        raise CheckpointFileError("the index lists no tensors", where=str(path), fix="get the file again")
    return index


def _shards(folder: Path, index: Mapping[str, str]) -> tuple[Path, ...]:
    names = sorted(set(index.values()))
    for name in names:
        if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            raise _disagree(f"the index names {name!r}, which is no safetensors file of this folder", folder)
    absent = [name for name in names if not os.path.lexists(folder / name)]
    if absent:
        raise _disagree(f"the index names {', '.join(absent[:8])}, absent here ({len(absent)} of {len(names)})", folder)
    for name in names:
        _check_regular(folder / name)
    return tuple(folder / name for name in names)


def _check_regular(path: Path) -> None:
    """Refuse a link to nothing, which a download that was stopped leaves, and a pipe, which would never end."""
    if path.is_file():
        return
    dangling = path.is_symlink() and not path.exists()
    what = f"is a link to {os.readlink(path)}, which doesn't exist" if dangling else "is no regular file"
    raise CheckpointFileError(f"{path.name} {what}", where=str(path), fix="get the file again")


def _single_file(folder: Path) -> Path:
    if os.path.lexists(folder / SINGLE_NAME):
        _check_regular(folder / SINGLE_NAME)
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        _check_regular(found[0])
        return found[0]
    if found:
        raise CheckpointFileError(
            f"there are {len(found)} safetensors files and no {INDEX_NAME}", where=str(folder), fix="add the index"
        )
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointFileError(
            f"there are only pickle files ({', '.join(pickles[:4])}), and reading pickle runs code from the file",
            where=str(folder),
            fix="convert them to safetensors in a place where you trust them",
        )
    raise CheckpointFileError("there is no safetensors file", where=str(folder), fix="check that MODEL is complete")


def size_text(path: Path) -> str:
    """Bytes of a file, for messages about one that can't be read."""
    try:
        return f"{path.stat().st_size} bytes"
    except OSError as e:
        return f"size unknown: {e.strerror}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointFileError(
            f"{path.name} is truncated or no safetensors file ({e}; {size_text(path)})",
            where=str(path),
            fix="get the file again and compare its size or checksum",
        ) from e
