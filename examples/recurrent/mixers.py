"""Three mixers of our own: two that keep a state per request, and one with a cache per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mrv2.layers import (
    CacheMeta,
    CacheTensor,
    LayerSet,
    PerRequest,
    PerToken,
    StepContext,
    Stream,
    load_state,
    read_tokens,
    steps,
    store_state,
    write_tokens,
)


class DecayMixer(nn.Module):
    """A gated, decaying sum of outer products: two state tensors, one of them in float32.

    With u_t = v_t + shift * v_(t-1) and a_t in (0, 1), per head:
    S_t = a_t S_(t-1) + k_t u_t', y_t = q_t S_t, and the output is silu(g_t) * y_t.
    """

    def __init__(self, L: LayerSet, c: Any) -> None:
        super().__init__()
        heads, dk, dv = c.decay_heads, c.decay_key, c.decay_value
        self.dk, self.dv = dk, dv
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        parts = {
            "q_proj": heads * dk,
            "k_proj": heads * dk,
            "v_proj": heads * dv,
            "a_proj": heads,
            "g_proj": heads * dv,
        }
        self.in_proj = L.packed("in_proj", c.hidden_size, parts)
        self.shift = L.param("shift", (heads,), shard=0)
        spec = {
            "s": CacheTensor((heads, dk, dv), torch.float32, shard=0),
            "v": CacheTensor((heads, dv), shard=0),
        }
        self.state = L.cache("state", PerRequest(spec), self.kernel)
        self.out_proj = L.down("out_proj", heads * dv, c.hidden_size)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer."""
        x, residual = ctx.prenorm(self.norm, h)
        q, k, v, a, g = self.in_proj.parts(x)
        # -1 for the heads: kernels and forward work on whatever share of them this rank has.
        q, k, v = q.unflatten(-1, (-1, self.dk)), k.unflatten(-1, (-1, self.dk)), v.unflatten(-1, (-1, self.dv))
        y = self.state(ctx, q, k, v, torch.sigmoid(a.float() + 2), out=torch.empty_like(v))
        return Stream(self.out_proj(F.silu(g) * y.flatten(1)), residual)

    def kernel(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, *, out: Tensor, cache: Mapping[str, Tensor], meta: CacheMeta
    ) -> None:
        """One token of every request at a time. q, k, v: [num_tokens, heads, size]; a: [num_tokens, heads]."""
        s, before = load_state(cache["s"], meta), load_state(cache["v"], meta)
        out.zero_()
        for t, (i, live) in enumerate(steps(meta)):
            u = v[i] + self.shift[:, None] * before
            summed = a[i][..., None, None] * s + k[i].float()[..., None] * u.float()[..., None, :]
            y = torch.einsum("rhk,rhkv->rhv", q[i].float(), summed).to(out.dtype)
            out.index_add_(0, i, torch.where(live[:, None, None], y, 0))
            s = torch.where(live[:, None, None, None], summed, s)
            before = torch.where(live[:, None, None], v[i], before)
            store_state(cache, meta, t, live, s=s, v=before)


class AverageMixer(nn.Module):
    """A leaky average per channel, m_t = a_t m_(t-1) + (1 - a_t) v_t: one small state tensor."""

    def __init__(self, L: LayerSet, c: Any) -> None:
        super().__init__()
        size = c.average_size
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        self.in_proj = L.packed("in_proj", c.hidden_size, {"v_proj": size, "a_proj": size})
        self.state = L.cache("state", PerRequest({"m": CacheTensor((size,), torch.float32, shard=0)}), self.kernel)
        self.out_proj = L.down("out_proj", size, c.hidden_size)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer."""
        x, residual = ctx.prenorm(self.norm, h)
        v, a = self.in_proj.parts(x)
        y = self.state(ctx, v, torch.sigmoid(a.float() + 1), out=torch.empty_like(v))
        return Stream(self.out_proj(y), residual)

    def kernel(self, v: Tensor, a: Tensor, *, out: Tensor, cache: Mapping[str, Tensor], meta: CacheMeta) -> None:
        """One token of every request at a time. v, a: [num_tokens, size]."""
        m = load_state(cache["m"], meta)
        out.zero_()
        for t, (i, live) in enumerate(steps(meta)):
            m = torch.where(live[:, None], a[i] * m + (1 - a[i]) * v[i].float(), m)
            out.index_add_(0, i, torch.where(live[:, None], m, 0).to(out.dtype))
            store_state(cache, meta, t, live, m=m)


class BiasedAttention(nn.Module):
    """Attention with a learned penalty per head and distance; keys and values differ in width."""

    def __init__(self, L: LayerSet, c: Any) -> None:
        super().__init__()
        heads, dk, dv = c.biased_heads, c.biased_key, c.biased_value
        self.dk, self.dv = dk, dv
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        self.in_proj = L.packed(
            "in_proj", c.hidden_size, {"q_proj": heads * dk, "k_proj": heads * dk, "v_proj": heads * dv}
        )
        self.slope = L.param("slope", (heads,), shard=0)
        spec = {"k": CacheTensor((heads, dk), shard=0), "v": CacheTensor((heads, dv), shard=0)}
        self.tokens = L.cache("tokens", PerToken(spec), self.kernel)
        self.out_proj = L.down("out_proj", heads * dv, c.hidden_size)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer."""
        x, residual = ctx.prenorm(self.norm, h)
        q, k, v = self.in_proj.parts(x)
        q, k, v = q.unflatten(-1, (-1, self.dk)), k.unflatten(-1, (-1, self.dk)), v.unflatten(-1, (-1, self.dv))
        y = self.tokens(ctx, q, k, v, out=torch.empty_like(v))
        return Stream(self.out_proj(y.flatten(1)), residual)

    def kernel(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, cache: Mapping[str, Tensor], meta: CacheMeta
    ) -> None:
        """All keys of every request against one query of each at a time. q, k, v: [num_tokens, heads, size]."""
        write_tokens(cache["k"], meta, k)
        write_tokens(cache["v"], meta, v)
        keys, values = read_tokens(cache["k"], meta).float(), read_tokens(cache["v"], meta).float()
        key_pos = torch.arange(keys.shape[1], device=q.device)
        out.zero_()
        for t, (i, live) in enumerate(steps(meta)):
            distance = (meta.computed + t)[:, None] - key_pos  # [num_reqs, length]
            scores = torch.einsum("rhd,rlhd->rhl", q[i].float(), keys) * self.dk**-0.5
            scores = scores - self.slope.float()[:, None] * distance[:, None]
            # A request without a t-th token still looks at something, so that no row of softmax is empty.
            hidden = (distance < 0) & live[:, None]
            y = torch.einsum("rhl,rlhd->rhd", scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1), values)
            out.index_add_(0, i, torch.where(live[:, None, None], y, 0).to(out.dtype))
