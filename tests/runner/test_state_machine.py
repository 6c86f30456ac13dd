"""Requests come, are preempted, resumed, aborted and end, with outputs returned late: tokens stay the oracle's.

The scheduler's columns are poisoned before a row is given to a request. In a third of the runs, in debug mode, so
are the device's, and every block: anything not set by its new owner shows as a wrong token. In another third
decodes are replayed.
"""

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mrv2.kernels.cuda_graph import CudaRecorder
from mrv2.runner.request import FinishReason, Status
from mrv2.sample.params import SamplingParams
from mrv2.testing.freeze import replay_steps
from mrv2.testing.recorder import RecordedOps


def poison_host_columns(scheduler):
    """Debug mode poisons what adapters can see; this is the scheduler's own knowledge of a row."""
    host_open = scheduler.columns.open

    def open_row(row, request, num_computed):
        for column in vars(scheduler.columns).values():
            if isinstance(column, np.ndarray):
                column[row] = True if column.dtype == np.bool_ else 3
        host_open(row, request, num_computed)

    scheduler.columns.open = open_row


class EngineMachine(RuleBasedStateMachine):
    """Drives scheduler and runner step by step, as an engine at any depth would."""

    tiny = None  # set by the test

    @initialize(
        depth=st.integers(1, 3),
        blocks=st.sampled_from([14, 20, 40]),
        chunk=st.sampled_from([None, 3, 7]),
        prefix_caching=st.booleans(),
        kind=st.sampled_from(["plain", "debug", "graphs"]),
    )
    def start(self, depth, blocks, chunk, prefix_caching, kind):
        groups = len(self.tiny.engine().engine.scheduler.kv.groups)
        self.parts = self.tiny.engine(
            block_size=4,
            num_blocks=1 + blocks * groups,
            max_chunk=chunk,
            max_num_seqs=4,
            max_num_tokens=16,
            max_model_len=48,
            prefix_caching=prefix_caching,
            depth=depth,
            debug=kind == "debug",
            graphs=False,
        )
        if kind == "graphs":
            cuda = self.parts.limits.device.type == "cuda"
            replay_steps(self.parts, CudaRecorder(self.parts.limits.device) if cuda else RecordedOps())
        poison_host_columns(self.parts.engine.scheduler)
        self.scheduler, self.runner = self.parts.engine.scheduler, self.parts.engine._runner
        self.depth, self.in_flight = depth, deque()
        self.requests = {}

    @rule(seed=st.integers(0, 5), length=st.integers(1, 30), n=st.integers(1, 16), stop=st.integers(0, 60))
    def add(self, seed, length, n, stop):
        # Few distinct prompts, so that prefixes are shared.
        prompt = [(seed * 13 + i * (1 + seed % 2)) % 61 for i in range(length)]
        params = SamplingParams(temperature=0, max_tokens=n, stop_token_ids=(stop, (stop + 1) % 61))
        request = self.parts.intake.request(str(len(self.requests)), prompt, params)
        self.requests[request.req_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: any(r.status is Status.ENDED for r in self.requests.values()))
    @rule(pick=st.integers(0, 100), extra=st.integers(0, 3), n=st.integers(1, 16))
    def follow_up(self, pick, extra, n):
        """A prompt that goes on from an earlier request's tokens, as the next turn of a chat does."""
        ended = [r for r in self.requests.values() if r.status is Status.ENDED]
        prompt = [*ended[pick % len(ended)].tokens_np.tolist(), *range(extra)][:40]
        request = self.parts.intake.request(
            str(len(self.requests)), prompt, SamplingParams(temperature=0, max_tokens=n)
        )
        self.requests[request.req_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def launch(self):
        plan = self.scheduler.plan()
        if plan is not None:
            sources, targets = plan.copies.sources.tolist(), plan.copies.targets.tolist()
            assert len({*sources, *targets}) == len(set(sources)) + len(targets), "copies depend on their order"
            self.in_flight.append((plan, self.runner.finish(self.runner.begin(plan))))

    @precondition(lambda self: self.in_flight)
    @rule()
    def return_oldest(self):
        plan, pending = self.in_flight.popleft()
        events = self.scheduler.update(plan, pending.wait())
        for request in events.ended:
            self.check(request)

    @precondition(lambda self: self.scheduler.num_running)
    @rule(pick=st.integers(0, 3))
    def preempt(self, pick):
        self.scheduler._preempt(self.scheduler._running[-1 - pick % self.scheduler.num_running])

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick):
        request = list(self.requests.values())[pick % len(self.requests)]
        ended_before = request.status is Status.ENDED
        assert (self.scheduler.end(request.req_id, FinishReason.ABORT) is None) == ended_before
        if not ended_before:
            self.check(request)

    def check(self, request):
        got = request.tokens_np[len(request.prompt_np) :].tolist()
        limit = request.len_limit - len(request.prompt_np)
        want = self.tiny.oracle(request.prompt_np.tolist(), limit, request.stop_token_ids)
        if request.finish_reason is FinishReason.ABORT:
            assert got == want[: len(got)]
        else:
            assert got == want
            assert (request.finish_reason is FinishReason.STOP) == (got[-1] in request.stop_token_ids)

    def teardown(self):
        if not hasattr(self, "parts"):
            return
        for _ in range(5000):
            while len(self.in_flight) < self.depth:
                before = len(self.in_flight)
                self.launch()
                if len(self.in_flight) == before:
                    break
            if not self.in_flight:
                break
            self.return_oldest()
        assert not self.scheduler.has_work, "requests were left behind"
        assert all(r.status is Status.ENDED for r in self.requests.values())
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
        assert self.scheduler._rows.num_free == 4


def run_machine(tiny, examples):
    machine = type("Machine", (EngineMachine,), {"tiny": tiny})
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))


def test_full_attention(tiny):
    run_machine(tiny("llama"), 60)


def test_sliding_and_full_groups(tiny):
    run_machine(tiny("qwen2-mixed"), 60)


def test_one_window_for_all(tiny):
    run_machine(tiny("mistral-window"), 40)


def test_mixture_of_experts(tiny):
    run_machine(tiny("qwen3-moe"), 30)


def test_recurrent_states_and_own_caches(tiny):
    run_machine(tiny("hybrid"), 60)
