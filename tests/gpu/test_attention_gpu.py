"""Paged attention on a GPU: precision, addresses past 2**31, no synchronisation, no recompilation, graphs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mrv2.attn.triton import TritonAttention
from mrv2.kernels.registry import triton
from mrv2.testing.attention import PagedBatch, attend_naive, make_paged_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
RAGGED = [(1000, 1), (17, 1), (0, 1), (3000, 1), (0, 200), (511, 513), (100, 2)]
BF16_BOUND = 4e-3
"""Relative error by norm: weights and results are each rounded to 8 bits, 2**-9 at most, and errors average out."""


def run(batch: PagedBatch, backend: TritonAttention) -> torch.Tensor:
    return backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo={})


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(16, 8, 128), (9, 3, 64), (32, 8, 80), (8, 1, 256), (4, 4, 32), (14, 2, 96)])
@pytest.mark.parametrize(("window", "soft_cap", "block_size"), [(None, None, 16), (300, 30.0, 64), (100, None, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_against_float64(
    shape: tuple[int, int, int], window: int | None, soft_cap: float | None, block_size: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    batch = make_paged_batch(
        lens=RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        soft_cap=soft_cap,
        block_size=block_size,
        padding=(2, 70),
    )
    batch = batch.to(dtype).to(CUDA)
    got, want = run(batch, TritonAttention()), attend_naive(batch)
    for part in (slice(0, 4), slice(4, None)):  # decodes, prefills
        assert relative_error(got[part], want[part]) < BF16_BOUND
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)  # no single element is off
    assert not got[-70:].any()


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, 100), (256, None)])
def test_float32_is_not_rounded_to_fewer_bits(head_dim: int, window: int | None) -> None:
    batch = make_paged_batch(lens=RAGGED, head_dim=head_dim, window=window, block_size=16).to(CUDA)
    torch.testing.assert_close(run(batch, TritonAttention()).double(), attend_naive(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.alone
def test_blocks_past_two_to_the_31_elements() -> None:
    small = make_paged_batch(
        lens=[(1000, 1), (37, 1), (40, 200)], num_heads=16, num_kv_heads=8, head_dim=128, block_size=16
    )
    small = small.to(torch.bfloat16).to(CUDA)
    per_block = small.cache[0].numel()
    shift = 2**31 // per_block + 100  # each block's first element is past the bound
    cache = torch.full(
        (shift + len(small.cache), *small.cache.shape[1:]), float("nan"), dtype=torch.bfloat16, device=CUDA
    )
    assert cache.numel() > 2**31
    cache[shift:] = small.cache
    meta = dataclasses.replace(
        small.meta,
        block_table=small.meta.block_table + shift,
        slot_mapping=small.meta.slot_mapping + shift * small.meta.block_size,
    )
    want = run(small, TritonAttention())
    assert relative_error(want, attend_naive(small)) < BF16_BOUND
    got = run(dataclasses.replace(small, cache=cache, meta=meta), TritonAttention())
    assert torch.equal(got, want)
    assert cache[:shift].isnan().all(), "something was written where nobody's block is"


def bf16_batch(lens: list[tuple[int, int]], **kwargs: int) -> PagedBatch:
    shape = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | kwargs
    return make_paged_batch(lens=lens, **shape).to(torch.bfloat16).to(CUDA)


def test_nothing_waits_for_the_device() -> None:
    batch = bf16_batch(RAGGED, padding=(1, 5))
    backend = TritonAttention()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(batch, backend)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert relative_error(got, attend_naive(batch)) < BF16_BOUND


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


def test_batch_sizes_and_lengths_share_one_compilation() -> None:
    backend = TritonAttention()
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 48}
    with compilations() as names:
        run(bf16_batch([(20, 1), (3, 4)], **shape), backend)
        run(bf16_batch([(20, 1), (90, 40)], **shape), backend)
    # Writing, decodes, prompts; and decodes once more, since in a small step they are launched dependently.
    assert len(names) == 4, names
    with compilations() as names:
        for decodes in (1, 2, 3, 16, 17, 64):
            batch = bf16_batch([(decodes * 16, 1)] * decodes + [(decodes, 1 + decodes)] * (decodes % 3 + 1), **shape)
            assert relative_error(run(batch, backend), attend_naive(batch)) < BF16_BOUND
    assert names == []


def test_splits_are_combined_the_same_way_every_time() -> None:
    """Whichever split arrives last. A missing barrier would show up as a difference now and then."""
    batch, backend = bf16_batch([(8000, 1), (5000, 1), (100, 1), (3000, 1)]), TritonAttention()
    first = run(batch, backend)
    assert relative_error(first, attend_naive(batch)) < BF16_BOUND
    for _ in range(200):
        assert torch.equal(run(batch, backend), first)


def refill(batch: PagedBatch, other: PagedBatch) -> None:
    """Copy what a step's inputs are into the buffers a graph was captured with."""
    batch.cache.copy_(other.cache)
    for name in ("q", "k", "v"):
        getattr(batch, name).copy_(getattr(other, name))
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
        getattr(batch.meta, name).copy_(getattr(other.meta, name))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_replayed_graph_gives_what_eager_gives(prefill: bool) -> None:
    def steps(seed: int) -> PagedBatch:
        g = torch.Generator().manual_seed(seed)
        lens = [(int(torch.randint(0, 2000, (), generator=g)), 1) for _ in range(6)] + [(2000, 1)]  # the same tables
        lens += [(300 * seed, 100 - 10 * seed)] * prefill
        return bf16_batch(lens, padding=(1, 1 + 10 * seed * prefill), seed=seed)

    batches = [steps(seed) for seed in range(4)]
    num_blocks = max(len(b.cache) for b in batches)
    widest = max(b.meta.block_table.shape[1] for b in batches)
    batches = [pad(b, num_blocks, widest) for b in batches]
    backend = TritonAttention()
    static = copy.deepcopy(batches[0])
    run(static, backend)  # allocates and compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, backend)
    for _ in range(2):
        for batch in batches:
            refill(static, batch)
            graph.replay()
            replayed, cache = out.clone(), static.cache.clone()
            refill(static, batch)
            assert torch.equal(replayed, run(static, backend))
            assert torch.equal(cache.view(torch.int16), static.cache.view(torch.int16))
            assert relative_error(replayed, attend_naive(batch)) < BF16_BOUND


def pad(batch: PagedBatch, num_blocks: int, width: int) -> PagedBatch:
    """The same with a cache and tables of common sizes."""
    cache = batch.cache.new_full((num_blocks, *batch.cache.shape[1:]), float("nan"))
    cache[: len(batch.cache)] = batch.cache
    table = batch.meta.block_table.new_zeros(len(batch.meta.block_table), width)
    table[:, : batch.meta.block_table.shape[1]] = batch.meta.block_table
    meta = dataclasses.replace(batch.meta, block_table=table, max_seq_len=2500, max_query_len=128)
    return dataclasses.replace(batch, cache=cache, meta=meta)
