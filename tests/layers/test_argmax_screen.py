"""The screened argmax is the argmax: whatever the weight, ties, outliers and cancellation included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.layers.argmax_screen import MAX_CANDIDATES, ArgmaxScreen, int8_linear

pytestmark = pytest.mark.skipif(int8_linear() is None, reason="this PyTorch has no exact 8-bit product")


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 3000),
    columns=st.sampled_from([2, 3, 64, 576]),
    outliers=st.booleans(),
    exponent=st.integers(-20, 20),
)
@settings(max_examples=80)
def test_equals_the_full_product(seed, rows, columns, outliers, exponent):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g)
    x = torch.randn(1, columns, generator=g) * 2.0**exponent
    if outliers:  # a few columns and rows that dwarf the others, as trained models have
        weight[:, 0] *= 100
        weight[rows // 2] *= 50
        x[0, -1] *= 1000
    exact = (weight.double() @ x[0].double()).float()
    found = ArgmaxScreen(weight)(x)
    if found is None:
        assert rows > MAX_CANDIDATES
        return
    # A difference below the rounding of one float32 sum may go either way, as in any product.
    assert exact[int(found)] >= exact.max() - exact.abs().max() * 1e-5
    assert 0 <= int(found) < rows


def test_the_lowest_of_equal_rows_wins():
    weight = torch.randn(300, 32)
    x = torch.randn(1, 32)
    best = int((weight @ x[0]).argmax())
    weight[[7, 250]] = weight[best] * 1.5
    assert int(ArgmaxScreen(weight)(x)) == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_what_has_no_bound_is_left_to_the_full_product(bad):
    x = torch.full((1, 16), bad)
    assert ArgmaxScreen(torch.randn(50, 16))(x) is None


def test_too_many_candidates_are_left_to_the_full_product():
    assert ArgmaxScreen(torch.ones(MAX_CANDIDATES + 1, 8))(torch.ones(1, 8)) is None
    assert int(ArgmaxScreen(torch.ones(MAX_CANDIDATES, 8))(torch.ones(1, 8))) == 0
