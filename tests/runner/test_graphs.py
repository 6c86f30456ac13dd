"""Replayed steps give what eager ones give: every size, sampler and depth, with requests that come and go.

On a CPU a recorder of operations stands in for CUDA graphs; with `--device cuda` they are real.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv2.layers.custom import CacheHandle
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.graphs import GraphPlan, GraphSupport
from mrv2.runner.graphs import GraphKey, default_plan, find_key
from mrv2.runner.request import FinishReason
from mrv2.sample.params import SamplingParams
from mrv2.sample.states import SamplerNeeds
from mrv2.sample.tiers import GREEDY, RANDOM, TIERS, tier_of
from mrv2.state.view import Limits
from mrv2.testing.freeze import replay_steps
from mrv2.testing.recorder import RecordedOps

PLAIN = SamplingParams(temperature=0, max_tokens=20)
MIXED = [
    PLAIN,
    SamplingParams(temperature=1.0, max_tokens=18, seed=1),
    SamplingParams(temperature=0.8, max_tokens=20, seed=2, top_k=9),
    SamplingParams(temperature=1.2, max_tokens=15, seed=3, top_p=0.8, logprobs=5),
    SamplingParams(temperature=0.7, max_tokens=20, seed=4, min_p=0.05),
    SamplingParams(temperature=0, max_tokens=9, logprobs=0),
    SamplingParams(temperature=2.0, max_tokens=20, seed=5, top_k=30, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(3, 4, 5)),
]
SMALL = {"block_size": 4, "max_chunk": 7}
PLAN = GraphPlan(num_reqs=(1, 2, 4, 8), max_seq_lens=(12, 24, 128), num_tokens=(5, 16, 64))


def graphed(model, plan=PLAN, **settings):
    """An engine with graphs of these sizes, none of them captured yet."""
    parts = model.engine(graphs=False, **settings)
    if parts.limits.device.type == "cuda":
        from mrv2.kernels.cuda_graph import CudaRecorder

        replay_steps(parts, CudaRecorder(parts.limits.device), plan)
    else:
        replay_steps(parts, RecordedOps(), plan)
    return parts


def graphs_of(parts):
    return parts.engine._runner.graphs


def ragged_prompts(count=8, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(parts, prompts, params=PLAIN, prefix="r", at_once=2):
    """Generated tokens per prompt. A few arrive in each step, so that prefills meet decodes."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [parts.intake.request(f"{prefix}{i}", p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
    waiting = list(requests)
    while waiting or parts.engine.has_work:
        parts.engine.add(waiting[:at_once])
        del waiting[:at_once]
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


# -- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_come_and_go(any_tiny, depth):
    parts = graphed(any_tiny, depth=depth, **SMALL)
    prompts = ragged_prompts()
    want = [any_tiny.oracle(p, 20) for p in prompts]
    assert run(parts, prompts) == want
    while parts.engine.use_idle_time():
        pass
    assert run(parts, prompts[:5], prefix="more", at_once=1) == want[:5]
    others = ragged_prompts(seed=1)
    assert run(parts, others, prefix="other") == [any_tiny.oracle(p, 20) for p in others]
    stats = graphs_of(parts).stats
    assert stats.replays > 40
    assert stats.eager == {}
    # A kernel of the model's own may go as far as the longest query, which in a graph would be all tokens.
    own_kernels = any(isinstance(m, CacheHandle) for m in parts.engine._runner._forward.model.modules())
    if own_kernels:
        assert stats.prompts == 0
    else:  # each size once
        assert 0 < stats.prompts_eager <= len(PLAN.num_tokens) < stats.prompts


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 8])
def test_every_size_and_bound(any_tiny, num_reqs):
    # Prompts of one token each: nothing but decodes, from the first step on.
    parts = graphed(any_tiny, prefix_caching=False)
    prompts = [[7 * i % 61] for i in range(num_reqs)]
    new = 27
    params = SamplingParams(temperature=0, max_tokens=new)
    assert run(parts, prompts, params, at_once=num_reqs) == [any_tiny.oracle(p, new) for p in prompts]
    graphs = graphs_of(parts)
    size = next(n for n in PLAN.num_reqs if n >= num_reqs)
    assert set(graphs._replays) == {GraphKey(size, bound, GREEDY) for bound in PLAN.max_seq_lens}
    assert graphs.stats.replays == parts.engine.scheduler.stats.steps == new


