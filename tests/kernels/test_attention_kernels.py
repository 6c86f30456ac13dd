"""Attention kernels: Triton against their twins, and the whole backend against a naive loop, in a hostile cache.

bf16 is left to the GPU: the interpreter's matrix product doesn't know it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.attn.triton import TritonAttention
from mrv2.kernels.attend_projected import attend_projected
from mrv2.kernels.attention_tile import score_factors
from mrv2.kernels.decode_attention import decode_attention
from mrv2.kernels.decode_splits import SLOTS_PER_PROCESSOR, DecodeWorkspace, choose_splits
from mrv2.kernels.prefill_attention import prefill_attention
from mrv2.kernels.write_kv_cache import write_kv_cache
from mrv2.testing import check_kernel
from mrv2.testing.attention import PagedBatch, attend_naive, make_paged_batch

OUT = ("out",)
SEEDS = [pytest.param(0, marks=pytest.mark.sanitize), 6, 12, 18]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="class")
def interpreted() -> Iterator[None]:
    """Without a GPU, kernels called with CPU tensors are interpreted instead of leaving the work to their twins."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def draw_batch(rng: np.random.Generator, *, decodes: bool, prefills: bool) -> PagedBatch:
    """Everything the kernels promise to take, at sizes that cross tiles, splits and blocks."""
    kv_heads = int(rng.integers(1, 4))
    lens = [(int(rng.choice([0, 5, 63, 64, 130, 300])), 1) for _ in range(rng.integers(1, 4))] if decodes else []
    if prefills:
        lens += [(int(rng.choice([0, 3, 64, 90])), int(rng.integers(2, 50))) for _ in range(rng.integers(1, 3))]
    return make_paged_batch(
        lens=lens,
        num_heads=kv_heads * int(rng.choice([1, 2, 3, 7])),
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([16, 32, 40, 64])),
        window=[None, 1, 7, 64, 200][rng.integers(5)],
        soft_cap=[None, 2.0][rng.integers(2)],
        block_size=int(rng.choice([1, 7, 16, 64, 128])),
        padding=(int(rng.integers(0, 3)), int(rng.integers(0, 40))),
        page=[(0, 0), (12, 31)][rng.integers(2)],
        seed=int(rng.integers(1 << 30)),
    )


def written(batch: PagedBatch) -> torch.Tensor:
    """The cache with the step's keys and values in it."""
    cache = batch.cache.clone()
    write_kv_cache.twin(k=batch.k, v=batch.v, cache=cache, slot_mapping=batch.meta.slot_mapping)
    return cache


def common_inputs(batch: PagedBatch) -> dict:
    return {
        "q": batch.q,
        "cache": written(batch),
        "block_table": batch.meta.block_table,
        "seq_lens": batch.meta.seq_lens,
        "max_seq_len": batch.meta.max_seq_len,
        "scale": batch.args.scale,
        "window": batch.args.window,
        "soft_cap": batch.args.soft_cap,
        "out": torch.empty_like(batch.q),
    }


def decode_inputs(rng: np.random.Generator) -> dict:
    batch = draw_batch(rng, decodes=True, prefills=False)
    num_decodes = len(batch.meta.seq_lens)
    if num_decodes > batch.meta.num_tokens:  # padding requests come with padding tokens, if they count as decodes
        num_decodes = batch.meta.num_decodes
    processors = int(rng.choice([1, 8, 64]))
    return common_inputs(batch) | {"num_decodes": num_decodes, "workspace": DecodeWorkspace(processors)}


