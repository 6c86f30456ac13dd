"""Products of some tokens on the matrix units: Triton against twin on ragged sizes, and against float64."""

import numpy as np
import pytest
import torch

from mrv2.kernels.gate_normed import gate_normed
from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.kernels.project_normed import project_normed
from mrv2.kernels.project_onto import project_onto
from mrv2.kernels.token_tile import ARRIVALS, MOST_TOKENS, SHARED, TokenTile, choose_token_tile, token_block
from mrv2.testing import check_kernel

HALF, ULP = (torch.bfloat16, 2**-7) if torch.cuda.is_available() else (torch.float16, 2**-10)
"""The interpreter can't multiply bf16."""

BOUNDS = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, HALF: {"rtol": 4 * ULP, "atol": 4 * ULP}}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SIZES = [16, 24, 64, 200, 576]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(rng, *shape, dtype, scale=1.0):
    return torch.from_numpy(rng.normal(0, scale, shape)).to(dtype)


def draw_tokens(rng):
    return int(rng.choice([1, 5, 16, 17, 33, 64, 70, MOST_TOKENS]))


def draw_tile(rng, splits=(1,)):
    """None, or one that seldom divides the sizes."""
    if not rng.integers(4):
        return None
    rows, depth, stages, warps = (int(rng.choice(given)) for given in ([16, 32], [16, 64], [1, 2, 4], [2, 4]))
    return TokenTile(rows, depth, int(rng.choice(splits)), stages, warps)


def normed_inputs(rng, dtype, *, residual, matrices=1):
    n, size, num_rows = draw_tokens(rng), int(rng.choice(SIZES)), int(rng.choice([1, 7, 40]))
    rows = matrices * num_rows
    return {
        "x": normal(rng, n, size, dtype=dtype, scale=float(rng.choice([1e-2, 1.0, 30.0]))),
        "residual": normal(rng, n, size, dtype=dtype) if residual else None,
        "gain": normal(rng, size, dtype=dtype),
        "eps": float(rng.choice([1e-6, 1e-5])),
        "weight": normal(rng, rows, size, dtype=dtype, scale=size**-0.5),
        "bias": normal(rng, rows, dtype=dtype) if rng.integers(2) else None,
        "summed": torch.zeros(n, size, dtype=dtype) if residual else None,
        "out": torch.zeros(n, num_rows, dtype=dtype),
        "tile": draw_tile(rng),
    }


def gate_inputs(rng, dtype, *, residual):
    return normed_inputs(rng, dtype, residual=residual, matrices=2) | {"act": str(rng.choice(sorted(ACTIVATIONS)))}


def onto_inputs(rng, dtype):
    n, size, num_rows = draw_tokens(rng), int(rng.choice(SIZES)), int(rng.choice([1, 7, 40]))
    return {
        "x": normal(rng, n, size, dtype=dtype),
        "weight": normal(rng, num_rows, size, dtype=dtype, scale=size**-0.5),
        "bias": normal(rng, num_rows, dtype=dtype) if rng.integers(2) else None,
        "residual": normal(rng, n, num_rows, dtype=dtype, scale=float(rng.choice([1.0, 30.0]))),
        "arrived": torch.zeros(ARRIVALS, dtype=torch.int32),
        "out": torch.zeros(n, num_rows, dtype=dtype),
        "tile": draw_tile(rng, splits=(1, 2, 3, 4)),
    }


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize(("kernel", "inputs"), [(project_normed, normed_inputs), (gate_normed, gate_inputs)])
@pytest.mark.parametrize("residual", [False, True])
def test_normed_kernels_equal_their_twins(kernel, inputs, residual, dtype):
    outputs = ("out", "summed") if residual else ("out",)
    make = lambda rng: inputs(rng, dtype, residual=residual)  # noqa: E731
    check_kernel(kernel, make, outputs=outputs, cases=8, **BOUNDS[dtype])


@pytest.mark.sanitize
@DTYPES
def test_project_onto_kernel_equals_twin(dtype):
    check_kernel(project_onto, lambda rng: onto_inputs(rng, dtype), outputs=("out",), cases=16, **BOUNDS[dtype])


def run(kernel, inputs):
    """The kernel, interpreted where there is no GPU."""
    moved = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    kernel.triton(**moved)
    return moved["out"].cpu()


@pytest.fixture
def _interpreted(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("seed", range(4))
def test_half_precision_is_within_a_rounding_of_each_stage_of_float64(seed):
    rng = np.random.default_rng(seed)
    step = ULP / 2  # half a unit in the last place, relative
    inputs = normed_inputs(rng, HALF, residual=False)
    x, gain = inputs["x"].double(), inputs["gain"].double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + inputs["eps"]).sqrt() * gain
    want = normed @ inputs["weight"].double().t()
    # Each element is rounded once, by up to `step`; the products' errors add up as the elements' sizes do.
    noise = step * (normed.abs() @ inputs["weight"].double().abs().t() + want.abs())
    if inputs["bias"] is not None:
        want = want + inputs["bias"].double()
        noise += step * want.abs()
    assert ((run(project_normed, inputs).double() - want).abs() <= 1.1 * noise + 1e-6).all()

    inputs = onto_inputs(rng, HALF)
    projected = inputs["x"].double() @ inputs["weight"].double().t()
    if inputs["bias"] is not None:
        projected += inputs["bias"].double()
    want = projected + inputs["residual"].double()
    got = run(project_onto, inputs).double()
    assert ((got - want).abs() <= 1.1 * step * (projected.abs() + want.abs()) + 1e-5).all()


@pytest.mark.usefixtures("_interpreted")
def test_a_tokens_result_is_bitwise_that_beside_any_other_tokens():
    rng = np.random.default_rng(0)
    inputs = onto_inputs(rng, HALF) | {"tile": TokenTile(16, 64, 3, 2, 4)}
    x, residual = inputs["x"][:9].contiguous(), inputs["residual"][:9].contiguous()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    given = inputs | {"x": x, "residual": residual, "out": torch.empty_like(residual)}
    straight = run(project_onto, given | {"out": torch.empty_like(residual)})
    moved = run(project_onto, given | {"x": x[order].contiguous(), "residual": residual[order].contiguous()})
    assert torch.equal(straight[order], moved)
    assert not inputs["arrived"].any()


@pytest.mark.parametrize("tokens", [5, 16, 32, 64, 128])
@pytest.mark.parametrize("size", [64, 1024, 2048, 3072, 14336])
@pytest.mark.parametrize("splits", [False, True])
def test_programs_cover_the_rows_and_their_tiles_fit_beside_anothers(tokens, size, splits):
    tile = choose_token_tile(tokens, 1024, size, splits=splits)
    assert (tile.splits - 1) * tile.span(size) < size <= tile.splits * tile.span(size)
    assert tile.stages >= 2
    assert tile.stages * tile.depth * (tile.rows + token_block(tokens)) * 2 <= SHARED