def test_draws_and_logprobs_equal_eager_ones(any_tiny):
    results = []
    for parts in (any_tiny.engine(graphs=False, **SMALL), graphed(any_tiny, depth=3, **SMALL)):
        tokens = [run(parts, ragged_prompts(), MIXED)]
        for k, params in enumerate(MIXED):  # alone, so that each tier is used
            tokens.append(run(parts, ragged_prompts(2, seed=k, longest=9), replace(params, max_tokens=6), f"{k}-"))
        results.append(tokens)
    assert results[0] == results[1]
    stats = graphs_of(parts).stats
    assert stats.eager == {}
    assert {key.sampler for key in graphs_of(parts)._replays} == {tier_of(n) for n in MANY_NEEDS}


def test_logprobs_of_decodes_and_prefills_in_one_step(tiny):
    """A step in two parts, each with its view (P4)."""

    def logprobs(parts):
        params = SamplingParams(temperature=0, max_tokens=9, logprobs=3)
        requests = [parts.intake.request(str(i), p, params) for i, p in enumerate(ragged_prompts(4, seed=2))]
        for number, request in enumerate(requests):
            request.watched, request.number = True, number
        seen, waiting = {}, list(requests)
        while waiting or parts.engine.has_work:
            parts.engine.add(waiting[:1])
            del waiting[:1]
            events = parts.engine.step()
            for k, number in enumerate(events.numbers_np.tolist()):
                ids, values = events.logprobs.token_ids_np[k], events.logprobs.logprobs_np[k]
                seen.setdefault(number, []).append((ids.tolist(), values))
        return seen

    model = tiny("llama")
    eager, replayed = logprobs(model.engine(graphs=False, max_chunk=7)), logprobs(graphed(model, max_chunk=7))
    assert eager.keys() == replayed.keys() == {0, 1, 2, 3}
    for number, steps in eager.items():
        for (ids, values), (other_ids, other_values) in zip(steps, replayed[number], strict=True):
            assert ids == other_ids
            torch.testing.assert_close(torch.tensor(values), torch.tensor(other_values), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 3])
def test_preemption_and_prefix_hits(any_tiny, depth):
    groups = len(any_tiny.engine().engine.scheduler.kv.groups)
    parts = graphed(any_tiny, depth=depth, num_blocks=1 + 17 * groups, **SMALL)
    want = [any_tiny.oracle(p, 20) for p in ragged_prompts()]
    assert run(parts, ragged_prompts()) == want
    assert run(parts, ragged_prompts()[:1] * 8, prefix="again") == want[:1] * 8
    assert parts.engine.scheduler.stats.preemptions > 0
    assert parts.engine.scheduler.stats.cached_tokens > 0
    assert graphs_of(parts).stats.eager == {}


