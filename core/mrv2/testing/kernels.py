"""Compare a Triton kernel with its torch twin.

Without a GPU the kernel runs in Triton's interpreter. That is decided when Triton is first imported, so the
top-level `conftest.py` calls `interpret_kernels()` before anything else does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrv2.errors import KernelError

_GUARD = 64
"""Elements before and after each tensor that no kernel may write."""


def interpret_kernels() -> None:
    """Import Triton so that its kernels can run on CPU tensors, in this process.

    Only kernels called through `.triton` (as `check_kernel` does) are interpreted, for that is slow: calls
    with CPU tensors still run the twins, and child processes aren't affected. With a GPU, or where Triton
    is missing, this does nothing.

    Raises:
        KernelError: Triton was imported before, in the usual way.
    """
    if torch.cuda.is_available():
        return
    with _interpreter():
        from mrv2.kernels import registry

    if registry.triton is not None and not registry.interpreting():
        raise KernelError(
            "Triton was imported before interpret_kernels() was called",
            where="mrv2.testing.interpret_kernels",
            fix="call it at the top of the top-level conftest.py, before importing anything that imports Triton",
        )


def check_kernel(
    kernel: Any,
    make_inputs: Callable[[np.random.Generator], Mapping[str, Any]],
    *,
    outputs: tuple[str, ...] = (),
    cases: int = 20,
    seed: int = 0,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Run a kernel and its twin on the same random inputs and compare every tensor they were given.

    Both get copies of the inputs, surrounded by guard elements, so a write out of bounds is found too.
    Outputs are filled with random bits first, the same for both, so an element that only one of them
    writes differs.

    Args:
        kernel: made with `mrv2.kernels.kernel`.
        make_inputs: keyword arguments of one case, from a random generator; tensors on the CPU. Sizes and
            values should vary over the ranges that the kernel promises to take.
        outputs: names of arguments that are written only.
        cases: how many random cases. `MRV2_KERNEL_CASES` in the environment lowers it: under a tool like
            compute-sanitizer each takes long.
        seed: of the first case; case k uses `seed + k`, and a failure names it.
        rtol: relative tolerance of floating-point tensors.
        atol: absolute tolerance of floating-point tensors.

    Raises:
        AssertionError: the two differ; the message shows the first difference.
        KernelError: there is no GPU, and Triton can't interpret here.
    """
    device = _device()
    cases = min(cases, int(os.environ.get("MRV2_KERNEL_CASES", cases)))
    for case in range(seed, seed + cases):
        rng = np.random.default_rng(case)
        inputs = dict(make_inputs(rng))
        for name in outputs:
            inputs[name] = _poisoned(inputs[name], rng)
        guarded = {run: {n: _Guarded(v, device) for n, v in inputs.items() if isinstance(v, Tensor)} for run in "kt"}
        with nullcontext() if device.type == "cuda" else _interpreter():
            kernel.triton(**{n: guarded["k"][n].tensor if n in guarded["k"] else v for n, v in inputs.items()})
        kernel.twin(**{n: guarded["t"][n].tensor if n in guarded["t"] else v for n, v in inputs.items()})
        for name in guarded["k"]:
            where = f"{getattr(kernel, '__name__', kernel)}, seed {case}, argument {name}"
            guarded["k"][name].check(f"{where}, kernel")
            guarded["t"][name].check(f"{where}, twin")
            _compare(guarded["k"][name].tensor, guarded["t"][name].tensor, where=where, rtol=rtol, atol=atol)


@contextmanager
def _interpreter() -> Iterator[None]:
    """What Triton does lazily at a first launch looks at the variable too, hence not only at import."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _device() -> torch.device:
    from mrv2.kernels import registry

    if torch.cuda.is_available() and registry.triton is not None:
        return torch.device("cuda")
    if not registry.interpreting():
        raise KernelError(
            "there is no GPU, and Triton is missing or wasn't imported for interpretation",
            where="mrv2.testing.check_kernel",
            fix="on Linux, call mrv2.testing.interpret_kernels() at the top of the top-level conftest.py",
        )
    return torch.device("cpu")


class _Guarded:
    """A copy of a tensor, same strides, inside a larger allocation with known contents around it."""

    def __init__(self, source: Tensor, device: torch.device) -> None:
        span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) if source.numel() else 0
        self._base = torch.zeros(span + 2 * _GUARD, dtype=source.dtype, device=device)
        _bytes(self._base).fill_(0xA5 if source.dtype != torch.bool else 1)
        self._before = self._base.clone()
        self.tensor = self._base.as_strided(source.shape, source.stride(), _GUARD)
        self.tensor.copy_(source)

    def check(self, where: str) -> None:
        """Compare the guards with what they held."""
        for part in (slice(0, _GUARD), slice(self._base.shape[0] - _GUARD, None)):
            same = torch.equal(_bytes(self._base[part]), _bytes(self._before[part]))
            assert same, f"{where}: wrote {'before' if part.start == 0 else 'past'} the tensor"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _poisoned(like: Tensor, rng: np.random.Generator) -> Tensor:
    """Random bits in the shape, strides and dtype of `like`."""
    poisoned = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if not like.numel():
        return poisoned
    high = 2 if like.dtype == torch.bool else 256
    raw = rng.integers(0, high, size=poisoned.untyped_storage().nbytes(), dtype=np.uint8)
    flat = torch.from_numpy(raw).view(like.dtype)
    return poisoned.copy_(flat.as_strided(like.shape, like.stride()))


def _compare(ours: Tensor, twins: Tensor, *, where: str, rtol: float, atol: float) -> None:
    ours, twins = ours.cpu(), twins.cpu()
    if ours.is_floating_point():
        equal = torch.isclose(ours, twins, rtol=rtol, atol=atol, equal_nan=True)
    else:
        equal = ours == twins
    if not equal.all():
        at = tuple(int(x) for x in (~equal).nonzero()[0])
        raise AssertionError(
            f"{where}: {int((~equal).sum())} of {equal.numel()} elements differ; "
            f"first at {at}: kernel {ours[at].item()!r}, twin {twins[at].item()!r}"
        )
