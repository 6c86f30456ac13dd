"""`LoadedAdapter`: an adapter's hooks with types, each result checked before anyone uses it. Imports no torch."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pluggy

from mrv2.api import VllmModel
from mrv2.context import AdapterContext, Host
from mrv2.entry import AdapterEntry
from mrv2.errors import HookResultError, Mrv2Error, UnsupportedError
from mrv2.loading import describe, raised_at, source_of, stdout_to_stderr
from mrv2.manifest import Capability, Manifest

FORWARD_ARGS = ("input_ids", "positions", "ctx")
"""What every model's `forward` takes, before the keys of its parts."""


class LoadedAdapter:
    """An imported adapter. Each method calls one hook and checks what comes back.

    Raises:
        HookResultError: from every method; the hook raised, or returned something else than specified.
    """

    def __init__(self, entry: AdapterEntry, manager: pluggy.PluginManager) -> None:
        assert entry.manifest is not None, "entries without a manifest are refused before they are loaded"
        self.entry = entry
        self.manifest: Manifest = entry.manifest
        self._hooks = manager.hook

    def __repr__(self) -> str:
        return f"LoadedAdapter({self.entry.label})"

    @property
    def name(self) -> str:
        """Short name, as in `mrv2 list`."""
        return self.entry.name

    # -- hooks -------------------------------------------------------------------------------------------

    def config_class(self, ctx: AdapterContext) -> type | None:
        """The config class of `ctx.model_type`; None: transformers has it."""
        with self._checked("mrv2_config"):
            result = self._call("mrv2_config", ctx)
            if result is None:
                return None
            if not isinstance(result, type):
                self._wrong("mrv2_config", f"{_show(result)}, not a class", "return the config class itself")
            model_type = getattr(result, "model_type", None)
            if model_type != ctx.model_type:
                self._wrong(
                    "mrv2_config",
                    f"{_show(result)}, whose model_type is {model_type!r} and not {ctx.model_type!r}",
                    "pick the class by ctx.model_type",
                )
            return result

    def tokenizer(self, ctx: AdapterContext) -> object | None:
        """The adapter's tokenizer; None: transformers loads the checkpoint's."""
        with self._checked("mrv2_tokenizer"):
            result = self._call("mrv2_tokenizer", ctx)
            missing = [m for m in ("encode", "decode") if not callable(getattr(result, m, None))]
            if result is not None and (missing or isinstance(result, type)):
                what = "a class" if isinstance(result, type) else f"without {' and '.join(missing)}"
                self._wrong("mrv2_tokenizer", f"{_show(result)}, {what}", "return a tokenizer object")
            return result

    def model_class(self, ctx: AdapterContext) -> type:
        """The model class of `ctx.architecture`, as `mrv2.layers.base.ModelClass` describes."""
        with self._checked("mrv2_model"):
            result = self._call("mrv2_model", ctx)
            if result is None:
                self._wrong(
                    "mrv2_model",
                    f"None for {ctx.architecture}, which {self.entry.manifest_path or 'the manifest'} claims",
                    "return its class, or take it out of `architectures`",
                )
            fault = _model_fault(result)
            if fault:
                self._wrong("mrv2_model", f"{_show(result)}, {fault[0]}", fault[1])
            assert isinstance(result, type)
            return result

    def weight_source(self, ctx: AdapterContext) -> object | None:
        """The adapter's source of tensors; None: safetensors or GGUF."""
        with self._checked("mrv2_weight_source"):
            result = self._call("mrv2_weight_source", ctx)
            if isinstance(result, type):
                self._wrong("mrv2_weight_source", f"{_show(result)}, a class", "return an object opened for ctx.path")
            return result

    def model_state_class(self, ctx: AdapterContext) -> type | None:
        """The adapter's `ModelState` class; None: the default."""
        with self._checked("mrv2_model_state"):
            result = self._call("mrv2_model_state", ctx)
            if result is None:
                return None
            # A subclass exists only if its base has been imported.
            base = _imported("mrv2.model_state.base", "ModelState")
            if not isinstance(result, type) or base is None or not issubclass(result, base):
                self._wrong("mrv2_model_state", f"{_show(result)}, not a subclass of ModelState", "return such a class")
            missing = sorted(getattr(result, "__abstractmethods__", ()))
            if missing:
                self._wrong(
                    "mrv2_model_state", f"{_show(result)}, which lacks {', '.join(missing)}", "write these methods"
                )
            return result

    def mm_processor(self, ctx: AdapterContext) -> object | None:
        """What turns media into model inputs; None: text only."""
        with self._checked("mrv2_mm_processor"):
            return self._declared("mrv2_mm_processor", ctx, Capability.MULTIMODAL)

    def speculator(self, ctx: AdapterContext) -> type | None:
        """The drafter's class; None: the adapter drafts nothing."""
        with self._checked("mrv2_speculator"):
            result = self._declared("mrv2_speculator", ctx, Capability.DRAFTING)
            if result is not None and not isinstance(result, type):
                self._wrong("mrv2_speculator", f"{_show(result)}, not a class", "return the drafter's class")
            return result

    def logits_processors(self, ctx: AdapterContext) -> Sequence[Any]:
        """The adapter's own processors, in order."""
        with self._checked("mrv2_logits_processors"):
            result = self._declared("mrv2_logits_processors", ctx, Capability.LOGITS_PROCESSORS)
            if result is None:
                return ()
            if not isinstance(result, list | tuple):
                self._wrong("mrv2_logits_processors", f"{_show(result)}, not a list or tuple", "return a list")
            base = _imported("mrv2.sample.processors", "LogitsProcessor")
            for one in result:
                if not isinstance(one, type) or base is None or not issubclass(one, base):
                    self._wrong("mrv2_logits_processors", f"{_show(one)}, no LogitsProcessor class", "return classes")
            return tuple(result)

    def test_target(self, ctx: AdapterContext) -> object | None:
        """What the conformance kit compares with; None: its own invariances only."""
        with self._checked("mrv2_test_target"):
            return self._call("mrv2_test_target", ctx)

    def vllm(self, ctx: AdapterContext) -> VllmModel | None:
        """How to run inside vLLM; None: with the adapter's own model."""
        with self._checked("mrv2_vllm"):
            result = self._call("mrv2_vllm", ctx)
            if result is not None and not isinstance(result, VllmModel):
                self._wrong("mrv2_vllm", f"{_show(result)}, not an mrv2.VllmModel", "return one, or None")
            return result

    # -- about hooks -------------------------------------------------------------------------------------

    def hook_source(self, hook: str) -> str | None:
        """`file:line` of the adapter's function for `hook`; None: it has none."""
        implementations = getattr(self._hooks, hook).get_hookimpls()
        return source_of(implementations[0].function) if implementations else None

    def _call(self, hook: str, ctx: AdapterContext) -> object | None:
        result: object | None = getattr(self._hooks, hook)(ctx=ctx)
        return result

    @contextlib.contextmanager
    def _checked(self, hook: str) -> Iterator[None]:
        """Around a hook's call and the checks of its result, which may run code of the adapter as well."""
        try:
            with stdout_to_stderr():
                yield
        except (Mrv2Error, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise HookResultError(
                f"{hook} of adapter {self.name} raised {describe(error)}, at {raised_at(error.__traceback__)}",
                where=self._where(hook),
                fix="correct the hook, or what it returns",
            ) from error

    def _declared(self, hook: str, ctx: AdapterContext, capability: Capability) -> object | None:
        result = self._call(hook, ctx)
        if result is not None and not self.manifest.support(capability).on(ctx.host):
            self._wrong(
                hook,
                f"{_show(result)}, though the manifest doesn't declare {capability} for host {ctx.host}",
                f'state {capability} = "{ctx.host}" in adapter.toml, or return None',
            )
        return result

    def _wrong(self, hook: str, returned: str, fix: str) -> NoReturn:
        raise HookResultError(f"{hook} of adapter {self.name} returned {returned}", where=self._where(hook), fix=fix)

    def _where(self, hook: str) -> str:
        return ", ".join(p for p in (self.entry.where, self.hook_source(hook)) if p)


def require(capability: Capability | str, host: Host, entry: AdapterEntry, *, setting: str = "") -> None:
    """Refuse what an adapter doesn't declare for `host`; called when a run is configured, never in a step.

    Args:
        capability: what is asked for.
        host: who will run the model.
        entry: the adapter.
        setting: the user's setting that asks for it, named in the message.

    Raises:
        UnsupportedError: naming the adapter, the setting, and the host that has it, if one has.
    """
    wanted = Capability(capability)
    if entry.manifest is None:
        raise entry.error or UnsupportedError(f"adapter {entry.name} has no manifest", where=entry.where)
    support = entry.manifest.support(wanted)
    if support.on(host):
        return
    has = "no host" if support == "no" else f"host {support} only"
    asked = f"{setting} asks for {wanted}" if setting else f"{wanted} is asked for"
    off = f"do without {setting}" if setting else f"don't ask for {wanted}"
    declare = f', or declare {wanted} = "{host}" in adapter.toml if the adapter can do it'
    raise UnsupportedError(
        f"{asked}, which adapter {entry.name} declares for {has}, not for host {host}",
        where=entry.where,
        fix=f"{off}{declare}" if support == "no" else f"{off}, or run in host {support}",
    )


def _model_fault(result: object) -> tuple[str, str] | None:
    """What is wrong with a model class, and how to fix it."""
    if not isinstance(result, type):
        return "an instance and not a class", "return the class; the host builds it"
    module_base = _imported("torch.nn", "Module")
    if module_base is None or not issubclass(result, module_base):
        return "not a subclass of torch.nn.Module", "derive it from nn.Module"
    missing = [name for name in ("weight_map", "parts", "recurrent") if not hasattr(result, name)]
    if missing:
        return f"which lacks the class attribute {', '.join(missing)}", "see mrv2.layers.base.ModelClass"
    if not callable(getattr(result.weight_map, "canonical", None)):  # type: ignore[attr-defined]
        return "whose weight_map is no WeightMap", "weight_map = WeightMap(rename=...)"
    if not isinstance(result.recurrent, bool):  # type: ignore[attr-defined]
        return "whose recurrent is neither True nor False", "state whether layers keep a state per request"
    return _parts_fault(result)


def _parts_fault(model: Any) -> tuple[str, str] | None:
    if not isinstance(model.parts, tuple) or not all(isinstance(p, type) for p in model.parts):
        return "whose parts are not a tuple of classes", "parts = (MyPart,), or () for none"
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "whose forward takes **keywords", "name every input: compile binds by signature"
    keys = [getattr(part, "key", None) for part in model.parts]
    lost = [k for k in (*FORWARD_ARGS, *keys) if not isinstance(k, str) or k not in parameters]
    if lost:
        return f"whose forward doesn't take {', '.join(map(str, lost))}", "add the parameter to forward"
    return None


def _imported(module: str, name: str) -> type | None:
    """A class of a module that somebody has imported already; this module imports neither torch nor states."""
    return getattr(sys.modules.get(module), name, None)


def _show(value: object) -> str:
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"
