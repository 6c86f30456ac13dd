"""Deadlines and the bounded queue: what ends when, what is refused, and what is fed in."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2 import LLM, SamplingParams
from mrv2.cli.batch import Defaults, jobs_from_file, run_batch
from mrv2.errors import EngineError, QueueFullError, RequestError, UnsupportedError
from mrv2.frontend.deadlines import Deadlines
from mrv2.runner.request import FinishReason, Status

LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def make(text_model):
    """make(**settings) -> (LLM, Gate): a model whose steps can be held up."""
    made = []

    def build(**settings):
        llm = LLM(str(text_model), **{"max_num_seqs": 2} | settings)
        made.append((llm, gate := Gate(llm)))
        return llm, gate

    yield build
    for llm, gate in made:
        gate.open()
        llm.close()


class Gate:
    """Stands before the last layer of each step."""

    def __init__(self, llm):
        self._go, self.pause, self.steps = threading.Event(), 0.0, 0
        self._go.set()
        self.open, self.close = self._go.set, self._go.clear
        head = llm.model.module.lm_head
        forward, greedy = head.forward, head.greedy

        def held(call):
            def wrapped(hidden):
                self._go.wait(60)
                time.sleep(self.pause)
                self.steps += 1
                return call(hidden)

            return wrapped

        head.forward, head.greedy = held(forward), held(greedy)


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


# -- deadlines ---------------------------------------------------------------------------------------------


def test_a_running_request_keeps_what_it_has(make):
    llm, gate = make()
    free = llm.generate("the cat", LONG)[0].outputs[0]
    gate.pause = 0.01
    late, other = llm.submit(["the cat"], LONG, timeout=0.3), llm.submit(["the cat"], SHORT)
    out = late[0].result(timeout=60).outputs[0]
    assert out.finish_reason == "timeout"
    assert out.stop_reason is None
    assert 0 < len(out.token_ids) < 110
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
    assert out.text == llm.model.tokenizer.decode(out.token_ids)
    assert other[0].result(timeout=60).outputs[0].finish_reason == "length"


def test_a_waiting_request_ends_without_having_run(make):
    llm, gate = make(max_num_seqs=1)
    gate.pause = 0.005
    first = llm.submit(["the cat"], LONG)[0]
    second = llm.submit(["d"], SHORT, timeout=0.1)[0]
    out = second.result(timeout=60)
    assert out.outputs[0].finish_reason is FinishReason.TIMEOUT
    assert out.outputs[0].token_ids == ()
    assert not first.done()
    assert first.result(timeout=60).outputs[0].finish_reason == "length"


def test_a_stream_ends_with_all_its_pieces(make):
    llm, gate = make()
    gate.pause = 0.01

    async def collect():
        return [piece async for piece in llm.stream("the cat", LONG, timeout=0.3)]

    pieces = asyncio.run(collect())
    final = pieces[-1].finished.outputs[0]
    assert final.finish_reason == "timeout"
    assert 0 < len(final.token_ids) < 110
    assert "".join(p.text for p in pieces) == final.text
    assert tuple(t for p in pieces for t in p.token_ids) == final.token_ids


def test_time_enough_changes_nothing(make):
    llm, _ = make()
    want = llm.generate(["the cat", "d"], SHORT)
    got = llm.generate(["the cat", "d"], SHORT, timeout=1000)
    assert [r.outputs for r in got] == [r.outputs for r in want]


def test_what_is_not_even_queued_ends_too(make):
    llm, gate = make(max_num_seqs=1, max_queue=2)
    gate.pause = 0.01
    start = time.monotonic()
    results = llm.generate(["the cat"] * 12, LONG, timeout=0.4)
    assert time.monotonic() - start < 20
    assert [r.outputs[0].finish_reason for r in results] == ["timeout"] * 12
    assert results[0].outputs[0].token_ids
    assert not results[-1].outputs[0].token_ids


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 10**400, "5", True, [1]])
def test_other_timeouts_are_refused(make, timeout):
    llm, gate = make()

    async def stream():
        return [piece async for piece in llm.stream("d", SHORT, timeout=timeout)]

    for call in (
        lambda: llm.generate("d", SHORT, timeout=timeout),
        lambda: llm.submit(["d"], SHORT, timeout=timeout),
        lambda: asyncio.run(stream()),
    ):
        with pytest.raises(RequestError, match=r"timeout=.* is out of range"):
            call()
    assert gate.steps == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "tick"]), st.integers(0, 40)), max_size=300))
def test_deadlines_against_a_list(actions):
    clock = [0.0]
    deadlines, requests, reported = Deadlines(clock=lambda: clock[0]), [], set()
    for n, (action, value) in enumerate(actions):
        if action == "add":
            deadline = None if value == 0 else clock[0] + value
            requests.append(SimpleNamespace(req_id=n, deadline=deadline, status=Status.WAITING))
            deadlines.add(requests[-1])
        elif action == "end" and requests:
            requests[value % len(requests)].status = Status.ENDED
        else:
            clock[0] += value / 8
        expired = deadlines.take_expired()
        due = {r.req_id for r in requests if r.deadline is not None and r.deadline <= clock[0]}
        ended = {r.req_id for r in requests if r.status is Status.ENDED}
        assert len(expired) == len(set(expired))
        assert due - ended - reported <= set(expired) <= due - reported
        reported |= set(expired)


def test_deadlines_of_ended_requests_are_not_kept():
    deadlines = Deadlines()
    for n in range(10_000):
        deadlines.add(SimpleNamespace(req_id=n, deadline=1e12, status=Status.ENDED if n % 100 else Status.WAITING))
    assert len(deadlines) < 500


# -- the queue ---------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_all_or_nothing(make):
    llm, gate = make(max_num_seqs=1, max_queue=2)
    gate.close()
    running = llm.submit(["the cat"], SHORT)
    until(lambda: llm.stats.steps == 1)
    with pytest.raises(QueueFullError, match="0 requests wait, and 3 more would exceed max_queue=2") as error:
        llm.submit(["a", "b", "c"], SHORT)
    assert error.value.code == "MRV2-406"
    waiting = llm.submit(["a", "b"], SHORT)
    with pytest.raises(QueueFullError, match="2 requests wait, and 1 more"):
        llm.submit(["c"], SHORT)

    async def stream():
        return [piece async for piece in llm.stream("c", SHORT)]

    with pytest.raises(QueueFullError):
        asyncio.run(stream())
    gate.open()
    assert len(llm.wait(running + waiting)) == 3
    assert llm.stats.generated_tokens == 9  # nothing that was refused has run
    assert llm.submit(["c"], SHORT)[0].result(timeout=60)


@pytest.mark.parametrize("with_progress", [False, True])
def test_generate_feeds_a_long_list_in_as_room_appears(make, with_progress):
    llm, _ = make(max_queue=3)
    prompts = [[1 + i % 200, 2, 3] for i in range(40)]
    want = [r.outputs[0].token_ids for i in range(0, 40, 4) for r in llm.generate(prompts[i : i + 4][:3], SHORT)]
    scheduler, most = llm._driver._engine.scheduler, [0]
    plan = scheduler.plan

    def watched():
        most[0] = max(most[0], scheduler.num_waiting)
        return plan()

    scheduler.plan = watched
    seen = []
    results = llm.generate(prompts, SHORT, on_done=seen.append if with_progress else None)
    got = [r.outputs[0].token_ids for r in results]
    assert [g for i, g in enumerate(got) if i % 4 < 3] == want
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert 0 < most[0] <= 3
    assert sorted(r.request_id for r in seen) == (sorted(r.request_id for r in results) if with_progress else [])


def test_several_may_feed_at_once(make):
    llm, _ = make(max_queue=1)
    want = [r.outputs[0].token_ids for r in llm.generate(["the cat", "d"] * 6, SHORT)]
    results = {}

    def work(i):
        results[i] = [r.outputs[0].token_ids for r in llm.generate(["the cat", "d"] * 6, SHORT)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == dict.fromkeys(range(4), want)


@pytest.mark.parametrize("end", ["close", "failure"])
def test_whoever_waits_for_room_is_told_of_the_end(make, end):
    llm, gate = make(max_num_seqs=1, max_queue=1)
    gate.close()
    errors = []

    def work():
        try:
            llm.generate(["the cat"] * 8, SHORT)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: llm.stats.steps and llm._driver._num_waiting() == 1)
    if end == "failure":
        llm.model.module.lm_head.forward = llm.model.module.lm_head.greedy = None
        gate.open()
    else:
        closing = threading.Thread(target=llm.close)
        closing.start()
        time.sleep(0.05)
        gate.open()
        closing.join(60)
    thread.join(60)
    assert "closed" in str(errors[0]) if end == "close" else "TypeError" in str(errors[0])


def test_an_interrupt_while_waiting_for_room_aborts_what_was_started(make, monkeypatch):
    llm, gate = make(max_num_seqs=1, max_queue=1)
    gate.pause = 0.01

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._driver._room, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cat"] * 8, LONG)
    monkeypatch.undo()
    gate.pause = 0
    until(lambda: not llm._driver._engine.has_work)
    assert llm.stats.generated_tokens < 200


@pytest.mark.parametrize("max_queue", [0, -1, 1.5, True, "3"])
def test_other_bounds_are_refused(text_model, max_queue):
    with pytest.raises(UnsupportedError, match="max_queue="):
        LLM(str(text_model), max_queue=max_queue)


def test_no_bound_takes_everything(make):
    llm, gate = make(max_queue=None, max_num_seqs=8)
    gate.close()
    futures = llm.submit([[1, 2]] * 5000, SamplingParams(max_tokens=1))
    gate.open()
    assert len(llm.wait(futures)) == 5000


def test_a_batch_file_longer_than_the_queue(make, tmp_path, capsys):
    import json

    llm, gate = make(max_num_seqs=1, max_queue=2)
    gate.pause = 0.002
    lines = [{"id": i, "prompt": [1, 2, i], "max_tokens": 4, "ignore_eos": True} for i in range(12)]
    lines[3] |= {"max_tokens": 100, "timeout": 0.05}
    lines[5] |= {"timeout": -2}
    lines[6] |= {"timeout": None}
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    jobs = jobs_from_file(file, Defaults(params=SamplingParams(temperature=0), timeout=100))
    assert run_batch(llm, jobs, None, single=False) == 2
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["id"] for r in records] == list(range(12))
    assert records[5]["error"]["code"] == "MRV2-401"
    assert "timeout=-2" in records[5]["error"]["what"]
    reasons = [r["outputs"][0]["finish_reason"] for r in records if "outputs" in r]
    assert reasons == ["length"] * 3 + ["timeout"] + ["length"] * 7
    assert "1 timed out" in err
