"""Filters against NumPy written from their definitions, draws against their distribution, ids always legal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.api import RequestData
from mrv2.errors import RequestError
from mrv2.kernels import gumbel_noise
from mrv2.sample.params import SamplingParams
from mrv2.sample.sampler import MAX_SELECTED, Sampler, apply_min_p, top_ids, top_logprobs
from mrv2.sample.states import SamplingStates
from mrv2.state.view import Limits

INF = float("inf")


def request(params, seed=0):
    ids = np.array([1], np.int32)
    return RequestData(
        req_id="x",
        prompt_token_ids=ids,
        prefill_token_ids=ids,
        num_computed_tokens=0,
        sampling=params,
        seed=seed if params.seed is None else params.seed,
        len_limit=10,
        stop_token_ids=(),
    )


def sample(logits, params, *, rows=None, positions=None, seeds=None):
    """Tokens for each row of logits, through the public sampler."""
    logits = logits if isinstance(logits, torch.Tensor) else torch.tensor(logits, dtype=torch.float32)
    rows = list(range(len(logits))) if rows is None else rows
    states = SamplingStates(
        Limits(max_rows=max(rows) + 1, max_num_tokens=8, max_model_len=8, vocab_size=logits.shape[1])
    )
    for i, row in enumerate(rows):
        states.add_request(row, request(params[i], seeds[i] if seeds else i))
    states.flush()
    rows_np = np.array(rows, np.int32)
    at = torch.arange(len(rows)) if positions is None else torch.tensor(positions)
    return Sampler(states)(logits, torch.from_numpy(rows_np), at, states.needs(rows_np))


def filtered_np(scores, top_k, top_p):
    """Kept ids by the textbook: sort, cut at k, then the shortest prefix whose mass reaches p."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: top_k or len(scores)]
    e = np.exp(np.array([scores[i] for i in order], np.float64) - max(scores))
    mass = np.cumsum(e / e.sum())
    n = len(order) if top_p >= 1 else int(np.searchsorted(mass, top_p - 1e-6)) + 1
    return set(order[:n])


# Whole and half numbers: many ties, and masses that no rounding can move across p.
grid = st.integers(-6, 6).map(lambda x: x / 2)


def drawn_np(logits, params, *, seeds, positions):
    """Tokens by the textbook: of what the filters keep, the largest sum of scaled logit and noise."""
    tokens = []
    for row, p, seed, position in zip(logits, params, seeds, positions, strict=True):
        scores = (row / p.temperature).tolist()
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 0, len(scores))[0].tolist()
        kept = filtered_np(scores, p.top_k, p.top_p)
        tokens.append(max(kept, key=lambda i: (np.float32(scores[i] + noise[i]), -i)))
    return tokens


@given(
    rows=st.lists(st.lists(grid, min_size=7, max_size=7), min_size=1, max_size=4),
    filters=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 1.0])), min_size=4, max_size=4
    ),
    seed=st.integers(0, 2**60),
)
@settings(max_examples=200)
def test_top_k_top_p_keep_what_the_textbook_keeps(rows, filters, seed):
    logits, n = torch.tensor(rows), len(rows)
    params = [SamplingParams(temperature=1, top_k=k, top_p=p) for k, p in filters[:n]]
    seeds, positions = [seed + i for i in range(n)], list(range(n))
    got = sample(logits, params, seeds=seeds, positions=positions).token_ids.tolist()
    assert got == drawn_np(logits, params, seeds=seeds, positions=positions)


@pytest.mark.parametrize("vocab", [3000, 151936])
def test_selecting_and_sorting_draw_the_same(vocab):
    """Whether the likely tokens are selected or all are sorted depends on the batch; what is drawn mustn't."""
    n = 6
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    filters = zip((1, 2, 20, 50, 300, 1000), [0.8, 1] * 3, strict=True)
    few = [SamplingParams(temperature=0.9, top_k=k, top_p=p) for k, p in filters]
    everything = SamplingParams(temperature=1.0, top_p=0.9)
    seeds, positions = list(range(n + 1)), [5] * (n + 1)
    selected = sample(logits, few, seeds=seeds[:n], positions=positions[:n]).token_ids.tolist()
    assert all(p.top_k <= MAX_SELECTED for p in few)
    rows = torch.cat([logits, logits[:1]])
    in_sorted = sample(rows, [*few, everything], seeds=seeds, positions=positions).token_ids.tolist()
    assert in_sorted[:n] == selected == drawn_np(logits, few, seeds=seeds[:n], positions=positions[:n])


