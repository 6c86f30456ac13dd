"""The Triton kernel and its twin give the same, over random ragged batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from mrv2.testing import check_kernel

from mrv2_adapter_acme.kernels import update_memory


def ragged(rng: np.random.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    """New and known requests, padded ones without tokens, and a state full of NaN where nothing may be read.

    q, k and v are parts of one projection, states a part of larger pages.
    """
    num_reqs, heads, size, num_slots = (int(rng.integers(1, n)) for n in (5, 4, 41, 9))
    num_slots += num_reqs
    lens = rng.integers(1, 8, num_reqs)
    computed = np.where(rng.random(num_reqs) < 0.4, 0, rng.integers(1, 90, num_reqs))
    slots = rng.permutation(np.arange(1, num_slots))[:num_reqs]
    pad = int(rng.integers(0, 3))
    num_tokens, zeros = int(lens.sum()) + pad, np.zeros(pad, np.int64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32))

    page = normal(num_slots, heads * size * size + 3)
    page[torch.from_numpy(slots[computed == 0])] = float("nan")
    q, k, v = normal(num_tokens, 3, heads, size).to(dtype).unbind(1)
    return {
        "q": q,
        "k": k,
        "v": v,
        "keep": torch.from_numpy(rng.random((num_tokens, heads), np.float32)),
        "rate": torch.from_numpy(rng.random((num_tokens, heads), np.float32)),
        "state": page[:, : heads * size * size].view(num_slots, heads, size, size),
        "slots": torch.from_numpy(np.concatenate((slots, zeros))).int(),
        "starts": torch.from_numpy(np.concatenate(([0], lens.cumsum(), np.full(pad, lens.sum())))).int(),
        "seq_lens": torch.from_numpy(np.concatenate((computed + lens, zeros))).int(),
        "max_query_len": 8,
        "out": torch.empty(num_tokens, heads, size, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_update_memory(dtype: torch.dtype, tolerance: float) -> None:
    """Equal up to the order of rounding."""
    check_kernel(
        update_memory,
        lambda rng: ragged(rng, dtype),
        outputs=("out",),
        cases=10,
        rtol=tolerance,
        atol=tolerance,
    )
