"""What MODEL on a command line or in `LLM(model)` means, and the folder it leads to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrv2.errors import CheckpointFileError, DownloadError, ModelNotFoundError
from mrv2.loader.bundled import bundled_folder, bundled_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""What is fetched from a hub: never pickle, never code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocation:
    """A model as a folder that can be opened.

    Args:
        name: what the user wrote.
        path: folder with `config.json` and, usually, weights and a tokenizer.
        kind: how it was found.
    """

    name: str
    path: Path
    kind: Literal["folder", "gguf", "bundled", "hub"]

    @property
    def from_gguf(self) -> bool:
        """Whether the folder was converted from a GGUF file."""
        return self.kind in ("gguf", "bundled")


def resolve_model(name: str, *, dtype: str = "float32") -> ModelLocation:
    """Find `name`: a folder, a GGUF file, a bundled name, or a hub id, in this order.

    Only a hub id, and a bundled model at its first use, need a network.

    Args:
        name: what the user wrote; `~` is expanded.
        dtype: of tensors converted from GGUF, which stores none of its own.

    Raises:
        ModelNotFoundError: it is none of these.
        DownloadError: a hub or package can't be reached.
        ModelCacheError, ChecksumError, CheckpointFileError, MissingExtraError: from conversion.
    """
    path = Path(os.path.expanduser(name))
    # os.path: pathlib's own tests raise for names that are too long or that may not be looked at.
    if name and os.path.isdir(path):
        return ModelLocation(name=name, path=path, kind="folder")
    if os.path.isfile(path):
        return ModelLocation(name=name, path=_from_file(path, dtype), kind="gguf")
    bundled = bundled_models()
    if name in bundled:
        return ModelLocation(name=name, path=bundled_folder(bundled[name], dtype=dtype), kind="bundled")
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ModelLocation(name=name, path=_from_hub(name), kind="hub")
    raise ModelNotFoundError(
        f"{name!r} is no folder, no file, and no bundled model",
        where=f"looked in {_here()}",
        fix=f"give a folder, a .gguf file, a hub id such as org/name, or one of: {', '.join(sorted(bundled))}",
    )


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as e:
        return f"the current folder ({e.strerror})"


def _from_file(path: Path, dtype: str) -> Path:
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise CheckpointFileError(
            f"{path.name} can't be read ({e.strerror or e})", where=str(path), fix="check its permissions"
        ) from e
    if magic != b"GGUF":
        raise ModelNotFoundError(
            f"{path.name} is no GGUF file",
            where=str(path),
            fix="give the folder that holds config.json, or a .gguf file",
        )
    from mrv2.loader.convert import convert_gguf

    return convert_gguf(path, dtype=dtype)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as e:  # its own errors, the HTTP client's, and the system's
        reason = str(e).strip().splitlines() or [""]
        raise DownloadError(
            f"{name} is no folder here, and the hub can't give it ({type(e).__name__}: {reason[0]})",
            where=f"MODEL {name}",
            fix=f"check the name and the network, or where there is one run: hf download {name}",
        ) from e
