"""CUDA graphs for real: no wait in any step, captures at every moment, failures, memory, and adapters' own inputs.

What tokens come out, for every architecture and size, is in `tests/runner/test_graphs.py --device cuda`.
"""

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from mrv2 import LLM, SamplingParams
from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.graphs import GraphPlan
from mrv2.runner.graphs import GraphKey, default_plan
from mrv2.sample.tiers import GREEDY, RANDOM
from mrv2.testing.checkpoints import make_checkpoint

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
}
SETTINGS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 24, "max_num_tokens": 128, "num_blocks": 4000}
GREEDY_PARAMS = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", LlamaConfig(**SMALL), seed=3)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), EngineConfig(**SETTINGS))


def prompts(count, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(parts, batch, params=GREEDY_PARAMS, prefix="r", at_once=3):
    each = params if isinstance(params, list) else [params] * len(batch)
    requests = [parts.intake.request(f"{prefix}{i}", p, s) for i, (p, s) in enumerate(zip(batch, each, strict=True))]
    waiting = list(requests)
    while waiting or parts.engine.has_work:
        parts.engine.add(waiting[:at_once])
        del waiting[:at_once]
        parts.engine.step()
    return [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]


def engine(loaded, **settings):
    return assemble(loaded, EngineConfig(**(SETTINGS | settings)))


@pytest.fixture(scope="module")
def eager(loaded):
    """Tokens of eager steps: (prompts, params) -> lists."""
    parts = engine(loaded, graphs=False)
    numbers = iter(range(10**6))
    return lambda batch, params=GREEDY_PARAMS: run(parts, batch, params, f"{next(numbers)}-")


@contextlib.contextmanager
def no_waiting():
    """Whatever waits for the device raises, but for the events of outputs."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_common_keys_are_there_from_the_start(loaded, eager, depth):
    parts = engine(loaded, depth=depth)
    graphs = parts.engine._runner.graphs
    sizes = default_plan(parts.limits).num_reqs
    assert sizes == (1, 2, 4, 8, 16, 24)
    longest, most = parts.limits.max_model_len, parts.limits.max_num_tokens
    assert set(graphs._replays) == {
        *(GraphKey(n, 1024, s) for n in sizes for s in (GREEDY, RANDOM)),
        *(GraphKey(24, longest, s, most) for s in (GREEDY, RANDOM)),
    }
    batch = prompts(30)
    with no_waiting():
        got = run(parts, batch)
    assert got == eager(batch)
    assert sum(not key.num_tokens for key in graphs._replays) == 2 * len(sizes)
    assert graphs.stats.eager == {}
    steps = parts.engine.scheduler.stats.steps
    assert 0.9 * steps < graphs.stats.replays - graphs.stats.prompts <= steps
    assert graphs.stats.prompts > 0


def test_captures_between_steps_wait_for_nothing_and_harm_nothing(loaded, eager):
    params = [
        SamplingParams(temperature=1, max_tokens=30, seed=1, top_k=7),
        SamplingParams(temperature=1, max_tokens=20, seed=2, min_p=0.1),
        SamplingParams(temperature=0, max_tokens=25, logprobs=2),
        SamplingParams(temperature=1, max_tokens=30, seed=3, top_p=0.7),
    ]
    batch = prompts(20, seed=1)
    parts = engine(loaded, depth=3)
    graphs = parts.engine._runner.graphs
    before = graphs.stats.captures
    for k, each in enumerate([*params, params * 5]):
        with no_waiting():
            got = run(parts, batch, each, f"{k}-")
        assert got == eager(batch, each)
    assert graphs.stats.captures > before
    assert graphs.stats.eager == {}


def test_requests_grow_into_the_next_bound(loaded, eager):
    batch = prompts(3, seed=2)
    params = SamplingParams(temperature=0, max_tokens=1100)
    parts = engine(loaded)
    with no_waiting():
        got = run(parts, batch, params)
    assert got == eager(batch, params)
    bounds = {key.max_seq_len for key in parts.engine._runner.graphs._replays if not key.num_tokens}
    assert bounds == {1024, 2048}


def test_late_streams_show_no_race(loaded, eager):
    """The device is far behind the host, and then at once not: outputs and inputs are still each step's own."""
    batch = prompts(16, seed=4)
    want = eager(batch)
    parts = engine(loaded, depth=3)
    runner = parts.engine._runner
    begin, steps = runner.begin, iter(range(10**6))

    def late(plan):
        if next(steps) % 3:
            torch.cuda._sleep(2_000_000)
        return begin(plan)

    runner.begin = late
    assert run(parts, batch) == want


def test_other_threads_may_use_the_device_while_a_graph_is_captured(loaded, eager):
    stop = threading.Event()

    def busy():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                x = torch.ones(1 << 16, device="cuda")
                x.sum().item()
                torch.empty(1 << 12, pin_memory=True).copy_(x[: 1 << 12], non_blocking=True)
                time.sleep(0)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        batch = prompts(10, seed=5)
        params = SamplingParams(temperature=1, max_tokens=30, seed=4, top_k=5)
        assert run(engine(loaded), batch, params) == eager(batch, params)
    finally:
        stop.set()
        thread.join()


def test_engines_come_and_go(loaded, eager):
    batch = prompts(6, seed=6)
    want = eager(batch)
    reserved = []
    for _ in range(4):
        parts = engine(loaded)
        assert run(parts, batch) == want
        del parts
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[3] - reserved[1] < 8 << 20, reserved


def test_two_engines_in_turn(loaded, eager):
    batch = prompts(6, seed=7)
    first, second = engine(loaded), engine(loaded, graphs=True)
    requests = [
        (parts, [parts.intake.request(str(i), p, GREEDY_PARAMS) for i, p in enumerate(batch)])
        for parts in (first, second)
    ]
    for parts, mine in requests:
        parts.engine.add(mine)
    while first.engine.has_work or second.engine.has_work:
        first.engine.step()
        second.engine.step()
    want = eager(batch)
    for _, mine in requests:
        assert [r.tokens_np[len(r.prompt_np) :].tolist() for r in mine] == want


# -- through the front door ------------------------------------------------------------------------------------


def test_idle_time_completes_what_has_been_needed(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        params = SamplingParams(temperature=1, top_k=3, seed=1, max_tokens=8)
        want = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
        sizes = len(default_plan(llm.limits).num_reqs)
        deadline = time.monotonic() + 60
        every = 3 * (sizes + 1)  # of two samplers from the start, and of this one; and one size of prompts for each
        while llm.graph_stats.captures < every and time.monotonic() < deadline:
            time.sleep(0.05)
        assert llm.graph_stats.captures == every
        for _ in range(2):  # one right after the other: prompts of a size that has come once are captured at once
            assert llm.generate([[1, 2, 3]] * 7, params)[6].outputs[0].token_ids == want
        assert llm.graph_stats.prompts > 0


def test_no_graphs_means_none(folder):
    with LLM(str(folder), graphs=False, **SETTINGS) as llm:
        want = llm.generate(prompts(4), GREEDY_PARAMS)
        assert llm.graph_stats is None
    with LLM(str(folder), debug=True, **SETTINGS) as llm:
        assert llm.graph_stats is None
    with LLM(str(folder), **SETTINGS) as llm:
        got = llm.generate(prompts(4), GREEDY_PARAMS)
        assert llm.graph_stats.replays > 30
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in want]


# -- adapters --------------------------------------------------------------------------------------------------


class OwnGraph(DefaultModelState):
    """Captures something of its own, and leaves out sizes."""

    def graph_plan(self, default):
        return GraphPlan(num_reqs=default.num_reqs[:3], max_seq_lens=default.max_seq_lens)

    def capture_inner(self, ctx):
        self.x, self.out = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
        self.double = ctx.capture(lambda: self.out.copy_(self.x * 2))


def test_an_adapters_own_graph_and_plan(loaded, eager):
    from dataclasses import replace

    parts = engine(replace(loaded, state_class=OwnGraph))
    state = parts.engine._runner._state
    batch = prompts(6, seed=9)
    with pytest.warns(UserWarning, match="no size for more than 4 requests"):
        assert run(parts, batch) == eager(batch)
    for value in (1.0, 3.0):
        with torch.inference_mode():
            state.x.fill_(value)
        state.double()
        assert state.out.tolist() == [2 * value] * 8
    stats = parts.engine._runner.graphs.stats
    assert list(stats.eager) == ["graph_plan() has no size for more than 4 requests"]
    assert stats.replays > 0


def test_what_cant_be_captured_is_an_error_that_says_so(folder):
    # In a process of its own: after a capture that fails CUDA may be in any state.
    code = """
import sys, dataclasses
from mrv2.errors import GraphCaptureError
from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.model_state.default import DefaultModelState

class Reads(DefaultModelState):
    def before_forward(self, view):
        int(view.seq_lens.max())

config = EngineConfig(device="cuda", dtype="float32", max_num_seqs=4, max_num_tokens=64, num_blocks=100)
loaded = dataclasses.replace(load(sys.argv[1], config), state_class=Reads)
try:
    assemble(loaded, config)
except GraphCaptureError as error:
    print("refused:", error.what)
assert assemble(loaded, dataclasses.replace(config, graphs=False)).graphs is None
print("eager")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ,
    )
    assert "refused: a step of 64 tokens of prompts can't be captured" in done.stdout, done.stderr[-3000:]
    assert "eager" in done.stdout, done.stderr[-3000:]


def test_the_recurrent_sample_and_an_input_of_ones_own_are_inside_the_graph(tmp_path):
    examples = Path(__file__).parents[2] / "examples"
    sys.path.insert(0, str(examples))
    from recurrent import reference
    from recurrent.config import TidalConfig

    folder = tmp_path / "tidal"
    reference.make_checkpoint(folder, TidalConfig(), seed=3)
    batch = [[t % 40 for t in p] for p in prompts(5, longest=12)]
    results = []
    for graphs in (False, True):
        with LLM(
            str(folder),
            adapters=[str(examples / "recurrent")],
            device="cuda",
            dtype="float32",
            max_num_seqs=4,
            graphs=graphs,
        ) as llm:
            results.append(
                [r.outputs[0].token_ids for r in llm.generate(batch, SamplingParams(temperature=0, max_tokens=20))]
            )
    assert results[0] == results[1]
    assert llm.graph_stats.eager == {}
    assert llm.graph_stats.replays > 20
