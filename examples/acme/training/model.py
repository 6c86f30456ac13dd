"""The model as it is trained: plain PyTorch, one sequence after the other, nothing kept between calls."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(nn.Module):
    """RMS norm, whose gain is kept less one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.gain)


class Attention(nn.Module):
    """Causal attention. Of each key head in turn: its queries, the key, the value."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.groups, self.size, self.share = c["kv_heads"], c["head_size"], c["heads"] // c["kv_heads"]
        self.base = c["rope_base"]
        self.qkv = nn.Linear(c["width"], self.groups * (self.share + 2) * self.size, bias=False)
        self.out = nn.Linear(c["heads"] * self.size, c["width"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(*x.shape[:2], self.groups, self.share + 2, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = self.rotate(y[:, :, :-2]), self.rotate(y[:, :, -2:-1]), y[:, :, -1:]
        scores = q @ k.transpose(-1, -2) * self.size**-0.5
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        heads = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v  # [batch, groups, share, n, size]
        return self.out(heads.permute(0, 3, 1, 2, 4).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angle = torch.arange(x.shape[-2])[:, None] * self.base ** (-torch.arange(half) / half)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Memory(nn.Module):
    """A matrix per head: faded, set right by a share of what it gets wrong about the key, and asked."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.heads, self.size = c["memory_heads"], c["memory_size"]
        self.qkv = nn.Linear(c["width"], self.heads * 3 * self.size, bias=False)
        self.keep_rate = nn.Linear(c["width"], 2 * self.heads, bias=False)
        self.gate = nn.Linear(c["width"], self.heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, c["width"], bias=False)
        self.decay = nn.Parameter(torch.full((self.heads,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, self.size).unbind(-2)
        q, k = (z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for z in (q, k))
        keep, rate = self.keep_rate(x).view(*x.shape[:2], self.heads, 2).unbind(-1)
        keep, rate = (keep + self.decay).sigmoid(), rate.sigmoid()
        s, rows = x.new_zeros(x.shape[0], self.heads, self.size, self.size), []
        for t in range(x.shape[1]):
            s = keep[:, t, :, None, None] * s
            missed = v[:, t] - (k[:, t, :, None] @ s).squeeze(-2)
            s = s + rate[:, t, :, None, None] * k[:, t, :, :, None] * missed[:, :, None]
            rows.append((q[:, t, :, None] @ s).squeeze(-2))
        return self.out(F.silu(self.gate(x)) * torch.stack(rows, 1).flatten(2))


class FFN(nn.Module):
    """A gated MLP; gate and up alternate row by row."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.gate_up = nn.Linear(c["width"], 2 * c["ffn"], bias=False)
        self.down = nn.Linear(c["ffn"], c["width"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer."""

    def __init__(self, c: dict, kind: str) -> None:
        super().__init__()
        self.pre, self.post = Norm(c["width"], c["eps"]), Norm(c["width"], c["eps"])
        self.name = "mem" if kind == "m" else "attn"
        self.add_module(self.name, Memory(c) if kind == "m" else Attention(c))
        self.ffn = FFN(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + getattr(self, self.name)(self.pre(x))
        return x + self.ffn(self.post(x))


class Acme(nn.Module):
    """Token ids [batch, n] to logits [batch, n, vocab]."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c["vocab_size"], c["width"])
        self.blocks = nn.ModuleList(Block(c, kind) for kind in c["plan"])
        self.final = Norm(c["width"], c["eps"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.final(x) @ self.tokens.weight.T


def layouts(c: dict) -> dict[str, tuple[int, ...]]:
    """How checkpoints shape the tensors whose rows are of several kinds, by the end of their names."""
    share = c["heads"] // c["kv_heads"]
    return {
        "attn.qkv": (c["kv_heads"], share + 2, c["head_size"], c["width"]),
        "mem.qkv": (c["memory_heads"], 3, c["memory_size"], c["width"]),
        "mem.keep_rate": (c["memory_heads"], 2, c["width"]),
        "ffn.gate_up": (c["ffn"], 2, c["width"]),
    }
