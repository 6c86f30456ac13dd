"""Mixture-of-experts kernels: Triton against their twins, and all of them together against naive code in float64.

bf16 is left to the GPU: the interpreter's matrix product doesn't know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrv2.kernels.down_experts import down_experts
from mrv2.kernels.expert_tile import choose_block_rows, down_tile, gate_up_tile
from mrv2.kernels.gate_up_experts import gate_up_experts
from mrv2.kernels.group_by_expert import group_by_expert, max_blocks
from mrv2.kernels.route_experts import route_experts
from mrv2.kernels.sum_experts import sum_experts
from mrv2.layers.moe import Experts
from mrv2.testing import check_kernel

CUDA = torch.cuda.is_available()
SEEDS = range(0, 20, 5)
BOUNDS = {"rtol": 1e-5, "atol": 1e-5}
NEVER = -1
# Few of each kind: a GPU compiles for each anew. Many experts make the interpreter slow.
ROUTES = ((1, 1), (3, 2), (8, 8), (60, 4), (128, 8), (256, 16))
"""Experts, and how many of them a token goes to."""
FEW = ((1, 1), (3, 2), (8, 2), (20, 8))
SHAPES = ((128, 64, "silu"), (65, 72, "gelu_new"), (16, 7, "gelu"), (48, 32, "relu"))
"""Hidden size, intermediate size, activation: around tiles, whole and cut."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


