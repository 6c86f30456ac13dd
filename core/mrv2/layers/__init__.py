"""What adapters build models from."""

from mrv2.layers.base import LayerSet, ModelClass, Slot, StepContext, Stream, WeightMap
from mrv2.layers.causal_lm import CausalLM, Decoder, DecoderBlock
from mrv2.layers.custom import (
    CacheKernel,
    CacheMeta,
    CacheTensor,
    PerRequest,
    PerToken,
    fresh,
    load_state,
    read_tokens,
    steps,
    store_state,
    write_tokens,
)
from mrv2.layers.rope_config import rope_parameters

__all__ = [
    "CacheKernel",
    "CacheMeta",
    "CacheTensor",
    "CausalLM",
    "Decoder",
    "DecoderBlock",
    "LayerSet",
    "ModelClass",
    "PerRequest",
    "PerToken",
    "Slot",
    "StepContext",
    "Stream",
    "WeightMap",
    "fresh",
    "load_state",
    "read_tokens",
    "rope_parameters",
    "steps",
    "store_state",
    "write_tokens",
]
