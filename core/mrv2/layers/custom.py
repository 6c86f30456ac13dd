"""An adapter's own mixer: caches that it declares, and what its kernel reads and writes them with.

A mixer's `forward` stays plain PyTorch. What touches a cache is a kernel, called through the handle that
`LayerSet.cache` returned:

    self.state = L.cache("state", PerRequest({"s": CacheTensor((heads, dk, dv), torch.float32)}), self.kernel)
    y = self.state(ctx, q, k, v, out=torch.empty_like(v))

The kernel gets the inputs, `out`, `cache` (name to tensor) and `meta`, and has to write all of `out`. The
helpers below are vectorised over requests, read nothing on the host, and know about scratch, new requests and
drafts; a kernel built from them needs no case of its own for chunks, decoding, resuming or prefix hits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mrv2.attn.specs import CacheTensor, PerRequest, PerToken
from mrv2.errors import LayerArgumentError
from mrv2.state.view import CacheMeta

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext

__all__ = [
    "CacheHandle",
    "CacheKernel",
    "CacheMeta",
    "CacheTensor",
    "PerRequest",
    "PerToken",
    "fresh",
    "load_state",
    "read_tokens",
    "steps",
    "store_state",
    "write_tokens",
]


class CacheKernel(Protocol):
    """What an adapter gives to `LayerSet.cache`: `kernel(*inputs, out=…, cache=…, meta=…)`.

    Typed as loosely as that, so that a kernel which names its inputs passes a strict type checker.
    """

    def __call__(self, *inputs: Any, **step: Any) -> None:
        """Compute one step.

        Args:
            inputs: [num_tokens, ...] tensors, as the handle was called with.
            step: three keywords. `out`, a tensor [num_tokens, ...]: all of it has to be written, padding with
                anything finite. `cache`: the declared tensors by name, [num_blocks, block_size, *shape] or
                [num_slots, *shape]; always strided, so blocks and offsets are two indices and never flattened.
                `meta`, a `CacheMeta`: where this step's entries are.
        """
        ...


class CacheHandle(nn.Module):
    """What `LayerSet.cache` returns: finds the cache of this step and hands it to the kernel."""

    def __init__(self, name: str, kernel: CacheKernel, *, capturable: bool) -> None:
        super().__init__()
        self.name = name  # full: caches go by it
        self.kernel = kernel
        self.capturable = capturable

    def forward(self, ctx: NativeContext, *inputs: Tensor, out: Tensor) -> Tensor:
        """Run the kernel on this step's `inputs`; returns `out`."""
        cache, meta = ctx.own_cache(self.name)
        self.kernel(*inputs, out=out, cache=cache, meta=meta)
        return out


# -- entries per token -----------------------------------------------------------------------------------


def write_tokens(cache: Tensor, meta: CacheMeta, x: Tensor) -> None:
    """Store this step's entries, `x` [num_tokens, *shape]; padding goes to scratch."""
    slots = meta.slot_mapping.clamp(min=0)
    cache[slots // meta.block_size, slots % meta.block_size] = x


def read_tokens(cache: Tensor, meta: CacheMeta) -> Tensor:
    """All entries of each request, [num_reqs, length, *shape] with length >= max_seq_len.

    Entries at `seq_lens` and after are zeros: what the cache holds there is arbitrary, and a weight of zero
    wouldn't undo a NaN.
    """
    num_blocks = min(-(-meta.max_seq_len // meta.block_size), meta.block_table.shape[1])
    entries = cache[meta.block_table[:, :num_blocks].long()].flatten(1, 2)
    known = torch.arange(entries.shape[1], device=cache.device) < meta.seq_lens[:, None]
    return torch.where(_like(known, entries), entries, 0)


# -- states per request ----------------------------------------------------------------------------------


def fresh(meta: CacheMeta, state: Tensor) -> Tensor:
    """`state` [num_reqs, ...] with zeros for requests that have computed nothing yet.

    Their slots hold arbitrary bits. This selects: a product with zero would keep a NaN.
    """
    return torch.where(_like(meta.computed > 0, state), state, 0)


def load_state(cache: Tensor, meta: CacheMeta) -> Tensor:
    """Each request's state before this step, [num_reqs, *shape]; zeros for a new request."""
    slots = _state_slots(meta)
    slot = slots[:, 0] if meta.read_col is None else slots.gather(1, meta.read_col[:, None].long())[:, 0]
    return fresh(meta, cache[slot])


def store_state(cache: Mapping[str, Tensor], meta: CacheMeta, t: int, live: Tensor, **state: Tensor) -> None:
    """Store the states after the t-th token of each request. Call it after every step of `steps`.

    Without drafts only the last call writes. With drafts a request that verifies keeps the state after its
    token t in column t, any other its final state in column 0.

    Args:
        cache: the declared tensors.
        meta: of this step.
        t: as `steps` counts.
        live: [num_reqs] bool, as `steps` gave it: requests that have a token t.
        state: [num_reqs, *shape] per tensor, by name; of requests that aren't live the state after their last
            token.
    """
    slots = _state_slots(meta)
    if meta.verify is None:
        if t < meta.max_query_len - 1:
            return
        slot = slots[:, 0]
    else:
        col = torch.where(meta.verify, t, 0).clamp(max=slots.shape[1] - 1)
        slot = torch.where(live, slots.gather(1, col[:, None])[:, 0], 0)
    for name, value in state.items():
        cache[name][slot] = value.to(cache[name].dtype)


def steps(meta: CacheMeta) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk the tokens of all requests side by side.

    Yields:
        For t = 0 … max_query_len - 1: [num_reqs] int64, index of each request's t-th token among the inputs
        (some valid index where there is none), and [num_reqs] bool, whether there is one.
    """
    starts = meta.query_start_loc.long()
    for t in range(meta.max_query_len):
        token = starts[:-1] + t
        yield token.clamp(max=meta.num_tokens - 1), token < starts[1:]


def _state_slots(meta: CacheMeta) -> Tensor:
    if meta.state_slots is None:
        raise LayerArgumentError(
            "a kernel loads or stores a state, and its cache is declared PerToken",
            where="mrv2.layers.custom",
            fix="declare it PerRequest, or use read_tokens and write_tokens",
        )
    return meta.state_slots.long()


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """`mask` with axes of length 1 behind, to select among `values`."""
    return mask.view(*mask.shape, *[1] * (values.dim() - mask.dim()))