@pytest.fixture(scope="class")
def interpreted() -> Iterator[None]:
    """Without a GPU, kernels called with CPU tensors are interpreted instead of leaving the work to their twins."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).float()


# -- routing -----------------------------------------------------------------------------------------------


def route_inputs(rng: np.random.Generator) -> dict[str, Any]:
    """Logits with many ties, some hopeless, rows apart, tokens that are padding."""
    n, (num_experts, top_k) = int(rng.integers(1, 12)), ROUTES[rng.integers(len(ROUTES))]
    logits = normal(rng, n, num_experts + int(rng.integers(0, 3)))[:, :num_experts]
    if rng.integers(2):
        logits = (logits * 2).round() / 2
    logits[torch.from_numpy(rng.random(logits.shape) < 0.05)] = float("-inf")
    logits[:, rng.integers(num_experts)] = float(rng.choice([0.0, 3.0, 80.0]))
    dtype = [torch.float32, torch.float16, torch.bfloat16][rng.integers(3)]
    return {
        "logits": logits.to(dtype),
        "num_real": torch.tensor([rng.integers(0, n + 1)], dtype=torch.int32) if rng.integers(2) else None,
        "renormalize": bool(rng.integers(2)),
        "weights": torch.zeros(n, top_k),
        "experts": torch.zeros(n, top_k, dtype=torch.int32),
    }


@pytest.mark.sanitize
def test_route_experts_kernel_equals_twin() -> None:
    check_kernel(route_experts, route_inputs, outputs=("weights", "experts"), cases=20, **BOUNDS)


@pytest.mark.parametrize("run", [route_experts.triton, route_experts.twin], ids=["kernel", "twin"])
@pytest.mark.usefixtures("interpreted")
def test_of_equal_experts_the_lower_is_chosen_and_weights_are_probabilities(run: Any) -> None:
    logits = torch.tensor([[1, 3, 3, 1, 3.0], [0, 0, 0, 0, 0], [2, 2, 5, -1, 2]], device=device())
    weights, experts = torch.empty(3, 3, device=device()), torch.empty(3, 3, dtype=torch.int32, device=device())
    run(logits=logits, num_real=None, renormalize=False, weights=weights, experts=experts)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2], [2, 0, 1]]
    probabilities = logits.cpu().double().exp() / logits.cpu().double().exp().sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu().double(), probabilities.gather(1, experts.cpu().long()))


@pytest.mark.parametrize("run", [route_experts.triton, route_experts.twin], ids=["kernel", "twin"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.usefixtures("interpreted")
def test_experts_are_in_range_and_distinct_whatever_the_logits(run: Any, bad: float) -> None:
    logits = torch.zeros(3, 6, device=device())
    logits[0, 2], logits[1, 1:5], logits[2] = bad, bad, bad
    weights, experts = torch.empty(3, 4, device=device()), torch.empty(3, 4, dtype=torch.int32, device=device())
    run(logits=logits, num_real=None, renormalize=True, weights=weights, experts=experts)
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in experts.tolist())
    assert bad != bad or bad < 0 or weights[0].isnan().any()  # infinite: no probability to speak of
    if bad != bad:
        assert weights.isnan().all()  # what was no number isn't made one


# -- grouping ----------------------------------------------------------------------------------------------


def draw_experts(rng: np.random.Generator, *, longest: int, route: tuple[int, int]) -> Tensor:
    """Choices of every kind: even, all for one, none for most, padding at the end or anywhere."""
    n, (num_experts, top_k) = int(rng.integers(1, longest)), route
    scores = rng.random((n, num_experts))
    kind = rng.integers(4)
    if kind == 1:
        scores[:, rng.integers(num_experts)] = 2.0
    elif kind == 2:
        scores[:, : min(num_experts, top_k + 1)] += 1.0
    experts = torch.from_numpy(scores.argsort(1)[:, ::-1][:, :top_k].copy()).int()
    if kind == 3:
        experts[rng.integers(0, n + 1) :] = NEVER
    elif rng.integers(2):
        experts[torch.from_numpy(rng.random(experts.shape) < 0.3)] = NEVER
    return experts


def grouping(experts: Tensor, num_experts: int, block_rows: int) -> dict[str, Any]:
    rows = experts.numel()
    return {
        "experts": experts,
        "block_rows": block_rows,
        "order": experts.new_zeros(rows),
        "offsets": experts.new_zeros(num_experts + 1),
        "blocks": experts.new_zeros(max_blocks(rows, num_experts, block_rows), 2),
    }


def group_inputs(rng: np.random.Generator) -> dict[str, Any]:
    route, longest = [((1, 1), 300), ((8, 8), 300), ((60, 4), 60), ((128, 8), 12)][rng.integers(4)]
    return grouping(draw_experts(rng, longest=longest, route=route), route[0], int(rng.choice([16, 128])))


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", SEEDS)
def test_group_by_expert_kernel_equals_twin(seed: int) -> None:
    check_kernel(group_by_expert, group_inputs, outputs=("order", "offsets", "blocks"), seed=seed, cases=4)


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30))
def test_groups_are_stable_whole_and_in_bounds(seed: int) -> None:
    """What the twin promises, against a loop over assignments."""
    inputs = group_inputs(np.random.default_rng(seed))
    group_by_expert.twin(**inputs)
    flat, num_experts = inputs["experts"].flatten().tolist(), len(inputs["offsets"]) - 1
    order, offsets, blocks = (inputs[name].tolist() for name in ("order", "offsets", "blocks"))
    assert order == sorted(range(len(flat)), key=lambda a: (flat[a] if flat[a] >= 0 else num_experts, a))
    assert offsets == [sum(0 <= e < limit for e in flat) for limit in range(num_experts + 1)]
    covered = [(e, row) for e, first in blocks if e >= 0 for row in range(first, first + inputs["block_rows"])]
    inside = [(e, row) for e, row in covered if row < offsets[e + 1]]
    assert inside == [(flat[a], row) for row, a in enumerate(order) if flat[a] >= 0]
    used = [e for e, _ in blocks if e >= 0]
    assert blocks[len(used) :] == [[-1, -1]] * (len(blocks) - len(used))


def test_the_bound_on_blocks_is_reached_and_holds() -> None:
    for num_experts, counts in ((3, [17, 1, 1]), (4, [1, 0, 0, 0]), (2, [16, 16])):
        experts = torch.cat([torch.full((c,), e, dtype=torch.int32) for e, c in enumerate(counts)])[:, None]
        inputs = grouping(experts, num_experts, 16)
        group_by_expert.twin(**inputs)
        needed = sum(-(-c // 16) for c in counts)
        assert int((inputs["blocks"][:, 0] >= 0).sum()) == needed
    assert max_blocks(2 * 17, 2, 16) == 4
    assert max_blocks(1, 128, 16) == 1


# -- products ----------------------------------------------------------------------------------------------


def product_inputs(rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Sizes around tiles; what no expert may read is NaN."""
    (num_experts, top_k), (hidden, size, act) = FEW[rng.integers(3)], SHAPES[rng.integers(len(SHAPES))]
    experts = draw_experts(rng, longest=40, route=(num_experts, top_k))
    n = len(experts)
    inputs = grouping(experts, num_experts, int(rng.choice([16, 32, 64, 128])))
    group_by_expert.twin(**inputs)
    gated = normal(rng, n * top_k, size)
    gated[int(inputs["offsets"][-1]) :] = float("nan")
    return inputs | {
        "x": normal(rng, n, hidden + int(rng.integers(0, 3)))[:, :hidden].to(dtype),
        "gated": gated.to(dtype),
        "w13": (normal(rng, num_experts, 2 * size, hidden) * hidden**-0.5).to(dtype),
        "w2": (normal(rng, num_experts, hidden, size) * size**-0.5).to(dtype),
        "weights": torch.from_numpy(rng.random((n, top_k))).to(dtype),
        "top_k": top_k,
        "act": act,
    }


