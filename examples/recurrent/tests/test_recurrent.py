"""The sample adapter against its reference, in log-probabilities: a decaying state hides faults from tokens."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrv2 import LLM, SamplingParams
from mrv2.errors import RecurrentFlagError, UnsupportedError
from mrv2.layers import native

TOLERANCE = 1e-4
BLOCK = 4
ADAPTER = Path(__file__).parents[1]


def prompts_of(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(n)] for n in lengths]


UNDECLARED = """
# /// adapter
# name = "undeclared"
# sdk_api = "0.1"
# architectures = ["TidalForCausalLM"]
# model_types = ["tidal"]
# owner = "tests"
# capabilities = { chunked_prefill = "native" }
# ///
from recurrent import mrv2_config, mrv2_model
"""
RAGGED = prompts_of([5, 1, 23, 38, 12, 16, 30])


# -- it computes what the reference computes ---------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("limits", [{}, {"max_chunk": 7}, {"max_chunk": 16}, {"max_num_tokens": 6}], ids=str)
@pytest.mark.parametrize("depth", [0, 1, 2, 3], ids=["sync", "depth1", "depth2", "depth3"])
def test_batched_and_chunked_on_reused_rows(any_sample, limits, depth, prefix_caching):
    runner = {} if depth else {"runner": "sync"}
    parts = any_sample.engine(prefix_caching=prefix_caching, **limits, **runner)
    results = any_sample.run(parts, RAGGED, depth=depth or 1)
    assert any_sample.worst(results) < TOLERANCE


def test_a_float32_state_beside_bfloat16_tensors(sample):
    one = sample("hybrid", "bfloat16")
    parts = one.engine(max_chunk=7)
    states = [t["s"] for t in parts.engine._runner._forward._caches.values() if isinstance(t, dict) and "s" in t]
    assert {t.dtype for t in states} == {torch.float32}
    assert one.worst(one.run(parts, RAGGED)) < 0.2


# -- prefix hits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["async", "sync"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_hits_at_every_block_edge(any_sample, blocks, extra, runner):
    parts = any_sample.engine(runner=runner)
    (prompt,) = prompts_of([BLOCK * blocks + extra], seed=blocks)
    edge = (len(prompt) - 1) // BLOCK * BLOCK
    cold = any_sample.run(parts, [prompt])
    assert cold[0].cached == 0
    again = any_sample.run(parts, [prompt, [*prompt, 7, 8]])
    assert [r.cached for r in again] == [edge, (len(prompt) + 1) // BLOCK * BLOCK if extra == 0 else edge]
    assert any_sample.worst(cold + again) < TOLERANCE


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
def test_the_next_turn_goes_on_from_the_last_edge(any_sample, n, depth):
    parts = any_sample.engine()
    (prompt,) = prompts_of([9], seed=n)
    first = any_sample.run(parts, [prompt], n=n, depth=depth)[0]
    second = any_sample.run(parts, [[*prompt, *first.tokens, 3, 1, 4]], depth=depth)[0]
    computed = len(prompt) + n - 1
    if depth == 1:
        assert second.cached == computed // BLOCK * BLOCK
    else:  # the edge of the very last step may be lost
        assert computed // BLOCK * BLOCK - BLOCK <= second.cached <= computed // BLOCK * BLOCK
    assert any_sample.worst([first, second]) < TOLERANCE


def test_prompts_that_part_after_a_common_start(any_sample):
    parts = any_sample.engine(max_chunk=8)
    (common,) = prompts_of([21])
    tails = prompts_of([9, 14, 30, 3, 5], seed=1)
    results = [r for tail in tails for r in any_sample.run(parts, [common + tail])]
    assert [r.cached for r in results] == [0, 16, 16, 16, 20]  # where a chunk had ended
    assert any_sample.worst(results) < TOLERANCE


def test_a_checkpoint_serves_many_and_is_never_run_in(any_sample):
    parts = any_sample.engine(depth=1)
    (prompt,) = prompts_of([17])
    any_sample.run(parts, [prompt])
    for _ in range(3):
        results = any_sample.run(parts, [prompt, [*prompt, 1], [*prompt, 2], [*prompt, 1, 1]], n=14)
        assert all(r.cached >= 16 for r in results)
        assert any_sample.worst(results) < TOLERANCE


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_an_aborted_request_computed_unseen_is_not_shared(sample, depth):
    one = sample("states-only")
    for at in range(2, 12):
        parts = one.engine()
        (prompt,) = prompts_of([6])
        first = one.run(parts, [prompt], n=20, depth=depth, abort={at: [0]})
        second = one.run(parts, [prompt + first[0].tokens + [5, 6, 7]], depth=depth)
        assert one.worst(first + second) < TOLERANCE


# -- preemption --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_at_every_step_and_resumed(any_sample, prefix_caching, depth):
    # Chunks of 7: the first steps are in the middle of prompts, the later ones of decoding.
    for at in range(1, 11, 1 if depth == 1 else 3):
        parts = any_sample.engine(prefix_caching=prefix_caching, max_chunk=7)
        victims = {at: [at % 3, 3]}
        results = any_sample.run(parts, RAGGED[:4], depth=depth, preempt=victims)
        assert any_sample.worst(results) < TOLERANCE
        assert parts.engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_by_a_small_pool(sample, depth, prefix_caching):
    one = sample("hybrid")
    groups = one.engine().engine.scheduler.kv.groups
    parts = one.engine(num_blocks=1 + 16 * len(groups), prefix_caching=prefix_caching)
    for seed in range(3):
        results = one.run(parts, prompts_of([9, 22, 15, 30, 3], seed=seed), n=20, depth=depth)
        assert one.worst(results) < TOLERANCE
    assert parts.engine.scheduler.stats.preemptions > 0


def test_one_request_may_fill_the_cache_whatever_is_cached(any_sample):
    groups = any_sample.engine().engine.scheduler.kv.groups
    parts = any_sample.engine(num_blocks=1 + 7 * len(groups), max_model_len=64)
    capacity = min(parts.engine.scheduler.kv.capacity, 64)
    (prompt,) = prompts_of([capacity])
    # The first leaves a checkpoint; the second needs all there is, and that checkpoint until it is copied.
    for length, n in ((capacity - 3 * BLOCK, 1), (capacity - 1, 10), (capacity - 1, 10), (capacity - BLOCK - 1, 10)):
        assert any_sample.worst(any_sample.run(parts, [prompt[:length]], n)) < TOLERANCE


# -- controls: faults that the comparison has to see -------------------------------------------------------


def without_fresh(cache, meta):
    return cache[meta.state_slots[:, 0].long()]


def fresh_by_multiplying(cache, meta):
    state = without_fresh(cache, meta)
    return state * (meta.computed > 0).view(-1, *[1] * (state.dim() - 1))


@pytest.mark.parametrize("load", [without_fresh, fresh_by_multiplying])
def test_control_state_of_a_new_request(sample, monkeypatch, load):
    one = sample("hybrid")
    monkeypatch.setattr("recurrent.mixers.load_state", load)
    assert one.worst(one.run(one.engine(), RAGGED)) > 10 * TOLERANCE


def test_control_a_predecessors_finite_state(sample, monkeypatch):
    # Nothing is poisoned: tokens alone could hide it.
    one = sample("hybrid")
    parts = one.engine(max_num_seqs=1, prefix_caching=False)
    for page in parts.engine._runner._forward.pages:
        page.zero_()
    del parts.engine.scheduler.kv.pool.allocate
    monkeypatch.setattr("recurrent.mixers.load_state", without_fresh)
    assert one.worst(one.run(parts, [[1, 2, 3]] * 2)) > TOLERANCE


def test_control_state_by_batch_position(sample, monkeypatch):
    from recurrent import mixers

    one = sample("states-only")

    def by_position(meta):
        slots = torch.arange(1, meta.num_reqs + 1, dtype=torch.int32)[:, None]
        return dataclasses.replace(meta, state_slots=slots)

    load, store = mixers.load_state, mixers.store_state
    monkeypatch.setattr(mixers, "load_state", lambda cache, meta: load(cache, by_position(meta)))
    monkeypatch.setattr(
        mixers, "store_state", lambda cache, meta, *args, **state: store(cache, by_position(meta), *args, **state)
    )
    assert one.worst(one.run(one.engine(), RAGGED)) > 10 * TOLERANCE


@pytest.mark.parametrize("fault", ["no copy", "one token late", "wrong edge"])
def test_control_checkpoints(sample, monkeypatch, fault):
    one = sample("hybrid")
    parts = one.engine()
    runner, states = parts.engine._runner, parts.engine.scheduler.kv.states
    if fault == "no copy":
        runner._forward._copier.run = lambda copies: None
    elif fault == "one token late":
        begin, late = runner.begin, runner._forward._copier.run
        runner._forward._copier.run = lambda copies: None

        def begin_then_copy(plan):
            step = begin(plan)
            late(plan.copies)
            return step

        runner.begin = begin_then_copy
    else:
        commit = states.commit
        states.commit = lambda row, hashes, n: commit(row, [hashes[-1], *hashes[:-1]], n)
    results = [r for _ in range(2) for r in one.run(parts, RAGGED[2:4])]
    results += one.run(parts, [[*RAGGED[3], 1, 2, 3, 4, 5, 6]])
    assert one.worst(results) > 10 * TOLERANCE


# -- any schedule ------------------------------------------------------------------------------------------


@given(
    depth=st.integers(0, 3),
    chunk=st.sampled_from([None, 3, 7, 16]),
    blocks=st.sampled_from([14, 18, 30]),
    prefix_caching=st.booleans(),
    rounds=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6),  # prompts
            st.integers(1, 14),  # tokens
            st.dictionaries(st.integers(1, 25), st.lists(st.integers(0, 3), max_size=2), max_size=6),  # preemptions
            st.dictionaries(st.integers(1, 25), st.lists(st.integers(0, 3), max_size=2), max_size=3),  # aborts
            st.lists(st.integers(0, 60), max_size=4),  # stop tokens
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_schedule(any_sample, depth, chunk, blocks, prefix_caching, rounds):
    groups = any_sample.engine().engine.scheduler.kv.groups
    parts = any_sample.engine(
        num_blocks=1 + blocks * len(groups),
        max_model_len=64,
        max_chunk=chunk,
        prefix_caching=prefix_caching,
        runner="async" if depth else "sync",
    )
    room = parts.engine.scheduler.kv.capacity - 1
    before = [[1]]
    for prompts, n, preempt, abort, stop in rounds:
        # Prompts of few kinds, so that prefixes are shared; the last kind goes on from what was generated.
        prompts = [
            [*before[length % len(before)], length][:room]
            if kind == 3
            else [(kind * 17 + i * (1 + kind)) % 61 for i in range(min(length, room))]
            for kind, length in prompts
        ]
        results = any_sample.run(parts, prompts, n, depth=depth or 1, preempt=preempt, abort=abort, stop=stop)
        before = [r.prompt + r.tokens for r in results]
        assert any_sample.worst(results) < TOLERANCE


# -- what is declared --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixers", "flag"), [(["decay", "attention"], False), (["biased", "attention"], True)])
def test_recurrent_says_what_the_layers_declare(sample, mixers, flag):
    one = sample("hybrid")
    config = type(one.loaded.config.hf_config)(mixers=mixers)
    cls = type("Model", (type(one.loaded.module),), {"recurrent": flag})
    layers = native.NativeLayers()
    model = cls(layers, config)
    with pytest.raises(RecurrentFlagError, match=f"set recurrent = {not flag}"):
        native.check_recurrent(model, layers)


def test_the_capability_has_to_be_declared(sample, tmp_path):
    file = tmp_path / "undeclared.py"
    file.write_text(UNDECLARED)
    with pytest.raises(UnsupportedError, match="a state per request"):
        LLM(str(sample("hybrid").folder), adapters=[str(file)])


def test_from_the_front_door(sample):
    one = sample("hybrid")
    with LLM(str(one.folder), adapters=[str(ADAPTER)], max_num_seqs=3) as llm:
        for _ in range(2):
            out = llm.generate(RAGGED, SamplingParams(temperature=0, max_tokens=8, logprobs=1))
            for prompt, result in zip(RAGGED, out, strict=True):
                best = one.logprobs((*prompt, *result.outputs[0].token_ids))[len(prompt) - 1 : -1].max(1).values
                got = torch.tensor([p.logprob for p in result.outputs[0].logprobs])
                torch.testing.assert_close(got, best, atol=TOLERANCE, rtol=0)
        assert out[3].usage.cached_tokens > 0
