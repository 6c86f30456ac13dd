"""A small and complete adapter without a fault: what the mutants are made from, each with one."""

from __future__ import annotations

import mrv2


@mrv2.hookimpl
def mrv2_config(ctx: mrv2.AdapterContext) -> type:
    """The config class; transformers has none for this model type."""
    from .config import HeronConfig

    return HeronConfig


@mrv2.hookimpl
def mrv2_model(ctx: mrv2.AdapterContext) -> type:
    """The one model class."""
    from .model import HeronForCausalLM

    return HeronForCausalLM


@mrv2.hookimpl
def mrv2_model_state(ctx: mrv2.AdapterContext) -> type:
    """The state, which adds nothing to the parts."""
    from .state import HeronState

    return HeronState


@mrv2.hookimpl
def mrv2_test_target(ctx: mrv2.AdapterContext) -> object:
    """A tiny config, a checkpoint, and the answer."""
    from .reference import target

    return target()
