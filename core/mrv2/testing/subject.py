"""An adapter under test: found, loaded, and one `Case` for each of its small configs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.adapter import LoadedAdapter
from mrv2.config import ModelConfig, load_model_config
from mrv2.context import AdapterContext
from mrv2.entry import AdapterEntry
from mrv2.errors import Mrv2Error, TargetError
from mrv2.frontend.adapters import adapter_argument
from mrv2.frontend.build import LoadedModel, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import open_source
from mrv2.loader.source import WeightSource
from mrv2.manifest import Capability
from mrv2.registry import Registry
from mrv2.testing.checkpoints import make_checkpoint, write_random
from mrv2.testing.first_run import FirstRun, first_run
from mrv2.testing.references import Answer, answer_of
from mrv2.testing.results import Level, NotApplicable, NotRun
from mrv2.testing.target import MIN_CONTEXT, Target, Tolerances
from mrv2.testing.torch_settings import Settings, torch_settings


def find_adapter(argument: str) -> tuple[Registry, AdapterEntry, str]:
    """The adapter that a name, a package folder, a project folder or a file means; see `adapter_argument`.

    Returns:
        A registry that knows it, its entry, and what to give as `adapters=` to load models with it.

    Raises:
        Mrv2Error: it is no adapter.
    """
    argument = adapter_argument(argument)
    registry = Registry.discover(adapters=[argument])
    return registry, registry.chosen[0] if registry.chosen else registry.get(argument), argument


class Subject:
    """An adapter, and what to test it with.

    Args:
        adapter: name, folder or file.
        target: instead of what the adapter's `mrv2_test_target` says; its empty fields are taken from there.
    """

    def __init__(self, adapter: str, target: Target | None = None) -> None:
        self.argument = adapter
        self._given = target or Target()
        self._folder = tempfile.TemporaryDirectory(prefix="mrv2-conformance-")
        self._cases: dict[tuple[str, Level], Case] = {}
        self._before = torch_settings()
        self.met_in: dict[str, str] = {}  # cause of a failure to the first test that met it

    @cached_property
    def _found(self) -> tuple[Registry, AdapterEntry, str]:
        return find_adapter(self.argument)

    @property
    def registry(self) -> Registry:
        """A registry in which the adapter wins over others."""
        return self._found[0]

    @property
    def entry(self) -> AdapterEntry:
        """The adapter, not imported."""
        return self._found[1]

    @property
    def adapters(self) -> tuple[str, ...]:
        """What to give as `adapters=`."""
        return (self._found[2],)

    @cached_property
    def adapter(self) -> LoadedAdapter:
        """The adapter, imported."""
        return self.registry.load(self.entry)

    @property
    def settings_before(self) -> Settings:
        """Torch's, before the adapter was imported, which it is now."""
        assert self.target is not None
        return self._before

    @property
    def folder(self) -> Path:
        """For checkpoints; it goes with this object."""
        return Path(self._folder.name)

    @cached_property
    def target(self) -> Target:
        """What was given, and for the rest what the adapter says."""
        architectures = self.adapter.manifest.architectures
        own = self.adapter.test_target(AdapterContext(architecture=architectures[0]))
        if own is not None and not isinstance(own, Target):
            raise TargetError(
                f"mrv2_test_target returned a {type(own).__name__}",
                where=self.entry.where,
                fix="return an mrv2.testing.Target",
            )
        given = {f.name: v for f in fields(Target) if _is_given(v := getattr(self._given, f.name))}
        return replace(own or Target(), **given)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configs."""
        return tuple(self.target.configs) or (("checkpoint",) if self.given_checkpoint else ())

    @property
    def given_checkpoint(self) -> Path | None:
        """The folder that stands for the only config."""
        return Path(self.target.checkpoint) if isinstance(self.target.checkpoint, str | Path) else None

    def case(self, name: str, level: Level) -> Case:
        """The case of one config; at L0 and L1 the same one, on the CPU."""
        level = Level.GPU if level is Level.GPU else Level.CPU
        if (name, level) not in self._cases:
            self._cases[name, level] = Case(self, name, "cuda" if level is Level.GPU else "cpu")
        return self._cases[name, level]

    def cases(self) -> list[Case]:
        """The case of every config, on the CPU."""
        return [self.case(name, Level.CPU) for name in self.names]

    def offers(self, capability: Capability, host: str = "native") -> bool:
        """Whether the manifest declares it."""
        return self.adapter.manifest.support(capability) in (host, "both")


def _is_given(value: Any) -> bool:
    return value is not None and value != {} and value != () and value != Tolerances()


class Case:
    """One config of an adapter on one device: checkpoint, model, answer. Everything is made when first asked for.

    Args:
        subject: the adapter.
        name: of the config.
        device: "cpu" or "cuda".
    """

    def __init__(self, subject: Subject, name: str, device: str) -> None:
        self.subject, self.name, self.device = subject, name, device
        self._told = ""  # the check that has said why the model doesn't run

    # -- checkpoint and config -----------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        given = self.subject.given_checkpoint
        if given is not None:
            return given
        folder = self.subject.folder / self.name
        if not folder.exists():
            self._write(folder)
        return folder

    def _write(self, folder: Path) -> None:
        target, config = self.subject.target, self.subject.target.configs[self.name]
        folder.mkdir(parents=True)
        if callable(target.checkpoint):
            target.checkpoint(folder, config)
        elif type(config).__module__.startswith("transformers."):
            make_checkpoint(folder, config, seed=3)
        else:
            architectures = config.architectures or self.subject.adapter.manifest.architectures
            raw = config.to_dict() | {"architectures": [architectures[0]], "dtype": "float32"}
            (folder / "config.json").write_text(json.dumps(raw))
            cls = self.subject.adapter.model_class(AdapterContext(architecture=architectures[0], config=config))
            write_random(folder, cls, config, where=self.subject.entry.where)

    @cached_property
    def model_config(self) -> ModelConfig:
        """The checkpoint's config, as the loader reads it."""
        config = load_model_config(self.folder, self.subject.registry)
        if config.max_model_len is not None and config.max_model_len < MIN_CONTEXT:
            raise TargetError(
                f"config {self.name!r} serves {config.max_model_len} tokens; the suites need {MIN_CONTEXT}",
                where=self.subject.entry.where,
                fix="raise max_position_embeddings (mrv2.testing.tiny_config does)",
            )
        return config

    @cached_property
    def source(self) -> WeightSource:
        """The checkpoint's tensors, as the loader opens them."""
        return open_source(self.model_config, self.subject.adapter)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by its own names."""
        return {name: self.source.read(name) for name in self.source.names()}

    # -- model -----------------------------------------------------------------------------------------------

    def build(self) -> tuple[nn.Module, NativeLayers]:
        """The model on the meta device, unchecked, and what its layers declare."""
        cls = self.subject.adapter.model_class(self.model_config.context())
        layers = NativeLayers()
        with torch.device("meta"):
            return cls(layers, self.model_config.hf_config), layers

    def load(self, dtype: str = "float32") -> LoadedModel:
        """The model as the native host loads it, from the architecture's name on."""
        return load(str(self.folder), EngineConfig(device=self.device, dtype=dtype), self.subject.adapters)

    @cached_property
    def _loaded(self) -> LoadedModel | Exception:
        try:
            return self.load()
        except Exception as error:
            return error

    @property
    def loaded(self) -> LoadedModel:
        """The model in float32.

        Raises:
            NotRun: it can't be loaded, which the suites static and weights report.
        """
        if isinstance(self._loaded, Exception):
            error = self._loaded
            what = f"{error.code} {error.title}" if isinstance(error, Mrv2Error) else type(error).__name__
            raise NotRun(f"the model can't be loaded ({what}): see the suites static and weights")
        return self._loaded

    @property
    def load_error(self) -> Exception | None:
        """Why the model can't be loaded."""
        return self._loaded if isinstance(self._loaded, Exception) else None

    @cached_property
    def first_run(self) -> FirstRun:
        """The model, run once.

        Raises:
            NotRun: it can't be loaded.
        """
        return first_run(self)

    def require_running(self, asking: str) -> None:
        """Whether the model runs at all. If not, the first check that asks has failed, whichever were chosen.

        Args:
            asking: the check's id.

        Raises:
            NotRun: it can't be loaded, or doesn't run, which another check has said.
            Exception: why it doesn't run.
        """
        error = self.first_run.error
        if error is not None:
            self._told = self._told or asking
            if self._told != asking:
                raise NotRun(f"the model doesn't run: {self._told} failed")
            raise error

    @cached_property
    def plain(self) -> LoadedModel:
        """The same with every capability of prompts on, whether declared or not."""
        return replace(self.loaded, chunked_prefill=True, prefix_caching=True)

    @cached_property
    def answer(self) -> Answer | None:
        """The reference's; None: there is none."""
        reference = self.subject.target.reference
        return None if reference is None else answer_of(reference, self.folder)

    # -- what requests look like -------------------------------------------------------------------------------

    @property
    def tolerance(self) -> float:
        """Of log-probabilities in float32."""
        tolerances = self.subject.target.tolerances
        return tolerances.gpu if self.device == "cuda" else tolerances.cpu

    @property
    def vocab_size(self) -> int:
        """Of the config."""
        return self.model_config.vocab_size

    @cached_property
    def options(self) -> tuple[Mapping[str, Any], ...]:
        """Options of requests, the empty ones first."""
        return ({}, *self.subject.target.options)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Windows that layers declare."""
        found = (getattr(spec, "window", None) for spec in self.loaded.caches.values())
        return tuple(sorted({window for window in found if window is not None}))

    def prompts(self, lens: Sequence[int], seed: int = 0, *, known: bool = False) -> list[list[int]]:
        """Random prompts of these lengths.

        Args:
            lens: tokens of each.
            seed: of them.
            known: such as the reference can answer: of a recorded one beginnings of what was recorded, if need be
                shorter ones.
        """
        if known and self.answer is not None and self.answer.recorded:
            recorded = self.answer.recorded
            return [recorded[i % len(recorded)][:n] for i, n in enumerate(lens)]
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, self.vocab_size, (n,), generator=generator).tolist() for n in lens]

    def require_chunks(self) -> None:
        """Whether prompts may be cut.

        Raises:
            NotApplicable: the adapter doesn't declare it.
        """
        if not self.subject.offers(Capability.CHUNKED_PREFILL):
            raise NotApplicable("chunked_prefill isn't declared")

    def option(self, i: int) -> Mapping[str, Any]:
        """The options of the i-th request of a batch."""
        return self.options[i % len(self.options)]
