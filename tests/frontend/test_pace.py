"""Tokens that rest: what waits for the end of a rest, what doesn't, and streams at a slow pace."""

import asyncio
import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mrv2 import LLM, SamplingParams
from mrv2.errors import EngineError, OutputError
from mrv2.frontend import output_processor
from mrv2.frontend.output_processor import OutputProcessor
from mrv2.frontend.ticket import ResultFuture, Ticket
from mrv2.runner.outputs import LogprobsOutput, StepEvents
from mrv2.runner.request import FinishReason
from mrv2.testing.byte_tokenizer import ByteTokenizer
from mrv2.testing.null_model import null_engine

# -- rests ---------------------------------------------------------------------------------------------


class Rig:
    """An output processor, fed by hand; its own courier."""

    def __init__(self):
        self.intake = null_engine(max_num_seqs=2, max_model_len=64).intake
        self.stopped, self.dropped, self.rung = [], [], 0
        self.outputs = OutputProcessor(
            ByteTokenizer(unreadable=255), stop_request=self.stopped.append, drop_request=self.dropped.append
        )

    def ring(self):
        self.rung += 1

    def take_cost(self):
        return 0.0

    def open(self, *, stream=True, **params):
        params = SamplingParams(max_tokens=50, **params)
        request = self.intake.request(str(id(params)), [1], params, watched=stream)
        queue = SimpleNamespace(courier=self, items=[])
        queue.post = queue.items.append
        ticket = Ticket(
            request=request, prompt=None, future=ResultFuture(request.req_id), pieces=queue if stream else None
        )
        self.outputs.open(ticket)
        return ticket

    def step(self, tokens, ended=(), logprobs=None):
        numbers = [ticket.request.number for ticket in tokens]
        for ticket, token in tokens.items():
            ticket.request.tokens_np = np.append(ticket.request.tokens_np, np.int32(token))
        for ticket in ended:
            ticket.request.finish_reason = FinishReason.LENGTH
        self.outputs.process(
            [
                StepEvents(
                    numbers_np=np.array(numbers, np.int64),
                    tokens_np=np.array(list(tokens.values()), np.int64),
                    logprobs=logprobs,
                    ended=tuple(ticket.request for ticket in ended),
                )
            ]
        )

    def rest(self):
        self.outputs.rest_until = time.monotonic() + 60

    def go_on(self):
        self.outputs.rest_until = 0.0


def texts(ticket):
    return [p.text for p in ticket.pieces.items]


def test_tokens_wait_for_the_end_of_a_rest_and_come_as_one_piece():
    rig = Rig()
    a, b = rig.open(), rig.open()
    rig.step({a: 65, b: 97})
    assert (texts(a), texts(b), rig.rung) == (["A"], ["a"], 1)
    assert rig.outputs.rest_until > time.monotonic() - 1
    rig.rest()
    rig.step({a: 66, b: 98})
    rig.step({a: 67})
    assert rig.outputs.waiting
    assert texts(a) == ["A"]
    rig.go_on()
    rig.step({a: 68, b: 99})
    assert not rig.outputs.waiting
    assert (texts(a), texts(b), rig.rung) == (["A", "BCD"], ["a", "bc"], 2)
    assert a.pieces.items[1].token_ids == (66, 67, 68)


def test_an_end_does_not_wait_and_keeps_the_others_waiting():
    rig = Rig()
    a, b, new = rig.open(), rig.open(), rig.open()
    rig.step({a: 65, b: 97})
    rig.rest()
    rig.step({a: 66, b: 98, new: 48})
    rig.step({a: 67}, ended=[a])
    assert texts(a) == ["A", "BC", ""]
    assert a.future.result().outputs[0].text == "ABC"
    assert texts(b) == ["a"]
    assert texts(new) == ["0"]  # a first piece goes along
    rig.step({b: 99, new: 49})
    rig.outputs.process([b.request])  # from outside
    assert texts(b)[:2] == ["a", "bc"]
    assert texts(new) == ["0"]


def test_unwatched_requests_cause_no_rest():
    rig = Rig()
    a = rig.open(stream=False)
    a.request.tokens_np = np.array([1, 65, 66], np.int32)
    rig.step({}, ended=[a])
    assert a.future.result().outputs[0].text == "AB"
    assert rig.outputs.rest_until == 0.0


