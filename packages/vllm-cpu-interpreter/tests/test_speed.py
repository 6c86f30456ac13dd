"""The quicker interpreter computes the same, and puts Triton's language back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

SCRIPT = """
import sys
sys.path.insert(0, {src!r})
import torch, triton, triton.language as tl
from triton.runtime import interpreter
from mrv2_vllm_cpu_interpreter import speed


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def turned(x, keep):
    return tl.where(keep, x, -x)


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, table_ptr, out_ptr, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    row = tl.load(table_ptr + i, mask=inside, other=0)
    j = tl.arange(0, WIDE)
    square = x[:, None] * j[None, :].to(tl.float32) + row[:, None]
    best, at = tl.max(square, 1, return_indices=True)
    total = tl.sum(square, 1) + tl.reduce(square, 1, larger) + tl.cumsum(square, 1).sum(1)
    for k in tl.range(0, 3):
        total += tl.exp(-k * tl.abs(x))
    if tl.program_id(0) == 0:
        total += tl.cdiv(n, 3) + tl.max(x, 0)
    value = turned(total + best, row % 2 == 0) + at
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=inside)


def run(dtype):
    x = torch.linspace(-2, 3, 37)
    table = torch.arange(37, dtype=torch.int32) * 7 % 11
    out = torch.zeros(37, dtype=dtype)
    kernel[(triton.cdiv(37, 16),)](x, table, out, 37, BLOCK=16, WIDE=4)
    return out


def language():
    owners = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base, tl.dtype)
    return [{{name: value for name, value in vars(owner).items() if name != "__init__"}} for owner in owners]


dtypes = (torch.float32, torch.bfloat16, torch.int32)
slow, before = [run(dtype) for dtype in dtypes], language()
speed.apply()
speed.apply()
quick = [run(dtype) for dtype in dtypes]
assert all(torch.equal(a, b) for a, b in zip(slow, quick)), (slow, quick)
assert slow[0].unique().numel() > 30
assert language() == before


@triton.jit
def failing(x_ptr):
    tl.static_assert(False, "as meant")


try:
    failing[(1,)](torch.zeros(1))
except interpreter.InterpreterError as error:
    assert "as meant" in str(error)
else:
    raise AssertionError("nothing was raised")
assert language() == before
print("the same")
"""


def test_kernels_compute_the_same(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "script.py"  # kernels need a file
    file.write_text(SCRIPT.format(src=str(SRC)))
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.strip().endswith("the same"), done.stderr
