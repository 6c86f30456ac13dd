"""Weights inside vLLM: vLLM's tensors or the adapter's own source, through the one strict loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import get_pp_missing_layer_names

from mrv2.loader.slots import collect_slots
from mrv2.loader.source import SafetensorsSource, WeightSource, iter_tensors, tensor_infos
from mrv2.loader.weights import check_weights, load_weights

SAFETENSORS = ("auto", "hf", "safetensors")
"""vLLM's load formats that read a folder's safetensors."""


def load_from_vllm(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill a hosted model. Headers are compared before anything is copied, where the folder is here.

    Args:
        model: of a class that `mrv2.bridge.build` made.
        weights: what vLLM's loader reads; left alone if the adapter brings a source of its own.

    Raises:
        WeightsError, CheckpointFileError: as in the native host.
    """
    config = model.mrv2_config
    elsewhere = tuple(get_pp_missing_layer_names(model))
    num_layers = None if elsewhere else getattr(config.model_config.hf_text_config, "num_hidden_layers", None)
    where = str(config.model_config.model)
    source = _own_source(model)
    if source is not None:
        weights = iter_tensors(source)
    elif config.quant_config is not None:
        weights = _rename_scales(config.quant_config, weights)
    elif config.load_config.load_format in SAFETENSORS and Path(where).is_dir():
        source = SafetensorsSource(Path(where))
    if source is not None:
        check_weights(
            model, tensor_infos(source), model.weight_map, num_layers=num_layers, elsewhere=elsewhere, where=where
        )
    load_weights(model, weights, model.weight_map, num_layers=num_layers, elsewhere=elsewhere, where=where)
    _finalize(model)
    return {slot.param_name for slot in collect_slots(model).values()}


def _own_source(model: Any) -> WeightSource | None:
    config = model.mrv2_config.model_config
    folder = Path(config.model)
    context = replace(
        model.mrv2_context,
        model_type=getattr(config.hf_config, "model_type", ""),
        path=folder if folder.exists() else None,
        config=config.hf_config,
    )
    source: WeightSource | None = model.mrv2_adapter.weight_source(context)
    return source


def _rename_scales(quantisation: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names of scales differ between quantisers; vLLM knows them."""
    mapper = quantisation.get_cache_scale_mapper()
    if hasattr(quantisation, "get_checkpoint_weight_mapper"):
        mapper = mapper | quantisation.get_checkpoint_weight_mapper()
    renamed: Iterator[tuple[str, Tensor]] = iter(mapper.apply(weights))
    return renamed


def _finalize(model: Any) -> None:
    """Let modules of the adapter derive what they compute from weights, as after every native load."""
    for module in model.modules():
        if callable(hook := getattr(module, "finalize_weights", None)):
            hook()
