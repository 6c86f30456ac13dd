"""How kernels are declared, dispatched and compared."""

import os
import subprocess
import sys

import pytest
import torch

from mrv2.errors import KernelError
from mrv2.kernels import jit, kernel, tl
from mrv2.testing import check_kernel


def double_ref(*, x, out):
    torch.mul(x, 2, out=out)


def make_kernel(body):
    """A kernel whose launcher is `body`, with the doubling twin."""

    def double(*, x, out):
        body[(1,)](x, out, x.shape[0], BLOCK=64)

    return kernel(twin=double_ref)(double)


@jit(do_not_specialize=["n"])
def _right_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out + k, tl.load(x + k, mask=k < n) * 2, mask=k < n)


@jit()
def _wrong_value_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out + k, tl.load(x + k, mask=k < n) * 2 + (k == 2).to(tl.int32), mask=k < n)


@jit()
def _short_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out + k, tl.load(x + k, mask=k < n) * 2, mask=k < n - 1)


@jit()
def _past_the_end_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out + k, tl.load(x + k, mask=k < n) * 2, mask=k < n + 1)


@jit()
def _before_the_start_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out + k, tl.load(x + k, mask=k < n) * 2, mask=k < n)
    tl.store(out - 1, 0)


@jit()
def _input_writer_kernel(x, out, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    value = tl.load(x + k, mask=k < n)
    tl.store(out + k, value * 2, mask=k < n)
    tl.store(x + k, value + 1, mask=k < n)


def inputs(rng):
    n = int(rng.integers(3, 64))
    return {"x": torch.from_numpy(rng.integers(0, 99, n)).int(), "out": torch.zeros(n, dtype=torch.int32)}


def test_check_kernel_accepts_a_right_kernel():
    check_kernel(make_kernel(_right_kernel), inputs, outputs=("out",))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_wrong_value_kernel, r"argument out: 1 of \d+ elements differ; first at \(2,\)"),
        (_short_kernel, r"argument out: 1 of \d+ elements differ"),
        (_past_the_end_kernel, "argument out, kernel: wrote past the tensor"),
        (_before_the_start_kernel, "argument out, kernel: wrote before the tensor"),
        (_input_writer_kernel, r"argument x: \d+ of \d+ elements differ"),
    ],
)
def test_check_kernel_finds_a_wrong_one(body, message):
    with pytest.raises(AssertionError, match=message):
        check_kernel(make_kernel(body), inputs, outputs=("out",))


def test_a_twin_with_other_parameters_is_refused():
    def launcher(*, x, y):
        pass

    with pytest.raises(KernelError, match=r"takes \(x, y\), its twin \(x, out\)"):
        kernel(twin=double_ref)(launcher)


def test_cpu_tensors_run_the_twin():
    def launcher(*, x, out):
        raise AssertionError("the launcher ran")

    x, out = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    kernel(twin=double_ref)(launcher)(x=x, out=out)
    assert out.tolist() == [0, 2, 4, 6, 8]


def run_python(code, **more):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


CODE = """
import torch
from mrv2.kernels import gated_act as k
ran = []
launch, twin = k.triton, k.twin
k.triton = lambda **kw: (ran.append("triton"), launch(**kw))
k.twin = lambda **kw: (ran.append("twin"), twin(**kw))
out = torch.zeros(1, 2)
k(gate_up=torch.tensor([[-1.0, 2.0, 3.0, 4.0]]), act="relu", out=out)
print(*ran, out.tolist())
"""


def test_the_interpreter_runs_when_asked_for():
    for more, ran in (({"TRITON_INTERPRET": "1"}, "triton"), ({}, "twin")):
        done = run_python(CODE, **more)
        assert done.stdout == f"{ran} [[0.0, 8.0]]\n", done.stderr


def test_kernels_work_without_triton():
    assert run_python("import sys; sys.modules['triton'] = None" + CODE).stdout == "twin [[0.0, 8.0]]\n"


def test_interpreting_too_late_is_refused():
    code = "import torch, triton\nfrom mrv2.testing import interpret_kernels\ninterpret_kernels()"
    if torch.cuda.is_available():
        pytest.skip("with a GPU nothing is interpreted")
    done = run_python(code)
    assert "MRV2-310" in done.stderr
    assert "conftest.py" in done.stderr
