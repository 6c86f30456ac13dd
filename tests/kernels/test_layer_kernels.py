"""Fused layer kernels: Triton against twin on ragged sizes and dtypes, and twins against small layers."""

import numpy as np
import pytest
import torch

from mrv2.kernels import add_rms_norm, gated_act, qk_norm_rope_cache
from mrv2.kernels.compute_angles import compute_angles
from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.testing import check_kernel

ULP = 2**-7 if torch.cuda.is_available() else 2**-5
"""One unit in the last place of bf16, where the two round a float32 that differs in its last bits. The interpreter
cuts instead of rounding, three times in a row."""
BOUNDS = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": ULP, "atol": ULP / 2}}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def normal(rng, shape, dtype, scale=1.0):
    return torch.from_numpy(rng.normal(0, scale, shape)).to(dtype)


def padded(rng, n, size, dtype, scale=1.0):
    """[n, size] whose rows lie apart."""
    return normal(rng, (n, size + int(rng.integers(0, 3))), dtype, scale)[:, :size]


# -- add_rms_norm ----------------------------------------------------------------------------------------


def norm_inputs(rng, dtype):
    n, size = int(rng.integers(1, 9)), int(rng.choice([1, 16, 48, 96, 576, 1024, 3000]))
    has_residual = bool(rng.integers(2))
    scale = float(rng.choice([1e-3, 1.0, 100.0]))
    return {
        "x": padded(rng, n, size, dtype, scale),
        "residual": padded(rng, n, size, dtype, scale) if has_residual else None,
        "weight": normal(rng, size, dtype),
        "eps": float(rng.choice([1e-6, 1e-5])),
        "summed": torch.zeros(n, size, dtype=dtype) if has_residual else None,
        "out": torch.zeros(n, size, dtype=dtype),
    }


@pytest.mark.sanitize
@DTYPES
def test_add_rms_norm_kernel_equals_twin(dtype):
    with_residual = lambda rng: norm_inputs(rng, dtype) | {"residual": None, "summed": None}  # noqa: E731
    check_kernel(add_rms_norm, with_residual, outputs=("out",), cases=8, **BOUNDS[dtype])

    def without(rng):
        while (inputs := norm_inputs(rng, dtype))["residual"] is None:
            pass
        return inputs

    check_kernel(add_rms_norm, without, outputs=("out", "summed"), cases=12, **BOUNDS[dtype])


def test_add_rms_norm_may_write_the_sum_in_place():
    rng = np.random.default_rng(0)
    x, residual, weight = normal(rng, (3, 40), torch.float32), normal(rng, (3, 40), torch.float32), torch.ones(40)
    total, out = x + residual, torch.empty(3, 40)
    add_rms_norm(x=x, residual=residual, weight=weight, eps=1e-6, summed=residual, out=out)
    assert torch.equal(residual, total)
    want = total.double() / (total.double() ** 2).mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)


# -- gated_act -------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_gated_act_kernel_equals_twin(act, dtype):
    def inputs(rng):
        n, size = int(rng.integers(1, 6)), int(rng.choice([1, 24, 48, 1024, 1500]))
        return {
            "gate_up": padded(rng, n, 2 * size, dtype, float(rng.choice([0.1, 3.0, 20.0]))),
            "act": act,
            "out": torch.zeros(n, size, dtype=dtype),
        }

    check_kernel(gated_act, inputs, outputs=("out",), cases=6, **BOUNDS[dtype])


# -- qk_norm_rope_cache ----------------------------------------------------------------------------------


