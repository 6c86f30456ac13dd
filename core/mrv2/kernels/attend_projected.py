"""From the packed projection to the attention's output, for steps of one token per request, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.decode_attention import Fresh, decode_attention_ref, launch_decode
from mrv2.kernels.decode_splits import DecodeWorkspace
from mrv2.kernels.qk_norm_rope_cache import qk_norm_rope_cache_ref
from mrv2.kernels.registry import kernel


def attend_projected_ref(
    *,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_eps: float,
    k_eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Torch twin of `attend_projected`."""
    q = torch.empty_like(out)
    qk_norm_rope_cache_ref(
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        q_eps=q_eps,
        k_eps=k_eps,
        cos=cos,
        sin=sin,
        slot_mapping=slot_mapping,
        cache=cache,
        q=q,
    )
    decode_attention_ref(
        q=q,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        num_decodes=len(qkv),
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        workspace=workspace,
        out=out,
    )


@kernel(twin=attend_projected_ref)
def attend_projected(
    *,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_eps: float,
    k_eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """`qk_norm_rope_cache` and `decode_attention` of requests with one token each, token i being request i's.

    The program that has the end of a request makes its key and value, attends to them as they are, and leaves them in
    the cache for later steps: nothing is read that this launch writes. A request of length 0 writes nothing.

    Args:
        qkv: [num_reqs, (num_heads + 2 * num_kv_heads) * head_dim], rows contiguous, at least one.
        q_weight: [head_dim] of the queries' RMS norm; None: there is none.
        k_weight: [head_dim] of the keys'.
        q_eps: of the queries' norm.
        k_eps: of the keys'.
        cos: [num_reqs, rotary_dim], contiguous.
        sin: [num_reqs, rotary_dim], contiguous; its first half negated.
        slot_mapping: [num_reqs] int64, slot of each request's last position; where it is negative, nothing is written.
        cache: in and out, [num_blocks, 2, block_size, num_kv_heads, head_dim]; the last three axes are contiguous.
        block_table: [num_reqs, max_blocks] int32.
        seq_lens: [num_reqs] int32, length after this step; 0 gives zeros.
        max_seq_len: upper bound of `seq_lens`.
        scale: of the scores.
        window: tokens in reach, the current one included, at least 2; None: all.
        soft_cap: as in `decode_attention`.
        workspace: for partial results.
        out: out, [num_reqs, num_heads, head_dim], contiguous.
    """
    assert qkv.stride(1) == 1
    assert window is None or window >= 2
    launch_decode(
        qkv,
        Fresh(q_weight, k_weight, q_eps, k_eps, cos, sin, slot_mapping),
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        num_decodes=len(qkv),
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        workspace=workspace,
        out=out,
    )
