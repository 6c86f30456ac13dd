"""Small layers: vLLM's, with the calls that the contract gives them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from mrv2.errors import RopeError
from mrv2.layers.base import Stream
from mrv2.layers.rotary import RotaryTable


def prenorm(norm: nn.Module, h: Stream) -> tuple[Tensor, Tensor]:
    """Add the pending output and normalise, fused and in place where vLLM does so: (normed, new residual)."""
    if h.residual is None:
        return norm(h.x), h.x
    added: tuple[Tensor, Tensor] = norm(h.x, h.residual)
    return added


class Packed(MergedColumnParallelLinear):
    """See `LayerSet.packed`."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """This rank's share of each part, [num_tokens, size]."""
        ranks = get_tensor_model_parallel_world_size()
        out, _ = self(x)
        return torch.split(cast(Tensor, out), [size // ranks for size in self.output_sizes], -1)


class OwnAttention(Attention):
    """See `LayerSet.attention`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Tensor:  # type: ignore[override]
        """[num_tokens, heads * head_dim]; vLLM finds cache and metadata by this layer's name, not in `ctx`."""
        out: Tensor = super().forward(q.reshape(len(q), -1), k.reshape(len(k), -1), v.reshape(len(v), -1))
        return out


class TableRotary(RotaryEmbedding):
    """vLLM's rotary embedding with the table of the native host, so that every type gives the same angles.

    Of the plain type vLLM makes the table itself, as long as its own classes have it: it does so on the GPU, whose
    powers differ from the host's in the last bit, and one entry in some thousands is then another bfloat16 number.

    Raises:
        RopeError: frequencies depend on a request's length, and requests may get that long: a table can't say that.
    """

    def __init__(
        self, table: RotaryTable, *, max_model_len: int, max_position: int, dtype: torch.dtype, where: str
    ) -> None:
        limit = table.spec.fixed_up_to
        if limit is not None and max_model_len > limit:
            raise RopeError(
                f"rope_type {table.spec.rope_type!r} turns by a request's length beyond {limit} tokens, which vLLM's "
                f"tables can't do, and max_model_len is {max_model_len}",
                where=where,
                fix=f"give --max-model-len {limit}, or run it in the native host",
            )
        self._table = table
        super().__init__(
            head_size=table.spec.head_dim,
            rotary_dim=table.rotary_dim,
            max_position_embeddings=max_model_len if limit is not None else max(max_model_len, max_position),
            base=dict(table.spec.params).get("rope_theta", 0) if table.spec.rope_type == "default" else 0,
            is_neox_style=True,
            dtype=dtype,
        )

    def _compute_cos_sin_cache(self) -> Tensor:
        """[max_position_embeddings, rotary_dim] float32: cosines, then sines."""
        if self.base:
            return super()._compute_cos_sin_cache()
        device = torch.get_default_device()
        with torch.device("cpu"):
            positions = torch.arange(self.max_position_embeddings)
            angles = self._table.angles(positions, torch.float32, torch.zeros_like(positions))
        half = self.rotary_dim // 2
        return torch.cat((angles.cos[:, 0, :half], angles.sin[:, 0, half:]), -1).to(device)


class Rotary(nn.Module):
    """See `LayerSet.rotary`. The embedding is shared by all layers of equal parameters, and no sub-module."""

    def __init__(self, embedding: TableRotary) -> None:
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
        """Rotated (q, k), each [num_tokens, heads, head_dim]. vLLM rotates in place, hence the copies; a CPU takes
        the last axis for all heads, hence the flat shape.
        """
        flat = (x.flatten(1).clone() for x in (q, k))
        rotated_q, rotated_k = self._embedding[0](positions, *flat)
        return rotated_q.view(q.shape), rotated_k.view(k.shape)


class ReluAndMul(nn.Module):
    """`relu(gate) * up`, which vLLM has no layer for."""

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, 2 * size] to [num_tokens, size]."""
        gate, up = x.chunk(2, -1)
        return F.relu(gate) * up


def gated_act(name: str) -> nn.Module:
    """The layer for an activation that `check_activation` has let pass."""
    if name in ("silu", "swish"):
        return SiluAndMul()
    if name == "relu":
        return ReluAndMul()
    return GeluAndMul(approximate="none" if name == "gelu" else "tanh")
