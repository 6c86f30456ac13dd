"""What a model file sees of its host: layer set, step context, residual stream, weight map.

A model is built once by `Model(L, config)` and names no host. All sizes are global (never per rank), every
name is given explicitly and equals the attribute path, because LoRA, quantisation and caches go by names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mrv2.errors import LayerArgumentError

if TYPE_CHECKING:
    from mrv2.attn.specs import PerRequest, PerToken
    from mrv2.layers.custom import CacheKernel


class Stream(NamedTuple):
    """The residual stream between layers; opaque to models, open to custom mixers (`ctx.prenorm`).

    `x` is a layer's output, not yet added to `residual`, so that the add fuses with the next norm.
    """

    x: Tensor  # [num_tokens, hidden]
    residual: Tensor | None  # [num_tokens, hidden]; None: x is the whole stream


class StepContext(Protocol):
    """What `forward` gets from its host for one step; opaque, and valid within that step only."""

    is_last: bool  # static per process: this pipeline stage produces the hidden states

    def embed(self, table: nn.Module, input_ids: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Stream:
        """Look up `input_ids` [num_tokens], then `then(embedded)`; on later stages, the stream that arrived."""
        ...

    def run(self, layers: nn.ModuleList, h: Stream, positions: Tensor) -> Stream:
        """Run this stage's layers in order. The loop is the host's: stages and auxiliary states live there."""
        ...

    def finish(self, norm: nn.Module, h: Stream, then: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The final norm, then `then(hidden)`; only on the last stage. What it returns, `forward` returns."""
        ...

    def prenorm(self, norm: nn.Module, h: Stream) -> tuple[Tensor, Tensor]:
        """Add the pending output and normalise: (normed x, new residual), each [num_tokens, hidden]."""
        ...


class Packed(Protocol):
    """Several projections of one input in one product; see `LayerSet.packed`."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of `x` [num_tokens, hidden], each projection [num_tokens, part], in the order they were given in."""
        ...


