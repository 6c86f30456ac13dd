"""Debug mode: correct models run as ever, and each planted fault raises the error that names it."""

import contextlib
import dataclasses
import random

import pytest
import torch

from mrv2 import LLM, SamplingParams
from mrv2.debug.runner import DebugRunner
from mrv2.errors import CacheWriteError, PoisonReadError, StaleStepError
from mrv2.model_state.default import DefaultModelState
from mrv2.runner.block_pool import BlockPool
from mrv2.runner.runner import Runner
from mrv2.state.staging import StagingRing

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def ragged_prompts(count=8, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(parts, prompts, params=GREEDY, prefix="r"):
    requests = [parts.intake.request(f"{prefix}{i}", p, params) for i, p in enumerate(prompts)]
    parts.engine.add(requests)
    while parts.engine.has_work:
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 3, "max_chunk": 5},
        {"block_size": 4, "max_num_seqs": 3, "max_num_tokens": 8},
        {"block_size": 4, "blocks_per_group": 17, "depth": 2},
    ],
    ids=["deep", "narrow", "preempting"],
)
def test_tokens_stay_the_same(any_tiny, settings):
    settings = dict(settings)
    if per_group := settings.pop("blocks_per_group", None):
        settings["num_blocks"] = 1 + per_group * len(any_tiny.engine().engine.scheduler.kv.groups)
    parts = any_tiny.engine(debug=True, **settings)
    prompts = ragged_prompts()
    want = [any_tiny.oracle(p, 20) for p in prompts]
    assert run(parts, prompts) == want
    follow_up = [*prompts[0], *want[0], 5]
    for prefix in ("next", "again"):
        assert run(parts, [follow_up], prefix=prefix) == [any_tiny.oracle(follow_up, 20)]
    stats = parts.engine.scheduler.stats
    assert (stats.preemptions > 0) == (per_group is not None)
    assert stats.cached_tokens > 0


