"""Reads our checkpoint format; `training/shards.py` writes it.

`weights.index.json` says of each tensor where it is: `{"format": "acme-shards/1", "shards": [{"file", "bytes"}],
"tensors": {name: {"shard", "offset", "dtype", "shape", "crc32"}}}`. A shard is a header of 64 bytes (eight of magic,
then its number and the number of bytes after the header, little-endian) and the tensors' raw values, each on a multiple
of 64 bytes; offsets count from the start of the file.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import mrv2
import torch
from torch import Tensor

INDEX = "weights.index.json"
FORMAT = "acme-shards/1"
MAGIC = b"ACMESHRD"
HEADER = struct.Struct("<8sQQ40x")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class ShardError(mrv2.Mrv2Error):
    """A checkpoint's index or one of its shards is absent, cut short, or not what was written.

    Copy it again from where it was trained; the message names the file.
    """

    code = "ACME-1"
    title = "bad acme checkpoint"


class ShardSource:
    """Tensors of a checkpoint, mapped into memory: a page is read when it is touched, and checked at `read`.

    Raises:
        ShardError: the index or a shard is absent, cut short, or not what the index says. Tensors are checked against
            their checksums when they are read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_bytes())
            found = index["format"]
            self._tensors: dict[str, dict[str, Any]] = index["tensors"]
            sizes = {folder / str(shard["file"]): int(shard["bytes"]) for shard in index["shards"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._bad(INDEX, f"is absent or no index ({type(error).__name__}: {error})") from error
        if found != FORMAT:
            raise self._bad(INDEX, f"is in format {found!r}, and this reads {FORMAT!r}")
        self.files = tuple(sizes)
        for number, (file, size) in enumerate(sizes.items()):
            self._check_header(file, number, size)
        for name in self._tensors:
            self._check_entry(name, list(sizes.values()))
        self._mapped = cache(self._map)
        self._checked: set[str] = set()

    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the index."""
        return tuple(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """From the index."""
        return DTYPES[self._tensors[name]["dtype"]]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, mapped, or a slice of it.

        Raises:
            ShardError: its bytes aren't those that were written.
        """
        entry = self._tensors[name]
        start = entry["offset"]
        data = self._mapped(entry["shard"])[start : start + self._num_bytes(name)]
        if name not in self._checked:
            # Over NumPy's view of the mapping: nothing is copied.
            if zlib.crc32(data.numpy().data) != entry["crc32"]:
                raise self._bad(self.files[entry["shard"]].name, f"has other bytes for {name} than were written")
            self._checked.add(name)
        tensor = data.view(self.dtype(name)).view(self.shape(name))
        return tensor if index is None else tensor[index]

    def _num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def _map(self, shard: int) -> Tensor:
        file = self.files[shard]
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8, device="cpu")

    def _check_header(self, file: Path, number: int, size: int) -> None:
        try:
            with file.open("rb") as opened:
                header = opened.read(HEADER.size)
            there = file.stat().st_size
        except OSError as error:
            raise self._bad(file.name, f"can't be read: {error.strerror}") from error
        if there != size:
            raise self._bad(file.name, f"has {there} bytes, {size} were written")
        if header != HEADER.pack(MAGIC, number, size - HEADER.size):
            raise self._bad(file.name, f"doesn't begin as shard {number} of such a checkpoint")

    def _check_entry(self, name: str, sizes: list[int]) -> None:
        entry = self._tensors[name]
        try:
            inside = HEADER.size <= entry["offset"] <= sizes[entry["shard"]] - self._num_bytes(name)
            whole = inside and entry["offset"] % 64 == 0 and isinstance(entry["crc32"], int)
        except (KeyError, IndexError, TypeError) as error:
            raise self._bad(INDEX, f"describes {name} with {entry!r}") from error
        if not whole:
            raise self._bad(INDEX, f"puts {name} where no shard has it: {entry!r}")

    def _bad(self, file: str, what: str) -> ShardError:
        return ShardError(f"{file} {what}", where=str(self.folder), fix="copy the checkpoint again")
