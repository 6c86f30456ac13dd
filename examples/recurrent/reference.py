"""What the model computes, written a second time: one sequence, plain torch, no cache, no batch, no layers of mrv2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recurrent.config import TidalConfig

SHAPES = {
    "decay": lambda c: {
        "q_proj.weight": (c.decay_heads * c.decay_key, c.hidden_size),
        "k_proj.weight": (c.decay_heads * c.decay_key, c.hidden_size),
        "v_proj.weight": (c.decay_heads * c.decay_value, c.hidden_size),
        "a_proj.weight": (c.decay_heads, c.hidden_size),
        "g_proj.weight": (c.decay_heads * c.decay_value, c.hidden_size),
        "shift": (c.decay_heads,),
        "out_proj.weight": (c.hidden_size, c.decay_heads * c.decay_value),
    },
    "average": lambda c: {
        "v_proj.weight": (c.average_size, c.hidden_size),
        "a_proj.weight": (c.average_size, c.hidden_size),
        "out_proj.weight": (c.hidden_size, c.average_size),
    },
    "biased": lambda c: {
        "q_proj.weight": (c.biased_heads * c.biased_key, c.hidden_size),
        "k_proj.weight": (c.biased_heads * c.biased_key, c.hidden_size),
        "v_proj.weight": (c.biased_heads * c.biased_value, c.hidden_size),
        "slope": (c.biased_heads,),
        "out_proj.weight": (c.hidden_size, c.biased_heads * c.biased_value),
    },
    "attention": lambda c: {
        "q_proj.weight": (c.num_attention_heads * c.head_dim, c.hidden_size),
        "k_proj.weight": (c.num_key_value_heads * c.head_dim, c.hidden_size),
        "v_proj.weight": (c.num_key_value_heads * c.head_dim, c.hidden_size),
        "o_proj.weight": (c.hidden_size, c.num_attention_heads * c.head_dim),
    },
}
"""Tensors of each mixer by name, beside its norm."""


def make_checkpoint(folder: Path, config: TidalConfig, *, seed: int = 0) -> Path:
    """Write a checkpoint with random weights to `folder`."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c.vocab_size, c.hidden_size),
        "norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
    }
    for i, kind in enumerate(c.mixers):
        shapes |= {f"layers.{i}.mixer.{name}": shape for name, shape in SHAPES[kind](c).items()}
        shapes |= {f"layers.{i}.{part}.norm.weight": (c.hidden_size,) for part in ("mixer", "mlp")}
        shapes |= {f"layers.{i}.mlp.{n}_proj.weight": (c.intermediate_size, c.hidden_size) for n in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        flat = 1 + 0.1 * noise if "norm" in name else 0.1 + 0.05 * noise
        tensors[name] = flat if len(shape) == 1 else noise * shape[-1] ** -0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = c.to_dict() | {"architectures": ["TidalForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


class Reference:
    """The model of a checkpoint, in float32: `reference(ids)` gives logits [len(ids), vocab]."""

    def __init__(self, folder: Path) -> None:
        self.config = TidalConfig.from_pretrained(folder)
        self.tensors = load_file(folder / "model.safetensors")

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits at every position."""
        c, w = self.config, self.tensors
        x = w["embed.weight"][list(ids)]
        for i, kind in enumerate(c.mixers):
            own = {n.removeprefix(f"layers.{i}."): t for n, t in w.items() if n.startswith(f"layers.{i}.")}
            mix = {n.removeprefix("mixer."): t for n, t in own.items()}
            x = x + MIXERS[kind](mix, _norm(x, own["mixer.norm.weight"], c), c)
            y = _norm(x, own["mlp.norm.weight"], c)
            gate, up = y @ own["mlp.gate_proj.weight"].T, y @ own["mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
        return _norm(x, w["norm.weight"], c) @ w["lm_head.weight"].T

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of the token after `ids`, [vocab]."""
        return self(ids)[-1]


def _norm(x: Tensor, weight: Tensor, c: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight


def _heads(w: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    """[heads, num_tokens, size]."""
    return (x @ w[f"{name}.weight"].T).view(len(x), heads, -1).transpose(0, 1)


def _decay(w: dict[str, Tensor], x: Tensor, c: Any) -> Tensor:
    q, k, v, g = (_heads(w, f"{n}_proj", x, c.decay_heads) for n in "qkvg")
    a = (x @ w["a_proj.weight"].T + 2).sigmoid().T
    rows = []
    for t in range(len(x)):
        # The sum written out: every earlier token, decayed by all factors since.
        y = torch.zeros(c.decay_heads, c.decay_value)
        for j in range(t + 1):
            u = v[:, j] + (w["shift"][:, None] * v[:, j - 1] if j else 0)
            y += a[:, j + 1 : t + 1].prod(1)[:, None] * (q[:, t] * k[:, j]).sum(-1, keepdim=True) * u
        rows.append((g[:, t] * g[:, t].sigmoid() * y).flatten())
    return torch.stack(rows) @ w["out_proj.weight"].T


def _average(w: dict[str, Tensor], x: Tensor, c: Any) -> Tensor:
    v, a = x @ w["v_proj.weight"].T, (x @ w["a_proj.weight"].T + 1).sigmoid()
    rows, m = [], torch.zeros(c.average_size)
    for t in range(len(x)):
        m = a[t] * m + (1 - a[t]) * v[t]
        rows.append(m)
    return torch.stack(rows) @ w["out_proj.weight"].T


def _biased(w: dict[str, Tensor], x: Tensor, c: Any) -> Tensor:
    q, k, v = (_heads(w, f"{n}_proj", x, c.biased_heads) for n in "qkv")
    n = torch.arange(len(x))
    distance = n[:, None] - n
    scores = q @ k.transpose(1, 2) * c.biased_key**-0.5 - w["slope"][:, None, None] * distance
    y = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ v
    return y.transpose(0, 1).flatten(1) @ w["out_proj.weight"].T


def _attention(w: dict[str, Tensor], x: Tensor, c: Any) -> Tensor:
    q = _heads(w, "q_proj", x, c.num_attention_heads)
    k, v = (_heads(w, f"{n}_proj", x, c.num_key_value_heads) for n in "kv")
    half = c.head_dim // 2
    n = torch.arange(len(x))
    angle = n[:, None] * c.rope_theta ** (-torch.arange(half) / half)

    def rotate(z: Tensor) -> Tensor:
        a, b = z[..., :half], z[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    share = c.num_attention_heads // c.num_key_value_heads
    k, v = rotate(k).repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = rotate(q) @ k.transpose(1, 2) * c.head_dim**-0.5
    y = scores.masked_fill(n[:, None] < n, float("-inf")).softmax(-1) @ v
    return y.transpose(0, 1).flatten(1) @ w["o_proj.weight"].T


MIXERS = {"decay": _decay, "average": _average, "biased": _biased, "attention": _attention}
