"""Kernels compiled before they are needed: by threads, and without being launched."""

from concurrent.futures import wait

import pytest
import torch
from transformers import Qwen3Config

from mrv2 import LLM, SamplingParams
from mrv2.kernels import jit, tl, triton
from mrv2.kernels.compile_ahead import compiling_in_parallel, only_compiling
from mrv2.kernels.registry import compile_mode
from mrv2.runner.runner import Runner
from mrv2.testing.checkpoints import make_checkpoint

SETTINGS = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 40, "max_num_tokens": 512, "max_model_len": 512}


@jit()
def _doubled(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * 2)


@jit()
def _without_sense(x, SIZE: tl.constexpr):
    tl.store(x, tl.arange(0, SIZE)[None, :, None, :])


@pytest.fixture
def compiled(monkeypatch):
    """Names of kernels in the order of their compilation, those found in Triton's cache too."""
    names: list[str] = []

    def note(*args, **kwargs):
        src = kwargs["src"] if "src" in kwargs else args[0]
        names.append(src.fn.__name__)

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    return names


def test_nothing_is_launched_but_all_is_compiled(compiled):
    x, out = torch.arange(64.0, device="cuda"), torch.full((64,), 5.0, device="cuda")
    with compiling_in_parallel(), only_compiling():
        _doubled[(1,)](x, out, SIZE=64)
        assert out.eq(5).all()
    assert compiled == ["_doubled"]
    _doubled[(1,)](x, out, SIZE=64)
    assert out.equal(2 * x)
    out.zero_()
    with compiling_in_parallel():  # a launch waits for its own
        _doubled[(1,)](x, out, SIZE=32)
        assert out[:32].equal(2 * x[:32])
    assert compiled == ["_doubled", "_doubled"]


def test_what_cant_be_compiled_is_an_error_of_its_launch():
    x = torch.zeros(16, device="cuda")
    with compiling_in_parallel(), only_compiling():
        _without_sense[(1,)](x, SIZE=16)
    with pytest.raises(triton.CompilationError):
        _without_sense[(1,)](x, SIZE=16)


def test_an_error_leaves_nothing_behind():
    x = torch.zeros(64, device="cuda")

    def stopped():
        with compiling_in_parallel(), only_compiling():
            for _ in range(2):
                _doubled[(1,)](x, x, SIZE=16)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert compile_mode.get() is None
    x += 1
    _doubled[(1,)](x, x, SIZE=16)
    assert x.tolist() == [2.0] * 16 + [1.0] * 48


def test_kernels_of_others_are_compiled_where_they_are_met():
    x = torch.ones(64, device="cuda")
    with compiling_in_parallel(), compiling_in_parallel():
        kernel = triton.jit(_doubled.fn).warmup(x, x, SIZE=8, grid=(1,))
        kernel._init_handles()
        assert kernel.n_regs > 0


def test_captures_meet_no_layer_whose_kernels_are_not_compiled(tmp_path, monkeypatch, compiled):
    config = Qwen3Config(
        vocab_size=500,
        hidden_size=640,  # no other test's size, as above
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = make_checkpoint(tmp_path / "model", config)
    ahead: list[str] = []
    capture = Runner.capture_common

    def noting(runner):
        wait(compile_mode.get().raw_futures)  # what has been asked for, not what is done by now
        ahead.extend(compiled)
        compiled.clear()
        return capture(runner)

    monkeypatch.setattr(Runner, "capture_common", noting)
    with LLM(str(folder), **SETTINGS) as llm:
        of_layers = {"_project_normed_tokens_kernel", "_gate_normed_tokens_kernel", "_project_onto_tokens_kernel"}
        of_layers |= {"_project_normed_kernel", "_gate_normed_kernel", "_project_onto_kernel"}
        of_layers |= {"_decode_attention_kernel", "_prefill_attention_kernel", "_qk_norm_rope_cache_kernel"}
        assert of_layers <= set(ahead)
        assert not of_layers & set(compiled)
        params = SamplingParams(temperature=0, max_tokens=8)
        got = [result.outputs[0].token_ids for result in llm.generate([[1, 2, 3]] * 3, params)]
    with LLM(str(folder), graphs=False, **SETTINGS) as llm:
        assert [result.outputs[0].token_ids for result in llm.generate([[1, 2, 3]] * 3, params)] == got
