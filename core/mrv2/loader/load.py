"""A checkpoint made into a model that can run: built on its device, filled strictly, finalised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from mrv2.config import ModelConfig
from mrv2.context import AdapterContext
from mrv2.errors import ModelBuildError, Mrv2Error, UnsupportedError
from mrv2.layers.native import NativeLayers, check_names, check_recurrent
from mrv2.loader.source import SafetensorsSource, WeightSource, iter_tensors, tensor_infos
from mrv2.loader.weights import LoadReport, bind_weight_map, check_layer_count, check_weights, load_weights
from mrv2.loading import describe, raised_at, source_of, stdout_to_stderr


class ModelAdapter(Protocol):
    """What is needed of a loaded adapter here."""

    def model_class(self, ctx: AdapterContext) -> Any:
        """The model class of `ctx.architecture` (`ModelClass`)."""
        ...

    def weight_source(self, ctx: AdapterContext) -> Any:
        """The adapter's own weight source, or None."""
        ...


def open_source(config: ModelConfig, adapter: ModelAdapter) -> WeightSource:
    """The adapter's weight source, else the folder's safetensors.

    Raises:
        CheckpointFileError: see `SafetensorsSource`.
    """
    own: WeightSource | None = adapter.weight_source(config.context())
    return SafetensorsSource(config.path) if own is None else own


def checkpoint_dtype(config: ModelConfig, source: WeightSource) -> torch.dtype:
    """The dtype a checkpoint was written for: the config's, else that of its first floating tensor, else fp32."""
    if config.dtype is not None:
        return config.dtype
    dtypes = (source.dtype(name) for name in source.names())
    return next((d for d in dtypes if d.is_floating_point), torch.float32)


def build_model(
    config: ModelConfig, adapter: ModelAdapter, layers: NativeLayers, *, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model, its parameters allocated on `device` and not yet filled.

    It is built in place, not on the meta device: tables that constructors compute (rotary ones) would be lost.

    Raises:
        LayerNameError: a layer isn't stored under the name it was given.
        RecurrentFlagError: the class attribute `recurrent` doesn't say what the layers declared.
        ModelBuildError: the constructor raised, or there isn't enough memory.
    """
    cls = adapter.model_class(config.context())
    try:
        with torch.device(device), default_dtype(dtype), stdout_to_stderr():
            model: nn.Module = cls(layers, config.hf_config)
            bind_weight_map(model, config.hf_config)
    except (Mrv2Error, KeyboardInterrupt):
        raise
    except BaseException as error:  # an adapter's code, with values from a config
        raise ModelBuildError(
            f"{describe(error)}, raised at {raised_at(error.__traceback__)}",
            where=f"{config.architecture} of {config.path}, {source_of(cls)}",
            fix="compare the sizes in config.json with the checkpoint, or correct the named line",
        ) from error
    check_names(model, layers)
    check_recurrent(model, layers)
    return model.requires_grad_(False).eval()


def load_model(
    config: ModelConfig,
    adapter: ModelAdapter,
    layers: NativeLayers,
    *,
    device: torch.device,
    dtype: torch.dtype,
    source: WeightSource | None = None,
) -> nn.Module:
    """Build the model of `config` and fill it; ready to run when this returns.

    Args:
        config: from `load_model_config`.
        adapter: from the registry.
        layers: a new layer set; it knows afterwards which caches the model needs.
        device: where parameters and constructor-made tables live.
        dtype: of parameters; checkpoint tensors are converted as they are copied.
        source: instead of the adapter's or the folder's.

    Raises:
        WeightsError, CheckpointFileError: the checkpoint doesn't fit, or can't be read.
        UnsupportedError: the checkpoint is quantised.
        ModelBuildError, SlotError, LayerNameError: the model class is at fault, or the config's sizes.
    """
    quantised = config.raw.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedError(
            f"the checkpoint is quantised ({method}), which the native runner doesn't read",
            where=str(config.path / "config.json"),
            fix="use the unquantised checkpoint, or run this one in vLLM",
        )
    source = open_source(config, adapter) if source is None else source
    weight_map = adapter.model_class(config.context()).weight_map
    check_layer_count(source.names(), weight_map, config.num_layers, where=_where(source))
    model = build_model(config, adapter, layers, device=device, dtype=dtype)
    fill_model(model, layers, source, num_layers=config.num_layers)
    return model


def random_model(
    config: ModelConfig,
    adapter: ModelAdapter,
    layers: NativeLayers,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """Build the model of `config` and fill it with random numbers, the same each time; for what weights don't matter
    to: speed and memory. Vectors are ones, so that norms leave things as they are; hidden states keep their size.

    Args:
        config: from `load_model_config`; nothing else has to be in its folder.
        adapter: from the registry.
        layers: a new layer set.
        device: where parameters and constructor-made tables live.
        dtype: of parameters.

    Raises:
        ModelBuildError, LayerNameError: see `build_model`.
    """
    model = build_model(config, adapter, layers, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim < 2 or not parameter.is_floating_point():
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    layers.finalize(model)
    return model


def fill_model(
    model: nn.Module, layers: NativeLayers, source: WeightSource, *, num_layers: int | None = None
) -> LoadReport:
    """Fill `model`, new or running, from `source`, then finalise it. Parameters keep their addresses.

    Names and shapes are compared before anything is copied, so a checkpoint that doesn't fit leaves a running
    model as it was (except with a weight map that has a `transform`, or a tied head that differs).

    Args:
        model: built with `layers`.
        layers: the layer set, for what follows every load (`NativeLayers.finalize`).
        source: the checkpoint.
        num_layers: the config's layer count; see `load_weights`.

    Raises:
        WeightsError: the checkpoint doesn't fit; the message says whether anything has been loaded.
    """
    weight_map: Any = model.weight_map  # part of what a model class must have
    where = _where(source)
    check_weights(model, tensor_infos(source), weight_map, num_layers=num_layers, where=where)
    report = load_weights(model, iter_tensors(source), weight_map, num_layers=num_layers, where=where)
    layers.finalize(model)
    return report


def _where(source: WeightSource) -> str:
    """The source's first files, for messages."""
    return ", ".join(str(f) for f in source.files[:2]) + (", …" if len(source.files) > 2 else "")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
