"""The async engine on a GPU: no step waits for the device, and nothing is read or reused too early.

`pytest --device cuda` runs the other tests of this folder there as well.
"""

import contextlib
import gc
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from mrv2 import LLM
from mrv2.debug.runner import DELAY
from mrv2.errors import CacheWriteError
from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.runner import outputs
from mrv2.sample.params import SamplingParams
from mrv2.state.staging import StagingRing
from mrv2.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def prompts(count=8, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def run(parts, batch, params, prefix="r"):
    """Generated tokens per prompt. Requests arrive over several steps, so that prefills meet decodes."""
    requests = [parts.intake.request(f"{prefix}{i}", p, s) for i, (p, s) in enumerate(zip(batch, params, strict=True))]
    waiting = list(requests)
    while waiting or parts.engine.has_work:
        parts.engine.add(waiting[:2])
        del waiting[:2]
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


GREEDY = [SamplingParams(temperature=0, max_tokens=20)] * 8
MIXED = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=1.0, max_tokens=18, seed=1),
    SamplingParams(temperature=0.8, max_tokens=20, seed=2, top_k=9),
    SamplingParams(temperature=1.2, max_tokens=15, seed=3, top_p=0.8, logprobs=5),
    SamplingParams(temperature=0.7, max_tokens=20, seed=4, min_p=0.05),
    SamplingParams(temperature=0, max_tokens=9, logprobs=0),
    SamplingParams(temperature=2.0, max_tokens=20, seed=5, top_k=30, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(3, 4, 5)),
]
SMALL = {"block_size": 4, "max_chunk": 7}


@contextlib.contextmanager
def no_waiting():
    """Whatever makes the host wait for the device raises, except reading a step's output."""
    wait = outputs.PendingOutput.wait

    def allowed(pending):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(pending)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    outputs.PendingOutput.wait = allowed
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        outputs.PendingOutput.wait = wait


def test_the_mode_finds_a_wait():
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_waits(cuda_tiny, depth, params):
    # From the very first step on: prefills, chunks, decodes, and both together.
    parts = cuda_tiny.engine(depth=depth, **SMALL)
    with no_waiting():
        got = run(parts, prompts(), params)
    for request, (prompt, want) in enumerate(zip(prompts(), params, strict=True)):
        if want.temperature == 0:
            assert got[request] == cuda_tiny.oracle(prompt, want.max_tokens, want.stop_token_ids)


def test_preemption_and_prefix_hits_dont_wait_either(cuda_tiny):
    groups = len(cuda_tiny.engine().engine.scheduler.kv.groups)
    parts = cuda_tiny.engine(depth=2, num_blocks=1 + 17 * groups, **SMALL)
    want = [cuda_tiny.oracle(p, 20) for p in prompts()]
    with no_waiting():
        assert run(parts, prompts(), GREEDY) == want
        assert run(parts, prompts()[:1] * 8, GREEDY, "again") == want[:1] * 8
    assert parts.engine.scheduler.stats.preemptions > 0
    assert parts.engine.scheduler.stats.cached_tokens > 0


def test_seeded_draws_equal_the_cpus(cuda_tiny, tiny, request):
    name = request.node.callspec.params["cuda_tiny"]
    want = run(tiny(name, "cpu").engine(**SMALL), prompts(), MIXED)
    assert run(cuda_tiny.engine(depth=3, **SMALL), prompts(), MIXED) == want


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_delays_and_poison_change_no_token(cuda_tiny, depth, params):
    # Debug mode doesn't wait either, or it would hide what it looks for.
    parts = cuda_tiny.engine(depth=depth, debug=True, **SMALL)
    with no_waiting():
        got = run(parts, prompts(), params)
    plain = run(cuda_tiny.engine(depth=depth, **SMALL), prompts(), params)
    assert got == plain
    if params is GREEDY:
        assert got == [cuda_tiny.oracle(p, 20) for p in prompts()]


def test_poisoned_blocks_under_preemption_and_hits(cuda_tiny):
    groups = len(cuda_tiny.engine().engine.scheduler.kv.groups)
    parts = cuda_tiny.engine(depth=3, debug=True, num_blocks=1 + 17 * groups, **SMALL)
    want = [cuda_tiny.oracle(p, 20) for p in prompts()]
    assert run(parts, prompts(), GREEDY) == want
    assert run(parts, prompts()[:1] * 8, GREEDY, "again") == want[:1] * 8
    assert parts.engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("block", [-1, 30])
def test_a_write_to_a_block_that_nobody_owns_is_found(tiny, block):
    parts = tiny("llama", "cuda").engine(depth=2, debug=True, num_blocks=400, **SMALL)
    backend = parts.engine._runner._forward._backend
    attend = backend.attend

    def wrong(*args, cache, **kwargs):
        cache[block, 0, 1].zero_()
        return attend(*args, cache=cache, **kwargs)

    backend.attend = wrong
    with pytest.raises(CacheWriteError, match=f"step 1 changed block {block % 401} of "):
        run(parts, prompts(1), GREEDY[:1])