def test_a_stop_string_within_a_piece_ends_it_there():
    rig = Rig()
    a, b = rig.open(stop=("CD",)), rig.open(stream=False, stop=("b", "x"))
    rig.rest()
    for tokens in ((65, 97), (66, 98), (67, 99), (68, 100), (69, 101)):
        rig.step(dict(zip((a, b), tokens, strict=True)))
    assert not rig.stopped
    rig.go_on()
    rig.step({a: 70, b: 102})
    assert rig.stopped == [a.request.req_id, b.request.req_id]
    assert texts(a) == ["AB"]
    assert a.pieces.items[0].token_ids == (65, 66, 67, 68)
    rig.step({a: 71, b: 103})  # the engine doesn't know yet
    rig.step({}, ended=[a, b])
    for ticket, text, ids in ((a, "AB", (65, 66, 67, 68)), (b, "a", (97, 98))):
        out = ticket.future.result().outputs[0]
        assert (out.text, out.token_ids, out.finish_reason) == (text, ids, "stop")
    assert texts(a) == ["AB", ""]


def test_a_token_that_cannot_be_decoded_loses_its_request_only():
    rig = Rig()
    tickets = [rig.open() for _ in range(3)]
    rig.rest()
    for tokens in ((65, 97, 48), (66, 255, 49)):
        rig.step(dict(zip(tickets, tokens, strict=True)))
    rig.go_on()
    rig.step(dict(zip(tickets, (67, 99, 50), strict=True)))
    assert [texts(t) for t in tickets] == [["ABC"], [], ["012"]]
    assert rig.dropped == [tickets[1].request.req_id]
    with pytest.raises(OutputError, match="255"):
        tickets[1].future.result(timeout=0)


def test_logprobs_come_in_order_though_their_tokens_wait():
    rig = Rig()
    a, b = rig.open(logprobs=1), rig.open()
    rig.rest()
    for n in range(4):
        logprobs = LogprobsOutput(
            token_ids_np=np.array([[65 + n, 5], [97 + n, 6]]),
            logprobs_np=np.array([[-n, -0.5], [-9, -9]], np.float32),
            ranks_np=np.array([n + 1, 1]),
        )
        rig.step({a: 65 + n, b: 97 + n}, ended=[a] if n == 3 else (), logprobs=logprobs)
    got = a.future.result().outputs[0].logprobs
    assert [(p.token_id, p.logprob, p.rank) for p in got] == [(65 + n, -n, n + 1) for n in range(4)]
    assert got[0].top == ((5, -0.5),)
    assert not b.logprobs


# -- the whole -----------------------------------------------------------------------------------------


@pytest.fixture
def slow_pace(monkeypatch):
    """As with hundreds of streams: pieces of many tokens."""
    monkeypatch.setattr(output_processor, "SHARE", 1e-9)
    monkeypatch.setattr(output_processor, "MAX_REST", 0.05)


def test_streams_at_a_slow_pace(text_model, slow_pace):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = ["the cat", "grüße", "猫が", "d"]

    async def collect(prompt):
        return [p async for p in llm.stream(prompt, params)]

    async def everything():
        return await asyncio.gather(*map(collect, prompts))

    with LLM(str(text_model), max_num_seqs=8) as llm:
        want = llm.generate(prompts, params)
        for pieces, result in zip(asyncio.run(everything()), want, strict=True):
            assert len(pieces) < 40
            assert "".join(p.text for p in pieces) == result.outputs[0].text == pieces[-1].finished.outputs[0].text
            assert tuple(t for p in pieces for t in p.token_ids) == result.outputs[0].token_ids
        text = want[0].outputs[0].text
        at = next(i for i in range(3, len(text)) if text[i : i + 2].isascii() and text[:i].count(text[i]) == 0)
        out = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=60, stop=text[at : at + 2]))[0]
        assert out.outputs[0].text == text[:at]
        ids = out.outputs[0].token_ids
        assert ids == want[0].outputs[0].token_ids[: len(ids)]
        assert text[at : at + 2] not in llm.model.tokenizer.decode(ids[:-1])


def test_a_stream_hears_of_the_end_at_a_slow_pace(text_model, slow_pace):
    llm = LLM(str(text_model))

    async def main():
        async for _ in llm.stream("d", SamplingParams(max_tokens=120, ignore_eos=True)):
            threading.Thread(target=llm.close).start()

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(main())


def test_a_loop_is_not_kept_alive(text_model):
    async def main():
        return [p async for p in llm.stream("d", SamplingParams(max_tokens=3, ignore_eos=True))]

    with LLM(str(text_model)) as llm:
        for _ in range(3):
            asyncio.run(main())
        gc.collect()
        assert len(llm._couriers) <= 1  # the output thread may still know the last
