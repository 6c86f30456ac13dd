"""Names under which vLLM knows our models. Imports neither torch nor vLLM: the plugin runs in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cache
from pathlib import Path

from mrv2.entry import AdapterEntry
from mrv2.version import __version__

PREFIX = "Mrv2"
"""In front of an architecture that vLLM has a class for. Its own name stays vLLM's."""

MODULE_PREFIX = "mrv2_hosted_"

TOKENIZER_SUFFIX = "_tokenizer"
"""After a registered name: what loads that model's tokenizer, in the same module."""

_HOST_CODE = ("bridge", "layers/vllm")


def registered_names(architecture: str, taken: Collection[str]) -> tuple[str, ...]:
    """Names for `architecture`: the prefixed one, and its own unless vLLM or another plug-in has it (`taken`)."""
    prefixed = PREFIX + architecture
    return (prefixed,) if architecture in taken else (architecture, prefixed)


def architecture_of(name: str) -> str:
    """The architecture behind a registered name."""
    return name.removeprefix(PREFIX)


def module_name(entry: AdapterEntry) -> str:
    """The module that vLLM is told holds the adapter's registered classes.

    vLLM keeps what it found out about a class on disk, under this name and a hash of the adapter's files. The host's
    own code decides about that too, so its hash is part of the name.
    """
    return f"{MODULE_PREFIX}{host_digest()}_{entry.name.replace('-', '_')}"


def adapter_file(entry: AdapterEntry) -> Path:
    """The file whose hash stands for the adapter: its package's `__init__.py`, or the file of a local one."""
    if entry.source.endswith(".py"):
        return Path(entry.source)
    return Path(entry.manifest_path or entry.source).parent / "__init__.py"


@cache
def host_digest() -> str:
    """Eight digits that change with the code of this host."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(__version__.encode())
    for folder in _HOST_CODE:
        for file in sorted((root / folder).glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]
