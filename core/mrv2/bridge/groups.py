"""vLLM's KV cache groups and caches with our names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from mrv2.attn.groups import BoundCache, KVGroup
from mrv2.layers.vllm.caches import CacheHandle, TokenCache


def kv_groups(config: Any, layers: Mapping[str, Any]) -> tuple[KVGroup, ...]:
    """One group per group of vLLM's, called as the native host calls groups of that kind.

    Args:
        config: vLLM's `KVCacheConfig`.
        layers: by name, all with a cache.
    """
    seen: Counter[str] = Counter()
    groups: list[KVGroup] = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        states = isinstance(spec, MambaSpec)
        window = getattr(spec, "sliding_window", None)
        first = layers.get(group.layer_names[0]) if group.layer_names else None
        tokens = isinstance(first, TokenCache)
        label = "states" if states else "tokens" if tokens else f"window{window}" if window else "full"
        groups.append(
            KVGroup(
                name=f"{label}.{seen[label]}",
                index=index,
                layers=tuple(group.layer_names),
                window=window,
                block_size=spec.block_size,
                states=states,
            )
        )
        seen[label] += 1
    return tuple(groups)


def bound_caches(config: Any, layers: Mapping[str, Any]) -> dict[str, BoundCache]:
    """Each layer's cache by name: vLLM's own tensor of attention, our views of adapters' caches."""
    names = [name for group in config.kv_cache_groups for name in group.layer_names if name in layers]
    return {name: layer.views if isinstance(layer := layers[name], CacheHandle) else layer.kv_cache for name in names}
