"""The async engine on a GPU: no step waits for the device, and nothing is read or reused too early.

`pytest --device cuda` runs the other tests of this folder there as well.
"""

import contextlib
import random

import numpy as np
import pytest
import torch

from mrv2 import LLM
from mrv2.runner import outputs
from mrv2.sample.params import SamplingParams
from mrv2.state.staging import StagingRing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DELAY = 2_000_000
"""Cycles, about a millisecond: several times what the host needs for a step of a tiny model."""


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


@pytest.fixture(params=["compute", "copies", "both"])
def delayed(request, monkeypatch):
    """Every step, or its copy to the host, begins about a millisecond after it could."""

    def delay(parts):
        runner = parts.engine._runner
        begin, finish, start = runner.begin, runner.finish, runner._copies.start

        def late(call):
            def wrapped(*args):
                torch.cuda._sleep(DELAY)
                return call(*args)

            return wrapped

        def late_copies(tensors):
            with torch.cuda.stream(runner._copies._stream):
                torch.cuda._sleep(DELAY)
            return start(tensors)

        if request.param != "copies":
            runner.begin, runner.finish = late(begin), late(finish)
        if request.param != "compute":
            runner._copies.start = late_copies
        return parts

    return delay


@pytest.fixture
def poisoned_staging(monkeypatch):
    """A staging buffer is overwritten as soon as it is free again: a copy that still reads it sends that."""
    take = StagingRing.take

    def poisoned(ring, nbytes):
        buffer = take(ring, nbytes)
        buffer.fill(0xA5)
        return buffer

    monkeypatch.setattr(StagingRing, "take", poisoned)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_delays_and_poisoned_buffers_change_no_token(cuda_tiny, depth, delayed, poisoned_staging):
    parts = delayed(cuda_tiny.engine(depth=depth, **SMALL))
    assert run(parts, prompts(), GREEDY) == [cuda_tiny.oracle(p, 20) for p in prompts()]


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


def test_blocks_that_nobody_owns_are_neither_read_nor_written(cuda_tiny):
    parts = cuda_tiny.engine(depth=3, num_blocks=400, prefix_caching=False, **SMALL)
    layers = parts.engine._runner._forward._caches.values()
    caches = [cache for layer in layers for cache in ([layer] if isinstance(layer, torch.Tensor) else layer.values())]
    for cache in caches:
        cache[1:].fill_(float("nan"))
    owned, refs_np = set(), parts.engine.scheduler.kv.pool._refs_np
    update = parts.engine.scheduler.update

    def watched(*args):
        owned.update(np.flatnonzero(refs_np).tolist())
        return update(*args)

    parts.engine.scheduler.update = watched
    assert run(parts, prompts(), GREEDY) == [cuda_tiny.oracle(p, 20) for p in prompts()]
    free = torch.tensor([b for b in range(1, 400) if b not in owned], device="cuda")
    assert len(free) > 50
    assert all(bool(cache[free].isnan().all()) for cache in caches)


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
