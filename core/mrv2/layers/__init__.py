"""What adapters build models from."""

from mrv2.layers.base import LayerSet, ModelClass, Slot, StepContext, Stream, WeightMap
from mrv2.layers.rope_config import rope_parameters

__all__ = ["LayerSet", "ModelClass", "Slot", "StepContext", "Stream", "WeightMap", "rope_parameters"]
