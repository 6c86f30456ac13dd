"""Paged attention on the GPU: cache write, split decode, ragged prefill, each one launch."""

from __future__ import annotations

from torch import Tensor

from mrv2.attn.backend import AttentionArgs, StepMemo
from mrv2.kernels.attend_projected import attend_projected
from mrv2.kernels.decode_attention import decode_attention
from mrv2.kernels.decode_splits import DecodeWorkspace
from mrv2.kernels.prefill_attention import prefill_attention
from mrv2.kernels.write_kv_cache import write_kv_cache
from mrv2.state.view import CacheMeta

PROJECTED_TOKENS = range(5, 33)
"""Steps whose attention starts from the projection: 3 to 5 % of a step are gained there. Each split of a request does
the norm and the rotation anew, which costs more than a launch where one request has many splits, and is as much work as
everything else where there are many requests."""


class TritonAttention:
    """`AttentionBackend` by Triton kernels. Never reads a tensor on the host; what it launches can be captured.

    Keeps memory for partial results, allocated by the first step: run a step before capturing one, and use
    one backend per runner.

    Args:
        workspace: for partial results; None: one that fills the device.
    """

    def __init__(self, workspace: DecodeWorkspace | None = None) -> None:
        self._workspace = workspace or DecodeWorkspace()

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
        """See `AttentionBackend.attend`. The kernels derive what they need; `memo` isn't used."""
        out = q.new_empty(q.shape)
        if q.shape[0] == 0:
            return out
        if k is not None and v is not None:
            write_kv_cache(k=k, v=v, cache=cache, slot_mapping=meta.slot_mapping)
        if meta.num_decodes:
            decode_attention(
                q=q,
                cache=cache,
                block_table=meta.block_table,
                seq_lens=meta.seq_lens,
                num_decodes=meta.num_decodes,
                max_seq_len=meta.max_seq_len,
                scale=args.scale,
                window=args.window,
                soft_cap=args.soft_cap,
                workspace=self._workspace,
                out=out,
            )
        if q.shape[0] > meta.num_decodes:
            prefill_attention(
                q=q,
                cache=cache,
                block_table=meta.block_table,
                query_start_loc=meta.query_start_loc,
                seq_lens=meta.seq_lens,
                num_decodes=meta.num_decodes,
                max_query_len=meta.max_query_len,
                max_seq_len=meta.max_seq_len,
                scale=args.scale,
                window=args.window,
                soft_cap=args.soft_cap,
                out=out,
            )
        return out

    def attend_projected(
        self,
        qkv: Tensor,
        *,
        norms: tuple[Tensor | None, Tensor | None, float, float],
        angles: tuple[Tensor, Tensor],
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
    ) -> Tensor | None:
        """Norm, rotation, cache write and attention of a packed projection, in one launch; None: this step isn't one of
        single tokens, its size isn't one where that pays, or the window is too narrow. `norms` and `angles` as
        `attend_projected` takes them.
        """
        num_tokens = qkv.shape[0]
        if num_tokens not in PROJECTED_TOKENS or num_tokens != meta.num_decodes:
            return None
        if args.window is not None and args.window < 2:
            return None
        q_weight, k_weight, q_eps, k_eps = norms
        out = qkv.new_empty(qkv.shape[0], args.num_heads, args.head_dim)
        attend_projected(
            qkv=qkv,
            q_weight=q_weight,
            k_weight=k_weight,
            q_eps=q_eps,
            k_eps=k_eps,
            cos=angles[0],
            sin=angles[1],
            slot_mapping=meta.slot_mapping,
            cache=cache,
            block_table=meta.block_table,
            seq_lens=meta.seq_lens,
            max_seq_len=meta.max_seq_len,
            scale=args.scale,
            window=args.window,
            soft_cap=args.soft_cap,
            workspace=self._workspace,
            out=out,
        )
        return out
