"""From a model's name, or a built model, to an engine that runs it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from mrv2.adapter import require
from mrv2.attn.groups import AttentionCache, KVGroup, LayerSpec, choose_block_size, make_groups
from mrv2.attn.kv_memory import allocate_pages, bind_caches, choose_num_blocks, free_memory, page_sizes
from mrv2.attn.specs import PerRequest
from mrv2.config import ModelConfig, load_model_config
from mrv2.debug.canaries import WatchedPool
from mrv2.debug.runner import DebugRunner, GuardedForward
from mrv2.entry import AdapterEntry
from mrv2.errors import UnsupportedError
from mrv2.frontend.adapters import adapter_argument
from mrv2.frontend.engine_config import EngineConfig
from mrv2.kernels.compile_ahead import compiling_in_parallel
from mrv2.kernels.cuda_graph import CudaRecorder
from mrv2.layers.base import DTYPES
from mrv2.layers.custom import CacheHandle
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import load_model, random_model
from mrv2.loader.model import ModelLocation, resolve_model
from mrv2.loader.tokenizer import Tokenizer, load_tokenizer
from mrv2.manifest import Capability
from mrv2.model_state.base import ModelState
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.graphs import GraphSupport
from mrv2.registry import Registry
from mrv2.runner.block_pool import BlockPool
from mrv2.runner.device import choose_device, on_device
from mrv2.runner.engine import Engine
from mrv2.runner.forward import ForwardPass
from mrv2.runner.graphs import GraphStats, default_plan
from mrv2.runner.intake import Intake, RequestLimits
from mrv2.runner.kv_cache import KVCacheManager
from mrv2.runner.runner import Runner
from mrv2.runner.scheduler import Scheduler
from mrv2.runner.sync import SyncRunner
from mrv2.runner.trial import measure_step
from mrv2.sample.processors import LogitsProcessor
from mrv2.state.view import Limits

_Forward = TypeVar("_Forward", bound=ForwardPass)

DEFAULT_MAX_MODEL_LEN = 8192
"""For a model that names no limit of its own, when the caller names none either."""

STATE_CHECKPOINTS = 4
"""Copies of a request's state in the prefix cache, for each request that can run: one or two are in use."""

