"""What a run depends on, as texts to compare: versions, the adapter's files, the checkpoint's tensors, settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mrv2
from mrv2.attn.groups import choose_block_size
from mrv2.entry import AdapterEntry
from mrv2.frontend.build import EngineParts, LoadedModel
from mrv2.frontend.engine_config import EngineConfig
from mrv2.runner.engine import Engine
from mrv2.testing.record import environment, file_hashes
from mrv2.testing.results import Level
from mrv2.testing.runs import Identity
from mrv2.version import __version__

WINDOW = 1 << 13
"""Bytes that are read at a time of what is too long to be read whole."""

WINDOWS = 8
"""Of each tensor or file, in equal distances, both ends among them."""

_MAX_HEADER = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that isn't as it was."""

    kind: str  # a field of `Identity`
    name: str
    recorded: str | int | bool | None
    now: str | int | bool | None


def identify(loaded: LoadedModel, config: EngineConfig, parts: EngineParts) -> Identity:
    """What a run with this engine depends on.

    Args:
        loaded: the model.
        config: that `parts` were made with.
        parts: the engine.
    """
    device = parts.limits.device
    found = environment(Level.GPU if device.type == "cuda" else Level.CPU)
    return Identity(
        environment={"mrv2": __version__, "mrv2's code": _own_code(), **found},
        adapter={} if loaded.entry is None else _adapter(loaded.entry),
        checkpoint=dict(checkpoint_identity(loaded.config.path)),
        settings=_settings(loaded, config, parts),
    )


def differences(recorded: Identity, now: Identity) -> list[Difference]:
    """Everything that differs; None stands for what is absent."""
    found = []
    for kind in Identity.model_fields:
        before, after = getattr(recorded, kind), getattr(now, kind)
        found += [
            Difference(kind=kind, name=name, recorded=before.get(name), now=after.get(name))
            for name in dict.fromkeys([*before, *after])
            if before.get(name) != after.get(name)
        ]
    return found


def _own_code() -> str:
    """Of the core's own files: a checkout changes without its version."""
    root = Path(mrv2.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _adapter(entry: AdapterEntry) -> dict[str, str]:
    try:
        files = file_hashes(entry)
    except OSError:  # inside an archive
        files = {}
    return {
        "name": entry.name,
        "distribution": entry.dist or "local",
        "version": entry.version,
        "sdk_api": entry.manifest.sdk_api if entry.manifest else "",
        **{f"file {name}": digest[:16] for name, digest in files.items()},
    }


def _settings(loaded: LoadedModel, config: EngineConfig, parts: EngineParts) -> dict[str, str | int | bool | None]:
    """With these, and on the same device, the same engine comes about: nothing is left to be measured or chosen."""
    engine: Engine = parts.engine
    kv, limits = engine.scheduler.kv, parts.limits
    return {
        "dtype": str(limits.dtype).removeprefix("torch."),
        "device": str(limits.device),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_rows,
        "max_num_tokens": limits.max_num_tokens,
        "max_chunk": config.max_chunk,
        "block_size": config.block_size or choose_block_size(loaded.caches, limits.dtype),
        "num_blocks": kv.pool.num_blocks,
        "prefix_caching": loaded.prefix_caching and config.prefix_caching is not False,
        "depth": engine._depth,
        "runner": config.runner,
        "graphs": parts.graphs is not None,
        "debug": config.debug,
    }


# ---- checkpoints -------------------------------------------------------------------------------------------


def checkpoint_identity(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of each tensor in safetensors files and of each other file, hidden ones left out.

    What is long is read in a few windows: enough to tell two trainings, quantisations or edited layers apart, not
    to find a single changed byte.
    """
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(n for n in names if not n.startswith(".")):
            path = Path(root, name)
            if not path.is_file():
                continue
            with path.open("rb") as file:
                tensors = _header(file) if name.endswith(".safetensors") else None
                if tensors is None:
                    label = path.relative_to(folder).as_posix()
                    yield f"file {label}", _digest(file, 0, path.stat().st_size, "")
                else:
                    yield from _tensors(file, tensors)


def _header(file: BinaryIO) -> tuple[int, Mapping[str, Mapping[str, object]]] | None:
    """Where the data of a safetensors file begin, and its tensors; None: it is none."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _MAX_HEADER:
        return None
    try:
        header = json.loads(file.read(length))
    except ValueError:
        return None
    return 8 + length, header


def _tensors(file: BinaryIO, tensors: tuple[int, Mapping[str, Mapping[str, object]]]) -> Iterator[tuple[str, str]]:
    data, header = tensors
    for name, info in sorted(header.items()):
        offsets = info.get("data_offsets")
        if name != "__metadata__" and isinstance(offsets, list):
            start, end = offsets
            yield f"tensor {name}", _digest(file, data + start, end - start, f"{info.get('dtype')} {info.get('shape')}")


def _digest(file: BinaryIO, start: int, size: int, head: str) -> str:
    digest = hashlib.sha256(f"{head} {size}".encode())
    whole = size <= WINDOW * WINDOWS
    for k in range(1 if whole else WINDOWS):
        file.seek(start + (size - WINDOW) * k // (WINDOWS - 1) if not whole else start)
        digest.update(file.read(size if whole else WINDOW))
    return digest.hexdigest()[:16]
