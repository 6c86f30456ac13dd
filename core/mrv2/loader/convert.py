"""A GGUF file made into an ordinary model folder, once, in the cache."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mrv2.errors import CheckpointFileError
from mrv2.layers.base import DTYPES
from mrv2.loader.cache import build_once, sha256_of
from mrv2.loader.gguf_source import GgufSource
from mrv2.loader.source import INDEX_NAME, SINGLE_NAME, iter_tensors

CONVERTER_VERSION = 1
"""Part of the cache key; raise it whenever the same GGUF would become another folder."""

SHARD_BYTES = 1 << 30
"""Tensors are held until a shard has this many bytes: the most memory a conversion takes, beside one tensor."""


def converted_key(sha256: str, dtype: str) -> str:
    """Name of the cached folder of the GGUF file with this checksum."""
    return f"gguf-{sha256[:32]}-{dtype}-v{CONVERTER_VERSION}"


def convert_gguf(file: Path, *, dtype: str = "float32", sha256: str | None = None) -> Path:
    """A folder with `config.json`, safetensors, and the tokenizer's files, made from `file` or found made.

    Args:
        file: the GGUF file.
        dtype: of the tensors, a key of `DTYPES`.
        sha256: the file's, if it has been computed already.

    Raises:
        ModelCacheError: the cache can't be written or is full.
        CheckpointFileError, MissingExtraError: as `GgufSource`.
    """
    if not file.is_file():
        raise CheckpointFileError("there is no such file", where=str(file), fix="check the path")
    key = converted_key(sha256 or sha256_of(file), dtype)
    return build_once(key, lambda folder: _convert(file, folder, dtype), what=f"converting {file.name} to {dtype}")


def _convert(file: Path, folder: Path, dtype: str) -> None:
    source = GgufSource(file)
    config = source.config
    config.dtype = DTYPES[dtype]
    config.save_pretrained(folder)
    if source.has_tokenizer:
        _save_tokenizer(file, folder)
    _save_tensors(((name, t.to(DTYPES[dtype])) for name, t in iter_tensors(source)), folder)


def _save_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:  # many types, by tokenizer kind
        raise CheckpointFileError(
            f"transformers can't read the tokenizer of this GGUF: {type(e).__name__}: {e}",
            where=str(file),
            fix="use the safetensors checkpoint of the same model",
        ) from e
    tokenizer.save_pretrained(folder)


def _save_tensors(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """One file, or numbered shards and an index, as transformers lays them out."""
    shards: list[tuple[str, ...]] = []
    total = 0
    for batch in _batches(tensors):
        _save(batch, _shard_path(folder, len(shards)))
        shards.append(tuple(batch))
        total += sum(t.nbytes for t in batch.values())
    if len(shards) == 1:
        _shard_path(folder, 0).rename(folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _shard_path(folder, i).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )


def _batches(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > SHARD_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor.contiguous()
        size += tensor.nbytes
    if batch:
        yield batch


def _shard_path(folder: Path, i: int) -> Path:
    return folder / f"part-{i:05d}.safetensors"


def _save(batch: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(batch, path, metadata={"format": "pt"})
    except SafetensorError as e:  # wraps the system's error, whose number is only in the text
        number = re.search(r"os error (\d+)", str(e))
        code = int(number.group(1)) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from e
    path.chmod(0o644)  # it makes files for the owner alone; a cache may be shared