def attention_inputs(rng, dtype):
    """Partial rotation, sizes that are no powers of two, blocks in any order, some tokens without a slot."""
    n, num_kv = int(rng.integers(1, 12)), int(rng.choice([1, 2, 3]))
    num_q, head_dim = num_kv * int(rng.choice([1, 2, 5])), int(rng.choice([8, 16, 24, 64, 80]))
    rotary_dim = int(rng.choice([head_dim, head_dim // 2]))
    block_size, num_blocks = int(rng.choice([1, 4, 16])), 20
    slots = torch.from_numpy(rng.permutation(num_blocks * block_size)[:n])
    slots[torch.from_numpy(rng.random(n) < 0.3)] = -1
    angles = torch.from_numpy(rng.uniform(-3, 3, (n, rotary_dim // 2)))
    sin = angles.sin()
    norms = [normal(rng, head_dim, dtype) if rng.integers(2) else None for _ in range(2)]
    # Groups share the pool's bytes: a layer's pages may be smaller than the pool's.
    pool = normal(rng, (num_blocks, 2 * block_size * num_kv * head_dim + int(rng.choice([0, 64]))), dtype)
    pages = pool[:, : 2 * block_size * num_kv * head_dim]
    return {
        "qkv": padded(rng, n, (num_q + 2 * num_kv) * head_dim, dtype),
        "q_weight": norms[0],
        "k_weight": norms[1],
        "q_eps": 1e-6,
        "k_eps": 1e-3,
        "cos": angles.cos().repeat(1, 2).to(dtype),
        "sin": torch.cat((-sin, sin), -1).to(dtype),
        "slot_mapping": slots,
        "cache": pages.view(num_blocks, 2, block_size, num_kv, head_dim),
        "q": torch.zeros(n, num_q, head_dim, dtype=dtype),
    }


@pytest.mark.sanitize
@DTYPES
def test_qk_norm_rope_cache_kernel_equals_twin(dtype):
    bounds = BOUNDS[dtype] if dtype == torch.float32 else {"rtol": 2 * ULP, "atol": 2 * ULP}  # more roundings in a row
    check_kernel(qk_norm_rope_cache, lambda rng: attention_inputs(rng, dtype), outputs=("q",), cases=30, **bounds)


@pytest.mark.parametrize("seed", range(30))
def test_qk_norm_rope_cache_twin_equals_a_loop(seed):
    inputs = attention_inputs(np.random.default_rng(seed), torch.float32)
    before, q = inputs["cache"].clone(), inputs["q"].fill_(float("nan"))
    qk_norm_rope_cache(**inputs)
    n, num_q, head_dim = q.shape
    block_size, num_kv = before.shape[2:4]
    dim, want = inputs["cos"].shape[1], before.double()
    for token in range(n):
        heads = inputs["qkv"][token].double().view(-1, head_dim)
        for h, head in enumerate(heads[: num_q + num_kv]):
            weight, eps = (inputs["q_weight"], 1e-6) if h < num_q else (inputs["k_weight"], 1e-3)
            if weight is not None:
                head = head / ((head**2).mean() + eps).sqrt() * weight
            turned = head.clone()
            for j in range(dim // 2):
                c, s = inputs["cos"][token, j].double(), inputs["sin"][token, dim // 2 + j].double()
                turned[j] = head[j] * c - head[j + dim // 2] * s
                turned[j + dim // 2] = head[j + dim // 2] * c + head[j] * s
            if h < num_q:
                torch.testing.assert_close(q[token, h].double(), turned, rtol=1e-5, atol=1e-5)
            elif (slot := int(inputs["slot_mapping"][token])) >= 0:
                want[slot // block_size, 0, slot % block_size, h - num_q] = turned
                want[slot // block_size, 1, slot % block_size, h - num_q] = heads[h + num_kv]
    torch.testing.assert_close(inputs["cache"].double(), want, rtol=1e-5, atol=1e-5)
    untouched = torch.ones(before.shape[0] * block_size, dtype=torch.bool)
    untouched[inputs["slot_mapping"].clamp(min=0)] = False
    where = untouched.view(-1, block_size)
    assert torch.equal(inputs["cache"].transpose(1, 2)[where], before.transpose(1, 2)[where])


def test_a_token_without_a_slot_writes_nothing_at_all():
    inputs = attention_inputs(np.random.default_rng(3), torch.float32)
    inputs["slot_mapping"].fill_(-1)
    before = inputs["cache"].clone()
    qk_norm_rope_cache(**inputs)
    assert torch.equal(inputs["cache"], before)


@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["one row", "a row each"])
def test_compute_angles_kernel_equals_twin(each, dtype, bound):
    def inputs(rng):
        n, half = int(rng.integers(1, 40)), int(rng.choice([1, 8, 40, 64]))
        freqs = 10000.0 ** -np.linspace(0, 1, half) * (rng.uniform(0.5, 2, (n, 1)) if each else 1.0)
        return {
            "positions": torch.from_numpy(rng.integers(0, 131072, 2 * n))[::2],
            "inv_freq": torch.from_numpy(freqs).float(),
            "scaling": float(rng.choice([1.0, 1.2])),
            "cos": torch.zeros(n, 2 * half, dtype=dtype),
            "sin": torch.zeros(n, 2 * half, dtype=dtype),
        }

    check_kernel(compute_angles, inputs, outputs=("cos", "sin"), cases=8, rtol=bound, atol=bound)
