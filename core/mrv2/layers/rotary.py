"""Rotary position embedding of every type transformers knows, computed once per step and configuration.

Frequencies come from transformers' own functions. Angles are computed from positions when needed, not looked
up: a step has few tokens, and no position can run off a table.

Two types depend on the request's length. `dynamic` stretches the base, `longrope` picks its long factors, once
a request exceeds `RopeSpec.fixed_up_to`. The length that counts for the token at position p is
`max(prompt length, p + 1)`: what transformers' `generate` uses for that request alone. It doesn't depend on
batch mates, chunks, or preemption. It does mean that keys of equal tokens differ between requests, so a host
must not share prefixes of requests that may grow beyond that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mrv2.errors import RopeError
from mrv2.kernels.compute_angles import compute_angles
from mrv2.layers.rope_config import RopeSpec

if TYPE_CHECKING:
    from mrv2.layers.context import NativeContext


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of one step's tokens, in the dtype of queries and keys."""

    cos: Tensor  # [num_tokens, 1, rotary_dim]
    sin: Tensor  # [num_tokens, 1, rotary_dim]; the first half negated


class RotaryTable:
    """Frequencies of one configuration, shared by all layers that use it.

    Not a module, and computed on the host whatever the default device: a model built on the meta device and
    given memory later must not lose them. Devices get their copy at first use.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec
        self._inv_freq, self.attention_scaling = _frequencies(spec, long=False)  # [rotary_dim / 2] float32
        self._long_inv_freq = _frequencies(spec, long=True)[0] if spec.rope_type == "longrope" else None
        self._on_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    @property
    def rotary_dim(self) -> int:
        """How many of a head's first elements are rotated."""
        return 2 * len(self._inv_freq)

    def angles(self, positions: Tensor, dtype: torch.dtype, request_lens: Tensor | None) -> Angles:
        """Angles of the tokens at `positions` [num_tokens].

        Args:
            positions: int64, or any integers.
            dtype: of the result; computed in float32.
            request_lens: [num_tokens] the length that counts for each token; read by dynamic types only.
        """
        inv_freq = self._inv_freq_for(positions.device, request_lens)
        if positions.is_cuda:
            cos, sin = torch.empty(2, len(positions), self.rotary_dim, dtype=dtype, device=positions.device)
            scaling = self.attention_scaling
            compute_angles(positions=positions, inv_freq=inv_freq.contiguous(), scaling=scaling, cos=cos, sin=sin)
            return Angles(cos[:, None], sin[:, None])
        freqs = positions[:, None].float() * inv_freq
        cos = freqs.cos() * self.attention_scaling
        sin = freqs.sin() * self.attention_scaling
        return Angles(
            torch.cat((cos, cos), -1).to(dtype)[:, None],
            torch.cat((-sin, sin), -1).to(dtype)[:, None],
        )

    def _inv_freq_for(self, device: torch.device, request_lens: Tensor | None) -> Tensor:
        """[rotary_dim / 2], or [num_tokens, rotary_dim / 2] where tokens differ."""
        if device not in self._on_device:
            with torch.inference_mode(False):
                long = self._long_inv_freq
                self._on_device[device] = (_move(self._inv_freq, device), None if long is None else _move(long, device))
        inv_freq, long_inv_freq = self._on_device[device]
        limit = self.spec.fixed_up_to
        if limit is None:
            return inv_freq
        assert request_lens is not None
        if long_inv_freq is not None:
            return torch.where((request_lens > limit)[:, None], long_inv_freq, inv_freq)
        return self._dynamic(request_lens, limit)

    def _dynamic(self, request_lens: Tensor, limit: int) -> Tensor:
        """NTK-aware scaling as in transformers' `_compute_dynamic_ntk_parameters`, which can't be called here:
        it makes a tensor from a host number, which a captured graph must not.
        """
        params: dict[str, Any] = dict(self.spec.params)
        factor, dim = params["factor"], self.rotary_dim
        lens = request_lens.clamp(min=limit).float()
        base = params["rope_theta"] * (factor * lens / limit - (factor - 1)) ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=lens.device) / dim
        inv_freq: Tensor = 1.0 / base[:, None] ** exponents
        return inv_freq


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, for which the host doesn't wait: the first use is within a step."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _frequencies(spec: RopeSpec, *, long: bool) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cosines and sines, by transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

    params: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in spec.params}
    rope_type = spec.rope_type
    if rope_type == "default":  # has no function of its own there; scaling by one changes nothing
        rope_type, params["factor"] = "linear", 1.0
    params["rope_type"] = rope_type

    config = RotaryEmbeddingConfigMixin()
    config.rope_parameters = params
    config.head_dim, config.hidden_size, config.num_attention_heads = spec.head_dim, spec.head_dim, 1
    config.max_position_embeddings = spec.max_position
    seq_len = params["original_max_position_embeddings"] + 1 if long else None
    expected = (
        spec.head_dim if rope_type == "proportional" else int(spec.head_dim * params.get("partial_rotary_factor", 1.0))
    )
    _check_lists(spec, params, expected // 2)
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as e:  # a division by zero, a logarithm of one
        raise _unusable(spec, f"give no frequencies ({type(e).__name__}: {e})") from e
    if not (bool(inv_freq.isfinite().all()) and math.isfinite(scaling)):
        raise _unusable(spec, "give frequencies that aren't finite")
    if 2 * len(inv_freq) != expected or expected == 0:
        raise RopeError(
            f"rotates {expected} of {spec.head_dim} elements of a head in {len(inv_freq)} pairs",
            where=f"rope_type {spec.rope_type!r}",
            fix="head_dim * partial_rotary_factor has to be even, and at least 2",
        )
    return inv_freq, float(scaling)


def _check_lists(spec: RopeSpec, params: Mapping[str, Any], num_pairs: int) -> None:
    lens = {key: len(value) for key, value in params.items() if isinstance(value, list)}
    if any(n != num_pairs for n in lens.values()):
        raise RopeError(
            f"{' and '.join(f'{key} has {n} numbers' for key, n in lens.items())}; a head rotates {num_pairs} pairs",
            where=f"rope_type {spec.rope_type!r}",
            fix="each list needs one number per rotated pair: head_dim * partial_rotary_factor / 2",
        )


def _unusable(spec: RopeSpec, why: str) -> RopeError:
    listed = ", ".join(f"{key}={value}" for key, value in spec.params if not isinstance(value, tuple))
    return RopeError(
        f"{listed} {why}", where=f"rope_type {spec.rope_type!r}, head_dim {spec.head_dim}", fix="correct config.json"
    )


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs (j, j + rotary_dim / 2) of the first rotary_dim elements; x [num_tokens, heads, head_dim]."""
    dim = angles.cos.shape[-1]
    if dim == x.shape[-1]:
        return (x * angles.cos).addcmul_(x.roll(dim // 2, -1), angles.sin)
    return torch.cat((rotate(x[..., :dim], angles), x[..., dim:]), -1)


class Rotary(nn.Module):
    """Rotary embedding of queries and keys. Has no parameters; the table is shared."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, positions: Tensor, q: Tensor, k: Tensor, ctx: NativeContext) -> tuple[Tensor, Tensor]:
        """Rotated (q, k), each [num_tokens, heads, head_dim]."""
        angles = ctx.angles(self.table, positions, q.dtype)
        return rotate(q, angles), rotate(k, angles)