def test_a_ring_that_doesnt_wait_is_found():
    def sent(make_event):
        ring = StagingRing(64, torch.device("cuda"), depth=2, make_event=make_event)
        out = torch.zeros(6, 64, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(50 * DELAY)
        for n in range(6):
            ring.take(64)[:] = n + 1
            ring.send(out[n])
        return out.cpu()[:, 0].tolist()

    class Never:
        def record(self):
            pass

        def synchronize(self):
            pass

    assert sent(torch.cuda.Event) == [1, 2, 3, 4, 5, 6]
    assert sent(Never) != [1, 2, 3, 4, 5, 6]


def test_batches_of_other_sizes_compile_nothing(tiny, monkeypatch):
    from triton import knobs

    model = tiny("qwen3", "cuda")
    sizes = {"max_num_seqs": 24, "max_num_tokens": 200}
    run(model.engine(depth=2, **SMALL, **sizes), prompts(), MIXED)
    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(f"{seen['fn'].name}: {seen['repr']}")
    )
    for count, chunk in ((1, 3), (5, 11), (17, 20)):
        parts = model.engine(depth=2, block_size=4, max_chunk=chunk, **sizes)
        run(parts, prompts(count, seed=count), (MIXED * 3)[:count])
    assert not compiled, "\n".join(compiled)


def test_texts_equal_the_cpus(text_model):
    texts = ["the cat sat", "dépêche-toi, the rat", "猫が", "a"]
    params = [SamplingParams(temperature=t, max_tokens=24, seed=3, logprobs=2) for t in (0, 1, 0, 0.7)]

    def generate(device):
        with LLM(str(text_model), device=device, dtype="float32", max_num_seqs=3) as llm:
            return [r.outputs[0] for r in llm.generate(texts, params)]

    for ours, theirs in zip(generate("cuda"), generate("cpu"), strict=True):
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        got, want = ([t.logprob for t in out.logprobs] for out in (ours, theirs))
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_an_error_of_the_device_reaches_everyone_who_waits(text_model):
    # In a process of its own: after such an error nothing works any more.
    code = """
import sys, torch
from mrv2 import LLM, SamplingParams
from mrv2.errors import EngineError
llm = LLM(sys.argv[1], device="cuda")
llm.generate("the cat", SamplingParams(max_tokens=2))
head = llm.model.module.lm_head.forward
def broken(x):
    torch.zeros(4, device="cuda")[torch.full((1,), 2**20, device="cuda")]
    return head(x)
llm.model.module.lm_head.forward = broken
# Prompts of a size that hasn't come before are launched one by one, through this head.
for future in llm.submit(["the cat " * 12, "d", "the rat"], SamplingParams(max_tokens=30, ignore_eos=True)):
    try:
        future.result(timeout=60)
    except EngineError as error:
        print(type(error.__cause__).__name__, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(text_model)], capture_output=True, text=True, timeout=300, check=False
    )
    assert len(done.stdout.split()) == 3, done.stderr


@pytest.mark.alone
def test_the_largest_step_fits_beside_the_cache(tmp_path):
    config = LlamaConfig(
        vocab_size=150_000,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=4,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    folder = make_checkpoint(tmp_path / "model", config)
    gc.collect()
    torch.cuda.empty_cache()
    room = 8 << 30
    ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - room), dtype=torch.uint8, device="cuda")
    settings = EngineConfig(device="cuda", dtype="float32", max_num_seqs=256, max_num_tokens=4096)
    parts = assemble(load(str(folder), settings), settings)
    pool = sum(page.nbytes for page in parts.engine._runner._forward.pages)
    assert room // 8 < pool < 0.9 * room - 4 * 256 * config.vocab_size  # more than one copy of the logits was left out
    params = SamplingParams(temperature=1, top_k=70_000, top_p=0.9, min_p=0.001, logprobs=64, max_tokens=4, seed=1)
    requests = [parts.intake.request(str(i), [i + 1] * 16, params) for i in range(256)]
    parts.engine.add(requests)
    while parts.engine.has_work:
        parts.engine.step()
    assert all(len(r.tokens_np) == 20 for r in requests)
    assert parts.engine.scheduler.stats.peak_running == 256
    del ballast


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("debug", [False, True])
def test_a_gpu_that_is_not_the_current_one(text_model, debug):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = ["the cat sat", "the rat", "a"]
    want = [r.outputs[0].token_ids for r in LLM(str(text_model), device="cpu").generate(texts, params)]
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    with LLM(str(text_model), device="cuda:1", dtype="float32", num_blocks=200, debug=debug) as llm:
        assert [r.outputs[0].token_ids for r in llm.generate(texts, params)] == want
        assert torch.cuda.memory_allocated(0) == before
        assert llm.limits.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
