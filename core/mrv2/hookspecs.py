"""The hooks of an adapter. They choose and build, at load time only; a step calls none of them.

Each hook is optional but `mrv2_model`, is called on the one adapter concerned, and may leave out `ctx`.
`mrv2_model` and `mrv2_model_state` choose by `ctx.architecture`: tools ask them without a checkpoint, when
`ctx.config` is None and `ctx.raw_config` empty.
"""

# Specifications have no body, so their argument is unused and nothing is returned.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from mrv2.api import PROJECT
from mrv2.context import AdapterContext

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec(firstresult=True)
def mrv2_config(ctx: AdapterContext) -> type | None:
    """The config class of `ctx.model_type`, for a model type that transformers doesn't know.

    A subclass of `transformers.PretrainedConfig` whose `model_type` is one of the manifest's. `ctx.config` is None.
    """


@hookspec(firstresult=True)
def mrv2_tokenizer(ctx: AdapterContext) -> object | None:
    """A tokenizer, if `transformers.AutoTokenizer` can't load the checkpoint's.

    Has `encode(text) -> list[int]` and `decode(ids) -> str`. Used as well, where it has them:
    the keyword `skip_special_tokens` of `decode`; `eos_token_ids`, end tokens beside the config's; and
    `apply_chat_template(messages, add_generation_prompt=...) -> list[int]`, without which chats are refused.
    """


@hookspec(firstresult=True)
def mrv2_model(ctx: AdapterContext) -> type:
    """The model class of `ctx.architecture`: an `nn.Module` as `mrv2.layers.base.ModelClass` describes.

    A class, not an instance: `weight_map`, `parts` and `recurrent` are read before there is one.
    """


@hookspec(firstresult=True)
def mrv2_weight_source(ctx: AdapterContext) -> object | None:
    """Where tensors come from, if the checkpoint is neither safetensors nor GGUF.

    An object opened for `ctx.path`, as `mrv2.loader.source.WeightSource` describes: names, shapes, dtypes, and
    tensors or slices of them, read one at a time.
    """


@hookspec(firstresult=True)
def mrv2_model_state(ctx: AdapterContext) -> type | None:
    """The `ModelState` subclass; the default composes the model class's `parts`."""


@hookspec(firstresult=True)
def mrv2_mm_processor(ctx: AdapterContext) -> object | None:
    """Turns images, audio or video into model inputs. With capability `multimodal`."""


@hookspec(firstresult=True)
def mrv2_speculator(ctx: AdapterContext) -> type | None:
    """The drafter's class. With capability `drafting`."""


@hookspec(firstresult=True)
def mrv2_logits_processors(ctx: AdapterContext) -> Sequence[Any] | None:
    """Classes of processors, `mrv2.LogitsProcessor`, that run after penalties and before temperature, in this order.
    With capability `logits_processors`.
    """


@hookspec(firstresult=True)
def mrv2_test_target(ctx: AdapterContext) -> object | None:
    """An `mrv2.testing.Target`: small configs, a reference (callable, file, or none), tolerances. For `mrv2 check`."""


@hookspec(firstresult=True)
def mrv2_vllm(ctx: AdapterContext) -> object | None:
    """How to run inside vLLM, if not with the adapter's own model: an `mrv2.VllmModel` names a class of vLLM's, which
    then runs with the adapter's state.
    """


HOOKS: tuple[str, ...] = (
    "mrv2_config",
    "mrv2_tokenizer",
    "mrv2_model",
    "mrv2_weight_source",
    "mrv2_model_state",
    "mrv2_mm_processor",
    "mrv2_speculator",
    "mrv2_logits_processors",
    "mrv2_test_target",
    "mrv2_vllm",
)
"""All hooks, in the order in which a host calls them."""