def projected_inputs(rng: np.random.Generator) -> dict:
    """The step's queries, keys and values side by side, and a cache without them."""
    batch = draw_batch(rng, decodes=True, prefills=False)
    while batch.args.window == 1:
        batch = draw_batch(rng, decodes=True, prefills=False)
    n = min(len(batch.meta.seq_lens), batch.meta.num_tokens)
    qkv = torch.cat([x[:n].flatten(1) for x in (batch.q, batch.k, batch.v)], 1)
    head_dim, dtype = batch.q.shape[-1], qkv.dtype
    rotary_dim = int(rng.choice([2, head_dim // 2 * 2]))
    normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(dtype)  # noqa: E731
    norms = [normal(head_dim) if rng.integers(2) else None for _ in range(2)]
    return {
        "qkv": qkv,
        "q_weight": norms[0],
        "k_weight": norms[1],
        "q_eps": 1e-6,
        "k_eps": 1e-3,
        "cos": normal(n, rotary_dim),
        "sin": normal(n, rotary_dim),
        "slot_mapping": batch.meta.slot_mapping[:n],
        "cache": batch.cache,
        "block_table": batch.meta.block_table[:n],
        "seq_lens": batch.meta.seq_lens[:n],
        "max_seq_len": batch.meta.max_seq_len,
        "scale": batch.args.scale,
        "window": batch.args.window,
        "soft_cap": batch.args.soft_cap,
        "workspace": DecodeWorkspace(int(rng.choice([1, 8, 64]))),
        "out": torch.empty_like(batch.q[:n]),
    }


def prefill_inputs(rng: np.random.Generator) -> dict:
    batch = draw_batch(rng, decodes=bool(rng.integers(2)), prefills=True)
    return common_inputs(batch) | {
        "query_start_loc": batch.meta.query_start_loc,
        "num_decodes": batch.meta.num_decodes,
        "max_query_len": batch.meta.max_query_len,
    }


def write_inputs(rng: np.random.Generator) -> dict:
    num_tokens, block_size = int(rng.integers(1, 40)), int(rng.choice([1, 3, 16]))
    heads, width, num_blocks = int(rng.integers(1, 5)), int(rng.choice([8, 33])), 1 + -(-num_tokens // block_size)
    dtype = [torch.float32, torch.float16, torch.bfloat16][rng.integers(3)]
    qkv = torch.from_numpy(rng.standard_normal((num_tokens, 3 * heads, width))).to(dtype)
    slots = torch.from_numpy(block_size + rng.permutation((num_blocks - 1) * block_size)[:num_tokens])
    slots[rng.integers(0, num_tokens)] = -int(rng.integers(1, 1 << 40))  # one: several would race for scratch
    return {
        "k": qkv[:, heads : 2 * heads],
        "v": qkv[:, 2 * heads :],
        "cache": torch.zeros(num_blocks, 2, block_size, heads, width, dtype=dtype),
        "slot_mapping": slots,
    }


@pytest.mark.sanitize
def test_write_kv_cache_kernel_equals_twin() -> None:
    check_kernel(write_kv_cache, write_inputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_attention_kernel_equals_twin(seed: int) -> None:
    check_kernel(decode_attention, decode_inputs, outputs=OUT, seed=seed, cases=6, rtol=1e-5, atol=1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", SEEDS)
def test_attend_projected_kernel_equals_twin(seed: int) -> None:
    check_kernel(attend_projected, projected_inputs, outputs=OUT, seed=seed, cases=6, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_attention_kernel_equals_twin(seed: int) -> None:
    check_kernel(prefill_attention, prefill_inputs, outputs=OUT, seed=seed, cases=6, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lens", "kv_heads"),
    [([900, 200, 3], 2), ([4500], 1)],  # the second takes more splits than are combined at once
)
@pytest.mark.sanitize
def test_decode_splits_are_combined_and_counters_return_to_zero(lens: list[int], kv_heads: int) -> None:
    workspace = DecodeWorkspace(16)

    def inputs(rng: np.random.Generator) -> dict:
        batch = make_paged_batch(
            lens=[(n, 1) for n in lens],
            num_heads=2 * kv_heads,
            num_kv_heads=kv_heads,
            block_size=64,
            seed=int(rng.integers(99)),
        )
        return common_inputs(batch) | {"num_decodes": len(lens), "workspace": workspace}

    check_kernel(decode_attention, inputs, outputs=OUT, cases=2, rtol=1e-5, atol=1e-5)
    partials = workspace.partials(device(), 2, 8)
    assert partials.stats[:, :, 1].any(), "nothing was split"
    assert not partials.arrived.any()


@pytest.mark.parametrize("change", ["length", "table", "window"])
def test_the_comparison_notices(change: str) -> None:
    """Negative controls: a kernel that were off by one key, one block, or one token of window would be found."""

    def spoiled(**kwargs: object) -> None:
        if change == "length":
            kwargs["seq_lens"] = kwargs["seq_lens"] - 1  # type: ignore[operator]
        elif change == "table":
            kwargs["block_table"] = kwargs["block_table"].roll(1, 1)  # type: ignore[attr-defined]
        else:
            kwargs["window"] = 4
        decode_attention.triton(**kwargs)

    kernel = type("Spoiled", (), {"triton": staticmethod(spoiled), "twin": staticmethod(decode_attention.twin)})

    def inputs(_: np.random.Generator) -> dict:
        batch = make_paged_batch(lens=[(20, 1), (9, 1)], window=5)
        return common_inputs(batch) | {"num_decodes": 2, "workspace": DecodeWorkspace(1)}

    with pytest.raises(AssertionError, match="differ"):
        check_kernel(kernel, inputs, outputs=OUT, cases=1, rtol=1e-5, atol=1e-5)


def run(batch: PagedBatch, backend: TritonAttention | None = None) -> torch.Tensor:
    """The backend's own answer: under the interpreter here, where `TRITON_INTERPRET` is set; by the GPU there."""
    batch = batch.to(device())
    backend = backend or TritonAttention(DecodeWorkspace(20))
    return backend.attend(batch.q, batch.k, batch.v, cache=batch.cache, meta=batch.meta, args=batch.args, memo={}).cpu()


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    kv_heads = draw(st.sampled_from([1, 2]))
    decodes = draw(st.lists(st.integers(0, 150), max_size=3))
    prefills = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(2, 40)), min_size=not decodes, max_size=2))
    return make_paged_batch(
        lens=[(c, 1) for c in decodes] + prefills,
        num_heads=kv_heads * draw(st.sampled_from([1, 3])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 24])),
        window=draw(st.sampled_from([None, 1, 9, 100])),
        soft_cap=draw(st.sampled_from([None, 1.5])),
        block_size=draw(st.sampled_from([4, 7, 64])),
        padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 3))),
        page=draw(st.sampled_from([(0, 0), (12, 31)])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.usefixtures("interpreted")
class TestBackend:
    @settings(max_examples=15 if torch.cuda.is_available() else 25)  # each compiles anew there
    @given(batch=batches())
    def test_equals_a_naive_loop(self, batch: PagedBatch) -> None:
        torch.testing.assert_close(run(batch).double(), attend_naive(batch), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("head_dim", [32, 80, 256])
    def test_head_sizes(self, head_dim: int) -> None:
        batch = make_paged_batch(lens=[(130, 1), (20, 5)], head_dim=head_dim, block_size=16)
        torch.testing.assert_close(run(batch).double(), attend_naive(batch), rtol=1e-5, atol=1e-5)

    def test_low_precision(self) -> None:
        batch = make_paged_batch(lens=[(200, 1), (9, 1), (2, 40)], head_dim=64).to(torch.float16)
        got = run(batch)
        assert got.dtype is torch.float16
        torch.testing.assert_close(got.double(), attend_naive(batch), rtol=2e-3, atol=2e-3)

    def test_inactive_rows_leave_others_alone(self) -> None:
        batch = make_paged_batch(lens=[(6, 1), (9, 1), (3, 1), (2, 4), (5, 3)])
        expected, meta = attend_naive(batch), batch.meta
        meta.seq_lens[1], meta.slot_mapping[1], meta.block_table[1] = 1, -1, 0
        meta.seq_lens[3], meta.slot_mapping[3:7], meta.block_table[3] = 4, -1, 0
        batch.k[3:7] = float("nan")
        live = [0, 2, 7, 8, 9]
        torch.testing.assert_close(run(batch)[live].double(), expected[live], rtol=1e-5, atol=1e-5)

    def test_empty_requests_among_the_decodes_give_zeros(self) -> None:
        """A graph of fixed size counts its padding rows as decodes."""
        batch = make_paged_batch(lens=[(6, 1), (9, 1)], padding=(2, 3))
        got = run(dataclasses.replace(batch, meta=dataclasses.replace(batch.meta, num_decodes=4)))
        torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)
        assert torch.equal(got[2:], torch.zeros_like(got[2:]))

    def test_single_tokens_that_do_not_count_as_decodes(self) -> None:
        batch = make_paged_batch(lens=[(70, 1), (0, 1), (3, 4)])
        got = run(dataclasses.replace(batch, meta=dataclasses.replace(batch.meta, num_decodes=0)))
        torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)

    def test_a_bound_far_above_the_lengths_changes_nothing_much(self) -> None:
        batch = make_paged_batch(lens=[(300, 1), (9, 1)])
        loose = dataclasses.replace(batch.meta, max_seq_len=100_000)
        got = run(dataclasses.replace(batch, meta=loose))
        torch.testing.assert_close(got.double(), attend_naive(batch), rtol=1e-5, atol=1e-5)

    def test_no_tokens(self) -> None:
        batch = make_paged_batch(lens=[(3, 1)])
        none = batch.q[:0], batch.k[:0], batch.v[:0]
        out = TritonAttention().attend(*none, cache=batch.cache, meta=batch.meta, args=batch.args, memo={})
        assert out.shape == (0, 4, 8)


def test_score_factors() -> None:
    assert score_factors(0.5, None)[0] == pytest.approx(0.5 / np.log(2))
    inner, outer = score_factors(0.5, 2.0)
    assert (inner, outer) == (0.25, pytest.approx(2 / np.log(2)))


@pytest.mark.parametrize("processors", [1, 16, 132])
def test_splits_fit_the_workspace(processors: int) -> None:
    for num_pairs in (1, 2, 7, 16, 17, 63, 64, 100, 132, 133, 528, 529, 4096, 5000):
        for reach in (1, 100, 5000, 1 << 20):
            num_splits, min_split = choose_splits(num_pairs, reach, processors)
            assert num_splits == 1 or num_splits * num_pairs <= SLOTS_PER_PROCESSOR * processors
            assert (num_splits - 1) * min_split < reach
    assert choose_splits(8, 32768, 132) == (99, 32)
    assert choose_splits(256, 1024, 132) == (3, 64)
    assert choose_splits(256, 32768, 132) == (16, 256)
    assert choose_splits(2048, 1024, 132)[0] == 1
    assert choose_splits(2048, 32768, 132) == (4, 512)
