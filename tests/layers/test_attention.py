"""Paged attention against a naive float64 loop, over random ragged batches in a hostile cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.attn.backend import AttentionArgs, AttentionBackend, select_backend
from mrv2.attn.cpu import CpuAttention
from mrv2.attn.reference import ReferenceAttention
from mrv2.state.view import CacheMeta

BACKENDS = {"cpu": CpuAttention, "reference": ReferenceAttention}
NAN = float("nan")


@dataclass(frozen=True)
class Batch:
    args: AttentionArgs
    meta: CacheMeta
    cache: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    history: list[tuple[torch.Tensor, torch.Tensor]]  # all keys and values of each request


def make_batch(
    *,
    lens: list[tuple[int, int]],  # (computed, query length), single tokens first
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    window: int | None = None,
    soft_cap: float | None = None,
    block_size: int = 4,
    padding: tuple[int, int] = (0, 0),  # requests, tokens
    page: tuple[int, int] = (0, 0),  # elements of padding after keys, and after the block
    seed: int = 0,
) -> Batch:
    """Slots that no request can see hold NaN: unowned ones, tails of blocks, what lies before the window."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(c + n) // block_size) for c, n in lens]
    max_blocks = max(counts) + 1
    order = (torch.randperm(sum(counts), generator=g) + 1).tolist()
    num_blocks, width = len(order) + 2, block_size * num_kv_heads * head_dim
    kv_stride = width + page[0]
    memory = torch.full((num_blocks, 2 * kv_stride + page[1]), NAN)
    cache = memory.as_strided(
        (num_blocks, 2, block_size, num_kv_heads, head_dim),
        (memory.stride(0), kv_stride, num_kv_heads * head_dim, head_dim, 1),
    )
    # A table's unused columns point at another request's block, or nowhere near one.
    table = torch.full((len(lens) + padding[0], max_blocks), num_blocks - 1, dtype=torch.int32)
    table[len(lens) :] = 0
    history, slots = [], []
    for i, (computed, n) in enumerate(lens):
        blocks, order = order[: counts[i]], order[counts[i] :]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        k, v = torch.randn(2, computed + n, num_kv_heads, head_dim, generator=g)
        history.append((k, v))
        first = 0 if window is None else max(0, computed - window + 1)
        for p in range(first, computed):
            cache[blocks[p // block_size], :, p % block_size] = torch.stack((k[p], v[p]))
        if window is not None:  # such blocks are given back
            table[i, : first // block_size] = 0
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(computed, computed + n)]
    num_tokens = len(slots) + padding[1]
    pad = torch.full((padding[1], num_kv_heads, head_dim), NAN)
    queries = [n for _, n in lens]
    meta = CacheMeta(
        num_reqs=len(table),
        num_tokens=num_tokens,
        max_query_len=max(queries) + 1,
        max_seq_len=max(c + n for c, n in lens) + 3,
        num_decodes=sum(n == 1 for n in queries),
        query_start_loc=torch.tensor([0, *queries] + [0] * padding[0]).cumsum(0).int(),
        seq_lens=torch.tensor([c + n for c, n in lens] + [0] * padding[0], dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * padding[1]),
        block_table=table,
        block_size=block_size,
    )
    new = [torch.cat([*(h[which][c:] for h, (c, _) in zip(history, lens, strict=True)), pad]) for which in (0, 1)]
    return Batch(
        args=AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            scale=head_dim**-0.5,
            soft_cap=soft_cap,
        ),
        meta=meta,
        cache=cache,
        q=torch.randn(num_tokens, num_heads, head_dim, generator=g),
        k=new[0],
        v=new[1],
        history=history,
    )


def naive(batch: Batch) -> torch.Tensor:
    """Token by token, key by key, in float64."""
    args, group = batch.args, batch.args.num_heads // batch.args.num_kv_heads
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    starts = batch.meta.query_start_loc.tolist()
    for i, (k, v) in enumerate(batch.history):
        for token in range(starts[i], starts[i + 1]):
            position = len(k) - (starts[i + 1] - token)
            first = 0 if args.window is None else max(0, position - args.window + 1)
            for head in range(args.num_heads):
                keys, values = (x[first : position + 1, head // group].double() for x in (k, v))
                scores = keys @ batch.q[token, head].double() * args.scale
                if args.soft_cap is not None:
                    scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
                weights = (scores - scores.max()).exp()
                out[token, head] = weights / weights.sum() @ values
    return out


def run(backend: AttentionBackend, batch: Batch) -> torch.Tensor:
    return backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo={})


def check(backend: AttentionBackend, batch: Batch) -> None:
    torch.testing.assert_close(run(backend, batch).double(), naive(batch), rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    decodes = draw(st.lists(st.integers(0, 30), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(2, 15)), min_size=not decodes, max_size=3))
    return make_batch(
        lens=[(c, 1) for c in decodes] + prefills,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 3])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([4, 10])),
        window=draw(st.sampled_from([None, 1, 3, 8, 100])),
        soft_cap=draw(st.sampled_from([None, None, 1.5])),
        block_size=draw(st.sampled_from([1, 4, 7])),
        padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 3))),
        page=draw(st.sampled_from([(0, 0), (0, 64), (12, 31)])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.parametrize("name", BACKENDS)
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_attention_equals_a_naive_loop(name: str, batch: Batch) -> None:
    check(BACKENDS[name](), batch)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_step_s_slots_are_written(name: str) -> None:
    batch = make_batch(lens=[(6, 1), (0, 5)], padding=(1, 3))
    batch.k[-3:] = batch.v[-3:] = 7.0
    before = batch.cache.clone()
    run(BACKENDS[name](), batch)
    same = torch.eq(batch.cache, before) | (batch.cache.isnan() & before.isnan())
    changed = (~same).flatten(3).any(-1).nonzero()  # [n, 3] block, keys or values, offset
    slots = batch.meta.slot_mapping[batch.meta.slot_mapping >= 0]
    expected = {(int(s) // 4, kv, int(s) % 4) for s in [0, *slots] for kv in (0, 1)}  # 0: the padding's
    assert {tuple(row) for row in changed.tolist()} == expected


@pytest.mark.parametrize("name", BACKENDS)
def test_inactive_rows_leave_others_alone(name: str) -> None:
    """A row the device has stopped reads and writes scratch, whatever is there."""
    batch = make_batch(lens=[(6, 1), (9, 1), (3, 1), (2, 4)])
    expected = naive(batch)
    batch.meta.seq_lens[1], batch.meta.slot_mapping[1], batch.meta.block_table[1] = 1, -1, 0
    batch.meta.seq_lens[3], batch.meta.slot_mapping[3:7], batch.meta.block_table[3] = 4, -1, 0
    batch.k[3:7] = NAN
    got = run(BACKENDS[name](), batch)
    torch.testing.assert_close(got[[0, 2]].double(), expected[[0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_empty_requests_among_the_decodes_give_zeros(name: str, soft_cap: float | None) -> None:
    """A graph of fixed size counts its padding rows as decodes."""
    batch = make_batch(lens=[(6, 1), (9, 1)], padding=(2, 2), soft_cap=soft_cap)
    meta = batch.meta
    padded = CacheMeta(
        **{name: getattr(meta, name) for name in meta.__dataclass_fields__ if name != "num_decodes"}, num_decodes=4
    )
    got = BACKENDS[name]().attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=padded, args=batch.args, memo={})
    torch.testing.assert_close(got.double(), naive(batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


def test_decodes_of_very_different_length_are_split_and_equal() -> None:
    batch = make_batch(lens=[(c, 1) for c in (3, 900, 7, 850, 1, 300, 12)], num_heads=12, num_kv_heads=4, head_dim=32)
    memo: dict = {}
    backend = CpuAttention()
    got = backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo=memo)
    (plan,) = memo.values()
    padded = sum(len(b.rows) for b in plan.decodes) / 2
    assert len(plan.decodes) > 1
    assert padded < 1.5 * batch.meta.seq_lens.sum()
    torch.testing.assert_close(got.double(), naive(batch), rtol=1e-5, atol=1e-5)


def test_layers_of_one_step_share_a_plan() -> None:
    first, second = make_batch(lens=[(6, 1), (2, 5)], seed=1), make_batch(lens=[(6, 1), (2, 5)], seed=1)
    backend, memo = CpuAttention(), {}
    for batch in (first, second):
        got = backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=first.meta, args=batch.args, memo=memo)
        torch.testing.assert_close(got.double(), naive(batch), rtol=1e-5, atol=1e-5)
    assert len(memo) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_low_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    batch = make_batch(lens=[(6, 1), (9, 1), (2, 4)], soft_cap=soft_cap)
    got = CpuAttention().attend(
        *(x.to(dtype) for x in (batch.q, batch.k, batch.v)),
        cache=batch.cache.to(dtype),
        meta=batch.meta,
        args=batch.args,
        memo={},
    )
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), naive(batch), rtol=3e-2, atol=3e-2)


def test_backends_by_device() -> None:
    assert isinstance(select_backend(torch.device("cpu")), CpuAttention)
    assert isinstance(select_backend(torch.device("cuda")), ReferenceAttention)


def test_the_reference_reads_nothing_on_the_host() -> None:
    """Meta tensors have no values: any read of one raises."""
    batch = make_batch(lens=[(6, 1), (2, 4)], window=3, padding=(1, 2))
    fields = {name: getattr(batch.meta, name) for name in batch.meta.__dataclass_fields__}
    meta = CacheMeta(**{n: f.to("meta") if isinstance(f, torch.Tensor) else f for n, f in fields.items()})
    q, k, v, cache = (x.to("meta") for x in (batch.q, batch.k, batch.v, batch.cache))
    out = ReferenceAttention().attend(q, k, v, cache=cache, meta=meta, args=batch.args, memo={})
    assert out.shape == batch.q.shape
