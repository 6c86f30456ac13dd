"""The layer set of the vLLM host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer, make_layers

from mrv2.attn.specs import PerRequest, PerToken
from mrv2.errors import UnsupportedError
from mrv2.layers.base import LayerSet
from mrv2.layers.custom import CacheKernel
from mrv2.layers.rope_config import RopeSpec
from mrv2.layers.rotary import RotaryTable
from mrv2.layers.small import check_activation
from mrv2.layers.vllm import slots
from mrv2.layers.vllm.caches import CacheHandle, make_handle
from mrv2.layers.vllm.fused import GatedMLP, MoE, SelfAttention
from mrv2.layers.vllm.moe import GivenExperts, fused_experts, gate_linear, router
from mrv2.layers.vllm.sizes import SizeChecks
from mrv2.layers.vllm.small import OwnAttention, Packed, Rotary, TableRotary, gated_act

_L = TypeVar("_L", bound=nn.Module | nn.Parameter)


@dataclass(slots=True)
class Built:
    """What one model's layers have declared; shared by all scopes."""

    named: list[tuple[str, nn.Module | nn.Parameter]] = field(default_factory=list)
    rotary: dict[RopeSpec, TableRotary] = field(default_factory=dict)
    caches: list[CacheHandle] = field(default_factory=list)
    head: ParallelLMHead | None = None  # on the last pipeline stage
    logits: LogitsProcessor | None = None
    windows: bool = False  # some attention has one
    hidden_scale: float = 1.0  # on hidden states before the head, see `lm_head`
    table: VocabParallelEmbedding | None = None  # of the first embedding, on the stages that have it
    hidden_size: int = 0  # of the first embedding


