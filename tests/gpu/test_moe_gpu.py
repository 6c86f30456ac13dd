"""The mixture of experts on a GPU: precision, weights past 2**31 elements, no synchronisation, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.expert_tile import choose_block_rows
from mrv2.kernels.registry import triton
from mrv2.layers.moe import Experts, Router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Relative error by norm: three roundings in a row, half a unit each at most, and errors average out."""


class Layer(torch.nn.Module):
    """Router and experts with random weights, on the GPU."""

    def __init__(
        self,
        hidden: int,
        size: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        fill: bool = True,
    ) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with CUDA:
                self.gate = Router(hidden, num_experts=num_experts, top_k=top_k, renormalize=True)
                self.experts = Experts(hidden, size, num_experts=num_experts, top_k=top_k, act="silu")
        finally:
            torch.set_default_dtype(before)
        if fill:
            generator = torch.Generator(CUDA).manual_seed(0)
            for parameter in self.parameters():
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)

    def forward(self, x: Tensor, num_real: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x, SimpleNamespace(num_real=num_real)))


def exact(layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """In float64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in experts.unique().tolist():
        if expert >= 0:
            tokens, k = (experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens].double(), layer.w13[expert].double()).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, layer.w2[expert].double())
            out.index_add_(0, tokens, part * weights[tokens, k, None].double())
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def tokens(n: int, hidden: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(n, hidden, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed)).to(dtype)


def count(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", [(512, 384, 16, 4), (200, 72, 60, 8), (1024, 256, 256, 16)], ids=str)
def test_precision_against_float64(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer, seen = Layer(*shape, dtype=dtype), set()
    for n in (1, 20, 64, 200, 1500):
        seen.add(choose_block_rows(n, shape[3], shape[2], dtype))
        x = tokens(n, shape[0], dtype)
        weights, experts = layer.gate(x, SimpleNamespace(num_real=count(n)))
        got, want = layer.experts(x, weights, experts), exact(layer.experts, x, weights, experts)
        assert relative_error(got, want) < BOUND[dtype], n
        scale = float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=20 * BOUND[dtype] * scale)  # no element is off
    assert len(seen) >= 2


@pytest.mark.parametrize("n", [1, 33, 3000])
def test_all_tokens_to_one_expert_and_none(n: int) -> None:
    layer = Layer(256, 128, 32, 2).experts
    x, weights = tokens(n, 256), torch.rand(n, 2, device=CUDA).bfloat16()
    for chosen in ((7, -1), (0, 31), (-1, -1)):
        experts = torch.tensor([chosen] * n, dtype=torch.int32, device=CUDA)
        got, want = layer(x, weights, experts), exact(layer, x, weights, experts)
        if chosen == (-1, -1):
            assert not got.any()
        else:
            assert relative_error(got, want) < BOUND[torch.bfloat16]


def test_weights_past_two_to_the_31_elements() -> None:
    layer = Layer(4096, 2048, 264, 2, fill=False).experts
    assert layer.w13[:-2].numel() > 2**31
    assert layer.w2[:-2].numel() > 2**31
    for parameter in (layer.w13, layer.w2):
        parameter.fill_(float("nan"))
        parameter[-2:].normal_(0, parameter.shape[-1] ** -0.5)
    for n in (1, 40, 700):
        x, weights = tokens(n, 4096), torch.rand(n, 2, device=CUDA).bfloat16()
        experts = torch.tensor([[263, 262]] * n, dtype=torch.int32, device=CUDA)
        assert relative_error(layer(x, weights, experts), exact(layer, x, weights, experts)) < BOUND[torch.bfloat16]


def test_padding_is_left_alone() -> None:
    layer, n = Layer(256, 128, 32, 4), 50
    x = tokens(80, 256)
    want = layer(x[:n].contiguous(), count(n))
    x[n:] = float("nan")
    got = layer(x, count(n))
    assert not got[n:].any()
    assert relative_error(got[:n], want.double()) < BOUND[torch.bfloat16]


def test_nothing_waits_for_the_device() -> None:
    layer, x, num_real = Layer(256, 128, 32, 4), tokens(70, 256), count(64)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = layer(x, num_real)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert got[:64].isfinite().all()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled, or loaded from Triton's cache, inside the block."""
    names: list[str] = []

    def hook(*, repr: str, **_: object) -> bool:
        names.append(repr)
        return False

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, hook
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def test_numbers_of_tokens_share_compilations() -> None:
    layer = Layer(192, 112, 24, 3)
    with compilations() as names:
        for n in (2, 100, 400, 2000):  # one for each height of a block, and two ways to count
            layer(tokens(n, 192), count(n))
    # Routing and the sum, 1 each; the products, 2 for each of four heights; grouping, as many and one more way.
    assert len(names) <= 2 + 8 + 5, names
    with compilations() as names:
        for n in (1, 3, 16, 17, 64, 101, 128, 399, 1999, 2048):
            layer(tokens(n, 192), torch.full((9,), n, dtype=torch.int32, device=CUDA)[n % 9 :][:1])
    assert names == []


def test_a_replayed_graph_follows_the_routing() -> None:
    layer, n = Layer(256, 128, 32, 4), 64
    x, num_real = tokens(n, 256), count(n)
    layer(x, num_real)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, num_real)
    for seed, real in ((1, 64), (2, 1), (3, 40), (4, 0)):
        other = tokens(n, 256, seed=seed)
        if seed == 3:
            other[:] = other[0]  # all to the same experts
        x.copy_(other)
        num_real.fill_(real)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer(x, num_real))
        assert not replayed[real:].any()
        assert real == 0 or replayed[:real].any()
