"""CUDA graphs with layers of a real model's sizes: bfloat16, dependent launches, and memory that is nearly full."""

import gc
import random

import pytest
import torch
from transformers import Qwen3Config

from mrv2 import LLM, SamplingParams
from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.kernels import dependent
from mrv2.kernels.cuda_graph import CudaRecorder
from mrv2.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint with the sizes of a real model's layers."""
    config = Qwen3Config(
        vocab_size=4000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "model", config)


WIDE_SETTINGS = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "num_blocks": 3000}


def test_bf16_at_real_sizes(wide):
    """Where cuBLAS has workspaces and split products: teacher-forced, since ties flip."""
    folder, settings = wide, WIDE_SETTINGS
    rng = random.Random(0)
    batch = [[rng.randrange(4000) for _ in range(rng.randint(1, 200))] for _ in range(64)]
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=1)
    results = []
    for graphs in (False, True):
        with LLM(str(folder), graphs=graphs, **settings) as llm:
            results.append([r.outputs[0] for r in llm.generate(batch, params)])
            plain = llm.generate(batch, SamplingParams(temperature=0, max_tokens=32))
            if graphs:
                assert llm.graph_stats.eager == {}
                assert llm.graph_stats.replays > 50
    agree = total = 0
    for eager_out, out, same in zip(*results, plain, strict=True):
        assert len(same.outputs[0].token_ids) == 32
        for a, b in zip(eager_out.logprobs, out.logprobs, strict=True):
            total += 1
            if a.token_id != b.token_id:
                break
            agree += 1
            assert abs(a.logprob - b.logprob) < 0.2
    assert agree > 0.8 * total


@pytest.mark.parametrize("count", [1, 4, 5, 8, 16, 32])
def test_dependent_launches_change_no_bit(wide, count, monkeypatch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no such launches")
    config = EngineConfig(**(WIDE_SETTINGS | {"max_num_seqs": count, "max_num_tokens": 8192}))
    loaded, rng = load(str(wide), config), random.Random(count)
    batch = [[rng.randrange(4000) for _ in range(rng.randint(1, 200))] for _ in range(count)]
    ranked = SamplingParams(temperature=0, max_tokens=24, logprobs=3)

    def outputs():
        with LLM.from_parts(loaded, config, assemble(loaded, config)) as llm:
            greedy = llm.generate(batch, SamplingParams(temperature=0, max_tokens=24))
            with_logprobs = llm.generate(batch, ranked)
            assert llm.graph_stats.eager == {}
        return [r.outputs[0].token_ids for r in greedy], [r.outputs[0].logprobs for r in with_logprobs]

    assert dependent.dependence(torch.empty(count, 1, device="cuda")) != dependent.NEVER
    on = outputs()
    monkeypatch.setattr(dependent, "DEPENDENT_TOKENS", 0)
    assert dependent.dependence(torch.empty(count, 1, device="cuda")) == dependent.NEVER
    assert outputs() == on


def test_a_capture_takes_memory_that_was_only_kept_for_later():
    device, size = torch.device("cuda", torch.cuda.current_device()), 64 << 20
    gc.collect()
    torch.cuda.empty_cache()  # or there could be room for what must not fit
    recorder = CudaRecorder(device)
    recorder.record(lambda: torch.zeros(8, device=device))
    kept = torch.empty(2 * size, dtype=torch.uint8, device=device)
    del kept
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (1 << 20)) / total, device)
    try:
        out = torch.zeros(4, device=device)
        replay = recorder.record(lambda: out.copy_(torch.ones(size // 4, device=device)[:4]))
        assert out.tolist() == [0.0] * 4  # captured, not run
        replay()
        assert out.tolist() == [1.0] * 4
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(lambda: torch.ones(size, device=device))
        replay()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_recorder_goes_on_after_its_first_capture_failed():
    device = torch.device("cuda", torch.cuda.current_device())
    recorder, out = CudaRecorder(device), torch.zeros(4, device=device)

    def broken():
        torch.zeros(8, device=device)
        raise LookupError("in a model")

    for _ in range(2):
        with pytest.raises(LookupError, match="in a model"):
            recorder.record(broken)
    replay = recorder.record(lambda: out.add_(torch.ones(4, device=device)))
    replay()
    replay()
    assert out.tolist() == [2.0] * 4
