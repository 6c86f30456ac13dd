"""The hooks of an adapter. They choose and build, at load time only; a step calls none of them.

Each hook is optional but `mrv2_model`, is called on the one adapter concerned, and may leave out `ctx`.
`mrv2_model` and `mrv2_model_state` choose by `ctx.architecture`: tools ask them without a checkpoint, when
`ctx.config` is None and `ctx.raw_config` empty. `docs/hooks.md` is made from this file; in each documentation
below, "Called" says by whom and when, "Refused" what a host doesn't take (`HookResultError`, MRV2-111).
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

    A subclass of `transformers.PretrainedConfig` whose `model_type` is one of the manifest's. It is registered with
    `AutoConfig`. None: transformers has the class.

    Called: when a checkpoint's `config.json` is read, if transformers itself hasn't its model type; inside vLLM in
    every process that reads one. `ctx.config` is None; `ctx.path` and `ctx.raw_config` may be missing inside vLLM.

    Refused: what is no class, and a class of another `model_type`.
    """


@hookspec(firstresult=True)
def mrv2_tokenizer(ctx: AdapterContext) -> object | None:
    """A tokenizer, if `transformers.AutoTokenizer` can't load the checkpoint's.

    Has `encode(text) -> list[int]` and `decode(ids) -> str`. Used as well, where it has them:
    the keyword `skip_special_tokens` of `decode`; `eos_token_ids`, end tokens beside the config's; and
    `apply_chat_template(messages, add_generation_prompt=...) -> list[int]`, without which chats are refused.
    None: the one in the checkpoint's folder, or token ids in and out where there is none.

    Called: once per `LLM`, after the weights are loaded; inside vLLM in every process that has a tokenizer.

    Refused: a class, and an object without `encode` or `decode`.
    """


@hookspec(firstresult=True)
def mrv2_model(ctx: AdapterContext) -> type:
    """The model class of `ctx.architecture`: an `nn.Module` as `mrv2.layers.base.ModelClass` describes.

    A class, not an instance: `weight_map`, `parts` and `recurrent` are read before there is one.

    Called: for every model that is loaded, in both hosts; by `show`, `doctor` and `check`; and by vLLM in a process of
    its own that only inspects the class. It may be called several times and has to return the same class. An adapter
    of kind `model` can't leave it out.

    Refused: None for an architecture that the manifest claims; what is no subclass of `torch.nn.Module`; a class that
    lacks one of the three attributes or has one of another kind; a `forward` that doesn't name `input_ids`,
    `positions`, `ctx` and the parts' keys, or takes `**keywords`.
    """


@hookspec(firstresult=True)
def mrv2_weight_source(ctx: AdapterContext) -> object | None:
    """Where tensors come from, if the checkpoint is neither safetensors nor GGUF.

    An object opened for `ctx.path`, as `mrv2.loader.source.WeightSource` describes: names, shapes, dtypes, and
    tensors or slices of them, read one at a time. None: the folder's safetensors files.

    Called: when weights are loaded, in both hosts.

    Refused: a class.
    """


@hookspec(firstresult=True)
def mrv2_model_state(ctx: AdapterContext) -> type | None:
    """The `ModelState` subclass. None: `DefaultModelState`, which composes the model class's `parts`.

    Called: for every model that is loaded, in both hosts; by `show`, `doctor` and `check`.

    Refused: what is no subclass of `mrv2.ModelState`, and one that leaves abstract methods.
    """


@hookspec(firstresult=True)
def mrv2_mm_processor(ctx: AdapterContext) -> object | None:
    """Turns images, audio or video into model inputs. With capability `multimodal`.

    Called: by no host yet. `mrv2 check` refuses the capability for the native host, which can't use it.

    Refused: anything but None without the capability for `ctx.host`.
    """


@hookspec(firstresult=True)
def mrv2_speculator(ctx: AdapterContext) -> type | None:
    """The drafter's class. With capability `drafting`.

    Called: by no host yet. `mrv2 check` refuses the capability for the native host, which can't use it.

    Refused: what is no class, and anything but None without the capability for `ctx.host`.
    """


@hookspec(firstresult=True)
def mrv2_logits_processors(ctx: AdapterContext) -> Sequence[Any] | None:
    """Classes of processors, `mrv2.LogitsProcessor`, that run after penalties and before temperature, in this order.
    With capability `logits_processors`. None: there are none.

    Called: for every model that is loaded, in both hosts.

    Refused: what is no list or tuple of such classes, and anything but None without the capability for `ctx.host`.
    """


@hookspec(firstresult=True)
def mrv2_test_target(ctx: AdapterContext) -> object | None:
    """An `mrv2.testing.Target`: small configs, a reference (callable, file, or none), tolerances. For `mrv2 check`.

    ```python
    @mrv2.hookimpl
    def mrv2_test_target(ctx):
        from mrv2.testing import Target, tiny_config

        return Target(configs={"small": tiny_config(AcmeConfig)}, reference=Reference)
    ```

    `Reference(folder)` opens a small config's checkpoint and returns what takes token ids and gives logits;
    `reference=None` leaves the proof to invariances. `mrv2 new-adapter` writes a whole one.

    None: a test class, or a checkpoint given to `mrv2 check`, has to say it.

    Called: by the conformance kit only, with the first of the manifest's architectures; never when a model runs.

    Refused: what is no `Target` (`TargetError`, MRV2-701).
    """


@hookspec(firstresult=True)
def mrv2_vllm(ctx: AdapterContext) -> object | None:
    """How to run inside vLLM, if not with the adapter's own model: an `mrv2.VllmModel` names a class of vLLM's, which
    then runs with the adapter's state. None: the adapter's model.

    Called: when the model is built inside vLLM; by `check`, and by `doctor`.

    Refused: what is no `VllmModel`.
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