class LayerSet(Protocol):
    """What a host offers to build models from. Layers come at the level where hosts fuse.

    Each fused layer equals a composition of the small ones with the same parameter names; a family whose
    layer differs opens it and composes the small ones itself.
    """

    # -- names -----------------------------------------------------------------------------------------

    def scope(self, name: str) -> LayerSet:
        """The layer set for the module stored under `name`."""
        ...

    def stack(self, name: str, n: int, make: Callable[[LayerSet, int], nn.Module]) -> nn.ModuleList:
        """`n` layers named `name.0` …; pipeline stages are cut here."""
        ...

    # -- fused layers ----------------------------------------------------------------------------------

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, shared_with_head: bool = False) -> nn.Module:
        """Token table; `shared_with_head` when `lm_head` is tied to it. Used by `ctx.embed` only."""
        ...

    def final_norm(self, name: str, hidden_size: int, *, eps: float) -> nn.Module:
        """RMS norm used by `ctx.finish`."""
        ...

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
        """Logits belong to the host: `soft_cap * tanh(scale * (W h) / soft_cap)`, the cap if one is given."""
        ...

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
        """Norm, Q/K/V projection, optional per-head QK norm, rotary, cache write, attention, output projection.

        Call: `layer(h, positions, ctx) -> h`. Parameters: `norm`, `q_proj`, `k_proj`, `v_proj`, `o_proj`,
        and `q_norm`, `k_norm` with `qk_norm_eps`. `window` counts the current token (None: full) and has no
        default, since hosts disagree on one. `scale` defaults to `head_dim ** -0.5`.
        """
        ...

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
        """Norm, then `down(act(gate(x)) * up(x))`. Call: `layer(h, ctx) -> h`.

        Parameters: `norm`, `gate_proj`, `up_proj`, `down_proj`.
        """
        ...

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
        """Norm, then a gated MLP of each of a token's `top_k` experts, weighted and summed. Call:
        `layer(h, ctx) -> h`.

        Parameters: `norm`, `gate` (the router, [num_experts, hidden]), and `experts.<i>.gate_proj`, `.up_proj`,
        `.down_proj`. Experts and weights are chosen as `router` says. Equals `router` and `experts`, named so.
        """
        ...

    # -- small layers ----------------------------------------------------------------------------------

    def norm(self, name: str, size: int, *, eps: float) -> nn.Module:
        """RMS norm over the last axis; `layer(x) -> x`."""
        ...

    def packed(self, name: str, hidden_size: int, parts: Mapping[str, int], *, bias: bool = False) -> Packed:
        """Several projections of one input in one product, sharded by output. Checkpoint names are `<part>.weight`
        beside this module.
        """
        ...

    def down(self, name: str, in_size: int, hidden_size: int, *, bias: bool = False) -> nn.Module:
        """Projection back to the hidden size, sharded by input; `layer(x) -> x`."""
        ...

    def router(
        self, name: str, hidden_size: int, *, num_experts: int, top_k: int, renormalize: bool = True
    ) -> nn.Module:
        """Which experts each token goes to; `layer(x, ctx) -> (weights, experts)`, both [num_tokens, top_k].

        A softmax over all experts in float32, then the largest; `renormalize` makes them sum to one. Weights have
        the dtype of `x`; experts are int32, the likeliest first and of equals the lower one, -1 for padding.
        Whole on every rank. Parameter: `weight` [num_experts, hidden].
        """
        ...

    def experts(
        self, name: str, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, act: str = "silu"
    ) -> nn.Module:
        """Gated MLPs; `layer(x, weights, experts) -> x` is the weighted sum of what each token's experts give.

        Takes what `router` gives, or a family's own choice of the same shapes, [num_tokens, top_k]; expert -1 is left
        out. A family's own choice must be the same on every rank.
        Checkpoint names are `<i>.gate_proj.weight`, `<i>.up_proj.weight` and `<i>.down_proj.weight` within.
        """
        ...

    def rotary(self, name: str, head_dim: int, rope: Mapping[str, Any], max_position: int) -> nn.Module:
        """Rotary embedding; `layer(positions, q, k, ctx) -> (q, k)` with q, k [num_tokens, heads, head_dim].

        `rope` in any spelling that `rope_parameters` understands.
        """
        ...

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
        """Cache write and causal attention; `layer(q, k, v, ctx) -> [num_tokens, heads * head_dim]`."""
        ...

    def param(self, name: str, shape: tuple[int, ...], *, shard: int | None = None) -> nn.Parameter:
        """A bare parameter of the calling module; `shard`: the axis divided over tensor-parallel ranks."""
        ...

    # -- an adapter's own mixers -------------------------------------------------------------------------

    def cache(
        self, name: str, spec: PerToken | PerRequest, kernel: CacheKernel, *, capturable: bool = True
    ) -> nn.Module:
        """A cache of the calling module's own, and the kernel that uses it; see `mrv2.layers.custom`.

        Call: `layer(ctx, *inputs, out=tensor) -> out`, inputs and `out` [num_tokens, ...]. A module may have
        several. A model class with a `PerRequest` cache says so: `recurrent = True`.

        Args:
            name: of the cache.
            spec: its tensors.
            kernel: reads and writes them.
            capturable: whether a CUDA graph may hold the kernel's launches. False: it computes on the host what
                changes from step to step, and the model's steps run eagerly.
        """
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """One place a checkpoint tensor goes to, under its unpacked name.

    `load` copies a tensor of exactly `shape` into place, keeping the parameter's address; None marks a slot
    whose value lives elsewhere (a tied head), where a checkpoint may or may not carry a copy.
    """

    param: str  # name of the parameter it is part of, relative to the module that lists it
    shape: tuple[int, ...] | None  # global; None: of a quantisation method, whose `load` checks shape and dtype itself
    load: Callable[[Tensor], object] | None  # copies a tensor into place; None: the value lives elsewhere
    optional: bool = False  # has a default value when the checkpoint lacks it
    same: Callable[[Tensor], bool] | None = None  # of a tied slot: whether a copy is equal; None: compared as it is


