"""Products of a few tokens: Triton against twin on ragged sizes and dtypes, twins and kernels against float64."""

import numpy as np
import pytest
import torch

from mrv2.kernels.gate_normed import gate_normed
from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.kernels.project_normed import project_normed
from mrv2.kernels.project_onto import project_onto
from mrv2.kernels.vector_tile import MOST_TOKENS, VectorTile, choose_vector_tile
from mrv2.testing import check_kernel

ULP = 2**-7 if torch.cuda.is_available() else 2**-5  # see test_layer_kernels.py
BOUNDS = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 4 * ULP, "atol": 4 * ULP}}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SIZES = [1, 24, 64, 96, 576, 1024, 1500]


def normal(rng, *shape, dtype, scale=1.0):
    return torch.from_numpy(rng.normal(0, scale, shape)).to(dtype)


def draw_tile(rng, size, matrices=1):
    """The usual one, or one that doesn't divide the rows."""
    if rng.integers(2):
        return choose_vector_tile(size, matrices=matrices)
    return VectorTile(int(rng.choice([1, 2, 8])), int(rng.choice([1, 2, 4])))


def normed_inputs(rng, dtype, *, residual, matrices=1):
    n, size, num_rows = int(rng.integers(1, MOST_TOKENS + 1)), int(rng.choice(SIZES)), int(rng.choice([1, 7, 40]))
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
        "tile": draw_tile(rng, size, matrices),
    }


def gate_inputs(rng, dtype, *, residual):
    return normed_inputs(rng, dtype, residual=residual, matrices=2) | {"act": str(rng.choice(sorted(ACTIVATIONS)))}


def onto_inputs(rng, dtype):
    n, size, num_rows = int(rng.integers(1, MOST_TOKENS + 1)), int(rng.choice(SIZES)), int(rng.choice([1, 7, 40]))
    return {
        "x": normal(rng, n, size, dtype=dtype),
        "weight": normal(rng, num_rows, size, dtype=dtype, scale=size**-0.5),
        "bias": normal(rng, num_rows, dtype=dtype) if rng.integers(2) else None,
        "residual": normal(rng, n, num_rows, dtype=dtype, scale=float(rng.choice([1.0, 30.0]))),
        "arrived": None,
        "out": torch.zeros(n, num_rows, dtype=dtype),
        "tile": draw_tile(rng, size),
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
    check_kernel(project_onto, lambda rng: onto_inputs(rng, dtype), outputs=("out",), cases=12, **BOUNDS[dtype])


def test_project_onto_may_write_in_place():
    inputs = onto_inputs(np.random.default_rng(1), torch.float32)
    want = torch.empty_like(inputs["residual"])
    project_onto(**inputs | {"out": want})
    project_onto(**inputs | {"out": inputs["residual"]})
    assert torch.equal(inputs["residual"], want)


def run(kernel, inputs):
    """On a GPU the kernel, else the twin: that the two agree is tested above."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    kernel(**moved)
    return moved["out"].cpu().double()


def exactly(inputs):
    """The norm and the projection in float64, of what is given in half precision."""
    x = inputs["x"].double()
    if inputs["residual"] is not None:
        x = (x + inputs["residual"].double()).to(inputs["x"].dtype).double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + inputs["eps"]).sqrt() * inputs["gain"].double()
    out = normed @ inputs["weight"].double().t()
    return out if inputs["bias"] is None else out + inputs["bias"].double()


@pytest.mark.parametrize("seed", range(6))
def test_bf16_is_within_a_rounding_of_each_stage_of_float64(seed):
    rng = np.random.default_rng(seed)
    step = 2**-8  # half a unit in the last place, relative
    inputs = normed_inputs(rng, torch.bfloat16, residual=bool(seed % 2))
    want = exactly(inputs)
    # The norm is rounded twice, each sum has `size` terms of about |gain| / sqrt(size), the result is rounded.
    noise = 4 * step * (inputs["gain"].double().norm() / inputs["gain"].numel() ** 0.5 + want.abs())
    assert ((run(project_normed, inputs) - want).abs() <= 2 * noise).all()

    inputs = onto_inputs(rng, torch.bfloat16)
    projected = inputs["x"].double() @ inputs["weight"].double().t()
    if inputs["bias"] is not None:
        projected += inputs["bias"].double()
    want = projected + inputs["residual"].double()
    assert ((run(project_onto, inputs) - want).abs() <= 1.1 * step * (projected.abs() + want.abs()) + 1e-6).all()

    inputs = gate_inputs(rng, torch.bfloat16, residual=bool(seed % 2))
    gate, up = exactly(inputs).chunk(2, -1)
    want = ACTIVATIONS[inputs["act"]](gate) * up
    each = 8 * step * (inputs["gain"].double().norm() / inputs["gain"].numel() ** 0.5 + gate.abs().maximum(up.abs()))
    assert ((run(gate_normed, inputs) - want).abs() <= each * (1.2 * gate.abs() + up.abs() * 1.2 + each)).all()


@pytest.mark.parametrize("size", [1, 24, 1024, 3072, 4096, 14336, 16384])
@pytest.mark.parametrize("matrices", [1, 2])
def test_a_thread_holds_no_more_than_its_registers(size, matrices):
    tile = choose_vector_tile(size, matrices=matrices)
    row = 1 << (size - 1).bit_length()
    assert tile.rows >= 1
    assert tile.num_warps <= 16
    assert tile.rows * matrices * row / (32 * tile.num_warps) <= 128
