"""Noise and draws: against the published generator, in distribution, and at the extremes."""

import math

import numpy as np
import pytest
import torch

from mrv2.kernels import gumbel_noise, sample_gumbel, sample_ranked
from mrv2.kernels.gumbel import gumbel_from_bits, philox
from mrv2.testing import check_kernel

INF = float("inf")


def words(counter, key):
    """Philox 4x32-10 in plain integers."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def plain_noise(seed, position, stream, token):
    x = words((token // 4, position, stream, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[token % 4]
    return -math.log(-math.log1p(-(x + 0.5) * 2.0**-32))


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # Random123's known answers
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_gives_the_published_answers(counter, key, want):
    assert tuple(words(counter, key)) == want


def test_philox_equals_plain_integers():
    rng = np.random.default_rng(1)
    seeds = rng.integers(-(2**63), 2**63 - 1, 40)
    counters, positions = rng.integers(0, 2**31, (40, 3)), rng.integers(0, 2**31, 40)
    got = philox(torch.tensor(seeds)[:, None], torch.tensor(counters), torch.tensor(positions)[:, None], 5)
    for n in range(40):
        for k in range(3):
            key = (int(seeds[n]) & 0xFFFFFFFF, (int(seeds[n]) >> 32) & 0xFFFFFFFF)
            want = words((int(counters[n, k]), int(positions[n]), 5, 0), key)
            assert [int(word[n, k]) for word in got] == want


def test_noise_equals_double_precision():
    seeds, positions = torch.tensor([3, 2**40 + 1, -5]), torch.tensor([0, 17, 2**31 - 1])
    got = gumbel_noise(seeds, positions, 2, 1003)
    assert got.shape == (3, 1003)
    want = [
        [plain_noise(s, p, 2, t) for t in range(1003)] for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_noise_is_finite_and_monotone_at_the_ends():
    # A 32-bit uniform taken to float32 directly would be 1 for the last 128 words, and the noise infinite.
    bits = torch.cat(
        [torch.arange(0, 4096), torch.arange(2**27 - 2048, 2**27 + 2048), torch.arange(2**32 - 4096, 2**32)]
    )
    got = gumbel_from_bits(bits)
    want = -np.log(-np.log1p(-(bits.numpy() + 0.5) * 2.0**-32))
    assert torch.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    assert len(got[:4096].unique()) == 4096, "the large values must keep full resolution"


@pytest.mark.parametrize("vocab", [1, 3, 4, 1000, 49152, 151937])
def test_noise_at_chosen_tokens_equals_the_full_noise(vocab):
    rng = np.random.default_rng(vocab)
    seeds, positions = torch.tensor(rng.integers(0, 2**62, 5)), torch.tensor(rng.integers(0, 9999, 5))
    ids = torch.tensor(rng.integers(0, vocab, (5, 50)))
    full = gumbel_noise(seeds, positions, 1, vocab)
    assert torch.equal(gumbel_noise(seeds, positions, 1, vocab, ids), full.gather(1, ids))


def test_noise_depends_on_seed_position_stream_and_token_only():
    seeds, positions = torch.arange(300) * 7919, torch.arange(300) % 11
    together = gumbel_noise(seeds, positions, 3, 501)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 3, 501), together[order])
    for n in (0, 123, 299):
        assert torch.equal(gumbel_noise(seeds[n : n + 1], positions[n : n + 1], 3, 777)[0, :501], together[n])
    base = gumbel_noise(torch.tensor([5]), torch.tensor([6]), 0, 100)
    for seed, position, stream in ((6, 6, 0), (5 + 2**32, 6, 0), (5, 7, 0), (5, 6, 1)):
        other = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), stream, 100)
        assert (other == base).float().mean() < 0.05


# -- draws -----------------------------------------------------------------------------------------------


def draw(logits, *, temperature=1.0, seeds=None, positions=None, stream=0, rows=None):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    n = len(logits)
    out = torch.full((n,), -1)
    sample_gumbel(
        logits=logits,
        rows=torch.arange(n, dtype=torch.int32) if rows is None else rows,
        seeds=torch.arange(n) if seeds is None else seeds,
        temperature=torch.full((n,), temperature) if isinstance(temperature, float) else temperature,
        positions=torch.zeros(n, dtype=torch.int64) if positions is None else positions,
        stream=stream,
        scaled=True,
        drawn=True,
        out=out,
    )
    return out


def draw_inputs(rng):
    max_rows, vocab = 7, int(rng.choice([1, 5, 600, 2048, 5000]))
    n = int(rng.integers(1, max_rows + 1))
    rows = rng.permutation(max_rows)[:n]
    rows[n - int(rng.integers(0, n + 1)) :] = -1
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    if rng.random() < 0.5:  # ties, filtered tokens, and what a broken model may give
        logits = np.round(logits)
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[rng.random(logits.shape) < 0.05] = np.nan
        logits[rng.random(n) < 0.2] = rng.choice([-np.inf, np.inf, np.nan])
    return {
        "logits": torch.from_numpy(logits).to([torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]),
        "rows": torch.from_numpy(rows).int(),
        "seeds": torch.from_numpy(rng.integers(0, 2**63 - 1, max_rows)),
        "temperature": torch.from_numpy(rng.choice([0.0, 0.7], max_rows)).float(),
        "positions": torch.from_numpy(rng.integers(0, 2**31 - 1, n)),
        "stream": int(rng.integers(0, 4)),
        "scaled": bool(rng.integers(2)),
        "drawn": bool(rng.random() < 0.8),
        "out": torch.zeros(n, dtype=torch.int64),
    }


@pytest.mark.sanitize
def test_kernel_equals_twin():
    check_kernel(sample_gumbel, draw_inputs, outputs=("out",), cases=40)


def test_kernel_equals_twin_over_a_large_vocabulary():
    def make(rng):
        return draw_inputs(rng) | {
            "logits": torch.from_numpy(rng.normal(0, 3, (1, 151936))).float(),
            "rows": torch.tensor([4], dtype=torch.int32),
            "temperature": torch.ones(7),
            "positions": torch.tensor([123]),
            "out": torch.zeros(1, dtype=torch.int64),
        }

    check_kernel(sample_gumbel, make, outputs=("out",), cases=1)


@pytest.mark.parametrize("seed", range(20))
def test_twin_equals_a_loop(seed):
    inputs = draw_inputs(np.random.default_rng(seed))
    logits = inputs["logits"] = inputs["logits"][:, :600].contiguous()
    sample_gumbel(**inputs)
    for i, row in enumerate(inputs["rows"].tolist()):
        noisy = inputs["drawn"] and row >= 0 and inputs["temperature"][row] > 0
        best, best_id = -INF, 0
        for token, logit in enumerate(logits[i].tolist()):
            score = -INF if math.isnan(logit) else logit
            if noisy:
                if not inputs["scaled"]:
                    score /= float(inputs["temperature"][row])
                score += plain_noise(int(inputs["seeds"][row]), int(inputs["positions"][i]), inputs["stream"], token)
            if score > best:
                best, best_id = score, token
        assert inputs["out"][i].item() == best_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_stay_in_range_whatever_the_logits_hold(temperature):
    nan = float("nan")
    rows = [[nan] * 4, [-INF] * 4, [nan, nan, 1.0, nan], [-INF, INF, 0.0, INF], [nan, -INF, nan, -INF], [3e38] * 4]
    got = draw(rows, temperature=temperature).tolist()
    assert got[:5] == [0, 0, 2, 1, 0]
    assert 0 <= got[5] < 4


def test_filtered_tokens_are_never_drawn():
    logits = torch.full((2000, 50), -INF)
    logits[:, [3, 17, 49]] = 0.0
    assert set(draw(logits).tolist()) == {3, 17, 49}


def test_greedy_ties_go_to_the_lowest_id():
    assert draw([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]], temperature=0.0).tolist() == [1, 0]


def test_draws_follow_the_softmax():
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    n = 40_000
    for kind in ("seeds", "positions"):
        same = torch.full((n,), 9)
        args = {"seeds": same, "positions": same, kind: torch.arange(n)}
        counts = torch.bincount(draw(p.log().repeat(n, 1), **args), minlength=6)
        chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
        assert chi2 < 20.5, f"over {kind}: chi-square {chi2:.1f} with 5 degrees of freedom; p < 0.001"


def test_a_draw_depends_on_neither_batch_nor_row():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (64, 300))).float()
    seeds, positions = torch.arange(64) * 31, torch.arange(64)
    together = draw(logits, seeds=seeds, positions=positions)
    for n in range(0, 64, 9):
        table = torch.full((64,), -1)
        table[40] = seeds[n]
        alone = draw(
            logits[n : n + 1],
            seeds=table,
            positions=positions[n : n + 1],
            rows=torch.tensor([40], dtype=torch.int32),
            temperature=torch.ones(64),
        )
        assert alone.item() == together[n].item()


# -- draws from ranks ------------------------------------------------------------------------------------


def ranked_inputs(rng, max_ranks=3000):
    inputs = draw_inputs(rng)
    del inputs["scaled"], inputs["drawn"]
    logits = inputs.pop("logits").float().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    num_ranks = int(rng.integers(1, min(max_ranks, ids.shape[1]) + 1))
    return inputs | {
        "ranked": ranked[:, :num_ranks],
        "ids": ids[:, :num_ranks],
        "top_k": torch.from_numpy(rng.integers(0, num_ranks + 1, 7)).int(),
        "top_p": torch.from_numpy(rng.choice([1e-6, 0.3, 0.9, 0.999, 1.0], 7)).float(),
    }


@pytest.mark.sanitize
def test_ranked_kernel_equals_twin():
    check_kernel(sample_ranked, ranked_inputs, outputs=("out",), cases=60)


def test_ranked_kernel_equals_twin_over_a_large_vocabulary():
    def make(rng):
        scores = torch.from_numpy(rng.normal(0, 2, (1, 151936))).float()
        ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
        inputs = ranked_inputs(rng) | {"ranked": ranked, "ids": ids, "rows": torch.tensor([3], dtype=torch.int32)}
        inputs |= {"temperature": torch.ones(7), "top_k": torch.tensor([0] * 7, dtype=torch.int32)}
        inputs |= {"positions": torch.tensor([7]), "out": torch.zeros(1, dtype=torch.int64)}
        return inputs | {"top_p": torch.full((7,), float(rng.choice([0.9, 1.0])))}

    check_kernel(sample_ranked, make, outputs=("out",), cases=2)


@pytest.mark.parametrize("seed", range(30))
def test_ranked_twin_equals_a_draw_over_the_filtered_vocabulary(seed):
    """The other way to the same token: drop what the filters drop, then draw from all."""
    inputs = ranked_inputs(np.random.default_rng(seed))
    sample_ranked(**inputs)
    n = len(inputs["rows"])
    logits = torch.full((n, 5000), -INF)
    for i, row in enumerate(inputs["rows"].tolist()):
        ranked, ids = inputs["ranked"][i].double().numpy(), inputs["ids"][i].tolist()
        k, p = int(inputs["top_k"][row]) or len(ids), float(inputs["top_p"][row])
        top = ranked[0]
        weights = [1.0 if s == top else math.exp(s - top) for s in ranked[:k].tolist()]
        mass = 0.0
        for token, score, weight in zip(ids, ranked.tolist(), weights, strict=False):
            if p >= 1 or mass < p * sum(weights):
                logits[i, token] = score
            mass += weight
    want = torch.zeros(n, dtype=torch.int64)
    names = ("rows", "seeds", "temperature", "positions", "stream")
    sample_gumbel(logits=logits, scaled=True, drawn=True, **{name: inputs[name] for name in names}, out=want)
    empty = (logits == -INF).all(1)  # whose lowest id the list need not hold
    assert inputs["out"][~empty].tolist() == want[~empty].tolist()
    assert inputs["out"][empty].tolist() == inputs["ids"][empty, 0].tolist()
