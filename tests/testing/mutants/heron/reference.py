"""What the model computes, written a second time from the checkpoint's own tensors: one sequence, no cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrv2.testing import Target

from .config import HeronConfig


def target() -> Target:
    """For the conformance kit."""
    return Target(
        configs={"heron": HeronConfig()},
        reference=Reference,
        checkpoint=make_checkpoint,
        options=({"gain": 0.5}, {"gain": -0.25}),
        wrong_options=({"gain": "loud"}, {"gian": 1.0}),
    )


def make_checkpoint(folder: Path, config: HeronConfig) -> None:
    """Write a checkpoint with random weights."""
    c = config
    h, q, kv, m = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.memory_size
    shapes: dict[str, tuple[int, ...]] = {"tok.weight": (c.vocab_size, h), "last_norm.weight": (h,)}
    for i in range(c.num_hidden_layers):
        mixer: dict[str, tuple[int, ...]] = {"norm.weight": (h,)}
        if i % 3 == 1:
            mixer |= {"v_proj.weight": (m, h), "g_proj.weight": (m, h), "rate": (m,), "out_proj.weight": (m, h)}
        else:
            mixer |= {
                "q_proj.weight": (q, h),
                "k_proj.weight": (kv, h),
                "v_proj.weight": (kv, h),
                "o_proj.weight": (h, q),
            }
        shapes |= {f"blk.{i}.mixer.{name}": shape for name, shape in mixer.items()}
        n = c.intermediate_size
        mlp = {"norm.weight": (h,), "gate_proj.weight": (n, h), "up_proj.weight": (n, h), "down_proj.weight": (h, n)}
        shapes |= {f"blk.{i}.mlp.{name}": shape for name, shape in mlp.items()}
    g = torch.Generator().manual_seed(7)
    tensors = {n: torch.randn(s, generator=g) * (0.1 if len(s) == 1 else s[-1] ** -0.5) for n, s in shapes.items()}
    save_file(tensors | {"steps": torch.tensor([12345])}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = c.to_dict() | {"architectures": ["HeronForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings))


class Reference:
    """`reference(ids, options)` gives logits [len(ids), vocab] in float32."""

    def __init__(self, folder: Path) -> None:
        self.config: Any = HeronConfig.from_pretrained(folder)
        self.w: dict[str, Tensor] = load_file(folder / "model.safetensors")

    def __call__(self, ids: Sequence[int], options: Mapping[str, Any]) -> Tensor:
        """Logits at every position."""
        c, w, n = self.config, self.w, torch.arange(len(ids))
        x = w["tok.weight"][list(ids)] * c.embed_scale * (1 + options.get("gain", 0.0) * (n % 3 + 1))[:, None]
        for i in range(c.num_hidden_layers):
            p = f"blk.{i}."
            mix = {k.removeprefix(p + "mixer."): t for k, t in w.items() if k.startswith(p + "mixer.")}
            y = self.norm(x, mix["norm.weight"])
            x = x + (self.memory(mix, y) if i % 3 == 1 else self.attention(mix, y, c.look_back if i % 3 == 0 else None))
            y = self.norm(x, w[p + "mlp.norm.weight"])
            gate = y @ w[p + "mlp.gate_proj.weight"].T
            x = x + (gate * gate.sigmoid() * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        return c.final_scale * self.norm(x, w["last_norm.weight"]) @ w["tok.weight"].T

    def norm(self, x: Tensor, offset: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * (1 + offset)

    def memory(self, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        v, g, decay = x @ w["v_proj.weight"].T, (x @ w["g_proj.weight"].T).sigmoid(), w["rate"].sigmoid()
        rows = []
        for t in range(len(x)):
            age = torch.arange(t, -1, -1)[:, None]  # of each value so far
            rows.append((decay**age * g[: t + 1] * v[: t + 1]).sum(0) + v[: t + 1].mean(0))
        return torch.stack(rows) @ w["out_proj.weight"]

    def attention(self, w: Mapping[str, Tensor], x: Tensor, window: int | None) -> Tensor:
        c, n = self.config, torch.arange(len(x))
        pairs = c.head_dim // 2
        angle = n[:, None] * c.rope_theta ** (-torch.arange(pairs) / pairs)

        def heads(name: str, count: int) -> Tensor:
            return (x @ w[f"{name}.weight"].T).view(len(x), count, c.head_dim).transpose(0, 1)

        def rotate(z: Tensor) -> Tensor:
            a, b = z[..., 0::2], z[..., 1::2]  # pairs lie side by side
            turned = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
            return torch.stack(turned, -1).flatten(-2)

        q = rotate(heads("q_proj", c.num_attention_heads))
        k, v = rotate(heads("k_proj", c.num_key_value_heads)), heads("v_proj", c.num_key_value_heads)
        ahead = n - n[:, None]
        hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
        y = (q @ k.transpose(1, 2) * c.query_scale).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return y.transpose(0, 1).flatten(1) @ w["o_proj.weight"].T