class VllmLayers(SizeChecks, LayerSet):
    """Builds a model's layers inside vLLM; see `LayerSet` for each. One instance per model.

    Args:
        config: of this engine.
        prefix: name of the model within a larger one; empty for a whole model.

    Attributes:
        built: what the layers have declared so far.
        is_first, is_last: place of this process among the pipeline stages.
    """

    def __init__(self, config: VllmConfig, prefix: str = "") -> None:
        self.config = config
        self.built = Built()
        self.is_first, self.is_last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
        self._prefix = f"{prefix}." if prefix else ""
        self._ranks = get_tensor_model_parallel_world_size()

    def scope(self, name: str) -> VllmLayers:
        """See `LayerSet.scope`."""
        inner = VllmLayers(self.config)
        inner._prefix, inner.built = f"{self._prefix}{name}.", self.built
        return inner

    def stack(self, name: str, n: int, make: Callable[[LayerSet, int], nn.Module]) -> nn.ModuleList:
        """See `LayerSet.stack`; layers of other pipeline stages are not built."""

        def make_one(prefix: str) -> nn.Module:
            i = int(prefix.rpartition(".")[2])
            return make(self.scope(f"{name}.{i}"), i)

        layers: nn.ModuleList = make_layers(n, make_one, prefix=self._prefix + name)[2]
        return layers

    def _add(self, name: str, layer: _L) -> _L:
        self.built.named.append((self._prefix + name, layer))
        return layer

    # -- fused layers ----------------------------------------------------------------------------------

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, shared_with_head: bool = False) -> nn.Module:
        """See `LayerSet.embedding`; on the first stage, and where a head or a drafter shares it on the last."""
        built = self.built
        built.hidden_size = built.hidden_size or hidden_size
        if not (self.is_first or (self.is_last and (shared_with_head or self.config.speculative_config is not None))):
            return PPMissingLayer()
        table = VocabParallelEmbedding(
            vocab_size, hidden_size, quant_config=self.config.quant_config, prefix=self._prefix + name
        )
        built.table = built.table or table
        return self._add(name, slots.whole(table, weight=(vocab_size, hidden_size)))

    def final_norm(self, name: str, hidden_size: int, *, eps: float) -> nn.Module:
        """See `LayerSet.final_norm`; on the last stage."""
        return self._norm(name, hidden_size, eps) if self.is_last else PPMissingLayer()

    def lm_head(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: nn.Module | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> nn.Module:
        """See `LayerSet.lm_head`; on the last stage. vLLM scales after the cap, we before: with both, the scale goes
        to the hidden states.
        """
        if not self.is_last:
            return PPMissingLayer()
        head = ParallelLMHead(
            vocab_size, hidden_size, quant_config=self.config.quant_config, prefix=self._prefix + name
        )
        if tied_to is None:
            slots.whole(head, weight=(vocab_size, hidden_size))
        else:
            head = slots.tied_head(head.tie_weights(tied_to), vocab_size, hidden_size)
        built = self.built
        built.head, built.hidden_scale = head, 1.0 if soft_cap is None else scale
        built.logits = LogitsProcessor(vocab_size, scale=scale if soft_cap is None else 1.0, soft_cap=soft_cap)
        return self._add(name, head)

    def self_attention(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Mapping[str, Any],
        max_position: int,
        norm_eps: float,
        window: int | None,
        qk_norm_eps: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> nn.Module:
        """See `LayerSet.self_attention`."""
        inner = self.scope(name)
        inner._check_heads("attn", num_heads, num_kv_heads)
        kv_size = num_kv_heads * head_dim
        qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=self.config.quant_config,
            prefix=f"{inner._prefix}qkv_proj",
        )
        parts = {"q_proj": ("q", num_heads * head_dim), "k_proj": ("k", kv_size), "v_proj": ("v", kv_size)}
        qk_norms = None
        if qk_norm_eps is not None:
            qk_norms = (inner._norm("q_norm", head_dim, qk_norm_eps), inner._norm("k_norm", head_dim, qk_norm_eps))
        layer = SelfAttention(
            norm=inner._norm("norm", hidden_size, norm_eps),
            qkv_proj=inner._add("qkv_proj", slots.packed(qkv_proj, parts, hidden_size)),
            qk_norms=qk_norms,
            rotary_emb=inner._rotary("rotary_emb", head_dim, rope, max_position),
            attn=inner._attention("attn", Attention, num_heads, num_kv_heads, head_dim, window, scale, soft_cap),
            o_proj=inner._down("o_proj", num_heads * head_dim, hidden_size, out_bias),
        )
        return self._add(name, layer)

    def gated_mlp(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        norm_eps: float,
        act: str = "silu",
        bias: bool = False,
    ) -> nn.Module:
        """See `LayerSet.gated_mlp`."""
        inner = self.scope(name)
        inner._check_divides("gate_up_proj", intermediate_size)
        gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            quant_config=self.config.quant_config,
            prefix=f"{inner._prefix}gate_up_proj",
        )
        parts: dict[str, tuple[int | str, int]] = {
            "gate_proj": (0, intermediate_size),
            "up_proj": (1, intermediate_size),
        }
        layer = GatedMLP(
            norm=inner._norm("norm", hidden_size, norm_eps),
            gate_up_proj=inner._add("gate_up_proj", slots.packed(gate_up_proj, parts, hidden_size)),
            act=gated_act(check_activation(act, where=self._prefix + name)),
            down_proj=inner._down("down_proj", intermediate_size, hidden_size, bias),
        )
        return self._add(name, layer)

    def moe(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        norm_eps: float,
        renormalize: bool = True,
        act: str = "silu",
    ) -> nn.Module:
        """See `LayerSet.moe`."""
        inner = self.scope(name)
        inner._check_choice("gate", num_experts, top_k)
        check_activation(act, where=self._prefix + name)
        gate = gate_linear(self.config, f"{inner._prefix}gate", hidden_size, num_experts)
        experts = fused_experts(
            self.config,
            f"{inner._prefix}experts",
            gate,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            renormalize=renormalize,
            act=act,
        )
        layer = MoE(
            norm=inner._norm("norm", hidden_size, norm_eps),
            gate=inner._add("gate", slots.whole(gate, weight=(num_experts, hidden_size))),
            experts=inner._add("experts", experts),
        )
        return self._add(name, layer)

    # -- small layers ----------------------------------------------------------------------------------

    def norm(self, name: str, size: int, *, eps: float) -> nn.Module:
        """See `LayerSet.norm`."""
        return self._norm(name, size, eps)

    def packed(self, name: str, hidden_size: int, parts: Mapping[str, int], *, bias: bool = False) -> Packed:
        """See `LayerSet.packed`."""
        for part, size in parts.items():
            self._check_divides(f"{name}, part {part}", size)
        layer = Packed(
            hidden_size,
            list(parts.values()),
            bias=bias,
            quant_config=self.config.quant_config,
            prefix=self._prefix + name,
        )
        shards: dict[str, tuple[int | str, int]] = {part: (i, size) for i, (part, size) in enumerate(parts.items())}
        return self._add(name, slots.packed(layer, shards, hidden_size))

    def down(self, name: str, in_size: int, hidden_size: int, *, bias: bool = False) -> nn.Module:
        """See `LayerSet.down`."""
        return self._down(name, in_size, hidden_size, bias, return_bias=False)

    def router(
        self, name: str, hidden_size: int, *, num_experts: int, top_k: int, renormalize: bool = True
    ) -> nn.Module:
        """See `LayerSet.router`."""
        self._check_choice(name, num_experts, top_k)
        layer = router(self.config, self._prefix + name, hidden_size, num_experts)
        layer.choose(top_k, renormalize=renormalize)
        return self._add(name, slots.whole(layer, weight=(num_experts, hidden_size)))

    def experts(
        self, name: str, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, act: str = "silu"
    ) -> nn.Module:
        """See `LayerSet.experts`."""
        self._check_choice(name, num_experts, top_k)
        layer = GivenExperts(
            self.config,
            self._prefix + name,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            act=check_activation(act, where=self._prefix + name),
        )
        self._add(f"{name}.experts", layer.experts)
        return self._add(name, layer)

    def rotary(self, name: str, head_dim: int, rope: Mapping[str, Any], max_position: int) -> nn.Module:
        """See `LayerSet.rotary`."""
        return self._add(name, Rotary(self._rotary(name, head_dim, rope, max_position)))

    def attention(
        self,
        name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> nn.Module:
        """See `LayerSet.attention`."""
        self._check_heads(name, num_heads, num_kv_heads)
        return self._attention(name, OwnAttention, num_heads, num_kv_heads, head_dim, window, scale, soft_cap)

    def param(self, name: str, shape: tuple[int, ...], *, shard: int | None = None) -> nn.Parameter:
        """See `LayerSet.param`."""
        if shard is not None:
            self._check_divides(name, shape[shard])
        return self._add(name, slots.bare_parameter(name, shape, shard))

    # -- an adapter's own mixers -------------------------------------------------------------------------

    def cache(
        self, name: str, spec: PerToken | PerRequest, kernel: CacheKernel, *, capturable: bool = True
    ) -> nn.Module:
        """See `LayerSet.cache`."""
        if not capturable and self.config.compilation_config.cudagraph_mode.name != "NONE":
            raise self._unsupported(
                f"the kernel of {self._prefix}{name}, which no CUDA graph may hold", "--enforce-eager"
            )
        for key, tensor in spec.tensors.items():
            if tensor.shard is not None:
                self._check_divides(f"{name}, tensor {key}", tensor.shape[tensor.shard])
        handle = make_handle(self.config, self._prefix + name, spec, kernel)
        self.built.caches.append(handle)
        return self._add(name, handle)

    def _unsupported(self, what: str, use: str) -> UnsupportedError:
        return UnsupportedError(what, where="the vLLM host's layers", fix=f"use {use}")

    def _norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return self._add(name, slots.whole(RMSNorm(size, eps=eps), weight=(size,)))

    def _down(
        self, name: str, in_size: int, out_size: int, bias: bool, *, return_bias: bool = True
    ) -> RowParallelLinear:
        self._check_divides(name, in_size)
        layer = RowParallelLinear(
            in_size,
            out_size,
            bias=bias,
            quant_config=self.config.quant_config,
            prefix=self._prefix + name,
            return_bias=return_bias,
        )
        return self._add(name, slots.whole(layer, weight=(out_size, in_size), bias=(out_size,)))

    def _rotary(self, name: str, head_dim: int, rope: Mapping[str, Any], max_position: int) -> TableRotary:
        where = self._prefix + name
        spec = RopeSpec.parse(rope, head_dim=head_dim, max_position=max_position, where=where)
        made, model = self.built.rotary, self.config.model_config
        if spec not in made:
            table, most = RotaryTable(spec), model.max_model_len
            made[spec] = TableRotary(
                table, max_model_len=most, max_position=max_position, dtype=model.dtype, where=where
            )
        return made[spec]

    def _attention(
        self,
        name: str,
        layer: type[Attention],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        scale: float | None,
        soft_cap: float | None,
    ) -> Attention:
        self.built.windows |= window is not None
        cache = self.config.cache_config
        if window is None and cache.sliding_window is not None:  # vLLM's layer would take this one
            raise self._argument(
                name, f"asks for full attention, and the config has a window of {cache.sliding_window} for all layers"
            )
        attention = layer(
            num_heads // self._ranks,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            num_kv_heads=max(1, num_kv_heads // self._ranks),
            cache_config=cache,
            quant_config=self.config.quant_config,
            logits_soft_cap=soft_cap,
            per_layer_sliding_window=window,
            prefix=self._prefix + name,
        )
        return self._add(name, slots.optional(attention))
