"""Which vLLMs the bridge fits: signatures of everything it touches, per release it was tested with.

python -m mrv2.bridge.versions            # compare the installed vLLM with the table
python -m mrv2.bridge.versions --write    # add it, after the tests have passed with it
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from packaging.version import Version

from mrv2.errors import VllmVersionError

logger = logging.getLogger("mrv2.bridge")

_GPU = "vllm.v1.worker.gpu"
_LAYERS = "vllm.model_executor.layers"
_STATE = (
    "__init__",
    "add_request",
    "remove_request",
    "apply_staged_writes",
    "initialize_kv_cache",
    "preprocess_state",
    "prepare_attn",
    "prepare_inputs",
    "prepare_dummy_inputs",
    "postprocess_state",
    "custom_sampler",
)

TOUCHED: Mapping[str, tuple[str, ...]] = {
    f"{_GPU}.model_states.default:DefaultModelState": _STATE,
    f"{_GPU}.model_states.mamba_hybrid:MambaHybridModelState": _STATE,
    f"{_GPU}.model_states:init_model_state": (),
    f"{_LAYERS}.attention:Attention": ("__init__", "forward"),
    f"{_LAYERS}.layernorm:RMSNorm": ("__init__", "forward"),
    f"{_LAYERS}.linear:QKVParallelLinear": ("__init__", "weight_loader"),
    f"{_LAYERS}.linear:MergedColumnParallelLinear": ("__init__", "weight_loader"),
    f"{_LAYERS}.linear:RowParallelLinear": ("__init__", "weight_loader"),
    f"{_LAYERS}.logits_processor:LogitsProcessor": ("__init__", "forward"),
    f"{_LAYERS}.rotary_embedding:RotaryEmbedding": ("__init__",),
    f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding": ("__init__", "weight_loader"),
    f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead": ("__init__", "tie_weights"),
    f"{_LAYERS}.mamba.abstract:MambaBase": ("bind_kv_cache", "get_state_shape", "get_state_dtype"),
    "vllm.model_executor.models.registry:_ModelRegistry": ("register_model",),
    "vllm.model_executor.models.utils:make_layers": (),
    "vllm.model_executor.models.utils:get_pp_missing_layer_names": (),
    "vllm.compilation.decorators:support_torch_compile": (),
    "vllm.v1.attention.backend:AttentionBackend": (
        "supported_kv_cache_layouts",
        "get_kv_cache_shape",
        "get_kv_cache_stride_order",
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder": ("__init__", "build"),
    "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor": (),
}
"""Functions by "module:name", and of classes the methods that are called or overridden."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    f"{_GPU}.input_batch:InputBatch": (
        "num_reqs",
        "num_reqs_after_padding",
        "idx_mapping",
        "idx_mapping_np",
        "num_scheduled_tokens",
        "num_tokens",
        "num_tokens_after_padding",
        "max_query_len",
        "query_start_loc",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "is_prefilling_np",
        "input_ids",
        "positions",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "prefill_token_ids",
        "num_computed_tokens",
        "sampling_params",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size", "num_kv_heads", "head_size", "dtype"),
    "vllm.v1.kv_cache_interface:MambaSpec": ("shapes", "dtypes", "block_size"),
}
"""Fields that are read, or given by name."""

Signatures = dict[str, str]


def signatures() -> Signatures:
    """What this vLLM has, by member; `absent` where it lacks one."""
    found: Signatures = {}
    for path, methods in TOUCHED.items():
        thing = _load(path)
        for name in methods:
            found[f"{path}.{name}"] = _parameters(getattr(thing, name, None))
        if not methods:
            found[path] = _parameters(thing)
    for path, names in FIELDS.items():
        thing = _load(path)
        known = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        found |= {f"{path}.{name}": "field" if name in known else "absent" for name in names}
    return found


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _parameters(function: Any) -> str:
    """Names, kinds, and which may be left out; not annotations, whose spelling changes nothing."""
    if function is None:
        return "absent"
    shown = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        keyword = "*, " if p.kind is p.KEYWORD_ONLY else ""
        shown.append(f"{keyword}{star}{p.name}{'' if p.default is p.empty else '='}")
    return f"({', '.join(shown)})"


def table() -> dict[str, Signatures]:
    """The releases that the bridge was tested with."""
    loaded: dict[str, Signatures] = json.loads(files("mrv2.bridge").joinpath("versions.json").read_text("utf-8"))
    return loaded


def installed() -> str:
    """This vLLM's release, without what a build adds to it."""
    import vllm

    return Version(vllm.__version__).base_version


@cache
def check_version() -> None:
    """Compare once per process.

    Raises:
        VllmVersionError: a member differs from the table's, or from every listed release's if this one isn't listed.
    """
    compare(installed(), signatures(), table())


def compare(version: str, found: Signatures, known: Mapping[str, Signatures]) -> None:
    """As `check_version`, of given signatures."""
    if version not in known:
        same = [listed for listed, theirs in known.items() if theirs == found]
        if same:
            logger.warning("vLLM %s isn't listed; all that mrv2 touches is as in %s", version, same[-1])
            return
    listed = version if version in known else min(known, key=lambda v: len(_differences(found, known[v])))
    wrong = _differences(found, known[listed])
    if wrong:
        raise VllmVersionError(
            f"vLLM {version} differs from {listed} in {len(wrong)} of the members that mrv2 touches: "
            + "; ".join(f"{name} is {found.get(name, 'absent')}, was {known[listed].get(name)}" for name in wrong[:6]),
            where=f"vllm {version}",
            fix=f"install one of: {', '.join(known)}; or a newer mrv2",
        )


def _differences(found: Signatures, known: Signatures) -> list[str]:
    return [name for name in sorted(found.keys() | known.keys()) if found.get(name) != known.get(name)]


def main(argv: Sequence[str]) -> int:
    """Compare, or write."""
    if "--write" in argv:
        file = Path(__file__).with_name("versions.json")
        merged = table() | {installed(): signatures()}
        ordered = dict(sorted(merged.items(), key=lambda item: Version(item[0])))
        file.write_text(json.dumps(ordered, indent=1, sort_keys=False) + "\n", encoding="utf-8")
        return 0
    try:
        check_version()
    except VllmVersionError as error:
        print(error)
        return 1
    print(f"vLLM {installed()} fits")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
