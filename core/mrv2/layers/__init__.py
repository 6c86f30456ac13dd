"""What adapters build models from."""

from mrv2.layers.base import LayerSet, ModelClass, Slot, StepContext, Stream, WeightMap
from mrv2.layers.causal_lm import CausalLM, Decoder, DecoderBlock
from mrv2.layers.rope_config import rope_parameters

__all__ = [
    "CausalLM",
    "Decoder",
    "DecoderBlock",
    "LayerSet",
    "ModelClass",
    "Slot",
    "StepContext",
    "Stream",
    "WeightMap",
    "rope_parameters",
]
