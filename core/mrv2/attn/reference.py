"""Paged attention in plain torch operations: any device, no host reads, padded to the largest request.

Made of the kernels' twins: what the fused backends are tested against, and what runs where there is none.
"""

from __future__ import annotations

from torch import Tensor

from mrv2.attn.backend import AttentionArgs, StepMemo
from mrv2.kernels.paged_attention_ref import attend_paged_ref
from mrv2.kernels.write_kv_cache import write_kv_cache_ref
from mrv2.state.view import CacheMeta


class ReferenceAttention:
    """`AttentionBackend` on any device."""

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
        memo: StepMemo,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Derives everything anew in each layer; `memo` isn't used."""
        if k is not None and v is not None:
            write_kv_cache_ref(k=k, v=v, cache=cache, slot_mapping=meta.slot_mapping)
        return attend_paged_ref(
            q=q,
            cache=cache,
            block_table=meta.block_table,
            seq_lens=meta.seq_lens,
            starts=meta.query_start_loc[:-1],
            query_lens=meta.query_start_loc[1:] - meta.query_start_loc[:-1],
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_seq_len,
            scale=args.scale,
            window=args.window,
            soft_cap=args.soft_cap,
        )
