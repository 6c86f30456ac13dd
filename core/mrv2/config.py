"""The model's config: `config.json` read strictly, interpreted by transformers or by an adapter's class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mrv2.context import AdapterContext
from mrv2.errors import ConfigError
from mrv2.layers.rope_config import checked

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"

LAYER_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
"""What sizes a layer's tensors: one number, or in some families a list with one per layer."""

MAX_SIZE = 2**63 - 1
"""What an int64 holds; JSON's integers have no end."""


class ConfigAdapter(Protocol):
    """What is needed of a loaded adapter here."""

    def config_class(self, ctx: AdapterContext) -> type | None:
        """The config class of `ctx.model_type`, if the adapter brings one."""
        ...


class ConfigRegistry(Protocol):
    """What is needed of the registry here."""

    def resolve(self, architecture: str) -> ConfigAdapter:
        """The adapter of an architecture; raises what tells the user how to get one."""
        ...

    def for_model_type(self, model_type: str) -> ConfigAdapter | None:
        """The adapter that claims a model type."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One checkpoint's config, and the few facts that the host itself needs of it.

    Args:
        path: the checkpoint's folder.
        architecture: the one entry of `architectures`.
        model_type: as written.
        hf_config: the config object; what the model's constructor and the hooks get.
        raw: `config.json` as written.
        vocab_size: ids the model has embeddings for.
        num_layers: transformer layers, where the config says so.
        max_model_len: positions the model serves, rotary scaling included; None: it has no limit of its own.
        eos_token_ids: end tokens, from `generation_config.json` if that names any, else from the config.
        dtype: of the checkpoint, as the config says; None: it doesn't.
    """

    path: Path
    architecture: str
    model_type: str
    hf_config: Any
    raw: Mapping[str, Any]
    vocab_size: int
    num_layers: int | None
    max_model_len: int | None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None

    def context(self) -> AdapterContext:
        """The argument of this model's hooks, in this host."""
        return AdapterContext(
            architecture=self.architecture,
            model_type=self.model_type,
            path=self.path,
            config=self.hf_config,
            raw_config=self.raw,
        )


def checkpoint_architecture(path: Path) -> str:
    """The architecture of the checkpoint in folder `path`, without reading more of its config.

    Raises:
        ConfigError: `config.json` is absent, malformed, or names none or several.
    """
    return _architecture(_raw_config(path), path / CONFIG_NAME)


def load_model_config(path: Path, registry: ConfigRegistry) -> ModelConfig:
    """Read the config of the checkpoint in folder `path`. Code in the checkpoint is never run.

    Raises:
        ConfigError: `config.json` or `generation_config.json` is absent or malformed.
        UnknownArchitectureError: no adapter serves the architecture.
    """
    file = path / CONFIG_NAME
    raw = _raw_config(path)
    architecture = _architecture(raw, file)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise _bad("model_type is missing or no string", file)
    adapter = registry.resolve(architecture)  # first: its error is the helpful one
    context = AdapterContext(architecture=architecture, model_type=model_type, path=path, raw_config=raw)
    _register_config_class(registry, adapter, context, file)
    hf_config = _load(path, file, raw)
    text_config = hf_config.get_text_config()
    _check_sizes(text_config, file)
    return ModelConfig(
        path=path,
        architecture=architecture,
        model_type=model_type,
        hf_config=hf_config,
        raw=raw,
        vocab_size=_required_size(text_config, "vocab_size", file),
        num_layers=_size(text_config, "num_hidden_layers", file),
        max_model_len=_context(text_config, file),
        eos_token_ids=_eos_token_ids(path, hf_config, text_config),
        dtype=_dtype(hf_config, text_config),
    )


def _context(text_config: Any, file: Path) -> int | None:
    """Positions the model serves. Types that stretch frequencies name the length before stretching."""
    length = _size(text_config, "max_position_embeddings", file)
    rope = getattr(text_config, "rope_parameters", None)
    if length is None or not isinstance(rope, Mapping) or rope.get("factor") is None:
        return length
    rope_type, before = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    if rope_type not in ("linear", "dynamic", "yarn"):
        return length
    factor: Any = checked("factor", rope["factor"], where=str(file))
    if rope_type != "yarn":
        return min(max(1, int(length * factor)), MAX_SIZE)
    start: Any = length if before is None else checked("original_max_position_embeddings", before, where=str(file))
    return min(max(length, int(start * factor)), MAX_SIZE)


