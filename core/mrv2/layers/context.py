"""The native host's step context."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mrv2.attn.backend import AttentionArgs, AttentionBackend
from mrv2.attn.groups import BoundCache
from mrv2.layers.base import Stream
from mrv2.layers.one_token import OneToken
from mrv2.layers.rotary import Angles, RotaryTable
from mrv2.state.view import AttnMetadata, CacheMeta


class NativeContext:
    """What `forward` gets for one step. Built anew each step; holds nothing beyond it.

    Args:
        attn: metadata per KV group.
        caches: of each attention layer a tensor [num_blocks, 2, block_size, num_kv_heads, head_dim], of each
            cache of an adapter's own its tensors by name.
        group_of: KV group of each of them.
        backend: runs attention; one per runner.
        prompt_lens: gives [num_reqs] int32, prompt length of each request in batch order, any value for padding. Asked
            only by rotary types that depend on a request's length; None: the step's own `seq_lens` count, which
            is the same thing unless a prompt is computed in chunks or resumed.
        one_token: what runs fused layers when the step is a single token; None: they run as always.
    """

    is_last = True

    def __init__(
        self,
        *,
        attn: AttnMetadata,
        caches: Mapping[str, BoundCache],
        group_of: Mapping[str, str],
        backend: AttentionBackend,
        prompt_lens: Callable[[], Tensor] | None = None,
        one_token: OneToken | None = None,
    ) -> None:
        self._attn = attn
        self._caches = caches
        self._group_of = group_of
        self._backend = backend
        self._prompt_lens = prompt_lens
        self.one_token = one_token
        self.memo: dict[Hashable, Any] = {}  # what layers and the backend derive once per step
        self._angles: dict[tuple[int, int, torch.dtype], tuple[Angles, Tensor]] = {}

    # -- for models and custom mixers --------------------------------------------------------------------

    def embed(self, table: nn.Module, input_ids: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Stream:
        """See `StepContext.embed`."""
        embedded = table(input_ids)
        return Stream(embedded if then is None else then(embedded), None)

    def run(self, layers: nn.ModuleList, h: Stream, positions: Tensor) -> Stream:
        """See `StepContext.run`."""
        for layer in layers:
            h = layer(h, positions, self)
        return h

    def finish(self, norm: nn.Module, h: Stream, then: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """See `StepContext.finish`: [num_tokens, hidden], or what `then` makes of it."""
        hidden, _ = self.prenorm(norm, h)
        return hidden if then is None else then(hidden)

    def prenorm(self, norm: nn.Module, h: Stream) -> tuple[Tensor, Tensor]:
        """See `StepContext.prenorm`."""
        added: tuple[Tensor, Tensor] = norm.add(h)  # type: ignore[operator]  # every norm of this host has it
        return added

    # -- for the native layers ---------------------------------------------------------------------------

    def attend(self, layer: str, q: Tensor, k: Tensor | None, v: Tensor | None, args: AttentionArgs) -> Tensor:
        """Write this layer's keys and values, and attend; shapes as in `AttentionBackend.attend`."""
        cache, meta = self.cache_of(layer)
        return self._backend.attend(q, k, v, cache=cache, meta=meta, args=args, memo=self.memo)

    def attend_projected(
        self,
        layer: str,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None, float, float],
        angles: tuple[Tensor, Tensor],
        args: AttentionArgs,
    ) -> Tensor | None:
        """Attention from the packed projection on, where the backend has that for this step; else None."""
        attend = getattr(self._backend, "attend_projected", None)
        if attend is None:
            return None
        cache, meta = self.cache_of(layer)
        out: Tensor | None = attend(qkv, norms=norms, angles=angles, cache=cache, meta=meta, args=args)
        return out

    def own_cache(self, name: str) -> tuple[Mapping[str, Tensor], CacheMeta]:
        """The tensors of an adapter's own cache, and this step's metadata of its group."""
        return cast(Mapping[str, Tensor], self._caches[name]), self._attn[self._group_of[name]]

    def cache_of(self, layer: str) -> tuple[Tensor, CacheMeta]:
        """This attention layer's cache, and this step's metadata of its group."""
        return cast(Tensor, self._caches[layer]), self._attn[self._group_of[layer]]

    @property
    def num_real(self) -> Tensor:
        """[1] int32 on the device: tokens of requests. Those behind them, if there are more, are padding."""
        meta: CacheMeta = next(iter(self._attn.values()))
        return meta.query_start_loc[-1:]

    def angles(self, table: RotaryTable, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Rotary angles of this step's tokens, computed once per table."""
        key = (id(table), id(positions), dtype)
        hit = self._angles.get(key)
        if hit is None:
            lens = self._request_lens(len(positions)) if table.spec.dynamic else None
            # Keeping `positions` keeps its id from being given to another tensor.
            hit = self._angles[key] = (table.angles(positions, dtype, lens), positions)
        return hit[0]

    def angles_np(self, table: RotaryTable, positions: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of `angles`, [num_tokens, rotary_dim] each, in float32 on the CPU."""
        hit: tuple[NDArray[np.float32], NDArray[np.float32]] | None = self.memo.get(table)
        if hit is None:
            angles = self.angles(table, positions, torch.float32)
            hit = self.memo[table] = angles.cos[:, 0].numpy(), angles.sin[:, 0].numpy()
        return hit

    def _request_lens(self, num_tokens: int) -> Tensor:
        """[num_tokens] the length that counts for each token's rotation; see `rotary`. Device only."""
        meta: CacheMeta = next(iter(self._attn.values()))
        token = torch.arange(num_tokens, device=meta.seq_lens.device)
        i = torch.searchsorted(meta.query_start_loc[1:].long(), token, right=True).clamp(max=meta.num_reqs - 1)
        if self._prompt_lens is None:
            return meta.seq_lens[i]
        so_far = meta.computed[i] + token - meta.query_start_loc[i] + 1
        return torch.maximum(self._prompt_lens()[i], so_far)