PARAM_SLOT = "mrv2_slot"
"""Attribute of a parameter that `LayerSet.param` made: its `Slot`, whose `param` is not read. A layer set sets
it, so that bare parameters of an adapter's own module load without a `weight_slots`."""


@runtime_checkable
class HasWeightSlots(Protocol):
    """A module that lists its slots itself. Keys are relative to the module; `../x` is beside it."""

    def weight_slots(self) -> dict[str, Slot]:
        """All slots of this module's own parameters."""
        ...


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a family's checkpoint names become ours. Packing and tying are the layer set's business.

    Args:
        rename: (regex, replacement) pairs, applied to each name in order.
        ignored: regexes of checkpoint tensors that the model doesn't use.
        transform: for a private format: a generator that takes an iterator of (name, tensor) after renaming and
            yields (name, tensor) as the slots expect them (split, merged, transposed, permuted). With a parameter
            called `config` it also gets what the model's constructor got, for what shapes don't tell (how many heads
            a fused matrix holds).

    Raises:
        LayerArgumentError: `rename` or `ignored` aren't tuples of regexes, or `transform` wants something else.
    """

    rename: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    transform: (
        Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
        | Callable[[Iterator[tuple[str, Tensor]], Any], Iterator[tuple[str, Tensor]]]
        | None
    ) = None

    def __post_init__(self) -> None:
        pairs = self.rename if isinstance(self.rename, tuple) else None
        whole = pairs is not None and all(
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs
        )
        if not whole or not isinstance(self.ignored, tuple):
            raise LayerArgumentError(
                f"rename={self.rename!r}, ignored={self.ignored!r}: not tuples of (regex, replacement) and of regexes",
                where="WeightMap",
                fix='mind the commas: rename=((r"^blk", "layers"),)',
            )
        for pattern in (*(pair[0] for pair in self.rename), *self.ignored):
            try:
                re.compile(pattern)
            except re.error as error:
                raise LayerArgumentError(
                    f"{pattern!r} is no regex: {error}", where="WeightMap", fix="correct it"
                ) from error
        if self.transform is not None:
            _check_transform(self.transform)

    def canonical(self, name: str) -> str | None:
        """Our name of the checkpoint's `name`, or None when it is ignored."""
        if any(re.search(pattern, name) for pattern in self.ignored):
            return None
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name

    def for_config(self, config: Any) -> WeightMap:
        """The map of one checkpoint: `transform` has its config, if it asks for it. Hosts call it."""
        transform: Any = self.transform
        if transform is None or not _takes_config(transform):
            return self
        return replace(self, transform=partial(transform, config=config))


def _takes_config(transform: Callable[..., object]) -> bool:
    try:
        return "config" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # written in C, or no function: it will say so when it is called
        return False


def _check_transform(transform: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(transform)
        signature.bind(iter(()), **({"config": None} if _takes_config(transform) else {}))
    except ValueError:  # written in C
        return
    except TypeError as error:
        raise LayerArgumentError(
            f"transform can't be called with (name, tensor) pairs: {error}",
            where="WeightMap",
            fix="def transform(tensors), or def transform(tensors, config)",
        ) from error


class ModelClass(Protocol):
    """What `mrv2_model` returns: a class, since vLLM inspects classes before an instance exists."""

    weight_map: ClassVar[WeightMap]  # the checkpoint's names to attribute paths
    parts: ClassVar[tuple[type, ...]]  # `InputPart` classes, one per extra input of `forward`
    recurrent: ClassVar[bool]  # whether a layer keeps a state per request

    def __call__(self, layers: LayerSet, config: Any) -> nn.Module:
        """Build the model from the host's layer set and the checkpoint's config."""
        ...


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Model dtypes by the name a user gives."""
