"""What is refused before a model is built in vLLM, each by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrv2.adapter import LoadedAdapter, require
from mrv2.bridge.versions import check_version
from mrv2.errors import StaleInspectionError, UnsupportedError, VllmRunnerError
from mrv2.manifest import Capability
from mrv2.model_state.base import ModelState
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.graphs import GraphSupport

NATIVE_ONLY = ("prepare_attn", "get_mm_embeddings")
"""Methods of `ModelState` that vLLM's own code takes the place of."""

Asked = Callable[[Any], str]
"""A vLLM config to the setting that asks for a capability, or an empty string."""


def _parallel(size: str, option: str) -> Asked:
    def asked(config: Any) -> str:
        n = getattr(config.parallel_config, size)
        return f"{option} {n}" if n > 1 else ""

    return asked


def _graphs(config: Any) -> str:
    mode = config.compilation_config.cudagraph_mode
    return f"cudagraph_mode {mode.name}" if mode is not None and mode.value else ""


def _chunked(config: Any) -> str:
    scheduler = config.scheduler_config
    whole = scheduler.max_num_batched_tokens >= config.model_config.max_model_len
    return "" if whole and not scheduler.enable_chunked_prefill else "enable_chunked_prefill"


ASKED: dict[Capability, Asked] = {
    Capability.CHUNKED_PREFILL: _chunked,
    Capability.PREFIX_CACHING: lambda c: "enable_prefix_caching" if c.cache_config.enable_prefix_caching else "",
    Capability.CUDA_GRAPHS: _graphs,
    Capability.SPECULATION: lambda c: "speculative_config" if c.speculative_config is not None else "",
    Capability.LORA: lambda c: "enable_lora" if c.lora_config is not None else "",
    Capability.QUANTIZATION: lambda c: "quantization" if c.quant_config is not None else "",
    Capability.TENSOR_PARALLEL: _parallel("tensor_parallel_size", "tensor_parallel_size"),
    Capability.PIPELINE_PARALLEL: _parallel("pipeline_parallel_size", "pipeline_parallel_size"),
    Capability.EXPERT_PARALLEL: lambda c: "enable_expert_parallel" if c.parallel_config.enable_expert_parallel else "",
}
"""What a vLLM setting asks of an adapter."""


def check_engine(config: Any, adapter: LoadedAdapter, model: type) -> None:
    """Everything about an engine that can be wrong for this adapter.

    Raises:
        VllmVersionError: see `check_version`.
        VllmRunnerError: the old runner would run it.
        UnsupportedError: a setting asks for a capability that the adapter doesn't declare for vLLM; or for drafts and
            pipeline stages together.
        StaleInspectionError: vLLM has stored something else about the class.
    """
    check_version()
    if not config.use_v2_model_runner:
        raise VllmRunnerError(
            "vLLM would run this model with the old model runner, which knows no model state",
            where=adapter.entry.where,
            fix="set VLLM_USE_V2_MODEL_RUNNER=1, and look in the log for the option that made vLLM choose the old one",
        )
    for capability, asked in ASKED.items():
        if setting := asked(config):
            require(capability, "vllm", adapter.entry, setting=setting)
    if getattr(model, "is_hybrid", False):
        require(Capability.RECURRENT, "vllm", adapter.entry, setting=f"a state per request in {model.__name__}")
    if config.speculative_config is not None and config.parallel_config.pipeline_parallel_size > 1:
        # With its own classes as well: its scheduler and its first stage count a request's drafts differently.
        raise UnsupportedError(
            "drafts and pipeline stages, with which vLLM's runner fails an assertion in the first steps and then hangs",
            where="speculative_config and pipeline_parallel_size",
            fix="do without one of them; tensor_parallel_size goes with drafts",
        )
    _check_inspection(config, model)


def check_native_only(state: type[ModelState]) -> None:
    """Some of what a state may override has no caller in vLLM.

    Raises:
        UnsupportedError: `state` overrides one of `NATIVE_ONLY`.
    """
    if found := [name for name in NATIVE_ONLY if _overrides(state, name)]:
        raise UnsupportedError(
            f"{state.__module__}.{state.__qualname__} overrides {' and '.join(found)}, which vLLM doesn't call",
            where="mrv2_model_state",
            fix="use attn_extras for attention metadata; run media in the native host",
        )


def check_graphs(state: ModelState, config: Any) -> None:
    """VLLM captures what it wants, asking neither for support nor for a plan, and nothing of an adapter's own.

    Raises:
        UnsupportedError: graphs are on, and `state` has something to say about them.
    """
    if not (setting := _graphs(config)):
        return
    own = type(state)
    found = [f"overrides {name}" for name in ("graph_plan", "capture_inner") if _overrides(own, name)]
    if state.graph_support() is GraphSupport.NEVER:
        found.append("says GraphSupport.NEVER")
    if found:
        raise UnsupportedError(
            f"{own.__module__}.{own.__qualname__} {' and '.join(found)}, which vLLM doesn't ask for",
            where=setting,
            fix="give --enforce-eager, or run it in the native host",
        )


def _overrides(own: type[ModelState], name: str) -> bool:
    return getattr(own, name) not in (getattr(ModelState, name), getattr(DefaultModelState, name))


def check_stages(state: type[ModelState], stages: int) -> None:
    """Earlier pipeline stages hear of sampled tokens steps later, when their step has no view any more.

    Raises:
        UnsupportedError: there are stages, and `state` wants to be called after sampling.
    """
    if stages > 1 and state.after_sample is not ModelState.after_sample:
        raise UnsupportedError(
            f"{state.__module__}.{state.__qualname__} overrides after_sample, which vLLM can't call on every stage",
            where=f"pipeline_parallel_size {stages}",
            fix="do without stages, or do the work in before_forward of the next step",
        )


def _check_inspection(config: Any, model: type) -> None:
    """A class is asked once by vLLM, which stores the answer under a hash of the adapter's files alone."""
    info = getattr(config.model_config, "_model_info", None)
    wrong = [
        name
        for name in ("is_hybrid", "has_inner_state")
        if info is not None and bool(getattr(info, name, False)) != bool(getattr(model, name, False))
    ]
    if not wrong or config.model_config.architecture != model.__name__:
        return
    file = _stored(model)
    file.unlink(missing_ok=True)
    raise StaleInspectionError(
        f"vLLM had stored another {' and '.join(wrong)} for {model.__name__}", where=str(file), fix="start again"
    )


def _stored(model: type) -> Path:
    import vllm.envs as envs

    name = f"{model.__module__}-{model.__qualname__}".replace(".", "-")
    return Path(envs.VLLM_CACHE_ROOT) / "modelinfos" / f"{name}.json"