@given(row=st.lists(grid, min_size=5, max_size=5), min_p=st.sampled_from([0.0, 0.05, 0.3, 0.99, 1.0]))
def test_min_p_compares_with_the_most_likely(row, min_p):
    probs = np.exp(np.array(row)) / np.exp(np.array(row)).sum()
    kept = apply_min_p(torch.tensor([row]), torch.tensor([min_p]))[0] > -INF
    want = probs >= min_p * probs.max() * (1 - 1e-6)
    assert kept.tolist() == want.tolist()


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 0.5])
    n = 20_000
    for temperature, kept in ((1.0, 6), (0.5, 6), (2.0, 3)):
        params = SamplingParams(temperature=temperature, top_k=kept if kept < 6 else 0)
        out = sample(logits.expand(n, -1), [params] * n, positions=[3] * n)
        counts = torch.bincount(out.token_ids, minlength=6).double()
        scaled = logits / temperature
        if kept < 6:
            scaled[scaled.sort(descending=True, stable=True).indices[kept:]] = -INF
        p = scaled.softmax(-1).double()
        assert (counts[p == 0] == 0).all()
        chi2 = ((counts - n * p) ** 2 / (n * p))[p > 0].sum()
        assert chi2 < 20.5, (temperature, counts)  # 0.1 % point at 5 degrees of freedom


def test_successive_positions_draw_independently():
    n = 20_000
    logits = torch.zeros(n, 4)
    params = [SamplingParams(temperature=1.0, seed=11)] * n
    out = sample(logits, params, positions=list(range(n))).token_ids
    pairs = torch.bincount(out[:-1] * 4 + out[1:], minlength=16).double()
    expected = (n - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 0.1 % point at 15 degrees of freedom


@given(data=st.data())
@settings(max_examples=60)
def test_a_token_does_not_depend_on_its_batch(data):
    n = data.draw(st.integers(2, 6))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_k=data.draw(st.sampled_from([0, 2, 30])),
            top_p=data.draw(st.sampled_from([0.4, 1.0])),
            min_p=data.draw(st.sampled_from([0.0, 0.2])),
            seed=data.draw(st.integers(0, 2**63 - 1)),
            logprobs=data.draw(st.sampled_from([None, 0, 3])),
        )
        for _ in range(n)
    ]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(n, 40, generator=generator) * 3
    positions = data.draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n))
    alone = [int(sample(logits[i : i + 1], [params[i]], positions=[positions[i]]).token_ids) for i in range(n)]
    order = data.draw(st.permutations(range(n)))
    together = sample(
        logits[list(order)],
        [params[i] for i in order],
        rows=[n - 1 - i for i in order],
        positions=[positions[i] for i in order],
    )
    assert together.token_ids.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 1e6])
@pytest.mark.parametrize(
    "row",
    [
        [-INF] * 8,
        [math.nan] * 8,
        [math.nan, 1.0, 2.0, -INF, 0.0, 0.0, 0.0, 0.0],
        [INF, 0, 0, 0, 0, 0, 0, INF],
        [3e38, -3e38, 3e38, 0, 0, 0, 0, 0],
        [1e-40] * 8,
    ],
)
def test_ids_are_legal_whatever_the_logits_hold(row, temperature):
    filters = SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1, seed=2**63 - 1)
    plain = SamplingParams(temperature=temperature)
    out = sample([row, row], [filters, plain], positions=[0, 2**31 - 1]).token_ids
    assert ((out >= 0) & (out < 8)).all()


