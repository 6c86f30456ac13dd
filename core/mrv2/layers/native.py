"""The native host's layer set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from mrv2.attn.backend import AttentionArgs
from mrv2.attn.groups import AttentionCache, LayerSpec
from mrv2.attn.specs import PerRequest, PerToken
from mrv2.errors import LayerArgumentError, LayerNameError, RecurrentFlagError
from mrv2.layers.base import PARAM_SLOT, LayerSet, Slot
from mrv2.layers.custom import CacheHandle, CacheKernel
from mrv2.layers.fused import GatedMLP, SelfAttention
from mrv2.layers.huge_pages import move_to_huge_pages
from mrv2.layers.linear import Linear, LMHead, PackedLinear, make_parameter, pack_linears
from mrv2.layers.moe import Experts, MoE, Router
from mrv2.layers.rope_config import RopeSpec
from mrv2.layers.rotary import Rotary, RotaryTable
from mrv2.layers.small import Attention, Embedding, RMSNorm, check_activation

_L = TypeVar("_L", bound=nn.Module | nn.Parameter)

PACK_SHARE = 0.25
"""Share of free memory that packed weight copies may take."""


@dataclass(slots=True)
class _Built:
    """What one model's layers have declared; shared by all scopes."""

    caches: dict[str, LayerSpec] = field(default_factory=dict)
    named: list[tuple[str, nn.Module | nn.Parameter]] = field(default_factory=list)
    tables: dict[RopeSpec, RotaryTable] = field(default_factory=dict)
    settled: bool = False  # parameters are where they will stay


