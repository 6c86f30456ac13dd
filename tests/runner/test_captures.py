"""Plans for engines of other sizes, and captures that can't be had: no request is lost that could be served."""

import pytest
import torch

from mrv2.errors import GraphCaptureError
from mrv2.model_state.graphs import GraphPlan
from mrv2.testing.freeze import replay_steps
from mrv2.testing.generated import generate
from mrv2.testing.recorder import RecordedOps

PLAN = GraphPlan(num_reqs=(1, 2, 4, 8), max_seq_lens=(12, 24, 128), num_tokens=(5, 16, 64))
PROMPTS = [[1, 2, 3], list(range(40)), [7], [9] * 17, [5, 4]]
NEW = 20


def tokens(parts, prompts):
    return [result.tokens for result in generate(parts, prompts, NEW)]


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
    """Captures so many, then fails."""

    def __init__(self, error, good=1):
        super().__init__()
        self.error, self.good = error, good

    def record(self, run):
        self.good -= 1
        if self.good < 0:
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