def gate_up_inputs(rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs = product_inputs(rng, dtype)
    names = ("x", "w13", "order", "offsets", "blocks", "block_rows", "top_k", "act")
    return {name: inputs[name] for name in names} | {"out": torch.zeros_like(inputs["gated"])}


def down_inputs(rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs = product_inputs(rng, dtype)
    names = ("w2", "weights", "order", "offsets", "blocks", "block_rows")
    out = torch.zeros(len(inputs["order"]), inputs["w2"].shape[1], dtype=dtype)
    return {name: inputs[name] for name in names} | {"x": inputs["gated"], "out": out}


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", SEEDS)
def test_gate_up_experts_kernel_equals_twin(seed: int) -> None:
    check_kernel(gate_up_experts, gate_up_inputs, outputs=("out",), seed=seed, cases=4, **BOUNDS)


@pytest.mark.sanitize
@pytest.mark.parametrize("seed", SEEDS)
def test_down_experts_kernel_equals_twin(seed: int) -> None:
    check_kernel(down_experts, down_inputs, outputs=("out",), seed=seed, cases=4, **BOUNDS)


@pytest.mark.parametrize(("kernel", "inputs"), [(gate_up_experts, gate_up_inputs), (down_experts, down_inputs)])
def test_products_in_half_precision(kernel: Any, inputs: Any) -> None:
    bound = {"rtol": 4e-3, "atol": 4e-3}  # twins round in between, and halves have 11 bits
    check_kernel(kernel, lambda rng: inputs(rng, torch.float16), outputs=("out",), cases=4, **bound)


@pytest.mark.sanitize
def test_sum_experts_kernel_equals_twin() -> None:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        experts = draw_experts(rng, longest=40, route=FEW[rng.integers(4)])
        hidden = int(rng.choice([1, 40, 700]))
        parts = normal(rng, experts.numel(), hidden)
        parts[experts.flatten() < 0] = float("nan")
        return {"parts": parts, "experts": experts, "out": torch.zeros(len(experts), hidden)}

    check_kernel(sum_experts, inputs, outputs=("out",), cases=15, **BOUNDS)


@pytest.mark.parametrize("change", ["expert", "row", "weight"])
def test_the_comparison_notices(change: str) -> None:
    """Negative controls: a neighbour's weights, a row too far, and another token's weight would be found."""

    def spoiled(**kwargs: Any) -> None:
        if change == "weight":
            kwargs["weights"] = kwargs["weights"].roll(1, 0)
        else:
            kwargs["blocks"][0, 0 if change == "expert" else 1] += 1
        down_experts.triton(**kwargs)

    kernel = type("Spoiled", (), {"triton": staticmethod(spoiled), "twin": staticmethod(down_experts.twin)})

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        experts = torch.tensor([[0, 1], [1, 0], [1, 2]], dtype=torch.int32)
        given = grouping(experts, 3, 16)
        group_by_expert.twin(**given)
        del given["experts"]
        x, w2, weights = normal(rng, 6, 8), normal(rng, 3, 16, 8), torch.from_numpy(rng.random((3, 2))).float()
        return given | {"x": x, "w2": w2, "weights": weights, "out": torch.zeros(6, 16)}

    with pytest.raises(AssertionError, match="differ"):
        check_kernel(kernel, inputs, outputs=("out",), cases=1, **BOUNDS)


# -- together ----------------------------------------------------------------------------------------------


def naive(layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """In float64, token by token."""
    w13, w2 = layer.w13.double().cpu(), layer.w2.double().cpu()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, (token, chosen) in enumerate(zip(x.double().cpu(), experts.tolist(), strict=True)):
        for k, e in enumerate(chosen):
            if e >= 0:
                gate, up = (w13[e] @ token).chunk(2)
                out[t] += weights[t, k].double().cpu() * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    return out


def make_case(seed: int, *, longest: int, dtype: torch.dtype) -> tuple[Experts, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    (num_experts, top_k), (hidden, size, _) = FEW[rng.integers(1, 4)], SHAPES[rng.integers(2)]
    experts = draw_experts(rng, longest=longest, route=(num_experts, top_k))
    with torch.device(device()):
        layer = Experts(hidden, size, num_experts=num_experts, top_k=top_k, act="silu").to(dtype)
    layer.w13.copy_(normal(rng, *layer.w13.shape) * hidden**-0.5)
    layer.w2.copy_(normal(rng, *layer.w2.shape) * size**-0.5)
    x = normal(rng, len(experts), hidden).to(dtype)
    x[(experts < 0).all(1)] = float("nan")  # a token without experts isn't read
    weights = torch.from_numpy(rng.random(experts.shape)).to(dtype)
    return layer, x.to(device()), weights.to(device()), experts.to(device())


@pytest.mark.usefixtures("interpreted")
class TestTogether:
    @settings(max_examples=10)
    @given(seed=st.integers(0, 1 << 30))
    def test_equals_naive_code(self, seed: int) -> None:
        layer, x, weights, experts = make_case(seed, longest=30, dtype=torch.float32)
        got = layer(x, weights, experts).cpu().double()
        torch.testing.assert_close(got, naive(layer, x, weights, experts), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("seed", range(6))
    def test_low_precision(self, seed: int) -> None:
        dtype = torch.bfloat16 if CUDA else torch.float16
        layer, x, weights, experts = make_case(seed, longest=80, dtype=dtype)
        got, want = layer(x, weights, experts).cpu(), naive(layer, x, weights, experts)
        assert got.dtype is dtype
        bound = 2**-8 if CUDA else 2**-11
        error = float((got.double() - want).norm() / want.norm().clamp(min=1e-9))
        assert error < 2 * bound  # three roundings of half a unit each, which average out

    def test_no_tokens(self) -> None:
        layer, x, weights, experts = make_case(0, longest=5, dtype=torch.float32)
        assert layer(x[:0], weights[:0], experts[:0]).shape == (0, x.shape[1])

    def test_only_padding_gives_zeros(self) -> None:
        layer, x, weights, experts = make_case(1, longest=9, dtype=torch.float32)
        x.fill_(float("nan"))
        assert torch.equal(layer(x, weights, torch.full_like(experts, NEVER)), torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_are_what_the_kernels_take_and_fit(dtype: torch.dtype) -> None:
    """Powers of two, 16 at least for the matrix units; buffers of all stages within 227 KiB."""
    seen = set()
    for num_tokens in (1, 3, 32, 256, 2048, 8192):
        for num_experts, top_k in ((8, 2), (128, 8), (256, 8), (1, 1), (64, 16)):
            rows = choose_block_rows(num_tokens, top_k, num_experts, dtype)
            seen.add(rows)
            for tile, products in ((gate_up_tile(rows, dtype), 2), (down_tile(rows, dtype), 1)):
                assert all(n >= 16 and n & (n - 1) == 0 for n in (rows, tile.cols, tile.depth))
                assert tile.num_stages * (rows + products * tile.cols) * tile.depth * dtype.itemsize <= 227 << 10
    assert min(seen) == 16
    assert len(seen) == (2 if dtype is torch.float32 else 4)
