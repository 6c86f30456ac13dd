"""What the package does to Triton and vLLM, and where it refuses to."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"


def run(code, *paths):
    script = f"import sys; sys.path[:0] = {[str(p) for p in paths]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("cuda = '12.8'", "cuda 12.8"),
        ("cuda: Optional[str] = '13.0'", "cuda 13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'", "hip 7.1"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", None),
    ],
)
def test_a_gpu_build_of_pytorch_is_refused_by_name(tmp_path, line, refused):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = 'x'\n{line}\n")
    result = run("import mrv2_vllm_cpu_interpreter", tmp_path, SRC)
    if refused is None:
        assert result.returncode == 0, result.stderr
    else:
        assert f"GPU build of PyTorch ({refused})" in result.stderr
        assert "pip uninstall mrv2-vllm-cpu-interpreter" in result.stderr


@pytest.fixture
def patches():
    pytest.importorskip("vllm", reason="vLLM isn't installed: make test-vllm")
    from mrv2_vllm_cpu_interpreter import patches

    patches.apply()
    patches.apply()
    return patches


def test_loads_take_masks_that_became_integers(patches):
    import numpy as np
    import triton.language as tl
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    assert "cpu" in backends
    source = np.arange(4, dtype=np.int32)
    pointers = TensorHandle(source.ctypes.data + 4 * np.arange(4, dtype=np.uint64), tl.pointer_type(tl.int32))
    mask = TensorHandle(np.array([0, 1, 1, 0], dtype=np.uint8), tl.int1)
    other = TensorHandle(np.full(4, 7, dtype=np.int32), tl.int32)
    loaded = InterpreterBuilder().create_masked_load(pointers, mask, other, None, False)
    assert loaded.data.tolist() == [7, 1, 2, 7]


def test_top_k_and_top_p_go_through_pytorch(patches):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [1.0, 4.0, 3.0, 2.0]])
    kept = apply_top_k_top_p(logits, torch.tensor([2, 4]), torch.tensor([1.0, 0.5])).isfinite()
    assert kept.tolist() == [[False, True, True, False], [False, True, False, False]]
