"""A memory in place of keys and values: a matrix per head and request, which each token sets right a little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mrv2.layers import CacheMeta, CacheTensor, LayerSet, PerRequest, StepContext, Stream
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import update_memory


class Memory(nn.Module):
    """A gated delta rule. What a memory forgets and how fast it learns, each token says per head."""

    def __init__(self, L: LayerSet, c: Any) -> None:
        super().__init__()
        heads, self.size = c.memory_heads, c.memory_size
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        parts = {f"{name}_proj": heads * self.size for name in ("q", "k", "v", "gate")}
        self.in_proj: Any = L.packed("in_proj", c.hidden_size, parts | {"keep_proj": heads, "rate_proj": heads})
        self.decay = L.param("decay", (heads,), shard=0)
        # Sizes are global; a host that divides the model over devices divides axis 0 of each state.
        state = CacheTensor((heads, self.size, self.size), torch.float32, shard=0)
        self.state = L.cache("state", PerRequest({"s": state}), self.run)
        self.out_proj = L.down("out_proj", heads * self.size, c.hidden_size)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer. Plain PyTorch; what touches the state is behind `self.state`."""
        x, residual = ctx.prenorm(self.norm, h)
        q, k, v, gate, keep, rate = self.in_proj.parts(x)
        # -1 for the heads: here and in the kernel there is whatever share of them this rank has.
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in (q, k, v))
        keep = torch.sigmoid(keep.float() + self.decay.float())
        y = self.state(ctx, q, k, v, keep, torch.sigmoid(rate.float()), out=v.new_empty(v.shape))
        return Stream(self.out_proj(F.silu(gate) * y.flatten(1)), residual)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        rate: Tensor,
        *,
        out: Tensor,
        cache: Mapping[str, Tensor],
        meta: CacheMeta,
    ) -> None:
        """Every request's tokens of this step, from the state before to the state after.

        q, k, v: [num_tokens, heads, size]; keep, rate: [num_tokens, heads].
        """
        assert meta.state_slots is not None
        update_memory(
            q=q,
            k=k,
            v=v,
            keep=keep,
            rate=rate,
            state=cache["s"],
            slots=meta.state_slots[:, 0],
            starts=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            max_query_len=meta.max_query_len,
            out=out,
        )