def test_seeded_draws_and_logprobs_stay_the_same(text_model):
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=3, max_tokens=15, logprobs=4, ignore_eos=True)
    results = []
    for debug in (False, True):
        with LLM(str(text_model), max_num_seqs=4, debug=debug) as llm:
            out = llm.generate(["the cat", "grüße", "a", "the rat sat on", "d"], params)
            results.append([(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in out])
    for (plain_ids, plain), (ids, logprobs) in zip(*results, strict=True):
        assert ids == plain_ids
        for a, b in zip(plain, logprobs, strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert len(a.top) == len(b.top) == 4


def test_off_is_not_there_at_all(tiny):
    parts = tiny("llama").engine()
    assert type(parts.engine._runner) is Runner
    assert type(parts.engine.scheduler.kv.pool) is BlockPool
    assert type(parts.engine._runner._buffers._ring) is StagingRing
    assert type(tiny("llama").engine(debug=True).engine._runner) is DebugRunner


# -- planted faults ----------------------------------------------------------------------------------------


class Attention:
    """A backend that does something before or after the real one."""

    def __init__(self, backend, before=lambda cache, meta: meta, after=lambda cache, meta: None):
        self.backend, self.before, self.after = backend, before, after

    def attend(self, q, k, v, *, cache, meta, **kwargs):
        out = self.backend.attend(q, k, v, cache=cache, meta=self.before(cache, meta), **kwargs)
        self.after(cache, meta)
        return out


def with_attention(model, settings=(), **hooks):
    parts = model.engine(debug=True, block_size=4, **dict(settings))
    forward = parts.engine._runner._forward
    forward._backend = Attention(forward._backend, **hooks)
    return parts


def write_to_the_last_block(cache, meta):
    cache[-1] = 0


def write_to_a_free_block(cache, meta):
    cache[30, 0, 1] = 1


def write_to_an_earlier_block(cache, meta):
    if meta.num_decodes and meta.max_seq_len > 8:
        cache[meta.block_table[0, 0].long(), 0, 0] += 1


@pytest.mark.parametrize("fault", [write_to_the_last_block, write_to_a_free_block, write_to_an_earlier_block])
@pytest.mark.parametrize("depth", [1, 3])
def test_writes_outside_of_the_steps_slots(tiny, fault, depth):
    parts = with_attention(tiny("llama"), {"depth": depth}, after=fault)
    with pytest.raises(CacheWriteError, match=r"step \d+ changed block \d+ of model\.layers\.0\S* \(group full\.0\)"):
        run(parts, [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]])


def test_a_write_names_the_layer_and_the_group(tiny):
    model = tiny("qwen2-mixed")
    parts = model.engine(debug=True, block_size=4)
    caches, groups = parts.engine._runner._forward._caches, parts.engine.scheduler.kv.groups
    victim = groups[-1].layers[-1]
    forward = parts.engine._runner._forward

    def write(cache, meta):
        if cache is caches[victim]:
            cache[30, 1, 2] = 7

    forward._backend = Attention(forward._backend, after=write)
    with pytest.raises(CacheWriteError, match="changed block 30 of") as error:
        run(parts, [[1, 2, 3]])
    assert f"{victim} (group {groups[-1].name})" in error.value.what
    assert "step 1 " in error.value.what


def test_a_write_to_the_prefix_cache(tiny):
    parts = with_attention(tiny("llama"))
    run(parts, [list(range(12))])
    cached = next(iter(parts.engine.scheduler.kv.pool._block_of.values()))
    parts.engine._runner._forward._backend.after = lambda cache, meta: cache[cached].zero_()
    with pytest.raises(CacheWriteError, match=f"changed block {cached} of"):
        run(parts, [[40, 41]], prefix="next")


def test_a_slot_of_minus_one_used_as_an_index(tiny, monkeypatch):
    def unclamped(cache, meta, x):
        slots = meta.slot_mapping
        cache[slots // meta.block_size, slots % meta.block_size] = x

    monkeypatch.setattr("recurrent.mixers.write_tokens", unclamped)
    with pytest.raises(CacheWriteError, match="group tokens"):
        run(tiny("hybrid").engine(debug=True), [[1, 2, 3]])


def test_a_state_written_to_a_slot_that_is_not_the_rows(tiny, monkeypatch):
    from recurrent import mixers

    store = mixers.store_state

    def shifted(cache, meta, t, live, **state):
        store(cache, dataclasses.replace(meta, state_slots=meta.state_slots + 20), t, live, **state)

    monkeypatch.setattr(mixers, "store_state", shifted)
    with pytest.raises(CacheWriteError, match="group states"):
        run(tiny("hybrid").engine(debug=True), [[1, 2, 3], [4, 5]])


def test_a_read_past_the_length(tiny):
    def longer(cache, meta):
        return dataclasses.replace(meta, seq_lens=meta.seq_lens + 1)

    parts = with_attention(tiny("llama"), before=longer)
    with pytest.raises(PoisonReadError, match="first of request r0"):
        run(parts, [[1, 2, 3, 4, 5, 6]])


def test_a_state_that_is_not_started_anew(tiny, monkeypatch):
    monkeypatch.setattr("recurrent.mixers.load_state", lambda cache, meta: cache[meta.state_slots[:, 0].long()])
    with pytest.raises(PoisonReadError, match="first of request r0"):
        run(tiny("hybrid").engine(debug=True), [[1, 2, 3]])


def test_a_freed_rows_columns_are_poisoned(tiny):
    class Past(DefaultModelState):
        """Looks at the token after the last one of each request: its row's former owner's."""

        armed = False

        def prepare_inputs(self, view):
            if not self.armed:
                return {}
            row = view.rows.clamp(min=0).long()
            ids = view.table.all_token_ids[row, view.table.total_len[row].clamp(max=self.limits.max_model_len - 1)]
            torch.zeros(self.limits.vocab_size)[ids.long().cpu()]  # a bad index would end the process on a GPU
            return {}

    model = tiny("llama")
    planted = dataclasses.replace(model, loaded=dataclasses.replace(model.loaded, state_class=Past))
    for debug in (False, True):
        parts = planted.engine(debug=debug, graphs=False)
        run(parts, [[1] * 60])
        parts.engine._runner._state.armed = True
        with pytest.raises(IndexError) if debug else contextlib.nullcontext():
            run(parts, [[1, 2, 3]], prefix="next")


class KeepsView(DefaultModelState):
    """Does a step's work one step late, with the earlier step's batch positions."""

    def prepare_inputs(self, view):
        self.late, self.view = getattr(self, "view", None), view
        return super().prepare_inputs(view)

    def after_sample(self, view, num_sampled):
        if self.late is not None:
            self.late.rows.clone()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_view_used_after_its_step(tiny, depth):
    model = tiny("llama")
    planted = dataclasses.replace(model, loaded=dataclasses.replace(model.loaded, state_class=KeepsView))
    run(planted.engine(depth=depth), [[1, 2, 3]])  # goes unnoticed
    with pytest.raises(StaleStepError, match=r"StepView\.rows of step 1 was read after") as error:
        run(planted.engine(depth=depth, debug=True), [[1, 2, 3]])
    assert error.value.where.startswith(__file__)
    assert error.value.where.endswith("in after_sample")


def test_metadata_used_after_its_step(tiny, monkeypatch):
    from recurrent import mixers

    write, kept = mixers.write_tokens, []

    def late(cache, meta, x):
        kept.append(meta)
        write(cache, meta, x)
        return kept[0].computed.clone()

    monkeypatch.setattr(mixers, "write_tokens", late)
    with pytest.raises(StaleStepError, match=r"CacheMeta\.seq_lens of step 1 was read after") as error:
        run(tiny("hybrid").engine(debug=True), [[1, 2, 3]])
    assert error.value.where.startswith(__file__)


@pytest.mark.parametrize("keep", [False, True])
def test_a_snapshot_may_be_kept(tiny, keep):
    class Snapshot(DefaultModelState):
        def prepare_inputs(self, view):
            if (late := getattr(self, "rows", None)) is not None:
                assert int(late.max()) < self.limits.max_rows
            self.rows = view.rows.clone()
            return super().prepare_inputs(view)

    model = tiny("llama")
    planted = dataclasses.replace(model, loaded=dataclasses.replace(model.loaded, state_class=Snapshot))
    prompts = ragged_prompts(3)
    # It reads on the host, which no graph could replay.
    assert run(planted.engine(debug=keep, graphs=False), prompts) == [model.oracle(p, 20) for p in prompts]


def test_whoever_waits_gets_the_error_itself(text_model):
    with LLM(str(text_model), debug=True) as llm:
        forward = llm._driver._engine._runner._forward
        forward._backend = Attention(forward._backend, after=write_to_the_last_block)
        futures = llm.submit(["the cat", "d"], GREEDY)
        for future in futures:
            with pytest.raises(CacheWriteError):
                future.result(timeout=60)
        with pytest.raises(CacheWriteError):
            llm.generate("d", GREEDY)
