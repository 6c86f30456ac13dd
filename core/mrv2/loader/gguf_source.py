"""GGUF files as a weight source. Names, layouts and the config are read by transformers' own GGUF code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrv2.errors import CheckpointFileError, MissingExtraError
from mrv2.loader.source import size_text


class GgufSource:
    """One GGUF file, dequantised tensor by tensor to fp32, under the names transformers gives them.

    Attributes:
        config: the config transformers derives from the file's metadata, with `architectures` filled in.
        files: the one file.
        has_tokenizer: the file carries a vocabulary.

    Raises:
        MissingExtraError: the `gguf` package isn't installed.
        CheckpointFileError: the file is truncated or damaged, transformers doesn't know its architecture, or
            it holds something that transformers would drop in silence.
    """

    def __init__(self, file: Path) -> None:
        self.files = (file,)
        reader = _open(file)
        self.has_tokenizer = "tokenizer.ggml.tokens" in reader.fields
        self.config = _read_config(file)
        _refuse_lost_rope(reader, self.config, file)
        model = _meta_model(self.config, file)
        self.config.architectures = [type(model).__name__]
        self._shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._processor, self._name_of = _name_map(reader, model, file)
        self._tensors = _by_hf_name(reader, self._name_of, file)

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, as transformers calls it."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that transformers' model gives the tensor; `read` checks it."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns: fp32."""
        return torch.float32

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The dequantised tensor, fp32, or a slice of it."""
        from gguf import dequantize

        raw = self._tensors[name]
        values = self._processor.process(
            weights=dequantize(raw.data, raw.tensor_type),
            name=raw.name,
            tensor_key_mapping=self._name_of,
            parsed_parameters={"tensors": {}},
        ).weights
        tensor = torch.tensor(values)
        if tuple(tensor.shape) != self.shape(name):
            raise CheckpointFileError(
                f"tensor {raw.name} is {list(tensor.shape)}, its metadata asks for {list(self.shape(name))}",
                where=str(self.files[0]),
                fix="get the file again",
            )
        return tensor if index is None else tensor[index].clone()


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise MissingExtraError(
            "reading GGUF needs the gguf package", where=str(file), fix="pip install 'mrv2[gguf]'"
        ) from e
    try:
        return GGUFReader(file)
    except Exception as e:  # it parses untrusted bytes and raises whatever NumPy raises
        raise CheckpointFileError(
            f"{file.name} is truncated or no GGUF file ({type(e).__name__}: {e}; {size_text(file)})",
            where=str(file),
            fix="get the file again and compare its size or checksum",
        ) from e


def _read_config(file: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as e:  # unknown architectures and odd metadata end in many types
        raise _unknown(file, f"{type(e).__name__}: {e}") from e


def _meta_model(config: Any, file: Path) -> Any:
    """The model without memory; its names and shapes are what the file is mapped to."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as e:
        raise _unknown(file, f"{type(e).__name__}: {e}") from e


def _name_map(reader: Any, model: Any, file: Path) -> tuple[Any, dict[str, str]]:
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    architecture = read_field(reader, "general.architecture")[0]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    try:
        return processor, get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as e:
        raise _unknown(file, str(e)) from e


def _by_hf_name(reader: Any, name_of: dict[str, str], file: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for raw in reader.tensors:
        name = name_of.get(raw.name)
        if name is None:
            raise _unknown(file, f"tensor {raw.name} has no place in transformers' model")
        if name in tensors:
            raise _unknown(file, f"tensors {tensors[name].name} and {raw.name} would have to be joined into {name}")
        tensors[name] = raw
    return tensors


def _refuse_lost_rope(reader: Any, config: Any, file: Path) -> None:
    """Reading a GGUF drops rotary scaling of most families; text past the original context would be wrong."""
    from transformers.modeling_gguf_pytorch_utils import read_field

    architecture = read_field(reader, "general.architecture")[0]
    scaling = next(iter(read_field(reader, f"{architecture}.rope.scaling.type")), "none")
    rope = getattr(config, "rope_parameters", None) or {}
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        raise _unknown(file, f"its rotary scaling ({scaling}) would be lost")


def _unknown(file: Path, why: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"transformers can't read this GGUF as a whole: {why}",
        where=str(file),
        fix="use the safetensors checkpoint of the same model",
    )
