"""Both runners against the oracle: ragged batches, chunks, prefix hits, preemption, depth."""

import random

import pytest

from mrv2.errors import RequestError
from mrv2.runner.request import FinishReason
from mrv2.sample.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def ragged_prompts(count=8, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(parts, prompts, params=GREEDY, prefix="r"):
    """Generated tokens per prompt, in the prompts' order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [parts.intake.request(f"{prefix}{i}", p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
    parts.engine.add(requests)
    while parts.engine.has_work:
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


def expected(tiny, prompts, n=20):
    return [tiny.oracle(p, n) for p in prompts]


@pytest.mark.parametrize("runner", ["async", "sync"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_chunk": 7},
        {"max_num_tokens": 8},
        {"block_size": 4, "max_num_seqs": 3},
        {"num_blocks": 24, "block_size": 4},
    ],
    ids=["whole", "chunks-of-7", "budget-of-8", "three-rows", "preempting"],
)
def test_ragged_batch_equals_oracle(any_tiny, settings, runner):
    if "num_blocks" in settings:
        groups = any_tiny.engine().engine.scheduler.kv.groups
        settings = settings | {"num_blocks": 17 * len(groups) + 1}
    parts = any_tiny.engine(runner=runner, **settings)
    prompts = ragged_prompts()
    assert run(parts, prompts) == expected(any_tiny, prompts)
    assert (parts.engine.scheduler.stats.preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [32, 33, 34])
def test_a_prompt_whose_last_chunk_is_one_token_is_still_a_prompt(tiny, length, depth):
    """It runs among the decodes; its output is its request's first token all the same."""
    parts = tiny("llama").engine(depth=depth, max_num_tokens=16)
    prompt = [i % 61 for i in range(length)]
    request = parts.intake.request("a", prompt, GREEDY)
    parts.engine.add([request])
    while parts.engine.scheduler.stats.generated_tokens < 3:
        parts.engine.step()
    assert request.first_token is not None
    assert parts.engine.scheduler.stats.prefill_tokens == length
    again = parts.intake.request("b", prompt, GREEDY)  # finds what has been confirmed, while the other still runs
    parts.engine.add([again])
    while parts.engine.has_work:
        parts.engine.step()
    assert again.num_cached_tokens == (length - 1) // 16 * 16
    want = tiny("llama").oracle(prompt, 20)
    assert [r.tokens_np[length:].tolist() for r in (request, again)] == [want, want]


@pytest.mark.parametrize("idle", [True, False])
def test_what_has_ended_is_told_before_its_blocks_are_given_back(tiny, idle):
    parts = tiny("llama").engine(depth=2)
    engine, pool, prompt = parts.engine, parts.engine.scheduler.kv.pool, [1, 2, 3] * 12
    engine.add([parts.intake.request("a", prompt, GREEDY)])
    while engine.has_work:
        events = engine.step()
    assert [request.req_id for request in events.ended] == ["a"]
    assert pool.num_free < pool.num_usable
    if idle:
        assert engine.use_idle_time()
        assert not engine.use_idle_time()
        assert pool.num_free == pool.num_usable
    assert run(parts, [prompt], prefix="again") == expected(tiny("llama"), [prompt])
    assert engine.scheduler.stats.cached_tokens > 0


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_in_flight_change_nothing(any_tiny, depth):
    parts = any_tiny.engine(depth=depth, max_chunk=5, num_blocks=70, block_size=4)
    prompts = ragged_prompts(seed=1)
    assert run(parts, prompts) == expected(any_tiny, prompts)


@pytest.mark.parametrize("extra", [-1, 0, 1, 5])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_prefix_hits_around_block_edges(any_tiny, blocks, extra):
    parts = any_tiny.engine(block_size=4)
    length = 4 * blocks + extra
    prompt = ragged_prompts(1, seed=length, longest=1)[0] * length
    prompt = [(t + i) % 61 for i, t in enumerate(prompt)]
    cold = run(parts, [prompt], prefix="cold")
    hot = run(parts, [prompt, prompt + cold[0][:3]], prefix="hot")
    assert cold == [any_tiny.oracle(prompt, 20)]
    assert hot == [cold[0], any_tiny.oracle(prompt + cold[0][:3], 20)]
    stats = parts.engine.scheduler.stats
    assert stats.cached_tokens >= 2 * ((length - 1) // 4) * 4


def test_prefix_hit_skips_the_computation(tiny):
    parts = tiny("llama").engine(block_size=4)
    prompt = ragged_prompts(1, seed=5)[0] + [1] * 20
    run(parts, [prompt])
    before = parts.engine.scheduler.stats.prefill_tokens
    run(parts, [prompt], prefix="again")
    assert parts.engine.scheduler.stats.prefill_tokens - before == len(prompt) - (len(prompt) - 1) // 4 * 4


def test_options_that_no_part_reads_are_refused(tiny):
    parts = tiny("llama").engine()
    with pytest.raises(RequestError, match="'scale', which the model's adapter doesn't know"):
        parts.intake.request("a", [1, 2], SamplingParams(extra_args={"scale": 1}))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_follow_up_after_a_stop_hits_only_what_was_computed(any_tiny, depth, end):
    # The device stops a row itself; steps already in flight for it then write nothing.
    parts = any_tiny.engine(block_size=4, depth=depth)
    prompt = [1, 2, 3, 4, 5, 6]
    free = any_tiny.oracle(prompt, 30)
    for n in range(2, 12):
        if free[n - 1] in free[: n - 1]:
            continue
        params = SamplingParams(temperature=0, max_tokens=n if end == "length" else 40, stop_token_ids=(free[n - 1],))
        first = run(parts, [prompt], params, prefix=f"first{n}")[0]
        follow_up = [*prompt, *first, 7, 8]
        assert run(parts, [follow_up], prefix=f"next{n}") == [any_tiny.oracle(follow_up, 20)]


@pytest.mark.parametrize("depth", [1, 3])
def test_stop_tokens_and_limits(any_tiny, depth):
    prompts = ragged_prompts(seed=2)
    free = expected(any_tiny, prompts)
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i * 2, stop_token_ids=(free[i][i % 5],) if i % 2 else ())
        for i in range(8)
    ]
    parts = any_tiny.engine(depth=depth)
    want = [any_tiny.oracle(p, s.max_tokens, s.stop_token_ids) for p, s in zip(prompts, params, strict=True)]
    assert run(parts, prompts, params) == want


