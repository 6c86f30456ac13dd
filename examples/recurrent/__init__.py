"""A sample adapter: a model that nobody else knows, with recurrent mixers and an attention of its own.

    mrv2 generate CHECKPOINT --adapter examples/recurrent

Hooks only choose; the model is in `model.py`, what it should compute in `reference.py`.
"""

from __future__ import annotations

import mrv2


@mrv2.hookimpl
def mrv2_config(ctx: mrv2.AdapterContext) -> type:
    """The config class; transformers has none for this model type."""
    from recurrent.config import TidalConfig

    return TidalConfig


@mrv2.hookimpl
def mrv2_model(ctx: mrv2.AdapterContext) -> type:
    """The one model class."""
    from recurrent.model import TidalForCausalLM

    return TidalForCausalLM


@mrv2.hookimpl
def mrv2_test_target(ctx: mrv2.AdapterContext) -> object:
    """For `mrv2 check examples/recurrent`."""
    from recurrent.testing import target

    return target()
