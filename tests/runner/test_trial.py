"""The largest step, before there is a cache: it is legal, it writes scratch only, and what it took is subtracted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv2.attn import kv_memory
from mrv2.attn.kv_memory import choose_num_blocks
from mrv2.errors import CacheTooSmallError, UnsupportedError
from mrv2.frontend.build import _forward
from mrv2.runner.forward import ForwardPass
from mrv2.runner.runner import Runner
from mrv2.runner.trial import largest_plan, measure_step
from mrv2.state.view import Limits


@given(rows=st.integers(1, 40), more=st.integers(0, 300), length=st.integers(2, 50), vocab=st.integers(1, 200))
def test_the_largest_plan_uses_all_that_limits_allow(rows, more, length, vocab):
    limits = Limits(max_rows=rows, max_num_tokens=rows + more, max_model_len=length, vocab_size=vocab)
    plan = largest_plan(limits, ())
    takes = plan.query_lens_np
    assert plan.num_reqs == rows
    assert plan.num_tokens == takes.sum() == min(rows + more, rows * (length - 1))
    assert (takes[: plan.num_decodes] == 1).all()
    assert (takes[plan.num_decodes :] > 1).all()
    assert plan.max_query_len == takes.max() < length
    assert [len(request.prefill_token_ids) for _, request in plan.added] == takes.tolist()


class Memory:
    """What the driver would say: so much before, so much at the peak."""

    def __init__(self, monkeypatch, before, peak):
        self.calls = []
        for name, value in {
            "memory_allocated": before,
            "reset_peak_memory_stats": None,
            "max_memory_allocated": peak,
            "empty_cache": None,
        }.items():
            monkeypatch.setattr(
                torch.cuda, name, lambda *_, name=name, value=value: (self.calls.append(name), value)[1]
            )


def test_the_step_runs_and_writes_nothing_but_scratch(any_tiny, monkeypatch):
    memory = Memory(monkeypatch, before=1000, peak=5000)
    parts = any_tiny.engine(debug=True)  # which would find a write to any other block
    runner, groups = parts.engine._runner, parts.engine.scheduler.kv.groups
    runner._tables.by_row.zero_()  # as in a runner without debug mode that has run nothing yet
    ran = []
    begin = runner.begin
    runner.begin = lambda plan: (ran.append(plan), begin(plan))[1]
    assert measure_step(lambda: runner, parts.limits, groups) == 4000
    assert ran[0].num_tokens == parts.limits.max_num_tokens
    assert memory.calls == ["memory_allocated", "reset_peak_memory_stats", "max_memory_allocated", "empty_cache"]


def test_a_pool_of_the_scratch_block_is_enough(any_tiny, monkeypatch):
    Memory(monkeypatch, before=0, peak=7)
    parts = any_tiny.engine()
    groups = parts.engine.scheduler.kv.groups
    forward = _forward(ForwardPass, any_tiny.loaded, parts.limits, groups, num_blocks=1)
    assert measure_step(lambda: Runner(forward, groups), parts.limits, groups) == 7


def test_a_step_that_does_not_fit_is_refused(monkeypatch):
    Memory(monkeypatch, before=0, peak=0)

    def make_runner():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UnsupportedError, match="max_num_tokens=64 and max_num_seqs=8: a step of this size") as error:
        measure_step(make_runner, Limits(max_rows=8, max_num_tokens=64, max_model_len=32), ())
    assert error.value.fix == "lower one of the two"


@pytest.mark.parametrize("step_memory", [0, 300_000])
def test_the_cache_gets_what_the_step_leaves(monkeypatch, step_memory):
    monkeypatch.setattr(kv_memory, "free_memory", lambda device: 1_000_000)
    args = {"kv_memory": None, "device": torch.device("cuda:0"), "step_memory": step_memory}
    assert choose_num_blocks(1000, wanted_blocks=10**6, **args) == (900_000 - step_memory) // 1000
    assert choose_num_blocks(1000, wanted_blocks=50, **args) == 50
    with pytest.raises(CacheTooSmallError, match="free memory on cuda:0") as error:
        choose_num_blocks(800_000, wanted_blocks=50, **args)
    assert ("lower max_num_tokens" in error.value.fix) == bool(step_memory)


def test_a_step_larger_than_the_memory_leaves_nothing(monkeypatch):
    monkeypatch.setattr(kv_memory, "free_memory", lambda device: 1000)
    with pytest.raises(CacheTooSmallError, match="0 bytes hold 0 blocks"):
        choose_num_blocks(10, wanted_blocks=5, kv_memory=None, device=torch.device("cuda:0"), step_memory=10**6)
