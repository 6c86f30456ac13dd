"""Paged attention against a naive float64 loop, over random ragged batches in a hostile cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.attn.backend import AttentionBackend, select_backend
from mrv2.attn.cpu import CpuAttention
from mrv2.attn.reference import ReferenceAttention
from mrv2.attn.triton import TritonAttention
from mrv2.state.view import CacheMeta
from mrv2.testing.attention import PagedBatch, attend_naive, make_paged_batch

BACKENDS = {"cpu": CpuAttention, "reference": ReferenceAttention}
NAN = float("nan")


def run(backend: AttentionBackend, batch: PagedBatch) -> torch.Tensor:
    return backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo={})


def check(backend: AttentionBackend, batch: PagedBatch) -> None:
    torch.testing.assert_close(run(backend, batch).double(), attend_naive(batch), rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    decodes = draw(st.lists(st.integers(0, 30), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(2, 15)), min_size=not decodes, max_size=3))
    return make_paged_batch(
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
@settings(max_examples=60)
@given(batch=batches())
def test_attention_equals_a_naive_loop(name: str, batch: PagedBatch) -> None:
    check(BACKENDS[name](), batch)


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_step_s_slots_are_written(name: str) -> None:
    batch = make_paged_batch(lens=[(6, 1), (0, 5)], padding=(1, 3))
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
    batch = make_paged_batch(lens=[(6, 1), (9, 1), (3, 1), (2, 4)])
    expected = attend_naive(batch)
    batch.meta.seq_lens[1], batch.meta.slot_mapping[1], batch.meta.block_table[1] = 1, -1, 0
    batch.meta.seq_lens[3], batch.meta.slot_mapping[3:7], batch.meta.block_table[3] = 4, -1, 0
    batch.k[3:7] = NAN
    got = run(BACKENDS[name](), batch)
    torch.testing.assert_close(got[[0, 2]].double(), expected[[0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_empty_requests_among_the_decodes_give_zeros(name: str, soft_cap: float | None) -> None:
    """A graph of fixed size counts its padding rows as decodes."""
    batch = make_paged_batch(lens=[(6, 1), (9, 1)], padding=(2, 2), soft_cap=soft_cap)
    meta = batch.meta
    padded = CacheMeta(
        **{name: getattr(meta, name) for name in meta.__dataclass_fields__ if name != "num_decodes"}, num_decodes=4
    )
    got = BACKENDS[name]().attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=padded, args=batch.args, memo={})
    torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


def test_decodes_of_very_different_length_are_split_and_equal() -> None:
    batch = make_paged_batch(
        lens=[(c, 1) for c in (3, 900, 7, 850, 1, 300, 12)], num_heads=12, num_kv_heads=4, head_dim=32
    )
    memo: dict = {}
    backend = CpuAttention()
    got = backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo=memo)
    (plan,) = memo.values()
    padded = sum(len(b.rows) for b in plan.decodes) / 2
    assert len(plan.decodes) > 1
    assert padded < 1.5 * batch.meta.seq_lens.sum()
    torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)


def test_layers_of_one_step_share_a_plan() -> None:
    first, second = make_paged_batch(lens=[(6, 1), (2, 5)], seed=1), make_paged_batch(lens=[(6, 1), (2, 5)], seed=1)
    backend, memo = CpuAttention(), {}
    for batch in (first, second):
        got = backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=first.meta, args=batch.args, memo=memo)
        torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)
    assert len(memo) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_low_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    batch = make_paged_batch(lens=[(6, 1), (9, 1), (2, 4)], soft_cap=soft_cap)
    got = CpuAttention().attend(
        *(x.to(dtype) for x in (batch.q, batch.k, batch.v)),
        cache=batch.cache.to(dtype),
        meta=batch.meta,
        args=batch.args,
        memo={},
    )
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), attend_naive(batch), rtol=3e-2, atol=3e-2)


def test_backends_by_device() -> None:
    assert isinstance(select_backend(torch.device("cpu")), CpuAttention)
    assert isinstance(select_backend(torch.device("cuda")), TritonAttention)
    assert isinstance(select_backend(torch.device("meta")), ReferenceAttention)


def test_the_reference_reads_nothing_on_the_host() -> None:
    """Meta tensors have no values: any read of one raises."""
    batch = make_paged_batch(lens=[(6, 1), (2, 4)], window=3, padding=(1, 2))
    fields = {name: getattr(batch.meta, name) for name in batch.meta.__dataclass_fields__}
    meta = CacheMeta(**{n: f.to("meta") if isinstance(f, torch.Tensor) else f for n, f in fields.items()})
    q, k, v, cache = (x.to("meta") for x in (batch.q, batch.k, batch.v, batch.cache))
    out = ReferenceAttention().attend(q, k, v, cache=cache, meta=meta, args=batch.args, memo={})
    assert out.shape == batch.q.shape