def _raw_config(path: Path) -> dict[str, Any]:
    raw = _read_json(path / CONFIG_NAME)
    if raw is None:
        raise ConfigError(
            f"there is no {CONFIG_NAME}", where=str(path), fix="give the folder that holds it, or a .gguf file"
        )
    return raw


def _read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`; None if there is no such file."""
    if file.exists() and not file.is_file():  # reading a pipe would wait for ever
        raise _bad("it is no regular file", file)
    try:
        found = json.loads(file.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as e:
        raise _bad(f"it isn't UTF-8 (byte {e.start})", file) from e
    except json.JSONDecodeError as e:
        raise _bad(f"it isn't JSON (line {e.lineno}, column {e.colno}: {e.msg})", file) from e
    except (OSError, RecursionError, ValueError) as e:  # nested too deeply, or an integer of thousands of digits
        raise _bad(f"it can't be read ({e})", file) from e
    if not isinstance(found, dict):
        raise _bad("it holds no JSON object", file)
    return found


def _bad(what: str, file: Path, fix: str = "get the file again, or correct it") -> ConfigError:
    return ConfigError(what, where=str(file), fix=fix)


def _architecture(raw: Mapping[str, Any], file: Path) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        raise _bad("architectures is missing or no list of names", file, "add the name of the model class")
    if len(names) > 1:
        raise _bad(f"architectures names {len(names)}: {', '.join(names)}", file, "leave the one to run")
    return str(names[0])


def _register_config_class(
    registry: ConfigRegistry, adapter: ConfigAdapter, context: AdapterContext, file: Path
) -> None:
    """Make AutoConfig know the model type, if transformers doesn't and an adapter does."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = context.model_type
    if model_type in CONFIG_MAPPING_NAMES:  # what transformers itself has, without what was registered before
        return
    owner = registry.for_model_type(model_type) or adapter
    config_class = owner.config_class(context)
    if config_class is None:
        raise _bad(
            f"neither transformers nor an adapter knows model_type {model_type!r}",
            file,
            f"correct it, or let the adapter of {context.architecture} bring a class (mrv2_config)",
        )
    AutoConfig.register(model_type, config_class)


def _load(path: Path, file: Path, raw: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # config classes validate with many exception types, adapters' with their own
        _check_sizes(raw, file)  # theirs may be a division by zero that names nothing
        raise _bad(f"the config class refuses it ({type(e).__name__}: {e})", file) from e


def _size(config: Any, name: str, file: Path) -> int | None:
    value = _value(config, name)
    if value is None:
        return None
    if not _is_size(value):
        raise _bad(f"{name} is {str(value)[:40]}, expected a positive integer", file)
    return int(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _check_sizes(config: Any, file: Path) -> None:
    """Refuse sizes that no layer can have, by name."""
    for name in ("hidden_size", "num_hidden_layers"):
        _size(config, name, file)
    if getattr(config, "is_heterogeneous", False):  # reading what differs by layer raises
        return
    for name in LAYER_SIZES:
        value = _value(config, name)
        if not (isinstance(value, list | tuple) and value and all(map(_is_size, value))):
            _size(config, name, file)


def _required_size(config: Any, name: str, file: Path) -> int:
    value = _size(config, name, file)
    if value is None:
        raise _bad(f"{name} is missing", file, "add it, or map it in the config class's attribute_map")
    return value


def _eos_token_ids(path: Path, hf_config: Any, text_config: Any) -> tuple[int, ...]:
    """As transformers' generate: the generation config's, which replaces the model config's."""
    file = path / GENERATION_CONFIG_NAME
    value = (_read_json(file) or {}).get("eos_token_id")
    if value is None:
        file = path / CONFIG_NAME
        value = getattr(hf_config, "eos_token_id", None)
    if value is None:
        value = getattr(text_config, "eos_token_id", None)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise _bad(f"eos_token_id is {value!r}, expected a token id or a list of them", file)
    return tuple(dict.fromkeys(ids))


def _dtype(hf_config: Any, text_config: Any) -> torch.dtype | None:
    for config in (hf_config, text_config):
        dtype = getattr(config, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return None