class NativeLayers(LayerSet):
    """Builds a model's layers for the native runner; see `LayerSet` for each. One instance per model.

    Parameters take PyTorch's default dtype and device, so that building under `torch.device("meta")` costs
    nothing and tells what the model declares.

    Attributes:
        caches: what each layer with a cache needs, by full name, in the order of building.
    """

    def __init__(self) -> None:
        self._prefix = ""
        self._built = _Built()

    @property
    def caches(self) -> dict[str, LayerSpec]:
        """Each layer's cache, by full name: of attention layers, and of adapters' own."""
        return self._built.caches

    @property
    def rope_fixed_up_to(self) -> int | None:
        """Longest request in which rotation depends on positions alone (see `rotary`); None: any length. Beyond
        it, requests must not share cached prefixes.
        """
        limits = [table.spec.fixed_up_to for table in self._built.tables.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def finalize(self, model: nn.Module) -> None:
        """What has to follow every load of weights, the first and any later one: lets modules of adapters
        derive what they compute from weights (`finalize_weights()`), and packs projections for this machine.
        """
        for module in model.modules():
            if callable(hook := getattr(module, "finalize_weights", None)):
                hook()
        if not self._built.settled:
            move_to_huge_pages(model)
            self._built.settled = True
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        pack_linears(model, int(PACK_SHARE * free))

    # -- names -----------------------------------------------------------------------------------------

    def scope(self, name: str) -> NativeLayers:
        """See `LayerSet.scope`."""
        inner = NativeLayers()
        inner._prefix, inner._built = f"{self._prefix}{name}.", self._built
        return inner

    def stack(self, name: str, n: int, make: Callable[[LayerSet, int], nn.Module]) -> nn.ModuleList:
        """See `LayerSet.stack`."""
        return nn.ModuleList(make(self.scope(f"{name}.{i}"), i) for i in range(n))

    def _add(self, name: str, layer: _L) -> _L:
        self._built.named.append((self._prefix + name, layer))
        return layer

    # -- fused layers ----------------------------------------------------------------------------------

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, shared_with_head: bool = False) -> nn.Module:
        """See `LayerSet.embedding`. Sharing needs nothing here: the head reads the table's parameter."""
        return self._add(name, Embedding(vocab_size, hidden_size))

    def final_norm(self, name: str, hidden_size: int, *, eps: float) -> nn.Module:
        """See `LayerSet.final_norm`."""
        return self._norm(name, hidden_size, eps)

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
        """See `LayerSet.lm_head`."""
        path = ""
        if tied_to is not None:
            path = self._path_to(name, tied_to)
            shape = tuple(cast(Embedding, tied_to).weight.shape)
            if shape != (vocab_size, hidden_size):
                raise self._argument(name, f"is {vocab_size} x {hidden_size}, the embedding it is tied to {shape}")
        head = LMHead(vocab_size, hidden_size, tied_to=tied_to, tied_path=path, scale=scale, soft_cap=soft_cap)
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
        sizes = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        qk_norms = None
        if qk_norm_eps is not None:
            qk_norms = (inner._norm("q_norm", head_dim, qk_norm_eps), inner._norm("k_norm", head_dim, qk_norm_eps))
        layer = SelfAttention(
            norm=inner._norm("norm", hidden_size, norm_eps),
            qkv_proj=inner._packed("qkv_proj", hidden_size, sizes, bias),
            qk_norms=qk_norms,
            rotary=inner._rotary("rotary", head_dim, rope, max_position),
            attn=inner._attention(
                "attn",
                AttentionArgs(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    window=window,
                    scale=head_dim**-0.5 if scale is None else scale,
                    soft_cap=soft_cap,
                ),
            ),
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
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        layer = GatedMLP(
            norm=inner._norm("norm", hidden_size, norm_eps),
            gate_up_proj=inner._packed("gate_up_proj", hidden_size, sizes, bias),
            down_proj=inner._down("down_proj", intermediate_size, hidden_size, bias),
            act=check_activation(act, where=self._prefix + name),
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
        layer = MoE(
            norm=inner._norm("norm", hidden_size, norm_eps),
            gate=inner._router("gate", hidden_size, num_experts, top_k, renormalize),
            experts=inner._experts("experts", hidden_size, intermediate_size, (num_experts, top_k), act),
        )
        return self._add(name, layer)

    # -- small layers ----------------------------------------------------------------------------------

    def norm(self, name: str, size: int, *, eps: float) -> nn.Module:
        """See `LayerSet.norm`."""
        return self._norm(name, size, eps)

    def packed(self, name: str, hidden_size: int, parts: Mapping[str, int], *, bias: bool = False) -> PackedLinear:
        """See `LayerSet.packed`."""
        return self._packed(name, hidden_size, parts, bias)

    def down(self, name: str, in_size: int, hidden_size: int, *, bias: bool = False) -> nn.Module:
        """See `LayerSet.down`."""
        return self._down(name, in_size, hidden_size, bias)

    def router(
        self, name: str, hidden_size: int, *, num_experts: int, top_k: int, renormalize: bool = True
    ) -> nn.Module:
        """See `LayerSet.router`."""
        return self._router(name, hidden_size, num_experts, top_k, renormalize)

    def experts(
        self, name: str, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, act: str = "silu"
    ) -> nn.Module:
        """See `LayerSet.experts`."""
        return self._experts(name, hidden_size, intermediate_size, (num_experts, top_k), act)

    def rotary(self, name: str, head_dim: int, rope: Mapping[str, Any], max_position: int) -> nn.Module:
        """See `LayerSet.rotary`."""
        return self._rotary(name, head_dim, rope, max_position)

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
        args = AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            scale=head_dim**-0.5 if scale is None else scale,
            soft_cap=soft_cap,
        )
        return self._attention(name, args)

    def param(self, name: str, shape: tuple[int, ...], *, shard: int | None = None) -> nn.Parameter:
        """See `LayerSet.param`. There is one rank, so nothing is divided."""
        parameter = self._add(name, make_parameter(*shape))

        def load(tensor: Any) -> None:
            parameter.data.copy_(tensor)

        setattr(parameter, PARAM_SLOT, Slot(name, shape, load))
        return parameter

    # -- an adapter's own mixers -------------------------------------------------------------------------

    def cache(
        self, name: str, spec: PerToken | PerRequest, kernel: CacheKernel, *, capturable: bool = True
    ) -> nn.Module:
        """See `LayerSet.cache`. There is one rank, so entries have their global shapes."""
        full = self._prefix + name
        if full in self._built.caches:
            raise self._argument(name, "is declared twice")
        if not spec.tensors:
            raise self._argument(name, "declares no tensor")
        for key, tensor in spec.tensors.items():
            if any(size < 1 for size in tensor.shape):
                raise self._argument(name, f"declares {key} of shape {list(tensor.shape)}")
            if tensor.shard is not None and not 0 <= tensor.shard < len(tensor.shape):
                raise self._argument(name, f"divides axis {tensor.shard} of {key}, shape {list(tensor.shape)}")
        self._built.caches[full] = spec
        return self._add(name, CacheHandle(full, kernel, capturable=capturable))

    # -- the same, typed -------------------------------------------------------------------------------

    def _norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return self._add(name, RMSNorm(size, eps))

    def _packed(self, name: str, in_size: int, sizes: Mapping[str, int], bias: bool) -> PackedLinear:
        return self._add(name, PackedLinear(in_size, sizes, bias=bias))

    def _down(self, name: str, in_size: int, out_size: int, bias: bool) -> Linear:
        return self._add(name, Linear(in_size, out_size, bias=bias))

    def _router(self, name: str, hidden_size: int, num_experts: int, top_k: int, renormalize: bool) -> Router:
        self._check_choice(name, num_experts, top_k)
        return self._add(name, Router(hidden_size, num_experts=num_experts, top_k=top_k, renormalize=renormalize))

    def _experts(self, name: str, hidden: int, intermediate: int, choice: tuple[int, int], act: str) -> Experts:
        self._check_choice(name, *choice)
        act = check_activation(act, where=self._prefix + name)
        return self._add(name, Experts(hidden, intermediate, num_experts=choice[0], top_k=choice[1], act=act))

    def _check_choice(self, name: str, num_experts: int, top_k: int) -> None:
        if not 1 <= top_k <= num_experts:
            raise self._argument(name, f"sends each token to {top_k} of {num_experts} experts")

    def _rotary(self, name: str, head_dim: int, rope: Mapping[str, Any], max_position: int) -> Rotary:
        spec = RopeSpec.parse(rope, head_dim=head_dim, max_position=max_position, where=self._prefix + name)
        tables = self._built.tables
        if spec not in tables:
            tables[spec] = RotaryTable(spec)
        return self._add(name, Rotary(tables[spec]))

    def _attention(self, name: str, args: AttentionArgs) -> Attention:
        if args.num_kv_heads < 1 or args.num_heads % args.num_kv_heads:
            raise self._argument(name, f"has {args.num_heads} query heads for {args.num_kv_heads} key/value heads")
        if args.window is not None and args.window < 1:
            raise self._argument(name, f"has a window of {args.window} tokens; None means all")
        full = self._prefix + name
        self._built.caches[full] = AttentionCache(args.num_kv_heads, args.head_dim, args.window)
        return self._add(name, Attention(full, args))

    def _path_to(self, name: str, layer: nn.Module) -> str:
        """Path of `layer`'s weight as seen from the layer `name`."""
        for other, built in self._built.named:
            if built is layer:
                return "../" * (self._prefix + name).count(".") + "../" + f"{other}.weight"
        raise self._argument(name, "is tied to a module that this layer set didn't build")

    def _argument(self, name: str, what: str) -> LayerArgumentError:
        return LayerArgumentError(
            f"{self._prefix}{name} {what}",
            where="arguments of the layer",
            fix="compare config.json with what the model file passes",
        )


def check_names(model: nn.Module, layers: NativeLayers) -> None:
    """Every layer is stored under the name it was given.

    Raises:
        LayerNameError: lists given and actual names.
    """
    paths: dict[int, str] = {id(m): path for path, m in model.named_modules()}
    paths |= {id(p): path for path, p in model.named_parameters()}
    wrong = [
        f"{given} is stored as {paths.get(id(layer), 'nothing')}"
        for given, layer in layers._built.named
        if paths.get(id(layer)) != given
    ]
    if wrong:
        more = "" if len(wrong) <= 8 else f", and {len(wrong) - 8} more"
        raise LayerNameError(
            "; ".join(wrong[:8]) + more,
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            fix="pass the attribute's own name, and L.scope(attribute) to sub-modules",
        )


def check_recurrent(model: nn.Module, layers: NativeLayers) -> None:
    """The class attribute `recurrent` says what the layers declared.

    Raises:
        RecurrentFlagError: it says otherwise, either way.
    """
    states = [name for name, spec in layers.caches.items() if isinstance(spec, PerRequest)]
    declared = bool(getattr(type(model), "recurrent", False))
    if declared == bool(states):
        return
    raise RecurrentFlagError(
        f"recurrent is {declared}, and {f'{states[0]} keeps' if states else 'no layer keeps'} a state per request",
        where=f"{type(model).__module__}.{type(model).__qualname__}",
        fix=f"set recurrent = {bool(states)} in the model class",
    )
