"""Plans for engines of other sizes, and captures that can't be had: no request is lost that could be served."""

import warnings

import pytest
import torch

from mrv2.errors import GraphCaptureError
from mrv2.model_state.graphs import GraphPlan
from mrv2.sample.params import SamplingParams
from mrv2.sample.tiers import GREEDY
from mrv2.testing.freeze import replay_steps
from mrv2.testing.generated import generate
from mrv2.testing.recorder import RecordedOps

PLAN = GraphPlan(num_reqs=(1, 2, 4, 8), max_seq_lens=(12, 24, 128), num_tokens=(5, 16, 64))
PROMPTS = [[1, 2, 3], list(range(40)), [7], [9] * 17, [5, 4]]
NEW = 20


PLAIN = SamplingParams(temperature=0, ignore_eos=True)
"""No log-probabilities, with which prompts have no graphs."""


def tokens(parts, prompts, **how):
    return [result.tokens for result in generate(parts, prompts, NEW, **how)]


@pytest.mark.parametrize(
    "plan",
    [
        GraphPlan(num_reqs=(1, 2, 64), max_seq_lens=(12, 4096), num_tokens=(16, 1024)),
        GraphPlan(num_reqs=(8, 4, 0, 1), max_seq_lens=(128, 24), num_tokens=(64, 5)),
    ],
    ids=["larger-than-the-engine", "in-any-order"],
)
def test_an_adapters_plan_may_be_the_same_for_every_engine(tiny, plan):
    parts = tiny("llama").engine(graphs=False)
    graphs = replay_steps(parts, RecordedOps(), plan)
    assert tokens(parts, PROMPTS) == [tiny("llama").oracle(p, NEW) for p in PROMPTS]
    assert graphs.stats.eager == {}
    assert {key.num_reqs for key in graphs._replays} <= {1, 2, 4, 8}


class Fails(RecordedOps):
    """Captures so many, then fails: so many times, or for good."""

    def __init__(self, error, good=1, bad=None):
        super().__init__()
        self.error, self.good, self.bad = error, good, bad

    def record(self, run):
        self.good -= 1
        if self.good < 0 and (self.bad is None or self.good >= -self.bad):
            raise self.error
        return super().record(run)


def test_without_memory_for_a_graph_its_steps_run_eagerly(tiny):
    parts = tiny("llama").engine(graphs=False)
    stats = replay_steps(parts, Fails(torch.OutOfMemoryError("made up")), PLAN).stats
    with pytest.warns(UserWarning, match="no memory to capture it: grant the KV cache less"):
        assert tokens(parts, PROMPTS) == [tiny("llama").oracle(p, NEW) for p in PROMPTS]
    assert stats.captures == 1
    assert sum(stats.eager.values()) > 10
    while parts.engine.use_idle_time():
        pass
    assert stats.captures == 1


@pytest.mark.filterwarnings("ignore:a step of 1 decodes runs without")
def test_prompts_for_whose_graph_there_is_no_memory_are_not_tried_again(tiny):
    model = tiny("llama")
    parts = model.engine(graphs=False, prefix_caching=False)
    graphs = replay_steps(parts, Fails(torch.OutOfMemoryError("made up"), good=0), PLAN)
    graphs.capture_common((GREEDY,))  # the largest prompts among them
    for prompt in PROMPTS[1:2] * 2 + PROMPTS[:1] * 2:
        assert tokens(parts, [prompt], params=(PLAIN,)) == [model.oracle(prompt, NEW)]
        assert not graphs.due
    assert (graphs.stats.captures, graphs.stats.replays, graphs.stats.prompts_eager) == (0, 0, 4)


def test_prompts_that_cant_be_captured_stay_launched_and_it_is_said_once(tiny):
    model = tiny("llama")
    parts = model.engine(graphs=False, prefix_caching=False)
    stats = replay_steps(parts, Fails(ValueError("made up"), good=0, bad=1), PLAN).stats
    with pytest.warns(UserWarning, match="5 tokens of prompts can't be captured: ValueError: made up"):
        assert tokens(parts, [[1, 2, 3]], params=(PLAIN,)) == [model.oracle([1, 2, 3], NEW)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(parts, [[4, 5, 6]], params=(PLAIN,)) == [model.oracle([4, 5, 6], NEW)]
    assert (stats.prompts_eager, stats.prompts) == (2, 0)
    assert stats.replays


def test_a_capture_that_fails_when_idle_is_no_error_until_it_is_needed(tiny):
    parts = tiny("llama").engine(graphs=False)
    replay_steps(parts, Fails(ValueError("made up"), good=2), PLAN)
    want = tiny("llama").oracle([1, 2], NEW)
    assert tokens(parts, [[1, 2]]) == [want]
    idle = iter(parts.engine.use_idle_time, False)
    with pytest.warns(UserWarning, match="can't be captured: ValueError: made up"):
        assert sum(idle) > 3
    assert tokens(parts, [[1, 2]]) == [want]
    with pytest.raises(GraphCaptureError, match="a step of 2 decodes can't be captured"):
        tokens(parts, [[1, 2]] * 2)