def test_aborts_between_replays(any_tiny):
    parts = graphed(any_tiny, depth=3, **SMALL)
    requests = [parts.intake.request(str(i), p, PLAIN) for i, p in enumerate(ragged_prompts())]
    parts.engine.add(requests)
    steps = 0
    while parts.engine.has_work:
        parts.engine.step()
        steps += 1
        if steps % 5 == 0:
            parts.engine.end(str(steps // 5), FinishReason.ABORT)
    for request, prompt in zip(requests, ragged_prompts(), strict=True):
        got = request.tokens_np[len(prompt) :].tolist()
        assert got == any_tiny.oracle(prompt, 20)[: len(got)]
    assert sum(r.finish_reason is FinishReason.ABORT for r in requests) >= 3


@pytest.mark.parametrize("num_reqs", [1, 3, 5])
def test_nothing_reads_what_padding_leaves(any_tiny, num_reqs):
    parts = graphed(any_tiny, prefix_caching=False, **SMALL)
    runner = parts.engine._runner
    for page in runner._forward.pages:
        page.fill_(0xFF)  # NaN, scratch included
    for name, buffer in vars(runner._buffers).items():
        if isinstance(buffer, torch.Tensor) and name != "batch":
            buffer.fill_(0)
    runner._requests.table.all_token_ids.fill_(2**30)
    prompts = ragged_prompts(num_reqs, seed=3)
    assert run(parts, prompts) == [any_tiny.oracle(p, 20) for p in prompts]


# -- keys --------------------------------------------------------------------------------------------------

needs = st.one_of(
    st.builds(
        SamplerNeeds,
        random=st.just(False),
        min_p=st.just(False),
        top_k=st.just(False),
        top_p=st.just(False),
        num_ranks=st.just(0),
        num_logprobs=st.none() | st.integers(0, 5),
    ),
    st.builds(
        SamplerNeeds,
        random=st.just(True),
        min_p=st.booleans(),
        top_k=st.booleans(),
        top_p=st.booleans(),
        num_ranks=st.integers(0, 3000),
        num_logprobs=st.none() | st.integers(0, 5),
    ),
)
MANY_NEEDS = [
    SamplerNeeds(r, m, k, p, n, logprobs)
    for r, m, k, p, n, logprobs in (
        (False, False, False, False, 0, None),
        (True, False, False, False, 0, None),
        (True, True, False, False, 0, None),
        (True, False, True, False, 9, None),
        (True, False, False, True, 0, 5),
    )
]


@given(rows=st.integers(1, 1024), tokens=st.integers(2, 200_000), data=st.data(), needs=needs)
def test_every_step_of_decodes_has_a_key(rows, tokens, data, needs):
    plan = default_plan(Limits(max_rows=rows, max_num_tokens=rows, max_model_len=tokens))
    num_reqs, seq_len = data.draw(st.integers(1, rows)), data.draw(st.integers(1, tokens))
    key = find_key(plan, num_reqs, seq_len, tier_of(needs))
    assert isinstance(key, GraphKey)
    assert num_reqs <= key.num_reqs <= rows
    assert seq_len <= key.max_seq_len <= tokens
    assert key.num_reqs - num_reqs < max(32, num_reqs)
    # What a lookup gives is what capturing its own sizes gives.
    assert find_key(plan, key.num_reqs, key.max_seq_len, key.sampler) == key
    assert len(plan.num_reqs) <= 11 + rows // 32
    assert list(plan.num_reqs) == sorted(set(plan.num_reqs))
    assert list(plan.max_seq_lens) == sorted(set(plan.max_seq_lens))


@given(rows=st.integers(1, 1024), more=st.integers(0, 70_000), tokens=st.integers(2, 200_000), data=st.data())
def test_every_step_of_prompts_has_a_key(rows, more, tokens, data):
    plan = default_plan(Limits(max_rows=rows, max_num_tokens=rows + more, max_model_len=tokens))
    num_tokens, seq_len = data.draw(st.integers(1, rows + more)), data.draw(st.integers(1, tokens))
    num_reqs = data.draw(st.integers(1, min(rows, num_tokens)))
    key = find_key(plan, num_reqs, seq_len, GREEDY, num_tokens=num_tokens)
    assert isinstance(key, GraphKey)
    assert num_reqs <= key.num_reqs <= rows
    assert num_tokens <= key.num_tokens <= max(plan.num_tokens)
    assert seq_len <= key.max_seq_len <= tokens
    # Tokens of padding cost as much as others, unless launching costs more.
    assert key.num_tokens - num_tokens <= max(256, num_tokens // 8)
    assert find_key(plan, key.num_reqs, key.max_seq_len, GREEDY, num_tokens=key.num_tokens) == key
    assert list(plan.num_tokens) == sorted(set(plan.num_tokens))
    assert max(plan.num_tokens) == rows + more
    assert len(plan.num_tokens) <= 70


@given(needs)
def test_a_tier_has_all_that_is_needed(needs):
    tier = tier_of(needs)
    if needs.num_logprobs is not None:
        assert tier is None
    elif tier is None:
        assert needs.random
        assert needs.top_k or needs.top_p
        assert not 0 < needs.num_ranks <= 1024
    else:
        assert tier in TIERS
        assert tier.random >= needs.random
        assert tier.min_p >= needs.min_p
        if needs.random and (needs.top_k or needs.top_p):
            assert tier.top_k
            assert tier.top_p
            assert tier.num_ranks >= needs.num_ranks


# -- when ----------------------------------------------------------------------------------------------------


def test_sizes_that_the_adapter_leaves_out_run_eagerly_and_it_is_said(tiny):
    model = tiny("llama")
    parts = graphed(model, replace(PLAN, num_reqs=(1, 2)))
    prompts = ragged_prompts(4, seed=5)
    with pytest.warns(UserWarning, match="a step of [34] decodes runs without a CUDA graph: graph_plan") as said:
        assert run(parts, prompts, at_once=4) == [model.oracle(p, 20) for p in prompts]
    assert len(said) == 1
    stats = graphs_of(parts).stats
    assert list(stats.eager) == ["graph_plan() has no size for more than 2 requests"]
    assert 10 < sum(stats.eager.values()) <= parts.engine.scheduler.stats.steps


def test_idle_time_is_used_for_what_may_come(tiny):
    model = tiny("llama")
    parts = graphed(model, replace(PLAN, max_seq_lens=(128,)))
    runner, engine = parts.engine._runner, parts.engine
    assert not engine.use_idle_time()  # nothing is known to be needed
    run(parts, ragged_prompts(1))
    assert engine.use_idle_time()
    while engine.use_idle_time():
        pass
    keys = set(runner.graphs._replays)
    assert {key for key in keys if not key.num_tokens} == {GraphKey(n, 128, GREEDY) for n in PLAN.num_reqs}
    assert {key for key in keys if key.num_tokens} == {GraphKey(8, 128, GREEDY, 64)}
    captures = runner.graphs.stats.captures
    prompts = [p[:1] for p in ragged_prompts(7, seed=8)]
    assert run(parts, prompts, prefix="next", at_once=1) == [model.oracle(p, 20) for p in prompts]
    assert runner.graphs.stats.captures == captures == len(keys)


def test_a_long_prompt_doesnt_lengthen_the_decodes_beside_it(tiny):
    model = tiny("llama")
    parts = graphed(model, max_chunk=7)
    short = SamplingParams(temperature=0, max_tokens=6)
    batch = [[1, 2], [3] * 60]
    assert run(parts, batch, short, at_once=1) == [model.oracle(p, 6) for p in batch]
    # The first request, while the other one's prompt was computed, and the other one.
    assert {key.max_seq_len for key in graphs_of(parts)._replays if not key.num_tokens} == {12, 128}


def test_common_sizes_are_captured_at_the_start_from_the_largest_on(tiny):
    parts = graphed(tiny("qwen3"))
    parts.engine._runner.capture_common()
    keys = list(graphs_of(parts)._replays)
    assert keys[:2] == [GraphKey(8, 128, tier, 64) for tier in (GREEDY, RANDOM)]
    del keys[:2]
    assert [key.num_reqs for key in keys] == sorted((key.num_reqs for key in keys), reverse=True)
    assert {key.max_seq_len for key in keys} == {PLAN.max_seq_lens[0]}
    assert len(keys) == 2 * len(PLAN.num_reqs)
    prompts = ragged_prompts(3, longest=1)
    short = SamplingParams(temperature=0, max_tokens=10)
    assert run(parts, prompts, short) == [tiny("qwen3").oracle(p, 10) for p in prompts]
    assert graphs_of(parts).stats.captures == 2 + len(keys)


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_are_launched_one_by_one_once_for_each_size(tiny, depth):
    """No idle time: a busy engine has none, and launching costs the host as much as a capture."""
    model = tiny("llama")
    parts = graphed(model, depth=depth, prefix_caching=False)
    short = SamplingParams(temperature=0, max_tokens=3)
    for number, lengths in enumerate(((9, 7), (3, 2), (16,), (4, 12), (5,))):
        batch = [[(7 * i + n) % 61 for i in range(n)] for n in lengths]
        assert run(parts, batch, short, f"{number}-") == [model.oracle(p, 3) for p in batch]
    stats = graphs_of(parts).stats
    assert {key for key in graphs_of(parts)._replays if key.num_tokens} == {
        GraphKey(8, 128, GREEDY, 16),
        GraphKey(8, 128, GREEDY, 5),
    }
    assert (stats.prompts_eager, stats.prompts) == (2, 3)


def test_a_size_of_prompts_that_nothing_follows_is_captured_when_idle(tiny):
    parts = graphed(tiny("llama"), prefix_caching=False)
    run(parts, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    key = GraphKey(8, 128, GREEDY, 5)
    assert key not in graphs_of(parts)._replays
    while parts.engine.use_idle_time():
        pass
    assert key in graphs_of(parts)._replays


@pytest.mark.parametrize("support", [GraphSupport.UNIFORM_1, GraphSupport.UNIFORM_K])
def test_a_model_that_can_only_replay_uniform_steps_has_its_prompts_launched(tiny, support, monkeypatch):
    monkeypatch.setattr(DefaultModelState, "graph_support", lambda self: support)
    model = tiny("llama")
    parts = graphed(model)
    assert run(parts, [[1, 2, 3]] * 3, at_once=1) == [model.oracle([1, 2, 3], 20)] * 3
    stats = graphs_of(parts).stats
    assert stats.prompts == 0
    assert stats.prompts_eager
    assert stats.replays


def test_prompts_whose_logprobs_are_wanted_are_launched(tiny):
    """A graph would have to keep the hidden states of all of its tokens."""
    parts = graphed(tiny("llama"), prefix_caching=False)
    for k in range(3):
        run(parts, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, logprobs=1), f"{k}-")
    stats = graphs_of(parts).stats
    assert (stats.prompts, stats.prompts_eager) == (0, 3)


def test_an_output_is_read_before_its_slot_is_used_again(tiny):
    # Nobody waits for outputs here: the ring does, when it comes round.
    model = tiny("llama")
    parts = graphed(model, prefix_caching=False)
    scheduler, runner = parts.engine.scheduler, parts.engine._runner
    request = parts.intake.request("a", [5], SamplingParams(temperature=0, max_tokens=60))
    scheduler.add(request)
    pending = []
    while (plan := scheduler.plan()) is not None:
        pending.append((plan, runner.finish(runner.begin(plan))))
    assert len(pending) > 2 * len(runner._ring.slots)
    for plan, output in pending:
        scheduler.update(plan, output.wait())
    assert request.tokens_np[1:].tolist() == model.oracle([5], 60)
