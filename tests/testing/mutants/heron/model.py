"""The model: attention opened up, a mixer with two caches of its own, and an input per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mrv2.layers import (
    CacheMeta,
    CacheTensor,
    LayerSet,
    PerRequest,
    PerToken,
    StepContext,
    Stream,
    WeightMap,
    load_state,
    read_tokens,
    steps,
    store_state,
    write_tokens,
)

from .state import Gain


class Attention(nn.Module):
    """Two query heads share a key head; some layers see the last few tokens only."""

    def __init__(self, L: LayerSet, c: Any, window: int | None) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        self.qkv = L.packed("qkv", c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv})
        rope = {"rope_type": "default", "rope_theta": c.rope_theta}
        self.rotary = L.rotary("rotary", c.head_dim, rope, c.max_position_embeddings)
        self.attn = L.attention(
            "attn",
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            window=window,
            scale=c.query_scale,
        )
        self.o_proj = L.down("o_proj", q, c.hidden_size)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer."""
        x, residual = ctx.prenorm(self.norm, h)
        q, k, v = self.qkv.parts(x)
        q, k = q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        q, k = self.rotary(positions, q, k, ctx)
        return Stream(self.o_proj(self.attn(q, k, v, ctx)), residual)


class Memory(nn.Module):
    """A decaying sum of what came, s_t = decay * s_(t-1) + gate_t * v_t, and the mean of all v so far."""

    def __init__(self, L: LayerSet, c: Any) -> None:
        super().__init__()
        size = c.memory_size
        self.norm = L.norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        self.in_proj = L.packed("in_proj", c.hidden_size, {"v_proj": size, "g_proj": size})
        self.rate = L.param("rate", (size,), shard=0)
        self.register_buffer("decay", torch.zeros_like(self.rate, dtype=torch.float32), persistent=False)
        self.sum = L.cache("sum", PerRequest({"s": CacheTensor((size,), torch.float32, shard=0)}), self.add_up)
        self.all = L.cache("all", PerToken({"v": CacheTensor((size,), shard=0)}), self.average)
        self.out_proj = L.down("out_proj", size, c.hidden_size)

    def finalize_weights(self) -> None:
        """The decay, in (0, 1), from the rate that was trained."""
        self.decay.copy_(torch.sigmoid(self.rate.detach().float()))

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this mixer."""
        x, residual = ctx.prenorm(self.norm, h)
        v, g = self.in_proj.parts(x)
        summed = self.sum(ctx, v, torch.sigmoid(g.float()), out=torch.empty_like(v))
        mean = self.all(ctx, v, out=torch.empty_like(v))
        return Stream(self.out_proj(summed + mean), residual)

    def add_up(self, v: Tensor, g: Tensor, *, out: Tensor, cache: Mapping[str, Tensor], meta: CacheMeta) -> None:
        """One token of every request at a time."""
        s = load_state(cache["s"], meta)
        out.zero_()
        for t, (i, live) in enumerate(steps(meta)):
            s = torch.where(live[:, None], self.decay * s + g[i] * v[i].float(), s)
            out.index_add_(0, i, torch.where(live[:, None], s, 0).to(out.dtype))
            store_state(cache, meta, t, live, s=s)

    def average(self, v: Tensor, *, out: Tensor, cache: Mapping[str, Tensor], meta: CacheMeta) -> None:
        """All values of every request, up to each token of its own."""
        write_tokens(cache["v"], meta, v)
        values = read_tokens(cache["v"], meta).float()
        place = torch.arange(values.shape[1], device=v.device)
        out.zero_()
        for t, (i, live) in enumerate(steps(meta)):
            seen = place <= (meta.computed + t)[:, None]
            mean = torch.where(seen[..., None], values, 0).sum(1) / seen.sum(1, keepdim=True)
            out.index_add_(0, i, torch.where(live[:, None], mean, 0).to(out.dtype))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, L: LayerSet, c: Any, i: int) -> None:
        super().__init__()
        inner = L.scope("mixer")
        windows = {0: c.look_back, 2: None}
        self.mixer = Memory(inner, c) if i % 3 == 1 else Attention(inner, c, windows[i % 3])
        self.mlp = L.gated_mlp("mlp", c.hidden_size, c.intermediate_size, norm_eps=c.rms_norm_eps, act="silu")

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        """The residual stream after this layer."""
        return self.mlp(self.mixer(h, positions, ctx), ctx)


def from_checkpoint(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Norms are stored as offsets from one, the memory's output transposed, rotated pairs side by side."""
    for name, tensor in tensors:
        if name.endswith("norm.weight"):
            tensor = tensor + 1
        elif name.endswith("out_proj.weight"):
            tensor = tensor.T
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 16, 2)).transpose(1, 2).flatten(0, 2)
        yield name, tensor


class HeronForCausalLM(nn.Module):
    """The decoder and its head, which is the embedding once more."""

    weight_map: ClassVar[WeightMap] = WeightMap(
        rename=((r"^tok\.", "embed."), (r"^blk\.", "layers."), (r"^last_norm\.", "norm.")),
        ignored=(r"^steps$",),
        transform=from_checkpoint,
    )
    parts: ClassVar[tuple[type, ...]] = (Gain,)
    recurrent: ClassVar[bool] = True

    def __init__(self, L: LayerSet, config: Any) -> None:
        super().__init__()
        c = config
        self.embed_scale, self.final_scale = c.embed_scale, c.final_scale
        self.embed = L.embedding("embed", c.vocab_size, c.hidden_size, shared_with_head=c.tie_word_embeddings)
        self.layers = L.stack("layers", c.num_hidden_layers, lambda L, i: Block(L, c, i))
        self.norm = L.final_norm("norm", c.hidden_size, eps=c.rms_norm_eps)
        tied_to = self.embed if c.tie_word_embeddings else None
        self.lm_head = L.lm_head("lm_head", c.vocab_size, c.hidden_size, tied_to=tied_to)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext, gain: Tensor) -> Tensor:
        """Hidden states [num_tokens, hidden]."""
        scale = self.embed_scale * (1 + gain[:, None])
        h = ctx.embed(self.embed, input_ids, lambda x: x * scale.to(x.dtype))
        h = ctx.run(self.layers, h, positions)
        return ctx.finish(self.norm, h, lambda x: x * self.final_scale)
