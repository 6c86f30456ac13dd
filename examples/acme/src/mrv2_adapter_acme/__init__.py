"""mrv2 adapter acme. Hooks only choose; the model is in `model.py`."""

from __future__ import annotations

import mrv2

# Each module, and torch with it, is imported when its hook is called: `mrv2 list` waits for none of them.


@mrv2.hookimpl
def mrv2_config(ctx: mrv2.AdapterContext) -> type:
    """The config class; transformers has none for this model type."""
    from .config import AcmeConfig

    return AcmeConfig


@mrv2.hookimpl
def mrv2_tokenizer(ctx: mrv2.AdapterContext) -> object | None:
    """Our own, of the vocabulary beside the weights."""
    from .tokenizer import AcmeTokenizer

    return None if ctx.path is None else AcmeTokenizer(ctx.path)


@mrv2.hookimpl
def mrv2_model(ctx: mrv2.AdapterContext) -> type:
    """The model class of the architecture."""
    from .model import AcmeForCausalLM

    return AcmeForCausalLM


@mrv2.hookimpl
def mrv2_weight_source(ctx: mrv2.AdapterContext) -> object | None:
    """Our shards."""
    from .shards import ShardSource

    return None if ctx.path is None else ShardSource(ctx.path)


@mrv2.hookimpl
def mrv2_test_target(ctx: mrv2.AdapterContext) -> object:
    """What `mrv2 check` and the tests run."""
    from .testing import target

    return target()