@pytest.mark.parametrize("temperature", [1e-44, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(20, 30) * 10
    out = sample(logits, [SamplingParams(temperature=temperature)] * 20)
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, min_p=0.05),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9),
        SamplingParams(temperature=0.9, top_p=0.8, logprobs=3),
    ],
    ids=["greedy", "random", "min-p", "ranked", "sorted"],
)
def test_half_precision_draws_what_its_values_draw_in_full(params, dtype):
    logits = (torch.randn(50, 400, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    before = logits.clone()
    ours, theirs = (sample(x, [params] * 50) for x in (logits, logits.float()))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(logits, before)
    if params.logprobs is not None:
        assert torch.equal(ours.logprobs.logprobs, theirs.logprobs.logprobs)


def test_nan_takes_no_place_among_the_likely():
    row = [math.nan, 1.0, 5.0, -INF, 4.9, 0.0]
    out = sample([row] * 200, [SamplingParams(temperature=1, top_k=2)] * 200)
    assert set(out.token_ids.tolist()) == {2, 4}


def test_the_lowest_id_wins_ties():
    assert sample([[0.0, 2, 2, 1]], [SamplingParams(temperature=0)]).token_ids.tolist() == [1]
    out = sample(
        torch.tensor([[0.0, 2, 2, 2]]).expand(300, -1), [SamplingParams(temperature=1, top_k=2)] * 300
    ).token_ids
    assert set(out.tolist()) == {1, 2}
    assert top_ids(torch.tensor([[1.0, 3, 3, -0.0, 0.0, -2]]), 6).tolist() == [[1, 2, 0, 3, 4, 5]]


@given(
    rows=st.lists(
        st.lists(st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), min_size=6, max_size=6),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(0, 6),
)
def test_top_ids_sort_like_numbers(rows, k):
    got = top_ids(torch.tensor(rows, dtype=torch.float32), k)
    for row, ids in zip(rows, got.tolist(), strict=True):
        assert ids == sorted(range(6), key=lambda i: (-row[i], i))[:k]


def test_logprobs_normalise_the_untouched_logits():
    logits = torch.randn(3, 50) * 4
    params = [SamplingParams(temperature=0.3, top_k=4, logprobs=k) for k in (0, 2, 5)]
    out = sample(logits, params)
    want = logits.log_softmax(-1)
    assert out.logprobs.token_ids.shape == (3, 6)
    torch.testing.assert_close(out.logprobs.logprobs, want.gather(-1, out.logprobs.token_ids))
    assert out.logprobs.token_ids[:, 0].tolist() == out.token_ids.tolist()
    assert out.logprobs.token_ids[:, 1:].tolist() == want.topk(5).indices.tolist()
    assert out.logprobs.ranks.tolist() == [(w > w[t]).sum() + 1 for w, t in zip(want, out.token_ids, strict=True)]
    assert top_logprobs(logits, out.token_ids, 99).token_ids.shape == (3, 51)


def test_greedy_requests_need_no_filters():
    states = SamplingStates(Limits(max_rows=2, max_num_tokens=8, max_model_len=8, vocab_size=9))
    states.add_request(0, request(SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)))
    states.add_request(1, request(SamplingParams(temperature=1, top_k=9)))
    greedy, all_kept = states.needs(np.array([0])), states.needs(np.array([1]))
    assert not any((greedy.random, greedy.top_k, greedy.top_p, greedy.min_p))
    assert all_kept.random
    assert not all_kept.top_k


def test_ranks_that_a_batch_needs():
    states = SamplingStates(Limits(max_rows=4, max_num_tokens=8, max_model_len=8, vocab_size=99))
    for row, k in enumerate((5, 50, 0)):
        states.add_request(row, request(SamplingParams(temperature=1, top_k=k)))
    states.add_request(3, request(SamplingParams(temperature=0, top_k=70)))
    for rows, most in (([0], 5), ([0, 1, 3], 50), ([0, 2], 0), ([3], 0)):
        assert states.needs(np.array(rows)).num_ranks == most


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", 1000),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(17))),
        ("extra_args", [1]),
        ("temperature", 10**400),
        ("stop", None),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop_token_ids", {3}),
        ("ignore_eos", "false"),
        ("skip_special_tokens", "no"),
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(RequestError, match=f"MRV2-401 bad request: {field}="):
        SamplingParams(**{field: value})