DEBUG_KV_MEMORY = 2**30
"""Bytes. Debug mode reads the whole cache in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A running engine's pieces, as its front end needs them."""

    engine: Engine
    intake: Intake
    limits: Limits
    graphs: GraphStats | None  # None: steps run eagerly


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with weights, before it is given memory for a cache."""

    name: str  # as the user gave it
    module: nn.Module
    caches: Mapping[str, LayerSpec]
    rope_fixed_up_to: int | None  # longest request whose rotation depends on positions alone; None: any
    state_class: type[ModelState]
    config: ModelConfig
    tokenizer: Tokenizer | None
    adapter: str  # "name version", for messages and statistics
    chunked_prefill: bool  # whether the adapter allows prompts to be cut
    prefix_caching: bool  # whether it allows requests to share cached blocks
    processors: Sequence[type[LogitsProcessor]] = ()  # the adapter's own, of logits
    entry: AdapterEntry | None = None  # what is known of the adapter; None: the model was made without one


def load(model: str, config: EngineConfig, adapters: Sequence[str] = ()) -> LoadedModel:
    """Find the model and its adapter, build it and load its weights strictly.

    Args:
        model: folder, GGUF file, bundled name or hub id.
        config: dtype and device are used here.
        adapters: names of installed ones, or files, package or project folders: they win over others.

    Raises:
        Mrv2Error: whatever is wrong, by its own type.
    """
    device = choose_device(config.device)
    registry = Registry.discover(adapters=[adapter_argument(adapter) for adapter in adapters])
    location = resolve_model(model)
    model_config = load_model_config(location.path, registry)
    adapter = registry.resolve(model_config.architecture)
    _check_capabilities(adapter.entry, location, config)
    dtype = choose_dtype(config.dtype, model_config, device)
    ctx = model_config.context()
    layers = NativeLayers()
    with on_device(device):
        make = load_model if config.weights == "checkpoint" else random_model
        module = make(model_config, adapter, layers, device=device, dtype=dtype)
    specs = layers.caches.values()
    if any(isinstance(spec, PerRequest) for spec in specs):
        require(Capability.RECURRENT, "native", adapter.entry, setting=f"a state per request in {location.name}")
    if any(isinstance(spec, AttentionCache) and spec.window is not None for spec in specs):
        require(Capability.SLIDING_WINDOW, "native", adapter.entry, setting=f"a sliding window in {location.name}")
    return LoadedModel(
        name=location.name,
        module=module,
        caches=layers.caches,
        rope_fixed_up_to=layers.rope_fixed_up_to,
        state_class=adapter.model_state_class(ctx) or DefaultModelState,
        processors=adapter.logits_processors(ctx),
        config=model_config,
        tokenizer=load_tokenizer(ctx, adapter),
        adapter=f"{adapter.entry.dist or adapter.name} {adapter.entry.version or ''}".strip(),
        entry=adapter.entry,
        chunked_prefill=_offers(adapter.entry, Capability.CHUNKED_PREFILL),
        prefix_caching=_offers(adapter.entry, Capability.PREFIX_CACHING),
    )


def _offers(entry: AdapterEntry, capability: Capability) -> bool:
    return entry.manifest is not None and entry.manifest.support(capability).on("native")


def _check_capabilities(entry: AdapterEntry, location: ModelLocation, config: EngineConfig) -> None:
    """Refuse what was asked for and the adapter doesn't offer; what was left open is then simply off."""
    if config.prefix_caching:
        require(Capability.PREFIX_CACHING, "native", entry, setting="prefix_caching=True")
    if config.max_chunk is not None:
        require(Capability.CHUNKED_PREFILL, "native", entry, setting=f"max_chunk={config.max_chunk}")
    if location.from_gguf:
        require(Capability.GGUF, "native", entry, setting=f"the GGUF file behind {location.name}")


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `name` means for this checkpoint on this device."""
    if name != "auto":
        return DTYPES[name]
    return config.dtype or torch.float32 if device.type == "cuda" else torch.float32


def assemble(loaded: LoadedModel, config: EngineConfig) -> EngineParts:
    """Give a loaded model its cache, state, scheduler and runner.

    Raises:
        CacheTooSmallError: the granted memory can't hold one block.
        UnsupportedError: the settings don't fit each other, the model, or the memory there is.
    """
    device = choose_device(config.device)
    with on_device(device), compiling_in_parallel():
        return _assemble(loaded, config, device)


def _assemble(loaded: LoadedModel, config: EngineConfig, device: torch.device) -> EngineParts:
    limits = _limits(loaded, config, device)
    groups = make_groups(loaded.caches, config.block_size or choose_block_size(loaded.caches, limits.dtype))
    prefix_caching = loaded.prefix_caching and config.prefix_caching is not False
    num_blocks = config.num_blocks or _num_blocks(loaded, config, limits, groups, prefix_caching=prefix_caching)
    pool = WatchedPool(num_blocks) if config.debug else BlockPool(num_blocks)
    kv = KVCacheManager(
        pool, groups, max_rows=limits.max_rows, max_model_len=limits.max_model_len, prefix_caching=prefix_caching
    )
    scheduler = Scheduler(
        kv,
        max_rows=limits.max_rows,
        max_num_tokens=limits.max_num_tokens,
        max_model_len=limits.max_model_len,
        max_chunk=config.max_chunk,
        chunked_prefill=loaded.chunked_prefill,
    )
    forward: ForwardPass
    runner: Runner | SyncRunner
    if isinstance(pool, WatchedPool):
        guarded = _forward(GuardedForward, loaded, limits, groups, num_blocks=num_blocks + 1)
        forward, runner = guarded, DebugRunner(guarded, groups, pool)
    else:
        forward = _forward(ForwardPass, loaded, limits, groups, num_blocks=num_blocks)
        if config.runner == "async":
            runner = _runner(loaded, forward, config, compiled=_measures_step(config, limits))
        else:
            runner = SyncRunner(forward, groups)
    graphs = runner.capture_common() if isinstance(runner, Runner) else None
    request_limits = RequestLimits(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        cache_capacity=kv.capacity,
        eos_token_ids=_end_tokens(loaded),
        rope_fixed_up_to=loaded.rope_fixed_up_to,
    )
    depth = config.depth or (2 if device.type == "cuda" and config.runner == "async" else 1)
    return EngineParts(
        engine=Engine(scheduler, runner, depth=depth),
        intake=Intake(request_limits, seed=config.seed, check_options=forward.check_options),
        limits=limits,
        graphs=graphs,
    )


def _runner(loaded: LoadedModel, forward: ForwardPass, config: EngineConfig, *, compiled: bool) -> Runner:
    """With graphs, if there are to be any; `compiled`: another one like it has had their kernels compiled."""
    limits, state = forward.state.limits, forward.state
    runner = Runner(forward, state.groups)
    if config.graphs is False or config.debug:
        return runner
    reason = why_eager(loaded, state)
    if reason is None:
        graphs = runner.use_graphs(state.graph_plan(default_plan(limits)), CudaRecorder(limits.device))
        if not compiled:
            with contextlib.suppress(torch.OutOfMemoryError):  # of a step that isn't needed: it need not fit
                runner.compile_ahead(graphs)
    elif config.graphs:
        fix = "use a GPU" if limits.device.type != "cuda" else "leave graphs out"
        raise UnsupportedError(f"graphs=True, and {reason}", where="engine settings", fix=fix)
    elif limits.device.type == "cuda":
        warnings.warn(f"steps run without CUDA graphs: {reason}", stacklevel=2)
    return runner


def why_eager(loaded: LoadedModel, state: ModelState) -> str | None:
    """What keeps steps from being captured; None: nothing."""
    if state.limits.device.type != "cuda":
        return f"the model runs on {state.limits.device}"
    if state.graph_support() is GraphSupport.NEVER:
        return f"{type(state).__qualname__}.graph_support() of {loaded.adapter} is NEVER"
    for module in loaded.module.modules():
        if isinstance(module, CacheHandle) and not module.capturable:
            return f"{loaded.adapter} declares the kernel of {module.name} with capturable=False"
    return None


def _limits(loaded: LoadedModel, config: EngineConfig, device: torch.device) -> Limits:
    limits = Limits(
        max_rows=config.max_num_seqs,
        max_num_tokens=config.max_num_tokens,
        max_model_len=_max_model_len(loaded.config, config),
        device=device,
        dtype=next(loaded.module.parameters()).dtype,
        vocab_size=loaded.config.vocab_size,
    )
    if not loaded.chunked_prefill and limits.max_num_tokens < limits.max_model_len:
        raise UnsupportedError(
            f"max_num_tokens={limits.max_num_tokens} would cut prompts of up to max_model_len={limits.max_model_len} "
            f"tokens, and {loaded.adapter} doesn't declare chunked_prefill",
            where="engine settings",
            fix="raise max_num_tokens, lower max_model_len, or declare chunked_prefill in adapter.toml",
        )
    _check_table_size(limits)
    return limits


def _num_blocks(
    loaded: LoadedModel, config: EngineConfig, limits: Limits, groups: tuple[KVGroup, ...], *, prefix_caching: bool
) -> int:
    """Blocks of the KV cache, as many as memory allows and requests could use."""

    def make_runner() -> Runner:
        forward = _forward(ForwardPass, loaded, limits, groups, num_blocks=1)
        return _runner(loaded, forward, config, compiled=config.runner != "async")

    return choose_num_blocks(
        sum(page_sizes(groups, loaded.caches, limits.dtype)),
        wanted_blocks=1 + limits.max_rows * _blocks_per_row(groups, limits.max_model_len, prefix_caching),
        kv_memory=config.kv_memory or (DEBUG_KV_MEMORY if config.debug else None),
        device=limits.device,
        step_memory=measure_step(make_runner, limits, groups) if _measures_step(config, limits) else 0,
    )


def _measures_step(config: EngineConfig, limits: Limits) -> bool:
    """Whether the largest step is run before there is a KV cache, whose size follows from it."""
    given = config.num_blocks or config.kv_memory or config.debug
    return not given and limits.device.type == "cuda"


def _forward(
    kind: type[_Forward], loaded: LoadedModel, limits: Limits, groups: tuple[KVGroup, ...], *, num_blocks: int
) -> _Forward:
    """The model with a cache of `num_blocks` blocks and a `ModelState` of its own."""
    sizes = page_sizes(groups, loaded.caches, limits.dtype)
    pages = allocate_pages(sizes, num_blocks=num_blocks, device=limits.device)
    state = loaded.state_class(loaded.module, limits, groups)
    caches = bind_caches(groups, loaded.caches, pages, limits.dtype)
    return kind(loaded.module, state, groups, caches=caches, pages=pages, processors=loaded.processors)


def _blocks_per_row(groups: Sequence[KVGroup], max_model_len: int, prefix_caching: bool) -> int:
    """Blocks that one request could use: to its full length, and of states a slot and a few checkpoints."""
    return sum(
        (1 + STATE_CHECKPOINTS * prefix_caching) if group.states else -(-max_model_len // group.block_size)
        for group in groups
    )


def _max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    own = model.max_model_len
    if config.max_model_len is not None and own is not None and config.max_model_len > own:
        raise UnsupportedError(
            f"max_model_len={config.max_model_len} exceeds the model's context of {own}",
            where=f"engine settings and {model.path}",
            fix="lower max_model_len",
        )
    return config.max_model_len or own or DEFAULT_MAX_MODEL_LEN


def _check_table_size(limits: Limits) -> None:
    """The token tables of host and device have a place for every token of every row, used or not."""
    size, free = 2 * 4 * limits.max_rows * limits.max_model_len, free_memory(torch.device("cpu"))
    if size > free // 2:
        raise UnsupportedError(
            f"max_num_seqs={limits.max_rows} and max_model_len={limits.max_model_len} need token tables of "
            f"{size >> 20} MiB; {free >> 20} MiB are free",
            where="engine settings",
            fix="lower one of the two",
        )


def _end_tokens(loaded: LoadedModel) -> tuple[int, ...]:
    """The config's end tokens and the tokenizer's: a checkpoint may name its chat's end in either."""
    own = () if loaded.tokenizer is None else loaded.tokenizer.eos_token_ids
    return tuple(dict.fromkeys(loaded.config.eos_token_ids + own))
