"""An adapter's own caches as layers of vLLM: a generated backend, and the op that calls the adapter's kernel.

vLLM finds such a layer by its name in `static_forward_context`, asks it for a cache spec and a backend, binds the
cache, and builds metadata per group. Prefix caching, preemption and the alignment of pages are vLLM's own hybrid
machinery. Two things it gives no backend but its own: counts of accepted drafts (the bridge's model state sets them
on our builders), and zeroed states (kernels select, see `mrv2.layers.custom.fresh`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

from mrv2.attn.specs import ALIGNMENT, CacheTensor, PerRequest, PerToken
from mrv2.errors import LayerArgumentError
from mrv2.layers.custom import CacheKernel
from mrv2.layers.vllm.state_backends import state_type
from mrv2.state.view import CacheMeta

OP = "mrv2_cache"
"""Name of the op in `torch.ops.vllm`."""

Local = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Of each tensor of a cache by name, this rank's share of one entry's shape, and the dtype."""


def local_entries(tensors: Mapping[str, CacheTensor], dtype: torch.dtype, ranks: int) -> Local:
    """What one of `ranks` tensor-parallel ranks has of each entry, in a model of `dtype`."""
    return {
        name: (
            tuple(size // ranks if axis == tensor.shard else size for axis, size in enumerate(tensor.shape)),
            tensor.dtype or dtype,
        )
        for name, tensor in tensors.items()
    }


def state_layout(local: Local) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """A state's tensors as vLLM packs them, with padding between, since it views each in its dtype as it lies."""
    layout: list[tuple[tuple[int, ...], torch.dtype]] = []
    for shape, dtype in local.values():
        layout.append((shape, dtype))
        if rest := math.prod(shape) * dtype.itemsize % ALIGNMENT:
            layout.append(((ALIGNMENT - rest,), torch.uint8))
    return layout


class CacheBuilder(AttentionMetadataBuilder[CacheMeta]):
    """vLLM's common metadata as a `CacheMeta`, in buffers that keep their addresses."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, self._drafts = vllm_config.scheduler_config, vllm_config.num_speculative_tokens
        rows = scheduler.max_num_seqs
        self.states = isinstance(kv_cache_spec, MambaSpec)
        self.extras: dict[str, Tensor] = {}  # of this step, from `ModelState.attn_extras`; also the metadata's
        self.read_col = torch.zeros(rows, dtype=torch.int32, device=device)
        self.verify = torch.zeros(rows, dtype=torch.bool, device=device)
        self._slots = torch.zeros(rows, 1 + self._drafts, dtype=torch.int32, device=device)
        self._no_slot = torch.full((scheduler.max_num_batched_tokens,), -1, dtype=torch.int64, device=device)

    def set_accepted(self, accepted: Tensor, verify: Tensor) -> None:
        """Say which state each request goes on from. vLLM tells only its own backends.

        Args:
            accepted: [num_reqs] tokens of the last step that were kept, at least 1.
            verify: [num_reqs] bool, whether this step's tokens are drafts to be verified.
        """
        self.read_col.zero_()[: len(accepted)].copy_(accepted - 1)
        self.verify.zero_()[: len(verify)].copy_(verify)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **ignored: Any
    ) -> CacheMeta:
        """This step's metadata; vLLM passes some of its own that no kernel of an adapter reads."""
        cm = common_attn_metadata
        n = cm.num_reqs
        query_lens = cm.query_start_loc_cpu[1 : n + 1] - cm.query_start_loc_cpu[:n]
        decodes = int((query_lens == 1).cumprod(0).sum())
        seq_lens, table = cm.seq_lens[:n], cm.block_table_tensor[:n]
        state_slots = None
        if self.states:
            mode = self.vllm_config.cache_config.mamba_cache_mode
            slots = mamba_get_block_table_tensor(table, seq_lens, self.kv_cache_spec, mode)[:, : 1 + self._drafts]
            state_slots = self._slots[:n]
            state_slots.copy_(torch.where((seq_lens > 0)[:, None], slots, 0))  # padding has length 0
        return CacheMeta(
            num_reqs=n,
            num_tokens=cm.num_actual_tokens,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            num_decodes=decodes,
            query_start_loc=cm.query_start_loc[: n + 1],
            seq_lens=seq_lens,
            slot_mapping=(self._no_slot if self.states else cm.slot_mapping)[: cm.num_actual_tokens],
            block_table=table,
            block_size=self.kv_cache_spec.block_size,
            extras=self.extras,
            state_slots=state_slots,
            read_col=self.read_col[:n] if self.states and self._drafts else None,
            verify=self.verify[:n] if self.states and self._drafts else None,
        )


class TokenBackend(AttentionBackend):
    """Of caches per token."""

    layouts: ClassVar[Any] = None  # those of the platform's attention: all pipeline stages have to offer the same

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """What `layouts` says."""
        return TokenBackend.layouts

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Asked by 0.26; later releases make this shape by themselves."""
        return num_blocks, num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Blocks come first, so their pages may be padded. Asked by 0.26."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @staticmethod
    def get_name() -> str:
        """For logs."""
        return "MRV2_TOKENS"

    @staticmethod
    def get_builder_cls() -> type[CacheBuilder]:
        """One builder for both kinds."""
        return CacheBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        """There is none."""
        raise NotImplementedError("the adapter's kernel is the implementation")


class StateBackend(TokenBackend):
    """Of states per request."""

    @staticmethod
    def get_name() -> str:
        """For logs."""
        return "MRV2_STATES"

    @classmethod
    def is_ssm(cls) -> bool:
        """Groups of states have no entries per token."""
        return True


class CacheHandle(nn.Module):
    """What `LayerSet.cache` returns; see `mrv2.layers.custom.CacheHandle`, whose counterpart it is."""

    def __init__(
        self, config: VllmConfig, name: str, spec: PerToken | PerRequest, kernel: CacheKernel, ranks: int
    ) -> None:
        super().__init__()
        self.layer_name = name
        self.kernel = kernel
        self.local = local_entries(spec.tensors, config.model_config.dtype, ranks)
        self.views: dict[str, Tensor] = {}
        self._bound: Any = None
        config.compilation_config.static_forward_context[name] = self

    @property
    def kv_cache(self) -> Any:
        """What vLLM has bound. 0.26 sets it; later releases call `bind_kv_cache`, which does."""
        return self._bound

    @kv_cache.setter
    def kv_cache(self, bound: Any) -> None:
        self._bound = bound
        self.views = self._named(bound) if len(bound) else {}  # at the end, an empty one

    def _named(self, bound: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def forward(self, ctx: Any, *inputs: Tensor, out: Tensor) -> Tensor:
        """Run the kernel on this step's `inputs`; returns `out`."""
        getattr(torch.ops.vllm, OP)(list(inputs), out, self.layer_name)
        return out

    def run(self, inputs: list[Tensor], out: Tensor) -> None:
        """Within the op: tokens past the batch's are padding; in profiling runs there is no metadata at all."""
        metadata = get_forward_context().attn_metadata
        meta: CacheMeta | None = metadata.get(self.layer_name) if isinstance(metadata, dict) else None
        if meta is None:
            out.zero_()
            return
        n = meta.num_tokens
        out[n:].zero_()
        self.kernel(*(x[:n] for x in inputs), out=out[:n], cache=self.views, meta=meta)


class TokenCache(CacheHandle, AttentionLayerBase):
    """Entries per token, as attention whose one head is as wide as an entry has bytes."""

    def _sizes(self) -> dict[str, int]:
        return {
            name: -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            for name, (shape, dtype) in self.local.items()
        }

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See `TokenBackend`."""
        return TokenBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Bytes of all tensors' entries side by side."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=sum(self._sizes().values()),
            head_size_v=0,
            dtype=torch.uint8,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """See `kv_cache`."""
        self.kv_cache = kv_cache

    def _named(self, bound: Tensor) -> dict[str, Tensor]:
        """Cut [num_blocks, 1, block_size, bytes] into the tensors."""
        views, start = {}, 0
        for name, size in self._sizes().items():
            shape, dtype = self.local[name]
            typed = bound[:, 0, :, start : start + math.prod(shape) * dtype.itemsize].view(dtype)
            views[name] = typed.view(*typed.shape[:-1], *shape)
            start += size
        return views


class RequestState(CacheHandle, MambaBase):
    """A state per request, as vLLM's recurrent layers have them."""

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """See `state_type`."""
        return state_type(len(state_layout(self.local)))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """See `state_layout`."""
        return tuple(shape for shape, _ in state_layout(self.local))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """See `state_layout`."""
        return tuple(dtype for _, dtype in state_layout(self.local))

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See `StateBackend`."""
        return StateBackend

    def _named(self, bound: Sequence[Tensor]) -> dict[str, Tensor]:
        """The state's tensors, as vLLM has cut its pages, without those between that pad."""
        tensors, views = iter(bound), {}
        for name, (shape, dtype) in self.local.items():
            views[name] = next(tensors)
            if math.prod(shape) * dtype.itemsize % ALIGNMENT:
                next(tensors)
        return views


def make_handle(config: VllmConfig, name: str, spec: PerToken | PerRequest, kernel: CacheKernel) -> CacheHandle:
    """The layer of a declared cache.

    Raises:
        LayerArgumentError: it has no tensor, or the name is taken.
    """
    if not spec.tensors or name in config.compilation_config.static_forward_context:
        what = "is declared twice" if spec.tensors else "declares no tensor"
        raise LayerArgumentError(
            f"{name} {what}", where="L.cache", fix="give each cache a name and a tensor of its own"
        )
    platform = get_attn_backend(64, config.model_config.dtype, config.cache_config.cache_dtype)
    if hasattr(platform, "supported_kv_cache_layouts"):  # 0.26 has one form for all
        TokenBackend.layouts = platform.supported_kv_cache_layouts()
    layer = RequestState if isinstance(spec, PerRequest) else TokenCache
    return layer(config, name, spec, kernel, get_tensor_model_parallel_world_size())


# `torch.Tensor`, spelled out: 0.33 reads the annotations in a module that imports no more than torch.
@eager_break_during_capture
def _call_kernel(inputs: list[torch.Tensor], out: torch.Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].run(inputs, out)


def _trace_kernel(inputs: list[torch.Tensor], out: torch.Tensor, layer_name: str) -> None:
    return


direct_register_custom_op(OP, _call_kernel, mutates_args=["out"], fake_impl=_trace_kernel)