def test_the_context_ends_generation(tiny):
    parts = tiny("qwen3").engine(max_model_len=32, depth=3)
    request = parts.intake.request("a", [5] * 20, SamplingParams(temperature=0, max_tokens=None))
    parts.engine.add([request])
    while parts.engine.has_work:
        parts.engine.step()
    assert len(request.tokens_np) == 32
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_that_fills_the_cache_ends_there(tiny):
    parts = tiny("llama").engine(num_blocks=9, block_size=4, depth=2)
    out = run(parts, [[1] * 10, [2] * 10], SamplingParams(temperature=0, max_tokens=None))
    oracle = tiny("llama").oracle
    assert out == [oracle([1] * 10, 22), oracle([2] * 10, 22)]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_seeded_request_depends_on_nothing_around_it(tiny, temperature):
    model = tiny("qwen2")
    mine = SamplingParams(temperature=temperature, max_tokens=24, seed=7, top_k=20, top_p=0.9)
    prompt = ragged_prompts(1, seed=9)[0]
    alone = run(model.engine(), [prompt], mine)[0]
    others = ragged_prompts(7, seed=10)
    mixed = [SamplingParams(temperature=t, max_tokens=30) for t in (0, 1, 0.5, 2, 0, 1, 1)]
    for settings in ({}, {"max_chunk": 3}, {"num_blocks": 18, "depth": 3}, {"runner": "sync"}):
        parts = model.engine(block_size=8, **settings)
        out = run(parts, [*others, prompt], [*mixed, mine])
        assert out[-1] == alone
        assert (parts.engine.scheduler.stats.preemptions > 0) == ("num_blocks" in settings)


def test_unseeded_requests_follow_the_engine_seed(tiny):
    prompts = ragged_prompts()
    params = SamplingParams(temperature=1, max_tokens=12)
    one, again, other = (run(tiny("llama").engine(seed=s), prompts, params) for s in (1, 1, 2))
    assert one == again
    assert one != other
